"""On-policy distillation: the teacher's advantage by hand, its gradient, and a teacher of another architecture."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_updates import B, Bench, G, moved, parsed

from podrl.algorithms.distill import Distillation
from podrl.job.config import TINY, ScratchModel
from podrl.job.job import scratch_model
from podrl.learner.grpo import GRPO
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.learner.settings import GRPOConfig


def test_the_advantage_of_a_token_is_the_log_ratio_of_teacher_and_policy():
    policy_BT, teacher_BT = np.log([[0.5, 0.5, 0.2], [0.25, 0.1, 0.9]]), np.log([[0.9, 0.25, 0.4], [0.25, 0.2, 0.3]])
    mask_BT = np.array([[0, 1, 1], [0, 1, 0]], np.float32)
    own_BT = np.array([[7.0, 1.0, 1.0], [7.0, -1.0, 7.0]], np.float32)
    found_BT, metrics = Distillation(2.0, 0.0)(own_BT, policy_BT, teacher_BT, mask_BT)
    log2 = np.log(2.0)
    np.testing.assert_allclose(found_BT, 2.0 * np.array([[0, -log2, log2], [0, log2, 0]]), rtol=1e-12)
    assert metrics == {"opd/reverse_kl": pytest.approx((log2 - log2 - log2) / 3)}
    found_BT, _ = Distillation(1.0, 0.5)(own_BT, policy_BT, teacher_BT, mask_BT)
    np.testing.assert_allclose(found_BT, [[0, 0.5 - log2, 0.5 + log2], [0, -0.5 + log2, 0]], rtol=1e-12)


def test_on_the_policys_own_tokens_the_gradient_is_that_of_the_reverse_kl():
    """Over all tokens of a vocabulary, each as often as the policy draws it."""
    logits_V, teacher_V = jnp.array([0.3, -1.0, 2.0, 0.1]), jax.nn.log_softmax(jnp.array([1.0, 0.5, -0.5, 2.0]))
    logprob_V = jax.nn.log_softmax(logits_V)
    ones_V = np.ones(4, np.float32)
    advantage_V, metrics = Distillation(1.0, 0.0)(ones_V, np.asarray(logprob_V), np.asarray(teacher_V), ones_V)
    weight_V = np.exp(np.asarray(logprob_V)) * advantage_V

    def divergence(logits_V):
        logprob_V = jax.nn.log_softmax(logits_V)
        return jnp.sum(jnp.exp(logprob_V) * (logprob_V - teacher_V))

    found_V = jax.grad(lambda logits_V: -jnp.sum(weight_V * jax.nn.log_softmax(logits_V)))(logits_V)
    np.testing.assert_allclose(found_V, jax.grad(divergence)(logits_V), atol=1e-6)
    assert metrics["opd/reverse_kl"] == pytest.approx(-float(advantage_V.mean()))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Writes a model of two narrow layers with the student's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    bench = Bench()
    size = ScratchModel(num_layers=2, model_dim=64, ffn_dim=96, num_heads=2, num_kv_heads=1)
    scratch_model(size, bench.cluster.model.vocab_size, bench.cluster.actor_mesh, seed=3).save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def test_a_teacher_of_another_architecture_is_scored_by_its_own_and_draws_the_policy_to_it(quick_compilation, teacher):
    bench, rollouts = Bench(parsed("opd", {"num_iterations": 1}, model={"reference": str(teacher)})), None
    cluster, rollouts = bench.cluster, bench.experience.rollouts
    config = parsed("opd", {"num_iterations": 1}, model={"reference": str(teacher)}).algo
    algorithm = GRPO(cluster, config, samples=B, say=print)
    where = (rollouts.tokens_BT, rollouts.length_B)
    before_BT, teacher_BT = cluster.get_actor_per_token_logps(*where), cluster.get_ref_per_token_logps(*where)
    alone = Bench(parsed("grpo", {}, model={"path": str(teacher)})).cluster
    np.testing.assert_allclose(teacher_BT, alone.get_actor_per_token_logps(*where), atol=1e-5)

    scores = algorithm.score(0, bench.experience)
    advantage_BT, _ = algorithm.advantages(bench.experience, scores, np.full_like(before_BT, np.nan))
    np.testing.assert_allclose(advantage_BT, (teacher_BT - before_BT) * rollouts.mask_BT, atol=1e-5)
    metrics = fetched_means(learn(algorithm, 0, bench.experience))
    assert metrics["opd/reverse_kl"] == pytest.approx(-advantage_BT.sum() / rollouts.mask_BT.sum(), rel=1e-4)
    assert moved(bench.start.params, jax.device_get(cluster.state.params))
    gained_BT = cluster.get_actor_per_token_logps(*where) - before_BT
    assert (gained_BT * advantage_BT).sum() > 0, "tokens that the teacher finds likelier become likelier"


def test_a_teacher_is_asked_for_and_is_no_reference_beside():
    for where in ({}, {"reference": ""}):
        with pytest.raises(ValueError, match=r"teacher_coef=1 distills .* --config.model.reference=DIR"):
            parsed("opd", {}, model=where)
    cases = {
        "takes model.reference for the teacher, to which grpo.beta=0.04 would": {"teacher_coef": 1.0, "beta": 0.04},
        "grpo.reward_coef=0.5 weighs the rewards against a teacher, and there is none": {"reward_coef": 0.5},
        "gives no sample an advantage": {"num_generations": 1, "teacher_coef": 1.0, "beta": 0.0},
    }
    for said, changes in cases.items():
        with pytest.raises(ValueError, match=said):
            GRPOConfig(**{"num_generations": G} | changes)
    lone = GRPOConfig(num_generations=1, teacher_coef=1.0, reward_coef=0.0, beta=0.0)
    assert lone.old_source(1) == "trainer" and lone.distillation == Distillation(1.0, 0.0)


def test_a_learner_without_a_teacher_says_so():
    bench = Bench()
    config = GRPOConfig(num_generations=G, teacher_coef=1.0, beta=0.0)
    with pytest.raises(
        ValueError, match=r"grpo.teacher_coef=1 needs a teacher, and the cluster has none: give model.reference"
    ):
        GRPO(bench.cluster, config, samples=B, say=print)
