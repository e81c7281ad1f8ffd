"""Replaces keys of the configuration in messages by the Python arguments that set them, for users of learners."""

import contextlib
import fnmatch
import functools
import importlib
import inspect
import logging
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping

Call = typing.TypeVar("Call", bound=Callable[..., object])

# The class that holds a group's keys in Python, by the group.
_CLASSES = {
    "rollout": "RolloutConfig",
    "trainer": "RLTrainingConfig",
    "grpo": "GRPOConfig",
    "ppo": "PPOConfig",
    "model.lora": "LoraConfig",
    "reward": "RewardConfig",
    "env": "EnvironmentConfig",
    "checkpoint": "CheckpointConfig",
}
# The function and its argument that takes the value of a key; '' stands for the learner and its method `train`.
_ARGUMENTS = {
    "model.path": ("RLCluster", "actor"),
    "model.reference": ("RLCluster", "reference"),
    "model.critic": ("RLCluster", "critic"),
    "model.teachers": ("RLCluster", "teachers"),
    "model.lora": ("RLCluster", "lora"),
    "reward.model": ("RLCluster", "reward"),
    "tokenizer": ("RLCluster", "tokenizer"),
    "seed": ("RLCluster", "seed"),
    "rollout.prompts_per_step": ("train", "prompts_per_step"),
    "reward.fns": ("", "reward_fns"),
    "data.path": ("", "train_ds"),
    "data.seed": ("", "data_shuffle_seed"),
    "workdir": ("RLTrainingConfig", "checkpoint_root_directory"),
}
_ROLES = {"trainer": "ACTOR"} | {role: role.upper() for role in ("rollout", "critic", "reward", "teacher")}
# What a user of a learner does in place of setting a key that learners lack, by shell-style patterns of keys.
_WAYS = {
    "data.long_prompts": "leave the records with longer prompts out of the list",
    "data.question_field": "the field of the question is 'question', 'prompt' or 'messages'",
    "data.answer_field": "the field of the answer is 'answer'",
    "data.system_prompt": "write the instructions into the records",
    "data.sources": "GRPOConfig.sources has the settings of sources",
    "data.*": "prepare the records before you pass them to train",
    "eval.*": "pass records to evaluate on as the second argument of train",
    "log.*": "pass train(records, run=Run(DIR, log=LogConfig(...))), with Run of podrl.rundir.run and LogConfig of "
    "podrl.rundir.metrics",
    "roles.*": "ClusterConfig.role_to_mesh places the models",
    "model.*": "pass the model as RLCluster(actor=...)",
    "scratch.*": "pass the model as RLCluster(actor=...)",
    "algorithm": "choose GRPOLearner with GRPOConfig, or PPOLearner with PPOConfig",
    "fake_devices": "set XLA_FLAGS=--xla_force_host_platform_device_count=N before jax is imported",
    "compile_cache": "set JAX_COMPILATION_CACHE_DIR=DIR before jax is imported",
}
# Keys that only jobs have, by their group. Other words that begin like a group are no keys: files, tensors, methods.
_OF_JOBS = {"model": {"size"}, "roles": {*_ROLES, "eval", "colocated"}}
# Matches keys, and also podrl's commands, addresses and quoted texts, which `in_python` leaves unchanged. A key stands
# alone or behind '--config.' or 'config.'; a simple value, such as a number, a quoted text or a path, may follow it.
_KEY = re.compile(
    r"python -m podrl\.\w+(?: --?\S+| [A-Z]\S*)*|\w+://\S+|(?<!\w)'[^'\n]*'|\"[^\"\n]*\""
    r"|(?<![\w./'\"-])(?P<flag>--config\.|--(?=workdir\b)|config\.)?(?P<key>[a-z_]+(?:\.[a-z]\w*)*)"
    r"(?P<value>='[^']*'|=\.{0,2}[\w+/~@%=-]+(?:[.:]+[\w+/~@%=-]+)*)?"
)
fields: dict[str, set[str]] = {}  # names of the keys of each group; `podrl.config.section` fills it
_PASSED = ("podrl.python_names", "podrl.config", "dataclasses", "copy")  # modules whose frames do not count as callers
_speaking = 0  # number of calls from outside that are in progress, see `speaks_python`


