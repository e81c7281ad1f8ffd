"""One small batch of sequences in two layouts, for the property tests of the losses."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import podrl.types
from podrl.algorithms.policy_loss import ReferencedRows

# Four sequences as (prompt tokens, loss tokens); the second has a tool token in the middle, the last is all prompt.
SEQUENCES = ((2, 4), (1, 3), (1, 2), (3, 0))
ROWS, WIDTH = 4, 12
# Per-token inputs of the policy loss beside its mask and lengths.
NAMES = [
    field.name.removesuffix("_BT")
    for field in dataclasses.fields(ReferencedRows)
    if field.name.endswith("_BT") and field.name not in ("mask_BT", "length_BT")
]


def policy_rows(segment_BT, mask_BT, length_BT, *, kl_scale=1.0, **given_BT):
    """Builds the rows of a policy loss; missing inputs are zeros, tokens and positions play no part."""
    blank_BT = jnp.zeros(segment_BT.shape, int)
    inputs = {f"{name}_BT": given_BT.get(name, jnp.zeros_like(mask_BT)) for name in NAMES}
    layout = podrl.types.Layout(blank_BT, segment_BT, blank_BT)
    return ReferencedRows(layout=layout, mask_BT=mask_BT, length_BT=length_BT, kl_scale=kl_scale, **inputs)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place of each token of the batch: row, column and segment number."""

    row: np.ndarray
    column: np.ndarray
    segment: np.ndarray


def sequences(seed=0, constant_advantage=True):
    """Draws per-token arrays of the whole batch in one line of tokens, ready to be laid out."""
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
    """Lays out one sequence per row."""
    column = np.concatenate([np.arange((owner == index).sum()) for index in range(len(SEQUENCES))])
    return Layout(owner, column, np.ones_like(owner))


def packed_layout(owner):
    """Lays out sequences 2 and 0 in the last row, 3 and 1 in the second; the other rows are empty."""
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
    """Builds the arguments of PolicyLoss in a layout; `junk` fills every entry that must not matter."""
    keep = tokens["mask"] > 0

    def rows(name, fill):
        x_BT = np.full((ROWS, WIDTH), fill)
        x_BT[layout.row, layout.column] = tokens[name]
        return x_BT

    given = {"mask": jnp.asarray(rows("mask", 0.0)), "length": jnp.asarray(rows("length", 1.0))}
    for name in ("logprob", "entropy", *(name for name in NAMES if name in tokens)):
        x_BT = rows(name, junk)
        x_BT[layout.row[~keep], layout.column[~keep]] = junk
        given[name] = jnp.asarray(x_BT)
    segment_BT = np.zeros((ROWS, WIDTH), np.int32)
    segment_BT[layout.row, layout.column] = layout.segment
    logprob_BT, entropy_BT, mask_BT, length_BT = (given.pop(name) for name in ("logprob", "entropy", "mask", "length"))
    return logprob_BT, entropy_BT, policy_rows(jnp.asarray(segment_BT), mask_BT, length_BT, **given)
