"""Environments in training: tokens that get rewards, samples that leave the loss, and a whole run from Python."""

import dataclasses
import json
import re
import shutil
import types

import jax
import numpy as np
import pytest

import podrl
from podrl.data.dialogue import Dialogue
from podrl.data.tokenizer import Tokenizer
from podrl.environments.config import EnvironmentConfig
from podrl.environments.tools import ToolEnvironment
from podrl.environments.workers import Episodes
from podrl.learner.generation import of_the_others
from podrl.learner.report import episode_metrics
from podrl.learner.run_environments import check, environment_config, offered_tools
from podrl.storage.hub import EMBEDDED
from podrl.types import STOP_CALLS, STOP_DEADLINE, STOP_ENV
from podrl.workers.user_code import Limits

ENVIRONMENT = """
from podrl.environments.protocol import Result

class Twice:
    async def run(self, task, model):
        first = await model.say(max_new=6)
        second = await model.say(f" {task.seed % 10} ", reward=-0.5 if "1" in first.text else 0.25, max_new=5)
        await model.say("again", role="user")
        return Result(float("2" in second.text), {"length": float(len(first.tokens))})
"""

GAME = """
import podrl

class Game:
    def reset(self, seed):
        self.turns = 0
        return f"start {seed % 10}"

    def step(self, text):
        self.turns += 1
        return "go on", float("1" in text), self.turns == 2, False, {}

game = podrl.SteppedEnvironment(Game)
"""


def test_a_sample_out_of_time_gets_the_mean_of_the_others():
    stops = np.array([STOP_ENV, STOP_DEADLINE, STOP_ENV, STOP_DEADLINE, STOP_DEADLINE, STOP_DEADLINE])
    rollouts = types.SimpleNamespace(stop_B=stops, group_B=np.array([0, 0, 0, 1, 1, 1]))
    reward_FB = np.array([[1.0, 9.0, 4.0, 5.0, 6.0, 7.0], [0.0, 9.0, 1.0, 5.0, 6.0, 7.0]])
    nan = np.nan
    expected_FB = [[1.0, 2.5, 4.0, nan, nan, nan], [0.0, 0.5, 1.0, nan, nan, nan]]
    index = rollouts.stop_B, rollouts.group_B
    np.testing.assert_array_equal(of_the_others(reward_FB, *index), expected_FB)
    np.testing.assert_array_equal(of_the_others(reward_FB[0], *index), expected_FB[0])


def test_metrics_of_episodes_count_by_tool():
    model = {"by": "model", "text": "x", "tokens": 5}
    call = {"by": "calculator", "text": "4", "tokens": 3, "seconds": 0.5, "failed": ""}
    unknown = {"by": "made up", "text": "?", "tokens": 2, "seconds": 0.0, "failed": "unknown_tool"}
    episodes = [
        {"turns": [model, call, model], "metrics": {"won": 1.0}, "seconds": 1.0},
        {"turns": [model, unknown, model], "metrics": {"won": 0.0}, "seconds": 3.0},
    ]
    found = episode_metrics(types.SimpleNamespace(episodes=episodes, stop_B=np.array([STOP_CALLS, STOP_DEADLINE])))
    assert found["episode/turns"] == 2.0 and found["episode/calls"] == 1.0 and found["episode/given_tokens"] == 2.5
    assert found["tools/calculator/calls"] == 1.0 and found["tools/unknown/failures"] == 1.0
    assert found["episode/out_of_calls"] == 1.0 and found["episode/failed_calls"] == 0.5
    assert found["episode/seconds_p50"] == 2.0 and found["env/won"] == 0.5 and found["episode/out_of_time"] == 1.0


def test_a_batch_that_lost_all_samples_counts_them():
    episodes = [{"turns": [], "metrics": {"failed/agent": 1.0}, "seconds": 2.0}] * 2
    found = episode_metrics(types.SimpleNamespace(episodes=episodes, stop_B=np.array([STOP_DEADLINE, STOP_DEADLINE])))
    assert found["episode/out_of_time"] == 2.0 and found["env/failed/agent"] == 1.0 and found["episode/turns"] == 0.0


def test_environments_are_given_by_name_settings_or_object():
    assert not environment_config(None).used
    assert environment_config("a.py:B") == EnvironmentConfig(environment="a.py:B")
    assert environment_config(EnvironmentConfig(tools=("calculator",))).environment == "tools"
    assert environment_config(ToolEnvironment("calculator")).tools == ("calculator",)
    with pytest.raises(ValueError, match="is neither"):
        environment_config(3)


def _tokenizer(directory, *special, tools=()):
    """Returns the tokenizer of tiny_tools with a template that lists tools, and with the special tokens `special`."""
    shutil.copytree(EMBEDDED["tiny_tools"], directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    first = len(content["model"]["vocab"])
    (directory / "config.json").unlink()  # its model has no embeddings for the added tokens
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": first + i, "content": text, "special": True, **flags} for i, text in enumerate(special)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(
        "{% for t in tools %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end_of_turn>{% endfor %}[assistant]"
    )
    return Tokenizer(directory, tools=tools)


