"""Starts a run's environments before its samples, connects them to the cluster, and ends them with the run."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from podrl.cluster.rl_cluster import RLCluster
from podrl.data.dialogue import Dialogue
from podrl.environments.calls import format_of, in_template
from podrl.environments.config import PROGRAM, EnvironmentConfig
from podrl.environments.journal import AtLeader, Files, Journal
from podrl.environments.protocol import Task
from podrl.environments.workers import Episodes
from podrl.rollout.episodes import EnvironmentClient
from podrl.rundir.run import OUTSIDE, Run
from podrl.runtime.pod import Pod
from podrl.workers.user_code import Limits

REWARD_NAME = "environment"  # name of the reward that environments give

ERRORS = "servers"  # folder of files with the standard error of MCP servers that are started by a command


def environment_config(environment: object) -> EnvironmentConfig:
    """Makes the settings of an environment from a name, settings, a ToolEnvironment, or None for no environment.

    Raises:
      ValueError: `environment` is none of these.
    """
    if environment is None or isinstance(environment, EnvironmentConfig):
        config = environment or EnvironmentConfig()
    elif isinstance(environment, str | os.PathLike):
        config = EnvironmentConfig(environment=os.fspath(environment))
    else:
        config = getattr(environment, "config", None)
        if not isinstance(config, EnvironmentConfig):
            raise ValueError(
                f"environment={environment!r} is neither 'file.py:Name', an EnvironmentConfig nor a ToolEnvironment: "
                "environments run in processes of their own, which find them by file and name."
            )
    if config.used and not config.environment:
        config = dataclasses.replace(config, environment=config.choices[0])
    return config


def asks_template(config: EnvironmentConfig) -> bool:
    """Returns True if prompts may have to name the environment's tools, which only the started environment knows."""
    return (
        config.used and config.environment != PROGRAM and (config.environment != "tools" or in_template(config.parser))
    )


def offered_tools(config: EnvironmentConfig, limits: Limits) -> list[Any]:
    """Lists the tools that prompts name, in the form of chat templates.

    The list is empty unless the model writes calls in the form of its chat template. To get the list, the environment
    and its servers are started and ended.

    Raises:
      ValueError: the environment or a tool cannot be loaded.
      ServiceError: an MCP server does not answer.
    """
    if not asks_template(config):
        return []
    with Episodes(config, limits, journal=None) as host:
        return host.tools if in_template(host.parser) else []


@contextlib.contextmanager
def run_environments(
    cluster: RLCluster, config: EnvironmentConfig, limits: Limits, run: Run, pod: Pod | None = None
) -> Iterator[None]:
    """Gives every sample of the cluster its environment while the context lasts, if this process generates.

    Answers from outside (tools, agents) are kept in the folder `outside` of the run directory, which the leader writes
    if there are several processes. If this directory is in a bucket, answers reach it within seconds. With
    `rollout.clock='tokens'`, answers of steps before the newest checkpoint are deleted. With 'wall' all answers stay,
    because a run can be repeated from its beginning.
    """
    if not config.used:
        yield
        return
    with contextlib.ExitStack() as stack:
        journal, exact = None, cluster.config.rollout().clock == "tokens"
        if run.leads and run.workdir is not None:
            files = Files(run.workdir / OUTSIDE, run.hurry)
            stack.callback(files.close)
            if exact:
                files.drop(run.saved_step())
            run.on_saved.append(files.drop if exact else files.release)
            journal = Journal(files, exact=exact)
            if pod is not None:
                files.serve(pod.channel)
        elif pod is not None:
            journal = Journal(AtLeader(pod, 4 * run.log_config.stall_s), exact=exact)
        if not cluster.generates:
            yield
            return
        if journal is not None:
            run.on_saved.append(journal.forget)
            run.on_takeover.append(journal.read_again)

        def called(task: Task, name: str, started: float, ended: float, failed: str) -> None:
            step = task.step + 1 if task.mode == "train" else None  # an evaluation's calls belong to the step before it
            run.spans.add_call(name, started, ended, step=step, failed=failed)

        errors = None if run.workdir is None else run.workdir / ERRORS
        host = Episodes(config, limits, journal=journal, on_call=called, error_files=errors)
        stack.callback(host.close)
        clock = cluster.config.rollout().clock
        env_client = EnvironmentClient(
            host,
            Dialogue(cluster.tokenizer),
            clock=clock,
            failed_share=config.failed_share,
            history=config.history,
            observes_first=host.observes_first,
        )
        cluster.use_environments(env_client)
        stack.callback(cluster.use_environments, None)
        run.watchdog.wait_sources.append(lambda: env_client.waits_for)
        check(host, env_client.dialogue)
        yield


def check(host: Episodes, dialogue: Dialogue) -> None:
    """Refuses tools whose call format the tokenizer or template cannot express, or that differ from the prompts' tools.

    Raises:
      ValueError: there is such a tool; the message names it, and the keys to change.
    """
    if not host.tools:
        return
    form = format_of(host.parser, [tool["function"]["name"] for tool in host.tools])
    dialogue.check_tags(form.tags)
    dialogue.stops(form.stop)
    if not in_template(host.parser):
        return
    dialogue.check_template(form.role)
    named = {tool["function"]["name"]: tool for tool in dialogue.tokenizer.tools}
    there = {tool["function"]["name"]: tool for tool in host.tools}
    if named and named != there:
        differ = sorted(name for name in named.keys() | there.keys() if named.get(name) != there.get(name))
        raise ValueError(
            f"The tools {', '.join(differ)} of this process differ from the tools that prompts name: env.tools and "
            "the servers of env.mcp must offer the same tools to all processes of the job."
        )
