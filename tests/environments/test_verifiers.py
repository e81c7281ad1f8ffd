"""Tests tasks of verifiers: their records, and rows of their episodes, with the real package where it is installed."""

import ast
import http.server
import json
import os
import pathlib
import shutil
import sys
import threading
import types

import jax
import numpy as np
import pytest

from podrl import serve, verifiers
from podrl.data.dialogue import Dialogue
from podrl.engine.config import Sampling
from podrl.environments import verifiers_agent
from podrl.environments.config import EnvironmentConfig
from podrl.environments.workers import Episodes
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.integrity import faults
from podrl.types import Prompts
from podrl.workers.user_code import Limits

# .ci/nightly makes this environment, because verifiers pins other versions of packages that podrl's tests use.
PYTHON = pathlib.Path(sys.prefix) / "verifiers" / "bin" / "python"
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), str(PYTHON.parent)))  # its environment may have uv
PACKAGE = pathlib.Path(__file__).with_name("verifiers_package")
real = pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no environment with verifiers at {PYTHON}")


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Writes the records of the taskset in verifiers_package/ with some of its settings."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))

    def write(limit=None, **settings):
        path = tmp_path / "tasks.jsonl"
        count = verifiers.write("podrl-sums", str(PYTHON), path, {"taskset": settings}, limit)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == count
        return lines

    return write


def test_the_agent_program_needs_only_verifiers_and_the_standard_library():
    nodes = list(ast.walk(ast.parse(pathlib.Path(verifiers_agent.__file__).read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"verifiers"}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["SandboxError"], "environment"),
        (["ProviderError"], "infrastructure"),
        (["HarnessError"], "agent"),
        (["TaskError"], "grading"),
        (["KeyError", "EnvError"], "environment"),
        ([], "agent"),
    ],
)
def test_errors_of_verifiers_are_counted_by_their_kind(names, kind):
    errors = [types.SimpleNamespace(type=name, message="gone") for name in names]
    episode = types.SimpleNamespace(ok=False, errors=errors, traces=[])
    with pytest.raises(verifiers_agent._agent().Failure) as raised:
        verifiers_agent._result(episode)
    assert raised.value.kind == kind


@pytest.fixture
def play():
    """Plays four episodes of a record against the tiny model, and returns their rollouts."""
    arguments = ["--model=tiny_tools", "--parser=call_tool", "--lanes=8", "--context=160"]
    serving, _ = serve._load(serve._parser().parse_args(arguments), jax.devices()[:1])
    config = EnvironmentConfig(environment="program", verifiers=str(PYTHON), processes=2)

    def run(record):
        prompt = "<start_of_turn>user\n1+1=<end_of_turn>\n<start_of_turn>model\n"
        tokens_P = np.asarray([serving._tokenizer.encode(prompt, start=True)], np.int32)
        fields = {"verifiers": [record["verifiers"]]}
        prompts = Prompts(tokens_P, np.asarray([tokens_P.shape[1]]), np.zeros(1, np.int64), [prompt], fields, b"")
        worker = serving._worker
        with Episodes(config, Limits(), journal=None) as host:
            worker.env_client = EnvironmentClient(host, Dialogue(serving._tokenizer), failed_share=0.0)
            player = worker.player(prompts, group_size=4, step=1, sampling=Sampling(max_new=100, temperature=1.0))
            try:
                for _ in worker.advance(serving._policy, [(player, None)]):
                    pass
                return worker.rows(player, 0.0)
            finally:
                worker.env_client = None

    try:
        yield run
    finally:
        serving.close()


@real
@pytest.mark.slow
def test_an_episode_of_verifiers_is_one_row_with_its_reward(records, play):
    asked = records()
    assert [record["messages"] for record in asked] == [[{"role": "user", "content": f"{i}+1="}] for i in range(3)]
    assert len(records(limit=2)) == 2
    play(asked[2])  # the program's process may play tasks in any order
    rollouts = play(asked[1])
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        metrics = rollouts.episodes[b]["metrics"]
        assert metrics["chat_requests"] == 2.0 and metrics["chat_forks"] == 0.0
        assert rollouts.turn_reward_BT[b].sum() == metrics["numbers"] and metrics["numbers"] in (0.5, 1.5)
    place = json.loads(asked[1]["verifiers"])
    place["env"]["taskset"]["changed"] = True
    with pytest.raises(Exception, match=r"task 1 of podrl-sums is no longer the task .* podrl\.verifiers"):
        play({"verifiers": json.dumps(place)})


