"""Pools of prompts: which prompts are easy, hard, postponed or retired, by how often their samples passed."""

import collections
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from podrl.config import Count, Finite, Natural, Share, section
from podrl.types import Experience

# Pools of the records that were trained on; a record without a visit counts as NORMAL where a pool is needed.
NORMAL, EASY, HARD, POSTPONED, RETIRED = range(5)
NAMES = ("normal", "easy", "hard", "postponed", "retired")


@section("data.curriculum")
@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Settings of the choice of prompts by their pass rates; with the defaults every record has its turn.

    A record is visited in each step that trains on its samples. The record's pass rate is a weighted mean over its
    visits: the newest visit weighs as much as all earlier visits together.

    Attributes:
      metric: number that decides whether a sample passes: 'reward', or the name of a reward function.
      pass_at: least value of `metric` with which a sample passes.
      easy_rate: least pass rate, in [0, 1], of an easy prompt.
      hard_rate: largest pass rate, in [0, 1], of a hard prompt.
      easy_share: share of the prompts that is drawn from the easy prompts; with None, easy prompts have their turn like
        all others.
      hard_share: share of the prompts that is drawn from the hard prompts; with None, hard prompts have their turn like
        all others.
      retire_after: number of successful visits in a row after which a prompt is not drawn again; 0 never retires a
        prompt.
      retire_rate: least share of a visit's samples that must pass for the visit to be successful.
      postpone_after: number of visits in a row without a passing sample after which a prompt rests; 0 never postpones a
        prompt.
      postpone_steps: number of steps for which a postponed prompt rests.
    """

    metric: str = "reward"
    pass_at: Finite = 1.0
    easy_rate: Share = 0.75
    hard_rate: Share = 0.25
    easy_share: Share | None = None
    hard_share: Share | None = None
    retire_after: Natural = 0
    retire_rate: Share = 1.0
    postpone_after: Natural = 0
    postpone_steps: Count = 100

    def __post_init__(self) -> None:
        if self.hard_rate >= self.easy_rate:
            raise ValueError(
                f"data.curriculum.hard_rate={self.hard_rate:g} must be below data.curriculum.easy_rate="
                f"{self.easy_rate:g}: a prompt cannot be both easy and hard."
            )
        if (whole := (self.easy_share or 0.0) + (self.hard_share or 0.0)) > 1.0:
            raise ValueError(
                f"data.curriculum.easy_share={self.easy_share} and data.curriculum.hard_share={self.hard_share} are "
                f"{whole:g} together: they must be at most 1."
            )

    def row(self, names: Sequence[str]) -> int:
        """Returns the position of `metric` among a run's reward functions; -1 for the whole reward.

        Raises:
          ValueError: `metric` names no reward function.
        """
        if self.metric not in ("reward", *names):
            raise ValueError(
                f"data.curriculum.metric={self.metric!r} is not a reward function of this run: use 'reward', or "
                f"{' or '.join(map(repr, names))}."
            )
        return -1 if self.metric == "reward" else list(names).index(self.metric)

    @property
    def used(self) -> bool:
        """True if the settings let pass rates decide anything."""
        return bool(self.retire_after or self.postpone_after or self.shares)

    @property
    def shares(self) -> dict[int, float]:
        """Maps each pool with a share of the prompts to its share."""
        share_of_pool = {EASY: self.easy_share, HARD: self.hard_share}
        return {pool: share for pool, share in share_of_pool.items() if share is not None}

    @property
    def closed(self) -> tuple[int, ...]:
        """The pools whose records a stream's walk skips."""
        return (POSTPONED, RETIRED, *self.shares)


class Results(NamedTuple):
    """The results of a step: the numbers of its records, and the share of each record's samples that passed."""

    ids_N: Int[np.ndarray, " N"]
    rate_N: Float[np.ndarray, " N"]


