"""On-policy distillation: the teacher's advantage by hand, its gradient, and a teacher of another architecture."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_updates import LIMIT, B, Bench, G, moved, parsed

from podrl.algorithms.aggregate import MODES, aggregate, as_token_mean, divisor
from podrl.algorithms.distill import Distillation, top_k_kl
from podrl.job.config import TINY, ScratchModel
from podrl.job.job import scratch_model
from podrl.learner.distillation import make_grpo
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.learner.settings import GRPOConfig
from podrl.models import decoder
from podrl.models.pretrained import from_pretrained


def test_the_advantage_of_a_token_is_the_log_ratio_of_teacher_and_policy():
    policy_BT, teacher_BT = np.log([[0.5, 0.5, 0.2], [0.25, 0.1, 0.9]]), np.log([[0.9, 0.25, 0.4], [0.25, 0.2, 0.3]])
    mask_BT = np.array([[0, 1, 1], [0, 1, 0]], np.float32)
    own_BT = np.array([[7.0, 1.0, 1.0], [7.0, -1.0, 7.0]], np.float32)
    found_BT, metrics = Distillation(2.0, 0.0).advantages(policy_BT, teacher_BT, mask_BT)
    log2 = np.log(2.0)
    np.testing.assert_allclose(found_BT, 2.0 * np.array([[0, -log2, log2], [0, log2, 0]]), rtol=1e-12)
    assert metrics == {"opd/reverse_kl": pytest.approx((log2 - log2 - log2) / 3)}
    np.testing.assert_array_equal(Distillation(1.0, 0.5).rewards(own_BT, mask_BT), [[0, 0.5, 0.5], [0, -0.5, 0]])


def test_the_divergence_of_a_few_ids_by_hand():
    """For p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2), the divergence over all ids is log 2 / 4. With the last two ids
    taken as one id, it is log(4/3) / 2."""
    p_1TK, q_1TK = np.log([[[0.5, 0.25, 0.25]]], dtype=np.float32), np.log([[[0.25, 0.25, 0.5]]], dtype=np.float32)
    for ids, by_hand in ((3, np.log(2.0) / 4), (1, np.log(4.0 / 3.0) / 2)):
        found = top_k_kl(jnp.asarray(p_1TK[..., :ids]), jnp.asarray(q_1TK[..., :ids]))
        assert found == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_factor_of_a_sequence_turns_every_mode_into_a_mean_over_tokens(mode):
    mask_BT = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    value_BT = np.array([[9, 1, 2, 3], [9, 6, 9, 9], [9, 9, 9, 9]], np.float32)
    length_BT = np.maximum(mask_BT.sum(axis=1, keepdims=True), 1) * np.ones_like(mask_BT)
    factor_B1 = as_token_mean(mask_BT, mode, scale=8.0)
    found = aggregate(jnp.asarray(value_BT * factor_B1), jnp.asarray(mask_BT), jnp.asarray(length_BT), mode, scale=8.0)
    assert float(found.mean()) == pytest.approx(12 / 4, rel=1e-6)
    assert divisor(mask_BT, mode) == (float(found.count) or 1.0)


def test_on_the_policys_own_tokens_the_gradient_is_that_of_the_reverse_kl():
    """Sums the gradient over all tokens of a vocabulary, weighted by the policy's probability of each token."""
    logits_V, teacher_V = jnp.array([0.3, -1.0, 2.0, 0.1]), jax.nn.log_softmax(jnp.array([1.0, 0.5, -0.5, 2.0]))
    logprob_V = jax.nn.log_softmax(logits_V)
    ones_V = np.ones(4, np.float32)
    advantage_V, metrics = Distillation(1.0, 0.0).advantages(np.asarray(logprob_V), np.asarray(teacher_V), ones_V)
    weight_V = np.exp(np.asarray(logprob_V)) * advantage_V

    def divergence(logits_V):
        logprob_V = jax.nn.log_softmax(logits_V)
        return jnp.sum(jnp.exp(logprob_V) * (logprob_V - teacher_V))

    found_V = jax.grad(lambda logits_V: -jnp.sum(weight_V * jax.nn.log_softmax(logits_V)))(logits_V)
    np.testing.assert_allclose(found_V, jax.grad(divergence)(logits_V), atol=1e-6)
    assert metrics["opd/reverse_kl"] == pytest.approx(-float(advantage_V.mean()))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Writes a teacher of two narrow layers with random weights and the policy's tokenizer."""
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
    algorithm = make_grpo(cluster, config, samples=B, log=print)
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
    assert (gained_BT * advantage_BT).sum() > 0, (
        "tokens to which the teacher gives more probability must gain probability"
    )


