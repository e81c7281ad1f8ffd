"""The launch command: reads flags and configuration, prepares the environment before jax is imported, sets exit codes.

    python -m podrl.launch --config=grpo_gemma.py [--workdir=DIR] [--dry_run] [--config.group.key=value ...]
    python -m podrl.launch --help_config [prefix]

A config is looked up at its path, then in configs/, then among podrl's own files. Exit codes: 0 done, 1 user error, 42
infrastructure (restart me), 75 preempted after saving, or before there was anything to save (the same command resumes),
130 Ctrl-C before there was anything to save.
"""

import gc

from podrl.runtime import signals

if __name__ == "__main__":  # before the imports below, which are slow
    signals.leave_on_signals(unwind=False)
    # Imports and traced programs make millions of objects that stay. With Python's own threshold, the collector
    # visits them so often that it takes more than a second until the first step.
    gc.set_threshold(50_000)

import dataclasses
import difflib
import errno
import functools
import io
import logging
import math
import operator
import os
import pathlib
import re
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from podrl.config import elsewhere, nearest, refused
from podrl.job.config_file import default_workdir, find_config, load_config
from podrl.mappings import ConfigValues
from podrl.runtime import bundle, detect, environment, joining, local_pod, roles
from podrl.runtime.arguments import as_sentence
from podrl.runtime.channel import ChannelError
from podrl.runtime.pod import Pod
from podrl.runtime.service import ServiceError
from podrl.runtime.watchdog import (
    EXIT_DONE,
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_USER,
    announce_if_long,
    stacks_on_signal,
)
from podrl.storage.storage import StorageError, disk_trouble, is_remote

_PEER_LOSS_S = 8.0  # seconds to wait after a failed collective, because other processes may notice a dead process later
# Prefixes of XLA runtime errors that another process may cause; jax raises them as RuntimeError or ValueError.
_STATUS = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|DATA_LOSS): "
)
# The XLA errors that a healthy process gets when another process, or the network between the two, fails.
_LOST = re.compile(r"^(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): |[Gg]loo")
# Flags that are read before absl parses them: type and smallest value of each.
_NUMBERS = {
    "local_processes": (int, 0),
    "fake_devices": (int, 0),
    "join_s": (float, 0.0),
    "restarts": (int, 0),
    "heartbeat_s": (float, 1.0),
}
_KEY = re.compile(r"-{0,2}(?!config\.)[a-z]\w*(\.[a-z]\w*)+=")  # a configuration key without the prefix '--config.'
_SWITCHES = ("dry_run", "all_settings", "shared_workdir", "debug", "help", "helpfull", "h")
_COMMAND = "PODRL_COMMAND"  # environment variable that passes the user's command to the processes of a local pod

_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Directory of the run, or gs://BUCKET/RUN. If it holds a run, the run is resumed. Default: runs/<config>.",
)
for _name, _meaning in (
    (
        "coordinator",
        "HOST[:PORT] of process 0, if podrl cannot read it from the platform; the port is 8482 if left out.",
    ),
    ("process_id", "Number of this process among --num_processes, from 0 on; goes with --coordinator."),
    ("num_processes", "Number of processes of the job, one per host; goes with --coordinator."),
):
    flags.DEFINE_string(_name, "", _meaning)
