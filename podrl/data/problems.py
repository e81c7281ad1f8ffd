"""The embedded task: which word problems exist, and which of them training never sees.

A problem is a chain of one to three additions, subtractions, multiplications or divisions, every value 0 to 99, told
as a short story. Its key is that chain; problems whose key hashes to 0 modulo 10 are held out, so that no held-out
problem differs from a training problem in its wording alone.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

T = TypeVar("T")
Split = Literal["train", "held_out"]

STEPS = (1, 2, 2, 3)
LARGEST = 99
HELD_OUT_MODULUS = 10
_STREAM = {"train": 0, "held_out": 1}

_PEOPLE = (
    *(("Tom", "He"), ("Ana", "She"), ("Ben", "He"), ("Mia", "She"), ("Sam", "He"), ("Eva", "She")),
    *(("Leo", "He"), ("Zoe", "She"), ("Max", "He"), ("Ivy", "She")),
)
_OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "toys", "marbles")
_CONTAINERS = ("boxes", "bags", "packs", "jars")

_HAS = ("{who} has {a} {things}.", "{who} starts with {a} {things}.", "{who} finds {a} {things}.")
_BOXES = ("{who} has {a} {boxes} of {b} {things}.", "{who} buys {a} {boxes} with {b} {things} each.")
_GAIN = ("{they} buys {b} more.", "{they} finds {b} more.", "{other} gives {who} {b} more.")
_LOSE = ("{they} gives {b} to {other}.", "{they} loses {b}.", "{they} sells {b}.")
_NOW = ("How many {things} does {who} have now?", "How many {things} does {who} have in the end?")
_LEFT = (*_NOW, "How many {things} are left?")
_MORE = ("{other} has {b} more than {who}.", "{other} has {b} more.")
_FEWER = ("{other} has {b} fewer than {who}.", "{other} has {b} fewer.")
_TWICE = ("{other} has twice as many.", "{other} has twice as many as {who}.")
_OTHER = ("How many {things} does {other} have?",)
_TOGETHER = ("How many {things} do they have together?", "How many {things} do both have in all?")
_SHARE = ("{they} shares them among {b} friends.", "{they} puts them in {b} equal {boxes}.")
_EACH = ("How many {things} are there for each?", "How many {things} is that in each part?")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One word problem with its solution.

    Attributes:
      question: the story and its question, in English.
      answer: the final value in decimal digits, 0 to 99.
      steps: the arithmetic in order, each as '25+17=42'; the first operand of a step is the value reached before it.
    """

    question: str
    answer: str
    steps: tuple[str, ...]

    @property
    def reasoning(self) -> str:
        """The solution as a model is to write it: '25+17=42. 42-8=34.'."""
        return " ".join(f"{step}." for step in self.steps)

    @property
    def key(self) -> str:
        """What makes the problem this problem, whatever names and wording it is told in."""
        return ";".join(self.steps)


def held_out(key: str) -> bool:
    """Whether the problem with this key belongs to the held-out tenth, never to training."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0


def problem(split: Split, index: int, seed: int = 0) -> Problem:
    """The problem at a position of an endless stream, the same on every machine and in any order of access.

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
    draw = _Draw(seed, _STREAM[split], index)
    while True:
        candidate = _write(draw)
        if held_out(candidate.key) == (split == "held_out"):
            return candidate