@pytest.mark.parametrize(("teacher_kl", "mode"), [("full", "sequence-mean-token-mean"), ("top_k", "token-sum-scale")])
def test_the_update_of_an_exact_divergence_is_the_gradient_written_out(quick_compilation, teacher, teacher_kl, mode):
    """Rewards use their own aggregation, and the divergence is averaged over tokens. The update takes several
    micro-batches; the expected gradient is computed from all logits of both models."""
    changes = {"num_iterations": 1, "teacher_kl": teacher_kl, "teacher_top_k": 4, "teacher_coef": 0.5}
    changes |= {"reward_coef": 2.0, "loss_agg_mode": mode, "policy_loss_fn": "reinforce"}
    described = parsed("opd", changes, model={"reference": str(teacher)})
    plain = {"actor_optimizer": optax.sgd(1.0), "micro_batch_sequences": 2, "share_prompts": False}
    described = dataclasses.replace(described, trainer=dataclasses.replace(described.trainer, **plain))
    bench = Bench(described)
    cluster, experience = bench.cluster, bench.experience
    algorithm = make_grpo(cluster, described.algo, samples=B, log=print)
    rollouts = experience.rollouts
    mask_BT, theirs = jnp.asarray(rollouts.mask_BT), from_pretrained(teacher)
    scores = algorithm.score(0, experience)
    token_reward_BT, _ = algorithm.rewards(experience, scores)
    advantage_BT, _ = algorithm.advantages(experience, scores, token_reward_BT)
    (batch,) = algorithm.pack(0, experience, scores, advantage_BT)
    assert int(batch.micro_batches) > 1

    def logits(params, config):
        place_BT = np.tile(np.arange(rollouts.tokens_BT.shape[1]), (B, 1))
        segment_BT = (place_BT < rollouts.length_B[:, None]).astype(np.int32)
        hidden_BTD = decoder.hidden(params, rollouts.tokens_BT, segment_BT, place_BT, config)
        logits_BTV = decoder.unembed(params, hidden_BTD, config) / described.rollout.temperature
        return jnp.roll(jax.nn.log_softmax(logits_BTV), 1, axis=1)

    theirs_BTV = jax.lax.stop_gradient(logits(theirs.params, theirs.config))

    def loss(params):
        logp_BTV = logits(params, cluster.model)
        own_BT = -advantage_BT * jnp.take_along_axis(logp_BTV, rollouts.tokens_BT[..., None], axis=-1)[..., 0] * mask_BT
        if mode == "token-sum-scale":
            policy = own_BT.sum() / LIMIT
        else:
            policy = jnp.mean(own_BT.sum(axis=1) / mask_BT.sum(axis=1))
        p_BTV, gap_BTV = jnp.exp(logp_BTV), logp_BTV - theirs_BTV
        if teacher_kl == "top_k":
            id_BTK = jax.lax.top_k(jax.lax.stop_gradient(logp_BTV), 4)[1]
            of = functools.partial(jnp.take_along_axis, indices=id_BTK, axis=-1)
            kl_BT = top_k_kl(of(logp_BTV), of(theirs_BTV))
        else:
            kl_BT = jnp.sum(p_BTV * gap_BTV, axis=-1)
        kl = jnp.sum(jnp.where(mask_BT > 0, kl_BT, 0.0)) / mask_BT.sum()
        return policy + 0.5 * kl, kl

    expected, kl = jax.jit(jax.grad(loss, has_aux=True))(cluster.state.params)
    before = jax.device_get(cluster.state.params)
    metrics = fetched_means(algorithm.update(0, [batch]))
    norm = float(np.sqrt(sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(expected))))
    assert metrics["opd/reverse_kl"] == pytest.approx(float(kl), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for old, new, g in zip(*map(jax.tree.leaves, (before, cluster.state.params, expected)), strict=True):
        np.testing.assert_allclose(old - np.asarray(new), g, atol=2e-5 * max(norm, 1.0))


@pytest.mark.parametrize("teacher_kl", ["full", "top_k"])
def test_an_exact_divergence_draws_the_policy_to_the_teacher(quick_compilation, teacher, teacher_kl):
    config = parsed("opd", {"num_iterations": 2, "teacher_kl": teacher_kl}, model={"reference": str(teacher)})
    bench = Bench(config)
    algorithm = make_grpo(bench.cluster, config.algo, samples=B, log=print)
    found = [fetched_means(learn(algorithm, step, bench.experience))["opd/reverse_kl"] for step in range(4)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.95 * found[0], found
    rollouts, weighed = bench.experience.rollouts, []
    scores = algorithm.score(0, bench.experience)
    batches = algorithm.pack(0, bench.experience, scores, np.zeros_like(rollouts.mask_BT))
    algorithm.update(0, batches[:1], weighed)
    np.testing.assert_array_equal(weighed[0][0], 0.0)  # `weighed` has only the weights that come from rewards, here 0


def test_a_teacher_is_asked_for_and_is_no_reference_beside():
    for where in ({}, {"reference": ""}):
        with pytest.raises(ValueError, match=r"teacher_coef=1 distills .* --config.model.reference=DIR"):
            parsed("opd", {}, model=where)
    cases = {
        "with a teacher, GRPOConfig.beta=0.04 with a reference, and": {"teacher_coef": 1.0, "beta": 0.04},
        "GRPOConfig.reward_coef=0, GRPOConfig.teacher_coef=0 and .* leave nothing to learn from": {"reward_coef": 0.0},
        "GRPOConfig.teacher_kl='full' needs a teacher, and GRPOConfig.teacher_coef=0 means": {"teacher_kl": "full"},
        "gives no sample an advantage": {"num_generations": 1, "teacher_coef": 1.0, "beta": 0.0},
    }
    for said, changes in cases.items():
        with pytest.raises(ValueError, match=said):
            GRPOConfig(**{"num_generations": G} | changes)
    lone = GRPOConfig(num_generations=1, teacher_coef=1.0, reward_coef=0.0, beta=0.0)
    assert lone.old_source(1) == "trainer" and lone.distillation == Distillation(1.0, 0.0)
    exact = dataclasses.replace(lone, teacher_kl="top_k", teacher_top_k=8)
    assert exact.old_source(1) == "current" and exact.distillation == Distillation(1.0, 0.0, "top_k", 8)


def test_a_learner_without_a_teacher_says_so():
    bench = Bench()
    config = GRPOConfig(num_generations=G, teacher_coef=1.0, beta=0.0)
    with pytest.raises(
        ValueError, match=r"grpo.teacher_coef=1 needs a teacher, and the cluster has none: give model.reference"
    ):
        make_grpo(bench.cluster, config, samples=B, log=print)