_CODE = flags.DEFINE_string(
    "code",
    "",
    "Archive of the user's code, RUN.code-SHA256.tar, which the launchers make from --code=DIR. podrl unpacks it here "
    "and looks up relative paths of the configuration in it.",
)
_HELP_CONFIG = "help_config"
flags.DEFINE_string(
    _HELP_CONFIG,
    None,
    "Print all configuration keys with range and meaning, or only the keys that begin with this text.",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Check configuration, files and data, print roles and batch arithmetic, and start nothing."
)
_ALL_SETTINGS = flags.DEFINE_bool(
    "all_settings",
    False,
    "With --dry_run: print every setting as JSON, not only those that differ from their defaults.",
)
_TOPOLOGY = flags.DEFINE_enum(
    "topology",
    "auto",
    ["auto", "single", "shared", "split", "pathways"],
    "How processes share the work; auto reads it from the platform.",
)
_LOCAL = flags.DEFINE_integer(
    "local_processes",
    0,
    "Number of processes to start on this machine as a pod, each with --fake_devices CPU devices; 0 starts no pod.",
)
_FAKE = flags.DEFINE_integer(
    "fake_devices",
    None,
    "Number of CPU devices that each process fakes; by default config.fake_devices, with --local_processes "
    "each process's share of it, at least one.",
)
_JOIN_S = flags.DEFINE_float(
    "join_s", joining.JOIN_S, "Seconds that processes wait at the start until all processes of the job are there."
)
_RESTARTS = flags.DEFINE_integer(
    "restarts",
    local_pod.RESTARTS,
    "How often --local_processes restarts dead rollout and evaluation hosts with --topology=split. After that the run "
    "goes on with the other hosts.",
)
_JOIN = flags.DEFINE_string(
    "join",
    "",
    "HOST:PORT of trainer 0 of a running job with --topology=split. This process joins the job as a rollout host; it "
    "needs the job's own flags and PODRL_SECRET.",
)
_HEARTBEAT_S = flags.DEFINE_float(
    "heartbeat_s",
    joining.HEARTBEAT_S,
    "Seconds without a heartbeat after which jax treats a process as dead; longer than any compilation.",
)
_SHARED = flags.DEFINE_bool(
    "shared_workdir",
    False,
    "Confirms that all hosts see the same --workdir, if its file system looks like a local one.",
)
_PROFILE = flags.DEFINE_string(
    "profile",
    "",
    "First and last step to profile, such as 120:125; every host writes jax's profile of these steps into the run.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Print the whole traceback of user errors too.")


