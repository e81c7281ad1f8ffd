"""Every algorithm from its configuration to trained weights: two real steps of two passes on the embedded model."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.algorithms.mismatch import derived
from podrl.algorithms.presets import PRESETS, preset
from podrl.job import job
from podrl.job.config import TINY, complete, parse, section_of
from podrl.job.placement import Meshes
from podrl.learner.grpo import GRPO
from podrl.learner.loop import learn
from podrl.learner.ppo import PPO
from podrl.learner.recorder import fetched_means
from podrl.learner.report import SampleReport
from podrl.learner.traced_algorithm import TracedAlgorithm
from podrl.mesh.backlog import Backlog
from podrl.mesh.build import make_mesh
from podrl.models import decoder
from podrl.models.hf_config import read_config
from podrl.rundir.metrics import LogConfig
from podrl.rundir.spans import Spans
from podrl.rundir.tracing import TraceSteps
from podrl.trainer import state as state_lib
from podrl.trainer.optimizer import AdamSettings, make_optimizer
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.step import make_train_step
from podrl.types import NO_EPISODE, STOP_EOS, STOP_FAILED, Experience, LeftOut, Prompts, Rollouts, blank_columns

P, G, PROMPT, LIMIT = 2, 4, 4, 8
B, T = P * G, PROMPT + LIMIT
REWARD_B = np.array([1.0, 0.0, 0.5, 0.0, 0.2, 1.0, 1.0, 0.0])

SAMPLER = {"old_logprob": "sampler"}  # with this setting ratios spread widely from the first update on
BAND = {"correction_low": 0.9, "correction_high": 1.1}
STRONG_KL = {"beta": 1.0}
CLAMP = 2.0**-20  # nats; the mean of such values is exact
# Settings that no preset changes enough to have an effect: (preset, changes in both runs, changes in the second run).
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


def parsed(name, changes, **groups):
    """Parses the job of algorithm `name` with changed settings; completes and checks them as the launcher does."""
    section = section_of(name)
    values = {
        "algorithm": name,
        "rollout": {"prompts_per_step": P, "max_prompt_length": PROMPT, "max_tokens_to_generate": LIMIT},
        "trainer": {"max_steps": 2, "eval_every_n_steps": 0, "remat": "none"},
        section: {"num_generations": G, "num_iterations": 2} | changes,
    }
    values["trainer"] |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    return parse(ConfigDict(complete(values | groups)).to_dict())


class Bench:
    """One cluster that every case trains from the same start, on the same samples."""

    def __init__(self, described=None):
        mesh = make_mesh("fsdp=1", jax.devices()[:1])
        self.cluster = job.build_cluster(described or parsed("grpo", {}), Meshes(mesh, mesh, mesh, mesh))
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
        # The sampler differs enough from the trainer for clips and corrections to have an effect.
        logprob_BT = self.cluster.get_actor_per_token_logps(tokens_BT, length_B) + 0.2 * rng.normal(size=(B, T))
        logprob_BT = np.where(mask_BT > 0, logprob_BT, 0.0).astype(np.float32)
        prompts = Prompts(tokens_BT[::G, :PROMPT], np.full(P, PROMPT), np.arange(P), ["p"] * P, {}, b"{}")
        rollouts = Rollouts(
            prompts=prompts,
            group_B=np.arange(B) // G,
            length_B=length_B,
            mask_BT=mask_BT,
            turn_reward_BT=np.zeros((B, T), np.float32),
            stop_B=np.full(B, STOP_EOS),
            completions=["c"] * B,
            episodes=[NO_EPISODE] * B,
            seconds=0.0,
            **blank_columns((B, T), pad_id=0)
            | {"tokens_BT": tokens_BT, "logprob_BT": logprob_BT, "version_BT": np.zeros((B, T), np.int32)},
        )
        return Experience(rollouts, REWARD_B[None], REWARD_B, np.full(B, 0.3), 0.0, {}, np.zeros(B, np.int32))

    def train(self, name, **changes):
        """Trains; returns (config, metrics of each step, trained parameters of the actor, and of the critic or
        None)."""
        key = (name, *sorted(changes.items()))
        if key not in self._known:
            self._known[key] = self._train(parsed(name, changes))
        return self._known[key]

    def _train(self, described):
        cluster, config = self.cluster, described.algo
        cluster.state, cluster.critic = jax.device_put(self.start, self._placed), None
        algorithm = (PPO if config.section == "ppo" else GRPO)(cluster, config, samples=B, log=print)
        records = [fetched_means(learn(algorithm, step, self.experience)) for step in range(2)]
        critic = cluster.critic and jax.device_get(cluster.critic.state.params)
        return config, records, jax.device_get(cluster.state.params), critic


@pytest.fixture(scope="module")
def bench(quick_compilation):
    return Bench()


def moved(before, after):
    return any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_every_update_and_scoring_is_added_to_the_backlog(bench, monkeypatch):
    """The backlog bounds the programs in flight, because too many of them at once hang pods on CPU."""
    noted = []
    monkeypatch.setattr(Backlog, "add", lambda self, result: noted.append(result))
    bench._train(parsed("ppo", {}))
    metrics = [set(result) for result in noted if isinstance(result, dict)]
    steps, passes, scorings = 2, 2, 2  # the reward's KL needs scores of actor and reference, once per step
    assert sum("actor/pg_loss" in names for names in metrics) == steps * passes
    assert sum("critic/vf_loss" in names for names in metrics) == steps * passes
    assert len(noted) - len(metrics) == steps * scorings


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_weights_of_tokens_are_told_and_change_no_bit(name, bench):
    """In the first pass the ratio r is 1, and a token's weight is its advantage A. In the second pass a clipped token
    has weight 0, so its mean weight over the two passes is A / 2."""
    described = parsed(name, {"epsilon": 1e-6})
    _, plain, actor, _ = bench.train(name, epsilon=1e-6)
    cluster = bench.cluster
    cluster.state, cluster.critic = jax.device_put(bench.start, bench._placed), None
    made = (PPO if name == "ppo" else GRPO)(cluster, described.algo, samples=B, log=print)
    kept = {}
    run = SimpleNamespace(tracing=SimpleNamespace(note=kept.__setitem__), spans=Spans())
    run.traced = TraceSteps(LogConfig(trace="updates"))
    traced = TracedAlgorithm(made, run, ["fn"], described.algo)
    found = [fetched_means(learn(traced, step, bench.experience)) for step in range(2)]
    assert found == [{**metrics, "loss/samples": float(B)} for metrics in plain]
    for a, b in zip(jax.tree.leaves(actor), jax.tree.leaves(jax.device_get(cluster.state.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(kept) == [1, 2]
    weight_BT, share_BT = kept[1].columns["weight"], kept[1].columns["clipped"]
    advantage_BT = kept[1].columns["advantage"] * bench.experience.rollouts.mask_BT
    clipped_BT = share_BT > 0
    assert clipped_BT.any() and (share_BT[clipped_BT] == 0.5).all()
    np.testing.assert_allclose(weight_BT[clipped_BT], advantage_BT[clipped_BT] / 2, rtol=1e-4)
    assert (weight_BT * np.sign(advantage_BT) >= np.abs(advantage_BT) / 2 - 1e-6).all(), (
        "the weight is at least A / 2 in size on every token, clipped or not"
    )


def test_all_hosts_that_train_score_and_weigh_what_one_of_them_writes(bench, monkeypatch):
    """Trainer hosts run the programs of one mesh together: a host that skipped a program would block the others."""
    made = GRPO(bench.cluster, parsed("grpo", {}).algo, samples=B, log=print)
    asked = []
    monkeypatch.setattr(TracedAlgorithm, "_token_scores", lambda self, experience, share: asked.append(share))
    monkeypatch.setattr(made, "pack", lambda *of: ())
    monkeypatch.setattr(made, "update", lambda step, batches, weighed=None: asked.append(weighed) or {})
    found = {}
    for name, tracing in {"leader": SimpleNamespace(note=lambda *of: None), "other": None}.items():
        run = SimpleNamespace(tracing=tracing, spans=Spans(), traced=TraceSteps(LogConfig(trace="updates")))
        traced = TracedAlgorithm(made, run, ["fn"], parsed("grpo", {}).algo)
        for step in range(2):
            traced.pack(step, bench.experience, None, bench.experience.rollouts.mask_BT)
            traced.update(step, ())
        found[name], asked[:] = list(asked), []
        run.traced = TraceSteps(LogConfig(samples_every=2))
        every = [traced.needed(step, bench.experience).tolist() for step in (0, 2)]
        assert every == [[*range(B)]] * 2, "a job of one host needs all rows"
    assert found["other"] == found["leader"] == [1.0, [], 1.0, []]


def test_settings_alone_decide_what_packed_rows_hold(bench):
    """podrl.plan knows the settings only. Rows for pieces have further columns, which jobs without pieces do not pay
    for."""
    for environment, pieces in {"": False, "agent.py:Agent": True}.items():
        rollout = {"prompts_per_step": P, "max_prompt_length": PROMPT, "max_tokens_to_generate": LIMIT}
        rollout |= {"max_response_tokens": LIMIT}
        described = parsed("grpo", {"policy_loss_fn": "gspo"}, env={"environment": environment}, rollout=rollout)
        given = {"samples": B, "log": print, "pieces": described.env.branches}
        shape = GRPO(bench.cluster, described.algo, **given).mini_batches.shape
        assert shape == described.pack_shape(bench.cluster.actor_mesh)
        assert shape.tree == shape.whole == pieces


def rarely(names, often):
    """Returns the cases of a long table: cases in `often` always run, the others run if their code has changed."""
    seldom = [pytest.mark.slow, pytest.mark.nightly("podrl/algorithms", "podrl/trainer", "podrl/learner/grpo.py")]
    return [pytest.param(name, marks=[] if name in often else seldom) for name in names]


# Distillation needs a teacher, and has its own tests: test_distillation.py.
@pytest.mark.parametrize("name", rarely([name for name in PRESETS if name != "opd"], ("grpo", "dapo", "rloo", "ppo")))
def test_every_preset_trains(name, bench):
    config, records, actor, critic = bench.train(name)
    for record in records:
        assert all(np.isfinite(value) for value in record.values()), record
        assert record["actor/nonfinite"] == 0.0 and record["actor/grad_norm"] > 0
        assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "sampler/abs_diff"} <= set(record)
    assert moved(bench.start.params, actor)
    last = records[-1]
    assert last["actor/approx_kl"] != 0.0, "the last update's weights differ from those of the old log-probabilities"
    assert (last.get("actor/kl", 0.0) != 0.0) == config.policy_loss(LIMIT).needs_reference() == ("actor/kl" in last)
    assert ("actor/kl_coef" in last) == (config.policy_loss(LIMIT).needs_reference())
    in_reward = config.reward_kl.coef
    assert ("reward/kl" in last) == (in_reward > 0) and last.get("reward/kl_coef", 0.0) == in_reward
    if in_reward:
        assert records[0]["reward/kl"] == 0.0 and last["reward/kl"] != 0.0
    assert (critic is not None) == ("critic/vf_loss" in last) == preset(name).advantage_estimator().needs_critic
    if critic is not None:
        assert np.any(critic["score"] != 0.0) and {"critic/explained_variance", "critic/vf_clipfrac"} <= set(last)


MISMATCH = [f"sampler/{name}" for name in ("abs_diff", "exp_diff", "kl", "kl_reverse", "moment_x", "moment_xy")]


@pytest.mark.parametrize("changes", [{}, {"beta": 0.0, "num_iterations": 1, "old_logprob": "sampler"}])
def test_the_sampler_is_compared_while_only_the_critic_learns(changes, bench):
    """The metrics that compare sampler and trainer equal the metrics of a run whose actor is updated."""
    _, plain, *_ = bench.train("ppo", **changes)
    _, records, actor, critic = bench.train("ppo", **changes, critic_warmup=2)
    assert not moved(bench.start.params, actor) and np.any(critic["score"] != 0.0)
    for record in records:
        assert "actor/pg_loss" not in record and record["sampler/abs_diff"] > 0.1
        for name in MISMATCH:
            assert record[name] == pytest.approx(plain[0][name], rel=1e-4), name


@pytest.mark.parametrize("name", rarely(SETTINGS, ("dual_clip", "tis", "reward_kl_clamped")))
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
        assert "sampler/ess" not in derived(plain[0]) and 0.0 < derived(records[0])["sampler/ess"] < 1.0
    if name == "reward_kl_clamped":
        assert abs(records[1]["reward/kl"]) <= CLAMP < abs(plain[1]["reward/kl"])
    if name == "kl_clamped":
        assert 0 < records[1]["actor/kl"] <= CLAMP < plain[1]["actor/kl"]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_tokens_are_told_apart_by_age_and_old_ones_dropped(beta, bench):
    whole, step = bench.experience.rollouts, 5
    version_BT = np.where(whole.mask_BT > 0, step - np.arange(T) % 3, -1).astype(np.int32)
    experience = dataclasses.replace(bench.experience, rollouts=dataclasses.replace(whole, version_BT=version_BT))
    changes = {"max_staleness": 2, "old_logprob": "trainer", "num_iterations": 1, "beta": beta}
    records = []
    for bound in (None, 1):
        config = parsed("grpo", changes | {"stale_bound": bound}).algo
        bench.cluster.state = jax.device_put(bench.start, bench._placed)
        metrics = learn(GRPO(bench.cluster, config, samples=B, log=print), step, experience)
        more = {"reward_names": (), "metric_fns": (), "watched": (), "skipped": lambda: 0}
        records.append(SampleReport(config, **more).finished(fetched_means(metrics)))
    plain, bounded = records
    bench.cluster.state = jax.device_put(bench.start, bench._placed)
    diff_BT = np.abs(bench.cluster.get_actor_per_token_logps(whole.tokens_BT, whole.length_B) - whole.logprob_BT)
    for age in range(3):
        here_BT = (whole.mask_BT > 0) & (np.arange(T) % 3 == age)
        assert plain[f"rollout/share_stale_{age}"] == pytest.approx(here_BT.sum() / whole.mask_BT.sum())
        assert plain[f"sampler/abs_diff_stale_{age}"] == pytest.approx(diff_BT[here_BT].mean(), rel=1e-4)
        assert plain[f"actor/ratio_stale_{age}"] == pytest.approx(1.0, rel=1e-5)
    assert plain["sampler/kept"] == 1.0 and bounded["actor/grad_norm"] != plain["actor/grad_norm"]
    assert bounded["sampler/kept"] == pytest.approx(1.0 - plain["rollout/share_stale_2"])


def test_observed_tokens_are_learned_beside_the_policy_loss(bench):
    """Each sample has up to two tokens of a tool. Rewards are equal, and the policy still equals its reference, so the
    gradient comes from the tool's tokens only."""
    whole, place_BT = bench.experience.rollouts, np.tile(np.arange(T), (B, 1))
    seen_BT = (place_BT >= PROMPT + 1) & (place_BT < np.minimum(PROMPT + 3, whole.length_B - 1)[:, None])
    mask_BT = np.where(seen_BT, np.float32(0), whole.mask_BT)
    rollouts = dataclasses.replace(whole, mask_BT=mask_BT, logprob_BT=np.where(seen_BT, 0, whole.logprob_BT))
    experience = dataclasses.replace(bench.experience, rollouts=rollouts, reward_B=np.ones(B))
    bench.cluster.state = jax.device_put(bench.start, bench._placed)
    logprob_BT = bench.cluster.get_actor_per_token_logps(whole.tokens_BT, whole.length_B)
    sums = {"beta": 0.04, "loss_agg_mode": "sequence-mean-token-sum"}
    plain, norms = parsed("grpo", {"beta": 0.0, "num_iterations": 1}).algo, []
    for changes in ({"observation_coef": 0.1}, {"observation_coef": 0.2}, {"observation_coef": 0.1} | sums):
        config = dataclasses.replace(plain, **changes)
        bench.cluster.state = jax.device_put(bench.start, bench._placed)
        metrics = fetched_means(learn(GRPO(bench.cluster, config, samples=B, log=print), 0, experience))
        assert metrics["echo/nll"] == pytest.approx(-logprob_BT[seen_BT].mean(), rel=1e-5)
        after_BT = bench.cluster.get_actor_per_token_logps(whole.tokens_BT, whole.length_B)
        assert after_BT[seen_BT].mean() > logprob_BT[seen_BT].mean()
        norms.append(metrics["actor/grad_norm"])
    # `observation_coef` is a factor; the aggregation of the policy loss does not change the observations' part.
    assert norms == pytest.approx([norms[0], 2 * norms[0], norms[0]], rel=1e-4)
    config = dataclasses.replace(plain, observation_coef=0.1)
    assert not config.advantage_alone and "0.1 x (-log p)" in "\n".join(config.describe(LIMIT))
    with pytest.raises(ValueError, match=r"grpo\.observation_coef=0\.1 learns what an environment answers"):
        parsed("grpo", {"observation_coef": 0.1})


