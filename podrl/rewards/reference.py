"""The reference rewards of the reasoning-and-answer template, and the accuracies that an evaluation reports.

Source: the GSM8K recipe that Gemma's GRPO tutorials share. Every reward takes `(prompts, completions, **fields)` with
lists of equal length and returns one float per completion. The field `answer` has a reference answer for each
completion, or a list of several.
"""

import collections
import math
import re
from collections.abc import Callable, Sequence

from podrl.rewards.answers import is_right, last_answer, number_of, vote
from podrl.rewards.numbers import Number, of_reference, read
from podrl.runtime.plain import references

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

# The first tag of the exact format stands at a line's start, the last tag at a line's end.
_OPENS = re.compile(r"^[^\S\n]*+<reasoning>", re.MULTILINE)
_ENDS = re.compile(r"</answer>[^\S\n]*+$", re.MULTILINE)
_DIGITS = re.compile(r"[\d.]+")


def answer_of(completion: str) -> str | None:
    """Extracts the text between the answer tags of a completion in the exact format; None in any other format.

    The format begins at a line's start and ends at a line's end: reasoning in its tags, then an answer in its tags, and
    perhaps text between the two. It is enough to look for the first occurrence of each tag after the previous tag:
    if later occurrences fit the format, the first occurrences fit, too.
    """
    opened = _OPENS.search(completion)
    # The search begins one character later, because the reasoning has at least one character.
    reasoned = completion.find("</reasoning>", opened.end() + 1) if opened else -1
    answered = completion.find("<answer>", reasoned + len("</reasoning>")) if reasoned >= 0 else -1
    begin = answered + len("<answer>")
    ended = _ENDS.search(completion, begin + 1) if answered >= 0 else None
    return completion[begin : ended.start()] if ended else None


def exact_format(prompts: Sequence[str], completions: Sequence[str], **fields: object) -> list[float]:
    """Scores 3 when the completion keeps the format, else 0."""
    del prompts, fields
    return [3.0 if answer_of(completion) is not None else 0.0 for completion in completions]


def approximate_format(prompts: Sequence[str], completions: Sequence[str], **fields: object) -> list[float]:
    """Scores each of the four tags 0.5 when it occurs exactly once, else -0.5: from -2 to 2."""
    del prompts, fields
    return [sum(0.5 if completion.count(tag) == 1 else -0.5 for tag in TAGS) for completion in completions]


def answer(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], **fields: object
) -> list[float]:
    """Scores the answer of a completion in the exact format; with several references, the best score counts.

    3: the answer is the reference.
    1.5: answer and reference are equal without the space around them.
    0.5: the ratio of their numbers is within 0.9-1.1.
    0.25: the ratio is within 0.8-1.2.
    -1: the answer is any other number.
    -0.5: the answer or the reference is not a number.
    0: the completion does not have the format.
    """
    del prompts, fields
    found = zip(map(answer_of, completions), answer, strict=True)
    return [max(_answer_score(guess, one) for one in references(truth)) for guess, truth in found]


def number(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], **fields: object
) -> list[float]:
    """Scores 1.5 when the number in the last answer tags equals a reference answer, else 0.

    The tags need not be closed. Numbers are read as `podrl.rewards.numbers.read` does.
    """
    del prompts, fields
    found = zip(map(number_of, completions), answer, strict=True)
    return [
        1.5 if any(_equal(guess, of_reference(one)) for one in references(truth)) else 0.0 for guess, truth in found
    ]


def recipe_number(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], **fields: object
) -> list[float]:
    """Scores 1.5 when the first digits and points after the first `<answer>` are a reference answer, else 0.

    This is the recipe's pattern. It has no signs, separators or fractions: it reads '-5' as 5, '1,200' as 1 and '1/2'
    as 1. `number` reads all of them.
    """
    del prompts, fields
    scores = []
    for completion, truth in zip(completions, answer, strict=True):
        match = _DIGITS.search(completion.partition("<answer>")[2])
        guess = _decimal(match[0]) if match else None
        scores.append(1.5 if guess is not None and guess in map(_decimal, references(truth)) else 0.0)
    return scores


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    fn.__name__: fn for fn in (exact_format, approximate_format, answer, number, recipe_number)
}
# The rewards of a job that names no reward functions.
DEFAULT = ("exact_format", "approximate_format", "answer", "number")


def accuracies(completion: str, truth: object, *, has_format: bool = True) -> dict[str, float]:
    """Compares the text in a completion's last answer tags, which need not be closed, with the reference answer.

    Returns:
      1.0 or 0.0 for each of: 'answer' (the same number, or the same text if the reference is not a number), 'partial'
      (the answer is right, or the ratio of the numbers is within 0.9-1.1), and, if `has_format`, 'format' (the
      completion has the exact format). If there are several references, it is enough to match one of them.
    """
    answer = last_answer(completion)
    guess = None if answer is None else read(answer)
    right = close = False
    for one in references(truth):
        target = of_reference(one)
        right |= is_right(answer, one)
        close |= guess is not None and target is not None and guess.close(target, 90, 110)
    scores = {"answer": float(right), "partial": float(right or close)}
    return scores | ({"format": float(answer_of(completion) is not None)} if has_format else {})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimates the probability that at least one of k samples is right, from n samples with `correct` right ones.

    Unbiased estimator 1 - C(n - correct, k) / C(n, k) (arXiv 2107.03374, equation 1).

    Raises:
      ValueError: 1 <= k <= n or 0 <= correct <= n does not hold.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {correct} right in {n} samples: 1 <= k <= n and 0 <= correct <= n must hold.")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[str], right: Sequence[float]) -> float:
    """Looks up whether the most frequent answer is right; of equally frequent answers the first counts.

    Args:
      answers: answer of each sample. Numbers are equal in any form (`podrl.rewards.answers.vote`).
      right: 1.0 or 0.0 for each sample: whether its answer is right.

    Returns:
      The value of `right` for the first sample with the most frequent answer.
    """
    votes = list(map(vote, answers))
    counts = collections.Counter(votes)
    return right[votes.index(max(votes, key=counts.__getitem__))]


def _answer_score(guess: str | None, truth: str) -> float:
    if guess is None:
        return 0.0
    if guess == truth:
        return 3.0
    if guess.strip() == truth.strip():
        return 1.5
    value, target = read(guess), of_reference(truth)
    if value is None or target is None:
        return -0.5
    if value.close(target, 90, 110):
        return 0.5
    return 0.25 if value.close(target, 80, 120) else -1.0


def _equal(value: Number | None, target: Number | None) -> bool:
    return value is not None and target is not None and value.equals(target)


def _decimal(text: str) -> float | None:
    """Parses a finite decimal number; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
