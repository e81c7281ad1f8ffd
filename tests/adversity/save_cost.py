"""Measures how much of a save's processor time goes into its checksums.

    python tests/adversity/save_cost.py --megabytes=500 --rounds=5

Every round saves a state of float32 arrays on one device, once with checksums and once without, and waits until the
state is on disk. It measures the processor time of all threads, because other programs and the disk change wall-clock
time more.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from podrl.storage import checkpoint

_LEAVES = 20


def seconds(checkpoints: checkpoint.Checkpoints, step: int, state: dict[str, jax.Array], *, sums: bool) -> float:
    """Measures the processor time of one save, background threads included."""
    plain = mock.patch.multiple(checkpoint, tree_sums=lambda tree: {}, array_digest=lambda array: "")
    started = time.process_time()
    if sums:
        done = checkpoints.save(step, state, {}, {}) and checkpoints.wait()
    else:
        with plain:
            done = checkpoints.save(step, state, {}, {}) and checkpoints.wait()
    assert done
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape = (_LEAVES, options.megabytes * 250_000 // _LEAVES // 1000, 1000)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    state = {f"leaf_{i}": jnp.asarray(value) for i, value in enumerate(values)}
    pairs, alone = [], []
    with tempfile.TemporaryDirectory(prefix="podrl-save-") as folder:
        checkpoints = checkpoint.Checkpoints(pathlib.Path(folder, "checkpoints"), keep=1)
        seconds(checkpoints, 1, state, sums=True)  # compiles the program of the checksums
        for n in range(options.rounds):
            order = (True, False) if n % 2 else (False, True)
            took = {sums: seconds(checkpoints, 2 + 2 * n + i, state, sums=sums) for i, sums in enumerate(order)}
            pairs.append((took[True], took[False]))
            started = time.process_time()
            checkpoint.tree_sums(state)
            alone.append(time.process_time() - started)
            print(f"with checksums {took[True]:.3f} s, without checksums {took[False]:.3f} s", flush=True)  # noqa: T201
        checkpoints.close()
    with_sums, without = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"medians {with_sums:.3f} s and {without:.3f} s: {100 * (with_sums / without - 1):+.1f} %")  # noqa: T201
    share = 100 * statistics.median(alone) / without
    print(f"the checksums of the state alone {statistics.median(alone):.3f} s: {share:.1f} % of a save without")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
