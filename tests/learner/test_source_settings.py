"""Sources of a mixture with weights, losses and advantages of their own: an update is the sum of separate updates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_updates import parsed

from podrl.data.hint import TEACHER_PROMPT
from podrl.job import job
from podrl.job.config import TINY
from podrl.job.placement import Meshes
from podrl.learner import experience as messages
from podrl.learner.distillation import make_grpo
from podrl.learner.mini_batches import Update
from podrl.learner.scoring import ReferencedScores, Scores
from podrl.learner.settings import GRPOConfig
from podrl.mesh.build import make_mesh
from podrl.trainer import packing
from podrl.trainer.objective import TokenLoss
from podrl.types import NO_EPISODE, STOP_EOS, Experience, Prompts, Rollouts, blank_columns

SAME = 2e-6 if np.dtype(np.float32).itemsize == 4 else 1e-12  # tests/trainer/in_float64.py changes np.float32
G, PROMPT, T = 2, 3, 12
NAMES = ("math", "chat", "tools", "math", "plain")
P, B = len(NAMES), G * len(NAMES)
MODES = ("token-mean", "sequence-mean-token-mean", "token-sum-scale")
# The loss of each source, in a run without KL; samples of other sources learn from rewards with the clipped loss.
OWN = {
    "math": {"policy_loss_fn": "ipo", "epsilon": 0.1, "advantage_estimator": "maxrl"},
    "chat": {"teacher_coef": 0.5, "reward_coef": 0.0},
    "tools": {"reward_coef": 0.0, "observation_coef": 0.25},
}


def mixture():
    """Makes five prompts of four sources; samples of 'tools' and 'math' contain tokens of a tool's answer."""
    rng = np.random.default_rng(0)
    length_B = np.array([12, 9, 7, 11, 12, 10, 12, 6, 8, 12])
    place_BT = np.tile(np.arange(T), (B, 1))
    given_BT = np.isin(np.repeat(NAMES, G), ("tools", "math"))[:, None] & np.isin(place_BT, (5, 6))
    mask_BT = ((place_BT >= PROMPT) & (place_BT < length_B[:, None]) & ~given_BT).astype(np.float32)
    # Every token has its own id, so its log-probability is found wherever the token was packed.
    tokens_BT = np.arange(B * T, dtype=np.int32).reshape(B, T)
    fields = {"dataset": list(NAMES)}
    prompts = Prompts(tokens_BT[::G, :PROMPT], np.full(P, PROMPT), np.arange(P), ["p"] * P, fields, b"{}")
    logprob_BT = (np.log(rng.uniform(0.05, 0.95, (B, T))) * mask_BT).astype(np.float32)
    rollouts = Rollouts(
        prompts=prompts,
        group_B=np.arange(B, dtype=np.int32) // G,
        length_B=length_B,
        mask_BT=mask_BT,
        turn_reward_BT=np.zeros((B, T), np.float32),
        stop_B=np.full(B, STOP_EOS),
        completions=["c"] * B,
        episodes=[NO_EPISODE] * B,
        seconds=0.0,
        **blank_columns((B, T), pad_id=0) | {"tokens_BT": tokens_BT, "logprob_BT": logprob_BT},
    )
    reward_B = rng.permutation(np.linspace(0.0, 1.0, B))
    return Experience(rollouts, reward_B[None], reward_B, np.zeros(B), 0.0, {}, np.zeros(B, np.int32))


def only(experience, names):
    """Selects the samples of some sources: (experience of these samples, their row numbers in the whole batch)."""
    chosen_P = np.flatnonzero(np.isin(experience.rollouts.prompts.fields["dataset"], names))
    rows_B = np.flatnonzero(np.isin(experience.rollouts.group_B, chosen_P))
    rollouts = messages.select(experience.rollouts, chosen_P)
    part = {"reward_FB": experience.reward_FB[:, rows_B], "lost_B": experience.lost_B[rows_B]}
    part |= {name: getattr(experience, name)[rows_B] for name in ("reward_B", "greedy_reward_B")}
    return dataclasses.replace(experience, rollouts=rollouts, **part), rows_B


