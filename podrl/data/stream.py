"""The base of batch streams: shuffled order, skipped records, and the position from which a run resumes."""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import grain

from podrl.config import plural
from podrl.data import sources
from podrl.data.sources import Source
from podrl.types import BatchError

Item = TypeVar("Item")
_log = logging.getLogger(__name__)
# It is an error if this many consecutive items are too long, because a run that skips through a large source would
# look like a hang.
MOST_IN_A_ROW = 10_000
_REPORT_EVERY = 1000  # number of records after which a check reports its progress again


class TooLong:
    """A placeholder for an item that is left out.

    Attributes:
      length: number of the item's tokens.
      part: name of the item's source in a mixture, else None.
    """

    def __init__(self, length: int, part: str | None = None) -> None:
        self.length, self.part = length, part


class MixtureRecord(NamedTuple):
    """A record of a mixture, and the number `part` of its source."""

    part: int
    record: Any


class Mixture(NamedTuple):
    """A mixture: several sources from which a stream draws, each in an order of its own.

    Attributes:
      sources: sources of the mixture, each with its records by index.
      weights: share of the items that are drawn from each source, relative to the other sources' weights.
      names: names of the sources.
    """

    sources: Sequence[Source]
    weights: Sequence[float]
    names: Sequence[str]

    @property
    def records(self) -> int:
        """The number of records of all sources together."""
        return sum(map(len, self.sources))


@dataclasses.dataclass(frozen=True)
class Limit:
    """The length limit of an item.

    Attributes:
      tokens: largest number of tokens of an item.
      key: name of the setting with this limit, for messages.
      beyond: treatment of a longer item: 'skip' leaves it out, 'error' raises an error.
    """

    tokens: int
    key: str
    beyond: Literal["skip", "error"]

    def exceeded(self, text: str, tokens: int) -> TooLong:
        """Returns the placeholder of an item that is too long.

        Args:
          text: text of the item, for the message.
          tokens: number of the item's tokens, more than the limit.

        Raises:
          ValueError: `beyond` is 'error'.
        """
        if self.beyond == "error":
            raise ValueError(
                f"{text[:80]!r}... has {tokens} tokens: {self.key}={self.tokens} must be at least that, or set "
                "data.long_prompts=skip."
            )
        return TooLong(tokens)


