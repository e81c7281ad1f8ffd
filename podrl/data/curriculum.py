"""A stream that chooses records by their pass rates: most come in a shuffled order, some are drawn from pools."""

import bisect
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from podrl.data.mixture import hashed
from podrl.data.pools import POSTPONED, RETIRED, Curriculum
from podrl.data.sources import Source
from podrl.data.stream import MOST_IN_A_ROW, Limit, Mixture, Stream, TooLong

Item = TypeVar("Item")
_log = logging.getLogger(__name__)


class ChosenStream(Stream[Item], Generic[Item]):
    """A stream that leaves records out, and draws others more often, as a curriculum says.

    The stream walks every source in an order of its own, which is new in every epoch, and skips the records of closed
    pools. From a pool with a share it draws records in addition to the walk; the record visited longest ago comes
    first. Sources keep their weights. The records of a batch are a function of the stream's position and of the
    curriculum's table.
    """

    _chooses = True  # so that restore() refuses the state of a stream without a curriculum

    def __init__(
        self,
        source: Source | Mixture,
        prepare: Callable[[int, Any], Item | TooLong],
        shuffle_seed: int | None,
        limit: Limit,
        *,
        curriculum: Curriculum,
        tools: str = "",
    ) -> None:
        """Starts at the first record; `curriculum` has the pass rates, and the other arguments are those of Stream."""
        super().__init__(source, prepare, shuffle_seed, limit, tools=tools)
        self._weights = list(source.weights) if isinstance(source, Mixture) else [1.0]
        self.curriculum = curriculum
        # Records are numbered through all sources; this lists the number of each source's first record.
        self._starts = list(itertools.accumulate(map(len, self._sources), initial=0))
        self._walks = [_Walk(len(one), shuffle_seed, k) for k, one in enumerate(self._sources)]
        self._drawn_of = [0] * len(self._sources)  # number of items decided so far, by source
        # For each source: how many items were decided so far, first from the walk, then from each pool with a share.
        self._wanted_of = [[0] * (1 + len(curriculum.config.shares)) for _ in self._sources]
        self._first, self._ids = 0, []  # position of _ids[0]; numbers of the newest batches' records
        self._brought_back = 0
        self._long: list[set[int]] = [set() for _ in self._sources]  # records known to be too long, by source

    def take(self, count: int) -> list[Item]:
        """Returns the `count` items of the next batch; `count` must be the same in every call.

        Raises:
          ValueError: every record is too long, or MOST_IN_A_ROW records of a source in a row are.
        """
        batch = self.emitted // count
        busy = self._ids[max(len(self._ids) - self.curriculum.lag * count, 0) :]
        with self.curriculum.table(batch) as table:
            draw: _Draw[Item] = _Draw(self, table.last_N, table.pools(batch, self.curriculum.config), busy, count)
            items = [draw.next(*self._place()) for _ in range(count)]
        self.emitted += count
        kept = (self.curriculum.lag + 1) * count
        self._ids = (self._ids + draw.chosen)[-kept:]
        self._first = self.emitted - len(self._ids)
        return items

    def state(self) -> bytes:
        """Returns the stream's position, as JSON, without the pass rates, which `Curriculum.memory` returns."""
        own = {
            "walks": [walk.position for walk in self._walks],
            "drawn": self._drawn_of,
            "wanted": self._wanted_of,
            "first": self._first,
            "ids": self._ids,
            "brought_back": self._brought_back,
        }
        return json.dumps({**json.loads(super().state()), "curriculum": own}).encode()

    def restore(self, state: bytes) -> None:
        super().restore(state)
        own = json.loads(state)["curriculum"]
        for walk, position in zip(self._walks, own["walks"], strict=True):
            walk.position = position
        self._drawn_of, self._wanted_of = list(own["drawn"]), [list(each) for each in own["wanted"]]
        self._first, self._ids, self._brought_back = own["first"], list(own["ids"]), own["brought_back"]

    def _place(self) -> tuple[int, int | None]:
        """Decides where the next item comes from: (number of the source, pool; None for the source's walk)."""
        part = _behind(self._drawn_of, self._weights)
        shares = self.curriculum.config.shares
        wanted = _behind(self._wanted_of[part], [max(1.0 - sum(shares.values()), 0.0), *shares.values()])
        return part, [None, *shares][wanted]

    def walk(self, part: int, is_taken: Callable[[int], bool], closed: int) -> tuple[int, Item] | None:
        """Returns (number, item) of the next record in a source's walk that may be drawn; None if there is none.

        Args:
          part: number of the source.
          is_taken: function that returns True for the number of a record that must be skipped.
          closed: number of the source's records that `is_taken` skips. If all other records of the source are known to
            be too long, the result is None without a walk.

        Raises:
          ValueError: MOST_IN_A_ROW records in a row are too long.
        """
        walk, start = self._walks[part], self._starts[part]
        if closed + len(self._long[part]) >= len(walk):
            return None
        position, too_long = walk.position, list[TooLong]()
        # The walk covers two epochs. If only one record may be drawn, the walk may have passed this record at the start
        # of the present epoch, and may reach it again only at the end of the next epoch.
        for _ in range(2 * len(walk)):
            number = start + walk.next()
            if is_taken(number):
                continue
            item = self.item(number)
            if not isinstance(item, TooLong):
                for placeholder in too_long:
                    self._pass_over(placeholder)
                return number, item
            self._long[part].add(number)
            too_long.append(item)
            if len(too_long) == MOST_IN_A_ROW:
                raise self.unfit(MOST_IN_A_ROW)
        # No record was found, so the walk goes back to its start position. A run that knows all records that are too
        # long never begins this walk. A resumed run does not know them and begins it, but must draw the same records.
        walk.position = position
        return None

    def item(self, number: int) -> Item | TooLong:
        """Prepares a record, found by its number, for the batch that is being drawn."""
        part = self.part_of(number)
        return self.make_item(self.emitted, part, number - self._starts[part])

    def span(self, part: int) -> tuple[int, int]:
        """Returns the range of the numbers of a source's records: (first number, last number + 1)."""
        return self._starts[part], self._starts[part + 1]

    def part_of(self, number: int) -> int:
        """Returns the number of the source that holds a record."""
        return bisect.bisect_right(self._starts, number) - 1

    def parts_from(self, part: int) -> list[int]:
        """Lists the numbers of all sources, `part` first."""
        return [part, *(k for k in range(len(self._sources)) if k != part)]

    def bring_back(self, pool: int) -> None:
        """Counts a record of `pool` that is drawn because no other record is left; reports the count at powers of
        ten."""
        self._brought_back += 1
        if str(self._brought_back).rstrip("0") == "1":  # logs at 1, 10, 100, ... records
            _log.warning(
                "%d prompts so far were drawn although postponed or retired, because no other of the %d records was "
                "left. Give more data, or change data.curriculum.%s.",
                *(self._brought_back, self.records),
                "postpone_steps" if pool == POSTPONED else "retire_after",
            )


