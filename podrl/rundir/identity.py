"""A run directory's config.json: the settings that a run started with, and which of them may change when it resumes."""

import json
import logging
import pathlib
from collections.abc import Iterator, Mapping

from podrl.mappings import ConfigValues
from podrl.rundir.metrics import read_metrics
from podrl.storage.record import CheckpointRecord
from podrl.storage.seal import is_sealed, seal, unseal
from podrl.storage.storage import Place, complete_steps, first_line, locate, write_whole

NAME = "config.json"
DEFAULTS = "defaults.json"  # file with the defaults of the job's settings
# Settings that may change, because no step depends on them: where and when something is written or measured, how many
# processes share the work, when a run warns or ends, and deadlines.
_FREE = ("log.", "checkpoint.", "eval.", "compile_cache", "data.cache", "trainer.eval_every_n_steps")
_FREE += (
    "reward.workers",
    "reward.judge.concurrency",
    "reward.code.at_once",
    "env.workers",
    "env.processes",
)
_FREE += ("roles.eval.hosts", "grpo.mismatch_", "ppo.mismatch_", "env.failed_share", "rollout.return_logprobs")
# Limits at which a sample gets another reward, or is left out of the loss. They may change, because a run may resume on
# a slower machine, or end at a limit with the advice to change it. The user is told that rewards may change.
_LIMITS = ("reward.limits.", "reward.deadline_s", "env.deadline_s", "env.call_deadline_s", "env.blocked_s")
_LIMITS += tuple(f"reward.code.{name}" for name in ("memory_mb", "cpu_s", "wall_s", "threads", "file_mb", "disk_mb"))
# Values of trainer.offload, in sets: the values of a set place the optimizer's state alike, and so give the same bits.
_SAME_BITS = ({"none", "reference", "base"}, {"optimizer", "all"})
_DEADLINE = "_s"  # ending of keys whose value is in seconds
_ABSENT = "(absent)"
_log = logging.getLogger("podrl.rundir")


def read(workdir: Place, checkpoints: Place) -> ConfigValues | None:
    """Reads the configuration of a run directory from config.json or, if that is damaged or missing, from a checkpoint.

    Args:
      workdir: directory of config.json.
      checkpoints: directory of the run's checkpoints.

    Returns:
      The configuration; None if the directory holds neither config.json nor a checkpoint with a copy.

    Raises:
      ValueError: config.json is damaged and no checkpoint holds a copy.
    """
    path = workdir / NAME
    problem = "is gone"
    if path.exists():
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError(f"it holds a value of type {type(values).__name__}, not an object")
            if is_sealed(values):
                return unseal(values)
            problem = "carries no checksum"
        except (ValueError, RecursionError) as error:
            values, problem = None, f"is damaged ({first_line(error)})"
    else:
        values = None
    for step in reversed(complete_steps(checkpoints)):
        try:
            copy = CheckpointRecord.read(checkpoints / str(step)).config
        except (ValueError, OSError):
            continue
        if copy is not None:
            _log.warning("%s %s: its copy in the checkpoint of step %d is used.", path, problem, step)
            return copy
    if values is None and path.exists():
        raise ValueError(
            f"{path} {problem} and no checkpoint holds a copy, so podrl cannot know whether the run in this directory "
            "is the same: restore the file, remove it if you are sure, or give another --workdir."
        )
    return values


def write(workdir: pathlib.Path, config: ConfigValues, defaults: ConfigValues | None = None) -> None:
    """Writes config.json with a checksum of its content, and defaults.json if there are defaults."""
    write_whole(workdir / NAME, json.dumps(seal(config), indent=2, sort_keys=True) + "\n")
    if defaults:
        write_whole(workdir / DEFAULTS, json.dumps(defaults, indent=2, sort_keys=True) + "\n")


def plain(config: ConfigValues) -> ConfigValues:
    """Converts a configuration to JSON values; a function becomes its name, which is equal in every process."""

    def name(value: object) -> str:
        called = getattr(value, "__qualname__", None)
        return str(value) if called is None else f"{getattr(value, '__module__', '')}.{called}"

    return json.loads(json.dumps(config, default=name))


def compare(place: str, workdir: pathlib.Path, mine: ConfigValues, defaults: ConfigValues) -> list[str]:
    """Compares a configuration with the configuration of the run in a directory.

    Args:
      place: the run directory as the user named it, which holds the checkpoints.
      workdir: the directory on this machine's disk that holds the run's files.
      mine: configuration that would continue the run, as `plain` returns it.
      defaults: defaults of the keys of `mine`, as far as known.

    Returns:
      Sentences for the user: the changes that are allowed, and the keys that the run did not have. Empty if there are
      none, or if the directory holds no steps.

    Raises:
      ValueError: the directory belongs to a run of another configuration (the error names the keys that differ), or
        its config.json is damaged and no checkpoint holds a copy.
    """
    checkpoints = locate(place) / "checkpoints"
    if not has_steps(workdir, checkpoints):
        return []
    theirs = read(workdir, checkpoints) or mine  # a run without a recorded configuration takes any configuration
    allowed, refused = changes(theirs, mine, defaults)
    if refused:
        raise ValueError(
            f"{place} holds a run of another configuration: " + "; ".join(refused[:8]) + ". "
            "Give the same configuration to resume it, or another --workdir to start a new run."
        )
    changed = [f"Changed since this run was last started: {'; '.join(allowed)}."] if allowed else []
    if new := list(unknown(theirs, mine)):
        changed.append(
            "Keys that are new since this run was last started; its steps so far count as made with their defaults: "
            f"{', '.join(new)}."
        )
    return changed


