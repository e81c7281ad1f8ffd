"""Pools of prompts by how often their samples have passed: what is easy, hard, postponed or retired, and since when."""

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from podrl.config import Count, Finite, Natural, Share, section
from podrl.types import Experience

# Pools of records that were trained on; one that was not is in none.
NORMAL, EASY, HARD, POSTPONED, RETIRED = range(5)
NAMES = ("normal", "easy", "hard", "postponed", "retired")


@section("data.curriculum")
@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Settings of the choice of prompts by their pass rates; without any of them every record has its turn.

    A record's pass rate is the mean over its visits, the newest weighing as much as all before it together.

    Attributes:
      metric: what a sample passes by: 'reward', or the name of a reward function.
      pass_at: the least value of it with which a sample has passed.
      easy_rate: pass rate from which on a prompt is easy.
      hard_rate: pass rate up to which it is hard.
      easy_share: share of the prompts that is drawn from the easy ones; None gives them their turn among all others.
      hard_share: the same of the hard ones.
      retire_after: visits in a row in which at least `retire_rate` of the samples passed, after which a prompt does not
        come again; 0 never retires.
      retire_rate: see there.
      postpone_after: visits in a row without a passing sample, after which a prompt rests; 0 never postpones.
      postpone_steps: steps for which it does.
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
                f"{self.easy_rate:g}: no prompt is easy and hard."
            )
        if (whole := (self.easy_share or 0.0) + (self.hard_share or 0.0)) > 1.0:
            raise ValueError(
                f"data.curriculum.easy_share={self.easy_share} and data.curriculum.hard_share={self.hard_share} are "
                f"{whole:g} together: they must be at most 1."
            )

    @property
    def used(self) -> bool:
        """True where pass rates decide anything."""
        return bool(self.retire_after or self.postpone_after or self.shares)

    @property
    def shares(self) -> dict[int, float]:
        """Maps pools of which a share is drawn to that share."""
        given = {EASY: self.easy_share, HARD: self.hard_share}
        return {pool: share for pool, share in given.items() if share is not None}

    @property
    def closed(self) -> tuple[int, ...]:
        """Pools whose records have no turn of their own."""
        return (POSTPONED, RETIRED, *self.shares)


class Results(NamedTuple):
    """Pass rates of a step: the numbers of its records, and the share of each one's samples that passed."""

    ids_N: Int[np.ndarray, " N"]
    rate_N: Float[np.ndarray, " N"]


class Table(NamedTuple):
    """A row for every record that was trained on, by rising number; never changed in place.

    Attributes:
      ids_N: numbers of the records.
      rate_N: their pass rates so far.
      solved_N: visits in a row, up to the last, in which enough samples passed to retire it.
      failed_N: the same with no sample that passed.
      last_N: the step of the last visit.
    """

    ids_N: Int[np.ndarray, " N"]
    rate_N: Float[np.ndarray, " N"]
    solved_N: Int[np.ndarray, " N"]
    failed_N: Int[np.ndarray, " N"]
    last_N: Int[np.ndarray, " N"]

    def after(self, step: int, results: Results, config: CurriculumConfig) -> "Table":
        """The table with the results of one more step."""
        new, first = np.unique(results.ids_N, return_index=True)
        rate_n = results.rate_N[first]
        place = np.searchsorted(self.ids_N, new)
        known = np.append(self.ids_N, -1)[place] == new
        # Rows are inserted: sorting a large table every step would take longer than drawing the batch.
        ids_N = np.insert(self.ids_N, place[~known], new[~known])
        rate_N, solved_N, failed_N, last_N = (np.insert(column, place[~known], 0) for column in self[1:])
        at = np.searchsorted(ids_N, new)
        rate_N[at] = np.where(known, (rate_N[at] + rate_n) / np.float32(2), rate_n)
        solved_N[at] = np.where(rate_n >= np.float32(config.retire_rate), solved_N[at] + 1, 0)
        failed_N[at] = np.where(rate_n == 0, failed_N[at] + 1, 0)
        last_N[at] = step
        return Table(ids_N, rate_N, solved_N, failed_N, last_N)

    def pools(self, step: int, config: CurriculumConfig) -> Int[np.ndarray, " N"]:
        """The pool of each record for the batch of a step."""
        pool_N = np.full(len(self.ids_N), NORMAL, np.int8)
        pool_N[self.rate_N >= np.float32(config.easy_rate)] = EASY
        pool_N[self.rate_N <= np.float32(config.hard_rate)] = HARD
        if config.postpone_after:
            rests_N = step < self.last_N + config.postpone_steps
            pool_N[(self.failed_N >= config.postpone_after) & rests_N] = POSTPONED
        if config.retire_after:
            pool_N[self.solved_N >= config.retire_after] = RETIRED
        return pool_N


_TYPES = {"ids": np.int64, "rate": np.float32, "solved": np.int32, "failed": np.int32, "last": np.int64}


def empty() -> Table:
    """The table of a run that has not begun."""
    return Table(*(np.zeros(0, dtype) for dtype in _TYPES.values()))


