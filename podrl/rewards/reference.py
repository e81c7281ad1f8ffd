"""The four reference rewards of the reasoning-and-answer template, and the accuracies an evaluation reports.

Source: the GSM8K recipe that Gemma's GRPO tutorials share. Every function takes `(prompts, completions, **fields)` with
lists of equal length and returns one float per completion; `answer` is the reference answer, a text or a number, or a
list of these of which the best counts.
"""

import collections
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from podrl.runtime.plain import references

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

# From a line's start to a line's end: reasoning, then an answer, then nothing but white space.
_FORMAT = re.compile(r"^\s*<reasoning>.+?</reasoning>.*?<answer>(?P<answer>.+?)</answer>\s*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"<answer>.*?(?P<number>[\d.]+)", re.DOTALL)


def answer_of(completion: str) -> str | None:
    """Extracts the text between the answer tags of a completion in the exact format; None in any other format."""
    match = _FORMAT.search(completion)
    return match["answer"] if match else None


def number_of(completion: str) -> float | None:
    """Finds the first number after `<answer>`, whatever the format; None when there is none."""
    match = _NUMBER.search(completion)
    return _number(match["number"]) if match else None


def exact_format(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    """Scores 3 when the completion keeps the format, else 0."""
    del prompts, fields
    return [3.0 if answer_of(completion) is not None else 0.0 for completion in completions]


def approximate_format(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    """Scores each of the four tags 0.5 when it occurs exactly once, else -0.5: from -2 to 2."""
    del prompts, fields
    return [sum(0.5 if completion.count(tag) == 1 else -0.5 for tag in TAGS) for completion in completions]


def answer(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **fields: Any) -> list[float]:
    """Scores the answer of a completion in the exact format.

    3 for the reference answer, 1.5 when they are equal without surrounding space, 0.5 when their ratio is within
    0.9-1.1, 0.25 within 0.8-1.2, -1 for any other number, -0.5 for what is no number, 0 without the format.
    """
    del prompts, fields
    return [
        max(_answer_score(answer_of(completion), one) for one in references(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def number(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **fields: Any) -> list[float]:
    """Scores 1.5 when the first number after `<answer>` equals the reference answer, else 0."""
    del prompts, fields
    return [
        1.5 if any(_equal(number_of(completion), one) for one in references(wanted)) else 0.0
        for completion, wanted in zip(completions, answer, strict=True)
    ]


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    fn.__name__: fn for fn in (exact_format, approximate_format, answer, number)
}


def accuracies(completion: str, truth: Any, *, has_format: bool = True) -> dict[str, float]:
    """1.0 or 0.0 for each of: 'answer' (first number after `<answer>` equals the reference answer), 'partial' (their
    ratio is within 0.9-1.1), 'format' (the exact format), where the task has one."""
    guess, truths = number_of(completion), references(truth)
    targets = [target for one in truths if (target := _number(one)) is not None]
    close = guess is not None and any(_within(guess, target, 0.9, 1.1) for target in targets)
    scores = {"answer": float(any(_equal(guess, one) for one in truths)), "partial": float(close)}
    return scores | ({"format": float(answer_of(completion) is not None)} if has_format else {})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimates the probability that at least one of k samples, drawn from n with `correct` right ones, is right.

    Unbiased estimator 1 - C(n - correct, k) / C(n, k) (arXiv 2107.03374, equation 1).

    Raises:
      ValueError: unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {correct} right in {n} samples: 1 <= k <= n and 0 <= correct <= n must hold.")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[str], right: Sequence[float]) -> float:
    """1 if the answer that most samples give, the first of equals, is right."""
    counts = collections.Counter(answers)
    best = max(answers, key=lambda answer: counts[answer])
    return right[list(answers).index(best)]


def _answer_score(guess: str | None, truth: str) -> float:
    if guess is None:
        return 0.0
    if guess == truth:
        return 3.0
    if guess.strip() == truth.strip():
        return 1.5
    value, target = _number(guess), _number(truth)
    if value is None or target is None:
        return -0.5
    if _within(value, target, 0.9, 1.1):
        return 0.5
    return 0.25 if _within(value, target, 0.8, 1.2) else -1.0


def _number(text: str) -> float | None:
    """Parses a finite decimal number; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _equal(value: float | None, truth: str) -> bool:
    return value is not None and value == _number(truth)


def _within(value: float, target: float, low: float, high: float) -> bool:
    """True if value / target lies in [low, high]; against 0, only 0 does."""
    return low <= value / target <= high if target else value == 0
