"""Word problems for mental arithmetic: the embedded task 'problems'.

A problem is a chain of one to three additions, subtractions, multiplications or divisions, told as a short story. Every
value is an integer from 0 to 99. The key of a problem is its chain.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from podrl.data.problem_generator import ProblemGenerator, RandomDraws

STEPS = (1, 2, 2, 3)  # the number of a problem's steps is drawn from these numbers
LARGEST = 99

_PEOPLE = (
    *(("Tom", "He"), ("Ana", "She"), ("Ben", "He"), ("Mia", "She"), ("Sam", "He"), ("Eva", "She")),
    *(("Leo", "He"), ("Zoe", "She"), ("Max", "He"), ("Ivy", "She")),
)
_OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "toys", "marbles")
_CONTAINERS = ("boxes", "bags", "packs", "jars")

HAS = ("{who} has {a} {things}.", "{who} starts with {a} {things}.", "{who} finds {a} {things}.")
BOXES = ("{who} has {a} {boxes} of {b} {things}.", "{who} buys {a} {boxes} with {b} {things} each.")
GAIN = ("{they} buys {b} more.", "{they} finds {b} more.", "{other} gives {who} {b} more.")
LOSE = ("{they} gives {b} to {other}.", "{they} loses {b}.", "{they} sells {b}.")
NOW = ("How many {things} does {who} have now?", "How many {things} does {who} have in the end?")
LEFT = (*NOW, "How many {things} are left?")
MORE = ("{other} has {b} more than {who}.", "{other} has {b} more.")
FEWER = ("{other} has {b} fewer than {who}.", "{other} has {b} fewer.")
_TWICE = ("{other} has twice as many.", "{other} has twice as many as {who}.")
OTHER = ("How many {things} does {other} have?",)
_TOGETHER = ("How many {things} do they have together?", "How many {things} do both have in all?")
_SHARE = ("{they} shares them among {b} friends.", "{they} puts them in {b} equal {boxes}.")
_EACH = ("How many {things} are there for each?", "How many {things} is that in each part?")


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """One word problem with its solution.

    Attributes:
      question: the story and its question, in English.
      answer: final value in decimal digits, 0 to 99.
      steps: steps of the arithmetic in order, each as '25+17=42'.
    """

    question: str
    answer: str
    steps: tuple[str, ...]

    @property
    def reasoning(self) -> str:
        """Writes the solution as the model should: '25+17=42. 42-8=34.'."""
        return " ".join(f"{step}." for step in self.steps)

    @property
    def key(self) -> str:
        """The identity of the problem: its arithmetic, without names and wording."""
        return ";".join(self.steps)

    @property
    def fields(self) -> Mapping[str, str]:
        """The problem as a record of the task."""
        return {"question": self.question, "answer": self.answer, "solution": self.reasoning}


class Story:
    """A story under construction.

    Attributes:
      sentences: sentences of the story so far.
      steps: steps of its arithmetic so far, each as '25+17=42'.
      value: value that the arithmetic has reached.
    """

    def __init__(self, draw: RandomDraws) -> None:
        """Draws the people of the story, and the things that they have."""
        (who, they), (other, _) = draw.two(_PEOPLE)
        self._draw = draw
        self._words = {"who": who, "they": they, "other": other}
        self._words |= {"things": draw.one(_OBJECTS), "boxes": draw.one(_CONTAINERS)}
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.value = 0

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    def add_sentence(self, wordings: Sequence[str], **numbers: int) -> None:
        """Adds a sentence in one of the wordings; `numbers` fill the letters in its braces."""
        self.sentences.append(self._draw.one(wordings).format(**self._words, **numbers))

    def compute(self, left: int, operator: str, right: int) -> None:
        """Adds a step of arithmetic, and sets `value` to its result."""
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
        assert 0 <= result <= LARGEST, (left, operator, right)
        self.steps.append(f"{left}{operator}{right}={result}")
        self.value = result


def _write(draw: RandomDraws) -> WordProblem:
    story, left = Story(draw), draw.one(STEPS)
    if draw.between(0, 3) == 0:
        boxes, each = draw.between(2, 9), draw.between(2, 9)
        story.add_sentence(BOXES, a=boxes, b=each)
        story.compute(boxes, "*", each)
        left -= 1
    else:
        story.value = draw.between(2, LARGEST)
        story.add_sentence(HAS, a=story.value)
    while left > 1 and not (left == 2 and draw.between(0, 5) == 0):
        _change(draw, story)
        left -= 1
    _finish(draw, story, left)
    return WordProblem(story.text, str(story.value), tuple(story.steps))


def _change(draw: RandomDraws, story: Story) -> str:
    """Adds a gain or a loss to the story; returns 'gain' or 'loss'."""
    value = story.value
    gains = value < LARGEST if value < 1 else value < LARGEST and draw.between(0, 1) == 0
    if gains:
        amount = draw.between(1, LARGEST - value)
        story.add_sentence(GAIN, b=amount)
        story.compute(value, "+", amount)
        return "gain"
    amount = draw.between(1, value)
    story.add_sentence(LOSE, b=amount)
    story.compute(value, "-", amount)
    return "loss"


def _finish(draw: RandomDraws, story: Story, left: int) -> None:
    """Adds the last `left` steps (0, 1 or 2) and the question to the story."""
    value = story.value
    if left == 0:
        story.add_sentence(NOW[:1])
        return
    if left == 2:
        if value < 1 or 2 * value + 1 > LARGEST:
            _change(draw, story)
            _finish(draw, story, 1)
            return
        more = draw.between(1, LARGEST - 2 * value)
        story.add_sentence(MORE, b=more)
        story.add_sentence(_TOGETHER)
        story.compute(value, "+", more)
        story.compute(value, "+", story.value)
        return
    divisors = [d for d in range(2, 10) if value and value % d == 0]
    kind = draw.one(("change", "change", "change", "more", "fewer", "twice", "share"))
    if kind == "more" and value < LARGEST:
        more = draw.between(1, LARGEST - value)
        story.add_sentence(MORE, b=more)
        story.add_sentence(OTHER)
        story.compute(value, "+", more)
    elif kind == "fewer" and value > 0:
        fewer = draw.between(1, value)
        story.add_sentence(FEWER, b=fewer)
        story.add_sentence(OTHER)
        story.compute(value, "-", fewer)
    elif kind == "twice" and 2 * value <= LARGEST:
        story.add_sentence(_TWICE)
        story.add_sentence(OTHER)
        story.compute(value, "*", 2)
    elif kind == "share" and divisors:
        parts = draw.one(divisors)
        story.add_sentence(_SHARE, b=parts)
        story.add_sentence(_EACH)
        story.compute(value, "/", parts)
    else:
        story.add_sentence(LEFT if _change(draw, story) == "loss" else NOW)


GENERATOR = ProblemGenerator(_write)
