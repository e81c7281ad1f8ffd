"""Scores text against a record's reference: choices, equality, F1, ROUGE-L, regular expressions, JSON schemas."""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from podrl.config import install, section
from podrl.rewards.answers import last_answer
from podrl.runtime import plain
from podrl.storage.regular import regular

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORDS = re.compile(r"\w+|[^\w\s]")
_FENCE = re.compile(r"\A\s*```(?:json)?[^\S\n]*+\n(.*?)```\s*\Z", re.DOTALL | re.IGNORECASE)


@section("reward.text")
@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Settings of the rewards that compare text: where the answer is in a completion, and what it is compared with.

    Attributes:
      extract: regular expression that finds the answer: the last match in the completion, or the first group of this
        match if there is a group. A completion without a match scores 0. '' takes the whole completion.
      answer: the record's field with the reference: a text, or a list of texts, each of which is accepted.
      normalise: True to ignore case, punctuation and articles, as SQuAD does.
      choices: the letters that an answer to a multiple-choice question may name.
      pattern: regular expression that 'regex' searches for in the answer; '' takes the record's field 'pattern'.
      schema: file with the JSON schema of 'json_schema'; '' takes the record's field 'schema'.
    """

    extract: str = r"(?s)<answer>((?:[^<]|<(?!/?answer>))*+)</answer>"  # from the last opening tag before the end tag
    answer: str = "answer"
    normalise: bool = True
    choices: str = "ABCDEFGHIJ"
    pattern: str = ""
    schema: str = ""

    def __post_init__(self) -> None:
        for key in ("extract", "pattern"):
            try:
                re.compile(getattr(self, key))
            except re.error as error:
                raise ValueError(
                    f"reward.text.{key}={getattr(self, key)!r} is not a regular expression: {error}."
                ) from None
        if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices):
            raise ValueError(f"reward.text.choices={self.choices!r} must be two or more different letters.")

    def answer_of(self, completion: str) -> str | None:
        """Returns the part of a completion that is compared; None if `extract` does not match."""
        if not self.extract:
            return completion.strip()
        found = collections.deque(re.finditer(self.extract, completion), maxlen=1)
        return (found[0][1 if found[0].re.groups else 0] or "").strip() if found else None

    def vote_of(self, completion: str) -> str:
        """Returns the text that stands for a completion when a majority vote counts equal answers.

        The text is the answer that `extract` finds; else the text after the last `<answer>`; else the whole completion.
        """
        return self.answer_of(completion) or last_answer(completion) or completion

    def words(self, text: str) -> list[str]:
        """Splits a text into the words that are compared."""
        if not self.normalise:
            return _WORDS.findall(text)
        return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def choice(answer: str, reference: str, config: TextConfig) -> float:
    """Scores 1 if the answer names the reference's letter and no other letter ('B', '(B)' or 'B) Paris'), else 0.

    Raises:
      ValueError: the reference is not one of `config.choices`.
    """
    letters = "".join(map(re.escape, config.choices))
    if reference.strip() not in tuple(config.choices):
        raise ValueError(f"the reference {reference!r} is none of the letters {config.choices!r} (reward.text.choices)")
    named = set(re.findall(rf"(?<![\w'])([{letters}])(?![\w'])", answer))
    return float(named == {reference.strip()})


def exact_match(answer: str, reference: str, config: TextConfig) -> float:
    """Scores 1 if the answer equals the reference, else 0; compares normalised words if `config.normalise`."""
    return float(config.words(answer) == config.words(reference) if config.normalise else answer == reference.strip())


def token_f1(answer: str, reference: str, config: TextConfig) -> float:
    """Computes the F1 of the words that answer and reference share (SQuAD, arXiv 1606.05250), from 0 to 1."""
    answer_words, wanted = config.words(answer), config.words(reference)
    shared = sum((collections.Counter(answer_words) & collections.Counter(wanted)).values())
    return 2 * shared / (len(answer_words) + len(wanted)) if answer_words and wanted else float(answer_words == wanted)


def rouge_l(answer: str, reference: str, config: TextConfig) -> float:
    """Computes the F1 of the longest common subsequence of words (ROUGE-L, Lin 2004, without stemming), from 0 to 1."""
    answer_words, wanted = config.words(answer), config.words(reference)
    if not answer_words or not wanted:
        return float(answer_words == wanted)
    row = [0] * (len(wanted) + 1)
    for word in answer_words:
        diagonal = 0
        for column, other in enumerate(wanted, 1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return 2 * row[-1] / (len(answer_words) + len(wanted))


def regex(answer: str, pattern: str, config: TextConfig) -> float:
    """Scores 1 if the pattern is found in the answer, else 0.

    Raises:
      ValueError: the pattern is not a regular expression.
    """
    del config
    return float(_compiled(pattern).search(answer) is not None)


def json_schema(answer: str, schema: object, config: TextConfig) -> float:
    """Scores 1 if the answer is JSON that the schema allows, else 0.

    The JSON may stand in a fenced block. NaN, Infinity and numbers beyond the range of floats are not JSON.

    Raises:
      ImportError: jsonschema is not installed.
      ValueError: the schema is not a JSON schema, or refers to itself endlessly.
      referencing.exceptions.Unresolvable: the schema refers to another document, or to a part that it does not have.
    """
    del config
    fenced = _FENCE.match(answer)
    try:
        value = json.loads(
            fenced[1] if fenced else answer, parse_constant=_refuse, parse_float=_finite, parse_int=_whole
        )
    except (ValueError, RecursionError):
        return 0.0
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
    try:
        return float(validator.is_valid(value))
    except RecursionError:  # the answer is nested too deeply to be compared
        return 0.0


def _refuse(constant: str) -> float:
    """Refuses NaN and Infinity, which Python reads but JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    """Reads a number of JSON; refuses a number beyond the range of floats, such as 1e999."""
    return value if math.isfinite(value := float(number)) else _refuse(number)