def test_tools_are_checked_at_the_start(tmp_path):
    config = EnvironmentConfig(environment="tools", tools=("calculator",))
    with Episodes(config, Limits(), journal=None) as host:
        check(host, Dialogue(_tokenizer(tmp_path / "end", "</call>")))  # no tag contains this token
        for i, tag in enumerate(["<call_tool", "<snippet", "</tool_output>x"]):
            dialogue = Dialogue(_tokenizer(tmp_path / str(i), tag))
            if tag.endswith("x"):  # this token is longer than the tag, so the tag does not contain it
                check(host, dialogue)
                continue
            with pytest.raises(ValueError, match=f"The tag '{tag}' of env.parser holds a special token"):
                check(host, dialogue)
    with Episodes(dataclasses.replace(config, parser="hermes"), Limits(), journal=None) as host:
        assert list(offered_tools(dataclasses.replace(config, parser="qwen3"), Limits())) == host.tools
        assert offered_tools(config, Limits()) == offered_tools(EnvironmentConfig(), Limits()) == []
        check(host, Dialogue(_tokenizer(tmp_path / "same", tools=host.tools)))
        other = [{"type": "function", "function": host.tools[0]["function"] | {"description": "Other."}}]
        with pytest.raises(ValueError, match="The tools calculator of this process differ from the tools that prompts"):
            check(host, Dialogue(_tokenizer(tmp_path / "other", tools=other)))


def test_the_room_of_an_environment_is_to_be_set(tmp_path):
    mesh = podrl.make_mesh("data=1", jax.devices()[:1])
    roles = {podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}
    training = podrl.RLTrainingConfig(
        max_steps=2, eval_every_n_steps=9, checkpoint_root_directory=str(tmp_path / "run")
    )
    rollout = podrl.RolloutConfig(max_tokens_to_generate=24)
    settings = podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)
    cluster = podrl.RLCluster(actor="tiny", cluster_config=settings)
    with pytest.raises(ValueError, match=r"^RolloutConfig\.max_response_tokens is not set.*max_tokens_to_generate=24"):
        podrl.GRPOLearner(cluster, podrl.GRPOConfig(), environment="a.py:B")
    podrl.GRPOLearner(cluster, podrl.GRPOConfig(), "answer")


@pytest.mark.nightly("podrl/learner/run_environments.py", "podrl/rollout/episodes.py", "podrl/learner/learner.py")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_run_from_python_trains_on_turns(kind, tmp_path):
    (tmp_path / "twice.py").write_text(ENVIRONMENT)
    mesh = podrl.make_mesh("data=1", jax.devices()[:1])
    training = podrl.RLTrainingConfig(
        max_steps=2, eval_every_n_steps=9, checkpoint_root_directory=str(tmp_path / "run")
    )
    rollout = podrl.RolloutConfig(max_tokens_to_generate=24, max_response_tokens=72, max_prompt_length=64, lanes=16)
    roles = {podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}
    settings = podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)
    cluster = podrl.RLCluster(actor=str(podrl.TINY), cluster_config=settings)
    make, config = (
        (podrl.GRPOLearner, podrl.GRPOConfig(num_generations=4))
        if kind == "grpo"
        else (podrl.PPOLearner, podrl.PPOConfig())
    )
    learner = make(cluster, config, environment=f"{tmp_path}/twice.py:Twice")
    assert learner.train([{"prompt": f"Say {i}."} for i in range(8)], prompts_per_step=4) == 2
    records = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for record in records:
        turns = [turn for turn in record["turns"] if turn["by"] == "model"]
        assert 1 <= len(turns) <= 3
        assert record["environment"] == pytest.approx(sum(turn["reward"] for turn in turns))
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["episode/given_tokens"] > 0 and 1 <= metrics["env/length"] <= 6
    assert cluster.env_client is None


@pytest.mark.nightly("podrl/learner/run_environments.py", "podrl/rollout/episodes.py", "podrl/learner/generation.py")
@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_trains_on_episodes_that_begin_with_an_observation(max_staleness, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    mesh = podrl.make_mesh("data=1", jax.devices()[:1])
    training = podrl.RLTrainingConfig(
        max_steps=2, eval_every_n_steps=9, checkpoint_root_directory=str(tmp_path / "run")
    )
    rollout = podrl.RolloutConfig(max_tokens_to_generate=24, max_response_tokens=72, max_prompt_length=64, lanes=16)
    roles = {podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}
    settings = podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)
    cluster = podrl.RLCluster(actor=str(podrl.TINY), cluster_config=settings)
    config = podrl.GRPOConfig(num_generations=4, max_staleness=max_staleness)
    learner = podrl.GRPOLearner(cluster, config, environment=f"{tmp_path}/game.py:game")
    assert learner.train([{"question": f"Say {i}."} for i in range(8)], prompts_per_step=4) == 2
    records = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        assert re.fullmatch(r"<bos><start_of_turn>user\nSay \d\.", record["prompt"])
        assert re.match(r"\n\nstart \d\nmodel\n", record["completion"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not [name for line in lines for name in line if name.startswith("rollout/faulty")]
