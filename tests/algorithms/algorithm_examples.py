"""One small batch of sequences in two layouts, for the property tests of the losses."""

import dataclasses

import jax.numpy as jnp
import numpy as np

# Four sequences as (prompt tokens, loss tokens); the second has a tool token in the middle, the last is all prompt.
SEQUENCES = ((2, 4), (1, 3), (1, 2), (3, 0))
ROWS, WIDTH = 4, 12
NAMES = (
    "logprob",
    "old_logprob",
    "ref_logprob",
    "sampler_logprob",
    "advantage",
    "entropy",
    "mask",
    "length",
    "segment",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each token of the batch stands: row, column and segment number."""

    row: np.ndarray
    column: np.ndarray
    segment: np.ndarray


def sequences(seed=0, constant_advantage=True):
    """Per-token arrays of the whole batch in one line of tokens, ready to be laid out."""
    rng = np.random.default_rng(seed)
    mask, length, owner = [], [], []
    for index, (prompt, loss) in enumerate(SEQUENCES):
        flags = [0] * prompt + [1] * loss
        if index == 1:
            flags[2] = 0  # tool output between sampled tokens
        mask += flags
        length += [max(sum(flags), 1)] * len(flags)
        owner += [index] * len(flags)
    tokens = len(mask)
    logprob = -rng.uniform(0.2, 3.0, tokens)
    per_sequence = np.array([1.3, -0.7, 0.4, 2.0])
    advantage = per_sequence[owner] if constant_advantage else rng.normal(size=tokens)
    return {
        "logprob": logprob,
        "old_logprob": logprob + rng.normal(scale=0.3, size=tokens),
        "ref_logprob": logprob + rng.normal(scale=0.5, size=tokens),
        "sampler_logprob": logprob + rng.normal(scale=0.3, size=tokens),
        "advantage": advantage,
        "entropy": rng.uniform(0.1, 2.0, tokens),
        "mask": np.array(mask, float),
        "length": np.array(length, float),
        "owner": np.array(owner),
    }


def padded_layout(owner):
    """One sequence per row."""
    column = np.concatenate([np.arange((owner == index).sum()) for index in range(len(SEQUENCES))])
    return Layout(owner, column, np.ones_like(owner))


def packed_layout(owner):
    """Sequences 2 and 0 in the last row, 3 and 1 in the second, the other rows empty."""
    placement = {2: (3, 1), 0: (3, 2), 3: (1, 1), 1: (1, 2)}
    row, column, segment = (np.zeros_like(owner) for _ in range(3))
    used = np.zeros(ROWS, int)
    for index, (to_row, number) in placement.items():
        here = owner == index
        row[here], segment[here] = to_row, number
        column[here] = used[to_row] + np.arange(here.sum())
        used[to_row] += here.sum()
    return Layout(row, column, segment)


def lay_out(tokens, layout, junk=0.0):
    """The arguments of PolicyLoss in a layout; `junk` fills every entry that must not matter."""
    out = []
    for name in NAMES[:-1]:
        fill = {"mask": 0.0, "length": 1.0}.get(name, junk)
        x_BT = np.full((ROWS, WIDTH), fill)
        x_BT[layout.row, layout.column] = tokens[name]
        if name not in ("mask", "length"):
            keep = tokens["mask"] > 0
            x_BT[layout.row[~keep], layout.column[~keep]] = junk
        out.append(jnp.asarray(x_BT))
    segment_BT = np.zeros((ROWS, WIDTH), np.int32)
    segment_BT[layout.row, layout.column] = layout.segment
    return (*out, jnp.asarray(segment_BT))