def distinct(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """The first `count` problems of a stream with different keys: a fixed evaluation set."""
    chosen: dict[str, Problem] = {}
    index = 0
    while len(chosen) < count:
        found = problem(split, index, seed)
        chosen.setdefault(found.key, found)
        index += 1
    return list(chosen.values())


class Problems:
    """A random-access source of `size` problems, as Grain reads it."""

    def __init__(self, split: Split, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"A source of {size} problems is empty: data.size must be at least 1.")
        self._split: Split = split
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Problem:
        return problem(self._split, int(index), self._seed)

    def __repr__(self) -> str:
        return f"Problems(split={self._split!r}, size={self._size}, seed={self._seed})"


class _Draw:
    """Draws from numpy's raw PCG64 words, whose sequence numpy keeps fixed for ever (its distributions may change)."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        assert low <= high, (low, high)
        return low + int(self._bits.random_raw()) % (high - low + 1)

    def one(self, choices: Sequence[T]) -> T:
        return choices[self.between(0, len(choices) - 1)]


class _Story:
    """A story under construction: sentences so far, arithmetic so far, the value reached."""

    def __init__(self, draw: _Draw) -> None:
        (who, they), (other, _) = _two_people(draw)
        self._draw = draw
        self._words = {"who": who, "they": they, "other": other}
        self._words |= {"things": draw.one(_OBJECTS), "boxes": draw.one(_CONTAINERS)}
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.value = 0

    def tell(self, wordings: Sequence[str], **numbers: int) -> None:
        self.sentences.append(self._draw.one(wordings).format(**self._words, **numbers))

    def compute(self, left: int, operator: str, right: int) -> None:
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
        assert 0 <= result <= LARGEST, (left, operator, right)
        self.steps.append(f"{left}{operator}{right}={result}")
        self.value = result


def _two_people(draw: _Draw) -> tuple[tuple[str, str], tuple[str, str]]:
    first = draw.between(0, len(_PEOPLE) - 1)
    second = draw.between(0, len(_PEOPLE) - 2)
    return _PEOPLE[first], _PEOPLE[second + (second >= first)]


def _write(draw: _Draw) -> Problem:
    story, left = _Story(draw), draw.one(STEPS)
    if draw.between(0, 3) == 0:
        boxes, each = draw.between(2, 9), draw.between(2, 9)
        story.tell(_BOXES, a=boxes, b=each)
        story.compute(boxes, "*", each)
        left -= 1
    else:
        story.value = draw.between(2, LARGEST)
        story.tell(_HAS, a=story.value)
    while left > 1 and not (left == 2 and draw.between(0, 5) == 0):
        _change(draw, story)
        left -= 1
    _finish(draw, story, left)
    return Problem(" ".join(story.sentences), str(story.value), tuple(story.steps))


def _change(draw: _Draw, story: _Story) -> str:
    """One gain or loss; returns which."""
    value = story.value
    gains = value < LARGEST if value < 1 else value < LARGEST and draw.between(0, 1) == 0
    if gains:
        amount = draw.between(1, LARGEST - value)
        story.tell(_GAIN, b=amount)
        story.compute(value, "+", amount)
        return "gain"
    amount = draw.between(1, value)
    story.tell(_LOSE, b=amount)
    story.compute(value, "-", amount)
    return "loss"


def _finish(draw: _Draw, story: _Story, left: int) -> None:
    """The last `left` steps (0, 1 or 2) and the question."""
    value = story.value
    if left == 0:
        story.tell(_NOW[:1])
        return
    if left == 2:
        if value < 1 or 2 * value + 1 > LARGEST:
            _change(draw, story)
            _finish(draw, story, 1)
            return
        more = draw.between(1, LARGEST - 2 * value)
        story.tell(_MORE, b=more)
        story.tell(_TOGETHER)
        story.compute(value, "+", more)
        story.compute(value, "+", story.value)
        return
    divisors = [d for d in range(2, 10) if value and value % d == 0]
    kind = draw.one(("change", "change", "change", "more", "fewer", "twice", "share"))
    if kind == "more" and value < LARGEST:
        more = draw.between(1, LARGEST - value)
        story.tell(_MORE, b=more)
        story.tell(_OTHER)
        story.compute(value, "+", more)
    elif kind == "fewer" and value > 0:
        fewer = draw.between(1, value)
        story.tell(_FEWER, b=fewer)
        story.tell(_OTHER)
        story.compute(value, "-", fewer)
    elif kind == "twice" and 2 * value <= LARGEST:
        story.tell(_TWICE)
        story.tell(_OTHER)
        story.compute(value, "*", 2)
    elif kind == "share" and divisors:
        parts = draw.one(divisors)
        story.tell(_SHARE, b=parts)
        story.tell(_EACH)
        story.compute(value, "/", parts)
    else:
        story.tell(_LEFT if _change(draw, story) == "loss" else _NOW)