class _Gym(http.server.BaseHTTPRequestHandler):
    """A resource server of NeMo Gym: it seeds sessions, and its reward is 0.5 for an answer to the right question."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {}
        if self.path == "/verify":
            said = [item for item in body["response"]["output"] if item["type"] == "message"]
            right = len(said) == 1 and body["responses_create_params"]["input"][0]["content"] == "1+1="
            reply = {**body, "reward": 0.5 * right, "length": 7}
        written = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, format, *args):
        pass


@real
@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("uv", path=PATH) is None, reason="verifiers starts its harnesses with uv: none on PATH"
)
def test_a_harness_of_verifiers_plays_tasks_of_nemo_gym(tmp_path, monkeypatch, play):
    monkeypatch.setenv("PATH", PATH)
    dataset, out = tmp_path / "gym.jsonl", tmp_path / "tasks.jsonl"
    ask = {"input": [{"role": "user", "content": "1+1="}], "tools": []}
    dataset.write_text(json.dumps({"responses_create_params": ask}) + "\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Gym) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        task = {"resources_url": f"http://127.0.0.1:{server.server_port}"}
        env = {"taskset": {"dataset": str(dataset), "task": task}, "agent": {"harness": {"id": "null"}}}
        assert verifiers.write("nemo_gym", str(PYTHON), out, env, None) == 1
        rollouts = play(json.loads(out.read_text()))
        server.shutdown()
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        metrics = rollouts.episodes[b]["metrics"]
        assert metrics["chat_requests"] >= 1.0 and metrics["length"] == 7.0
        assert rollouts.turn_reward_BT[b].sum() == metrics["nemo_gym"] == 0.5


@real
@pytest.mark.slow
def test_a_harness_that_needs_a_container_is_refused_when_records_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    env = {"agent": {"harness": {"id": "codex"}}}
    with pytest.raises(ValueError, match=r"^podrl-sums: task 0 .* Harness 'codex' needs a container .*docker.*$"):
        verifiers.write("podrl-sums", str(PYTHON), tmp_path / "tasks.jsonl", env, None)
    env["agent"]["runtime"] = {"type": "docker"}
    assert verifiers.write("podrl-sums", str(PYTHON), tmp_path / "tasks.jsonl", env, None) == 3
    env = {"taskset": {"harbor": True}}
    with pytest.raises(ValueError, match=r"^podrl-sums: task 0 .* episodes .* would share /app, .*docker"):
        verifiers.write("podrl-sums", str(PYTHON), tmp_path / "tasks.jsonl", env, None)


@real
@pytest.mark.slow
def test_settings_that_verifiers_refuses_are_shown(records):
    with pytest.raises(ValueError, match=r"(?s)podrl-sums cannot be read with .*smallest"):
        records(smallest=1)
    with pytest.raises(ValueError, match="podrl-sums has no tasks"):
        records(largest=0)


def test_a_taskset_that_never_ends_is_named(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(verifiers, "_DEADLINE_S", 0.01)
    with pytest.raises(ValueError, match=r"endless was not written in full within 0\.01 s\. .* --limit=N"):
        verifiers.write("endless", str(slow), tmp_path / "tasks.jsonl", {}, None)
    assert list(tmp_path.iterdir()) == [slow]


def test_an_interpreter_without_verifiers_is_named(tmp_path, capfd):
    out = tmp_path / "tasks.jsonl"
    assert verifiers.main(["some-tasks", f"--python={tmp_path}/none", f"--out={out}"]) == 1
    assert f"--python={tmp_path}/none" in capfd.readouterr().err
    assert verifiers.main(["some-tasks", f"--python={sys.executable}", f"--out={out}"]) == 1
    error = capfd.readouterr().err
    assert "some-tasks cannot be read" in error and "No module named 'verifiers'" in error
    assert verifiers.main(["some-tasks", "--python=python", f"--out={out}", "--env=[]"]) == 1
    assert verifiers.main(["some-tasks", "--python=python", f"--out={out}", "--limit=-1"]) == 1
    assert "--limit=-1 must be at least 1" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_verifiers_takes_the_place_of_a_program():
    config = EnvironmentConfig(verifiers="vf/bin/python")
    assert config.used and config.choices == ("program",) and config.branches
    assert config.command[:2] == ["vf/bin/python", "-P"] and pathlib.Path(config.command[2]).exists()
    with pytest.raises(ValueError, match=r"EnvironmentConfig\.verifiers='a' beside EnvironmentConfig\.program='b'"):
        EnvironmentConfig(verifiers="a", program="b")
    with pytest.raises(
        ValueError, match=r"EnvironmentConfig\.verifiers='a' beside .*EnvironmentConfig\.tools=\('calculator',\)"
    ):
        EnvironmentConfig(verifiers="a", tools=("calculator",))
