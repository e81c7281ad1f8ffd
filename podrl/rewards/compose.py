"""Several reward functions as one: how each is reached, what they add up to, and what is said of one that fails."""

import dataclasses
import difflib
import functools
import inspect
import json
import logging
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float

from podrl.rewards import formats, judge, math_answer, reference, worker
from podrl.rewards.judge import JudgeConfig
from podrl.rewards.pool import DiedError, LateError, Pool

RewardFn = Callable[..., Sequence[float]]
_log = logging.getLogger(__name__)
_HEAD = 160


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Which rewards, and how they are run.

    Attributes:
      fns: each a built-in name, 'path/to/file.py:function', 'package.module:function', or a Python function
        `(prompts, completions, **fields) -> list[float]`. A name followed by '@' and the name of a data set is for
        that data set's records only; samples of others get 0 from it.
      weights: one per function, in the same order; empty for 1 each.
      deadline_s: seconds a function may take for one batch.
      workers: processes the functions run in.
      dataset_field: the record's field with the name of its data set.
      model: directory of a reward model (sequence classification with one label) whose score is added; '' for none.
      model_weight: what its score is multiplied by.
      judge: settings of the built-in function 'judge'.
    """

    fns: tuple[str | Callable[..., Any], ...] = tuple(reference.BUILT_IN)
    weights: tuple[float, ...] = ()
    deadline_s: float = 30.0
    workers: int = 2
    dataset_field: str = "dataset"
    model: str = ""
    model_weight: float = 1.0
    judge: JudgeConfig = JudgeConfig()

    def __post_init__(self) -> None:
        if not self.fns and not self.model:
            raise ValueError("reward.fns is empty: name at least one reward function, or a reward.model.")
        if self.weights and len(self.weights) != len(self.fns):
            raise ValueError(
                f"reward.weights has {len(self.weights)} values for {len(self.fns)} functions in reward.fns: give one "
                "each, or none for 1 each."
            )
        if not np.isfinite([*self.weights, self.model_weight]).all():
            raise ValueError(f"reward.weights={self.weights} and model_weight={self.model_weight} must be finite.")
        if not self.deadline_s > 0 or self.workers < 1:
            raise ValueError(
                f"reward.deadline_s={self.deadline_s} must be positive and reward.workers={self.workers} at least 1."
            )


class RewardError(ValueError):
    """A reward function failed; the message names it, the sample, and the key to turn."""


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function to score with: in the workers when `spec` says how they find it, else in a thread of this process.

    `dataset` is the data set it is for; '' for all.
    """

    name: str
    spec: Mapping[str, str] | None
    here: Callable[..., Any] | None
    dataset: str = ""


@dataclasses.dataclass(frozen=True)
class _Batch:
    prompts: Sequence[str]
    completions: Sequence[str]
    fields: Mapping[str, Sequence[Any]]

    def one(self, index: int) -> "_Batch":
        return self.of([index])

    def of(self, rows: Sequence[int]) -> "_Batch":
        return _Batch(
            [self.prompts[b] for b in rows],
            [self.completions[b] for b in rows],
            {name: [values[b] for b in rows] for name, values in self.fields.items()},
        )

    @functools.cached_property
    def body(self) -> bytes:
        content = {
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "fields": {name: list(values) for name, values in self.fields.items()},
        }
        try:
            return json.dumps(content, default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"The data's fields {', '.join(self.fields)} cannot be sent to reward workers: {error}. Fields must be "
                "text, numbers, or lists and mappings of them."
            ) from error

    def show(self, index: int) -> str:
        return (
            f"sample {index} of {len(self.completions)} (prompt {_head(self.prompts[index])}, "
            f"completion {_head(self.completions[index])})"
        )


