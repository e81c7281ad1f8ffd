"""A failing pod prints the true error once and in full, and at most one line per other host; no process remains."""

import contextlib
import json
import os
import pathlib
import re
import signal
import time

import pytest
from processes import DEADLINE_S, job
from test_pods import process
from waits import until

from podrl.launch import find_config
from podrl.runtime.local_pod import free_ports

pytestmark = pytest.mark.e2e

FOUR = (
    "--local_processes=4",
    "--fake_devices=1",
    "--config.eval.problems=0",
    "--config.rollout.max_tokens_to_generate=8",
)
_TRACEBACK = "Traceback (most recent call last)"


@pytest.fixture
def descendants(tmp_path, monkeypatch):
    """Returns a function that lists the ids of all live processes that descend from this test."""
    monkeypatch.setenv("PODRL_TEST", str(tmp_path))
    mark = f"PODRL_TEST={tmp_path}".encode()

    def found() -> list[int]:
        pids = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if mark in pathlib.Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return pids

    return found


def _lines_by_host(stderr: str) -> dict[str, list[str]]:
    """Groups podrl's output lines by host."""
    said: dict[str, list[str]] = {}
    for host, line in re.findall(r"^\[(\w+ \d)\] (podrl: .*)$", stderr, re.MULTILINE):
        said.setdefault(host, []).append(line)
    return said


def _end_of(descendants) -> None:
    """Waits until `descendants()` finds no live process."""
    until(lambda: not descendants(), "the end of all processes", every_s=0.1)


def test_a_reward_function_that_raises_is_shown_once(tmp_path, descendants):
    (tmp_path / "rewards.py").write_text("def broken(prompts, completions, **fields):\n    return fields['no such']\n")
    with job(tmp_path / "run", *FOUR, "--config.reward.fns=('rewards.py:broken',)") as running:
        assert running.end() == 1, running.stderr
    assert running.stderr.count(_TRACEBACK) == 1, running.stderr
    assert running.stderr.count("return fields['no such']") == 1
    said = _lines_by_host(running.stderr)
    assert {host: len(lines) for host, lines in said.items()} == dict.fromkeys(said, 1) and len(said) == 4, said
    assert all("Reward function broken failed" in lines[0] for lines in said.values())
    _end_of(descendants)


@pytest.mark.nightly("podrl/learner/pods/dispatch.py", "podrl/data/pipeline.py")
@pytest.mark.parametrize("topology", ["shared", "split"])
def test_steps_before_a_record_that_cannot_be_rendered_are_saved(topology, tmp_path, descendants):
    data, workdir = tmp_path / "d.jsonl", tmp_path / "run"
    asked = {"role": "user", "content": "What is 2 + 3?"}
    lines = [{"messages": [asked], "answer": "5"}] * 256
    lines.append({"messages": [asked, {"role": "tool", "content": "the template has no tools"}, asked], "answer": "5"})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (f"--config.data.path={data}", "--config.data.shuffle=False", "--config.data.eval_fraction=0.0")
    # The start renders the first 256 records, which are the batches of eight steps; step 9 draws line 257.
    flags += ("--config.rollout.prompts_per_step=32",)
    more = ("--local_processes=2", f"--topology={topology}", "--fake_devices=2", "--config.eval.problems=0")
    with job(workdir, *flags, *more, "--config.trainer.max_steps=20", "--config.checkpoint.every=20") as failing:
        assert failing.process.wait(DEADLINE_S) == 1
        assert "d.jsonl line 257" in failing.stderr
    assert [saved.name for saved in (workdir / "checkpoints").iterdir() if saved.name.isdigit()] == ["8"]
    _end_of(descendants)