class _Draw(Generic[Item]):
    """The choice of one batch's records.

    The constructor takes the step of every record's last visit (`last_N`; -1 before the first visit), every record's
    pool (`pool_N`), the numbers of the records in batches whose results the curriculum's table lacks (`busy`), and
    the number of records in the batch (`count`).

    Attributes:
      chosen: numbers of the records chosen so far.
    """

    def __init__(
        self, stream: ChosenStream[Item], last_N: np.ndarray, pool_N: np.ndarray, busy: Sequence[int], count: int
    ) -> None:
        self.stream, self._last_N, self._pool_N = stream, last_N, pool_N
        self._closed = stream.curriculum.config.closed
        self._needed = len(busy) + count  # among this many records of a pool, at least one is not busy
        self._busy = _ExcludedRecords(self, busy)  # records in batches whose results are not known, or in this batch
        self._mine = _ExcludedRecords(self, ())  # records in this batch
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._shut_of: dict[int, int] = {}
        self.chosen: list[int] = []

    def next(self, part: int, wanted: int | None) -> Item:
        """Returns the next item: from the wanted pool or the source's walk, else from any other records."""
        for number, item in self._offers(part, wanted):
            self.chosen.append(number)
            self._busy.add(number)
            self._mine.add(number)
            return item
        raise self.stream.unfit(2 * self.stream.records)

    def _offers(self, part: int, wanted: int | None) -> Iterator[tuple[int, Item]]:
        """Yields the records that may be drawn, and their items, best first; only the first of them is used."""
        stream, order = self.stream, self.stream.parts_from(part)
        if wanted is not None:
            yield from self._of_pool(part, wanted, self._busy)
        for away in (self._busy, self._mine):
            for k in order:
                yield from self._of_walk(k, away)
                for pool in stream.curriculum.config.shares:
                    yield from self._of_pool(k, pool, away)
        for pool in (POSTPONED, RETIRED):
            for k in order:
                for number, item in self._of_pool(k, pool, self._mine):
                    stream.bring_back(pool)
                    yield number, item
        for k in order:  # this is reached only if a batch needs more prompts than there are records
            found = stream.walk(k, lambda number: False, 0)
            yield from [found] if found else []

    def _of_walk(self, part: int, away: "_ExcludedRecords") -> Iterator[tuple[int, Item]]:
        if part not in self._shut_of:
            own_N = self._pool_N[slice(*self.stream.span(part))]
            self._shut_of[part] = sum(int(np.count_nonzero(own_N == pool)) for pool in self._closed)
        count = self._shut_of[part] + away.open_of.get(part, 0)
        found = self.stream.walk(part, lambda number: number in away.numbers or self.shut(number), count)
        yield from [found] if found else []

    def _of_pool(self, part: int, pool: int, away: "_ExcludedRecords") -> Iterator[tuple[int, Item]]:
        if (part, pool) not in self._queues:
            first, last = self.stream.span(part)
            mine = first + np.flatnonzero(self._pool_N[first:last] == pool)
            self._queues[part, pool] = _Queue(mine, self._last_N[mine], self._needed)
        for number in self._queues[part, pool]:
            if number not in away.numbers:
                item = self.stream.item(number)
                if not isinstance(item, TooLong):
                    yield number, item

    def shut(self, number: int) -> bool:
        """Returns True if a record's pool is closed, so that the walk skips the record."""
        return self._pool_N[number] in self._closed


