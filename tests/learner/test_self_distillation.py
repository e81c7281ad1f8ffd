"""The policy teaches itself with a hint in the prompt: scores after longer prompts, teacher copies, checkpoints."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from test_updates import LIMIT, PROMPT, B, Bench, G, P, moved, parsed

from podrl.cluster.checkpoint_state import abstract_checkpoint_state, checkpoint_state, load_checkpoint_state
from podrl.data.hint import TEACHER_PROMPT
from podrl.learner import experience as codec
from podrl.learner.distillation import make_grpo
from podrl.learner.hinted_batch import HintedBatch
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means

HINTS = [[7, 8, 9, 10, 11, 12, 13], [20, 21]]  # the teacher's prompts of the two groups; the policy's have four tokens
ROOM = 8


def job(teacher: str, **changes: Any) -> Any:
    own = {"teacher": teacher, "teacher_hint_tokens": ROOM, "num_iterations": 1} | changes
    return parsed("opd", own, data={"hint": "The answer is {answer}."})


def told(experience: Any, hints: Any = HINTS) -> Any:
    """Returns a copy of `experience` with `hints` as the teacher's prompts."""
    prompts = dataclasses.replace(experience.rollouts.prompts, fields={TEACHER_PROMPT: hints})
    return dataclasses.replace(experience, rollouts=dataclasses.replace(experience.rollouts, prompts=prompts))


