"""The part of a run's past that checks of its records may read: configuration, first and last steps, evaluations."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
KINDS = ("trace", "step", "sample", "evaluation")  # in the order in which they come to be


def kind_of(record: Record) -> str:
    """The kind of a record of metrics.jsonl or samples.jsonl, or of a step's trace: one of KINDS."""
    if "trace" in record:
        return "trace"
    if "prompt" in record or "text" in record:
        return "sample"
    return "evaluation" if "time/step" not in record and any(name.startswith("eval/") for name in record) else "step"


WINDOW = 5  # steps that a mean is taken over


class Past:
    """Facts that checks may know besides the record they look at.

    Attributes:
      config: the run's configuration, as in config.json.
      first: the first steps.
      last: the last steps before this one, oldest first.
      evaluations: the first evaluation and the last two.
      samples: the last recorded training samples.
      repeating: for each of the last recorded training samples, whether it repeats itself.
      steps: records of steps seen before this one.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.first: list[Record] = []
        self.last: collections.deque[Record] = collections.deque(maxlen=20)
        self.evaluations: list[Record] = []
        self.samples: collections.deque[Record] = collections.deque(maxlen=16)
        self.repeating: collections.deque[bool] = collections.deque(maxlen=8)
        self.steps = 0

    def add(self, kind: str, record: Record) -> None:
        """Keeps a record, after it has been looked at."""
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
        """A value of the configuration; `algo.NAME` is a key of the algorithm's own section."""
        group, _, name = key.partition(".")
        section = self.config.get(self.section if group == "algo" else group) or {}
        value = section.get(name)
        return default if value is None else value

    @property
    def section(self) -> str:
        """The configuration's section of the algorithm."""
        return "ppo" if self.config.get("algorithm") == "ppo" or "ppo" in self.config else "grpo"

    @property
    def on_policy(self) -> bool:
        """True where every batch is sampled by the weights that it trains, and makes one update."""
        splits = self.setting("trainer.mini_batch_size", None) is not None
        return not self.setting("algo.max_staleness", 0) and self.setting("algo.num_iterations", 1) == 1 and not splits

    @property
    def exact(self) -> bool:
        """True where trainer and sampler both compute in float32."""
        trainer = self.setting("trainer.dtype", "float32")
        quantised = (self.setting("model.lora", {}) or {}).get("base_dtype")
        return trainer == self.setting("rollout.data_type", trainer) == "float32" and not quantised

    def recent(self, now: Record, name: str, count: int = WINDOW) -> list[float]:
        """Values of a metric in this step and those before it, at most `count`; [] where one of them lacks it."""
        records = [*self.last, now][-count:]
        values = [number(record, name) for record in records]
        return [] if len(values) < count or None in values else [value for value in values if value is not None]

    def at_first(self, name: str) -> float | None:
        """Mean of a metric over the first steps; None where one of them lacks it."""
        values = [number(record, name) for record in self.first]
        found = [value for value in values if value is not None]
        return sum(found) / len(found) if len(found) == len(values) == WINDOW else None


def number(record: Record, name: str) -> float | None:
    """A finite value of a record, or None."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def average(values: Sequence[float]) -> float:
    """Mean of at least one value."""
    return sum(values) / len(values)
