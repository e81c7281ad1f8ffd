"""Reads problems of the package reasoning-gym (extra [reasoning]), which a separate process generates.

`data.path=reasoning_gym:NAME` names one of its datasets. The package takes seconds to import, so no process that
trains or samples imports it: the process podrl.data.reasoning_worker imports it, and sends records.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator, Sequence

from podrl.data import reasoning_worker
from podrl.data.problem_generator import Split
from podrl.data.sources import Records
from podrl.mappings import JsonObject, Record
from podrl.workers.process import DiedError, Functions, LateWorkerError
from podrl.workers.user_code import Limits

_log = logging.getLogger(__name__)
PREFIX = "reasoning_gym:"
# Seconds for a request; a few datasets generate all their problems before they return the first one.
_DEADLINE_S = 120.0
_AT_ONCE = 64  # largest number of records that one request asks for
# An evaluation of N different questions searches at most this many times N problems. If these problems have fewer than
# N different questions, the dataset counts as too small.
_LOOKED_AT = 20


@functools.cache
def _process() -> Functions:
    spec = {"module": reasoning_worker.__name__, "name": reasoning_worker.records.__name__}
    return Functions(
        reasoning_worker.__name__, Limits(), {"records": spec}, size=1, label="The worker of reasoning-gym: {}".format
    )


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
    """A dataset of reasoning-gym: its training problems and its held-out problems, which share no question.

    Attributes:
      path: 'reasoning_gym:NAME'.
      arguments: settings of the dataset by name, such as {'max_terms': 3}.
      seed: seed of the problems.
      size: number of problems in an epoch.
    """

    path: str
    arguments: JsonObject
    seed: int
    size: int

    def source(self, split: Split) -> "ReasoningProblems":
        """Returns the problems of a split, as a source with random access."""
        return ReasoningProblems(self, split)

    def distinct(self, count: int) -> Iterator[Record]:
        """Yields the first `count` held-out problems with different questions.

        Yields fewer, and warns, if the searched problems have fewer different questions.
        """
        held_out, seen = self.source("held_out"), set[str]()
        last = min(len(held_out), _LOOKED_AT * count)
        for start in range(0, last, _AT_ONCE):
            for record in held_out.several(range(start, min(start + _AT_ONCE, last))):
                if record["question"] not in seen:
                    seen.add(record["question"])
                    yield record
                if len(seen) == count:
                    return
        _log.warning(
            "%s has only %d different questions among its first %d held-out problems, fewer than the %d of the "
            "evaluation: lower eval.problems, or change data.arguments.",
            self.path,
            len(seen),
            last,
            count,
        )


class ReasoningProblems(Records):
    """The problems of one split of a dataset; the worker process makes a problem each time the problem is read."""

    def __init__(self, dataset: ReasoningGym, split: Split) -> None:
        super().__init__(dataset.path, range(dataset.size))  # pyright: ignore[reportArgumentType]
        self._dataset, self._split = dataset, split

    def __getitem__(self, index: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        if index >= len(self):
            raise IndexError(index)
        return self.several([int(index)])[0]

    def several(self, indices: Sequence[int]) -> list[Record]:
        """Returns the records at some indices.

        Raises:
          ValueError: reasoning-gym is not installed, has no such dataset, does not take its arguments, or wrote no
            problem in time; the message names the key to change.
        """
        request = {"name": self._dataset.path.removeprefix(PREFIX), "arguments": dict(self._dataset.arguments)}
        request |= {"seed": self._dataset.seed, "size": self._dataset.size, "split": self._split}
        try:
            reply = _process().call("records", {**request, "indices": list(indices)}, _DEADLINE_S)
        except (LateWorkerError, DiedError) as error:
            raise ValueError(
                f"{self._dataset.path} wrote no problem: {error} Some datasets write data.size={self._dataset.size} "
                f"problems before the first one, for which there are {_DEADLINE_S:g} s: lower data.size."
            ) from error
        if "refused" in reply:
            raise ValueError(f"{self._dataset.path}: {reply['refused']}")
        return [json.loads(record) for record in reply["records"]]