class PassRateTable:
    """The pass rates of all N records after a number of steps; it is changed in place, and changed back by `set`.

    A step changes only the rows of its own records, so that it takes as long for a million records as for ten.

    Attributes:
      rate_N: pass rate of each record so far; NaN before the first visit.
      solved_N: number of successful visits in a row (see retire_rate), up to the last visit.
      failed_N: number of visits in a row without a passing sample, up to the last visit.
      last_N: step of the last visit; -1 before the first visit.
    """

    def __init__(self, records: int) -> None:
        """Makes a table in which no record has been visited."""
        self.rate_N = np.full(records, np.nan, np.float32)
        self.solved_N, self.failed_N = np.zeros(records, np.int32), np.zeros(records, np.int32)
        self.last_N = np.full(records, -1, np.int32)

    def learn(self, step: int, results: Results, config: CurriculumConfig) -> "Rows":
        """Adds the results of a step, and returns the rows of its records as they were before."""
        ids_n, first = np.unique(results.ids_N, return_index=True)
        before, rate_n = self.rows(ids_n), results.rate_N[first]
        known_n = before.last_N >= 0
        self.rate_N[ids_n] = np.where(known_n, (before.rate_N + rate_n) / np.float32(2), rate_n)
        self.solved_N[ids_n] = np.where(rate_n >= np.float32(config.retire_rate), before.solved_N + 1, 0)
        self.failed_N[ids_n] = np.where(rate_n == 0, before.failed_N + 1, 0)
        self.last_N[ids_n] = step
        return before

    def rows(self, ids_n: Int[np.ndarray, " n"]) -> "Rows":
        """Copies the rows of some records."""
        return Rows(ids_n, self.rate_N[ids_n], self.solved_N[ids_n], self.failed_N[ids_n], self.last_N[ids_n])

    def set(self, rows: "Rows") -> None:
        """Replaces the rows of the records that `rows` names."""
        for column, value_n in zip((self.rate_N, self.solved_N, self.failed_N, self.last_N), rows[1:], strict=True):
            column[rows.ids_N] = value_n

    def seen(self) -> Int[np.ndarray, " n"]:
        """Lists the numbers of the records that were visited, in rising order."""
        return np.flatnonzero(self.last_N >= 0)

    def pools(self, step: int, config: CurriculumConfig) -> Int[np.ndarray, " N"]:
        """Computes the pool of each record for the batch of a step; NORMAL for a record without a visit."""
        # A record that fits two pools belongs to the pool with the larger number. This runs for every batch: taking the
        # maximum of a few int8 arrays is many times faster than setting values through masks.
        pool_N = (self.rate_N >= np.float32(config.easy_rate)).view(np.int8) * np.int8(EASY)
        np.maximum(pool_N, (self.rate_N <= np.float32(config.hard_rate)).view(np.int8) * np.int8(HARD), out=pool_N)
        if config.postpone_after:
            rests_N = (self.failed_N >= config.postpone_after) & (self.last_N > step - config.postpone_steps)
            np.maximum(pool_N, rests_N.view(np.int8) * np.int8(POSTPONED), out=pool_N)
        if config.retire_after:
            retired_N = self.solved_N >= config.retire_after
            np.maximum(pool_N, retired_N.view(np.int8) * np.int8(RETIRED), out=pool_N)
        return pool_N


class Rows(NamedTuple):
    """Some rows of a table: the numbers of their records, and the values of each column."""

    ids_N: Int[np.ndarray, " N"]
    rate_N: Float[np.ndarray, " N"]
    solved_N: Int[np.ndarray, " N"]
    failed_N: Int[np.ndarray, " N"]
    last_N: Int[np.ndarray, " N"]


# Types of the columns of Rows in checkpoints, by the name of the array.
_TYPES = {"ids": np.int64, "rate": np.float32, "solved": np.int32, "failed": np.int32, "last": np.int64}


