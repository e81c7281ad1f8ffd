"""Aggregation modes on numbers worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.aggregate import DIALECTS, MODES, aggregate, canonical_mode, token_mean
from podrl.algorithms.presets import preset
from podrl.algorithms.segments import masked, segment_sum, sequence_mean

# Two sequences packed in one row: loss tokens (3, 5) and (2, 4, 6); a prompt token before each, padding at the end.
VALUE_BT = jnp.array([[9.0, 3.0, 5.0, 9.0, 2.0, 4.0, 6.0, jnp.nan]])
MASK_BT = jnp.array([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]])
LENGTH_BT = jnp.array([[2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 1.0]])
SEGMENT_BT = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])


@pytest.mark.parametrize(
    ("mode", "total", "count"),
    [
        ("token-mean", 20.0, 5.0),
        ("sequence-mean-token-mean", 8.0, 2.0),
        ("sequence-mean-token-sum", 20.0, 2.0),
        ("sequence-mean-token-scale", 2.0, 2.0),
        ("token-sum-scale", 2.0, 0.0),
        ("seq-mean-token-mean", 8.0, 2.0),
        ("seq-mean-token-sum", 20.0, 2.0),
        ("sequence-mean-token-sum-norm", 20.0, 2.0),
    ],
)
def test_by_hand(mode, total, count):
    ratio = aggregate(VALUE_BT, MASK_BT, LENGTH_BT, mode, scale=10.0)
    assert float(ratio.total) == pytest.approx(total, rel=1e-6)
    assert float(ratio.count) == pytest.approx(count, rel=1e-6)
    assert float(ratio.mean()) == pytest.approx(total / (count or 1.0), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_count(mode):
    ratio = aggregate(VALUE_BT, jnp.zeros_like(MASK_BT), jnp.ones_like(LENGTH_BT), mode)
    assert float(ratio.mean()) == 0.0


def test_boolean_mask_is_a_mask():
    assert float(token_mean(VALUE_BT, MASK_BT > 0).mean()) == 4.0


@pytest.mark.parametrize("mode", ["mean", "seq-mean-token-sum-norm", ""])
def test_unknown_and_ambiguous_names(mode):
    with pytest.raises(ValueError, match=r"grpo\.loss_agg_mode"):
        canonical_mode(mode)


# A row of two losses and a row of one loss: N = 2, and with L = 10 the five modes give five numbers.
TWO_BT, TWO_MASK_BT = jnp.array([[3.0, 5.0], [4.0, 0.0]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
NAMES = {  # (preset, name): the loss that the framework's own code computes for the rows
    ("verl_grpo", "token-mean"): 12 / 3,
    ("verl_grpo", "seq-mean-token-mean"): (8 / 2 + 4) / 2,
    ("verl_grpo", "seq-mean-token-sum"): (8 + 4) / 2,
    ("verl_grpo", "seq-mean-token-sum-norm"): (8 + 4) / (2 * 10),
    ("trl_grpo", "grpo"): (8 / 2 + 4) / 2,
    ("trl_grpo", "bnpo"): 12 / 3,
    ("trl_grpo", "dapo"): 12 / 3,
    ("trl_grpo", "dr_grpo"): 12 / (2 * 10),
    ("tunix_grpo", "seq-mean-token-sum"): (8 + 4) / 2,
    ("tunix_grpo", "sequence-mean-token-scale"): (8 / 10 + 4 / 10) / 2,
    ("tunix_grpo", "sequence-mean-token-sum-norm"): 12 / 2,
    ("grpo", "dr_grpo"): 12 / (2 * 10),
}


@pytest.mark.parametrize(("name", "mode"), NAMES)
def test_a_preset_speaks_the_names_of_its_framework(name, mode):
    loss = preset(name).policy_loss(loss_agg_mode=mode, loss_agg_scale=10.0)
    length_BT = jnp.array([[2.0, 2.0], [1.0, 1.0]])
    ratio = aggregate(TWO_BT, TWO_MASK_BT, length_BT, loss.settings.mode, scale=10.0)
    assert float(ratio.mean()) == pytest.approx(NAMES[name, mode], rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "trl_grpo", "tunix_grpo"])
def test_a_name_with_two_meanings_is_refused_with_both(name):
    with pytest.raises(ValueError, match=r"'sequence-mean-token-scale' .verl., 'token-sum-scale' .verl until January"):
        preset(name).policy_loss(loss_agg_mode="seq-mean-token-sum-norm", loss_agg_scale=10.0)


def test_no_framework_renames_a_mode_of_podrl():
    assert not {name for names in DIALECTS.values() for name in names} & set(MODES)
    assert all(meaning in MODES for names in DIALECTS.values() for meaning in names.values())


def test_segment_helpers():
    x_BT = masked(VALUE_BT, MASK_BT)
    np.testing.assert_array_equal(segment_sum(x_BT, SEGMENT_BT), [[8, 8, 8, 12, 12, 12, 12, 0]])
    mean_BT = sequence_mean(VALUE_BT, MASK_BT, LENGTH_BT, SEGMENT_BT)
    np.testing.assert_array_equal(mean_BT, [[4, 4, 4, 4, 4, 4, 4, 0]])


def test_segment_sum_is_bitwise_the_same_wherever_a_sequence_stands():
    rng = np.random.default_rng(0)
    x_T = rng.normal(size=50).astype(np.float32)
    alone_BT = np.zeros((1, 128), np.float32)
    packed_BT = rng.normal(size=(1, 128)).astype(np.float32)
    alone_BT[0, :50], packed_BT[0, 40:90] = x_T, x_T
    alone_segment_BT, packed_segment_BT = np.zeros((1, 128), np.int32), np.ones((1, 128), np.int32)
    alone_segment_BT[0, :50], packed_segment_BT[0, 40:90], packed_segment_BT[0, 90:] = 1, 2, 3
    alone = segment_sum(jnp.asarray(alone_BT), jnp.asarray(alone_segment_BT))[0, 0]
    packed = segment_sum(jnp.asarray(packed_BT), jnp.asarray(packed_segment_BT))[0, 40]
    assert np.asarray(alone).tobytes() == np.asarray(packed).tobytes()
