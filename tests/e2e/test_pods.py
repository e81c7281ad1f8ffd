"""Pods of several processes on this machine train as one process does, even if a process of the pod dies."""

import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest
from processes import (
    CURRICULUM,
    DEADLINE_S,
    TWO_DEVICES,
    Job,
    await_end,
    chose,
    comparable,
    environment,
    job,
    on_any_mesh,
    run,
    same_end,
    same_weights,
    samples,
    trained_steps,
)

from podrl.doctor import examine
from podrl.job.config import TINY, ScratchModel
from podrl.job.job import scratch_model
from podrl.mesh.build import make_mesh
from podrl.models.hf_config import read_config
from podrl.rundir import trace
from podrl.runtime.local_pod import free_ports

pytestmark = pytest.mark.e2e

PODS = {
    "shared, 2 hosts": ("--local_processes=2",),
    "shared, 4 hosts, tensor": (
        "--local_processes=4",
        "--config.roles.trainer.hosts=0,3",
        "--config.roles.trainer.mesh=fsdp=2,tensor=2",
        "--config.roles.rollout.mesh=data=2,tensor=2",
    ),
    "shared, 8 hosts, replicas of 2, rows cut along time": (
        "--local_processes=8",
        "--config.roles.trainer.mesh=fsdp=2,seq=2",
        "--config.roles.rollout.mesh=data=2,tensor=2",
    ),
    "split, 4 hosts": ("--local_processes=4", "--topology=split"),
}
# Pods that train in every CI run; the other pods of PODS train only if the code at the paths of MESHES has changed.
EVERY_TIME = ("shared, 2 hosts", "split, 4 hosts")
MESHES = pytest.mark.nightly("podrl/mesh", "podrl/transfer", "podrl/runtime/roles.py")
SPLIT = PODS["split, 4 hosts"]
# For tests that compare no numbers: a process with one device starts in half the time.
SHARED = (*PODS["shared, 2 hosts"], "--fake_devices=1", "--config.eval.problems=4")
REPLICA = (
    *(*SPLIT, "--fake_devices=1", "--config.trainer.max_steps=5", "--config.eval.problems=0"),
    *("--config.roles.trainer.mesh=seq=2", "--config.roles.rollout.mesh=tensor=2"),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> pathlib.Path:
    """Runs the job of the pods in one process; returns the run directory."""
    return run(tmp_path_factory.mktemp("alone") / "run").workdir


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Job:
    """Runs an undisturbed split pod."""
    return run(tmp_path_factory.mktemp("undisturbed") / "run", *SPLIT, "--profile=2:2")


def process(parent: int, index: int) -> int:
    """Finds the process id of one host of a pod."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = pathlib.Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            environment = pathlib.Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if int(status[1]) == parent and f"PODRL_PROCESS_INDEX={index}".encode() in environment:
            return int(name)
    raise AssertionError(f"process {parent} has no host {index}")


def alone_and_killed(folder: pathlib.Path, args: tuple[str, ...]) -> tuple[list[dict], Job]:
    """Runs a job in one process, and in a split pod that is killed after step 3 and resumed; returns the records of the
    process, and the resumed pod."""
    lone = on_any_mesh(run(folder / "alone" / "run", *args).workdir)
    with job(folder / "pod" / "run", *SPLIT, *args) as running:
        running.wait_for_step(3)
        os.kill(process(running.process.pid, 1), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    return lone, run(folder / "pod" / "run", *SPLIT, *args)


def same_trace(run_a: pathlib.Path, run_b: pathlib.Path, step: int) -> None:
    """Asserts that two runs recorded equal numbers for every token of a step, including the trainer's numbers."""
    first, second = (trace.read_step(str(run), step).tokens for run in (run_a, run_b))
    assert first.keys() == second.keys() and np.isfinite(first["entropy"]).any()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "pod", [*EVERY_TIME, *(pytest.param(pod, marks=MESHES) for pod in PODS if pod not in EVERY_TIME)]
)
def test_a_pod_trains_like_one_process(tmp_path, alone, undisturbed, pod):
    finished = undisturbed if PODS[pod] == SPLIT else run(tmp_path / "run", *PODS[pod], "--profile=2:2")
    read = comparable if pod in EVERY_TIME else on_any_mesh
    ours, theirs = read(finished.workdir), read(alone)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        different = {
            name: (mine[name], other[name])
            for name in mine
            if not math.isclose(mine[name], other[name], rel_tol=1e-3, abs_tol=1e-5)
        }
        assert not different, (mine["step"], different)
    assert (finished.workdir / "samples.jsonl").read_text() == (alone / "samples.jsonl").read_text()
    profiles = [path.name for path in (finished.workdir / "profile").iterdir() if list(path.rglob("*.xplane.pb"))]
    processes = next(int(flag.partition("=")[2]) for flag in PODS[pod] if flag.startswith("--local_processes="))
    assert len(profiles) == processes and "trainer_0" in profiles and "rollout_0" in profiles
    assert "[trainer 0] " in finished.stdout and "[Gloo]" not in finished.stdout
    same_trace(finished.workdir, alone, 1)
    assert [str(found) for found in examine(str(finished.workdir)) if found.sample.startswith("trace/")] == []


