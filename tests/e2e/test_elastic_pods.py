"""A split pod ends with the same results whether its rollout hosts stay, or some are lost and others join."""

import os
import pathlib
import signal
import time

import pytest
from processes import job, run, same_end
from test_pods import process

from podrl.launch import find_config
from podrl.runtime.local_pod import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly("podrl/learner/pods", "podrl/runtime")]

# The reward depends on the text alone. From its 13th call on it blocks for as long as the file `hold` exists.
_REWARDS = """
import pathlib, time

HERE = pathlib.Path(__file__).parent


def held(prompts, completions, **fields):
    with (HERE / "calls").open("ab") as calls:
        calls.write(b".")
    while (HERE / "hold").exists() and (HERE / "calls").stat().st_size > 12:
        time.sleep(0.05)
    return [float(len(c) % 3) for c in completions]
"""
_POD = ("--local_processes=3", "--topology=split", "--config.roles.trainer.hosts=0", "--fake_devices=2")
_JOB = (*_POD, "--config.trainer.max_steps=8", "--config.eval.problems=0", "--config.reward.deadline_s=300.0")
_STALE = ("--config.grpo.max_staleness=3", "--config.rollout.window_tokens=8")


def test_a_host_lost_for_good_two_that_join_and_one_that_is_stopped_leave_no_trace(tmp_path, monkeypatch):
    """The job starts two rollout hosts. One of them is killed, two hosts join, and then the other of the first two gets
    SIGTERM and leaves."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(_REWARDS)
    flags = (*_JOB, *_STALE, f"--config.reward.fns=('{rewards}:held',)")
    run(tmp_path / "undisturbed" / "run", *flags)
    (tmp_path / "calls").unlink()
    (tmp_path / "hold").touch()
    leader = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("PODRL_SECRET", "of this test")
    monkeypatch.setenv("PODRL_CHANNEL", leader)
    workdir = tmp_path / "elastic" / "run"
    with job(workdir, *flags, "--restarts=0") as running:
        running.wait_for_step(1)
        os.kill(process(running.process.pid, 2), signal.SIGKILL)
        running.wait_for("the loss", lambda: "rollout 0 takes over prompts" in running.stderr)
        joins = (*flags, f"--join={leader}")
        places: list[pathlib.Path] = [tmp_path / name for name in ("first", "second")]
        with job(workdir, *joins, logs=places[0]) as first, job(workdir, *joins, logs=places[1]) as second:
            running.wait_for("hosts", lambda: running.stderr.count("joined: the job has") == 2, every_s=0.1)
            os.kill(process(running.process.pid, 1), signal.SIGTERM)
            running.wait_for("the signal", lambda: "SIGTERM: stopping" in running.stderr)
            (tmp_path / "hold").unlink()
            running.finish()
            for late in (first, second):
                late.finish()
        assert "rollout 1 ended with signal SIGKILL; the others go on." in running.stderr
        assert "rollout 0 (host 1) was asked to stop and leaves; 2 rollout hosts stay." in running.stderr
        assert "rollout 0 ended with exit code 75, as it was asked to." in running.stderr
        assert f"Further rollout hosts join by this command with --join={leader}" in running.stdout
    same_end(workdir, tmp_path / "undisturbed" / "run")
    records = [record for record in running.records() if "time/step" in record]
    assert records[-1]["pod/hosts"] == 2 and sum(record["pod/taken_over"] for record in records) >= 1


# Trainer 1 waits for the file `go` before it fetches the third step's batch, which trainer 0 has fetched by then.
_LATE = """
import os
import pathlib
import runpy
import time

from podrl.runtime import joining

join = joining.join


def join_and_hold(*args, **settings):
    pod = join(*args, **settings)
    from podrl.learner.pods.trainer import RemoteRollouts

    gather = RemoteRollouts.gather

    def held(self, step, **more):
        while step == 2 and pod.name == "trainer 1" and not pathlib.Path("go").exists():
            time.sleep(0.02)
        batch = gather(self, step, **more)
        if step == 2 and pod.leads:
            pathlib.Path("fetched").touch()
        return batch

    RemoteRollouts.gather = held
    return pod


