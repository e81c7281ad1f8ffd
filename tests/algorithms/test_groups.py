"""Groups may have any size and order and be incomplete: an estimator treats each group as if it were alone."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrl import groups
from podrl.algorithms import advantages
from podrl.learner.experience import join, places, select
from podrl.types import NO_EPISODE, Prompts, Rollouts, blank_columns

ESTIMATORS = {
    "group_relative": advantages.group_relative,
    "leave_one_out": advantages.leave_one_out,
    "leave_one_out, scaled": functools.partial(advantages.leave_one_out, scale="std"),
    "opo": lambda reward_B, **group: advantages.opo(reward_B, 1.0 + np.arange(len(reward_B)), **group),
    "gpg": advantages.gpg,
}


@st.composite
def indexes(draw):
    """Draws the group numbers of samples, for groups of one to five samples in any order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    group_B = np.repeat(np.arange(len(sizes)), sizes)
    return group_B[draw(st.permutations(range(len(group_B))))]


@given(group_B=indexes(), seed=st.integers(0, 99), name=st.sampled_from(sorted(ESTIMATORS)))
def test_an_estimator_sees_each_group_alone(group_B, seed, name):
    reward_B = np.random.default_rng(seed).choice([0.0, 0.25, 1.0, 3.0], len(group_B))
    found_B = ESTIMATORS[name](reward_B, group_B=group_B)
    order_B = np.argsort(group_B, kind="stable")
    expected_B = np.zeros(len(reward_B))
    lengths_B = 1.0 + np.arange(len(reward_B))
    for p in np.unique(group_B):
        own = np.flatnonzero(group_B == p)
        alone = np.zeros(len(own), int)
        if name == "opo":
            expected_B[own] = advantages.opo(reward_B[own], lengths_B[own], group_B=alone)
        else:
            expected_B[own] = ESTIMATORS[name](reward_B[own], group_B=alone)
    if name == "gpg":  # gpg's factor depends on the whole batch, so no group can be computed alone
        centred_B = advantages.group_relative(reward_B, group_B=group_B, scale="none")
        useful = (groups.spread(reward_B, group_B) > 0).sum()
        expected_B = centred_B * len(reward_B) / max(useful, 1)
    np.testing.assert_allclose(found_B, expected_B, atol=1e-12)
    np.testing.assert_allclose(np.sort(found_B[order_B]), np.sort(found_B), atol=0)


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"opo"}))
def test_an_estimator_takes_arrays_of_jax(name):
    """The groups have one, three and four samples. Random sizes are tested with numpy only, because jax compiles each
    shape anew."""
    group_B = np.asarray([2, 0, 1, 1, 0, 2, 2, 0, 1, 1, 3])
    reward_B = np.random.default_rng(0).choice([0.0, 0.25, 1.0, 3.0], len(group_B))
    expected_B = ESTIMATORS[name](reward_B, group_B=group_B)
    np.testing.assert_allclose(ESTIMATORS[name](jnp.asarray(reward_B), group_B=group_B), expected_B, atol=1e-5)


@given(group_B=indexes(), seed=st.integers(0, 99))
def test_the_parts_of_groups(group_B, seed):
    value_B, flag_B = np.random.default_rng(seed).normal(size=len(group_B)), np.arange(len(group_B)) % 3 == seed % 3
    members = {int(p): np.flatnonzero(group_B == p) for p in np.unique(group_B)}
    rows = [row.tolist() for rows_PG in groups.by_size(group_B) for row in rows_PG]
    assert sorted(rows) == sorted(own.tolist() for own in members.values())
    for p, own in members.items():
        assert groups.member_of(group_B)[own].tolist() == [*range(len(own))]
        assert (groups.spread(value_B, group_B)[own] == np.ptp(value_B[own])).all()
        assert (groups.any_of(flag_B, group_B)[own] == flag_B[own].any()).all()
        assert groups.rows_of(group_B, [p]).tolist() == own.tolist()
    assert groups.first_of(group_B).tolist() == [members[p][0] for p in sorted(members)]


def test_groups_of_one_size_in_order_give_the_bits_of_a_reshape():
    reward_B = np.random.default_rng(0).normal(size=24).astype(np.float32)
    reward_PG = reward_B.reshape(6, 4)
    centred_PG = reward_PG - reward_PG.mean(axis=1, keepdims=True)
    expected_B = (centred_PG / (reward_PG.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)
    np.testing.assert_array_equal(advantages.group_relative(reward_B, group_B=groups.complete(6, 4)), expected_B)


def rollouts(group_B, prompts):
    """Makes samples in groups `group_B`; sample b has the length b, so that a test can recognise it."""
    B, T = len(group_B), 3
    asked = Prompts(
        np.arange(prompts)[:, None], np.ones(prompts, int), np.arange(prompts), [*"abcde"][:prompts], {}, b""
    )
    zeros_BT = np.zeros((B, T), np.float32)
    return Rollouts(
        prompts=asked,
        group_B=np.asarray(group_B, np.int32),
        length_B=np.arange(B),
        mask_BT=zeros_BT,
        turn_reward_BT=zeros_BT,
        stop_B=np.zeros(B, int),
        completions=[str(b) for b in range(B)],
        episodes=[NO_EPISODE] * B,
        seconds=1.0,
        **blank_columns((B, T), pad_id=0),
    )


def test_samples_keep_their_prompts_where_groups_are_chosen_joined_and_thinned():
    of = rollouts([1, 0, 1, 2, 1, 0], 3)
    chosen = select(of, np.array([2, 1]))
    assert (chosen.prompts.text, chosen.length_B.tolist(), chosen.group_B.tolist()) == (
        ["c", "b"],
        [3, 0, 2, 4],
        [0, 1, 1, 1],
    )
    assert places(of, slice(0, 1)).length_B.tolist() == [0, 1, 3]
    assert places(of, slice(1, None)).length_B.tolist() == [2, 4, 5]
    both = join([of, rollouts([0, 0, 1], 2)], dataclasses.replace(of.prompts, **_five()))
    assert both.group_B.tolist() == [1, 0, 1, 2, 1, 0, 3, 3, 4] and both.prompts.text == [*"abcde"]


def _five():
    asked = rollouts([0], 5).prompts
    return {name: getattr(asked, name) for name in ("tokens_PT", "length_P", "index_P", "text")}


def test_rewards_that_fit_no_groups_are_refused():
    with pytest.raises(ValueError, match="3 rewards do not fit the groups of 4 samples"):
        advantages.leave_one_out(np.zeros(3), group_B=np.zeros(4, int))
    with pytest.raises(ValueError, match=r"raise grpo\.num_generations"):
        advantages.pass_at_k(np.zeros(3), group_B=np.array([0, 0, 1]))
