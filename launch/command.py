"""The podrl command line, exit codes and environment that every launcher submits."""

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from .submission import Code

# podrl's own exit codes: 42 if the infrastructure failed, 75 if podrl was preempted and has saved; a restart helps.
PREEMPTED_CODE = 75
RESTART_CODES = (42, PREEMPTED_CODE)
# Deaths by signal that say nothing about the program: 134 abort (jax does this when a peer vanishes), 137 killed,
# 139 segmentation fault in the runtime, 143 terminated before podrl could save.
SIGNAL_CODES = (134, 137, 139, 143)

ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# Names of variables that are likely to hold a secret, such as HF_TOKEN and WANDB_API_KEY.
_SECRET = re.compile(r"(^|_)(SECRETS?|TOKENS?|PASS(WD|WORD|PHRASE)?|CREDENTIALS?|(API)?KEYS?|AUTH)(_|$)", re.IGNORECASE)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Formats help as podrl.runtime.arguments does; it is a copy, because launch/ may not import podrl."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, "", [], argparse.SUPPRESS) or isinstance(default, bool):
            return action.help
        return f"{action.help} (default: %(default)s)"


class _Parser(argparse.ArgumentParser):
    """A parser whose error for an unknown argument says where podrl's own flags belong."""

    def error(self, message: str) -> NoReturn:
        unknown = message.startswith("unrecognized arguments")
        super().error(message + (" (podrl's own flags go after --, at the end: ... -- --config.KEY=VALUE)" * unknown))


def make_parser(launcher: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a launcher, without options: --help shows every default.

    Args:
      launcher: name of the launcher's module in this package, such as gke.
      description: text above the list of options.
    """
    prog = f"python -m {__package__}.{launcher}"
    return _Parser(prog=prog, description=description, formatter_class=_Help)


def podrl_command(config: str, workdir: str, extra: Sequence[str], code: Code | None = None) -> list[str]:
    """Builds the command of one process.

    Args:
      config: value of podrl's --config.
      workdir: value of --workdir; pods share no disk, so it must be a URL such as gs://bucket/run.
      extra: further podrl flags, as given after `--`.
      code: the user's code that is sent with the job; None for none.

    Raises:
      ValueError: the workdir is on a pod's own disk, or a flag is given twice.
    """
    if "://" not in workdir:
        raise ValueError(f"--workdir={workdir} is a path inside a pod and dies with it: use gs://BUCKET/RUN.")
    for flag in extra:
        if flag.split("=")[0] in ("--config", "--workdir", "--code"):
            raise ValueError(f"{flag} stands after --: give {flag.split('=')[0]} before it, once.")
    sent = [f"--code={code.url(workdir)}"] if code else []
    return ["python", "-m", "podrl.launch", f"--config={config}", f"--workdir={workdir}", *sent, *extra]


def preempted_pod_rules(container: str) -> list[dict[str, Any]]:
    """Builds the rules of a Job's podFailurePolicy that match a preempted pod.

    Args:
      container: name of the container that runs podrl.
    """
    saved = {"containerName": container, "operator": "In", "values": [PREEMPTED_CODE]}
    return [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # The schema of some JobSet versions requires the empty list: github.com/kubernetes-sigs/jobset/issues/377.
        {"action": "FailJob", "onExitCodes": saved, "onPodConditions": []},
    ]


def preempted_rule(job: str) -> dict[str, Any]:
    """Builds the rule of a JobSet's failurePolicy by which restarts after a preemption are not counted.

    JobSet 0.10 recognises `preempted_pod_rules` by the message of Kubernetes about the rule that a pod matched. The
    returned rule must stand before other rules that match the reason PodFailurePolicy.

    Args:
      job: name of the replicated job whose Jobs have these rules.
    """
    return {
        "name": f"{job.replace('-', '_')}Preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [
            "has condition DisruptionTarget matching",
            f"failed with exit code {PREEMPTED_CODE} matching",
        ],
        "targetReplicatedJobs": [job],
    }


def job_name(name: str, limit: int, flag: str = "--name") -> str:
    """Returns `name` if Kubernetes accepts it as the start of pod and host names.

    Args:
      name: the requested name.
      limit: number of characters that are left for the name once Kubernetes has appended role, slice and host.
      flag: flag that gave the name, for the message.

    Raises:
      ValueError: the name is not a DNS label of at most `limit` characters.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > limit:
        raise ValueError(
            f"{flag}={name} must be lower-case letters, digits and '-', start with a letter, end with a letter or "
            f"digit and have at most {limit} characters"
            + (f"; this one has {len(name)}." if len(name) > limit else ".")
        )
    return name


def environment(pairs: Sequence[str]) -> dict[str, str]:
    """Returns podrl's environment in a pod, with the user's NAME=VALUE pairs added or put in place of its values.

    Raises:
      ValueError: a pair has no '=' or a bad name, gives the job's secret, or has a value that breaks xpk's template.
    """
    values = dict(ENVIRONMENT)
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if name == "PODRL_SECRET":
            raise ValueError(
                "--env=PODRL_SECRET=... would show the job's secret to everyone who lists processes: leave it out, "
                "every submission is given a new one. PODRL_SECRET_FILE may name a file of your own."
            )
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                f"--env={pair} must be NAME=VALUE; NAME has letters, digits and '_', and begins with no digit."
            )
        if re.search(r'["\\\n]', value):
            raise ValueError(
                f"--env={name}=... holds a quote, backslash or newline: put such a value into a file instead."
            )
        values[name] = value
    return values


def is_secret(name: str) -> bool:
    """True if an environment variable, by its name, should not be printed."""
    return name != "PODRL_SECRET_FILE" and _SECRET.search(name) is not None


def redacted(word: str) -> str:
    """Hides, for printing, the value in an --env flag whose variable sounds secret; returns other words unchanged."""
    match = re.match(r"--env=(\w+)=", word)
    return f"{match[0]}REDACTED" if match and is_secret(match[1]) else word


def show(command: Sequence[str]) -> str:
    """Formats a command for a shell: name and verbs in the first line, then one flag per line; secrets are hidden."""
    command = [redacted(word) for word in command]
    verbs = list(itertools.takewhile(lambda word: not word.startswith("-"), command))
    return " \\\n  ".join([shlex.join(verbs), *map(shlex.quote, command[len(verbs) :])])


def split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments at the first `--` into the launcher's arguments and podrl's arguments."""
    argv = list(argv)
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def run(
    command: Sequence[str],
    *,
    stdin: str | bytes | None = None,
    path: str = "",
    missing: Mapping[str, str],
) -> int:
    """Runs a client program and returns its exit code; 1 if the program is not installed.

    Args:
      command: program and arguments.
      stdin: standard input of the program; None for the standard input of this process.
      path: folder in which the program looks first for programs that it starts; '' for none.
      missing: sentence that says how to install a program, by name of the program.
    """
    environment = os.environ | ({"PATH": f"{path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} if path else {})
    try:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        return subprocess.run(command, input=content, env=environment, check=False).returncode
    except FileNotFoundError:
        sys.stderr.write(f"{command[0]} is not on PATH: {missing[command[0]]}\n")
        return 1
