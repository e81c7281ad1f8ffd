"""Packing: every token arrives once, nothing leaks from masked positions, rows and shards are filled evenly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import packed_rows

from podrl.algorithms.policy_rows import ReferencedRows
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.packing import mini_batches, place

VALUES = ("advantage_BT", "old_logprob_BT", "ref_logprob_BT", "sampler_logprob_BT")


def _samples(lengths, prompt=2, seed=0):
    rng = np.random.default_rng(seed)
    length_B = np.asarray(lengths)
    B, T = len(length_B), int(length_B.max())
    logprob_BT = rng.normal(size=(B, T)).astype(np.float32)
    place_T = np.arange(T)
    return length_B, {
        "tokens_BT": rng.integers(1, 100, (B, T)),
        "mask_BT": (place_T >= prompt) & (place_T < length_B[:, None]),
        "advantage_BT": np.repeat(rng.normal(size=(B, 1)), T, axis=1).astype(np.float32),
        "old_logprob_BT": logprob_BT,
        "ref_logprob_BT": logprob_BT * 2,
        "sampler_logprob_BT": logprob_BT * 3,
    }


def test_golden_placement():
    """Rows of 10 hold 7+3, 6+4 and 5; the last row is the lightest and goes to the other shard. Worked by hand."""
    placement = place(np.array([4, 7, 5, 3, 6]), PackShape(2, 2, 10, shards=2))
    assert placement.micro_batches == 2
    np.testing.assert_array_equal(placement.start_B, [6, 0, 0, 7, 0])
    np.testing.assert_array_equal(placement.segment_B, [2, 1, 1, 2, 1])
    slot_B = placement.micro_B * 2 + placement.row_B
    assert slot_B[1] == slot_B[3] and slot_B[0] == slot_B[4]
    assert len({slot_B[0], slot_B[1], slot_B[2]}) == 3
    assert placement.padding_share() == pytest.approx(1 - 25 / 40)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from([30, 37, 64]), st.sampled_from([1, 2, 4]))
def test_every_token_is_packed_once_and_comes_back(lengths, row, shards):
    length_B, samples = _samples(lengths)
    shape = PackShape.for_worst_case(len(lengths), 30, max_tokens_per_row=row, rows_per_micro_batch=4, shards=shards)
    placement = place(length_B, shape)
    batch = packed_rows(ReferencedRows, placement, **samples)
    layout, width = batch.rows.layout, samples["tokens_BT"].shape[1]
    assert shape.rows % shards == 0 and int(batch.micro_batches) == placement.micro_batches
    assert int((layout.segment_BT > 0).sum()) == length_B.sum()
    assert int((layout.segment_BT[placement.micro_batches :] > 0).sum()) == 0
    real_BT = np.arange(width) < length_B[:, None]
    np.testing.assert_array_equal(placement.unpack(layout.tokens_BT, width), np.where(real_BT, samples["tokens_BT"], 0))
    for name in VALUES:
        returned_BT = placement.unpack(getattr(batch.rows, name), width)
        np.testing.assert_array_equal(returned_BT, np.where(samples["mask_BT"], samples[name], 0))
        whole_BT = placement.unpack(placement.scatter(samples[name]), width)  # masked tokens included
        np.testing.assert_array_equal(whole_BT, np.where(real_BT, samples[name], 0))
    # Each segment has the positions 0, 1, 2 and so on of its sequence, in order.
    position_X = layout.position_BT[layout.segment_BT > 0]
    assert sorted(position_X) == sorted(np.concatenate([np.arange(n) for n in lengths]))
    starts = (layout.position_BT == 0) & (layout.segment_BT > 0)
    assert starts.sum() == len(lengths)


def test_worst_case_is_reached_and_never_exceeded():
    """Sequences just over half a row need a row each: the packer reaches the bound and never exceeds it."""
    shape = PackShape.for_worst_case(6, 11, max_tokens_per_row=20, rows_per_micro_batch=4)
    assert shape.micro_batches * shape.rows >= 6
    assert place(np.full(6, 11), shape).micro_batches == 2
    assert place(np.full(6, 10), shape).micro_batches == 1


def test_shards_get_close_token_counts():
    rng = np.random.default_rng(0)
    length_B = rng.integers(10, 90, 128)
    shape = PackShape.for_worst_case(128, 90, max_tokens_per_row=160, rows_per_micro_batch=16, shards=4)
    placement = place(length_B, shape)
    shard_B = placement.row_B // (shape.rows // 4)
    tokens = np.bincount(shard_B, length_B, minlength=4)
    assert tokens.max() < 1.1 * tokens.min()


def test_masked_values_never_reach_the_batch():
    length_B, samples = _samples([5, 9, 7])
    placement = place(length_B, PackShape(1, 2, 16))
    clean = packed_rows(ReferencedRows, placement, **samples).rows
    for junk in (np.nan, np.inf):
        dirty = {name: np.where(samples["mask_BT"], samples[name], junk) for name in VALUES}
        rows = packed_rows(ReferencedRows, placement, **(samples | dirty)).rows
        for name in VALUES:
            assert np.isfinite(getattr(rows, name)).all()
            np.testing.assert_array_equal(getattr(rows, name), getattr(clean, name))


def test_a_number_is_repeated_for_each_micro_batch():
    length_B, samples = _samples([5, 9, 7])
    rows = packed_rows(ReferencedRows, place(length_B, PackShape(3, 1, 16)), **samples, kl_scale=0.5).rows
    np.testing.assert_array_equal(rows.kl_scale, np.full(3, 0.5, np.float32))


def test_length_counts_loss_tokens():
    length_B, samples = _samples([5, 2, 7])
    rows = packed_rows(ReferencedRows, place(length_B, PackShape(1, 1, 16)), **samples).rows
    # After prompts of 2 tokens there are 3, 0 and 5 loss tokens. Tokens of the sequence without loss tokens, and of
    # padding, have length 1.
    by_row = {3: 5, 1: 2 + (16 - 14), 5: 7}
    values, counts = np.unique(rows.length_BT, return_counts=True)
    assert dict(zip(values.astype(int).tolist(), counts.tolist(), strict=True)) == by_row
    assert (rows.mask_BT / rows.length_BT).sum() == pytest.approx(2.0)


def test_errors_name_values_and_keys():
    with pytest.raises(ValueError, match=r"Sequence 1 has 17 tokens but a packed row holds 16.*max_tokens_per_row"):
        place(np.array([3, 17]), PackShape(1, 1, 16))
    with pytest.raises(ValueError, match=r"3 sequences fill 3 rows of 16 tokens but the batch has 1 x 2"):
        place(np.array([9, 9, 9]), PackShape(1, 2, 16))
    with pytest.raises(ValueError, match="Sequence 0 has 0 tokens"):
        place(np.array([0, 3]), PackShape(1, 2, 16))
    with pytest.raises(ValueError, match=r"up to 20 tokens do not fit into rows of 16.*max_tokens_per_row"):
        PackShape.for_worst_case(4, 20, max_tokens_per_row=16, rows_per_micro_batch=1)
    with pytest.raises(ValueError, match=r"10 sequences do not split into mini-batches of 4.*mini_batch_size"):
        mini_batches(range(10), 4)
    length_B, samples = _samples([5, 9])
    placement = place(length_B, PackShape(1, 1, 16))
    for pack in (placement.layout, placement.scatter, placement.loss_tokens):
        with pytest.raises(ValueError, match=r"1 rows of per-token values for 2 placed samples"):
            pack(samples["tokens_BT"][:1])


def test_mini_batches_keep_the_given_order():
    parts = mini_batches([3, 1, 0, 2], 2)
    np.testing.assert_array_equal(parts, [[3, 1], [0, 2]])
    np.testing.assert_array_equal(mini_batches([3, 1, 0, 2], None), [[3, 1, 0, 2]])