def test_hosts_with_other_data_end_the_job_before_a_step(tmp_path, monkeypatch):
    """The file has the same name and size on both hosts, and one answer differs."""
    channel, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
    place = {"PLATFORM": "local", "PROCESS_COUNT": "2", "CHANNEL": channel, "COORDINATOR": coordinator}
    for name, value in {**place, "SECRET": "of this test"}.items():
        monkeypatch.setenv(f"PODRL_{name}", value)
    flags = ("--topology=shared", "--fake_devices=1", "--config.data.path=train.jsonl", "--config.eval.problems=0")
    with contextlib.ExitStack() as stack:
        hosts = []
        for index in range(2):
            here = tmp_path / str(index)
            here.mkdir()
            records = ({"question": f"What is {i} plus 1?", "answer": str(i + 1 + (index == i == 1))} for i in range(9))
            (here / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            monkeypatch.setenv("PODRL_PROCESS_INDEX", str(index))
            hosts.append(stack.enter_context(job(here / "run", *flags, logs=here)))
        for host in hosts:
            assert host.end() == 1, host.stderr
            assert re.search(
                r"rollout 0 \(host 1, .*: data\.path=train\.jsonl is \d+ bytes .* on trainer 0", host.stderr
            )
    assert not (tmp_path / "0" / "run" / "metrics.jsonl").exists()


# Makes publishing fail after the first step on the named hosts, as an error of podrl would.
_FAILING = """
import os
import runpy

from podrl.runtime import joining

join = joining.join


def changed(rollouts):
    before = rollouts.publish

    def publish(self, step):
        if step == 1:
            raise LookupError("not there")
        return before(self, step)

    rollouts.publish = publish


def join_and_change(*args, **settings):
    pod = join(*args, **settings)
    from podrl.learner.pods import host, trainer  # not before: it imports jax

    changed(host.HostRollouts)
    changed(trainer.RemoteRollouts)
    return pod


def get_config():
    if os.environ.get("PODRL_PROCESS_INDEX", "") in HOSTS:
        joining.join = join_and_change
    return runpy.run_path(BASE)["get_config"]()
"""


WHO_TELLS = pytest.mark.nightly("podrl/launch.py", "podrl/runtime/pod.py", "podrl/runtime/local_pod.py")


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(("0", "1", "2", "3"), id="all", marks=WHO_TELLS),
        pytest.param(("1",), id="trainer 1"),
        pytest.param(("3",), id="rollout 1", marks=WHO_TELLS),
    ],
)
def test_an_error_on_one_host_or_on_all_is_shown_once(hosts, tmp_path, descendants):
    (tmp_path / "failing.py").write_text(f"HOSTS, BASE = {hosts!r}, {find_config('grpo_gemma.py')!r}\n{_FAILING}")
    with job(tmp_path / "run", *FOUR, "--config=failing.py") as running:
        assert running.end() == 1, running.stderr
    assert running.stderr.count(_TRACEBACK) == 1, running.stderr
    assert re.search(r"^\[\w+ \d\] LookupError: not there$", running.stderr, re.MULTILINE)
    said = _lines_by_host(running.stderr)
    assert all(len(lines) == 1 and "LookupError: not there" in lines[0] for lines in said.values()), said
    assert len(said) == 3  # and the fourth host shows the error in full
    _end_of(descendants)


@WHO_TELLS
@pytest.mark.parametrize("host", [0, 1])
def test_a_trainer_that_dies_in_a_collective_is_told_in_a_line(host, tmp_path, descendants):
    with job(tmp_path / "run", *FOUR) as running:
        running.wait_for_step(1)
        pid = process(running.process.pid, host)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # the other processes go on until they need the stopped process
        os.kill(pid, signal.SIGKILL)
        assert running.end() == 42, running.stderr
    assert _TRACEBACK not in running.stderr and "stack trace" not in running.stderr, running.stderr
    said = _lines_by_host(running.stderr)
    if host == 1:
        told = said["trainer 0"].pop()
        found = re.fullmatch(r"podrl: (No step|Step \d) is saved in \S+( yet)?\. (Start again|Resume) with: (.*)", told)
        assert found and found[4].startswith("python -m podrl.launch "), told
    assert all(len(lines) == 1 for lines in said.values()), said
    if host == 1:
        assert len(said) == 3 and all("trainer 1 (host 1" in lines[0] for lines in said.values()), said
    else:  # host 0 has jax's coordination service, so jax may end the other processes before they report
        assert running.stderr.count("Terminating process because the JAX distributed service") + len(said) == 3
    assert f"trainer {host} ended with signal SIGKILL; the other processes must end too" in running.stderr
    _end_of(descendants)
