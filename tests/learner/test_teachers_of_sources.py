"""Teachers of sources have their own tokenizers and meshes; each scores the samples of its sources."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from test_translated_batch import bytes_tokenizer
from test_updates import LIMIT, PROMPT, B, Bench, G, parsed

from podrl.data.hint import TEACHER_PROMPT
from podrl.data.pipeline import PromptStream
from podrl.data.tokenizer import Tokenizer
from podrl.job import job
from podrl.job.config import TINY, ScratchModel, _other_tokenizers
from podrl.job.placement import AuxiliaryConfig, Meshes, RolesConfig, meshes
from podrl.job.ready import check_models
from podrl.learner.distillation import make_grpo
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.learner.scoring import SpanScores
from podrl.mesh.build import make_mesh

SOURCES = ({"path": "problems", "name": "math"}, {"path": "sums", "name": "chat"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes two teachers with random weights: one with the policy's tokenizer, one with a byte tokenizer."""
    root = tmp_path_factory.mktemp("teachers")
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    size = ScratchModel(num_layers=2, model_dim=64, ffn_dim=96, num_heads=2, num_kv_heads=1)
    for seed, name in enumerate(("same", "bytes")):
        files = TINY if name == "same" else bytes_tokenizer(root)
        job.scratch_model(size, Tokenizer(files).vocab_size, mesh, seed=seed).save(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(files / file, root / name)
    written = json.loads((root / "bytes" / "tokenizer_config.json").read_text())
    written["chat_template"] = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (root / "bytes" / "tokenizer_config.json").write_text(json.dumps(written))
    return root


def described(*teachers: dict[str, Any], **groups: Any) -> Any:
    own = {"num_iterations": 1, "teacher_hint_tokens": 64}
    return parsed("opd", own, model={"teachers": teachers}, data={"sources": SOURCES}, **groups)


def bench(found: Any, mesh: Any = None) -> Any:
    made = Bench(parsed("grpo", {}))
    one = make_mesh("fsdp=1", jax.devices()[:1])
    made.cluster = job.build_cluster(found, Meshes(one, one, one, one, mesh))
    return made


def told(experience: Any, **fields: Any) -> Any:
    prompts = dataclasses.replace(experience.rollouts.prompts, fields={"dataset": ["math", "chat"], **fields})
    return dataclasses.replace(experience, rollouts=dataclasses.replace(experience.rollouts, prompts=prompts))


@pytest.fixture(scope="module")
def said():
    """Makes samples of words, filled up with end-of-turn tokens; sample 0 also ends its turn at place 10."""
    made, own = Bench(parsed("grpo", {})), Tokenizer(TINY)
    rollouts = made.experience.rollouts
    tokens_BT = rollouts.tokens_BT.copy()
    for b in range(B):
        words = own.encode_plain(f"{b}+1={b + 1}. The answer is {b}")[: int(rollouts.length_B[b]) - PROMPT]
        tokens_BT[b, PROMPT : PROMPT + len(words)] = words
        tokens_BT[b, PROMPT + len(words) : rollouts.length_B[b]] = own.turn_end_id
    tokens_BT[:2, 10] = own.turn_end_id
    return dataclasses.replace(made.experience, rollouts=dataclasses.replace(rollouts, tokens_BT=tokens_BT))


def test_each_source_is_scored_by_its_teacher(quick_compilation, folders, said):
    """Teachers with the policy's tokenizer score as `model.reference` does; sources without a teacher get no score."""
    path = str(folders / "same")
    alone = Bench(parsed("opd", {"num_iterations": 1}, model={"reference": path}))
    config = parsed("opd", {"num_iterations": 1}, model={"reference": path}).algo
    expected = make_grpo(alone.cluster, config, samples=B, log=print).score(0, said)
    for sources, taught_B in {(): np.ones(B, bool), ("math",): np.arange(B) < G}.items():
        found = described({"path": path, "sources": sources})
        cluster = bench(found).cluster
        algorithm = make_grpo(cluster, found.algo, samples=B, log=print)
        experience = told(said)
        scores = algorithm.score(0, experience)
        assert isinstance(scores, SpanScores)
        own_BT = said.rollouts.mask_BT * taught_B[:, None]
        np.testing.assert_allclose(scores.ref_logprob_BT * own_BT, expected.ref_logprob_BT * own_BT, atol=1e-5)
        advantage_BT, metrics = algorithm.advantages(experience, scores, np.zeros_like(own_BT))
        np.testing.assert_allclose(
            advantage_BT, (expected.ref_logprob_BT - expected.old_logprob_BT) * own_BT, atol=1e-5
        )
        assert metrics["opd/compared"] == pytest.approx(own_BT.sum() / said.rollouts.mask_BT.sum())
        assert fetched_means(learn(algorithm, 0, experience))["opd/reverse_kl"] == pytest.approx(
            metrics["opd/reverse_kl"], rel=1e-5
        )


def test_a_teacher_of_other_tokens_gives_each_span_its_sum(quick_compilation, folders, said):
    """The teacher scores a row of its own tokens. Each token of a span gets the teacher's sum over the span minus the
    policy's sum; the test recomputes these sums."""
    path = str(folders / "bytes")
    found = described({"path": path, "sources": ("math",)}, {"path": str(folders / "same")})
    cluster, theirs, own = bench(found).cluster, Tokenizer(path), Tokenizer(TINY)
    teacher = next(one for one in cluster.teachers if one.tokenizer is not None)
    assert [one.tokenizer is None for one in cluster.teachers] == [False, True]
    algorithm = make_grpo(cluster, found.algo, samples=B, log=print)
    with pytest.raises(ValueError, match=r"has another tokenizer than the policy, and prompts lack the field"):
        algorithm.score(0, told(said))
    prompt = theirs.encode("1+1?\n")
    experience = told(said, **{TEACHER_PROMPT: [prompt, said.rollouts.tokens_BT[G, :PROMPT].tolist()]})
    scores: Any = algorithm.score(0, experience)
    advantage_BT, metrics = algorithm.advantages(experience, scores, np.zeros_like(said.rollouts.mask_BT))
    alone = bench(parsed("grpo", {}, model={"path": path})).cluster
    rollouts = said.rollouts
    for b in range(G):
        ids = rollouts.tokens_BT[b, PROMPT : rollouts.length_B[b]].tolist()
        stop = ids.index(own.turn_end_id) if own.turn_end_id in ids else len(ids)
        pieces = [own.token_bytes(i) for i in ids[:stop]]
        their_ids = theirs.encode_plain(b"".join(pieces).decode(), behind=prompt[-1])
        their_ids += [theirs.turn_end_id] * (stop < len(ids))
        row = np.array([prompt + their_ids], np.int32)
        score_U = np.asarray(alone.get_actor_per_token_logps(row, np.array([row.shape[1]])))[0, len(prompt) :]
        span_T = scores.span_BT[b, PROMPT : PROMPT + stop + (stop < len(ids))]
        assert (span_T >= 0).all() and (scores.span_BT[b, PROMPT + len(span_T) :] == -1).all()
        own_T = scores.old_logprob_BT[b, PROMPT : PROMPT + len(span_T)]
        assert scores.ref_logprob_BT[b].sum() == pytest.approx(score_U.sum(), abs=1e-4)
        for n in range(span_T.max() + 1):
            (at,) = np.nonzero(span_T == n)
            gap = scores.ref_logprob_BT[b, PROMPT + at].sum() - own_T[at].sum()
            np.testing.assert_allclose(advantage_BT[b, PROMPT + at], gap, atol=1e-4)
    assert 0 < metrics["opd/compared"] < 1, "the samples that go on after the end of their turn are not compared"
    assert np.array_equal(algorithm.needed(0, experience), np.arange(B)) and teacher.mesh == cluster.actor_mesh
    assert np.isfinite(fetched_means(learn(algorithm, 0, experience))["actor/grad_norm"])


def test_teachers_may_have_devices_of_their_own(quick_compilation, folders, said):
    """A teacher on devices of its own gives the same scores as on the trainer's devices."""
    path, found = str(folders / "same"), {}
    roles = RolesConfig(teacher=AuxiliaryConfig("fsdp=2"))
    on = meshes(roles)
    kept = {d.id for mesh in (on.trainer, on.rollout) for d in mesh.devices.flat}
    assert on.teacher.size == 2 and not kept & {d.id for d in on.teacher.devices.flat}
    for mesh in (None, on.teacher):
        config = described({"path": path})
        made = bench(config, mesh)
        scores = make_grpo(made.cluster, config.algo, samples=B, log=print).score(0, told(said))
        found[mesh] = scores.ref_logprob_BT
    np.testing.assert_allclose(found[None], found[on.teacher], atol=1e-5)


def test_prompts_are_written_for_a_teacher_by_its_own_template(folders):
    found = described({"path": str(folders / "bytes"), "sources": ("chat",)}, {"path": str(folders / "same")})
    own, theirs = Tokenizer(TINY), Tokenizer(folders / "bytes")
    tokenizers = _other_tokenizers(found, own)
    assert set(tokenizers) == {"chat", ""} and tokenizers[""] is own
    stream = PromptStream.from_config(
        found.data, own, prompts_per_step=8, max_prompt_length=200, hint_tokens=200, teachers=tokenizers
    )
    prompts = next(stream)
    for p, (name, ids) in enumerate(zip(prompts.fields["dataset"], prompts.fields[TEACHER_PROMPT], strict=True)):
        question = prompts.fields["question"][p]
        assert ids == (theirs.encode(f"{question}\n") if name == "chat" else own.encode(prompts.text[p]))
    assert set(prompts.fields["dataset"]) == {"math", "chat"}


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("model.teachers does not go with grpo.teacher_kl='full'", {"grpo": {"teacher_kl": "full"}}),
        (
            "a teacher of 'tools', and data.sources has",
            {"teachers": ({"path": "a", "sources": ("tools",)},)},
        ),
        ("gives some samples several teachers", {"teachers": ({"path": "a"}, {"path": "b"})}),
        ("does not go with model.reference='tiny'", {"model": {"reference": "tiny"}}),
        ("model.teachers has no effect without grpo.teacher_coef above 0", {"algorithm": "grpo"}),
    ],
)
def test_teachers_that_contradict_each_other_are_refused(said, changes):
    model = {"teachers": changes.get("teachers", ({"path": "a"},))} | changes.get("model", {})
    with pytest.raises(ValueError, match=said):
        parsed(changes.get("algorithm", "opd"), changes.get("grpo", {}), model=model, data={"sources": SOURCES})
    with pytest.raises(ValueError, match=r"roles.teacher.mesh='fsdp=2' sets devices aside for teachers"):
        parsed("grpo", {}, roles={"teacher": {"mesh": "fsdp=2"}})
    with pytest.raises(ValueError, match=r"model.teachers='nowhere' is not a directory"):
        check_models(parsed("opd", {}, model={"teachers": ({"path": "nowhere"},)}), ["model.teachers"])
    assert LIMIT
