"""Endless streams of problems written from a seed: the same on every machine, with a tenth of the problems held out.

A kind of problem is a function that writes a problem from random draws. Two problems are the same if their keys are
equal. The problems whose key hashes to 0 modulo 10 are held out, so a held-out problem never differs from a training
problem in its wording alone.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from podrl.config import plural
from podrl.mappings import TaskFields

T = TypeVar("T")
Split = Literal["train", "held_out"]

HELD_OUT_MODULUS = 10
_STREAM = {"train": 0, "held_out": 1}


class Problem(Protocol):
    """A question with its answer."""

    @property
    def key(self) -> str:
        """The identity of the problem: equal for problems that differ only in names and wording."""
        ...

    @property
    def fields(self) -> TaskFields:
        """The fields of the problem's record: 'question', 'answer', and others that the task has."""
        ...


P = TypeVar("P", bound=Problem)


class RandomDraws:
    """Random draws from the raw words of numpy's PCG64: a new numpy may change its distributions, but not its words."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def between(self, low: int, high: int) -> int:
        """Draws an integer from low to high, both included."""
        assert low <= high, (low, high)
        return low + int(self._bits.random_raw()) % (high - low + 1)

    def one(self, choices: Sequence[T]) -> T:
        """Draws one of the choices, each with the same probability."""
        return choices[self.between(0, len(choices) - 1)]

    def two(self, choices: Sequence[T]) -> tuple[T, T]:
        """Draws two different elements of the choices, in random order."""
        first = self.between(0, len(choices) - 1)
        second = self.between(0, len(choices) - 2)
        return choices[first], choices[second + (second >= first)]

    def share(self) -> float:
        """Draws a number in [0, 1]; exactly 1 only by rounding, with a probability of 2**-54."""
        return self._bits.random_raw() / 2.0**64


def held_out(key: str) -> bool:
    """True for the keys of the held-out tenth of the problems, which training never sees."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0


class ProblemGenerator(Generic[P]):
    """The problems that one function writes.

    Attributes:
      reasoned: True if the problems' answers have the reference format, in which reasoning comes first.
    """

    def __init__(self, write: Callable[[RandomDraws], P], *, reasoned: bool = True) -> None:
        self._write, self.reasoned = write, reasoned

    def problem(self, split: Split, index: int, seed: int = 0) -> P:
        """Writes the problem at a position of an endless stream; positions may be read in any order.

        Args:
          split: 'train' or 'held_out'; the two streams share no key.
          index: position in the stream, 0 or more.
          seed: seed of the stream. Every seed gives another stream, with the same keys held out.

        Raises:
          ValueError: the split is unknown or the index is negative.
        """
        if split not in _STREAM:
            raise ValueError(f"Split {split!r} does not exist: use 'train' or 'held_out'.")
        if index < 0:
            raise ValueError(f"Problem index {index} must be 0 or more.")
        draw = RandomDraws(seed, _STREAM[split], index)
        while True:
            candidate = self._write(draw)
            if held_out(candidate.key) == (split == "held_out"):
                return candidate

    def distinct(self, split: Split, count: int, seed: int = 0) -> list[P]:
        """Returns the first `count` problems of a stream with different keys, as a fixed evaluation set.

        Raises:
          ValueError: the first 1000 + 100 * `count` problems of the stream have fewer different keys.
        """
        chosen: dict[str, P] = {}
        index = 0
        while len(chosen) < count:
            if index == 1000 + 100 * count:
                raise ValueError(
                    f"The task has only {plural(len(chosen), f'different {split} problem')}, fewer than the {count} "
                    "that eval.problems asks for: lower it."
                )
            found = self.problem(split, index, seed)
            chosen.setdefault(found.key, found)
            index += 1
        return list(chosen.values())

    def source(self, split: Split, size: int, seed: int = 0) -> "Problems[P]":
        """Returns the first `size` problems of a stream, as a source with random access.

        Raises:
          ValueError: `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"A source of {size} problems is empty: data.size must be at least 1.")
        return Problems(self, split, size, seed)


class Problems(Generic[P]):
    """The first problems of a stream, as a source with random access."""

    def __init__(self, generator: ProblemGenerator[P], split: Split, size: int, seed: int) -> None:
        self._generator, self._size, self._seed = generator, size, seed
        self._split: Split = split

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> P:
        return self._generator.problem(self._split, int(index), self._seed)

    def __repr__(self) -> str:
        return f"Problems(split={self._split!r}, size={self._size}, seed={self._seed})"
