"""The examples of docs/environments.md and docs/tools.md run as they are printed."""

import pathlib
import re

import pytest
from test_played_episodes import call, outputs, play

import podrl
from podrl.environments.config import EnvironmentConfig
from podrl.environments.protocol import Task, Turn
from podrl.environments.workers import Episodes
from podrl.workers.user_code import Limits

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def example(name, folder, **replaced):
    """Writes the pages' code block that begins with the file's name; returns the file."""
    text = "".join((DOCS / page).read_text() for page in ("environments.md", "tools.md"))
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if name in block)
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    (folder / name).write_text(code)
    return folder / name


def test_the_tool(tmp_path):
    file = example("my_tools.py", tmp_path)
    config = EnvironmentConfig(environment="tools", tools=(f"{file}:calculator",), max_tool_calls=2)
    with Episodes(config, Limits(), journal=None) as episodes:
        says, _ = play(episodes, [call("calculator", "4821*7703"), call("calculator", "2**3"), Turn("end")])
    assert outputs(says) == ["37136163", "ValueError: only + - * of whole numbers, not '2**3'"]


def test_a_tool_keeps_the_state_of_samples_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = example("notes.py", tmp_path)
    with Episodes(EnvironmentConfig(tools=(f"{file}:note",), environment="tools"), Limits(), journal=None) as episodes:
        for sample in (0, 1):
            says, _ = play(episodes, [call("note", "a"), call("note", "b"), Turn("end")], Task("p", sample=sample))
            assert outputs(says) == ["a\n", "a\nb\n"]


def test_the_game(tmp_path):
    file = example("guess.py", tmp_path)
    with Episodes(EnvironmentConfig(environment=f"{file}:GuessNumber"), Limits(), journal=None) as episodes:
        says, done = play(episodes, [Turn("hm"), Turn("I say 42")], Task("p", seed=41))
    assert [say.reward for say in says] == [0.0, -0.1] and done.reward == 1.0


def test_the_server(tmp_path):
    pytest.importorskip("mcp", reason="needs the extra [tools]")
    from test_mcp import STDIO

    server = {"python -m dr_agent.mcp_backend.main --transport stdio": STDIO}
    file = example("search.py", tmp_path, **server)
    with Episodes(EnvironmentConfig(environment=f"{file}:environment"), Limits(), journal=None) as episodes:
        says, _ = play(episodes, [call("snippet_search", "jax"), Turn("end")])
    assert re.fullmatch(
        r"\n<tool_output><snippet id=[0-9a-f]{8}-0>\nTitle: T0\nSnippet: jax 0\n</snippet>\n"
        r"<snippet id=[0-9a-f]{8}-1>\n.*</tool_output>\n\n",
        says[1].observation,
        re.DOTALL,
    )


def test_a_server_of_ones_own(tmp_path):
    pytest.importorskip("mcp.server.mcpserver", reason="needs the extra [tools], with package mcp 2")
    config = EnvironmentConfig(environment="tools", mcp=(f"python {example('server.py', tmp_path)}",), max_tool_calls=2)
    with Episodes(config, Limits(), journal=None) as episodes:
        says, _ = play(episodes, [call("calculator", "12+30"), Turn("end")])
    assert outputs(says) == ["42"]


class Count:
    """Subtracts the numbers in the model's texts from the seed, until 0 is left; a step's reward is its number's
    sign."""

    def reset(self, seed):
        self.left = seed
        return f"count {seed}"

    def step(self, text):
        self.left -= int(text)
        return f"{self.left} left", 1.0 if int(text) > 0 else -1.0, self.left == 0, False, {}


stepped = podrl.SteppedEnvironment(Count)


def test_what_has_reset_and_step_is_an_environment():
    with Episodes(EnvironmentConfig(environment=f"{__file__}:stepped"), Limits(), journal=None) as episodes:
        says, done = play(episodes, [Turn("-1"), Turn("2"), Turn("3")], Task("p", seed=4))
    assert [(say.observation, say.reward) for say in says] == [("count 4", 0.0), ("5 left", -1.0), ("3 left", 1.0)]
    assert (done.reward, done.metrics) == (1.0, {"steps": 3.0, "return": 1.0})