def has_steps(workdir: Place, checkpoints: Place) -> bool:
    """Returns True if the run in a directory has made a step: from then on its settings must be kept."""
    return bool(complete_steps(checkpoints)) or any("time/step" in record for record in read_metrics(workdir))


def changes(theirs: ConfigValues, mine: ConfigValues, defaults: ConfigValues) -> tuple[list[str], ...]:
    """Describes the settings that differ between a run and the configuration that would resume it.

    Args:
      theirs: configuration of the run in the directory. A key that `theirs` lacks had its default; a section that
        `mine` lacks was for another algorithm and is ignored.
      mine: configuration that would continue the run.
      defaults: defaults of the keys of `mine`, as far as known.

    Returns:
      (changes that are allowed, changes that are refused because they affect the steps made so far), each 'KEY was
      VALUE, now VALUE'.
    """
    allowed: list[str] = []
    refused: list[str] = []
    theirs = _in_sequences(_in_prompts(theirs))
    settings = {key: value for key, value in theirs.items() if key in mine or not isinstance(value, Mapping)}
    for key, was, now in differences(settings, mine, defaults):
        free = key.startswith(_FREE + _LIMITS) or key.endswith(_DEADLINE)
        note = " (samples that meet this limit may get other rewards than before)" if key.startswith(_LIMITS) else ""
        if key == "trainer.max_steps":
            spans = [name for values in (theirs, mine) if (name := _spanned(values))]
            free, note = not spans, f" ({spans[0]} spans all steps)" if spans else ""
        if key == "reward.named":
            note = (
                " (functions that data.sources, eval.sets or records name: each of them, also a function that only "
                "eval.sets names, adds a term to the sum of rewards and a row to checkpoints)"
            )
        if key == "trainer.offload":
            free = any({was, now} <= values for values in _SAME_BITS)
        (allowed if free else refused).append(f"{key} was {was!r}, now {now!r}{note}")
    return allowed, refused


def last_step(values: ConfigValues) -> int | None:
    """Returns the last step of a run according to its config.json; None if config.json does not say.

    trainer.max_steps counts updates; a step makes passes x mini-batches updates.
    """

    def number(section: str, key: str) -> int:
        group = values.get(section)
        found = group.get(key) if isinstance(group, Mapping) else None
        return found if type(found) is int and found > 0 else 0

    passes = number("grpo", "num_iterations") or number("ppo", "num_iterations") or 1
    prompts, mini = number("rollout", "prompts_per_step"), number("trainer", "mini_batch_size")
    updates = passes * (prompts // mini if 0 < mini <= prompts else 1)
    return -(-number("trainer", "max_steps") // updates) or None


def unknown(theirs: ConfigValues, mine: ConfigValues, prefix: str = "") -> Iterator[str]:
    """Yields the keys of `mine` that `theirs` lacks; a missing group counts as one key."""
    for key, value in sorted(mine.items()):
        if key not in theirs:
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping) and isinstance(theirs[key], Mapping):
            yield from unknown(theirs[key], value, f"{prefix}{key}.")


def _in_prompts(values: ConfigValues) -> ConfigValues:
    """Converts trainer.mini_batch_size of an older podrl, which counted sequences, to prompts."""
    sections = [values[name] for name in ("grpo", "ppo") if isinstance(values.get(name), Mapping)]
    trainer = values.get("trainer", {})
    size = trainer.get("mini_batch_size") if isinstance(trainer, Mapping) else None
    # A configuration with the key policy_loss_args already counts in prompts.
    if not size or not sections or "policy_loss_args" in sections[0]:
        return values
    prompts, rest = divmod(size, sections[0].get("num_generations", 1))
    return {**values, "trainer": {**trainer, "mini_batch_size": f"{size} sequences" if rest else prompts}}


def _in_sequences(values: ConfigValues) -> ConfigValues:
    """Renames trainer.train_micro_batch_size of an older podrl, which counted sequences, to micro_batch_sequences."""
    trainer = values.get("trainer", {})
    if (
        not isinstance(trainer, Mapping)
        or "train_micro_batch_size" not in trainer
        or "micro_batch_sequences" in trainer
    ):
        return values
    size = trainer["train_micro_batch_size"]
    return {**values, "trainer": {**trainer, "train_micro_batch_size": None, "micro_batch_sequences": size}}


def _spanned(values: ConfigValues) -> str:
    """Returns the setting that makes every step depend on the total number of steps, as KEY=VALUE; '' for none."""
    trainer = values.get("trainer", {})
    if trainer.get("schedule", "constant") != "constant":
        return f"trainer.schedule={trainer['schedule']!r}"
    return f"trainer.warmup_fraction={trainer['warmup_fraction']}" if trainer.get("warmup_fraction") else ""


def differences(
    theirs: object, mine: object, defaults: object, prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yields (key, value in `theirs`, value in `mine`) of every setting that differs."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping | None):
        theirs, defaults = theirs or {}, defaults if isinstance(defaults, Mapping) else {}
        for key in sorted({*theirs, *mine}):
            their_value = (
                theirs[key] if key in theirs else defaults.get(key, None if isinstance(mine[key], Mapping) else _ABSENT)
            )
            yield from differences(their_value, mine.get(key, _ABSENT), defaults.get(key), f"{prefix}{key}.")
    elif theirs != mine:
        yield prefix.removesuffix("."), theirs, mine