class NamedRewards:
    """The names of a configuration's reward functions, where scoring happens elsewhere.

    Attributes:
      names: as those of `Rewards`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.names = _names(_functions(config), config)


class Rewards:
    """Scores completions with every function of a RewardConfig; use as a context manager, or call `close`.

    Attributes:
      names: one per function, for metrics and samples.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Finds the functions and starts the workers.

        Raises:
          ValueError: a function that cannot be found or loaded.
        """
        self._config = config
        self._functions = _functions(config)
        self.names = _names(self._functions, config)
        weights = list(config.weights or [1.0] * len(self._functions))
        self._weight_F = np.asarray(weights + [config.model_weight] * bool(config.model), np.float64)
        local = [function.name for function in self._functions if function.spec is None]
        if local:
            _log.warning(
                "Reward function %s cannot be found by file and name (a lambda, a closure, or typed at a prompt): it "
                "runs in a thread of this process, where a deadline can end the wait but not the function.",
                ", ".join(local),
            )
        specs = {function.name: function.spec for function in self._functions if function.spec is not None}
        self._pool = Pool(specs, min(config.workers, len(specs))) if specs else None
        self._threads = ThreadPoolExecutor(max(len(self._functions), 1), thread_name_prefix="podrl-reward")

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], fields: Mapping[str, Sequence[Any]]
    ) -> Float[np.ndarray, "F B"]:
        """Every function's reward of every completion, unweighted.

        Args:
          prompts: B prompts as text.
          completions: B completions.
          fields: task fields by name, B values each; reward functions receive them as keyword arguments.

        Raises:
          RewardError: a function raised, hung, died, or returned something else than B finite numbers.
        """
        lengths = {"prompts": len(prompts), **{name: len(values) for name, values in fields.items()}}
        for name, length in lengths.items():
            if length != len(completions):
                raise ValueError(f"{name} has {length} values for {len(completions)} completions: they must match.")
        if not completions:
            return np.zeros((len(self._functions), 0))
        batch = _Batch(prompts, completions, fields)
        jobs = [self._threads.submit(self._score, function, batch) for function in self._functions]
        rewards = [job.result() for job in jobs]
        return np.array(rewards, np.float64).reshape(len(rewards), len(completions))

    def combine(self, reward_FB: Float[np.ndarray, "F B"]) -> Float[np.ndarray, " B"]:
        """The weighted sum over functions, and over the reward model's row where there is one: the last."""
        return self._weight_F @ reward_FB

    def close(self) -> None:
        """Ends the workers."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def _score(self, function: _Function, batch: _Batch) -> list[float]:
        """A function's rewards of a batch; 0 for records of data sets it is not for."""
        if not function.dataset:
            return self._scored(function, batch)
        if self._config.dataset_field not in batch.fields:
            raise RewardError(
                f"Reward function {function.name} is for one data set, but the records have no field "
                f"{self._config.dataset_field!r} (reward.dataset_field): they have {', '.join(batch.fields) or 'none'}."
            )
        names = batch.fields[self._config.dataset_field]
        rows = [b for b, name in enumerate(names) if str(name) == function.dataset]
        rewards = [0.0] * len(batch.completions)
        for b, value in zip(rows, self._scored(function, batch.of(rows)) if rows else [], strict=True):
            rewards[b] = value
        return rewards

    def _scored(self, function: _Function, batch: _Batch) -> list[float]:
        try:
            reply = self._call(function, batch, self._config.deadline_s)
        except LateError as error:
            raise self._late(function, batch) from error
        except DiedError as error:
            raise self._failed(function, batch, str(error)) from error
        if "raised" in reply:
            raise self._failed(function, batch, f"it raised:\n{reply['raised']}")
        if "bad" in reply and "sample" in reply:
            raise RewardError(f"Reward function {function.name} {reply['bad']}, for {batch.show(reply['sample'])}.")
        if "bad" in reply:
            raise self._failed(function, batch, f"it {reply['bad']}.")
        return reply["values"]

    def _call(self, function: _Function, batch: _Batch, deadline_s: float) -> dict[str, Any]:
        if function.here is not None:
            return _in_thread(function.here, batch, deadline_s)
        assert self._pool is not None
        return self._pool.call(function.name, batch.body, deadline_s)

    def _late(self, function: _Function, batch: _Batch) -> RewardError:
        """Runs the samples one by one, for as long as the batch was given, to find one that hangs."""
        limit = self._config.deadline_s
        end, index, alone = time.monotonic() + limit, 0, 0.0
        while index < len(batch.completions) and end > time.monotonic():
            started = time.monotonic()
            try:
                self._call(function, batch.one(index), end - started)
            except (LateError, DiedError):
                alone = time.monotonic() - started
                break
            index += 1
        if alone >= limit / 2:
            which = f"It did not return within {alone:.1f} s for {batch.show(index)} alone."
        else:
            which = (
                f"One by one, {index} of the {len(batch.completions)} samples were scored in as long: it is slow, not "
                f"stuck, and was last given {batch.show(min(index, len(batch.completions) - 1))}."
            )
        return RewardError(
            f"Reward function {function.name} did not return within {limit} s for {len(batch.completions)} samples. "
            f"{which} Make it faster, or raise reward.deadline_s={limit}."
        )

    def _failed(self, function: _Function, batch: _Batch, what: str) -> RewardError:
        """Runs the samples one by one to name the first that fails alone, within one more deadline."""
        end = time.monotonic() + self._config.deadline_s
        where = f"a batch of {len(batch.completions)}; none of its samples fails alone"
        for index in range(len(batch.completions)):
            left = end - time.monotonic()
            if left <= 0:
                where = f"a batch of {len(batch.completions)}; the first {index} of its samples do not fail alone"
                break
            try:
                reply = self._call(function, batch.one(index), left)
            except (LateError, DiedError):
                reply = {}
            if "values" not in reply:
                where = batch.show(index)
                break
        else:
            where += f", as {batch.show(0)}"
        return RewardError(f"Reward function {function.name} failed for {where}: {what}")