def test_a_group_with_a_failed_sample_teaches_nothing_and_is_not_reported(bench):
    algorithm = GRPO(bench.cluster, parsed("grpo", {"num_iterations": 1}).algo, samples=B, log=print)
    whole, stop_B = bench.experience.rollouts, np.where(np.arange(B) == 5, STOP_FAILED, STOP_EOS)
    mask_BT = np.where(np.arange(B)[:, None] < G, whole.mask_BT, np.float32(0))
    ends, seen = [], []
    for lost in (0.0, 7.0):
        reward_B = np.where(np.arange(B) < G, REWARD_B, lost)
        reward_FB = np.where(np.arange(B) == 5, np.nan, reward_B)[None]
        rollouts = dataclasses.replace(whole, mask_BT=mask_BT, stop_B=stop_B, logprob_BT=whole.logprob_BT + lost)
        lost_B = np.where(np.arange(B) < G, LeftOut.NOT, np.where(stop_B == STOP_FAILED, LeftOut.FAILED, LeftOut.GROUP))
        counts = {"rollout/failed": 1.0}
        experience = Experience(rollouts, reward_FB, reward_B, np.full(B, 0.3), 0.0, counts, lost_B)
        bench.cluster.state = jax.device_put(bench.start, bench._placed)
        learn(algorithm, 0, experience)
        ends.append(jax.device_get(bench.cluster.state.params))
        report = SampleReport(
            parsed("grpo", {}).algo,
            reward_names=("answer",),
            metric_fns=[lambda prompts, completions, rewards: seen.append(rewards) or {}],
            watched=(),
            skipped=lambda: 0,
        )
        said = report.describe(experience)
        assert said["reward/mean"] == said["reward/answer"] == REWARD_B[:G].mean() and said["rollout/failed"] == 1.0
        assert seen[-1] == REWARD_B[:G].tolist()
        assert [record["reward"] for record in report.samples(experience)] == [REWARD_B[0]]
    assert moved(bench.start.params, ends[0]) and not moved(ends[0], ends[1])


