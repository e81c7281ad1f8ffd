"""The policy teaches itself with a hint in the prompt, on its likeliest ids: columns, gradient, packing, refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_self_distillation import HINTS, ROOM, by_hand, told
from test_updates import PROMPT, B, Bench, G, moved, parsed

from podrl.algorithms.distill import top_k_kl
from podrl.job import job as jobs
from podrl.job.placement import Meshes
from podrl.learner.distillation import make_grpo
from podrl.learner.hinted_batch import HintedBatch
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.learner.scoring import IdScores
from podrl.mesh.build import make_mesh
from podrl.models import decoder

K = 4
VOCABULARY = 384


def job(teacher: str = "current", *, trainer: Any = None, model: Any = None, **changes: Any) -> Any:
    own = {"teacher": teacher, "teacher_hint_tokens": ROOM, "num_iterations": 1}
    own |= {"teacher_kl": "top_k", "teacher_top_k": K} | changes
    described = parsed("opd", own, data={"hint": "The answer is {answer}."}, **({"model": model} if model else {}))
    return dataclasses.replace(described, trainer=dataclasses.replace(described.trainer, **(trainer or {})))


def dense(params: Any, cluster: Any, tokens_BT: np.ndarray, length_B: np.ndarray) -> jax.Array:
    """Computes the log-probabilities of all ids at each token's place, (B, T, V), for unpacked samples."""
    place_BT = np.tile(np.arange(tokens_BT.shape[1]), (len(tokens_BT), 1))
    segment_BT = (place_BT < length_B[:, None]).astype(np.int32)
    hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, place_BT, cluster.model)
    logits_BTV = decoder.unembed(params, hidden_BTD, cluster.model) / cluster.config.rollout().temperature
    return jnp.roll(jax.nn.log_softmax(logits_BTV), 1, axis=1)