@pytest.fixture(scope="module")
def cluster():
    described = parsed("opd", {"num_iterations": 1}, model={"reference": str(TINY)}, trainer=TRAINER)
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    return job.build_cluster(described, Meshes(mesh, mesh, mesh, mesh))


TRAINER = {"share_prompts": False, "max_steps": 2, "eval_every_n_steps": 0, "micro_batch_sequences": 2}


def config(mode="token-mean", sources=OWN, **changes):
    scale = {"loss_agg_scale": 7.0} if mode.endswith("scale") else {}
    values = {"num_generations": G, "beta": 0.0, "loss_agg_mode": mode, "old_logprob": "sampler", **scale, **changes}
    return GRPOConfig(sources=sources, **values)


def trained(cluster, settings, experience, rows_B):
    """Computes the loss of an update at random log-probabilities: (its gradient by each token's log-probability, its
    value, metrics of the advantages and of the loss)."""
    rng = np.random.default_rng(1)
    now_BT, their_BT = (np.log(rng.uniform(0.05, 0.95, (B, T))) for _ in range(2))
    scores = ReferencedScores(experience.rollouts.logprob_BT, their_BT[rows_B].astype(np.float32))
    algorithm = make_grpo(cluster, settings, samples=len(rows_B), log=print)
    rewards, _ = algorithm.rewards(experience, scores)
    advantage_BT, told = algorithm.advantages(experience, scores, rewards)
    (batch,) = algorithm.pack(0, experience, scores, advantage_BT)
    loss: TokenLoss = algorithm._token_loss

    def value(logprob_X):
        found = []
        for a in range(int(batch.micro_batches)):
            rows = jax.tree.map(lambda x, a=a: x[a], batch.rows)
            logprob_BT = logprob_X[rows.layout.tokens_BT]
            found.append(loss(logprob_BT, jnp.zeros_like(logprob_BT), rows))
        total, metrics = jax.tree.map(lambda *x: sum(x[1:], x[0]), *found)
        return total.total / (total.count + (total.count == 0)), (total, metrics)

    start = jnp.asarray(now_BT.reshape(-1), np.float32)
    (loss_value, (_, metrics)), slope_X = jax.value_and_grad(value, has_aux=True)(start)
    told = {**told, "micro_batches": int(batch.micro_batches)}
    return np.asarray(slope_X), float(loss_value), told | {name: float(x.mean()) for name, x in metrics.items()}


@pytest.mark.parametrize("mode", MODES)
def test_an_update_of_a_mixture_is_the_sum_of_those_of_its_components(cluster, mode):
    """The mixture has RL by two losses, a teacher's advantages and a cross-entropy; each has its own divisor."""
    whole = mixture()
    found_X, value, metrics = trained(cluster, config(mode), whole, np.arange(B))
    alone = {name: config(mode, {}, **{"reward_coef": 1.0} | own) for name, own in OWN.items()} | {
        "plain": config(mode, {})
    }
    parts = {name: trained(cluster, settings, *only(whole, [name])) for name, settings in alone.items()}
    mask_BT = whole.rollouts.mask_BT
    sizes = {name: only(whole, [name])[0].rollouts.mask_BT for name in ("math", "plain")}
    count = {"token-mean": lambda x: x.sum(), "token-sum-scale": lambda x: 1.0}.get(mode, lambda x: x.any(axis=1).sum())
    together = 1.0 if mode == "token-sum-scale" else sum(map(count, sizes.values()))
    shares = {name: count(x_BT) / together for name, x_BT in sizes.items()} | {"chat": 1.0, "tools": 1.0}
    expected_X = sum(shares[name] * slope_X for name, (slope_X, _, _) in parts.items())
    assert np.abs(expected_X).max() > 1e-2 and metrics["micro_batches"] > 1
    np.testing.assert_allclose(found_X, expected_X, rtol=0, atol=SAME)
    assert value == pytest.approx(sum(shares[name] * x for name, (_, x, _) in parts.items()), abs=10 * SAME)
    assert metrics["loss/tokens/rl"] == sum(x_BT.sum() for x_BT in sizes.values())
    assert metrics["loss/tokens/teacher"] == only(whole, ["chat"])[0].rollouts.mask_BT.sum()
    assert metrics["loss/tokens/ce"] == 2 * G and mask_BT.sum() > metrics["loss/tokens/rl"]
    assert metrics["echo/nll"] == pytest.approx(parts["tools"][2]["echo/nll"], rel=1e-5)
    assert metrics["opd/reverse_kl"] == pytest.approx(parts["chat"][2]["opd/reverse_kl"], rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "top_k"])