def test_a_step_that_loses_every_group_teaches_nothing_and_has_no_reward(bench):
    """One sample in each group has failed, and no sample has loss tokens."""
    algorithm = GRPO(bench.cluster, parsed("grpo", {"num_iterations": 1}).algo, samples=B, log=print)
    whole, stop_B = bench.experience.rollouts, np.where(np.arange(B) % G == 1, STOP_FAILED, STOP_EOS)
    rollouts = dataclasses.replace(whole, mask_BT=np.zeros_like(whole.mask_BT), stop_B=stop_B)
    counts = {"rollout/failed": B / G, "rollout/kept_tokens": 0.0, "rollout/age": 0.0, "rollout/mixed_samples": 0.0}
    lost_B = np.where(stop_B == STOP_FAILED, LeftOut.FAILED, LeftOut.GROUP)
    experience = Experience(rollouts, np.full((1, B), np.nan), np.zeros(B), np.full(B, 0.3), 0.0, counts, lost_B)
    bench.cluster.state = jax.device_put(bench.start, bench._placed)
    metrics = fetched_means(learn(algorithm, 0, experience))
    assert np.isfinite(list(metrics.values())).all(), metrics
    assert not moved(bench.start.params, jax.device_get(bench.cluster.state.params))
    config, more = parsed("grpo", {}).algo, {"metric_fns": [], "watched": (), "skipped": lambda: 0}
    report = SampleReport(config, reward_names=("answer",), **more)
    said = report.describe(experience)
    assert (
        said["tokens/completion"] == 0.0 and said["rollout/failed"] == B / G and np.isfinite(list(said.values())).all()
    )
    assert not any(name.startswith("reward/") for name in said) and not report.samples(experience)