def _whole(number: str) -> int:
    """Reads an integer of JSON; refuses an integer beyond the range of floats, whose limit is about 1.8e308."""
    _finite(number)
    return int(number)


def _same_if_equal(value: object) -> object:
    """Returns a hashable key that is the same for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((key, _same_if_equal(one)) for key, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_same_if_equal, value))
    return ("boolean", value) if isinstance(value, bool) else value


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """Makes a validator that fetches nothing from a network."""
    try:
        import fractions

        import jsonschema.validators
        import referencing
    except ImportError as error:
        raise ImportError(f"reward.fns='json_schema' needs jsonschema: {install('schema')}.") from error
    try:
        content = json.loads(schema)
        kind = jsonschema.validators.validator_for(content)
        kind.check_schema(content)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        raise ValueError(f"{schema[:120]!r} is not a JSON schema: {str(error).splitlines()[0]}") from None

    def multiple_of(validator: Any, step: float, value: Any, _: Any) -> Iterator[jsonschema.ValidationError]:
        """Compares decimals as they are written; jsonschema itself says that 19.99 is no multiple of 0.01."""
        if validator.is_type(value, "number") and fractions.Fraction(str(value)) % fractions.Fraction(str(step)):
            yield jsonschema.ValidationError(f"no multiple of {step}")

    def unique_items(validator: Any, wanted: bool, value: Any, _: Any) -> Iterator[jsonschema.ValidationError]:
        """Refuses equal items, in time linear in their number; jsonschema itself compares all pairs of items."""
        if wanted and validator.is_type(value, "array") and len(set(map(_same_if_equal, value))) < len(value):
            yield jsonschema.ValidationError("equal items")

    own = {"multipleOf": multiple_of, "divisibleBy": multiple_of, "uniqueItems": unique_items}
    known = {name: check for name, check in own.items() if name in kind.VALIDATORS}
    validator = jsonschema.validators.extend(kind, known)(content, registry=referencing.Registry())
    # Small answers of every JSON type try the schema. A schema that refers to itself without looking further into the
    # answer recurses endlessly on one of them.
    try:
        for probe in (None, 0, "", [], {}, [None], {"": None}):
            validator.is_valid(probe)
    except RecursionError:
        raise ValueError(
            f"the JSON schema {schema[:120]!r} refers to itself without looking further into the answer, so that no "
            "answer can be compared with it"
        ) from None
    return validator


_Scored = Callable[[str, Any, TextConfig], float]
# The functions by name, each with the record's field that holds its reference; '' is the field `TextConfig.answer`.
FUNCTIONS: dict[str, tuple[_Scored, str]] = {
    "choice": (choice, ""),
    "exact_match": (exact_match, ""),
    "token_f1": (token_f1, ""),
    "rouge_l": (rouge_l, ""),
    "regex": (regex, "pattern"),
    "json_schema": (json_schema, "schema"),
}


class TextReward:
    """A reward function made from one of `FUNCTIONS` and its settings.

    Attributes:
      reads: fields that every record must have.
    """

    def __init__(self, function: str, **settings: Any) -> None:
        """Prepares the function.

        Args:
          function: name of the function in `FUNCTIONS`.
          settings: fields of a TextConfig.
        """
        self._config = config = TextConfig(**settings)
        self._score, field = FUNCTIONS[function]
        self._field = field or config.answer
        self._same = config.pattern if field == "pattern" else ""
        if field == "schema" and config.schema:
            self._same = regular(pathlib.Path(config.schema)).read_text()
        self.reads = () if self._same else (self._field,)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
        """Scores every completion from 0 to 1; with several references, the best score counts.

        Raises:
          ValueError: a record has no reference, or has a value that cannot be a reference.
        """
        del prompts
        if not self._same and self._field not in fields:
            raise ValueError(
                f"the records have no field {self._field!r}, with which answers are compared (reward.text)"
            )
        wanted = [self._same] * len(completions) if self._same else fields[self._field]
        rewards = []
        for completion, reference in zip(completions, wanted, strict=True):
            answer = self._config.answer_of(completion)
            texts = self._references(reference)
            found = [self._score(answer or "", one, self._config) for one in texts]
            rewards.append(0.0 if answer is None else max(found))
        return rewards

    def _references(self, value: Any) -> Sequence[Any]:
        """Returns one record's references: a list of texts, or a list with one JSON schema; the best score counts.

        Args:
          value: content of the record's field.

        Raises:
          ValueError: the field holds neither a text nor a list of texts nor a schema.
        """
        if isinstance(value, dict | bool) and self._field == "schema":
            return [value]
        try:
            return plain.references(value)
        except ValueError as error:
            raise ValueError(f"the field {self._field!r} (reward.text) holds no reference: {error}") from None
