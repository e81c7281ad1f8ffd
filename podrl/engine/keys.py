"""Random numbers that depend only on a sample's identity and a position (Threefry-2x32, 20 rounds).

The same code runs in numpy (a sample's key, on the host) and in jax (a position's numbers, on the device). Source:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key0: Any, key1: Any, count0: Any, count1: Any) -> tuple[Any, Any]:
    """Computes two uint32 words from a key and a counter, elementwise.

    Args:
      key0, key1: words of the key, numpy or jax arrays of dtype uint32.
      count0, count1: words of the counter, of the same kind.

    Returns:
      The two words.
    """
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def sample_keys(seed: int, step: int, prompt_B: np.ndarray, sample_B: np.ndarray) -> np.ndarray:
    """Derives the random keys of samples from (seed, step, prompt index, sample index).

    Args:
      seed: random seed of the job.
      step: training step.
      prompt_B: position of each sample's prompt in the data.
      sample_B: index of each sample in its group; broadcast against `prompt_B`.

    Returns:
      A key per sample, uint32 (B, 2).
    """

    def words(value: Any) -> tuple[np.ndarray, np.ndarray]:
        wide = np.atleast_1d(np.asarray(value, np.int64)).view(np.uint64)
        return (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)

    key0, key1 = words(seed)
    for value in (step, prompt_B, sample_B):
        low, high = words(value)
        key0, key1 = threefry(key0, key1, low, high)
    return np.stack(np.broadcast_arrays(key0, key1), axis=-1)