@pytest.mark.nightly("podrl/models/lora.py", "podrl/cluster/actor.py")
@pytest.mark.optimised
@pytest.mark.parametrize("topology", ["shared", "split"])
def test_merged_adapters_reach_the_rollouts_of_a_pod(tmp_path, topology):
    pod = ("--local_processes=2", f"--topology={topology}", "--config.rollout.merge_adapters=True")
    lora = ("--config.model.lora.rank=4", "--config.trainer.learning_rate=2e-3", "--config.eval.problems=0")
    finished = run(tmp_path / "run", *pod, *lora)
    records = [record for record in comparable(finished.workdir) if "sampler/abs_diff" in record]
    assert len(records) == 6
    # From the second step on the adapters change the output, so the trainer's policy must equal the policy that
    # sampled.
    assert all(record["sampler/abs_diff"] < 1e-5 for record in records), records


@pytest.mark.nightly("podrl/rollout/group_player.py")
def test_windows_of_several_rollout_hosts_and_a_teacher_are_those_of_one_process(tmp_path):
    """The pod is killed once; each host then gets its share of the open samples back.

    The rewards change the policy, and a teacher with the first weights works against the change.
    """
    stale = ("--config.grpo.max_staleness=2", "--config.rollout.window_tokens=8", "--config.checkpoint.every=1")
    stale += ("--config.trainer.max_steps=5", "--config.eval.problems=0")
    stale += ("--config.algorithm=opd", f"--config.model.reference={TINY}", "--config.grpo.reward_coef=1.0")
    lone, again = alone_and_killed(tmp_path, stale)
    assert "Resumed after step" in again.stdout and trained_steps(again.workdir) == [1, 2, 3, 4, 5]
    for mine, other in zip(on_any_mesh(again.workdir), lone, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5), mine["step"]
    shares = [name for record in lone for name in record if name.startswith("rollout/share_stale_")]
    assert {"rollout/share_stale_0", "rollout/share_stale_1", "rollout/share_stale_2"} <= set(shares)
    assert any(record.get("rollout/mixed_samples", 0.0) > 0 for record in lone)
    away = [record["opd/reverse_kl"] for record in lone if "opd/reverse_kl" in record]
    assert away[0] == pytest.approx(0.0, abs=1e-6) and max(away) > 1e-4


