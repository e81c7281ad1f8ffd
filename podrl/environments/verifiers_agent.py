"""The agent program that plays tasks of the package verifiers; it runs in the Python of verifiers, without podrl.

    PYTHON -P verifiers_agent.py               plays tasks, as the program of env.verifiers
    PYTHON -P verifiers_agent.py ENV [LIMIT]   writes records of at most LIMIT tasks, for podrl.verifiers

ENV is the [env] block of verifiers' own configuration as JSON, such as {"taskset": {"id": "reverse-text"}}. verifiers
relays the requests of the harness to podrl's endpoint, runs the tools, and computes the reward.
"""

import asyncio
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_KEY = "PODRL_VERIFIERS_KEY"  # prefix of the environment variables that hold the keys of episodes
REFUSED = 3  # exit code if the settings do not fit a task; the last line of standard error says why
# The server of verifiers keeps a client for each key until the server ends, so this program restarts it after this many
# episodes.
_EPISODES = 256
# Kinds of lost samples (podrl.agent.Failure) by verifiers' types of errors; other errors count as the agent's.
_KINDS = dict.fromkeys(("EnvError", "SandboxError", "ToolsetError"), "environment")
_KINDS |= {"TaskError": "grading"}  # an error in the task's own code, which is mostly grading code
_KINDS |= dict.fromkeys(("ProviderError", "InterceptionError", "TunnelError"), "infrastructure")
_players: "dict[str, Player]" = {}  # environments of this process by their [env] block


class UnfitError(ValueError):
    """The settings of an environment do not fit a task; the text is one line."""


class Player:
    """One environment of verifiers, and its tasks by their position."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        """Loads the environment.

        Args:
          block: the [env] block of verifiers' configuration. An agent without a runtime in this block runs in
            subprocesses of this machine. The default of verifiers would be a sandbox of Prime's cloud.
        """
        from verifiers.v1 import SubprocessConfig  # pyright: ignore[reportMissingImports]
        from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

        config = loaders.resolve_env_config(block)
        for agent in agent_config_fields(config).values():
            if "runtime" not in agent.model_fields_set:
                agent.runtime = SubprocessConfig()
        self._agents = agent_config_fields(config)
        self.env = loaders.load_environment(config)
        self._tasks = iter(self.env.taskset)
        self._read: list[Any] = []
        self._serving: Any = None
        self._played = 0

    def task(self, index: int) -> Any:
        """Returns the task at a position.

        Raises:
          ValueError: the taskset has no task at this position.
        """
        self._read += itertools.islice(self._tasks, max(0, index + 1 - len(self._read)))
        if index >= len(self._read):
            raise ValueError(f"the taskset has {len(self._read)} tasks, and the record is of task {index}")
        return self._read[index]

    def check(self, task: Any) -> None:
        """Checks that a task can run in the harness and the runtime of the environment's agent, if it has one agent.

        An environment of several agents gives its agents other tasks, so nothing can be checked before it runs.

        Raises:
          UnfitError: the task cannot run; for example, a harness that needs a container would run in subprocesses.
        """
        from verifiers.v1.utils import compile as fit  # pyright: ignore[reportMissingImports]

        if len(self._agents) != 1:
            return
        [(name, agent)] = self._agents.items()
        try:
            runtime = fit.resolve_runtime_config(agent.runtime, task)
            fit.validate_pairing(self.env._harnesses[name], type(task), runtime)
            harbor = sys.modules.get("verifiers.v1.tasksets.harbor")  # imported if a task is of Harbor
            if harbor and isinstance(task, harbor.HarborTask) and runtime.type == "subprocess":
                raise ValueError(
                    "all episodes of a machine would share /app, /logs and /tests, where tasks of Harbor keep the "
                    'work, the reward and the tests: give the agent a runtime, such as {"type": "docker"}'
                )
        except ValueError as error:
            raise UnfitError(f"task {task.data.idx} cannot be run as --env says: {error}") from error

    async def play(self, task: object, base_url: str, key: str) -> Mapping[str, Any]:
        """Plays one episode and returns its result, see podrl.agent.serve.

        Raises:
          podrl.agent.Failure: the episode failed.
          RuntimeError: the trained agents of the episode have different rewards.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]

        if self._serving is None or self._played % _EPISODES == 0:
            await self.close()
            serving = self.env.serving()
            await serving.__aenter__()
            self._serving = serving
        name = f"{_KEY}_{self._played}"
        self._played += 1
        os.environ[name] = key
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=name)
            episode = await self.env.run_episode(task, ModelContext(model="policy", client=client))
        finally:
            del os.environ[name]
        return _result(episode)

    async def close(self) -> None:
        """Ends the servers of the environment."""
        if self._serving is not None:
            await self._serving.__aexit__(None, None, None)
        self._serving = None


