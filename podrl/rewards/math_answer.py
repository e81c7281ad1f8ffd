"""Scores mathematical equality with the reference answer, by math-verify (extra [math])."""

from collections.abc import Sequence
from typing import Any

from podrl.runtime.plain import references

# Seconds for one answer; math-verify ends a comparison that takes longer by SIGALRM, so it needs a main thread.
_LIMIT_S = 5


def math_equal(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **fields: Any) -> list[float]:
    """Scores 1 if the answer equals the reference as mathematics (1/2, 0.5 and \frac{1}{2} are equal), else 0.

    The answer is what stands between the last `<answer>` tags, or in a completion without them what math-verify finds:
    the last boxed or final expression.

    Raises:
      ImportError: math-verify is not installed.
      ValueError: a reference answer that is no mathematics; names it.
    """
    del prompts, fields
    try:
        import math_verify
    except ImportError as error:
        raise ImportError("reward.fns='math_equal' needs math-verify: pip install 'podrl[math]'.") from error

    def parsed(text: str) -> Any:
        return math_verify.parse(text, parsing_timeout=_LIMIT_S)

    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        golds = []
        for truth in references(wanted):
            # A bare '34' or '\frac{1}{2}' is read as mathematics once it stands in dollars.
            golds.append(parsed(truth if "$" in truth or "\\boxed" in truth else f"${truth}$"))
            if not golds[-1]:
                raise ValueError(f"the reference answer {truth!r} is no mathematics that math-verify can read")
        guess = _answer_of(completion)
        found = parsed(completion) if guess is None else parsed(f"${guess}$") or parsed(guess)
        right = (math_verify.verify(gold, found, timeout_seconds=_LIMIT_S) for gold in golds)
        rewards.append(float(bool(found) and any(right)))
    return rewards


def _answer_of(completion: str) -> str | None:
    """Extracts the text between the last pair of answer tags, without enclosing dollars; None without a pair."""
    before, opened, rest = completion.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    del before
    return inside.strip().strip("$").strip() if opened and closed else None
