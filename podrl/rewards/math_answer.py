"""Scores mathematical equality with the reference answer, by math-verify (extra [math])."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from podrl.config import install
from podrl.rewards import numbers
from podrl.rewards.answers import closed_answer
from podrl.runtime.plain import references

# Seconds in which math-verify must read a text, or compare two. It ends longer work by SIGALRM, so it must run on the
# main thread.
_LIMIT_S = 5
# Largest relative difference of values that count as equal. math-verify alone would round them to six decimals. It
# computes values with 53 bits, so equal values may differ by rounding.
_RELATIVE = 1e-12
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,9})(?!\w|\.\d)")


# Mathematics in Unicode, which math-verify ignores.
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_ROOT = re.compile("\u221a ?(?:([0-9]+|[A-Za-z])|\\(([^()]{1,200})\\))")
_RELATIONS = str.maketrans({"\u2264": r"\le ", "\u2265": r"\ge ", "\u221e": r"\infty "})


# Beginnings of answers that deny a value ('not 5'), and of answers that give the value of an unknown ('x = 5').
_NEGATED = re.compile(r"\s*(?:is\s+|it\s+is\s+)?(?:not|isn't|never|neither)\b", re.IGNORECASE)
_NAMED = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=(?!=)")
# Plain numbers that operators join, as in '1 + 1': a side of an equation whose value is known at once.
_CALCULATES = re.compile(r"\s*[0-9.]+(?:\s*[-+*/]\s*[0-9.]+)+\s*")


def math_equal(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], **fields: object
) -> list[float]:
    r"""Scores 1 if the answer equals a reference as mathematics (1/2, 0.5 and \frac{1}{2} are equal), else 0.

    The answer is the text between the last `<answer>` tags. In a completion without these tags it is the last boxed or
    final expression that math-verify finds. Plain numbers are compared exactly (`podrl.rewards.numbers`). If the
    answer is an equation such as 'x = 12', and the reference is not an equation, every side that is a value must equal
    the reference.

    Raises:
      ImportError: math-verify is not installed.
      ValueError: a reference answer is not mathematics; the message quotes the answer.
    """
    del prompts, fields
    return [
        max(float(_equal(truth, completion)) for truth in references(several))
        for completion, several in zip(completions, answer, strict=True)
    ]


def _equal(truth: str, completion: str) -> bool:
    truth = truth.replace("\\$", "")  # here a dollar sign means money, not mathematics
    gold = _parsed(truth if "$" in truth or "\\boxed" in truth else f"${truth}$")
    if not gold:
        raise ValueError(f"the reference answer {truth!r} is not mathematics that math-verify can read")
    try:
        return _answers(completion, gold, truth)
    except Exception:  # noqa: BLE001 - sympy may raise any error on a model's text; the answer is then wrong
        return False


def _answers(completion: str, gold: list[Any], truth: str) -> bool:
    inside = closed_answer(completion)
    guess = None if inside is None else inside.strip().strip("$").strip()
    # A bare '34' or '\frac{1}{2}' is read as mathematics only between dollar signs.
    found = _parsed(completion) if guess is None else _parsed(f"${guess}$") or _parsed(guess)
    text = guess if guess is not None else next((one for one in reversed(found) if isinstance(one, str)), "")
    if _NEGATED.match(text) or len({_named(truth), _named(text)} - {""}) > 1:
        return False
    wanted, number = numbers.of_reference(truth), numbers.of_reference(text)
    *others, last = re.split(r"(?<![<>!:])=", text) if "=" not in truth else [text]
    if wanted is not None and number is not None:
        return number.equals(wanted) and all(
            _same(gold, _parsed(f"${side}$")) for side in others if _CALCULATES.fullmatch(side)
        )
    if (number is not None and numbers.has_unknowns(truth)) or (wanted is not None and numbers.has_unknowns(last)):
        return False  # math-verify would see a unit in '4ab', and a value in 'x + y = 7'
    if others:
        return all(_same(gold, _parsed(f"${side}$")) for side in [*filter(_is_value, others), last])
    return _same(gold, found) and {_brackets(truth), _brackets(text)} != {"set", "ordered"}


def _named(text: str) -> str:
    """Finds the unknown whose value an equation such as 'x = 5' gives; '' for other texts and for several equations."""
    found = _NAMED.match(text.strip().strip("$"))
    return found[1] if found and text.count("=") == 1 else ""


def _parsed(text: str) -> list[Any]:
    """Reads a text with math-verify; returns the expressions and the text of the last one, or [] if there are none.

    Raises:
      ImportError: math-verify is not installed.
    """
    try:
        import math_verify
    except ImportError as error:
        raise ImportError(f"reward.fns='math_equal' needs math-verify: {install('math')}.") from error
    text = _RAISED.sub(lambda found: "^{" + unicodedata.normalize("NFKC", found[0]).replace("\u2212", "-") + "}", text)
    text = _ROOT.sub(r"\\sqrt{\1\2}", text.translate(_RELATIONS))
    text = numbers.with_products(_SCIENTIFIC.sub(r"\1\\cdot10^{\2}", text))
    return math_verify.parse(text, parsing_timeout=_LIMIT_S)


def _same(gold: list[Any], found: list[Any]) -> bool:
    import math_verify

    return bool(found) and math_verify.verify(gold, found, timeout_seconds=_LIMIT_S) and not _apart(gold, found)


def _apart(gold: list[Any], found: list[Any]) -> bool:
    """Returns True if both are single finite values that differ by more than rounding."""
    import sympy

    values = [one[0] for one in (gold, found) if isinstance(one[0], sympy.Expr) and one[0].is_number]
    mine, theirs = [sympy.N(value, 40) for value in values] if len(values) == 2 else (sympy.nan, sympy.nan)
    if not (mine.is_finite and theirs.is_finite):
        return False
    return bool(abs(mine - theirs) > _RELATIVE * max(abs(mine), abs(theirs)))


def _is_value(side: str) -> bool:
    """True if a side of an equation has digits, and has no names of variables or functions."""
    bare = re.sub(r"\\[A-Za-z]+", "", side)
    return re.search(r"[0-9]", bare) is not None and re.search(r"[A-Za-z]", bare) is None


def _brackets(text: str) -> str:
    r"""Returns 'set' for a text in \{ \}, where order is free, 'ordered' for a point or an interval, and else ''."""
    bare = text.strip().strip("$").strip()
    return "set" if bare.startswith("\\{") else "ordered" if bare.startswith(("(", "[")) else ""