def _result(episode: Any) -> Mapping[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        kind = next((_KINDS[error.type] for error in errors if error.type in _KINDS), "agent")
        why = "\n".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"
        raise _agent().Failure(kind, why)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len({trace.reward for trace in trained}) != 1:
        rewards = {trace.agent.name: trace.reward for trace in trained}
        raise RuntimeError(
            f"the agents of {episode.env.id} have the rewards {rewards}, and a sample has one: use an environment "
            "whose trained agents share their reward"
        )
    metrics: dict[str, float] = {}
    for trace in trained:
        of = f"{trace.agent.name}/" if len(trained) > 1 else ""  # rewards of several agents may have the same names
        metrics |= {of + name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics |= {of + name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {"reward": trained[0].reward, "metrics": metrics}


def _records(block: Mapping[str, Any], limit: int | None) -> Iterator[Mapping[str, Any]]:
    """Yields the record of each task: its prompt, and the field 'verifiers', by which `_solve` finds the task again."""
    player = Player(block)
    for task in itertools.islice(player.env.taskset, limit):
        player.check(task)
        messages = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        messages.append({"role": "user", "content": task.data.prompt_text or task.data.name or str(task.data.idx)})
        place = {"env": block, "index": task.data.idx, "key": task.key}
        yield {"messages": messages, "verifiers": json.dumps(place)}


def _solve(runner: asyncio.Runner, task: Mapping[str, Any]) -> Mapping[str, Any]:
    if "verifiers" not in task["fields"]:
        raise ValueError(
            "the record has no field 'verifiers': env.verifiers plays records that python -m podrl.verifiers wrote"
        )
    place = json.loads(task["fields"]["verifiers"])
    block = json.dumps(place["env"])
    if block not in _players:
        _players[block] = Player(place["env"])
    player = _players[block]
    own = player.task(place["index"])
    if own.key != place["key"]:
        raise ValueError(
            f"task {place['index']} of {place['env']['taskset']['id']} is no longer the task that the record was "
            "written from: the taskset's package has changed. Write the records again with python -m podrl.verifiers"
        )
    return runner.run(player.play(own, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))


@functools.cache
def _agent() -> Any:
    """Loads podrl/agent.py, which needs only the standard library, without the package podrl around it."""
    path = pathlib.Path(__file__).resolve().parent.parent / "agent.py"
    spec = importlib.util.spec_from_file_location("podrl_agent", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Plays tasks until the standard input ends, or writes the records of an environment's tasks."""
    if len(sys.argv) > 1:
        block, *limit = map(json.loads, sys.argv[1:])
        # Descriptor 1 becomes a copy of standard error, so that output of the taskset cannot mix with the records.
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as records:
            os.dup2(2, 1)
            try:
                for record in _records(block, limit[0] if limit else None):
                    records.write(json.dumps(record) + "\n")
            except UnfitError as error:
                sys.stderr.write(f"{error}\n")
                sys.exit(REFUSED)
        return
    with asyncio.Runner() as runner:
        try:
            _agent().serve(functools.partial(_solve, runner))
        finally:
            for player in _players.values():
                runner.run(player.close())


if __name__ == "__main__":
    main()