class Stream(Generic[Item]):
    """An endless, exactly resumable walk through a source or a mixture; a seed reshuffles it in every epoch.

    Attributes:
      records: number of records of all sources.
      emitted: number of items returned so far.
      skipped: number of items left out so far, because they are too long.
      too_long: number of items left out so far, by the name of their source; empty without a mixture.
    """

    _chooses = False  # True in the subclass that chooses records by a curriculum

    def __init__(
        self,
        source: Source | Mixture,
        prepare: Callable[[int, Any], Item | TooLong],
        shuffle_seed: int | None,
        limit: Limit,
        *,
        tools: str = "",
    ) -> None:
        """Starts at the first record.

        Args:
          source: records by index, or a mixture.
          prepare: function of (position in the walk, record) that makes an item. The record of a mixture is a
            `MixtureRecord`. The item must depend on nothing else, so that a resumed run makes the same items.
          shuffle_seed: seed of the order; None keeps the source's order.
          limit: length limit that `prepare` applies, for messages about items that were left out.
          tools: checksum of the tools that items name; '' for none.

        Raises:
          ValueError: there are no records.
        """
        mixed = source if isinstance(source, Mixture) else Mixture([source], [1.0], [""])
        self._sources, self._names, self._mixes = mixed.sources, mixed.names, isinstance(source, Mixture)
        records = mixed.records
        if not records:
            raise ValueError("There are no records to train on: data.path must hold at least one.")
        self.emitted = self.skipped = 0
        self.records, self._seed, self._limit, self._tools = records, shuffle_seed, limit, tools
        self._mixture: list[list[str | int | float]] = []
        self.too_long: dict[str, int] = {}
        self._prepare = prepare
        self._shortest, self._longest = sys.maxsize, 0  # tokens of the items that were left out
        datasets = [_numbers(len(one), shuffle_seed, k) for k, one in enumerate(mixed.sources)]
        if self._mixes:
            parts = zip(mixed.names, map(len, mixed.sources), mixed.weights, strict=True)
            self._mixture = [list(part) for part in parts]
            self.too_long = dict.fromkeys(mixed.names, 0)
            dataset = grain.MapDataset.mix(datasets, weights=mixed.weights)
        else:
            (dataset,) = datasets
        dataset = dataset.map_with_index(lambda position, at: self.make_item(position, *at))
        # No threads read ahead: using them would take more time than encoding the few prompts of a step.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def take(self, count: int) -> list[Item]:
        """Returns the next `count` items.

        Raises:
          BatchError: a record cannot be prepared.
          ValueError: every record, or MOST_IN_A_ROW items in a row, are too long.
        """
        items = [self._next() for _ in range(count)]
        self.emitted += count
        return items

    def make_item(self, position: int, part: int, number: int) -> Item | TooLong:
        """Prepares record `number` of source `part` for a position of the walk.

        Raises:
          BatchError: the record cannot be prepared; the message names its place. The run saves the earlier steps, then
            ends.
        """
        try:
            item = sources.make(
                self._sources[part],
                number,
                lambda record: self._prepare(position, MixtureRecord(part, record) if self._mixes else record),
            )
        except ValueError as error:
            raise BatchError(str(error)) from error
        if not isinstance(item, TooLong):
            return item
        self._shortest, self._longest = min(self._shortest, item.length), max(self._longest, item.length)
        return TooLong(item.length, self._names[part]) if self._mixes else item

    def look(self, most: int) -> None:
        """Prepares the first `most` records of every source, and warns if some of them are too long.

        If all of these records are too long, the method goes on to the next record that fits, as a run would. The
        stream's position does not change.

        Raises:
          BatchError: a record cannot be prepared; the message names its place.
          ValueError: all records of the only source, or too many in a row, are too long.
        """
        none_fits = True
        for part, (source, name) in enumerate(zip(self._sources, self._names, strict=True)):
            looked, long, longest = min(most, len(source)), 0, 0
            for i in range(looked):
                if isinstance(item := self.make_item(i, part, i), TooLong):
                    long, longest = long + 1, max(longest, item.length)
                if (i + 1) % _REPORT_EVERY == 0:
                    _log.info("%d of %d records%s were checked.", i + 1, looked, f" of {name}" * bool(name))
            if long == self.records:
                raise self.unfit(2 * long)
            none_fits = none_fits and long == looked
            if long:
                _log.warning(
                    "%d of the first %d records%s are longer than %d tokens (%s) and are left out; the longest has %d.",
                    *(long, looked, f" of {name}" * bool(name), self._limit.tokens, self._limit.key, longest),
                )
        if none_fits:
            position = self.state()
            self._next()
            self.restore(position)

    def state(self) -> bytes:
        """Returns the stream's position, as JSON."""
        state = {
            "iterator": self._iterator.get_state(),
            "emitted": self.emitted,
            "skipped": self.skipped,
            "records": self.records,
            "seed": self._seed,
        }
        state |= {"tools": self._tools} if self._tools else {}
        state |= {"mixture": self._mixture, "too_long": self.too_long} if self._mixture else {}
        return json.dumps(state).encode()

    def restore(self, state: bytes) -> None:
        """Continues at a position that `state` returned.

        Raises:
          ValueError: the state belongs to another number of records, another seed, other sources or other tools, or
            only one of the two streams has a curriculum.
        """
        saved = json.loads(state)
        for name, now, key in (("records", self.records, "data.path"), ("seed", self._seed, "data.seed")):
            if saved[name] != now:
                raise ValueError(
                    f"The checkpoint's data position belongs to {name}={saved[name]}, but {key} gives {name}={now}: "
                    "resume with the same data, or start in a new --workdir."
                )
        if saved.get("mixture", []) != self._mixture:
            raise ValueError(
                f"The checkpoint's data position belongs to the sources {saved.get('mixture', [])} (name, records, "
                f"weight), but data.sources gives {self._mixture}: resume with the same sources, or start in a new "
                "--workdir."
            )
        if (curriculum := "curriculum" in saved) != self._chooses:
            there, now = ("with", "does not use") if curriculum else ("without", "uses")
            raise ValueError(
                f"The checkpoint's data position was saved {there} data.curriculum, which this run {now}: resume with "
                "the same, or start in a new --workdir."
            )
        if saved.get("tools", "") != self._tools:
            raise ValueError(
                "The prompts of the checkpoint name other tools, or the same tools with other arguments or "
                "descriptions, than env.tools and the servers of env.mcp offer now: resume with the same tools, or "
                "start in a new --workdir."
            )
        self._iterator.set_state(saved["iterator"])
        self.emitted, self.skipped = saved["emitted"], saved["skipped"]
        self.too_long |= saved.get("too_long", {})

    def _next(self) -> Item:
        # Two epochs are tried: if only one record fits, the walk may have passed it in this epoch already, and it may
        # come last in the next epoch.
        tried = min(2 * self.records, MOST_IN_A_ROW)
        for _ in range(tried):
            try:
                item = next(self._iterator)
            except ValueError as error:
                vars(error).pop("__notes__", None)  # Grain adds notes about its own frames
                raise
            if not isinstance(item, TooLong):
                return item
            self._pass_over(item)
        raise self.unfit(tried)

    def _pass_over(self, item: TooLong) -> None:
        """Counts an item that is left out."""
        self.skipped += 1
        if item.part is not None:
            self.too_long[item.part] += 1
        if str(self.skipped).rstrip("0") == "1":  # logs at 1, 10, 100, ... items
            _log.warning(
                "Skipped so far, because longer than %d tokens (%s): %s.",
                *(self._limit.tokens, self._limit.key, plural(self.skipped, "record")),
            )

    def unfit(self, tried: int) -> ValueError:
        """Makes the error for `tried` consecutive items that were too long."""
        which = f"All of {self.records} records" if tried >= 2 * self.records else f"{tried} records in a row"
        most = self._limit.tokens
        return ValueError(
            f"{which} are longer than {most} tokens (the shortest has {self._shortest}, the longest {self._longest}): "
            f"raise {self._limit.key}={most}."
        )


