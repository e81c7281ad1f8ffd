"""Every parser of a model's text takes time linear in the length of the text, and raises no exception."""
# ruff: noqa: E501 - a table

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear import check_that_time_is_linear

from podrl.rewards import answers, code, formats, reference, text

# The format written as one pattern; the time of this pattern grows with the fourth power of the length.
FORMAT = re.compile(r"^\s*<reasoning>.+?</reasoning>.*?<answer>(?P<answer>.+?)</answer>\s*$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"<answer>.*?(?P<number>[\d.]+)", re.DOTALL)
PIECES = (
    *reference.TAGS,
    "<think>",
    "</think>",
    " ",
    "\n",
    "\n\n",
    "a",
    "7",
    ".",
    "-1,200",
    "\x1c",
    "\u2028",
    "$",
    "\\boxed{",
)
DEGENERATE = (
    "<reasoning>so it is 7</reasoning>\n<answer>7\n",
    *("<answer>", "</answer>", "<reasoning>", "</reasoning>\n", "<reasoning>\n</reasoning>", "<answer>7</answer>x", "\n", " ", "\t\n"),
    *("<think>", "</think>", "<think></think><answer>", "```python\n", "```", "```\n\n", "~~~x\n", "{", "[", '{"a":', "(", "1", "1,", "-", "."),
    *("7/", "\\frac{", "\\boxed{", "$", "\\$", "%", "e9", "=", "the ", "A ", "'", "ä", "\ud800", "\0", "<", "<|im_end|>"),
)  # fmt: skip
SETTINGS = text.TextConfig()
PARSERS = {
    **{name: lambda t, fn=fn: fn(["q"], [t], answer=["7"]) for name, fn in reference.BUILT_IN.items()},
    "r1_format": lambda t: formats.r1_format(["q <think>"], [t]),
    "accuracies": lambda t: reference.accuracies(t, "7"),
    "vote": answers.vote,
    "number_of": answers.number_of,
    "code_of": code.code_of,
    "extract": SETTINGS.answer_of,
    "choice": lambda t: text.choice(t, "B", SETTINGS),
    "exact_match": lambda t: text.exact_match(t, "B", SETTINGS),
    "token_f1": lambda t: text.token_f1(t, "B", SETTINGS),
    "rouge_l": lambda t: text.rouge_l(t, "B", SETTINGS),
    "json_schema": lambda t: text.json_schema(t, {"items": {"$ref": "#"}, "additionalProperties": {"$ref": "#"}}, SETTINGS),
}  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_the_formats_are_those_of_the_patterns(completion):
    match = FORMAT.search(completion)
    assert reference.answer_of(completion) == (match["answer"] if match else None)
    match = NUMBER.search(completion)
    expected = 1.5 if match and re.fullmatch(r"7|7\.0*|0+7\.?", match["number"]) else 0.0
    assert reference.recipe_number(["q"], [completion], ["7"]) == [expected]
    whole = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", completion, re.DOTALL)
    once = all(completion.count(tag) == 1 for tag in formats.TAGS)
    assert formats.r1_format(["q"], [completion]) == [float(whole is not None and once)]


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_takes_linear_time_and_never_raises(name):
    """Repeats degenerate pieces: in a quadratic parser ten times the length takes a hundred times as long."""
    parse, chosen = PARSERS[name], random.Random(0)
    texts = [lambda n, piece=piece: piece * (n // len(piece)) for piece in DEGENERATE]
    for _ in range(20):
        texts.append(_repeats(*("".join(chosen.choices(DEGENERATE, k=k)) for k in (2, 2, 3))))
    for make in texts:
        check_that_time_is_linear(parse, make)


# The pieces of text that the patterns of a parser look for.
FRAGMENTS = {
    "code_of": ["`", "```", "~~~", "py", "python", ".", "3", " ", "\n", "> ", "x", "=", "def f(", "import x", "<", "title=a"],
    "json_schema": ["```", "json", "\n", " ", "\t", "x", "[", "]", "1", ",", "\"", "{", "}"],
    "vote": [
        *("1", "1 ", "000", "/", ".", ",", "'", "_", "^", "{", "}", "(", ")", "|", "-", "+", "*", "!", "$", "%", "=", "e", "x", "0x", "ab"),
        *("\\frac", "\\overline{", "\\bar", "\\degree", "\\text{", "\x01", " thousand", " and ", "a half", " to the ", "th", "log", "sqrt(", "cm", ";"),
    ],
    "choice": ["A", "B", "'", " ", "a", "(", ")"],
    "extract": ["<", "answer", "<answer>", "</answer>", ">", "/", "x"],
    "exact_format": ["<", "<reasoning>", "</reasoning>", "<answer>", "</answer>", " ", "\n", "x"],
}  # fmt: skip


@pytest.mark.parametrize("name", FRAGMENTS)
def test_repeats_of_what_a_pattern_knows_take_linear_time(name):
    chosen = random.Random(name)
    texts = [_repeats(*("".join(chosen.choices(FRAGMENTS[name], k=k)) for k in (2, size, 2))) for size in (1, 2, 3) * 8]
    texts += [lambda n: "~~~x" * (n // 4) + "`", lambda n: "```json" + "\n" * n + "x"]
    texts += [lambda n: "```py" + "." * n + "x\nx\n```"]
    for make in texts:
        check_that_time_is_linear(PARSERS[name], make)


def _repeats(head, body, tail):
    return lambda n: head + body * (n // len(body)) + tail
