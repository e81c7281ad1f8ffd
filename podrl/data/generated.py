"""Problems written from seeds, endlessly: the same on every machine, with a tenth of them held out.

A kind of problem is a function that writes one from random draws. Two problems are the same where their keys are;
those whose key hashes to 0 modulo 10 are held out, so that none of them differs from a training problem in its wording
alone.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
Split = Literal["train", "held_out"]

HELD_OUT_MODULUS = 10
_STREAM = {"train": 0, "held_out": 1}


class Problem(Protocol):
    """A question with what is known of its answer."""

    @property
    def key(self) -> str:
        """The identity of a problem, without names and wording."""
        ...

    @property
    def fields(self) -> Mapping[str, Any]:
        """'question', 'answer' and what else a record of the task has."""
        ...


P = TypeVar("P", bound=Problem)


class Draw:
    """Draws from numpy's raw PCG64 words, whose sequence numpy keeps fixed for ever (its distributions may change)."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        assert low <= high, (low, high)
        return low + int(self._bits.random_raw()) % (high - low + 1)

    def one(self, choices: Sequence[T]) -> T:
        """One of the choices, each as likely."""
        return choices[self.between(0, len(choices) - 1)]

    def two(self, choices: Sequence[T]) -> tuple[T, T]:
        """Two different ones of the choices."""
        first = self.between(0, len(choices) - 1)
        second = self.between(0, len(choices) - 2)
        return choices[first], choices[second + (second >= first)]

    def share(self) -> float:
        """A number in [0, 1)."""
        return self._bits.random_raw() / 2.0**64


def held_out(key: str) -> bool:
    """True for problems of the held-out tenth, which training never sees."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0


class Generator(Generic[P]):
    """The problems that one function writes.

    Attributes:
      reasoned: whether their answers have the reference format, in which reasoning comes first.
    """

    def __init__(self, write: Callable[[Draw], P], *, reasoned: bool = True) -> None:
        self._write, self.reasoned = write, reasoned

    def problem(self, split: Split, index: int, seed: int = 0) -> P:
        """The problem at a position of an endless stream, in any order of access.

        Args:
          split: 'train' or 'held_out'; the two share no key.
          index: position, 0 or more.
          seed: another seed is another stream, with the same keys held out.

        Raises:
          ValueError: unknown split or negative index.
        """
        if split not in _STREAM:
            raise ValueError(f"Split {split!r} does not exist: use 'train' or 'held_out'.")
        if index < 0:
            raise ValueError(f"Problem index {index} must be 0 or more.")
        draw = Draw(seed, _STREAM[split], index)
        while True:
            candidate = self._write(draw)
            if held_out(candidate.key) == (split == "held_out"):
                return candidate

    def distinct(self, split: Split, count: int, seed: int = 0) -> list[P]:
        """The first `count` problems of a stream with different keys: a fixed evaluation set."""
        chosen: dict[str, P] = {}
        index = 0
        while len(chosen) < count:
            found = self.problem(split, index, seed)
            chosen.setdefault(found.key, found)
            index += 1
        return list(chosen.values())

    def source(self, split: Split, size: int, seed: int = 0) -> "Problems[P]":
        """The first `size` problems of a stream, as Grain reads them.

        Raises:
          ValueError: a size of 0.
        """
        if size < 1:
            raise ValueError(f"A source of {size} problems is empty: data.size must be at least 1.")
        return Problems(self, split, size, seed)


class Problems(Generic[P]):
    """A random-access source of the first problems of a stream."""

    def __init__(self, generator: Generator[P], split: Split, size: int, seed: int) -> None:
        self._generator, self._size, self._seed = generator, size, seed
        self._split: Split = split

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> P:
        return self._generator.problem(self._split, int(index), self._seed)

    def __repr__(self) -> str:
        return f"Problems(split={self._split!r}, size={self._size}, seed={self._seed})"
