"""Python tools in their process: the schemas of their parameters, and the arguments that they get."""

import enum
import json
from collections.abc import Sequence
from typing import Annotated, Literal

import pytest

from podrl.environments import calls
from podrl.environments.tool_worker import call, declaration


class Color(enum.Enum):
    RED = "red"
    TWO = 2


def told(hint):
    """Makes a tool that returns the argument it got for a parameter with this annotation."""

    def tool(x):
        return repr(x)

    tool.__annotations__["x"] = hint
    return tool


LISTED = [
    (Color, "red", repr(Color.RED)),
    (Color, 2, repr(Color.TWO)),
    (list[Color], ["red", 2], repr([Color.RED, Color.TWO])),
    (Sequence[Color], ["red"], repr([Color.RED])),
    (tuple[Color, ...], ["red"], repr((Color.RED,))),
    (set[Color], ["red"], repr({Color.RED})),
    (dict[str, list[Color]], {"a": ["red"]}, repr({"a": [Color.RED]})),
    (list[Color] | None, ["red"], repr([Color.RED])),
    (list[Color] | None, None, "None"),
    (Color | list[Color], "red", repr(Color.RED)),
    (Color | list[Color], ["red"], repr([Color.RED])),
    (Annotated[list[Color | None], "which"], ["red", None], repr([Color.RED, None])),
    (Color | int, 7, "7"),
    (Color | str, "red", repr(Color.RED)),
    (Literal[1, "a"], 1, "1"),
    (Literal[1, True], True, "True"),
    (list[str], ["red"], "['red']"),
]


@pytest.mark.parametrize(("hint", "value", "wanted"), LISTED, ids=str)
def test_a_function_gets_members_of_its_enums(hint, value, wanted):
    assert call(told(hint), {"x": value}, {}) == {"text": wanted, "failed": ""}


@pytest.mark.parametrize(
    ("hint", "value"),
    [(Color, "blue"), (list[Color], ["red", "blue"]), (Color | None, "blue"), (Literal[1, 2], True), (Color, [])],
    ids=str,
)
def test_a_value_that_is_not_listed_is_refused(hint, value):
    answer = call(told(hint), {"x": value}, {})
    assert answer["failed"] == "arguments" and "x must be one of" in answer["text"]


@pytest.mark.parametrize(
    ("hint", "wanted"),
    [
        (Literal[1, "a"], {"type": ["integer", "string"], "enum": [1, "a"]}),
        (list[Color], {"type": "array", "items": {"type": ["string", "integer"], "enum": ["red", 2]}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (tuple[int, str], {"type": "array"}),
        (Literal["a", None], {"type": ["string", "null"], "enum": ["a", None]}),
    ],
    ids=str,
)
def test_schemas_have_a_type(hint, wanted):
    assert declaration(told(hint), "tool")["schema"]["properties"]["x"] == wanted


@pytest.mark.parametrize(
    ("hint", "word", "wanted"),
    [
        (Literal[1, "a"], "1", 1),
        (Literal[1, "a"], "a", "a"),
        (Literal[1, "1"], "1", "1"),
        (Literal[True, "maybe"], "True", True),
        (Color, "2", 2),
        (Color | None, "2", 2),
        (Literal[1, "a"] | float, "2.5", 2.5),
        (Literal[1, True], " true ", True),
        (list[Color], '["red"]', ["red"]),
        (str, "1", "1"),
        (int | float, "1.5", 1.5),
    ],
    ids=str,
)
def test_words_between_tags_become_what_a_schema_lists(hint, word, wanted):
    schema = json.loads(json.dumps(declaration(told(hint), "tool")["schema"]))
    made = calls.fitted({calls.QUERY: word}, schema, "x")["x"]
    assert made == wanted and type(made) is type(wanted)


def test_parameters_that_are_taken_by_their_place():
    def tool(q, limit=3, /, *, order="new", **more):
        return [q, limit, order, more]

    assert declaration(tool, "tool")["schema"]["required"] == ["q"]
    assert call(tool, {"q": "x"}, {})["text"] == '["x", 3, "new", {}]'
    assert call(tool, {"q": "x", "limit": 5, "order": "old", "z": 1}, {})["text"] == '["x", 5, "old", {"z": 1}]'
    assert call(tool, {"limit": 5}, {}) == {
        "text": "TypeError: missing a required argument: 'q'",
        "failed": "arguments",
    }
