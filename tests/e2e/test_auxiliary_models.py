"""Whole runs with a critic and a reward model on shared or own meshes: killed, resumed, in pods."""

import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from processes import CURRICULUM, SMALL, TWO_DEVICES, chose, job, on_any_mesh, run, same_end, wall_clock_kept
from safetensors.numpy import load_file, save_file

from podrl.job.config import TINY

pytestmark = pytest.mark.e2e
PPO = (
    *(flag.replace("config.grpo.", "config.ppo.") for flag in SMALL),
    *("--config.algorithm=ppo", "--config.ppo.critic_warmup=1", "--config.trainer.critic_learning_rate=1e-3"),
    *("--config.eval.problems=0", "--config.trainer.max_steps=3", "--config.checkpoint.every=1"),
)
APART = (
    *("--config.roles.critic.mesh=fsdp=2", "--config.roles.reward.mesh=data=2"),
    *("--config.roles.trainer.mesh=fsdp=2", "--config.roles.rollout.mesh=data=2"),
)
MEASURES = [f"sampler/{name}" for name in ("abs_diff", "exp_diff", "kl", "kl_reverse", "pearson")]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> pathlib.Path:
    """Makes a reward model: the embedded model with slightly changed weights and a random head."""
    import ml_dtypes  # noqa: F401 - bfloat16 for safetensors

    out = tmp_path_factory.mktemp("scorer") / "model"
    shutil.copytree(TINY, out)
    rng = np.random.default_rng(3)
    tensors = {
        name: (value.astype(np.float32) + 0.01 * rng.normal(size=value.shape)).astype(value.dtype)
        for name, value in load_file(TINY / "model.safetensors").items()
    }
    norm = tensors["model.norm.weight"]
    tensors["score.weight"] = (0.1 * rng.normal(size=(1, norm.shape[0]))).astype(norm.dtype)
    save_file(tensors, out / "model.safetensors")
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"architectures": ["Gemma2ForSequenceClassification"]}))
    return out


def auxiliary(scorer: pathlib.Path) -> tuple[str, ...]:
    return (f"--config.model.critic={scorer}", f"--config.reward.model={scorer}", "--config.reward.model_weight=0.5")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, scorer):
    """Runs a job in one process; the actor, the engine, the critic and the reward model have two devices each."""
    return run(tmp_path_factory.mktemp("alone") / "run", *auxiliary(scorer), *APART, *CURRICULUM, base=PPO)


@pytest.mark.nightly("podrl/cluster", "podrl/rollout/clock.py")
def test_by_the_wall_clock_with_the_reward_model_on_the_engines_devices(tmp_path, scorer):
    """While the learner waits for a batch, the thread that launches the engine's dispatches also runs the reward model,
    between two dispatches."""
    more = ("--config.ppo.max_staleness=2", "--config.rollout.clock=wall", "--config.rollout.lanes=4", TWO_DEVICES)
    done = run(tmp_path / "run", *auxiliary(scorer), *more, base=PPO)
    records = [record for record in done.records() if "time/step" in record]
    assert all("critic/vf_loss" in record and record["reward/reward_model"] for record in records)
    wall_clock_kept(done.workdir, prompts=4, staleness=2)


@pytest.mark.nightly("podrl/cluster")
def test_a_critic_and_a_reward_model_on_meshes_of_their_own(alone):
    roles = {line.split("│")[1].strip(): line for line in alone.stdout.splitlines() if line.startswith("│")}
    for role, ids in {"trainer": "0-1", "rollout": "2-3", "critic": "4-5", "reward": "6-7"}.items():
        assert f" {ids} " in roles[role], roles[role]
    records = [r for r in alone.records() if "time/step" in r]
    assert len(records) == 3
    fns = ("exact_format", "approximate_format", "answer", "number")
    for step, record in enumerate(records, start=1):
        total = sum(record[f"reward/{name}"] for name in fns) + 0.5 * record["reward/reward_model"]
        assert record["reward/mean"] == pytest.approx(total, abs=1e-6) and record["reward/reward_model"] != 0.0
        assert record["critic/value"] != 0.0, "the critic's head is loaded with its model"
        assert ("actor/pg_loss" in record) == (step > 1), "the first step trains the critic alone"
        assert all(math.isfinite(record[name]) for name in MEASURES), "the first step measures the sampler, too"
        assert record["sampler/abs_diff"] < 1e-4 and record["sampler/pearson"] > 0.999
    samples = [json.loads(line) for line in (alone.workdir / "samples.jsonl").read_text().splitlines()]
    assert len({sample["reward_model"] for sample in samples}) > 1


@pytest.mark.nightly("podrl/cluster", "podrl/storage/checkpoint.py")
def test_killed_they_go_on_where_they_were(alone, scorer, tmp_path):
    args = (*auxiliary(scorer), *APART, *CURRICULUM)
    with job(tmp_path / "run", *args, base=PPO) as started:
        started.wait_for_step(2)
        started.kill()
    assert "Resumed after step" in run(tmp_path / "run", *args, base=PPO).stdout
    same_end(tmp_path / "run", alone.workdir)


@pytest.mark.nightly("podrl/cluster/critic.py", "podrl/cluster/reward_model.py")
@pytest.mark.parametrize("topology", ["shared", "split"])
def test_a_pod_trains_them_as_one_process_does(topology, alone, scorer, tmp_path):
    """Each of two trainer hosts has one device for the actor and one for the critic; each of two rollout hosts has one
    device for decoding and one for scoring."""
    pod = ("--local_processes=4", f"--topology={topology}")
    found = on_any_mesh(run(tmp_path / "run", *auxiliary(scorer), *APART, *CURRICULUM, *pod, base=PPO).workdir)
    expected = on_any_mesh(alone.workdir)
    assert chose(expected), "a curriculum chooses the prompts, too"
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert math.isclose(value, theirs[name], rel_tol=1e-3, abs_tol=1e-5), (ours["step"], name)


@pytest.mark.nightly("podrl/cluster/rl_cluster.py")
def test_they_share_meshes_where_nothing_else_is_said(scorer, tmp_path):
    done = run(tmp_path / "run", *auxiliary(scorer), "--config.trainer.max_steps=2", base=PPO[:-2])
    record = next(r for r in done.records() if r["step"] == 2)
    assert {"critic/vf_loss", "reward/reward_model", "actor/pg_loss"} <= record.keys()


@pytest.mark.nightly("configs/ppo_gemma.py", "podrl/learner/ppo.py")
@pytest.mark.optimised
def test_the_ppo_configuration_as_it_is(tmp_path):
    """Runs configs/ppo_gemma.py with its own meshes, losses and batches, for one step more than the critic's
    warm-up."""
    args = ("--config.trainer.max_steps=6", "--config.eval.problems=32", "--config.eval.samples=1")
    done = run(tmp_path / "run", *args, base=("--config=ppo_gemma.py",))
    records = [r for r in done.records() if "time/step" in r]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert ["actor/pg_loss" in r for r in records] == [False] * 5 + [True]
    last = records[-1]
    for name in ("critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "actor/pg_clipfrac", "actor/entropy"):
        assert math.isfinite(last[name]), name
    assert last["reward/kl_coef"] == 0.01 and last["actor/grad_norm"] > 0
    assert records[4]["critic/explained_variance"] > records[0]["critic/explained_variance"]
    summary = json.loads((done.workdir / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["evaluated_at"] == [0, 6]
    assert "before" in done.stdout and "after" in done.stdout