class Curriculum:
    """The pass rates that a run's prompts are chosen by: a function of the steps done.

    The batch of step b is chosen by the results of the steps before b - `lag`, which are known wherever it may be
    begun. So results of the newest steps are kept apart: whoever begins a batch again, after a kill or on a host that
    comes later, chooses by what was known the first time.

    Attributes:
      config: its settings.
      records: number of all records.
    """

    def __init__(self, config: CurriculumConfig, records: int) -> None:
        """Nothing is known yet."""
        self.config, self.records = config, records
        self._lag, self._row, self._group = 0, -1, 1
        self._lock = threading.Lock()
        self._base, self._at = empty(), 0  # the results of the steps before
        self._newer: dict[int, Results] = {}  # by step, from `_at` on
        self._now, self._now_at = self._base, 0  # the table that a batch was chosen by last
        self._newest = -1

    @property
    def lag(self) -> int:
        """Steps whose results come too late for a batch."""
        return self._lag

    def begin(self, *, lag: int, names: Sequence[str], group_size: int) -> None:
        """Sets what a run does not change: the staleness, its reward functions, the samples of a prompt.

        Raises:
          ValueError: data.curriculum.metric names no reward function.
        """
        self._lag, self._group = lag, group_size
        if self.config.metric != "reward":
            if self.config.metric not in names:
                raise ValueError(
                    f"data.curriculum.metric={self.config.metric!r} is no reward function of this run: say 'reward', "
                    f"or {' or '.join(map(repr, names))}."
                )
            self._row = list(names).index(self.config.metric)

    # What is learned of a step.

    def see(self, step: int, experience: Experience) -> None:
        """Adds the pass rates of the batch that step `step` trains on."""
        drawn = json.loads(experience.data_state)["curriculum"]
        index_P = experience.rollouts.prompts.index_P
        ids_P = np.asarray(drawn["ids"], np.int64)[index_P - drawn["first"]]
        value_B = experience.reward_B if self._row < 0 else experience.reward_FB[self._row]
        counted_B = experience.rollouts.mask_BT.any(axis=1) & ~np.isnan(value_B)
        passed_PG = (counted_B & (value_B >= self.config.pass_at)).reshape(len(ids_P), self._group)
        count_P = counted_B.reshape(passed_PG.shape).sum(axis=1)
        kept_P = count_P > 0
        rate_P = (passed_PG.sum(axis=1)[kept_P] / count_P[kept_P]).astype(np.float32)
        self._add(step, Results(ids_P[kept_P], rate_P))

    def word(self, step: int) -> dict[str, Any] | None:
        """The results of the step before, for the hosts that draw prompts; None where there are none."""
        found = self._newer.get(step - 1)
        return found and {"step": step - 1, "ids": found.ids_N.tolist(), "rate": found.rate_N.tolist()}

    def hear(self, word: Mapping[str, Any]) -> None:
        """Takes over what `word` packed."""
        results = Results(np.asarray(word["ids"], np.int64), np.asarray(word["rate"], np.float32))
        self._add(int(word["step"]), results)

    def _add(self, step: int, results: Results) -> None:
        if step <= self._newest:
            return
        assert step == self._newest + 1, f"results of step {step} after those of {self._newest}"
        with self._lock:
            self._newer[step], self._newest = results, step
            # A batch may be begun again by one who was told of the step before, or after a save one step back.
            while self._at < step - 1 - self._lag:
                self._base = self._base.after(self._at, self._newer.pop(self._at), self.config)
                self._at += 1

    # What is made of it.

    def table(self, batch: int) -> Table:
        """The table that the batch of a step is chosen by."""
        end = max(batch - self._lag, 0)
        with self._lock:
            if self._now_at > end or self._now_at < self._at:
                self._now, self._now_at = self._base, self._at
            while self._now_at < min(end, self._newest + 1):
                self._now = self._now.after(self._now_at, self._newer[self._now_at], self.config)
                self._now_at += 1
            return self._now

    def sizes(self) -> dict[str, int]:
        """The sizes of the pools by all that is known, and of the rest."""
        with self._lock:
            table = self._base
            for step in range(self._at, self._newest + 1):
                table = table.after(step, self._newer[step], self.config)
        sizes = np.bincount(table.pools(self._newest + 1, self.config), minlength=len(NAMES))
        return dict(zip(NAMES, map(int, sizes), strict=True)) | {"unseen": self.records - len(table.ids_N)}

    def memory(self, step: int | None = None) -> dict[str, np.ndarray]:
        """All that is known when `step` steps are done, as arrays; None for all."""
        with self._lock:
            end = self._newest + 1 if step is None else min(step, self._newest + 1)
            base, at = self._base, self._at
            newer = [(s, self._newer[s]) for s in range(at, end)]
        arrays = dict(zip(_TYPES, base, strict=True))
        steps = [np.full(len(results.ids_N), s, np.int64) for s, results in newer]
        arrays["newer_step"] = np.concatenate([np.zeros(0, np.int64), *steps])
        arrays["newer_ids"] = np.concatenate([np.zeros(0, np.int64), *(r.ids_N for _, r in newer)])
        arrays["newer_rate"] = np.concatenate([np.zeros(0, np.float32), *(r.rate_N for _, r in newer)])
        return arrays | {"range": np.asarray([at, end], np.int64)}

    def recall(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes over what `memory` returned."""
        at, end = (int(number) for number in arrays["range"])
        with self._lock:
            self._base = Table(*(np.asarray(arrays[name], dtype) for name, dtype in _TYPES.items()))
            self._at, self._newest = at, end - 1
            self._newer = {
                step: Results(
                    np.asarray(arrays["newer_ids"], np.int64)[arrays["newer_step"] == step],
                    np.asarray(arrays["newer_rate"], np.float32)[arrays["newer_step"] == step],
                )
                for step in range(at, end)
            }
            self._now, self._now_at = self._base, at