def test_an_exact_divergence_is_taken_over_the_tokens_of_its_source_beside_the_other_components(cluster, kind):
    """Checks the weights and divisors in the update's rows; test_distillation.py tests the gradient."""
    whole, sources = mixture(), OWN | {"plain": {"teacher_coef": 2.0}}
    settings = config(sources=sources, teacher_kl=kind)
    algorithm: Any = make_grpo(cluster, settings, samples=B, log=print)
    _, told = algorithm.advantages(whole, ReferencedScores(*[whole.rollouts.logprob_BT] * 2), np.ones((B, T)))
    placement = packing.place_samples(whole.rollouts, np.arange(B), algorithm.mini_batches.shape)
    scores = Scores(whole.rollouts.logprob_BT)
    rows = algorithm._taught("policy", Update(whole, scores, np.arange(B), settings.loss_mask(whole), placement))
    coef_B = np.repeat([0.0, 0.5, 0.0, 0.0, 2.0], G)
    weight_BT = placement.unpack(np.asarray(rows.weight_BT), T)
    np.testing.assert_array_equal(weight_BT, coef_B[:, None] * whole.rollouts.mask_BT)
    rl = only(whole, ["math", "plain"])[0].rollouts.mask_BT.sum()
    assert rows.scale == rl / (weight_BT > 0).sum() and told["loss/tokens/teacher"] == (weight_BT > 0).sum()
    assert settings.loss_mask(whole).sum() == rl  # no surrogate counts tokens whose weight comes from a teacher only


def test_samples_without_a_hint_are_not_taught_by_the_policy_itself_and_are_counted(cluster):
    """Two sources have a `teacher_coef`: 'chat', whose prompt has a hint in the first step, and 'plain', whose prompt
    never has one."""
    sources = OWN | {"plain": {"teacher_coef": 2.0}}
    own = {"teacher": "current", "teacher_hint_tokens": 4, "teacher_kl": "top_k", "teacher_top_k": 3}
    settings = config(sources=sources, **own)
    algorithm: Any = make_grpo(cluster, settings, samples=B, log=print)
    whole, found = mixture(), []
    mask_BT, prompts = whole.rollouts.mask_BT, whole.rollouts.prompts
    chat, plain = (float(only(whole, [name])[0].rollouts.mask_BT.sum()) for name in ("chat", "plain"))
    for hint in ([200, 201, 202, 203, 204], None):  # then a step in which no prompt has a hint
        fields = prompts.fields | {TEACHER_PROMPT: [hint if name == "chat" else None for name in NAMES]}
        rollouts = dataclasses.replace(whole.rollouts, prompts=dataclasses.replace(prompts, fields=fields))
        told_of = dataclasses.replace(whole, rollouts=rollouts)
        scores = algorithm.score(0, told_of)
        advantage_BT, told = algorithm.advantages(told_of, scores, np.ones_like(mask_BT))
        batches = algorithm.pack(0, told_of, scores, advantage_BT)
        taught = chat if hint else 0.0
        assert sum(float(np.sum(batch.rows.weight_BT)) for batch in batches) == 0.5 * taught
        assert told["loss/tokens/teacher"] == taught
        assert told["opd/compared"] == pytest.approx(taught / (chat + plain))
        metrics = {name: np.mean(jax.device_get(values)) for name, values in algorithm.update(0, batches).items()}
        assert np.isfinite(list(metrics.values())).all()
        found.append(metrics["opd/reverse_kl"])
    assert found[0] > 0 == found[1]
    # A teacher that is another model needs no hint, so it also teaches 'plain'.
    reference: Any = make_grpo(cluster, config(sources=sources, **own | {"teacher": "reference"}), samples=B, log=print)
    scores = reference.score(0, told_of)
    advantage_BT, told = reference.advantages(told_of, scores, np.ones_like(mask_BT))
    (batch,) = reference.pack(0, told_of, scores, advantage_BT)
    assert np.sum(batch.rows.weight_BT) == 0.5 * chat + 2.0 * plain and "opd/compared" not in told


