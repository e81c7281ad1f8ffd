"""The embedded task 'sums': sums too large for mental arithmetic, which need a calculator, and answers to learn.

A problem is one operation, + - or *, on two values of three to five digits: the bare sum, or a short story. The key of
a sum is its expression. A small model can copy the values into a call of the calculator, but cannot compute the answer.
"""

import dataclasses
from collections.abc import Mapping

from podrl.data import template
from podrl.data.problem_generator import ProblemGenerator, RandomDraws
from podrl.data.problems import BOXES, FEWER, GAIN, HAS, LEFT, LOSE, MORE, NOW, OTHER, Story
from podrl.data.template import TextPart

DIGITS = (3, 5)  # least and largest number of digits of a value
_BARE = ("What is {a} {o} {b}?", "How much is {a}{o}{b}?", "{a} {o} {b} = ?", "{a}{o}{b}=")
_STORIES = {
    "+": ((HAS, GAIN, NOW), (HAS, MORE, OTHER)),
    "-": ((HAS, LOSE, LEFT), (HAS, FEWER, OTHER)),
    "*": ((BOXES, NOW),),
}


@dataclasses.dataclass(frozen=True)
class Sum:
    """One sum, with the text that asks for it.

    Attributes:
      question: bare sum, or a story and its question, in English.
      expression: sum as the calculator reads it, such as '4821*7703'.
      answer: value of the sum in decimal digits, 0 or more.
    """

    question: str
    expression: str
    answer: str

    @property
    def key(self) -> str:
        """The identity of the sum: its expression, without the wording."""
        return self.expression

    @property
    def fields(self) -> Mapping[str, str]:
        """The sum as a record of the task."""
        return {"question": self.question, "answer": self.answer, "expression": self.expression}

    def called(self) -> list[TextPart]:
        """Writes an answer that uses the calculator: the call, its output (which is not learned), and the answer."""
        call = f"{template.CALL_START}{self.expression}{template.CALL_END}"
        # The output is, character for character, the output that podrl.environments writes.
        output = f"\n{template.OUTPUT_START}{self.answer}{template.OUTPUT_END}\n\n"
        return [TextPart(call, learned=True), TextPart(output), template.answered(self.answer)]

    def guessed(self, draw: RandomDraws) -> list[TextPart]:
        """Writes a guess without the calculator: the answer's first digit, then random digits up to its length."""
        rest = "".join(str(draw.between(0, 9)) for _ in self.answer[1:])
        return [template.answered(self.answer[0] + rest)]


def _write(draw: RandomDraws) -> Sum:
    a, b = (_value(draw) for _ in range(2))
    operator = draw.one(tuple(_STORIES))
    if operator == "-":
        a, b = max(a, b), min(a, b)
    if draw.between(0, 1):
        question = draw.one(_BARE).format(a=a, b=b, o=operator)
    else:
        story = Story(draw)
        for wordings in draw.one(_STORIES[operator]):
            story.add_sentence(wordings, a=a, b=b)
        question = story.text
    value = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return Sum(question, f"{a}{operator}{b}", str(value))


def _value(draw: RandomDraws) -> int:
    digits = draw.between(*DIGITS)
    return draw.between(10 ** (digits - 1), 10**digits - 1)


GENERATOR = ProblemGenerator(_write, reasoned=False)
