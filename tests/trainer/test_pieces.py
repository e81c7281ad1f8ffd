"""Samples of several pieces: each sampled token is trained once, with its piece's context and its sample's weight."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import packed_rows

from podrl.algorithms.policy_loss import LossSettings, PolicyLoss
from podrl.algorithms.policy_rows import PolicyRows
from podrl.mesh.build import make_mesh
from podrl.mesh.rules import batch_shards
from podrl.models import decoder
from podrl.models.config import GLOBAL_WINDOW
from podrl.models.prefix_attention import _bounds, needed_blocks
from podrl.trainer import state as state_lib
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.packing import place, place_samples
from podrl.types import NO_EPISODE, Layout, Prompts, Rollouts, blank_columns

SAME = 2e-6 if np.dtype(np.float32).itemsize == 4 else 1e-12
PROMPT = 3


def made(pieces, *, group_size=2, vocabulary=40, seed=0):
    """Draws samples, each a list of pieces (given tokens, sampled tokens[, fork]); a group has one prompt.

    The given tokens of a sample's first piece are the PROMPT tokens of its prompt. A piece with a fork begins like an
    earlier piece of its group; `fork` is (how many pieces earlier, number of equal tokens).
    """
    rng = np.random.default_rng(seed)
    B, P = len(pieces), -(-len(pieces) // group_size)
    length_B = np.array([sum(given + sampled for given, sampled, *_ in sample) for sample in pieces], np.int32)
    T = int(length_B.max())
    group_B = np.arange(B, dtype=np.int32) // group_size
    prompt_PT = rng.integers(0, vocabulary, (P, PROMPT)).astype(np.int32)
    columns = blank_columns((B, T), pad_id=0)
    columns["tokens_BT"][:] = rng.integers(0, vocabulary, (B, T))
    mask_BT, earlier = np.zeros((B, T), np.float32), [[] for _ in range(P)]
    for b, sample in enumerate(pieces):
        columns["tokens_BT"][b, :PROMPT] = prompt_PT[group_B[b]]
        at = 0
        for k, (given_, sampled, *fork) in enumerate(sample):
            if fork and fork[0][0] <= len(earlier[group_B[b]]):
                of, from_, size = earlier[group_B[b]][-fork[0][0]]
                same = min(fork[0][1], size, given_)
                columns["tokens_BT"][b, at : at + same] = columns["tokens_BT"][of, from_ : from_ + same]
            earlier[group_B[b]].append((b, at, given_ + sampled))
            columns["piece_BT"][b, at : at + given_ + sampled] = k
            mask_BT[b, at + given_ : at + given_ + sampled] = 1
            at += given_ + sampled
    prompts = Prompts(prompt_PT, np.full(P, PROMPT), np.arange(P), ["p"] * P, {}, b"")
    return Rollouts(
        prompts=prompts,
        group_B=group_B,
        length_B=length_B,
        mask_BT=mask_BT,
        turn_reward_BT=np.zeros((B, T), np.float32),
        stop_B=np.zeros(B, np.int32),
        completions=["c"] * B,
        episodes=[NO_EPISODE] * B,
        seconds=1.0,
        **columns,
    )


drawn_pieces = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.lists(
            st.tuples(st.integers(1, 6), st.integers(0, 6), st.tuples(st.integers(1, 6), st.integers(1, 9))),
            min_size=0,
            max_size=4,
        ),
    ).map(lambda drawn: [(PROMPT, drawn[0]), *drawn[1]]),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, derandomize=True)
@given(drawn_pieces, st.sampled_from([60, 80, 128]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 2))
def test_each_sampled_token_lies_in_the_packed_rows_once(pieces, row, shards, whole, levels):
    """A token sees the earlier tokens of its piece, at their positions in the piece, and no other token."""
    rollouts = made(pieces)
    B, T = rollouts.tokens_BT.shape
    shape = PackShape.for_worst_case(B, 60, max_tokens_per_row=row, rows_per_micro_batch=2, shards=shards)
    shape = dataclasses.replace(shape, shared=levels == 1, whole=whole, tree=levels == 2)
    placement = place_samples(rollouts, np.arange(B), shape)
    layout = placement.layout(rollouts.tokens_BT)
    number_BT = np.arange(1, B * T + 1).reshape(B, T)
    packed = placement.scatter(number_BT, where_BT=rollouts.mask_BT)
    assert sorted(packed[packed > 0]) == sorted(number_BT[rollouts.mask_BT > 0])
    np.testing.assert_array_equal(
        np.where(rollouts.mask_BT > 0, placement.unpack(packed, T), 0), np.where(rollouts.mask_BT > 0, number_BT, 0)
    )
    of_row = lambda x_ABT: np.asarray(x_ABT).reshape(-1, row)  # noqa: E731
    last_ABT = layout.segment_BT if layout.last_BT is None else layout.last_BT
    columns = (packed, layout.tokens_BT, layout.segment_BT, layout.position_BT, last_ABT, layout.sample())
    for at_T, token_T, segment_T, position_T, last_T, sample_T in zip(*map(of_row, columns), strict=True):
        segments = np.unique(segment_T[segment_T > 0])
        np.testing.assert_array_equal(segments, np.arange(1, len(segments) + 1))
        for t in np.flatnonzero(at_T):
            b, at = divmod(at_T[t] - 1, T)
            seen = np.flatnonzero((segment_T <= segment_T[t]) & (segment_T[t] <= last_T) & (segment_T > 0))
            seen, first = seen[seen <= t], at - position_T[t]
            assert segment_T[t - 1] == segment_T[t] and rollouts.piece_BT[b, first] == rollouts.piece_BT[b, at]
            np.testing.assert_array_equal(position_T[seen], np.arange(at + 1 - first))
            np.testing.assert_array_equal(token_T[seen], rollouts.tokens_BT[b, first : at + 1])
        if layout.sample_BT is not None:
            samples = {(int(n), int(at) // T) for n, at in zip(sample_T[at_T > 0], at_T[at_T > 0] - 1, strict=True)}
            assert len({n for n, _ in samples}) == len({b for _, b in samples}) == len(samples)
    mask_ABT, length_ABT = placement.loss_tokens(rollouts.mask_BT)
    speaking = int(rollouts.mask_BT.any(axis=1).sum())
    assert (mask_ABT / length_ABT).sum() == pytest.approx(speaking, rel=1e-6)


def test_what_a_tree_of_branches_costs():
    """There are 4 branches of 512 tokens on a trunk of 2,048 tokens: each further branch repeats one token of the
    trunk, and a branch reads only the trunk and itself."""
    sampled, given_, size = 1024, 2048, 512
    branch = (given_, size, (1, given_))
    rollouts = made([[(PROMPT, 0), (sampled, sampled + size), *[branch] * 3]])
    shape = PackShape(1, 1, 4224, tree=True)
    placement = place_samples(rollouts, np.arange(1), shape)
    layout = placement.layout(rollouts.tokens_BT)
    assert placement.packed == given_ + 4 * size + 3
    bounds = [jnp.asarray(x[0]) for x in (layout.segment_BT, layout.last_BT, layout.position_BT)]
    n = -(-4224 // 512)
    needed = needed_blocks(_bounds(*bounds, n * 512 - 4224), jnp.int32(GLOBAL_WINDOW), 512)
    pairs = given_**2 / 2 + 4 * (size * given_ + size**2 / 2)
    assert float(needed.sum()) * 512**2 < 1.5 * pairs  # blocks count whole, and branches begin inside blocks
    apart = place_samples(rollouts, np.arange(1), PackShape(1, 4, 2560))
    assert apart.packed == 4 * (given_ + size)


def test_pieces_of_a_group_share_what_they_begin_with():
    """Worked by hand: two samples share a system prompt of 6 tokens. One branch begins after an answer, one inside the
    answer."""
    system = (6, 3, (4, 6))
    rollouts = made([[(PROMPT, 0), (6, 4), (12, 2, (1, 10)), (9, 2, (2, 8))], [(PROMPT, 0), system]])
    placement = place_samples(rollouts, np.arange(2), PackShape(1, 1, 64, tree=True))
    np.testing.assert_array_equal(placement.pieces.length_B, [10, 14, 11, 9])
    np.testing.assert_array_equal(placement.parent_B, [-1, 0, 0, 0])
    # The token before the first sampled token is not shared.
    np.testing.assert_array_equal(placement.shared_B, [0, 10, 8, 5])
    np.testing.assert_array_equal(placement.segment_B, [1, 2, 3, 4])
    assert placement.packed == 10 + 4 + 3 + 4
    alone = place_samples(rollouts, np.arange(2), PackShape(1, 1, 64))
    assert alone.packed == 44 and alone.layout(rollouts.tokens_BT).last_BT is None


def test_a_row_holds_the_longest_piece_and_not_the_sum():
    """Pieces of at most 14 tokens lie in rows of 16, although a sample has 44. A loss over whole samples is refused,
    and the error names the 44 tokens."""
    rollouts = made([[(PROMPT, 5), (8, 6), (8, 6), (4, 4)]] * 2)
    placement = place_samples(rollouts, np.arange(2), PackShape(4, 2, 16))
    assert placement.packed == 2 * 44 and len(placement.row_B) == 8
    with pytest.raises(ValueError, match=r"Sample 0 has 44 tokens in 4 pieces but a packed row holds 16.*per_row"):
        place_samples(rollouts, np.arange(2), PackShape(4, 2, 16, whole=True))
    with pytest.raises(ValueError, match="8 sequences fill 6 rows of 16"):
        place_samples(rollouts, np.arange(2), PackShape(1, 2, 16))


def test_samples_of_one_piece_are_placed_as_before():
    lengths = [[(PROMPT, n)] for n in (5, 1, 9, 0, 4, 7)]
    rollouts, shape = made(lengths), PackShape(2, 2, 24)
    one, other = (place_samples(rollouts, np.arange(6), s) for s in (shape, PackShape(2, 2, 24, whole=True)))
    plain = place(rollouts.length_B, shape)
    for placement in (one, other):
        assert type(placement.layout(rollouts.tokens_BT)) is Layout
        for name in ("micro_B", "row_B", "start_B", "segment_B"):
            np.testing.assert_array_equal(getattr(placement, name), getattr(plain, name))


def test_a_batch_without_pieces_has_the_arrays_of_every_other_batch():
    """With the same arrays the update is compiled once, whichever batch has the first sample of several pieces."""
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    for shared, whole, tree in itertools.product([False, True], repeat=3):
        shape = PackShape(4, 2, 48, shared=shared, whole=whole, tree=tree)
        wanted = jax.tree.structure(state_lib.abstract_batch(Layout, shape, mesh).rows)
        for rollouts in (CASE, made([[(PROMPT, 4)]] * 6)):
            layout = place_samples(rollouts, np.arange(6), shape).layout(rollouts.tokens_BT)
            assert jax.tree.structure(layout) == wanted


def test_a_piece_that_the_policy_did_not_speak_in_takes_no_room():
    rollouts = made([[(PROMPT, 0), (4, 5)], [(PROMPT, 0), (4, 0)]])
    placement = place_samples(rollouts, np.arange(2), PackShape(1, 1, 16))
    assert placement.packed == 9 + PROMPT  # a sample without sampled tokens has its prompt packed


# Samples with branches of the first piece, of a branch and of another sample's piece, and with pieces that begin anew.
CASE = made(
    [
        [(PROMPT, 4)],
        [(PROMPT, 2), (5, 3), (2, 6)],
        [(PROMPT, 0), (4, 6)],
        [(PROMPT, 5), (9, 2, (1, 8)), (5, 2, (3, 3))],
        [(PROMPT, 7)],
        [(PROMPT, 1), (6, 3), (8, 3, (1, 7)), (6, 1, (1, 2))],
    ]
)
LOSSES = {
    "token": LossSettings(loss_agg_mode="token-mean"),
    "sequence": LossSettings(loss_agg_mode="sequence-mean-token-mean"),
    "gspo": LossSettings(policy_loss_fn="gspo", loss_agg_mode="sequence-mean-token-mean", epsilon=0.9),
    "gmpo": LossSettings(policy_loss_fn="gmpo", loss_agg_mode="sequence-mean-token-mean", epsilon=0.9),
    "sequence_tis": LossSettings(sampler_correction="sequence_tis"),
    "sequence_mask": LossSettings(sampler_correction="sequence_mask", correction_high=1.05, correction_low=0.5),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("levels", [1, 2])
def test_the_update_is_that_of_separate_rows(tiny, name, levels):
    """Compares with the loss on padded samples, whose log-probabilities come from one padded row for each piece."""
    case, loss = tiny("fsdp=1"), PolicyLoss(LOSSES[name])
    rng = np.random.default_rng(1)
    B, T = CASE.tokens_BT.shape
    old_BT = (-rng.uniform(3.6, 3.8, (B, T))).astype(np.float32)
    values = {
        "advantage_BT": np.repeat(rng.normal(size=(B, 1)), T, axis=1).astype(np.float32),
        "old_logprob_BT": old_BT,
        "sampler_logprob_BT": (old_BT + rng.normal(size=(B, T)) * 0.02).astype(np.float32),
    }
    sample_X, piece_X = np.nonzero(
        np.stack([((CASE.piece_BT == k) & _real(CASE)).any(axis=1) for k in range(4)], axis=1)
    )
    in_XT = [(CASE.piece_BT[b] == k) & _real(CASE)[b] for b, k in zip(sample_X, piece_X, strict=True)]
    tokens_XT, segment_XT = np.zeros((len(in_XT), T), np.int64), np.zeros((len(in_XT), T), np.int32)
    for x, (b, in_T) in enumerate(zip(sample_X, in_XT, strict=True)):
        tokens_XT[x, : in_T.sum()], segment_XT[x, : in_T.sum()] = CASE.tokens_BT[b, in_T], 1
    count_B1 = CASE.mask_BT.sum(axis=1, keepdims=True)
    real_BT = _real(CASE).astype(np.int32)
    rows = PolicyRows(
        layout=Layout(jnp.asarray(CASE.tokens_BT), jnp.asarray(real_BT), jnp.zeros((B, T), jnp.int32)),
        mask_BT=jnp.asarray(CASE.mask_BT),
        length_BT=jnp.asarray(np.where(real_BT, count_B1, 1).astype(np.float32)),
        kl_scale=1.0,
        **{key: jnp.asarray(x) for key, x in values.items()},
    )

    def naive(params):
        hidden_XTD = decoder.hidden(
            params, tokens_XT, segment_XT, jnp.tile(jnp.arange(T), (len(in_XT), 1)), case.config
        )
        logp_XTV = jax.nn.log_softmax(decoder.unembed(params, hidden_XTD, case.config))
        next_XT = jnp.take_along_axis(logp_XTV[:, :-1], jnp.asarray(tokens_XT)[:, 1:, None], axis=-1)[..., 0]
        logprob_BT = jnp.zeros((B, T), next_XT.dtype)
        for x, (b, in_T) in enumerate(zip(sample_X, in_XT, strict=True)):
            place_X = np.flatnonzero(in_T)
            logprob_BT = logprob_BT.at[b, place_X[1:]].set(next_XT[x, : len(place_X) - 1])
        found, _ = loss(logprob_BT, jnp.zeros_like(logprob_BT), rows)
        return found.mean()

    expected = jax.tree.map(np.asarray, jax.jit(jax.grad(naive))(case.params()))
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected)) > 1e-2
    shape = PackShape.for_worst_case(
        B, T, max_tokens_per_row=32, rows_per_micro_batch=2, shards=batch_shards(case.mesh)
    )
    shape = dataclasses.replace(shape, shared=not loss.by_sample, whole=loss.by_sample, tree=levels == 2)
    placement = place_samples(CASE, np.arange(B), shape)
    batch = packed_rows(PolicyRows, placement, tokens_BT=CASE.tokens_BT, mask_BT=CASE.mask_BT, **values)
    before = jax.tree.map(np.asarray, case.state()[0].params)
    state, _ = case.step(loss)(*case.state(), state_lib.put_batch(batch, case.mesh))
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    for x, y in zip(jax.tree.leaves(change), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=SAME, atol=SAME)


def test_random_trees_have_the_gradient_of_separate_pieces(tiny):
    """Trees of several levels lie in rows that hold only parts of them; windows of 6 tokens span the forks."""
    case, rng, saved = tiny(), np.random.default_rng(5), 0
    step = case.step(PolicyLoss(LOSSES["token"]))
    before = jax.tree.map(np.asarray, case.state()[0].params)
    fork = lambda: (int(rng.integers(1, 5)), int(rng.integers(1, 14)))  # noqa: E731
    piece = lambda: (int(rng.integers(3, 14)), int(rng.integers(1, 6)), fork())  # noqa: E731
    for seed in range(6):
        rollouts = made([[(PROMPT, 4), *[piece() for _ in range(rng.integers(1, 5))]] for _ in range(4)], seed=seed)
        B, T = rollouts.tokens_BT.shape
        values = {
            "advantage_BT": np.repeat(rng.normal(size=(B, 1)), T, axis=1).astype(np.float32),
            "old_logprob_BT": (-rng.uniform(3.6, 3.8, (B, T))).astype(np.float32),
            "sampler_logprob_BT": (-rng.uniform(3.6, 3.8, (B, T))).astype(np.float32),
        }
        found = []
        for tree in (False, True):
            placement = place_samples(rollouts, np.arange(B), PackShape(4, 2, 48, tree=tree))
            batch = packed_rows(PolicyRows, placement, tokens_BT=rollouts.tokens_BT, mask_BT=rollouts.mask_BT, **values)
            state, _ = step(*case.state(), state_lib.put_batch(batch, case.mesh))
            found.append(jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params))
        saved += placement.apart - placement.packed
        for x, y in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(x, y, rtol=SAME, atol=SAME)
    assert saved > 100


def _real(rollouts):
    return np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[:, None]