def hinted(params: Any, cluster: Any, rollouts: Any, hints: Any) -> np.ndarray:
    """Computes `dense` of samples after the teacher's prompts; moves the result to the places that the tokens have
    after the policy's prompts."""
    found_BTV = np.asarray(dense(params, cluster, *by_hand(rollouts, hints)))
    moved_BTV = np.zeros((*rollouts.tokens_BT.shape, found_BTV.shape[-1]), np.float32)
    for b in range(B):
        n, begin = int(rollouts.length_B[b]), len(hints[b // G] or range(PROMPT))
        moved_BTV[b, PROMPT:n] = found_BTV[b, begin : begin + n - PROMPT]
    return moved_BTV


def columns(scores: Any, rollouts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids at each sampled token and the teacher's log-probabilities, by sample and place: each (X, K)."""
    assert isinstance(scores, IdScores)
    number_X = scores.number_BT[rollouts.mask_BT > 0]
    return scores.id_XK[number_X], scores.teacher_logprob_XK[number_X]


@pytest.fixture(scope="module")
def bench(quick_compilation):
    return Bench()


def reset(bench: Any) -> Any:
    bench.cluster.state, bench.cluster.actor.average = jax.device_put(bench.start, bench._placed), None
    return bench.cluster


def test_numbers_by_hand_of_two_prompts_with_a_hint_and_without(bench):
    """Samples 0 and 5 have 2 and 1 sampled tokens after prompts of 4 tokens. `number_BT` numbers the sampled tokens
    from 1, whatever the lengths of the hints."""
    rollouts = bench.experience.rollouts
    mask_BT = np.zeros_like(rollouts.mask_BT)
    mask_BT[0, 4:6], mask_BT[5, 4] = 1, 1
    short = told(dataclasses.replace(bench.experience, rollouts=dataclasses.replace(rollouts, mask_BT=mask_BT)))
    scores = make_grpo(bench.cluster, job().algo, samples=B, log=print).score(0, short)
    assert isinstance(scores, IdScores) and scores.id_XK.shape == scores.teacher_logprob_XK.shape == (4, K)
    assert scores.number_BT[0, 3:7].tolist() == [0, 1, 2, 0] and scores.number_BT[5, 3:6].tolist() == [0, 3, 0]
    read = HintedBatch.of(short.rollouts).rollouts
    # Positions of the sampled tokens after the teacher's prompts, which have 7 and 2 tokens.
    assert np.argwhere(read.mask_BT).tolist() == [[0, 7], [0, 8], [5, 2]]
    assert not scores.teacher_logprob_XK[0].any() and (scores.teacher_logprob_XK[1:] < 0).all()


@pytest.mark.parametrize("teacher", ["current", "initial", "ema"])
def test_the_policys_likeliest_ids_are_scored_behind_the_hint_by_each_copy_of_it(bench, teacher):
    cluster, experience = reset(bench), told(bench.experience)
    rollouts = experience.rollouts
    algorithm = make_grpo(cluster, job(teacher, teacher_rate=0.25).algo, samples=B, log=print)
    learn(algorithm, 0, experience)
    assert moved(bench.start.params, jax.device_get(cluster.state.params))
    theirs = {
        "current": cluster.actor.params,
        "initial": lambda: cluster.actor.reference,
        "ema": cluster.actor._average,
    }
    id_XK, found_XK = columns(algorithm.score(1, experience), rollouts)
    at_BT = rollouts.mask_BT > 0
    own_XV = np.asarray(dense(cluster.actor.params(), cluster, rollouts.tokens_BT, rollouts.length_B))[at_BT]
    np.testing.assert_allclose(
        np.take_along_axis(own_XV, id_XK, axis=1), np.sort(own_XV, axis=1)[:, : -K - 1 : -1], atol=1e-5
    )
    their_XV = hinted(theirs[teacher](), cluster, rollouts, HINTS)[at_BT]
    np.testing.assert_allclose(found_XK, np.take_along_axis(their_XV, id_XK, axis=1), atol=1e-5)
    if teacher == "current":
        assert np.abs(found_XK - np.take_along_axis(own_XV, id_XK, axis=1)).max() > 0.1, (
            "the hint must change the log-probabilities"
        )


@pytest.mark.parametrize("hints", ["own prompts", "none"])
def test_behind_the_policys_own_prompt_it_is_the_divergence_without_a_hint(bench, hints):
    cluster, rollouts = reset(bench), bench.experience.rollouts
    prompts = [rollouts.tokens_BT[p * G, :PROMPT].tolist() for p in range(B // G)]
    experience = told(bench.experience, prompts if hints == "own prompts" else [None, None])
    algorithm = make_grpo(cluster, job("initial", teacher_hint_tokens=0).algo, samples=B, log=print)
    changed = jax.tree.map(lambda x: 1.01 * x, cluster.state.params)  # otherwise policy and teacher would be equal
    cluster.state = cluster.state.replace(params=jax.device_put(changed, bench._placed.params))
    scores = algorithm.score(0, experience)
    (batch,) = algorithm.pack(0, experience, scores, np.zeros_like(rollouts.mask_BT))
    id_ABTK, theirs_ABTK = jax.device_get(cluster.actor.teaching(batch.layout()))
    at_ABT = np.asarray(batch.rows.alone.mask_BT) > 0
    np.testing.assert_array_equal(np.asarray(batch.rows.id_BTK)[at_ABT], id_ABTK[at_ABT])
    np.testing.assert_array_equal(np.asarray(batch.rows.teacher_logprob_BTK)[at_ABT], theirs_ABTK[at_ABT])
    taught = np.asarray(batch.rows.weight_BT)[at_ABT]
    assert (taught == (1.0 if hints == "own prompts" else 0.0)).all(), (
        "without a hint the policy's copy has nothing to teach, so the weight is 0"
    )
    algorithm.update(0, [batch])


def test_the_update_is_the_gradient_written_out(quick_compilation):
    """Rewards use their own aggregation, and the divergence is averaged over tokens of samples with a hint. The update
    takes several micro-batches."""
    hints, trainer = [HINTS[0], None], {"actor_optimizer": optax.sgd(1.0), "micro_batch_sequences": 2}
    changes = {"reward_coef": 2.0, "teacher_coef": 0.5, "loss_agg_mode": "sequence-mean-token-mean"}
    described = job(trainer=trainer, policy_loss_fn="reinforce", **changes)
    bench = Bench(described)
    cluster, experience = bench.cluster, told(bench.experience, hints)
    algorithm = make_grpo(cluster, described.algo, samples=B, log=print)
    rollouts = experience.rollouts
    scores = algorithm.score(0, experience)
    reward_BT, _ = algorithm.rewards(experience, scores)
    advantage_BT, metrics = algorithm.advantages(experience, scores, reward_BT)
    (batch,) = algorithm.pack(0, experience, scores, advantage_BT)
    assert int(batch.micro_batches) > 1
    mask_BT = jnp.asarray(rollouts.mask_BT)
    has_hint_B = np.array([hint is not None for hint in hints])[rollouts.group_B]
    taught_BT = mask_BT * has_hint_B[:, None]
    assert metrics["opd/compared"] == pytest.approx(float(taught_BT.sum() / mask_BT.sum()))
    theirs_BTV = hinted(cluster.state.params, cluster, rollouts, hints)

    def loss(params):
        logp_BTV = dense(params, cluster, rollouts.tokens_BT, rollouts.length_B)
        own_BT = -advantage_BT * jnp.take_along_axis(logp_BTV, rollouts.tokens_BT[..., None], axis=-1)[..., 0] * mask_BT
        id_BTK = jax.lax.top_k(jax.lax.stop_gradient(logp_BTV), K)[1]
        kl_BT = top_k_kl(*(jnp.take_along_axis(x, id_BTK, axis=-1) for x in (logp_BTV, theirs_BTV)))
        kl = jnp.sum(jnp.where(taught_BT > 0, kl_BT, 0.0)) / taught_BT.sum()
        return jnp.mean(own_BT.sum(axis=1) / mask_BT.sum(axis=1)) + 0.5 * kl, kl

    expected, kl = jax.jit(jax.grad(loss, has_aux=True))(cluster.state.params)
    before = jax.device_get(cluster.state.params)
    found = fetched_means(algorithm.update(0, [batch]))
    norm = float(np.sqrt(sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(expected))))
    assert found["opd/reverse_kl"] == pytest.approx(float(kl), rel=1e-4)
    for old, new, g in zip(*map(jax.tree.leaves, (before, cluster.state.params, expected)), strict=True):
        np.testing.assert_allclose(old - np.asarray(new), g, atol=2e-5 * max(norm, 1.0))


def test_the_gradient_by_logits_is_that_of_torch_in_float64():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits_XV, their_XV = rng.normal(size=(2, 6, 9)) * 2
    id_XK = np.argsort(-logits_XV, axis=1)[:, :3]
    theirs_XK = np.take_along_axis(np.asarray(jax.nn.log_softmax(jnp.asarray(their_XV))), id_XK, axis=1)

    def divergence(logits_XV):
        return top_k_kl(jnp.take_along_axis(jax.nn.log_softmax(logits_XV), jnp.asarray(id_XK), axis=1), theirs_XK).sum()

    found, gradient_XV = jax.value_and_grad(divergence)(jnp.asarray(logits_XV, jnp.float32))
    wide_XV = torch.tensor(logits_XV, dtype=torch.float64, requires_grad=True)
    p_XV, q_XV = (torch.softmax(x, dim=1) for x in (wide_XV, torch.tensor(their_XV, dtype=torch.float64)))
    p_XK, q_XK = (x_XV.gather(1, torch.tensor(id_XK)) for x_XV in (p_XV, q_XV))
    p_XL, q_XL = (torch.cat([x_XK, 1 - x_XK.sum(dim=1, keepdim=True)], dim=1) for x_XK in (p_XK, q_XK))
    expected = (p_XL * (p_XL / q_XL).log()).sum()
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient_XV, wide_XV.grad.numpy(), atol=2e-6)


def test_neither_order_nor_packing_nor_mesh_of_the_rows_matters(bench):
    """Samples in other rows, in other micro-batches or on other devices get the same ids and log-probabilities."""
    reset(bench)
    experience = told(bench.experience)
    expected = columns(
        make_grpo(bench.cluster, job().algo, samples=B, log=print).score(0, experience), experience.rollouts
    )
    mesh = make_mesh("fsdp=2", jax.devices()[:2])
    other = job(trainer={"micro_batch_sequences": 2, "share_prompts": False, "mini_batch_size": 1}, num_iterations=2)
    cluster = jobs.build_cluster(other, Meshes(mesh, mesh, mesh, mesh))
    algorithm = make_grpo(cluster, other.algo, samples=B, log=print)
    assert len(algorithm.mini_batches.split(0, 0, B)) == 2
    scores = algorithm.score(0, experience)
    for a, b in zip(columns(scores, experience.rollouts), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # The second half of the prompts comes first: columns move with their samples.
    order_B = np.roll(np.arange(B), G)
    rollouts = experience.rollouts
    swap = {f.name: getattr(rollouts, f.name) for f in dataclasses.fields(rollouts) if f.name.endswith(("_BT", "_B"))}
    turned = {name: x[order_B] for name, x in swap.items() if x is not None and name != "group_B"}
    prompts = dataclasses.replace(
        rollouts.prompts, tokens_PT=rollouts.prompts.tokens_PT[::-1], fields={"teacher_prompt": HINTS[::-1]}
    )
    turned_rollouts = dataclasses.replace(rollouts, prompts=prompts, **turned)
    found = columns(algorithm.score(0, dataclasses.replace(experience, rollouts=turned_rollouts)), turned_rollouts)
    first = int((rollouts.mask_BT[:G] > 0).sum())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.roll(a, first, axis=0), b, atol=1e-5)
    # Every pass of a step uses the teacher's log-probabilities from the beginning of the step, whichever samples an
    # update takes.
    batches = algorithm.pack(0, experience, scores, np.zeros_like(rollouts.mask_BT))
    assert len(batches) == 4
    of_pass = [
        np.concatenate(
            [np.asarray(b.rows.teacher_logprob_BTK)[np.asarray(b.rows.weight_BT) > 0] for b in batches[i:][:2]]
        )
        for i in (0, 2)
    ]
    np.testing.assert_array_equal(*(np.sort(x_XK, axis=0) for x_XK in of_pass))
    before = jax.device_get(cluster.state.params)
    assert fetched_means(algorithm.update(0, batches))["opd/reverse_kl"] > 0
    assert moved(before, jax.device_get(cluster.state.params))


def test_the_sampled_token_has_the_log_probability_that_sampled_gives_it_in_samples_of_several_pieces_too(bench):
    """All ids are compared, so each sampled id is among them. Hints are longer or shorter than prompts, or absent."""
    cluster, rollouts = reset(bench), bench.experience.rollouts
    piece_BT = np.zeros_like(rollouts.tokens_BT)
    for b, begin in ((0, 7), (1, 6), (5, 8)):
        piece_BT[b, begin : rollouts.length_B[b]] = 1
    mask_BT = rollouts.mask_BT * (np.diff(piece_BT, axis=1, prepend=0) == 0)  # nothing predicts a piece's first token
    pieces = dataclasses.replace(rollouts, piece_BT=piece_BT.astype(rollouts.piece_BT.dtype), mask_BT=mask_BT)
    for hints in (HINTS, [None, [5]]):
        experience = told(dataclasses.replace(bench.experience, rollouts=pieces), hints)
        make = functools.partial(make_grpo, cluster, samples=B, log=print, pieces=True)
        sampled = make(job(teacher_kl="sampled").algo).score(0, experience).ref_logprob_BT[mask_BT > 0]
        id_XK, found_XK = columns(make(job(teacher_top_k=VOCABULARY).algo).score(0, experience), pieces)
        token_X = pieces.tokens_BT[mask_BT > 0]
        assert (np.sort(id_XK, axis=1) == np.arange(VOCABULARY)).all()
        np.testing.assert_allclose(found_XK[id_XK == token_X[:, None]], sampled, atol=2e-6)
        np.testing.assert_allclose(np.exp(found_XK).sum(axis=1), 1.0, rtol=1e-5)


def test_adapters_learn_from_their_base_behind_the_hint(quick_compilation):
    described = job("initial", model={"lora": {"rank": 2, "alpha": 4.0}})
    bench = Bench(described)
    cluster, experience = bench.cluster, told(bench.experience)
    algorithm = make_grpo(cluster, described.algo, samples=B, log=print)
    assert cluster.actor.reference is cluster.actor.frozen
    found = [fetched_means(learn(algorithm, step, experience))["opd/reverse_kl"] for step in range(2)]
    assert found == sorted(found, reverse=True) and found[-1] < found[0], found


def test_what_stays_impossible_is_refused_with_the_key(bench):
    said = r"teacher_kl='full' .* grpo.teacher='ema' reads another prompt: set grpo.teacher_kl='top_k', which is exact"
    with pytest.raises(ValueError, match=said):
        parsed("opd", {"teacher": "ema", "teacher_kl": "full"}, data={"hint": "{answer}"})
    reference = {"data": {"hint": "{answer}"}, "model": {"reference": "tiny"}}
    with pytest.raises(ValueError, match=r"data.hint gives the teacher another prompt: set grpo.teacher_kl='top_k'"):
        parsed("opd", {"teacher_kl": "full"}, **reference)
    assert parsed("opd", {"teacher_kl": "top_k"}, **reference).algo.distillation.kl == "top_k"
    with pytest.raises(ValueError, match=r"grpo.teacher_top_k=385 is more than the 384 token ids .* set it to 384"):
        make_grpo(reset(bench), job(teacher_top_k=385).algo, samples=B, log=print)
    with pytest.raises(ValueError, match=r"no prompt of step 0 has one: give data.hint"):
        make_grpo(bench.cluster, job().algo, samples=B, log=print).score(0, bench.experience)
