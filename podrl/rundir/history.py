"""The part of a run's past that its checks may read: configuration, first and last steps, evaluations, samples."""

import collections
import math
from collections.abc import Sequence
from typing import Any

from podrl.mappings import ConfigValues, LogRecord

KINDS = ("trace", "step", "sample", "evaluation")  # kinds of records, in the order in which a step writes the records


def kind_of(record: LogRecord) -> str:
    """Returns the kind, one of KINDS, of a record of metrics.jsonl or samples.jsonl or of a step's trace."""
    if "trace" in record:
        return "trace"
    if "prompt" in record or "text" in record:
        return "sample"
    return "evaluation" if "time/step" not in record and any(name.startswith("eval/") for name in record) else "step"


WINDOW = 5  # number of steps over which a mean is taken


class Past:
    """The facts that a check may use besides the record that it looks at.

    Attributes:
      config: the run's configuration, as in config.json.
      first: records of the first WINDOW steps.
      last: records of the 20 steps before the present step, oldest first.
      evaluations: records of the first evaluation and the last two.
      samples: the last 16 recorded training samples.
      repeating: whether each of the last 8 recorded training samples repeats itself; the check of repetition fills this
        list.
      steps: number of steps seen before the present step.
    """

    def __init__(self, config: ConfigValues):
        self.config = config
        self.first: list[LogRecord] = []
        self.last: collections.deque[LogRecord] = collections.deque(maxlen=20)
        self.evaluations: list[LogRecord] = []
        self.samples: collections.deque[LogRecord] = collections.deque(maxlen=16)
        self.repeating: collections.deque[bool] = collections.deque(maxlen=8)
        self.steps = 0

    def add(self, kind: str, record: LogRecord) -> None:
        """Keeps a record of a kind, after all checks have looked at it."""
        if kind == "evaluation":
            self.evaluations = [*self.evaluations[:1], *self.evaluations[-1:], record][-3:]
        elif kind == "sample" and "evaluation" not in record:
            self.samples.append(record)
        elif kind == "step":
            self.steps += 1
            self.last.append(record)
            if len(self.first) < WINDOW:
                self.first.append(record)

    def setting(self, key: str, default: Any) -> Any:
        """Returns a value of the configuration, or `default` if it is absent or None.

        Key 'algo.NAME' is NAME in the section `section`.
        """
        group, _, name = key.partition(".")
        section = self.config.get(self.section if group == "algo" else group) or {}
        value = section.get(name)
        return default if value is None else value

    @property
    def section(self) -> str:
        """Returns the section that 'algo.NAME' stands for: 'ppo' for PPO, and 'grpo' for every other algorithm."""
        return "ppo" if self.config.get("algorithm") == "ppo" or "ppo" in self.config else "grpo"

    @property
    def on_policy(self) -> bool:
        """Returns True if every batch is sampled by exactly the weights that it updates, and makes only one update."""
        splits = self.setting("trainer.mini_batch_size", None) is not None
        return not self.setting("algo.max_staleness", 0) and self.setting("algo.num_iterations", 1) == 1 and not splits

    @property
    def exact(self) -> bool:
        """Returns True if trainer and sampler both compute in float32, without quantised base weights."""
        trainer = self.setting("trainer.dtype", "float32")
        quantised = (self.setting("model.lora", {}) or {}).get("base_dtype")
        return trainer == self.setting("rollout.data_type", trainer) == "float32" and not quantised

    def recent(self, now: LogRecord, name: str, count: int = WINDOW) -> list[float]:
        """Returns the last `count` values of a metric, oldest first; the last value is the value of this step.

        Returns [] if there are fewer steps, or if the metric is missing or not finite in one of them.
        """
        records = [*self.last, now][-count:]
        values = [number(record, name) for record in records]
        return [] if len(values) < count or None in values else [value for value in values if value is not None]

    def at_first(self, name: str) -> float | None:
        """Returns the mean of a metric over the first WINDOW steps; None if one of them lacks it."""
        values = [number(record, name) for record in self.first]
        found = [value for value in values if value is not None]
        return sum(found) / len(found) if len(found) == len(values) == WINDOW else None


def number(record: LogRecord, name: str) -> float | None:
    """Returns the value of a record under a name; None if it is absent, not a number or not finite."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def average(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return sum(values) / len(values)