class _Queue:
    """Yields the records of a pool, the record visited longest ago first; equally old visits are ordered by number.

    Only the first `needed` records are sorted at once; the rest is sorted when the caller gets that far.
    """

    def __init__(self, ids_N: np.ndarray, last_N: np.ndarray, needed: int) -> None:
        self._ids_N, self._last_N, self._begun = ids_N, last_N, np.arange(0)
        if needed < len(ids_N):
            oldest = np.flatnonzero(last_N <= np.partition(last_N, needed)[needed])
            self._begun = ids_N[oldest[np.argsort(last_N[oldest], kind="stable")]]

    def __iter__(self) -> Iterator[int]:
        yield from map(int, self._begun)
        if len(self._begun) < len(self._ids_N):
            rest = np.argsort(self._last_N, kind="stable")[len(self._begun) :]
            yield from map(int, self._ids_N[rest])


class _ExcludedRecords:
    """A set of records that a batch must not draw.

    Attributes:
      numbers: numbers of the records.
      open_of: number of the records whose pool is not closed, by source.
    """

    def __init__(self, draw: _Draw[Any], numbers: Sequence[int]) -> None:
        self._draw, self.numbers = draw, set[int]()
        self.open_of: dict[int, int] = {}
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        if number in self.numbers:
            return
        self.numbers.add(number)
        if not self._draw.shut(number):
            part = self._draw.stream.part_of(number)
            self.open_of[part] = self.open_of.get(part, 0) + 1


class _Walk:
    """An endless walk through the numbers below `size`: in a new order every epoch, or rising if `seed` is None.

    Attributes:
      position: count of the numbers that the walk has returned.
    """

    def __init__(self, size: int, seed: int | None, part: int) -> None:
        self.position = 0
        self._size, self._seed, self._part = size, seed, part
        self._epoch, self._order = -1, np.arange(0)

    def __len__(self) -> int:
        return self._size

    def next(self) -> int:
        epoch, place = divmod(self.position, self._size)
        self.position += 1
        if self._seed is None:
            return place
        if epoch != self._epoch:
            key = hashed(np.asarray([(self._seed << 32) + self._part], np.uint64)) + np.uint64(epoch)
            values = hashed(hashed(key) + np.arange(self._size, dtype=np.uint64))
            self._epoch, self._order = epoch, np.argsort(values, kind="stable")
        return int(self._order[place])


def _behind(counts: list[int], weights: Sequence[float]) -> int:
    """Returns the index whose count is furthest below its share of the weights, and raises this count by 1."""
    whole, done = sum(weights), sum(counts) + 1
    chosen = max(range(len(counts)), key=lambda k: (weights[k] / whole * done - counts[k], -k))
    counts[chosen] += 1
    return chosen