def _in_thread(fn: Callable[..., Any], batch: _Batch, deadline_s: float) -> dict[str, Any]:
    """Calls in a daemon thread, so that one that never ends keeps neither the caller nor the exit waiting."""
    replies: list[dict[str, Any]] = []

    def run() -> None:
        fields = {name: list(values) for name, values in batch.fields.items()}
        replies.append(worker.call(fn, list(batch.prompts), list(batch.completions), fields))

    thread = threading.Thread(target=run, daemon=True, name="podrl-reward-function")
    thread.start()
    thread.join(deadline_s)
    if not replies:
        raise LateError("it did not answer in time.")
    return replies[0]


# Built-in functions: the module each is in.
_BUILT_IN = {name: reference.__name__ for name in reference.BUILT_IN} | {
    "r1_format": formats.__name__,
    "math_equal": math_answer.__name__,
    "judge": judge.__name__,
}
MODEL_NAME = "reward_model"


def _functions(config: RewardConfig) -> list[_Function]:
    return _unique([_resolve(fn, config) for fn in config.fns])


def _names(functions: Sequence[_Function], config: RewardConfig) -> tuple[str, ...]:
    """Names of the rows of a batch's rewards."""
    return tuple(function.name for function in functions) + (MODEL_NAME,) * bool(config.model)


def _resolve(fn: str | Callable[..., Any], config: RewardConfig) -> _Function:
    """How a function of the configuration is reached.

    Raises:
      ValueError: a name that is neither built in nor of a known form, or a file that does not exist.
    """
    if not isinstance(fn, str):
        if not callable(fn):
            raise ValueError(f"reward.fns holds {fn!r} ({type(fn).__name__}): give names or Python functions.")
        spec = _spec_of(fn)
        name = getattr(fn, "__name__", type(fn).__name__).strip("<>")
        return _Function(name, spec, None if spec else fn)
    head, at, dataset = fn.rpartition("@")
    if not at or "/" in dataset or ":" in dataset:  # a file's name may hold an '@'
        return _named(fn, config)
    if not head or not dataset:
        raise ValueError(f"reward.fns={fn!r} must be a function, '@' and the name of a data set.")
    found = _named(head, config)
    return dataclasses.replace(found, name=f"{found.name}@{dataset}", dataset=dataset)


def _named(fn: str, config: RewardConfig) -> _Function:
    if fn in _BUILT_IN:
        spec = {"module": _BUILT_IN[fn], "name": fn}
        if fn == "judge":
            if not config.judge.url:
                raise ValueError("reward.fns='judge' needs reward.judge.url, an OpenAI-compatible endpoint.")
            settings = json.dumps(dataclasses.asdict(config.judge))
            spec["settings"] = json.dumps({"judge_settings": settings})
        return _Function(fn, spec, None)
    place, colon, name = fn.rpartition(":")
    if not colon or not place or not name:
        close = difflib.get_close_matches(fn, _BUILT_IN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"built in are {', '.join(_BUILT_IN)}."
        raise ValueError(
            f"reward.fns={fn!r} is no built-in reward, nor 'file.py:function' or 'package.module:function': {hint}"
        )
    if not place.endswith(".py"):
        return _Function(name.rpartition(".")[2], {"module": place, "name": name}, None)
    path = pathlib.Path(place).expanduser()
    if not path.is_file():
        raise ValueError(f"reward.fns={fn!r}: the file {path.absolute()} does not exist.")
    return _Function(name.rpartition(".")[2], {"file": str(path.resolve()), "name": name}, None)


def _spec_of(fn: Callable[..., Any]) -> Mapping[str, str] | None:
    """Where a worker finds a Python function, None when it cannot: not reachable by module and name, or no file."""
    name, module = getattr(fn, "__qualname__", ""), sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not name or module is None or not file or not pathlib.Path(file).is_file():
        return None
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    if isinstance(found, staticmethod):
        found = found.__func__
    if found is not fn:
        return None
    if module.__name__ != "__main__":
        return {"module": module.__name__, "name": name}
    # A script: run by `python -m` it has a module name of its own, else it is found by its file.
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return {"module": spec.name, "name": name}
    return {"file": str(pathlib.Path(file).resolve()), "name": name}


def _unique(functions: Sequence[_Function]) -> list[_Function]:
    """Names made different by a number, so that each has a metric of its own."""
    seen: dict[str, int] = {}
    renamed = []
    for function in functions:
        seen[function.name] = count = seen.get(function.name, 0) + 1
        renamed.append(function if count == 1 else dataclasses.replace(function, name=f"{function.name}_{count}"))
    return renamed


def _plain(value: Any) -> Any:
    """numpy values as JSON's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {str(value)[:80]!r} is no JSON value")


def _head(text: str) -> str:
    return repr(text if len(text) <= _HEAD else f"{text[:_HEAD]}...")
