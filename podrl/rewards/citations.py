"""Rewards for answers that cite a search's results in DR-Tulu's form: `<cite id="5f1c09ab-0">statement</cite>`."""

import re
from collections.abc import Sequence

from podrl.mappings import TurnRecord
from podrl.rewards.answers import closed_answer

# The quantifiers are possessive (`++`): they do not backtrack, so no text of a model makes a match slow.
_CITED = re.compile(r"""<cite\s++id\s*+=\s*+(["']?+)([^"'<>]++)\1\s*+>((?:[^<]|<(?!/?+cite\b))*+)</cite>""")
_OPENED = re.compile(r"""<(?:snippet|webpage)\s++id=["']?+([^"'\s<>]++)""")
_DOCUMENT = re.compile(
    r"""<(snippet|webpage)\s++id=["']?+([^"'\s<>]++)["']?+>((?:[^<]|<(?!/?+(?:snippet|webpage)\b))*+)</\1>"""
)
_WORD = re.compile(r"\d++(?:[.,]\d++)*+|[^\W\d_]++")


def citations(
    prompts: Sequence[str], completions: Sequence[str], sample_text: Sequence[str], **fields: object
) -> list[float]:
    """Scores the share of an answer's cited statements that the cited documents support, 0 to 1; 0 if it cites nothing.

    The answer is the text between the last pair of answer tags. A statement is supported if every id in its tag is the
    id of a document that a tool returned in this sample, and if these documents have every number of the statement and
    at least half of its other words. Ids are separated by commas. The id of a document that the model wrote itself
    supports nothing. Text outside the cite tags is ignored, so one supported statement scores 1, whatever else the
    answer says.

    Args:
      prompts: prompts, which are not read.
      completions: the model's own words in each sample.
      sample_text: each whole sample, with the outputs of its tools.
      fields: other fields, which are not read.
    """
    del prompts, fields
    return [_share(own, whole) for own, whole in zip(completions, sample_text, strict=True)]


def citation_format(
    prompts: Sequence[str], completions: Sequence[str], turns: Sequence[Sequence[TurnRecord]], **fields: object
) -> list[float]:
    """Scores 0.5 for an answer in its tags, plus 0.3 for a citation in it, plus 0.2 for a tool call that did not fail.

    These are the weights of DR-Tulu's format reward. `turns` holds the records of each sample's turns.
    """
    del prompts, fields
    scores = []
    for own, sample in zip(completions, turns, strict=True):
        answer = closed_answer(own)
        called = any(turn.get("failed") == "" for turn in sample)
        scores.append(0.5 * (answer is not None) + 0.3 * bool(_statements(answer or "")) + 0.2 * called)
    return scores


def _statements(answer: str) -> list[tuple[list[str], str]]:
    """Finds the cited statements of an answer, as (ids, statement); empty statements do not count."""
    found = ((found[2].split(","), found[3].strip()) for found in _CITED.finditer(answer))
    return [([one.strip() for one in ids], statement) for ids, statement in found if statement]


def _share(own: str, whole: str) -> float:
    statements = _statements(closed_answer(own) or "")
    invented = set(_OPENED.findall(own))
    documents = {key: text for _, key, text in _DOCUMENT.findall(whole) if key not in invented}
    supported = [
        all(one in documents for one in ids) and _supports(" ".join(documents[one] for one in ids), statement)
        for ids, statement in statements
    ]
    return sum(supported) / len(supported) if supported else 0.0


def _supports(documents: str, statement: str) -> bool:
    evidence, claim = _words(documents), _words(statement)
    words = {word for word in claim if not word[0].isdigit()}
    return bool(claim) and claim - words <= evidence and 2 * len(words & evidence) >= len(words)


def _words(text: str) -> set[str]:
    return {word.replace(",", "") for word in _WORD.findall(text.lower())}
