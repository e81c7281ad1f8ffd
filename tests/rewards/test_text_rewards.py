"""Rewards that compare text with a reference: values by hand, references of several forms, refusals."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrl.rewards import text
from podrl.rewards.compose import RewardConfig, RewardError, Rewards
from podrl.rewards.text import TextConfig, TextReward

PLAIN = TextConfig()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("B", 1), ("(B)", 1), ("B) Paris", 1), ("\\boxed{B}", 1), ("B.", 1), ("A", 0), ("A or B", 0), ("Bob", 0), ("", 0)],
)
def test_a_choice_names_one_letter(answer, expected):
    assert text.choice(answer, "B", PLAIN) == expected


def test_equality_is_of_words_or_of_text():
    assert text.exact_match("The  Eiffel tower!", "eiffel Tower", PLAIN) == 1
    assert text.exact_match("Eiffel", "Eiffel tower", PLAIN) == 0
    exact = TextConfig(normalise=False)
    assert [text.exact_match(answer, "Tower", exact) for answer in ("Tower", "tower", "the Tower")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("answer", "reference", "f1", "rouge"),
    [
        ("police killed gunman", "police kill gunman", 2 / 3, 2 / 3),
        ("gunman kill police", "police kill gunman", 1, 1 / 3),
        ("x x y", "x", 1 / 2, 1 / 2),
        ("b d e", "b c d e f", 3 / 4, 3 / 4),
        ("x", "y", 0, 0),
        ("", "y", 0, 0),
        ("the", "a", 1, 1),
    ],
)
def test_shared_words(answer, reference, f1, rouge):
    assert text.token_f1(answer, reference, PLAIN) == pytest.approx(f1)
    assert text.rouge_l(answer, reference, PLAIN) == pytest.approx(rouge)


def test_the_answer_is_the_last_match():
    tagged = "<answer>A</answer> no, <answer>\nB\n</answer>"
    assert PLAIN.answer_of(tagged) == "B" and PLAIN.answer_of("B") is None
    assert PLAIN.answer_of("in <answer> tags: <answer>B</answer>") == "B"
    assert TextConfig(extract="").answer_of(" B ") == "B"
    assert TextConfig(extract=r"[A-Z]$").answer_of("it is C") == "C"


def test_schemas():
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    for form in (schema, json.dumps(schema)):
        assert [text.json_schema(a, form, PLAIN) for a in ("[1]", "```json\n[1]\n```", "[]", "['a']")] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="not a JSON schema"):
        text.json_schema("[1]", {"type": "nothing"}, PLAIN)
    for no_json in ("NaN", "[Infinity]", "-Infinity", "1e999", "[" * 100_000, "nan"):
        assert text.json_schema(no_json, {}, PLAIN) == 0
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert [text.json_schema("[" * n + "]" * n, nested, PLAIN) for n in (3, 900)] == [1, 0]
    for endless in (
        {"$ref": "#"},
        {"items": {"$ref": "#/items"}},
        {"properties": {"": {"anyOf": [{"$ref": "#/properties/"}]}}},
    ):
        with pytest.raises(ValueError, match="refers to itself"):
            text.json_schema("1", endless, PLAIN)
    import referencing.exceptions

    with pytest.raises(referencing.exceptions.Unresolvable):  # no request is sent to this address
        text.json_schema("[1]", {"$ref": "http://127.0.0.1:9/schema.json"}, PLAIN)


SCHEMAS = [
    {"multipleOf": 0.1}, {"multipleOf": 3}, {"multipleOf": 1e-300}, {"multipleOf": 1e308},
    {"minimum": 0.5, "maximum": 1e308},
    {"exclusiveMinimum": -1e308}, {"type": "integer"}, {"enum": [0.1, 10**400, None]}, {"const": 1e308},
    {"uniqueItems": True},
    {"contains": {"const": 1}, "minContains": 2}, {"minLength": 1, "maxLength": 3}, {"pattern": "^a+$"},
    {"format": "date"},
    {"properties": {"a": {"multipleOf": 0.01}}, "additionalProperties": {"type": "number"}},
    {"propertyNames": {"minLength": 1}},
    {"patternProperties": {"^a": {"multipleOf": 0.1}}}, {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"prefixItems": [{"multipleOf": 0.1}], "unevaluatedItems": False}, {"oneOf": [{"multipleOf": 0.1},
    {"type": "object"}]},
    {"if": {"multipleOf": 0.1}, "then": {"minimum": 1}}, {"not": {"multipleOf": 0.1}},
    {"anyOf": [{"$ref": "#/$defs/x"}],
    "$defs": {"x": {"multipleOf": 0.1}}}, {"$schema": "http://json-schema.org/draft-04/schema#", "multipleOf": 0.1},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}, "items": [{"divisibleBy": 1}]},
]  # fmt: skip
NUMBERS = st.sampled_from(
    [10**400, -(10**400), 10**308, 0, 1, 0.1, -0.0, 1e308, 5e-324, 2**53 + 1, True, None, "a", "", "\ud800", "\0"]
)


@given(
    st.sampled_from(SCHEMAS),
    st.recursive(
        NUMBERS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "b", "\ud800"]), inner),
        max_leaves=5,
    ),
)
def test_no_answer_makes_a_schema_raise(schema, value):
    assert text.json_schema(json.dumps(value), schema, PLAIN) in (0, 1)


@pytest.mark.parametrize("answer", ["1" * 400, "-" + "9" * 400, "1" * 4300, "1" * 5000, f"[{'1' * 400}]"])
def test_a_number_that_no_float_holds_is_a_wrong_answer(answer):
    schema = {"multipleOf": 0.1}
    assert text.json_schema(answer, {**schema, "items": schema}, PLAIN) == 0


@pytest.mark.parametrize(
    ("schema", "answer", "allowed"),
    [
        ({"multipleOf": 0.01}, "19.99", 1),
        ({"multipleOf": 0.01}, "19.999", 0),
        ({"multipleOf": 0.1}, "1e300", 1),
        ({"multipleOf": 0.1}, '"a"', 1),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 0.01}, "0.07", 1),
        ({"uniqueItems": True}, '[1, true, [1], [true], {}, {"a": 1}, 0, false]', 1),
        ({"uniqueItems": True}, "[1, 1.0]", 0),
        ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]', 0),
        ({"uniqueItems": False}, "[1, 1]", 1),
        ({"uniqueItems": True}, str([[i] for i in range(20_000)]), 1),  # comparing all pairs would take minutes
    ],
)
def test_decimals_are_exact_and_items_are_compared_once(schema, answer, allowed):
    assert text.json_schema(answer, schema, PLAIN) == allowed


def test_references_of_every_form(tmp_path):
    answers = ["<answer>b</answer>", "b"]
    assert TextReward("exact_match")(["q"] * 2, answers, answer=[["a", "B"], "b"]) == [1, 0]
    assert TextReward("regex", pattern="^b$")(["q"] * 2, answers) == [1, 0]
    (tmp_path / "s.json").write_text('{"const": "b"}')
    assert TextReward("json_schema", schema=str(tmp_path / "s.json"), extract="")(["q"], ['"b"']) == [1]
    with pytest.raises(ValueError, match=r"none of the letters 'AB' \(reward.text.choices\)"):
        TextReward("choice", choices="AB")(["q"], answers[:1], answer=["C"])
    with pytest.raises(ValueError, match="empty list"):
        TextReward("rouge_l")(["q"], answers[:1], answer=[[]])
    with pytest.raises(ValueError, match="not a regular expression"):
        TextReward("regex")(["q"], answers[:1], pattern=["("])


def test_settings_that_make_no_sense_are_refused():
    for key, value in {"extract": "(", "pattern": "(", "choices": "AA"}.items():
        with pytest.raises(ValueError, match=rf"TextConfig\.{key}"):
            dataclasses.replace(PLAIN, **{key: value})


def test_they_are_found_by_name():
    with Rewards(RewardConfig(fns=("choice", "token_f1@a"), workers=1)) as rewards:
        found = rewards.score(["q"] * 2, ["<answer>B</answer>"] * 2, {"answer": ["B", "C"], "dataset": ["a", "b"]})
        assert found.tolist() == [[1, 0], [1, 0]]
        with pytest.raises(RewardError, match="have no field 'answer'"):
            rewards.score(["q"], ["<answer>B</answer>"], {"dataset": ["a"]})
