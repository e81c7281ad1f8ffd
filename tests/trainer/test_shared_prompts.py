"""Samples that share their prompt's tokens in a row have the same loss, gradient and scores as without sharing."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import packed_rows

from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.policy_rows import ReferencedRows
from podrl.algorithms.value_loss import CriticRows, value_loss
from podrl.mesh.rules import batch_shards
from podrl.models import scalar
from podrl.trainer import state as state_lib
from podrl.trainer.critic import make_critic_step
from podrl.trainer.optimizer import Optimizer
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.packing import SharedPrefixes, place
from podrl.trainer.step import make_logprob_fn

SAME = 2e-6 if np.dtype(np.float32).itemsize == 4 else 1e-12


def groups(prompts, completions, vocabulary=40, seed=0):
    """Draws a group for each prompt length, with completions of the given lengths.

    Returns:
      (lengths, shared prefixes, arrays in the sample layout).
    """
    rng = np.random.default_rng(seed)
    length_P = np.array(prompts)
    prompt_B = np.repeat(length_P, [len(c) for c in completions])
    length_B = prompt_B + np.concatenate([np.array(c, np.int64) for c in completions])
    B, T = len(length_B), int(length_B.max())
    group_B = np.repeat(np.arange(len(prompts)), [len(c) for c in completions])
    tokens_BT = rng.integers(0, vocabulary, (B, T))
    for b, g in enumerate(group_B):
        first = int(np.flatnonzero(group_B == g)[0])
        tokens_BT[b, : length_P[g]] = tokens_BT[first, : length_P[g]]
    place_T = np.arange(T)
    mask_BT = (place_T >= prompt_B[:, None]) & (place_T < length_B[:, None])
    mask_BT[:, 12:13] = False  # a token that came from a tool
    samples = {
        "tokens_BT": tokens_BT,
        "mask_BT": mask_BT,
        "advantage_BT": np.repeat(rng.normal(size=(B, 1)), T, axis=1).astype(np.float32),
        **{
            name: -rng.uniform(2, 5, (B, T)).astype(np.float32)
            for name in ("old_logprob_BT", "ref_logprob_BT", "sampler_logprob_BT")
        },
    }
    return length_B, SharedPrefixes(group_B, np.maximum(prompt_B - 1, 0)), samples


@settings(max_examples=80, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.lists(st.integers(0, 16), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    st.sampled_from([30, 37, 64, 200]),
    st.sampled_from([1, 2]),
)
def test_every_token_is_packed_and_comes_back(drawn, row, shards):
    prompts, completions = zip(*drawn, strict=True)
    length_B, alike, samples = groups(prompts, completions)
    shape = PackShape.for_worst_case(
        len(length_B), 30, max_tokens_per_row=row, rows_per_micro_batch=4, shards=shards, shared=True
    )
    placement = place(length_B, shape, alike)
    rows = packed_rows(ReferencedRows, placement, **samples).rows
    layout, width = rows.layout, samples["tokens_BT"].shape[1]
    used = int((layout.segment_BT > 0).sum())
    assert used == placement.packed <= length_B.sum()
    alone = place(length_B, PackShape(shape.micro_batches, shape.rows, row, shards))
    assert alone.packed == length_B.sum()
    real_BT = np.arange(width) < length_B[:, None]
    for packed_BT, kept_BT, name in (
        (layout.tokens_BT, real_BT, "tokens_BT"),
        (rows.old_logprob_BT, samples["mask_BT"], "old_logprob_BT"),
    ):
        np.testing.assert_array_equal(placement.unpack(packed_BT, width), np.where(kept_BT, samples[name], 0))
    position_BT = placement.unpack(layout.position_BT, width)
    np.testing.assert_array_equal(position_BT, np.where(real_BT, np.arange(width), 0))
    assert rows.mask_BT.sum() == samples["mask_BT"].sum()
    # A segment that others see comes earlier in the row, and sees no other segment itself.
    for segment_T, last_T in zip(*(x.reshape(-1, row) for x in (layout.segment_BT, layout.last_BT)), strict=True):
        for segment in np.unique(segment_T[segment_T > 0]):
            (last,) = set(last_T[segment_T == segment])
            if last > segment:
                inside = (segment_T > segment) & (segment_T <= last)
                assert np.flatnonzero(segment_T == segment).max() < np.flatnonzero(inside).min()
                assert (last_T[inside] == segment_T[inside]).all()


def test_a_group_is_split_where_that_saves_more_padding_than_its_prompt_costs():
    """By hand: a group has 4 + 4 x 5 = 24 tokens. Two groups fit into two rows of 40 if one prompt is packed twice."""
    length_B, alike, samples = groups([5, 5], [[4] * 4, [4] * 4])
    placement = place(length_B, PackShape(1, 3, 40, shared=True), alike)
    assert placement.micro_batches == 1
    assert placement.packed == 2 * 24 + 4
    assert len(np.unique(placement.row_B)) == 2
    # Each row has 4 places left: too few for a prompt and a sample.
    whole = place(length_B, PackShape(1, 3, 28, shared=True), alike)
    assert whole.packed == 2 * 24
    layout = whole.layout(samples["tokens_BT"])
    assert layout.last_BT.max() == 5 and set(layout.segment_BT[layout.last_BT > layout.segment_BT]) == {1}


def test_nothing_is_shared_where_that_needs_more_rows():
    """Without sharing, two rows are filled by 10 + 6 tokens each. Sharing puts the two samples of 6 tokens into one
    row, so each sample of 10 tokens needs a row of its own."""
    length_B, alike, samples = groups([2, 5], [[8, 8], [1, 1]])
    sharing = place(length_B, PackShape(1, 3, 16, shared=True), alike)
    assert len(np.unique(sharing.row_B)) == 3 and sharing.packed == 10 + 10 + 4 + 2 + 2
    alone = place(length_B, PackShape(1, 2, 16, shared=True), alike)
    assert len(np.unique(alone.row_B)) == 2 and alone.packed == 32
    assert not alone.shared_B.any() and (alone.parent_B == -1).all()
    np.testing.assert_array_equal(*(getattr(alone.layout(samples["tokens_BT"]), x) for x in ("last_BT", "segment_BT")))


def test_a_loss_on_a_shared_token_is_refused():
    length_B, alike, samples = groups([5], [[4, 4]])
    samples["mask_BT"][1, 3] = True
    with pytest.raises(ValueError, match="Token 3 of sequence 1 counts in the loss and is shared"):
        packed_rows(ReferencedRows, place(length_B, PackShape(1, 1, 40, shared=True), alike), **samples)


def test_samples_that_do_not_begin_alike_are_refused():
    length_B, alike, samples = groups([5, 3], [[4, 4], [4, 4]])
    samples["tokens_BT"][1, 2] += 1
    message = r"at 2, where another sequence of its group has .* trainer.share_prompts=False"
    with pytest.raises(ValueError, match=message):
        packed_rows(ReferencedRows, place(length_B, PackShape(1, 1, 40, shared=True), alike), **samples)
    shared = SharedPrefixes.of_prompts(np.array([5, 3]), np.array([0, 0, 1, 0]))
    np.testing.assert_array_equal(shared.length_B, [4, 4, 2, 4])


# Two prompts are longer than the window of 6, one has one token, and one has a single sample; one completion is empty.
CASE = groups([9, 1, 11, 4], [[5, 8, 2, 10], [6, 3], [7], [12, 0, 4]])


def batches(case, row, rows):
    """Packs the same samples without and with sharing."""
    length_B, alike, samples = CASE
    shards = batch_shards(case.mesh)
    for shared in (False, True):
        shape = PackShape.for_worst_case(
            len(length_B), 20, max_tokens_per_row=row, rows_per_micro_batch=rows, shards=shards, shared=shared
        )
        placement = place(length_B, shape, alike)
        yield placement, state_lib.put_batch(packed_rows(ReferencedRows, placement, **samples), case.mesh)


@pytest.mark.parametrize(
    ("row", "spec", "lora"),
    [
        (24, "fsdp=1", 0),
        (64, "fsdp=2,tensor=2", 2),
        (32, "fsdp=2,seq=4", 0),
        # Rows of 1,100 tokens have three blocks of attention; the samples fill less than one of them.
        *(
            pytest.param(
                row, spec, lora, marks=[pytest.mark.slow, pytest.mark.nightly("podrl/trainer", "podrl/models")]
            )
            for row, spec, lora in [
                (64, "fsdp=1", 2),
                (24, "fsdp=2,tensor=2", 0),
                (1100, "fsdp=1", 0),
                (1100, "fsdp=1", 2),
            ]
        ),
    ],
)
def test_the_update_is_the_same(tiny, spec, row, lora):
    case, found = tiny(spec, lora=lora), []
    for _, batch in batches(case, row, rows=2):
        before = jax.tree.map(np.asarray, case.state()[0].params)
        state, metrics = case.step(PolicyLoss(KLLossSettings(beta=0.1, loss_agg_mode="sequence-mean-token-mean")))(
            *case.state(), batch
        )
        found.append((jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params), metrics))
    (alone, one), (sharing, other) = found
    assert other["actor/nonfinite"] == 0
    assert max(np.abs(x).max() for x in jax.tree.leaves(alone)) > 1e-2
    for x, y in zip(jax.tree.leaves(sharing), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(x, y, rtol=SAME, atol=SAME)
    assert one.keys() == other.keys()
    for name in one:
        assert float(other[name]) == pytest.approx(float(one[name]), rel=1e-4, abs=1e-5), name


def test_scores_are_the_same_and_fewer_tokens_are_computed(tiny):
    case = tiny("fsdp=2")
    params, mask_BT, width = case.params(), CASE[2]["mask_BT"], CASE[2]["tokens_BT"].shape[1]
    found, packed = [], []
    for placement, batch in batches(case, 64, rows=2):
        values_ABT = np.asarray(make_logprob_fn(case.config, case.mesh)(params, batch.layout()))
        found.append(np.where(mask_BT, placement.unpack(values_ABT, width), 0.0))
        packed.append(placement.packed)
    np.testing.assert_allclose(found[1], found[0], rtol=SAME, atol=SAME)
    assert packed[0] - packed[1] == 8 * 3 + 3 * 2  # 8 and 3 prompt tokens that 4 and 3 samples share


def test_the_critics_update_is_the_same(tiny):
    case, found = tiny(), []
    length_B, alike, samples = CASE
    values = {"value_BT": samples["old_logprob_BT"], "return_BT": samples["ref_logprob_BT"]}
    keep = {name: samples[name] for name in ("tokens_BT", "mask_BT")}
    for shared in (False, True):
        shape = PackShape.for_worst_case(
            len(length_B), 20, max_tokens_per_row=64, rows_per_micro_batch=2, shared=shared
        )
        batch = packed_rows(CriticRows, place(length_B, shape, alike), **keep, **values)
        params = scalar.on_trunk(case.params(), case.config, case.mesh, np.dtype(case.dtype))
        trainable, frozen = scalar.split_trainable(params, case.config)
        before = jax.tree.map(np.asarray, trainable)
        optimizer: Optimizer = case.optimizer
        step = make_critic_step(
            case.config,
            lambda *args: value_loss(*args, clip_range=0.3),
            optimizer,
            case.mesh,
            dtype=case.dtype,
            param_dtype=case.dtype,
        )
        state = state_lib.init_train_state(trainable, optimizer, case.mesh)
        state, _ = step(state, frozen, state_lib.put_batch(batch, case.mesh))
        found.append(jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params))
    assert max(np.abs(x).max() for x in jax.tree.leaves(found[0])) > 1e-2
    for x, y in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=SAME, atol=SAME)


def test_a_batch_that_shares_nothing_has_no_prefixes(tiny):
    (_, alone), (_, sharing) = batches(tiny(), 64, rows=2)
    assert alone.rows.layout.last_BT is None and sharing.rows.layout.last_BT is not None
    assert len(jax.tree.leaves(alone)) == len(jax.tree.leaves(sharing)) - 1
