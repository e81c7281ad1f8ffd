"""The base of batch streams: shuffled order, skipped records, and the position a run resumes from."""

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import grain

from podrl.data.sources import Source

Item = TypeVar("Item")
_log = logging.getLogger(__name__)
# So many items in a row that are too long are an error, so that a large source of them does not look like a hang.
_MOST_IN_A_ROW = 10_000


class TooLong:
    """A placeholder for an item that is left out."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """The length limit of an item in tokens, the key that sets it, and the policy for longer ones."""

    tokens: int
    key: str
    beyond: Literal["skip", "error"]

    def exceeded(self, text: str, tokens: int) -> TooLong:
        """Refuses an item of too many tokens, or returns its placeholder.

        Raises:
          ValueError: longer items are errors.
        """
        if self.beyond == "error":
            raise ValueError(
                f"{text[:80]!r}... has {tokens} tokens: {self.key}={self.tokens} must be at least that, or set "
                "data.long_prompts=skip."
            )
        return TooLong()


class Stream(Generic[Item]):
    """An endless, exactly resumable walk through a source, reshuffled in every epoch.

    Attributes:
      emitted: items given out so far.
      skipped: items left out so far.
    """

    def __init__(
        self,
        source: Source,
        prepare: Callable[[int, Any], Item | TooLong],
        shuffle_seed: int | None,
        limit: Limit,
        *,
        tools: str = "",
    ) -> None:
        """Starts at the first record.

        Args:
          source: records by index.
          prepare: makes an item of (position in the walk, record); must depend on nothing else.
          shuffle_seed: None keeps the source's order.
          limit: for messages about items that were left out.
          tools: checksum of the tools that items name; '' for none.

        Raises:
          ValueError: an empty source.
        """
        if not len(source):
            raise ValueError("There are no records to train on: data.path must hold at least one.")
        self.emitted = self.skipped = 0
        self._records, self._seed, self._limit, self._tools = len(source), shuffle_seed, limit, tools
        dataset = grain.MapDataset.source(source)
        if shuffle_seed is not None:
            dataset = dataset.shuffle(seed=shuffle_seed)
        dataset = dataset.repeat().map_with_index(prepare)
        # Reading ahead in threads would cost more than these few tokens; the position is exact either way.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def take(self, count: int) -> list[Item]:
        """Returns the next `count` items.

        Raises:
          ValueError: every record is too long.
        """
        items = [self._next() for _ in range(count)]
        self.emitted += count
        return items

    def state(self) -> bytes:
        """Returns the stream's position, as JSON."""
        state = {
            "iterator": self._iterator.get_state(),
            "emitted": self.emitted,
            "skipped": self.skipped,
            "records": self._records,
            "seed": self._seed,
        }
        state |= {"tools": self._tools} if self._tools else {}
        return json.dumps(state).encode()

    def restore(self, state: bytes) -> None:
        """Continues at a position that `state` returned.

        Raises:
          ValueError: the state belongs to another number of records, another seed or other tools.
        """
        saved = json.loads(state)
        for name, now, key in (("records", self._records, "data.path"), ("seed", self._seed, "data.seed")):
            if saved[name] != now:
                raise ValueError(
                    f"The checkpoint's data position belongs to {name}={saved[name]}, but {key} gives {name}={now}: "
                    "resume with the same data, or start in a new --workdir."
                )
        if saved.get("tools", "") != self._tools:
            raise ValueError(
                "The prompts of the checkpoint name other tools, or others of their arguments and descriptions, than "
                "env.tools and the servers of env.mcp offer now: resume with the same, or start in a new --workdir."
            )
        self._iterator.set_state(saved["iterator"])
        self.emitted, self.skipped = saved["emitted"], saved["skipped"]

    def _next(self) -> Item:
        # A record that fits may be the first of one epoch and the last of the next.
        tried = min(2 * self._records, _MOST_IN_A_ROW)
        for _ in range(tried):
            try:
                item = next(self._iterator)
            except ValueError as error:
                vars(error).pop("__notes__", None)  # Grain's, about its own frames
                raise
            if not isinstance(item, TooLong):
                return item
            self.skipped += 1
            if str(self.skipped).rstrip("0") == "1":  # 1, 10, 100, ...
                _log.warning(
                    "%d skipped so far: longer than %d tokens, which is %s.",
                    *(self.skipped, self._limit.tokens, self._limit.key),
                )
        which = f"All of {self._records} records" if tried == 2 * self._records else f"{tried} records in a row"
        most = self._limit.tokens
        raise ValueError(f"{which} are longer than {most} tokens: raise {self._limit.key}={most}.")


class Batches(Generic[Item]):
    """Base of all batch streams: draws records from a Stream and reports its position."""

    def __init__(self, stream: Stream[Item]) -> None:
        self._stream = stream

    @property
    def skipped(self) -> int:
        """Number of items left out so far because they were too long."""
        return self._stream.skipped

    def state(self) -> bytes:
        """Returns the stream's position, as JSON; the same on every shard."""
        return self._stream.state()

    def restore(self, state: bytes) -> None:
        """Continues after the batch with this `data_state`.

        Raises:
          ValueError: the state belongs to another number of records or another seed.
        """
        self._stream.restore(state)