def take_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Splits the arguments: (value of --config, all other arguments, each as --name=value).

    Raises:
      ValueError: --config is missing.
    """
    rest, config = [], ""
    for arg in _joined(argv):
        if arg.startswith("--config="):
            config = arg.removeprefix("--config=")
        elif arg != "--config":
            rest.append(arg)
    if not config:
        raise ValueError(f"--config is missing: {_instead_of_config(rest[1:])}")
    return config, rest


def _instead_of_config(args: Sequence[str]) -> str:
    """Returns what to write in place of an argument that was probably meant for --config; else an example."""
    for arg in args:
        flag, _, value = arg.partition("=")
        name = flag.removeprefix("--")
        bare = value if name in _SWITCHES else "" if flag.startswith("--") else arg  # a value joins a switch before it
        if ".py" in bare:
            return f"write --config={bare}, because {bare!r} alone is not read."
        if flag.startswith("--") and name not in flags.FLAGS and difflib.get_close_matches(name, ["config"], n=1):
            return f"there is no flag {flag}. Did you mean --config={value or 'grpo_gemma.py'}?"
    return "name a configuration, for example --config=grpo_gemma.py."


def _joined(argv: Sequence[str]) -> list[str]:
    """Rewrites every '-name' or '--name VALUE' as --name=VALUE, and 'trainer.max_steps=10' as a key of --config."""
    joined: list[str] = []
    for arg in argv:
        option = re.match(r"--?[A-Za-z]", arg) is not None
        waits = bool(joined) and joined[-1].startswith("--") and "=" not in joined[-1]
        if _KEY.match(arg) and (option or not waits or joined[-1].lstrip("-") in _SWITCHES):
            joined.append(f"--config.{arg.lstrip('-')}")
        elif not option and waits:
            joined[-1] += f"={arg}"
        else:
            joined.append(f"--{arg.lstrip('-')}" if option else arg)
    return joined


def _check_numbers(argv: Sequence[str]) -> None:
    """Refuses values out of range for the flags in `_NUMBERS`."""
    for arg in argv:
        name, _, text = arg.removeprefix("--").partition("=")
        if name not in _NUMBERS or "=" not in arg:
            continue
        kind, least = _NUMBERS[name]
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not math.isfinite(value) or value < least:
            what = "a whole number" if kind is int else "a number of seconds"
            raise ValueError(f"--{name}={text} must be {what}, at least {least}.")


def _early(argv: Sequence[str], key: str, default: Any, prefix: str = "--config.") -> Any:
    """Reads a key from the command line before all flags can be parsed."""
    values = [arg.partition("=")[2] for arg in argv if arg.startswith(f"{prefix}{key}=")]
    try:
        return type(default)(values[-1]) if values else default
    except ValueError:
        raise ValueError(f"{prefix}{key}={values[-1]} must be {type(default).__name__}, such as {default!r}.") from None


def _switched_on(argv: Sequence[str], key: str) -> bool:
    """Returns True if the command line sets the switch `key`; used before absl has parsed the flags."""
    values = [arg.partition("=")[2].lower() for arg in argv if arg.partition("=")[0] == f"--{key}"]
    return bool(values) and values[-1] in ("", "true", "t", "yes", "y", "1")


def _check_overrides(argv: Sequence[str], config: ConfigDict) -> None:
    """Refuses overrides of keys that do not exist; the message names the nearest key of the same group."""
    from podrl.job.config import other_section

    for arg in argv:
        if not arg.startswith("--config."):
            continue
        path = arg.removeprefix("--config.").partition("=")[0]
        group: Any = config
        for i, key in enumerate(path.split(".")):
            if not isinstance(group, ConfigDict) or key not in group:
                known = list(group) if isinstance(group, ConfigDict) else []
                where = ".".join(["config", *path.split(".")[:i]])
                if path in flags.FLAGS:
                    raise ValueError(f"config has no key {key!r}, which is a flag of its own: write --{path}=...")
                if removed := refused(path, of_others=i == path.count(".")):
                    raise ValueError(f"{where} has no key {key!r}: {removed}")
                hint = "" if i else other_section(key, config.algorithm)
                hint = hint or elsewhere(key, config.to_dict(), "config.") or nearest(key, known)
                if (
                    not i and key != "config" and difflib.get_close_matches(key, ["config"])
                ):  # --confg.a.b is read as --config.confg.a.b
                    hint = " Did you mean 'config'?"
                raise ValueError(f"{where} has no key {key!r}.{hint}")
            parent, group = group, group.get(key)
            if parent.get_type(key) is type(None):  # a value that is no plain setting, such as an optimizer
                raise ValueError(f"config.{path} is an object, which no flag can hold: set it in a configuration file.")
        if isinstance(group, ConfigDict):
            raise ValueError(f"{arg}: config.{path} is a group of keys; set one of them: {', '.join(group)}.")


def _find_cluster(argv: Sequence[str], *, joins: bool = False, planned: bool = False) -> detect.Cluster:
    """Determines this process's place in the cluster, or in its own slice if it joins another job.

    Args:
      argv: the command line, each argument as --name=value.
      joins: True if the process joins a running job.
      planned: True if a dry run shows a pod of several processes, without starting them.

    Raises:
      ValueError: the settings cannot work in this cluster.
    """
    # A dry run checks the job on this process's own devices, so it does not wait for other processes.
    alone = joins or planned or (_splits(argv) and _switched_on(argv, "dry_run") and "PODRL_CHANNEL" not in os.environ)
    topology = "auto" if alone else _early(argv, "topology", "auto", prefix="--")
    flags = {name: _early(argv, name, "", prefix="--") for name in detect.CLUSTER_FLAGS}
    metadata = {} if any(flags.values()) else detect.tpu_vm_metadata(os.environ)
    cluster = detect.detect(os.environ, topology=topology, metadata=metadata, flags=flags)
    detect.check_pathways(cluster)
    detect.check_fresh_jax(sys.modules)
    for name in cluster.unset:
        os.environ.pop(name, None)
    if joins:  # a rollout host writes neither metrics nor checkpoints, so its --workdir is not checked
        return dataclasses.replace(cluster, topology="split")
    workdir = _early(argv, "workdir", "", prefix="--")
    mounts = pathlib.Path("/proc/mounts")
    text = mounts.read_text() if mounts.exists() else ""
    if not _switched_on(argv, "shared_workdir"):
        where = workdir if is_remote(workdir) else str(pathlib.Path(workdir or "runs").absolute())
        detect.check_shared_directory(where, cluster, text)
    return cluster


def _hosts(argv: Sequence[str], config: ConfigDict) -> tuple[str, str, str, str]:
    """Reads the host lists of trainers and rollouts, the rollout mesh, and the evaluation hosts, overrides included."""
    role_settings = config.to_dict().get("roles", {})

    def value(role: str, name: str, default: str) -> str:
        return _early(argv, f"roles.{role}.{name}", role_settings.get(role, {}).get(name, default))

    trainer, rollout, evaluates = (value(role, "hosts", "") for role in (roles.TRAINER, roles.ROLLOUT, roles.EVAL))
    return trainer, rollout, value(roles.ROLLOUT, "mesh", "auto"), evaluates


def _start_pod(argv: Sequence[str], path: str, config: ConfigDict, processes: int) -> int:
    """Runs this same command in several processes of this machine."""
    local_pod.check_memory(processes)
    share, hosts = _share_of_devices(argv, config, processes), _hosts_of_pod(argv, config, processes)
    split = _splits(argv)
    own = ("--local_processes", "--fake_devices")
    passed = [arg for arg in argv[1:] if arg.partition("=")[0] not in own]
    command = [sys.executable, "-m", "podrl.launch", f"--config={path}", f"--fake_devices={share}", *passed]
    again = _command_line(sys.argv)
    restarts = _early(argv, "restarts", local_pod.RESTARTS, prefix="--")
    workdir = _early(argv, "workdir", "", prefix="--") or default_workdir(path)
    options: dict[str, Any] = {"replace_rollouts": split, "restarts": restarts, "again": again}
    options["workdir"] = None if is_remote(workdir) else pathlib.Path(workdir)
    return local_pod.LocalPod(command, hosts, environment=os.environ | {_COMMAND: again}, **options).run()


def _splits(argv: Sequence[str]) -> bool:
    """Returns True if the command line asks for separate clusters of trainers and rollouts."""
    return _early(argv, "topology", "auto", prefix="--") == "split"


def _hosts_of_pod(argv: Sequence[str], config: ConfigDict, processes: int) -> roles.Hosts:
    """Assigns roles to the processes of a pod on one machine.

    Raises:
      ValueError: the configuration's lists of hosts do not fit the number of processes.
    """
    trainer, rollout, mesh, evaluates = _hosts(argv, config)
    topology = detect.check_topology(_early(argv, "topology", "auto", prefix="--"))
    if topology not in ("auto", "shared", "split"):
        raise ValueError(
            f"--local_processes={processes} makes a pod of several processes, and --topology={topology} does not: "
            "use --topology=shared (as auto does here) or --topology=split."
        )
    roles.check_evaluation_hosts(evaluates, split=_splits(argv))
    return roles.assign(trainer, rollout, processes, mesh, evaluates)


def _share_of_devices(argv: Sequence[str], config: ConfigDict, processes: int) -> int:
    """Computes the number of CPU devices that each process of a pod on one machine fakes, at least one."""
    devices = _early(argv, "fake_devices", config.get("fake_devices", 0))
    return _early(argv, "fake_devices", max(devices // processes, 1), prefix="--")


def _command_line(argv: Sequence[str]) -> str:
    """Writes the shell command that repeats this command."""
    return shlex.join(["python", "-m", "podrl.launch", *argv[1:]])


def _unknown_flag(error: flags.UnrecognizedFlagError, values: ConfigValues) -> str:
    """Writes the error for an unknown flag, with the configuration's keys that end in the flag's name."""
    name, value = error.flagname.replace("-", "_"), error.flagvalue.partition("=")[2]
    if advice := refused(name):
        return f"There is no flag --{error.flagname}: {advice}"
    places = elsewhere(name, values, "--config.")
    if places.count("--config.") == 1:
        places = places.replace("'?", f"={value}'?")
    elif not places:
        places = nearest(name, flags.FLAGS).partition(" Known:")[0].replace("mean '", "mean '--")
    return f"There is no flag --{error.flagname}.{places or ' python -m podrl.launch --help_config lists all keys.'}"


def resolve(config: ConfigDict, argv: Sequence[str]) -> tuple[ConfigValues, list[str]]:
    """Parses absl's flags: (the whole configuration with defaults and overrides, arguments that are not flags).

    The environment must be prepared before, because this function imports jax.

    Args:
      config: the configuration that the file returned.
      argv: the command line without --config; the program's name first.

    Raises:
      ValueError: a key or flag is unknown, or a value does not fit its key.
    """
    from podrl.job.config import check_text, complete, lacking, quoted, section_of
    from podrl.trainer.custom import ARGUMENTS

    config.algorithm = _early(argv, "algorithm", config.get("algorithm", "grpo"))
    section = section_of(config.algorithm)
    for name in ARGUMENTS:  # a loss or advantage of the user, whose number arguments become keys of the section
        if function := _early(argv, f"{section}.{name}", ""):
            config.update({section: {name: function}})
    values = ConfigDict(complete(config.to_dict()))
    missing = lacking(values.to_dict())  # keys that the command line may set, although the file lacks them
    _fill(values, missing)
    _check_overrides(argv, values)
    parsed: list[str] = []
    emptied: dict[str, bool] = {}  # for each key, True if its last override is None, which absl cannot parse
    for arg in argv:
        key, equals, text = arg.removeprefix("--config.").partition("=")
        override = arg.startswith("--config.") and bool(equals)
        if override:
            emptied[key] = check_text(key, text, config.algorithm)
            arg = f"--config.{key}={quoted(key, text, config.algorithm)}"
        if not (override and emptied[key]):
            parsed.append(arg)
    holder = config_flags.DEFINE_config_dict("config", values, sys_argv=parsed)
    try:
        extra = flags.FLAGS(parsed)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ValueError(_unknown_flag(error, values.to_dict())) from error
    except (flags.Error, AttributeError, KeyError, TypeError) as error:
        path = pathlib.Path(argv[0])
        program = path.parent.name if path.stem == "__main__" else path.stem
        raise ValueError(f"{str(error).strip(chr(34))} (see python -m podrl.{program} --help)") from error
    resolved = holder.value.to_dict()
    for key in (key for key, nothing in emptied.items() if nothing):
        *groups, name = key.split(".")
        functools.reduce(operator.getitem, groups, resolved)[name] = None
    for key in missing:
        *groups, name = key.split(".")
        group = functools.reduce(operator.getitem, groups, resolved)
        if key not in emptied and group[name] is None:
            del group[name]
    return resolved, extra


def _fill(values: ConfigDict, missing: Mapping[str, type]) -> None:
    """Adds a placeholder for each missing key, so that absl can set the key."""
    for key, kind in missing.items():
        *groups, name = key.split(".")
        group: Any = values
        for part in groups:
            group = group[part]
        group[name] = config_dict.placeholder(kind)


def check_flags(argv: Sequence[str]) -> None:
    """Refuses a command line with an unknown flag or key, or with a value that its key cannot hold; starts no device.

    The launchers call this function in a separate process before they submit a job.

    Args:
      argv: the command line, the program's name first.

    Raises:
      ValueError: the command line cannot be parsed.
    """
    name, rest = take_config(argv)
    _check_numbers(rest)
    _, extra = resolve(load_config(find_config(name)), rest)
    _refuse_arguments(extra)


def _refuse_arguments(extra: Sequence[str]) -> None:
    """Refuses arguments that are not flags."""
    if extra:
        raise ValueError(f"Arguments {list(extra)} are not flags: every option starts with --, lists are quoted.")


def _run(argv: Sequence[str], joined: list[Pod]) -> int:
    """Runs the command and returns its exit code.

    Args:
      argv: the command line, the program's name first.
      joined: empty list to which the pod is appended once this process has joined it, so that `main` can tell the pod
        how this process ends, even after an error. The list stays empty in a job of a single process.
    """
    if {"--help", "--helpfull", "-h"} & set(argv):
        print(__doc__, flags.FLAGS.main_module_help(), sep="\n")
        return EXIT_DONE
    for name, _, prefix in (arg.removeprefix("--").partition("=") for arg in _joined(argv[1:])):
        if name == _HELP_CONFIG:
            from podrl.job.keys import help_text  # imports jax, but starts no device

            print(help_text(prefix))
            return EXIT_DONE
    name, rest = take_config(argv)
    _check_numbers(rest)
    if code := _early(rest, "code", "", prefix="--"):
        joins = bool(_early(rest, "join", "", prefix="--"))
        bundle.enter(code, os.environ, workdir=None if joins else _early(rest, "workdir", "", prefix="--"))
    path = find_config(name)
    config = load_config(path)
    processes = _early(rest, "local_processes", 0, prefix="--")
    leader = _early(rest, "join", "", prefix="--")
    dry, hosts, share = _switched_on(rest, "dry_run"), None, 0
    if processes > 1 and not leader and "PODRL_PLATFORM" not in os.environ:
        if not dry:
            return _start_pod(rest, path, config, processes)
        local_pod.check_memory(processes)
        share, hosts = _share_of_devices(rest, config, processes), _hosts_of_pod(rest, config, processes)
    elif processes == 1 and _splits(rest) and not leader and "PODRL_CHANNEL" not in os.environ:
        raise ValueError(
            "--local_processes=1 with --topology=split leaves no process that generates: start at least 2 processes."
        )
    cluster = _find_cluster(rest, joins=bool(leader), planned=hosts is not None)
    devices = _early(rest, "fake_devices", config.get("fake_devices", 0))
    if leader and processes > 1:
        devices = _share_of_devices(rest, config, processes)
    environment.prepare(os.environ, fake_devices=_early(rest, "fake_devices", devices, prefix="--"))
    environment.enable_compile_cache(os.environ, _early(rest, "compile_cache", config.get("compile_cache", "auto")))
    if cluster.topology == "pathways":
        joining.start_pathways(cluster.coordinator)
    elif cluster.process_count > 1 or cluster.topology == "split":
        wait_s = _early(rest, "join_s", joining.JOIN_S, prefix="--")
        silence_s = _early(rest, "heartbeat_s", joining.HEARTBEAT_S, prefix="--")
        if leader:
            seat = joining.late_seat(leader, os.environ, wait_s, cluster)
        else:
            seat = joining.take_seat(cluster, joining.hosts_of(cluster, *_hosts(rest, config)), os.environ)
        joined.append(joining.join(cluster, seat, deadline_s=wait_s, heartbeat_s=silence_s))
        signals.leave_on_signals(unwind=True)  # again, because jax.distributed installs a handler of its own
    elif not dry:
        joining.hosts_of(cluster, *_hosts(rest, config))  # refuses lists of hosts in a job of one host
    silent = dry or not all(pod.leads for pod in joined)
    with announce_if_long("Loading modules", (lambda line: None) if silent else functools.partial(print, flush=True)):
        from podrl.job import job  # after the environment is prepared: this imports jax

    values, extra = resolve(config, rest)
    _refuse_arguments(extra)
    workdir = _WORKDIR.value or default_workdir(path)
    if not _DEBUG.value:  # these libraries log tracebacks of failures that podrl.runtime reports in one line
        for noisy in ("absl", "gcsfs", "google", "asyncio"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
    if _DRY_RUN.value:
        if _splits(rest) and hosts is None:
            print(
                "These are the roles of one process. --local_processes=N shows those of N hosts with --topology=split."
            )
        pod = job.PlannedPod(hosts, share, _splits(rest)) if hosts else None
        return job.dry_run(values, workdir, pod, all_settings=_ALL_SETTINGS.value)
    command = os.environ.get(_COMMAND) or _command_line(argv)
    pod = joined[0] if joined else None
    return job.run(values, workdir, command=command, pod=pod, profile=_PROFILE.value, code=_CODE.value)


def _unraisable(args: "sys.UnraisableHookArgs") -> None:
    """Hides unraisable errors that are reported elsewhere: abandoned Orbax reads, full disks, pending stop signals."""
    code = getattr(args.object, "cr_code", None)
    abandoned = "orbax" in getattr(code, "co_filename", "") or str(args.exc_value) == "Event loop is closed"
    full = isinstance(args.object, io.IOBase) and getattr(args.exc_value, "errno", None) == errno.ENOSPC
    stopped = isinstance(args.exc_value, signals.StoppedError)
    if not (abandoned or full or stopped) or "--debug" in sys.argv:
        sys.__unraisablehook__(args)


def _report(error: BaseException, joined: Sequence[Pod]) -> tuple[int, str]:
    """Prints why this process ends, in full if no other process of the job failed first: (exit code, the reason)."""
    if isinstance(error, signals.StoppedError):
        print(f"podrl: {error}", file=sys.stderr)
        return signals.exit_code(error.number), str(error)
    if isinstance(error, KeyboardInterrupt):
        print("\n".join(("podrl: interrupted.", *_how_to_resume(error))), file=sys.stderr)
        return 130, "interrupted"
    if isinstance(error, ChannelError | StorageError | ServiceError):
        print("\n".join((f"podrl: error: {as_sentence(str(error))}", *_how_to_resume(error))), file=sys.stderr)
        return EXIT_INFRASTRUCTURE, str(error)
    runtimes = _STATUS.match(str(error)) is not None and isinstance(error, RuntimeError | ValueError)
    # The error may come from a collective that lost a process. If another process reports why, await_end ends this
    # process and does not return.
    for pod in joined if runtimes else ():
        pod.await_end(_PEER_LOSS_S)
    users = isinstance(error, ValueError | OSError | ImportError) and not runtimes
    # An ImportError of Python itself names a module and is a bug. podrl's own say which extra to install and name none.
    bug = not users or (isinstance(error, ImportError) and error.name is not None)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = disk_trouble(error) or f"{error}{notes}" if users else f"{type(error).__name__}: {error}"
    lost = joined and runtimes and _LOST.search(str(error))  # a lost rollout host may be replaced, and the job goes on
    first = not lost and all([pod.first_to_fail() for pod in joined])
    if (first and bug) or ((first or lost) and "--debug" in sys.argv):
        traceback.print_exception(error)
    if users or not first:
        print("podrl: error:", as_sentence(text if first else text.partition("\n")[0]), file=sys.stderr)
    if lost and _how_to_resume(error):
        print(*_how_to_resume(error), file=sys.stderr)
    return EXIT_INFRASTRUCTURE if lost else EXIT_USER, text


def _how_to_resume(error: BaseException) -> list[str]:
    """Lists the notes that podrl.job.job added to the error of a run that can be resumed."""
    return [f"podrl: {note}" for note in getattr(error, "__notes__", ())]


class _LogFormat(logging.Formatter):
    """Writes "Warning: text", as the report of a run does; a line of another package names its logger."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a name of the standard library
        ours = record.name.split(".")[0] == "podrl"
        return f"{record.levelname.capitalize()}{'' if ours else f' of {record.name}'}: {record.message}"


def start_log() -> None:
    """Writes the log to standard error from now on: warnings and errors, one line each and then the traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormat())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def main() -> None:
    """Runs the command and exits hard with its code, so that no background thread can hold the process."""
    signals.leave_on_signals(unwind=True)
    stacks_on_signal()  # before the first wait for other processes
    start_log()
    sys.unraisablehook = _unraisable
    code, text = EXIT_USER, ""
    joined: list[Pod] = []
    try:
        code = _run(sys.argv, joined)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_USER
    except BaseException as error:  # noqa: BLE001 - no caller handles it: report once and exit
        code, text = _report(error, joined)
    for pod in joined:
        pod.leave(code) if code in (EXIT_DONE, EXIT_PREEMPTED) and not text else pod.fail(code, text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