def entropies(cluster, rollouts):
    """Computes the entropy of the distribution from which every token is sampled, from all logits at once."""
    actor, place_BT = cluster.actor, np.tile(np.arange(T), (B, 1))
    segment_BT = (place_BT < rollouts.length_B[:, None]).astype(np.int32)
    params = actor.params()
    hidden_BTD = decoder.hidden(params, rollouts.tokens_BT, segment_BT, place_BT, actor.model, dtype=np.float32)
    logits_BTV = decoder.unembed(params, hidden_BTD, actor.model).astype(np.float32)
    logp_BTV = jax.nn.log_softmax(logits_BTV / cluster.config.rollout().temperature)
    entropy_BT = -np.sum(np.exp(logp_BTV) * logp_BTV, axis=-1)
    return np.roll(entropy_BT, 1, axis=1)


def test_a_resumed_run_compiles_what_traces_in_its_first_step():
    fresh = Bench()  # a cluster of its own, for which other tests have compiled nothing
    algorithm, experience = GRPO(fresh.cluster, parsed("grpo", {}).algo, samples=B, log=print), fresh.experience
    spans = Spans()
    run = SimpleNamespace(tracing=SimpleNamespace(note=lambda *of: None), traced=TraceSteps(LogConfig()), spans=spans)
    traced = TracedAlgorithm(algorithm, run, ["fn"], parsed("grpo", {}).algo)
    compiled = {}
    with spans.compiles():
        for step in (7, 8, 9):
            scores = traced.score(step, experience)
            advantages, _ = traced.advantages(experience, scores, traced.rewards(experience, scores)[0])
            jax.block_until_ready([batch.rows for batch in traced.pack(step, experience, scores, advantages)])
            compiled[step] = sum(span["lane"] == "compile" for span in spans.take(step))
    assert compiled[7] > 0 and compiled[9] == compiled[8] == 0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_trace_is_told_of_every_token(name, bench):
    config, experience = parsed(name, {}), bench.experience
    algorithm = (PPO if name == "ppo" else GRPO)(bench.cluster, config.algo, samples=B, log=lambda text: None)
    kept = {}
    chosen = SimpleNamespace(wants=lambda step: step == 8, ever=True, share=0.5, weighs=lambda step: False)
    run = SimpleNamespace(tracing=SimpleNamespace(note=kept.__setitem__), traced=chosen, spans=Spans())
    traced = TracedAlgorithm(algorithm, run, ["fn"], config.algo)
    scores = traced.score(7, experience)
    advantages, _ = traced.advantages(experience, scores, traced.rewards(experience, scores)[0])
    traced.pack(7, experience, scores, advantages)
    (told,) = kept.values()
    logprob_BT, entropy_BT = told.scores().values()
    mask_BT = experience.rollouts.mask_BT[:4] > 0
    every_BT = bench.cluster.get_actor_per_token_logps(experience.rollouts.tokens_BT, experience.rollouts.length_B)
    assert list(kept) == [8] and logprob_BT.shape == (4, T), "the trace has half of the groups"
    np.testing.assert_allclose(logprob_BT[mask_BT], every_BT[:4][mask_BT], atol=1e-5)
    np.testing.assert_allclose(
        entropy_BT[mask_BT], entropies(bench.cluster, experience.rollouts)[:4][mask_BT], atol=1e-4
    )
    assert set(told.columns) == {"advantage", "trained"} | ({"return"} if name == "ppo" else set())
    np.testing.assert_array_equal(told.columns["trained"], experience.rollouts.mask_BT)
    assert np.abs(told.columns["advantage"]).max() > 0
    traced.pack(8, experience, scores, advantages)
    assert list(kept) == [8]


def test_fresh_samples_compile_the_very_update_without_a_correction():
    """sampler_correction='auto' compiles the same program as 'none' if max_staleness is 0."""
    mesh, config = make_mesh("fsdp=1", jax.devices()[:1]), read_config(TINY)
    optimizer = make_optimizer(AdamSettings())
    state, frozen = state_lib.abstract_state(config, optimizer, mesh)
    shape = PackShape.for_worst_case(2, T, max_tokens_per_row=T, rows_per_micro_batch=2, shards=1)

    def program(correction, staleness):
        settings = parsed("grpo", {"sampler_correction": correction, "max_staleness": staleness}).algo
        loss = settings.policy_loss(LIMIT)
        batch = state_lib.abstract_batch(loss.rows, shape, mesh)
        return make_train_step(config, loss, optimizer, mesh).lower(state, frozen, batch).as_text()

    fresh = program("auto", 0)
    assert fresh == program("none", 0)
    assert fresh != program("auto", 1)