def test_a_component_without_tokens_is_nothing_and_is_counted(cluster):
    """The batch has samples of 'tools' alone: no policy loss, no teacher, and no division by 0."""
    tools, rows_B = only(mixture(), ["tools"])
    found_X, value, metrics = trained(cluster, config(), tools, rows_B)
    alone_X, alone, _ = trained(cluster, config(sources={}, **OWN["tools"]), tools, rows_B)
    np.testing.assert_allclose(found_X, alone_X, rtol=0, atol=SAME)
    assert value == pytest.approx(alone) and np.isfinite(list(metrics.values())).all()
    counts = {name: metrics[f"loss/tokens/{name}"] for name in ("rl", "teacher", "ce")}
    assert counts == {"rl": 0.0, "teacher": 0.0, "ce": 2.0 * G}
    assert (metrics["source/tools/samples"], metrics["source/chat/samples"], metrics["source/chat/reward"]) == (2, 0, 0)
    plain, rows_B = only(mixture(), ["plain"])
    found_X, _, metrics = trained(cluster, config(), plain, rows_B)
    np.testing.assert_allclose(found_X, trained(cluster, config(sources={}), plain, rows_B)[0], rtol=0, atol=SAME)
    assert metrics["loss/tokens/ce"] == metrics["echo/nll"] == metrics["opd/reverse_kl"] == 0


def test_the_order_and_the_packing_of_samples_do_not_matter(cluster):
    whole = mixture()
    found_X, value, _ = trained(cluster, config(), whole, np.arange(B))
    order_P = [3, 1, 4, 0, 2]
    rollouts, rows_B = messages.select(whole.rollouts, np.array(order_P)), np.arange(B).reshape(P, G)[order_P].ravel()
    turned = dataclasses.replace(whole, rollouts=rollouts, reward_B=whole.reward_B[rows_B])
    other_X, other, _ = trained(cluster, config(), turned, rows_B)
    np.testing.assert_allclose(found_X, other_X, rtol=0, atol=SAME)
    assert value == pytest.approx(other, abs=10 * SAME)


def test_sources_that_have_the_runs_settings_change_no_bit(cluster):
    whole = mixture()
    same = {"math": {"reward_coef": 1.0, "policy_loss_fn": "grpo"}, "chat": {}}
    assert len(config(sources=same).parts) == 1
    a, b = (trained(cluster, config(sources=own), whole, np.arange(B)) for own in ({}, same))
    assert a[0].tobytes() == b[0].tobytes() and a[1:] == b[1:]


def test_a_step_without_a_sample_to_teach_needs_no_hint(cluster):
    """The source with a teacher may have no prompt in a step; then the step has no hints, and needs none."""
    sources = {"chat": {"teacher_coef": 1.0, "reward_coef": 0.0}}
    rest, rows_B = only(mixture(), ["math", "plain", "tools"])
    algorithm: Any = make_grpo(cluster, config(sources=sources, teacher="current"), samples=len(rows_B), log=print)
    (reading,) = algorithm._readings(0, rest)
    np.testing.assert_array_equal(reading.view.rollouts.tokens_BT, rest.rollouts.tokens_BT)
    np.testing.assert_array_equal(algorithm.needed(0, rest), np.arange(len(rows_B)))
    with pytest.raises(ValueError, match=r"no prompt of step 0 has one: give data\.hint"):
        algorithm._readings(0, mixture())


