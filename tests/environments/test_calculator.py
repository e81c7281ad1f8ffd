"""The calculator: Python's integers for whole numbers joined by + - *, and a refusal for anything else."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrl.environments.calculator import LONGEST, calculator

NUMBERS = st.integers(-(10**9), 10**9)
EXPRESSIONS = st.builds(
    lambda first, rest: str(first) + "".join(f"{space}{operator}{space}{value}" for operator, value, space in rest),
    NUMBERS,
    st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS, st.sampled_from(("", " "))), max_size=6),
)


def value_of(node):
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return -value_of(operand)
        case ast.BinOp(left, operator, right):
            a, b = value_of(left), value_of(right)
            return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}[type(operator)]


@given(EXPRESSIONS)
def test_it_agrees_with_python(expression):
    assert calculator(expression) == str(value_of(ast.parse(expression, mode="eval").body))


def test_a_product_comes_before_a_difference():
    assert calculator("10-2*3") == "4" and calculator("2*3-10") == "-4" and calculator(" 4821*7703 ") == "37136163"


@given(st.text(max_size=LONGEST))
def test_any_text_gives_a_number_or_a_refusal(text):
    try:
        int(calculator(text))
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1+",
        "+1",
        "1 2",
        "1/2",
        "2**3",
        "(1)",
        "1e3",
        "1.5",
        "x",
        "1;2",
        "1,2",
        "__import__('os')",
        "٣+١",
        "1\x00",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"not whole numbers joined by \+ - \*"):
        calculator(text)


def test_a_long_expression_is_refused():
    with pytest.raises(ValueError, match=f"{LONGEST + 1} characters, at most {LONGEST}"):
        calculator("9" * (LONGEST + 1))
    assert len(calculator("*".join(["9" * 10] * 9))) <= LONGEST
