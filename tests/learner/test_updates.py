"""Every algorithm, from its configuration to trained weights: two real steps of two passes on the embedded model."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.algorithms.presets import PRESETS, preset
from podrl.data.pipeline import PromptStream
from podrl.learner import job
from podrl.learner.grpo import GRPOLearner
from podrl.learner.loop import Schedule
from podrl.learner.parts import fetched_means
from podrl.learner.placement import Meshes
from podrl.learner.ppo import PPOLearner
from podrl.learner.run import Run
from podrl.mesh.backlog import Backlog
from podrl.mesh.build import make_mesh
from podrl.rewards.compose import NamedRewards
from podrl.types import STOP_EOS, Experience, Prompts, Rollouts

P, G, PROMPT, LIMIT = 2, 4, 4, 8
B, T = P * G, PROMPT + LIMIT
REWARD_B = np.array([1.0, 0.0, 0.5, 0.0, 0.2, 1.0, 1.0, 0.0])

SAMPLER = {"old_logprob": "sampler"}  # ratios then spread widely from the first update on
BAND = {"correction_low": 0.9, "correction_high": 1.1}
STRONG_KL = {"beta": 1.0}
CLAMP = 2.0**-20  # nats; a mean of such values rounds nowhere
# What no preset sets, or none so that it bites: preset, what both runs change, what only the second changes.
SETTINGS = {
    "dual_clip": ("grpo", SAMPLER, {"epsilon_c": 1.01, "epsilon_high": 0.005}),
    "clip_cov": ("dapo", SAMPLER, {"policy_loss_fn": "clip_cov", "cov_fraction": 0.3, "clip_cov_low": 0.0}),
    "entropy": ("grpo", {}, {"entropy_coef": 0.5}),
    "tis": ("grpo", {}, {"sampler_correction": "tis", "correction_high": 1.1}),
    "sequence_tis": ("grpo", {}, {"sampler_correction": "sequence_tis"}),
    "icepop": ("grpo", {}, {"sampler_correction": "icepop"} | BAND),
    "geometric_mask": ("grpo", {}, {"sampler_correction": "geometric_mask"} | BAND),
    "kl_k2": ("grpo", STRONG_KL, {"kl_loss_mode": "k2"}),
    "kl_abs": ("grpo", STRONG_KL, {"kl_loss_mode": "abs"}),
    "kl_k1+": ("grpo", STRONG_KL, {"kl_loss_mode": "k1+"}),
    "kl_k3+": ("grpo", STRONG_KL, {"kl_loss_mode": "k3+"}),
    "kl_clamped": ("grpo", STRONG_KL, {"kl_clamp_value": CLAMP}),
    "reward_kl_clamped": ("rloo", {"kl_in_reward": 1.0}, {"kl_clamp_value": CLAMP}),
    "sequence_scale": ("grpo", {}, {"loss_agg_mode": "sequence-mean-token-scale"}),
    "token_scale": ("grpo", {}, {"loss_agg_mode": "token-sum-scale", "loss_agg_scale": 4.0}),
    "whiten_rewards": ("ppo", {}, {"whiten_rewards": True}),
}


def parsed(name, changes):
    """The job of an algorithm with changes, completed and checked as the launcher does it."""
    section = job.section_of(name)
    values = {
        "algorithm": name,
        "rollout": {"prompts_per_step": P, "max_prompt_length": PROMPT, "max_tokens_to_generate": LIMIT},
        "trainer": {"max_steps": 2, "eval_every_n_steps": 0, "remat": "none"},
        section: {"num_generations": G, "num_iterations": 2} | changes,
    }
    values["trainer"] |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    return job.parse(ConfigDict(job.complete(values)).to_dict())


class Bench:
    """One cluster that every case trains from the same start, on the same samples."""

    def __init__(self):
        mesh = make_mesh("fsdp=1", jax.devices()[:1])
        self.cluster = job.build_cluster(parsed("grpo", {}), Meshes(mesh, mesh, mesh, mesh))
        self.start = jax.tree.map(np.array, self.cluster.state)
        self._placed = jax.tree.map(lambda x: x.sharding, self.cluster.state)
        self.experience = self._experience()
        self._known = {}

    def _experience(self):
        rng = np.random.default_rng(0)
        length_B = np.array([12, 9, 7, 11, 10, 12, 6, 8])
        place_BT = np.tile(np.arange(T), (B, 1))
        mask_BT = ((place_BT >= PROMPT) & (place_BT < length_B[:, None])).astype(np.float32)
        tokens_BT = np.where(place_BT < length_B[:, None], rng.integers(5, 200, (B, T)), 0).astype(np.int32)
        tokens_BT[:, :PROMPT] = np.repeat(tokens_BT[::G, :PROMPT], G, axis=0)
        # The sampler differs from the trainer by enough that clips and corrections have work.
        logprob_BT = self.cluster.get_actor_per_token_logps(tokens_BT, length_B) + 0.2 * rng.normal(size=(B, T))
        logprob_BT = np.where(mask_BT > 0, logprob_BT, 0.0).astype(np.float32)
        prompts = Prompts(tokens_BT[::G, :PROMPT], np.full(P, PROMPT), np.arange(P), ["p"] * P, {}, b"{}")
        rollouts = Rollouts(
            prompts=prompts,
            tokens_BT=tokens_BT,
            length_B=length_B,
            mask_BT=mask_BT,
            logprob_BT=logprob_BT,
            raw_logprob_BT=logprob_BT,
            version_BT=np.zeros((B, T), np.int32),
            stop_B=np.full(B, STOP_EOS),
            completions=["c"] * B,
            seconds=0.0,
        )
        return Experience(rollouts, REWARD_B[None], REWARD_B, np.full(B, 0.3), 0.0, {})

    def train(self, name, **changes):
        """(config, metrics of each step, trained parameters of the actor, of the critic or None)."""
        key = (name, *sorted(changes.items()))
        if key not in self._known:
            self._known[key] = self._train(parsed(name, changes))
        return self._known[key]

    def _train(self, described):
        cluster, config = self.cluster, described.algo
        cluster.state, cluster.critic = jax.device_put(self.start, self._placed), None
        learner = (PPOLearner if config.section == "ppo" else GRPOLearner)(cluster, config, "answer")
        stream = PromptStream.from_list(
            ["p"] * 9, cluster.tokenizer, prompts_per_step=P * config.prompt_batches, max_prompt_length=PROMPT
        )
        rewards, schedule = NamedRewards(described.reward), Schedule(max_steps=2)
        parts = learner.parts_class(learner, rewards, stream, Run(None), schedule, None)
        records = [fetched_means(parts.update(step, self.experience)) for step in range(2)]
        parts.close()
        critic = cluster.critic and jax.device_get(cluster.critic.state.params)
        return config, records, jax.device_get(cluster.state.params), critic


@pytest.fixture(scope="module")
def bench():
    # Compiling takes most of the time of these tests; quick compilation halves it.
    jax.config.update("jax_disable_most_optimizations", True)
    yield Bench()
    jax.config.update("jax_disable_most_optimizations", False)


def moved(before, after):
    return any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_every_update_and_scoring_is_noted_as_under_way(bench, monkeypatch):
    """What is not noted is not bounded, and an unbounded number of programs hangs pods on CPU."""
    noted = []
    monkeypatch.setattr(Backlog, "add", lambda self, result: noted.append(result))
    bench._train(parsed("ppo", {}))
    metrics = [set(result) for result in noted if isinstance(result, dict)]
    steps, passes, scorings = 2, 2, 2  # the reward's KL scores the actor and the reference, once a step
    assert sum("actor/pg_loss" in names for names in metrics) == steps * passes
    assert sum("critic/vf_loss" in names for names in metrics) == steps * passes
    assert len(noted) - len(metrics) == steps * scorings


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(name, bench):
    config, records, actor, critic = bench.train(name)
    for record in records:
        assert all(np.isfinite(value) for value in record.values()), record
        assert record["actor/nonfinite"] == 0.0 and record["actor/grad_norm"] > 0
        assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "sampler/abs_diff"} <= set(record)
    assert moved(bench.start.params, actor)
    last = records[-1]
    assert last["actor/approx_kl"] != 0.0, "the second pass starts from other weights than the ratio"
    assert (last["actor/kl"] != 0.0) == (config.policy_loss(LIMIT).beta > 0)
    assert ("actor/kl_coef" in last) == (config.policy_loss(LIMIT).beta > 0)
    in_reward = config.reward_kl()[0]
    assert ("reward/kl" in last) == (in_reward > 0) and last.get("reward/kl_coef", 0.0) == in_reward
    if in_reward:
        assert records[0]["reward/kl"] == 0.0 and last["reward/kl"] != 0.0
    assert (critic is not None) == ("critic/vf_loss" in last) == preset(name).advantage_estimator().needs_critic
    if critic is not None:
        assert np.any(critic["score"] != 0.0) and {"critic/explained_variance", "critic/vf_clipfrac"} <= set(last)


MISMATCH = [f"sampler/{name}" for name in ("abs_diff", "exp_diff", "kl", "kl_reverse", "moment_x", "moment_xy")]


@pytest.mark.parametrize("changes", [{}, {"beta": 0.0, "num_iterations": 1, "old_logprob": "sampler"}])
def test_the_sampler_is_compared_while_only_the_critic_learns(changes, bench):
    """By the very numbers that an update of the actor would give of it."""
    _, plain, *_ = bench.train("ppo", **changes)
    _, records, actor, critic = bench.train("ppo", **changes, critic_warmup=2)
    assert not moved(bench.start.params, actor) and np.any(critic["score"] != 0.0)
    for record in records:
        assert "actor/pg_loss" not in record and record["sampler/abs_diff"] > 0.1
        for name in MISMATCH:
            assert record[name] == pytest.approx(plain[0][name], rel=1e-4), name


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_reaches_the_gradient(name, bench):
    base, shared, changes = SETTINGS[name]
    _, plain, *_ = bench.train(base, **shared)
    _, records, actor, critic = bench.train(base, **shared, **changes)
    for record in records:
        assert all(np.isfinite(value) for value in record.values()), record
    assert moved(bench.start.params, actor)
    norm = "actor/grad_norm" if critic is None else "critic/grad_norm"
    assert any(a[norm] != pytest.approx(b[norm], rel=1e-4) for a, b in zip(plain, records, strict=True))
    if "sampler_correction" in changes:
        assert plain[0]["sampler/weight"] == 1.0 and records[0]["sampler/weight"] != 1.0
        assert (records[0]["sampler/kept"] < 1.0) == (name in ("icepop", "geometric_mask"))
    if name == "reward_kl_clamped":
        assert abs(records[1]["reward/kl"]) <= CLAMP < abs(plain[1]["reward/kl"])
    if name == "kl_clamped":
        assert 0 < records[1]["actor/kl"] <= CLAMP < plain[1]["actor/kl"]