joining.join = join_and_hold
get_config = runpy.run_path(BASE)["get_config"]
"""


def test_a_host_lost_between_the_fetches_of_two_trainers_leaves_no_trace(tmp_path):
    """The first trainer waits in the update for the second trainer. The second waits for samples of a rollout host, and
    the rollout host waits for new weights."""
    flags = ("--local_processes=4", "--topology=split", "--fake_devices=1", "--config=late.py", "--restarts=0")
    flags += ("--config.trainer.max_steps=4", "--config.eval.problems=0", "--config.log.stall_s=15")
    for name in ("undisturbed", "lost"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "late.py").write_text(f"BASE = {find_config('grpo_gemma.py')!r}\n{_LATE}")
    (tmp_path / "undisturbed" / "go").touch()
    run(tmp_path / "undisturbed" / "run", *flags)
    with job(tmp_path / "lost" / "run", *flags) as running:
        running.wait_for("the leader's fetch", (tmp_path / "lost" / "fetched").exists)
        time.sleep(0.5)  # the other processes go on until they need trainer 1
        os.kill(process(running.process.pid, 3), signal.SIGKILL)
        running.wait_for("the loss", lambda: "rollout 0 takes over prompts" in running.stderr)
        (tmp_path / "lost" / "go").touch()
        running.finish()
    same_end(tmp_path / "lost" / "run", tmp_path / "undisturbed" / "run")


def test_a_job_of_trainers_waits_for_a_host_that_joins_and_lets_none_with_other_settings_in(tmp_path, monkeypatch):
    leader = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("PODRL_SECRET", "of this test")
    monkeypatch.setenv("PODRL_CHANNEL", leader)
    flags = ("--fake_devices=2", "--config.trainer.max_steps=3", "--config.eval.problems=4")
    with job(tmp_path / "trainer" / "run", *flags, "--topology=split") as running:
        running.wait_for("its address", lambda: f"with --join={leader}" in running.stdout)
        other = ("--config.rollout.temperature=0.5", f"--join={leader}")
        refused = run(tmp_path / "other" / "run", *flags, *other, code=1)
        assert "has other settings than the leader ('was' is the leader's" in refused.stderr
        assert ": rollout.temperature was" in refused.stderr
        run(tmp_path / "joined" / "run", *flags, f"--join={leader}")
        running.finish()
    records = running.records()
    assert [record["pod/hosts"] for record in records if "time/step" in record] == [1, 1, 1]
    assert [record["step"] for record in records if "eval/records" in record or "time/step" not in record] == [0, 3]


# Connections count as broken after two seconds of silence, not thirty.
_IMPATIENT = """
import runpy

from podrl.runtime.channel import Channel

Channel.__init__.__kwdefaults__["silence_s"] = 2.0
get_config = runpy.run_path(BASE)["get_config"]
"""


def test_the_only_rollout_host_pauses_until_it_is_given_up_and_the_job_goes_on(tmp_path):
    """When the host wakes up, it learns at its next message that the job has given it up: it exits with code 42 and is
    started again."""
    (tmp_path / "impatient.py").write_text(f"BASE = {find_config('grpo_gemma.py')!r}\n{_IMPATIENT}")
    flags = ("--local_processes=2", "--topology=split", "--fake_devices=1", "--config=impatient.py", "--restarts=1")
    flags += ("--config.trainer.max_steps=4", "--config.eval.problems=0", "--config.log.stall_s=300")
    run(tmp_path / "undisturbed", *flags)
    with job(tmp_path / "paused", *flags) as running:
        running.wait_for_step(1)
        paused = process(running.process.pid, 1)
        os.kill(paused, signal.SIGSTOP)
        running.wait_for("the loss", lambda: "rollout 0 (host 1, " in running.stderr and "is gone" in running.stderr)
        os.kill(paused, signal.SIGCONT)
        running.finish()
    assert "goes on without this process" in running.stderr
    assert "rollout 0 ended with exit code 42; it is started again." in running.stderr
    same_end(tmp_path / "paused", tmp_path / "undisturbed")