def by_hand(rollouts: Any, hints: Any) -> tuple[np.ndarray, np.ndarray]:
    """Puts each sample after its teacher's prompt, or after its own prompt if its hint is None.

    Returns:
      (right-padded tokens, lengths).
    """
    rows = [
        [*(hints[b // G] or rollouts.tokens_BT[b, :PROMPT]), *rollouts.tokens_BT[b, PROMPT : rollouts.length_B[b]]]
        for b in range(B)
    ]
    tokens_BT = np.zeros((B, max(map(len, rows))), np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row
    return tokens_BT, np.array(list(map(len, rows)))


@pytest.fixture(scope="module")
def bench(quick_compilation):
    return Bench()


@pytest.mark.parametrize("hints", [HINTS, [HINTS[0], None], [[5], None]])
def test_samples_behind_other_prompts_and_back(bench, hints):
    experience = told(bench.experience, hints)
    rollouts = experience.rollouts
    hinted = HintedBatch.of(rollouts)
    tokens_BT, length_B = by_hand(rollouts, hints)
    np.testing.assert_array_equal(hinted.rollouts.length_B, length_B)
    width = tokens_BT.shape[1]
    real_BT = np.arange(width) < length_B[:, None]
    np.testing.assert_array_equal(np.where(real_BT, hinted.rollouts.tokens_BT[:, :width], 0), tokens_BT)
    assert hinted.rollouts.mask_BT.sum() == rollouts.mask_BT.sum()
    order = np.array([5, 0, 2, 7])
    np.testing.assert_array_equal(
        hinted.back(hinted.rollouts.logprob_BT[order], order, rollouts), rollouts.logprob_BT[order]
    )


def test_the_way_between_hosts_keeps_what_the_teacher_reads(bench):
    experience = told(bench.experience, [HINTS[0], None])
    header = codec.header(experience)
    assert codec.assemble([header, header], 0).rollouts.prompts.fields == {TEACHER_PROMPT: [HINTS[0], None] * 2}
    plain = codec.header(bench.experience)
    assert codec.assemble([plain], 0).rollouts.prompts.fields == {}
    mixed = codec.assemble([plain, header], 0).rollouts.prompts.fields
    assert mixed == {TEACHER_PROMPT: [None, None, HINTS[0], None]}


def test_the_policy_behind_its_hint_gives_each_token_an_advantage(bench):
    cluster = bench.cluster
    cluster.state = jax.device_put(bench.start, bench._placed)
    experience = told(bench.experience)
    rollouts = experience.rollouts
    hinted_BT = np.asarray(cluster.get_actor_per_token_logps(*by_hand(rollouts, HINTS)))
    expected_BT = np.zeros_like(rollouts.logprob_BT)
    for b in range(B):
        n, hint = rollouts.length_B[b], len(HINTS[b // G])
        expected_BT[b, PROMPT:n] = hinted_BT[b, hint : hint + n - PROMPT]
    own_BT = cluster.get_actor_per_token_logps(rollouts.tokens_BT, rollouts.length_B)
    for teacher in ("current", "initial", "ema"):
        algorithm = make_grpo(cluster, job(teacher).algo, samples=B, log=print)
        scores = algorithm.score(0, experience)
        np.testing.assert_allclose(scores.ref_logprob_BT, expected_BT, atol=1e-5, err_msg=teacher)
        advantage_BT, metrics = algorithm.advantages(experience, scores, np.zeros_like(own_BT))
        np.testing.assert_allclose(advantage_BT, (expected_BT - own_BT) * rollouts.mask_BT, atol=1e-5)
        assert metrics["opd/reverse_kl"] == pytest.approx(-advantage_BT.sum() / rollouts.mask_BT.sum(), rel=1e-4)
    assert np.array_equal(algorithm.needed(0, experience), np.arange(B))


def test_each_copy_of_the_policy_moves_as_its_name_says(bench):
    """A step moves the policy by a whole update, the moving average by a quarter of it, and the initial copy not at
    all."""
    experience, found, start = told(bench.experience), {}, bench.start.params
    cluster = bench.cluster
    for teacher in ("current", "initial", "ema"):
        cluster.state, cluster.actor.average = jax.device_put(bench.start, bench._placed), None
        algorithm = make_grpo(cluster, job(teacher, teacher_rate=0.25).algo, samples=B, log=print)
        metrics = fetched_means(learn(algorithm, 0, experience))
        assert metrics["opd/reverse_kl"] != 0.0 and moved(start, jax.device_get(cluster.state.params))
        found[teacher] = algorithm.score(1, experience).ref_logprob_BT
        if teacher == "initial":
            found["before"] = np.asarray(algorithm.score(0, experience).ref_logprob_BT)
    average, now = jax.device_get((cluster.actor.average, cluster.state.params))
    for a, s, n in zip(*map(jax.tree.leaves, (average, start, now)), strict=True):
        np.testing.assert_array_equal(a, np.float32(s) + np.float32(0.25) * (n - s))
    np.testing.assert_array_equal(found["initial"], found["before"])
    far = np.abs(found["current"] - found["initial"]).sum()
    assert 0 < np.abs(found["ema"] - found["initial"]).sum() < far


def test_the_average_is_in_the_checkpoint_to_the_bit(bench):
    cluster, experience = bench.cluster, told(bench.experience)
    cluster.state = jax.device_put(bench.start, bench._placed)
    algorithm = make_grpo(cluster, job("ema").algo, samples=B, log=print)
    learn(algorithm, 0, experience)
    kept = jax.device_get(checkpoint_state(cluster))
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
    assert all(jax.tree.leaves(jax.tree.map(same, kept, abstract_checkpoint_state(cluster))))
    learn(algorithm, 1, experience)
    after = jax.device_get(checkpoint_state(cluster))
    assert moved(kept.average, after.average)
    load_checkpoint_state(
        cluster, jax.device_put(kept, jax.tree.map(lambda x: x.sharding, abstract_checkpoint_state(cluster)))
    )
    learn(algorithm, 1, experience)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(jax.device_get(checkpoint_state(cluster))), strict=True):
        np.testing.assert_array_equal(a, b)
    cluster.actor.average = None
    assert not hasattr(checkpoint_state(cluster), "average")


def test_a_teacher_without_a_hint_is_refused_and_a_hint_without_a_teacher(bench):
    cases = {
        r"has the policy teach itself, .* reads the same prompt has nothing to teach: give data.hint": {
            "data": {"hint": ""}
        },
        r"model.reference='tiny' names a teacher and so does grpo.teacher='current'": {"model": {"reference": "tiny"}},
    }
    for said, groups in cases.items():
        with pytest.raises(ValueError, match=said):
            parsed("opd", {"teacher": "current"}, **({"data": {"hint": "{answer}"}} | groups))
    with pytest.raises(ValueError, match=r"data.hint is what a teacher reads, and the job has no teacher"):
        parsed("grpo", {}, data={"hint": "{answer}"})
    with pytest.raises(ValueError, match=r"grpo.teacher_kl='full' .* grpo.teacher='ema' reads another prompt"):
        parsed("opd", {"teacher": "ema", "teacher_kl": "full"}, data={"hint": "{answer}"})
    with pytest.raises(ValueError, match=r"grpo.teacher='ema' has no effect while grpo.teacher_coef=0"):
        parsed("grpo", {"teacher": "ema"})
    algorithm = make_grpo(bench.cluster, job("current").algo, samples=B, log=print)
    with pytest.raises(ValueError, match=r"no prompt of step 0 has one: give data.hint"):
        algorithm.score(0, bench.experience)
    assert job("initial").data.hinted and P * G == B and LIMIT