def test_every_host_that_trains_knows_the_sources_of_prompts():
    whole = mixture()
    parts = [messages.select(whole.rollouts, np.array(rows)) for rows in ([0, 1, 2], [3, 4])]
    names = (["math", "chat", "tools"], ["math", "plain"])
    headers = []
    for rollouts, own in zip(parts, names, strict=True):
        some, _ = only(whole, own)
        b = len(rollouts.length_B)
        part = {name: getattr(some, name)[:b] for name in ("reward_B", "greedy_reward_B", "lost_B")}
        experience = dataclasses.replace(some, rollouts=rollouts, reward_FB=some.reward_FB[:, :b], **part)
        headers.append(messages.header(experience))
    met = messages.assemble(headers, 0)
    assert met.rollouts.prompts.fields == {"dataset": list(NAMES)}
    np.testing.assert_array_equal(config().part_of(met), np.repeat([1, 2, 3, 1, 0], G))


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({"loss_agg_mode": "token-mean"}, {}, r"'chat'.* have loss_agg_mode, which all samples of an update share"),
        ({"epsilom": 0.1}, {}, r"have epsilom.*A source may have reward_coef, observation_coef, teacher_coef, policy"),
        (
            {"policy_loss_fn": "ipo"},
            {"loss_algo": "gspo-token"},
            r"name a loss, and so does GRPOConfig.loss_algo='gspo-token'",
        ),
        (
            {"policy_loss_fn": "no"},
            {},
            r"'chat' \(data.sources: grpo\): GRPOConfig.policy_loss_fn='no' is not a policy loss",
        ),
        ({"advantage_estimator": "remax"}, {}, r"greedy samples are drawn for all prompts or for none"),
        ({"reward_coef": 0.0}, {}, r"leave nothing to learn from"),
        ({"teacher_coef": 1.0}, {"beta": 0.1}, r"with a teacher, GRPOConfig.beta=0.1 with a reference"),
        (
            {"reward_coef": 0.0, "teacher_coef": 1.0},
            {"dynamic_sampling": True},
            r"set GRPOConfig.dynamic_sampling=False",
        ),
        ({"policy_loss_fn": "gmpo"}, {}, r"must be 'sequence-mean-token-mean' for gmpo"),
    ],
)
def test_what_a_source_cannot_have_is_refused_by_name(own, changes, message):
    with pytest.raises(ValueError, match=message):
        config(sources={"chat": own}, **changes)


def test_the_dry_run_tells_what_differs_for_samples_of_a_source():
    told = config(sources={"chat": {"teacher_coef": 0.5, "reward_coef": 0.0}}, reward_coef=2.0)
    assert "teacher" not in told.formula(8) and "clip" in told.formula(8)
    assert told.describe(8) == [
        "samples of chat have settings of their own: teacher_coef=0.5, reward_coef=0.0",
        "advantages times 2",
    ]
    untaught = {"teacher_coef": 0.5, "reward_coef": 0.0}
    nothing = config(sources={"chat": untaught}, reward_coef=0.0, beta=0.0, observation_coef=0.1)
    assert "group" not in nothing.formula(8), "the formula names no advantage, because none enters the loss"
    plain = {"chat": {"policy_loss_fn": "gpg"}}
    assert any("has no ratio" in warning for warning in config(sources=plain).warnings(1))


def test_a_job_takes_the_settings_from_its_sources_and_asks_for_what_they_need():
    data = {"sources": ({"path": "problems"}, {"path": "sums", "grpo": {"advantage_scale": "none", "reward_coef": 2}})}
    job = parsed("grpo", {}, data=data)
    assert job.algo.number_of == {"sums": 1} and job.algo.parts[1].reward_coef == 2
    assert "samples of sums have settings of their own: advantage_scale='none', reward_coef=2" in "\n".join(
        job.algo.describe(8)
    )
    cases = {
        r"model.reference, which names it, is empty": ("grpo", {"teacher_coef": 1.0, "reward_coef": 0.0}),
        r"learns what an environment answers, and there is none": ("grpo", {"observation_coef": 0.1}),
        r"data.sources: sums has settings 'grpo', and algorithm='ppo'": ("ppo", {"reward_coef": 2.0}),
    }
    for message, (name, own) in cases.items():
        with pytest.raises(ValueError, match=message):
            parsed(name, {"beta": 0.0}, data={"sources": ({"path": "problems"}, {"path": "sums", "grpo": own})})
    with pytest.raises(ValueError, match=r"set 'grpo' in the entries of data\.sources"):
        parsed("grpo", {"sources": {"sums": {"reward_coef": 2.0}}})
    with pytest.raises(ValueError, match=r"told apart by the field `dataset` of prompts, and these have none"):
        whole = mixture()
        bare = dataclasses.replace(whole.rollouts.prompts, fields={})
        config().part_of(dataclasses.replace(whole, rollouts=dataclasses.replace(whole.rollouts, prompts=bare)))