def _numbers(records: int, shuffle_seed: int | None, part: int) -> grain.MapDataset:
    """Makes the endless walk through one source, as a Grain data set of (part, number of the record)."""
    dataset = grain.MapDataset.range(records)
    if shuffle_seed is not None:
        dataset = dataset.shuffle(seed=(shuffle_seed + part) % 2**32)
    return dataset.repeat().map(lambda number: (part, number))


class BatchStream(Generic[Item]):
    """The base of all batch streams: draws items from a Stream, and reports the Stream's position."""

    def __init__(self, stream: Stream[Item]) -> None:
        self._stream = stream

    @property
    def skipped(self) -> int:
        """The number of items left out so far because they were too long."""
        return self._stream.skipped

    @property
    def too_long(self) -> Mapping[str, int]:
        """The number of items left out so far, by the name of their source; empty without a mixture."""
        return self._stream.too_long

    def look(self, most: int) -> None:
        """Prepares the first `most` records of every source, and warns if some of them are too long.

        Raises:
          BatchError: a record cannot be prepared; the message names its place.
          ValueError: all records of the only source, or too many in a row, are too long.
        """
        self._stream.look(most)

    def state(self) -> bytes:
        """Returns the stream's position, as JSON; the same on every shard."""
        return self._stream.state()

    def restore(self, state: bytes) -> None:
        """Continues after the batch with this `data_state`.

        Raises:
          ValueError: the state belongs to other sources, another number of records, another seed or other tools, or
            only one of the two streams has a curriculum.
        """
        self._stream.restore(state)