def in_python(text: str, own: Mapping[str, str] = {}) -> str:
    """Replaces the keys in `text` by their Python names; for a key without one, a sentence at the end says what to do.

    Args:
      text: a message that names keys of the configuration, such as 'rollout.lanes=3 must be ...'.
      own: names of further classes, by their group.
    """
    classes, ways = {**own, **_CLASSES, **own}, dict[str, str]()  # the groups of `own` come first

    def said(found: re.Match[str]) -> str:
        key = found["key"]
        if key is None or not ("." in key or found["flag"] or (key == "algorithm" and found["value"])):
            return found[0]
        value, (group, _, name) = found["value"] or "", key.partition(".")
        for of_class in classes if key not in _ARGUMENTS else own if value else ():
            rest = key.removeprefix(f"{of_class}.")
            if rest != key and rest.partition(".")[0] in _all_fields().get(of_class, ()):
                return f"{classes[of_class]}.{rest}{value}"
        if key in _ARGUMENTS:
            function, argument = _ARGUMENTS[key]
            return f"{function}({argument}{value or '=...'})" if function else f"{argument}{value}"
        if key in classes:
            return classes[key]
        if group == "roles" and name.removesuffix(".mesh") in _ROLES:
            return f"ClusterConfig.role_to_mesh[Role.{_ROLES[name.removesuffix('.mesh')]}]{value}"
        way = next((way for pattern, way in _WAYS.items() if fnmatch.fnmatchcase(key, pattern)), "")
        if not way or (
            name and name.partition(".")[0] not in {*_all_fields().get(group, ()), *_OF_JOBS.get(group, ())}
        ):
            return found[0]
        ways[key] = way
        return key + value

    text = _KEY.sub(said, text)
    if "podrl.run" in text or not ways:  # the text says already what to do, or this function has reworded it before
        return text
    more = " ".join(f"{key} is a key of podrl.run; with a learner, {way}." for key, way in ways.items())
    return f"{text} {more}" if text.endswith((".", "?")) else f"{text}. {more}".removesuffix(".")


@functools.cache
def _all_fields() -> dict[str, set[str]]:
    """Returns `fields` after it has imported all settings, of which a script or podrl.doctor may have imported few."""
    importlib.import_module("podrl.learner.learner")  # by name, because this module is below all others
    return fields


def from_outside() -> bool:
    """Returns True if code outside podrl has called the function that calls this function.

    Returns False inside `podrl.config.build`, whoever calls it: errors about a mapping name the mapping's keys.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in _PASSED:
        if frame.f_code.co_name == "build":
            return False
        frame = frame.f_back
    return frame is None or not _is_own(frame)


def _is_own(frame: types.FrameType) -> bool:
    """Returns True for code of podrl, also of a command, whose module has the name __main__."""
    spec = frame.f_globals.get("__spec__")
    return str(getattr(spec, "name", frame.f_globals.get("__name__"))).startswith("podrl.")


def reword(error: Exception, own: Mapping[str, str] = {}) -> None:
    """Puts Python names into the message of an error; `own` is as for `in_python`."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (in_python(error.args[0], own),)


def line(text: str) -> str:
    """Returns a line for the console; its keys become Python names while a call of `speaks_python` is in progress."""
    return in_python(text) if _speaking else text


def speaks_python(call: Call) -> Call:
    """Decorates a function of the Python interface: to a caller outside podrl, its errors and lines say Python names.

    While such a call is in progress, so do the consoles of all runs of this process, and podrl's loggers.
    """

    @functools.wraps(call)
    def speaking(*args: object, **kwargs: object) -> object:
        if not from_outside():
            return call(*args, **kwargs)
        with _python_names():
            return call(*args, **kwargs)

    return typing.cast(Call, speaking)


@contextlib.contextmanager
def _python_names() -> Iterator[None]:
    global _speaking
    for logger in _loggers():
        logger.addFilter(_reword_record)  # does not add the same filter twice
    _speaking += 1
    try:
        yield
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if _is_own(frame):  # errors that a user's function raises keep their text
            reword(error)
        raise
    finally:
        _speaking -= 1
        for logger in () if _speaking else _loggers():  # an inner call may have added the filter to newer loggers
            logger.removeFilter(_reword_record)


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("podrl")]


def _reword_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = in_python(record.getMessage()), ()
    return True