@pytest.mark.nightly("podrl/trainer/divergence.py", "podrl/learner/scoring.py", "podrl/cluster/scorer.py")
@pytest.mark.optimised
def test_the_divergence_from_a_teacher_in_pods_of_two_is_that_of_one_process(tmp_path):
    """The job trains on rewards and on the divergence over the policy's likeliest ids. The teacher has two narrow
    layers. The split pod is also killed once and resumed."""
    mesh, ids = make_mesh("fsdp=1", jax.devices()[:1]), read_config(TINY).vocab_size
    size = ScratchModel(num_layers=2, model_dim=64, ffn_dim=96, num_heads=2, num_kv_heads=1)
    scratch_model(size, ids, mesh, seed=3).save(tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "teacher")
    args = (TWO_DEVICES, "--config.trainer.max_steps=3", "--config.checkpoint.every=1", "--config.eval.problems=0")
    args += ("--config.algorithm=opd", f"--config.model.reference={tmp_path / 'teacher'}")
    args += ("--config.grpo.teacher_kl=top_k", "--config.grpo.teacher_top_k=8", "--config.grpo.reward_coef=1.0")
    args += ("--config.grpo.loss_agg_mode=sequence-mean-token-mean",)
    lone = on_any_mesh(run(tmp_path / "alone" / "run", *args).workdir)
    assert len(lone) == 3 and all(record["opd/reverse_kl"] > 1 for record in lone), lone
    for topology in ("shared", "split"):
        pod = ("--local_processes=2", f"--topology={topology}", *args)
        whole = run(tmp_path / topology / "run", *pod)
        for mine, other in zip(on_any_mesh(whole.workdir), lone, strict=True):
            assert mine == pytest.approx(other, rel=1e-5, abs=1e-5), (topology, mine["step"])
    with job(tmp_path / "killed" / "run", *pod) as running:
        running.wait_for("a checkpoint", (running.workdir / "checkpoints" / "1").exists, every_s=0.0)
        os.kill(process(running.process.pid, 0), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    again = run(tmp_path / "killed" / "run", *pod)
    assert "Resumed after step" in again.stdout
    same_end(again.workdir, whole.workdir)


EVALUATES = ("--local_processes=3", "--topology=split", "--fake_devices=1", "--config.roles.eval.hosts=2")
SETS = (
    "--config.trainer.eval_every_n_steps=2",
    "--config.eval.sets=({'name':'few','path':'problems','problems':5,'samples':2,'every':2},)",
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> pathlib.Path:
    """Runs a job with eval.sets in one process, which pauses training for evaluations."""
    return run(tmp_path_factory.mktemp("evaluated") / "run", *SETS, "--config.fake_devices=2").workdir


def in_order(records: list[dict]) -> list[dict]:
    """Sorts records of steps and evaluations by step: an evaluation may have been written after later steps."""
    return sorted(records, key=lambda r: (r["step"], "evaluation" in r or "eval/records" in r))


@pytest.fixture(scope="module")
def stopping(tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """Returns a function that runs a pod of two hosts in a topology, kills its leader after step 3 and resumes it; it
    returns the run directory."""

    @functools.cache
    def once(topology: str) -> pathlib.Path:
        workdir = tmp_path_factory.mktemp(topology) / "run"
        pod = (*SETS, "--local_processes=2", f"--topology={topology}", "--fake_devices=1")
        with job(workdir, *pod) as running:
            running.wait_for_step(3)
            os.kill(process(running.process.pid, 0), signal.SIGKILL)
            assert running.end() == 42, running.stderr
        return run(workdir, *pod).workdir

    return once


@pytest.mark.nightly("podrl/learner/evaluations", "podrl/learner/evaluate.py")
@pytest.mark.parametrize("topology", ["shared", "split"])
def test_the_evaluations_of_a_pod_are_those_of_one_process(stopping, evaluated, topology):
    """The pod was killed after step 3 and resumed; the sets of eval.sets have different sizes."""
    ours, theirs = on_any_mesh(stopping(topology)), on_any_mesh(evaluated)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5), mine["step"]
    assert [r["step"] for r in theirs if "eval/few/records" in r] == [0, 4, 6]
    for step in (0, 6):  # the final table compares these two evaluations record by record
        mine, other = (
            json.loads((run / f"evaluations/{step}.json").read_text()) for run in (stopping(topology), evaluated)
        )
        assert mine.keys() == other.keys()
        assert mine["eval/sampled_answer"] == other["eval/sampled_answer"]


@pytest.mark.nightly("podrl/learner/evaluations", "podrl/learner/evaluate.py")
def test_a_host_that_evaluates_alone_is_killed_and_all_is_as_where_rollout_hosts_evaluate(tmp_path, stopping):
    """Training goes on while the host is stopped, and its replacement makes the missing evaluations."""
    with job(tmp_path / "run", *SETS, *EVALUATES) as running:
        running.wait_for("all hosts", lambda: "Further rollout hosts join" in running.stdout)
        alone = process(running.process.pid, 2)
        os.kill(alone, signal.SIGSTOP)
        running.wait_for_step(1)
        assert not any("eval/records" in record for record in running.records())
        os.kill(alone, signal.SIGKILL)
        running.finish()
    assert "eval 0 ended with signal SIGKILL; it is started again" in running.stderr
    same_weights(running.workdir, other := stopping("split"))
    assert in_order(comparable(running.workdir)) == in_order(comparable(other))
    assert in_order(samples(running.workdir)) == in_order(samples(other))


@pytest.mark.nightly("podrl/learner/control.py", "podrl/data/curriculum.py")
def test_trainer_hosts_steer_the_kl_alike_and_choose_the_same_prompts(tmp_path):
    """Two trainer hosts move the coefficient of the KL in the loss as one process does, before and after a kill.

    The run has adapters and a curriculum, so rollout hosts use the prompts that the trainers name. Each trainer holds
    only some samples of a prompt. There are two passes over the mini-batches, each in its own order. The recorded
    weights of the tokens are the same as in one process.
    """
    steered = ("--config.grpo.beta=0.1", "--config.grpo.kl_target=0.001", "--config.grpo.kl_horizon=50.0")
    steered += ("--config.trainer.max_steps=16", "--config.eval.problems=0")  # counts updates; a step makes four
    steered += (*CURRICULUM, "--config.model.lora.rank=4", "--config.grpo.max_staleness=1")
    steered += ("--config.trainer.mini_batch_size=2", "--config.grpo.num_iterations=2", "--config.log.trace=updates")
    lone, again = alone_and_killed(tmp_path, steered)
    ours = on_any_mesh(again.workdir)
    assert chose(lone)
    for mine, other in zip(ours, lone, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5), mine["step"]
    for step in (1, 4):
        same_trace(again.workdir, tmp_path / "alone" / "run", step)
    assert np.isfinite(trace.read_step(str(again.workdir), 4).tokens["weight"]).all()
    coefs = [[record["actor/kl_coef"] for record in records if "actor/kl_coef" in record] for records in (lone, ours)]
    assert len(coefs[0]) == len(set(coefs[0])) == 4
    assert coefs[1] == pytest.approx(coefs[0], rel=1e-5)


@pytest.mark.nightly("podrl/cluster/replica.py", "podrl/runtime/joining.py")
def test_a_replica_of_two_hosts_ends_and_another_joins(tmp_path, alone, monkeypatch):
    """The replica's second host is killed, then the trainer. The pod resumes and ends as an undisturbed pod, whose
    numbers equal those of one process.

    Another replica joins as the run begins, and takes over prompts once the first replica is lost. Each host of a
    replica pulls all weights and decodes with half of every matrix.
    """
    whole = run(tmp_path / "whole" / "run", *REPLICA)
    other = {record["step"]: record for record in on_any_mesh(alone)}
    for mine in on_any_mesh(whole.workdir):
        assert mine == pytest.approx({name: other[mine["step"]][name] for name in mine}, rel=1e-3, abs=1e-5)
    leader, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
    monkeypatch.setenv("PODRL_SECRET", "of this test")
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as m:
            m.setenv("PODRL_CHANNEL", leader)
            running = stack.enter_context(job(tmp_path / "run", *REPLICA))
        flags = [flag for flag in REPLICA if not flag.startswith(("--local_processes", "--topology"))]
        for index in range(2):
            with monkeypatch.context() as m:
                place = {"PLATFORM": "local", "PROCESS_COUNT": "2", "PROCESS_INDEX": str(index)}
                for name, value in (place | {"COORDINATOR": coordinator}).items():
                    m.setenv(f"PODRL_{name}", value)
                logs = {"logs": tmp_path / f"joined-{index}"}
                stack.enter_context(job(tmp_path / f"joined-{index}" / "run", *flags, f"--join={leader}", **logs))
        running.wait_for_step(1)
        head = process(running.process.pid, 2)
        os.kill(head, signal.SIGSTOP)  # the run waits for this replica's samples meanwhile
        running.wait_for("the replica", lambda: "joined: the job has 2 rollout hosts" in running.stderr)
        os.kill(process(running.process.pid, 3), signal.SIGKILL)
        os.kill(head, signal.SIGCONT)
        running.wait_for_step(3)
        os.kill(process(running.process.pid, 0), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    assert "rollout 0.1 (host 3), which holds a part of this replica's weights, is gone" in running.stderr
    assert "rollout 1 (host 4) joined" in running.stderr
    assert sum(record.get("pod/taken_over", 0) for record in running.records()) >= 1
    again = run(tmp_path / "run", *REPLICA)
    assert "Resumed after step" in again.stdout
    same_end(again.workdir, whole.workdir)


# For each start of the pod: the step after which a process gets a signal, the signal, and the host of the process
# (None is the launcher). Two steps follow the last signal, so that the run does not end before the signal comes.
# test_failing_pods.py kills trainer 1.
SIGNALS = ((1, signal.SIGTERM, None), (3, signal.SIGKILL, None), (3, signal.SIGKILL, 0), (4, signal.SIGKILL, 3))


@pytest.fixture(scope="module")
def lives(tmp_path_factory) -> list[Job]:
    """Starts one split pod four times: it is preempted, then it loses its launcher, its leader, and a rollout host.

    The last start goes on to the end. All processes of each start have ended, and each start has its own output.
    """
    folder, ended = tmp_path_factory.mktemp("lives"), []
    for step, number, host in SIGNALS:
        with job(folder / "run", *SPLIT, logs=folder / str(len(ended))) as running:
            said = "Resumed after step" if ended else "Roles"
            running.wait_for(said, lambda said=said, running=running: said in running.stdout)
            running.wait_for_step(step)
            hosts = running.children()
            assert len(hosts) == 4
            os.kill(running.process.pid if host is None else process(running.process.pid, host), number)
            running.end()
        await_end(hosts)  # no process outlives a pod, even if its launcher is killed
        ended.append(running)
        assert trained_steps(running.workdir)[-1] < 6 or len(ended) == len(SIGNALS), "the signal came too late"
    return ended


def test_a_preempted_pod_saves_and_exits_75(lives):
    assert lives[0].process.returncode == 75, lives[0].stderr
    assert "Resume with: python -m podrl.launch --config=grpo_gemma.py" in lives[0].stdout
    assert "--local_processes=4 --topology=split" in lives[0].stdout


def test_a_killed_trainer_ends_the_job(lives):
    assert lives[2].process.returncode == 42, lives[2].stderr
    assert "trainer 0 ended with signal SIGKILL" in lives[2].stderr
    assert "is gone: its connection broke" in lives[2].stderr


def test_a_killed_rollout_is_replaced_and_the_job_goes_on(lives):
    assert lives[3].process.returncode == 0, lives[3].stderr
    assert "rollout 1 ended with signal SIGKILL; it is started again" in lives[3].stderr


def test_what_the_same_command_resumes_ends_as_an_undisturbed_pod(lives, undisturbed):
    same_end(lives[3].workdir, undisturbed.workdir)


def test_a_dead_rollout_ends_a_shared_job(tmp_path):
    with job(tmp_path / "run", *SHARED) as running:
        running.wait_for_step(1)
        os.kill(process(running.process.pid, 1), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    assert "rollout 0 ended with signal SIGKILL; the other processes must end too" in running.stderr


def test_ctrl_c_on_a_pod_saves_and_leaves_nobody_behind(tmp_path):
    with job(tmp_path / "run", *SHARED) as running:
        running.wait_for_step(1)
        hosts = running.children()
        running.signal(signal.SIGINT)
        assert running.end() == 75, running.stderr
    assert "Resume with: python -m podrl.launch" in running.stdout and "Traceback" not in running.stderr
    await_end(hosts)


@pytest.mark.parametrize(
    ("good", "step"),
    [
        pytest.param(3, 1, id="training"),
        pytest.param(4, 2, id="evaluation", marks=pytest.mark.nightly("podrl/learner/evaluations")),
    ],
)
def test_a_failing_reward_on_a_rollout_host_saves_what_was_trained(tmp_path, good, step):
    """The first evaluation calls the reward twice, each of the two steps calls it once, and then the last evaluation
    calls it. The first `good` calls succeed, so the run is saved after step `step`."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import pathlib\n"
        "def brittle(prompts, completions, **fields):\n"
        f"    calls = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "    n = int(calls.read_text()) if calls.exists() else 0\n"
        "    calls.write_text(str(n + 1))\n"
        f"    if n >= {good}:\n"
        "        raise RuntimeError('no verdict')\n"
        "    return [float(len(c) % 3) for c in completions]\n"
    )
    fns = ("--config.reward.calls=batch", f"--config.reward.fns=('{rewards}:brittle',)")
    with job(tmp_path / "run", *SHARED, "--config.trainer.max_steps=2", *fns) as running:
        assert running.end() == 1, running.stderr
    assert "Reward function brittle failed" in running.stderr and "no verdict" in running.stderr
    assert f"Saved after step {step}" in running.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--config.roles.trainer.hosts=0-1", "--config.roles.rollout.hosts=1"), "hosts [1] have two roles"),
        (("--config.roles.trainer.hosts=1",), "host 0 must be a trainer"),
        (("--config.roles.rollout.mesh=tensor=8",), "needs 8 devices"),
    ],
)
def test_impossible_roles_are_refused(tmp_path, flags, message):
    with job(tmp_path / "run", "--local_processes=4", *flags) as running:
        assert running.end() == 1, running.stderr
    assert message in running.stderr


def test_a_host_that_never_comes_is_named(tmp_path):
    alone = environment(
        PODRL_PLATFORM="local",
        PODRL_PROCESS_INDEX="0",
        PODRL_PROCESS_COUNT="4",
        PODRL_COORDINATOR="127.0.0.1:1",
        PODRL_CHANNEL=f"127.0.0.1:{free_ports(1)[0]}",
        PODRL_SECRET="s",
    )
    command = [sys.executable, "-m", "podrl.launch", "--config=grpo_gemma.py", f"--workdir={tmp_path}", "--join_s=2"]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 42, done.stderr
    assert "Only 1 of 4 local processes reached the coordinator 127.0.0.1:1 within 2 s" in done.stderr
    assert "Missing: trainer 1 (host 1), rollout 0 (host 2), rollout 1 (host 3)" in done.stderr


def test_jax_must_not_be_initialised_before_the_launcher(tmp_path):
    config = tmp_path / "eager.py"
    imports = "import jax\nfrom ml_collections import ConfigDict\n\njax.devices()\n"
    config.write_text(f"{imports}\n\ndef get_config():\n    return ConfigDict()\n")
    command = [sys.executable, "-m", "podrl.launch", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1 and "jax was initialised before podrl.launch" in done.stderr, done.stderr