class Curriculum:
    """The pass rates by which a run's prompts are chosen: a function of the steps done.

    The batch of step b is chosen by the results of the steps before b - `lag`: every process that may begin the batch
    knows these results. A batch may be begun again, after a kill or on a host that joins later, and must then have the
    same prompts. So the results of the newest steps are kept one by one, and the table can go back to an older step.

    Attributes:
      config: settings of the choice.
      records: number of all records.
    """

    def __init__(self, config: CurriculumConfig, records: int) -> None:
        """Stores the settings, with an empty table of results."""
        self.config, self.records = config, records
        self._lag, self._row = 0, -1
        self._lock = threading.Lock()
        self._at = 0  # the results of steps before this step are in the table and are never taken back
        self._newer: dict[int, Results] = {}  # results by step, from step `_at` on
        self._newest = -1  # the last step whose results are known
        # The table after `_table_at` steps; `_table_at` is at least `_at`.
        self._table, self._table_at = PassRateTable(records), 0
        # For each step in the table from `_at` on: the rows that the step changed, as they were before.
        self._before: collections.deque[Rows] = collections.deque()

    @property
    def lag(self) -> int:
        """Number of steps right before a batch's step that end too late to influence the choice of the batch."""
        return self._lag

    def begin(self, *, lag: int, names: Sequence[str]) -> None:
        """Sets the values that stay the same during a run.

        Args:
          lag: number of steps right before a batch's step that end too late to influence the choice of the batch.
          names: names of the run's reward functions, in the order of `Experience.reward_FB`.

        Raises:
          ValueError: data.curriculum.metric names no reward function.
        """
        self._lag, self._row = lag, self.config.row(names)

    def see(self, step: int, experience: Experience) -> None:
        """Adds the pass rates of the batch that step `step` trains on."""
        drawn = json.loads(experience.data_state)["curriculum"]
        index_P = experience.rollouts.prompts.index_P
        ids_P = np.asarray(drawn["ids"], np.int64)[index_P - drawn["first"]]
        value_B = experience.reward_B if self._row < 0 else experience.reward_FB[self._row]
        counted_B = experience.rewarded() & ~np.isnan(value_B)
        group_B, passed_B = experience.rollouts.group_B, counted_B & (value_B >= self.config.pass_at)
        count_P, passed_P = (np.bincount(group_B[own_B], minlength=len(ids_P)) for own_B in (counted_B, passed_B))
        kept_P = count_P > 0
        rate_P = (passed_P[kept_P] / count_P[kept_P]).astype(np.float32)
        self.add(step, Results(ids_P[kept_P], rate_P))

    def add(self, step: int, results: Results) -> None:
        """Adds the results of a step. Steps come in order; results of a step that is known already are ignored."""
        if step <= self._newest:
            return
        assert step == self._newest + 1, f"results of step {step} after those of {self._newest}"
        with self._lock:
            self._newer[step], self._newest = results, step
            # The newest results are kept, so that the table can go back: a batch may begin again on a host that knows
            # one step less, or from the previous checkpoint.
            while self._at < step - 1 - self._lag:
                self._move(max(self._table_at, self._at + 1))
                self._before.popleft()
                del self._newer[self._at]
                self._at += 1

    @contextlib.contextmanager
    def table(self, batch: int) -> Iterator[PassRateTable]:
        """Yields the table by which the batch of step `batch` is chosen; other threads wait until the block ends."""
        with self._lock:
            self._move(min(max(batch - self._lag, self._at), self._newest + 1))
            yield self._table

    def _move(self, end: int) -> None:
        """Moves the table forward or back to its state after `end` steps."""
        while self._table_at > end:
            self._table.set(self._before.pop())
            self._table_at -= 1
        while self._table_at < end:
            self._before.append(self._table.learn(self._table_at, self._newer[self._table_at], self.config))
            self._table_at += 1

    def sizes(self) -> dict[str, int]:
        """Counts the records of each pool by the results of all known steps, and the records without a visit."""
        with self._lock:
            self._move(self._newest + 1)
            pool_N = self._table.pools(self._newest + 1, self.config)
            seen = int(np.count_nonzero(self._table.last_N >= 0))
        sizes = {name: int(np.count_nonzero(pool_N == pool)) for pool, name in enumerate(NAMES)}
        unseen = self.records - seen
        return sizes | {NAMES[NORMAL]: sizes[NAMES[NORMAL]] - unseen, "unseen": unseen}

    def memory(self, step: int | None = None) -> dict[str, np.ndarray]:
        """Returns the results of the first `step` steps, or of all known steps if None, as arrays for `recall`."""
        with self._lock:
            end = self._newest + 1 if step is None else min(step, self._newest + 1)
            self._move(at := self._at)
            base = self._table.rows(self._table.seen())
            newer = [(s, self._newer[s]) for s in range(at, end)]
        arrays = {name: np.asarray(x, dtype) for (name, dtype), x in zip(_TYPES.items(), base, strict=True)}
        steps = [np.full(len(results.ids_N), s, np.int64) for s, results in newer]
        arrays["newer_step"] = np.concatenate([np.zeros(0, np.int64), *steps])
        arrays["newer_ids"] = np.concatenate([np.zeros(0, np.int64), *(r.ids_N for _, r in newer)])
        arrays["newer_rate"] = np.concatenate([np.zeros(0, np.float32), *(r.rate_N for _, r in newer)])
        return arrays | {"range": np.asarray([at, end], np.int64)}

    def recall(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces all results by the results that `memory` returned."""
        at, end = (int(number) for number in arrays["range"])
        with self._lock:
            self._table, self._table_at = PassRateTable(self.records), at
            self._table.set(Rows(*(np.asarray(arrays[name], dtype) for name, dtype in _TYPES.items())))
            self._before.clear()
            self._at, self._newest = at, end - 1
            self._newer = {
                step: Results(
                    np.asarray(arrays["newer_ids"], np.int64)[arrays["newer_step"] == step],
                    np.asarray(arrays["newer_rate"], np.float32)[arrays["newer_step"] == step],
                )
                for step in range(at, end)
            }
