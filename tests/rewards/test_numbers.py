"""The number that an answer gives: a table of forms, exact values, equality, and time linear in the length."""

import pathlib
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, strategies
from linear import check_that_time_is_linear

from podrl.rewards import answers, math_answer, numbers, reference

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Maps each text to its value, a fraction, followed by % for percent; None if the text has no number.
TABLE = {
    # signs
    "5": "5", "+5": "5", "-5": "-5", "- 5": "-5", "\u22125": "-5", "\u20135": "-5", "\uff0d5": "-5", "minus 5": "-5",
    "Negative 5": "-5", "is -5": "-5", "-0": "0", "--5": None, "\u00b15": None, "x = -5": "-5", "x=\u22125": "-5",
    # decimals
    "4.0": "4", ".5": "1/2", "-.5": "-1/2", "0.1": "1/10", "18.0": "18", "007": "7", "1.000": "1",
    "0.333...": "333/1000",
    "1.2.3": None, "...": None, "3,14": None, "0,500": None,
    # thousands
    "1,200": "1200", "-1,200": "-1200", "1,234,567.5": "2469135/2", "1{,}200": "1200", r"1\,200": "1200",
    "1 200": "1200",
    "1 234 567": "1234567", "1\u00a0234": "1234", "1\u202f234": "1234", "1'200": "1200", "1\u2019200": "1200",
    "1_000": "1000", "1,00,000": "100000", "11,12": None, "1,20": None, "12,345,67": None, "1.200.300": None,
    # fractions
    "1/2": "1/2", "1 / 2": "1/2", "-3/4": "-3/4", "6/3": "2", "1 1/2": "3/2", "-1 1/2": "-3/2", "2 and 1/2": "5/2",
    "\u00bd": "1/2", "1\u00bd": "3/2", "1\u20442": "1/2", r"\frac{1}{2}": "1/2", r"-\dfrac{3}{4}": "-3/4",
    r"\frac12": "1/2",
    r"\tfrac{1,200}{7}": "1200/7", "0/5": "0", "1/0": None, "3/4/5": None,
    # percent
    "12%": "12%", "12 %": "12%", r"12\%": "12%", "12 percent": "12%", "12.5 per cent": "25/2%", "12\uff05": "12%",
    # powers of ten, and other powers
    "1e6": "1000000", "1E-3": "1/1000", "1.5e+3": "1500", "1e-05": "1/100000", "3 x 10^4": "30000",
    "3\u00d710^4": "30000",
    r"3 \times 10^{-4}": "3/10000", "3*10^4": "30000", "10**3": "1000", "10^{3}": "1000", "10\u00b3": "1000",
    "2\u00b710\u207b\u00b9": "1/5", "2^10": "1024", "-2^2": "-4", "0^-1": None, "1e9999999": None, "9^99999": None,
    # magnitude words and letters ("million", "k")
    "5 million": "5000000", "1.5 billion dollars": "1500000000", "3 hundred": "300", "2 dozen": "24",
    "$5M": "5000000",
    "5k": "5000", "$2.5 bn": "2500000000", "$3 M": "3000000", "300 K": "300", "5 m": "5",
    # currencies
    "$18": "18", r"\$18": "18", "-$5": "-5", "$-5": "-5", "\u2212$1,200.50": "-2401/2", "18$": "18", "\u20ac5": "5",
    "5 \u20ac": "5",
    "\u00a31,000": "1000", "US$5": "5", "USD 5": "5", "5 USD": "5", "Rs. 500": "500", "$ 5": "5", "50\u00a2": "50",
    # text that follows or encloses a number
    "12.": "12", "1,200.": "1200", "12,": "12", "12 eggs.": "12", "12cm": "12", "12 cm^2": "12", "12 m\u00b2": "12",
    "60 km/h": "60",
    "$5/hour": "5", "5-inch": "5", "1st": "1", r"12\text{ cm}": "12", r"12 \text{ cm}^2": "12", r"12^\circ": "12",
    "12\u00b0": "12",
    "$12$": "12", r"\(12\)": "12", r"\boxed{12}": "12", r"\boxed{\frac{1}{2}}": "1/2", r"\text{12}": "12",
    "**12**": "12", "_12_": "12",
    "*12*": "12", "`12`": "12", '"12"': "12", "(12)": "12", "<b>12</b>": "12", "#### 12": "12", "~12": "12",
    "12!": "12",
    "about 4.0 eggs": "4", "The answer is 12.": "12", "Answer: 12": "12", "x1": None, "H2O": None,
    # equations
    "x = 12": "12", "12 = x": "12", "x1 = 3": "3", "f(2) = 5": "5", "a_5 = 7": "7", "5 + 2 = 7": "7",
    "x \u2248 3.14": "157/50",
    "5 apples + 2 apples = 7 apples": "7", "2 hours = 120 minutes": "120", "10/2 = 5": "5", "13 = 12": None,
    "12 = 13": None,
    "x = 11 = 12": None, "x = 7, y = 8": None, "7 or x = 8": None, "1/3 = 0.333": None, "x != 5": None,
    # several numbers, and calculations
    "7 or 8": None, "11, 12": None, "7 8 9": None, "$4 or 5": None, "5 ft 3 in": None, "7 (7.0)": "7",
    "12 or 12.0": "12",
    "5 - 5": None, "5-5": None, "5-7": None, "5 to 5": None, "5:5": None, "10:30": None, "2024-01-05": None,
    "5 x 5": None,
    "5(5)": None, "(5)(5)": None, "x - 5": None, "x-5": None, "x+5": None, "5+x": None, "5*x": None, "x/5": None,
    "5 - x": None,
    "x > 5": None, "\u2264 5": None, "\u221a5": None, "2\u03c0": None, r"\sqrt{5}": None, r"\pi": None,
    # unknowns, constants and functions
    "2x": None, "2y": None, "3x^2": None, "3xy": None, "3 y": None, "4ab": None, "4 ab": None, "3abc": None,
    "2pi": None, "2 pi": None, "3i": None,
    "5 n": None, "5n": None, "2 a + b": None, "2a": None, "2AB": None, "(5)x": None, r"\frac{1}{2}x": None,
    r"\frac{1}{2}ab": None, r"\frac{1}{2} mv^2": None,
    "2\u03b8": None, "2theta": None, "2pir": None, "y = 3x": None, "5m + n": None, "5 apples + x": None,
    "5 - pi": None, "2^{x}": None, "2^{1/2}": None, "2(x)": None,
    "f(2)+3": None, "x + (5)": None, "(x+1)2": None, "(x, 5)": None, "(5, 5)": None, "{5, 5}": None, "5C2": None,
    "5 R2": None, "5!/3!": None, "5! = 120": "120",
    "sqrt(2)": None, "sqrt 2": None, "2sqrt(3)": None, "log(8)": None, "log 8": None, "log_2(8)": None,
    "log_2 8": None, "ln(5)": None, "sin 30": None, "max(3, 3)": None,
    "floor(2.5)": None, "2 sin x": None, "half of 10": None, "square root of 16": None, "twice 5": None,
    "5 squared": None, "5 mod 5": None, "5 and 5": None,
    "sqrt(16) = 4": "4", "log_2(8) = 3": "3", "2x = 10": "10", "5 in": "5", "5 x 10^3": "5000", "5 nights": "5",
    "5 e-mails": "5", "5 a day": "5", "5 p.m.": "5", "5 kr.": "5",
    "12 fifth graders": "12", "3 quarters": "3", "5 one-dollar bills": "5", "12 egg(s)": "12", "12m2": "12",
    "12in": "12", "1h30": None, "5ft3in": None, "$5k/month": "5000",
    # signs and brackets
    "-(5)": "-5", "-($5)": "-5", "x = -(1/2)": "-1/2", "-(-5)": None, "-(x)": None, "x - (5)": None, "x -(5)": None,
    "|-5|": None, "abs(-5)": None, r"\left|-5\right|": None, "$(10)": "10",
    "1/-2": "-1/2", "-1/-2": "1/2", r"\frac{1}{-2}": "-1/2",
    # several magnitude words ("hundred thousand"), fractions in words, numbers in other notations
    "3 hundred thousand": "300000", "3 hundred million": "300000000", "100 thousand million": "100000000000",
    "2 thousand five hundred": None, "2 hundred and fifty": None,
    "2 thousand twenty-five": None, "2 and a half": "5/2", "2 and a half million": "2500000", "2 and a third": None,
    "2 thirds": None, "5 hundredths": None, "5 lakh": "500000", "2 crore": "20000000",
    "1 000/3": None, "1 200/3": None, "1 and 123/250": "373/250", "1e3.5": None, "1e5km": None, "0x10": None,
    "0xFF": None, "0xDEADBEEF": None, "0b1": None, "0o17": None, "1__234": None, "101_{2}": None, "5 \u2030": "1/200",
    # more of LaTeX and Markdown
    r"\frac{1}2": "1/2", r"\frac1{2}": "1/2", r"\frac 1 2": "1/2", r"\frac{1}23": None, r"2\frac{1}{2}": "5/2",
    r"\displaystyle 5": "5", r"\displaystyle\frac12": "1/2", r"\underline{5}": "5",
    r"5\degree": "5", r"\boxed{12^\circ}": "12", r"0.\overline{3}": "1/3", r"0.1\overline{6}": "1/6",
    r"-2.\bar3": "-7/3", r"5\overline{3}": None, "0.3\u0305": None, "* 5": "5", "\u2022 5": "5", "* 5 * 3": None,
    "5 i.e. five": "5", "5 z\u0142": "5", "5 N*m": "5", "5 kg*m/s^2": "5", "5 x-rays": "5", "5 T-shirts": "5",
    "12 eggs (a dozen)": "12", "5 c\u00b0 - x": None,
    "(2)(x)": None, "lg 100": None, "\u230a2.5\u230b": None, "2 and three quarters": None, "1 00/3": None,
    "5.e3": None, "5 E3": None, "-[5]": None, "-{5}": None, "-$(5)": None, r"\boxed{\underline{5}}": "5",
    r"\textcolor{red}{5}": "5", r"\color{red}5": "5", r"\nicefrac{1}{2}": "1/2", r"\Large 5": "5",
    "5 \u00d7 10 ^ 3": "5000", "5 permille": None, "5 ft-lb": "5", "2 L": "2", "0.5L": "1/2", "5 R2 units": None,
    # texts without a number, and digits of other scripts
    "": None, "four": None, "nan": None, "inf": None, "no number": None, "\uff11\uff12": "12", "\u0661\u0662": "12",
}  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), TABLE.items())
def test_the_forms_of_numbers(text, wanted):
    found = numbers.read(text)
    assert (found and f"{found}{'%' * found.percent}") == wanted


def test_the_table_is_long():
    assert len(TABLE) >= 80


@given(
    strategies.fractions(), strategies.sampled_from(["{}", " {}.", "$ {} dollars", "x = {}", r"\boxed{{{}}}", "**{}**"])
)
def test_every_fraction_keeps_its_value(value, form):
    found = numbers.read(form.format(value))
    assert found is not None and Fraction(found.top, found.bottom) == value and not found.percent


@given(strategies.decimals(allow_nan=False, allow_infinity=False, places=4), strategies.booleans())
def test_every_decimal_keeps_its_value(value, separated):
    found = numbers.read(f"{value:,}" if separated else str(value))
    assert found is not None and Fraction(found.top, found.bottom) == Fraction(value)


@given(strategies.text(strategies.sampled_from("0123456789.,-+/*^%$ex=()<>{}\\ \u2212\u00bd\u00b2_'a\n"), max_size=40))
def test_no_text_raises(text):
    numbers.read(text)


@pytest.mark.parametrize(
    "piece",
    ["1", "1,", "1 ", " ", ".", "1.", "-", "$", "1/", "1^", "<", "<a", "{", "\\frac{", "\\text{ ", "*", "**1", "(",
    "=", "1=",
     "1e", "a(", "1 1/", "\u00b2", "1'", "_1", "^{", "$ "],
)  # fmt: skip
def test_time_is_linear_in_the_length(piece):
    check_that_time_is_linear(numbers.read, lambda size: piece * (size // len(piece)), (2_000, 20_000))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("50%", "0.5", True), ("50%", "50", True), ("0.5", "50%", True), ("50%", "50 percent", True), ("50%", "0.5%",
        False),
        ("1/3", "0.3333333333", False), ("1/2^98", "1/2^99", False), ("8", "8.0", True), ("-5", "5", False), ("9.11",
        "9.9", False),
    ],
)  # fmt: skip
def test_equality_is_exact(one, other, equal):
    mine, theirs = numbers.read(one), numbers.read(other)
    assert mine is not None and theirs is not None and mine.equals(theirs) is equal


def test_a_module_of_the_users_named_numbers_is_not_imported(tmp_path):
    (tmp_path / "numbers.py").write_text("from podrl.rewards import reference\nprint(reference.accuracies('', '1'))\n")
    done = subprocess.run([sys.executable, tmp_path / "numbers.py"], env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0 and b"partial" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("completion", "closed", "last"),
    [
        ("<answer>1</answer>", "1", "1"),
        ("<answer>1</answer> <answer>2</answer>", "2", "2"),
        ("<answer>1</answer> <answer>2", "1", "1"),
        ("in <answer> tags: <answer>2</answer>.", "2", "2"),
        ("<answer>2", None, "2"),
        ("2</answer>", None, None),
        ("</answer><answer>2", None, "2"),
        ("2", None, None),
    ],
)
def test_the_answer_of_a_completion(completion, closed, last):
    assert answers.closed_answer(completion) == closed and answers.last_answer(completion) == last


def test_rewards_and_accuracies_read_the_same_numbers():
    for text, wanted in TABLE.items():
        number = numbers.read(text)
        if number is None or wanted is None or "<" in text:
            continue
        completion = f"<reasoning>r</reasoning><answer>{text}</answer>"
        truth = str(number)
        assert reference.number([""], [completion], [truth]) == [1.5], text
        assert reference.accuracies(completion, truth)["answer"] == 1.0, text
        assert reference.answer([""], [completion], [truth])[0] >= 0.5 or not text.strip(), text
        assert reference.accuracies(completion, f"-{abs(number.top) + 1}")["answer"] == 0.0, text


# A reference, and an answer that is wrong although it has the reference's first number.
ALGEBRA = [
    ("2x", "2"), ("2x", "2y"), (r"\frac{1}{2}x", "1/2"), ("3x^2", "3"), ("3xy", "3 y"), ("4ab", "4"), ("2pi", "2"),
    ("3i", "3"), ("sqrt(2)", "2"), ("log(8)", "8"), ("5!", "5"), ("y=3x", "3"), ("y=3x", "y=3"), ("x^2+y^2=25", "25"),
    ("x + y = 7", "7"), ("(5, 5)", "5"), ("|-5|", "-5"), ("-(5)", "5"), ("5 \u2030", "5"), ("2 hundred and five",
    "200"),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "said"), ALGEBRA)
def test_algebra_is_not_the_number_in_it(truth, said):
    completion = f"<reasoning>r</reasoning><answer>{said}</answer>"
    assert reference.number([""], [completion], [truth]) == [0.0]
    assert reference.accuracies(completion, truth)["answer"] == 0.0
    assert reference.answer([""], [completion], [truth])[0] < 0.5
    itself = f"<reasoning>r</reasoning><answer>{truth}</answer>"
    assert reference.accuracies(itself, truth)["answer"] == 1.0
    assert reference.answer([""], [itself], [truth]) == [3.0]


@given(
    strategies.integers(2, 99),
    strategies.sampled_from("xyznabcefijopqruvwXYZPQR"),
    strategies.sampled_from(["{}{}", "{}{}^2", "{}{} + 1", "{} {}^2", r"\frac{{1}}{{{}}}{}", "({}){}", "-{}{}",
    "{}*{}", "{}\u00b7{}",
    "y = {}{}", "{}^{}", "sqrt({}){}", "{}sin({})", "{}{}_1", "{}{}/7", "{}({}+1)"]),
)  # fmt: skip
def test_a_coefficient_is_no_number(coefficient, unknown, form):
    assert numbers.read(form.format(coefficient, unknown)) is None


def test_references_that_are_no_numbers_are_compared_as_text():
    assert reference.accuracies("<answer> Paris.</answer>", "Paris")["answer"] == 1.0
    assert reference.accuracies("<answer>Rome</answer>", "Paris")["answer"] == 0.0
    assert reference.accuracies("<answer>10:30</answer>", "10:30")["answer"] == 1.0
    assert reference.accuracies("", "Paris")["answer"] == 0.0


def test_any_of_several_references_is_right():
    completion = "<reasoning>r</reasoning><answer>1,200</answer>"
    for several in (["7", "1200"], [7, 1200.0], ("1200",)):
        assert reference.number([""], [completion], [several]) == [1.5]
        assert reference.accuracies(completion, several)["answer"] == 1.0
    assert reference.answer([""], [completion], [["7", "1,200"]]) == [3.0]
    with pytest.raises(ValueError, match="empty list"):
        reference.number([""], [completion], [[]])


def test_the_published_pattern_keeps_its_name():
    said = [f"<answer>{text}</answer>" for text in ("-5", "1,200", "1/2", "$4 or 5", "1.2.3", "")]
    assert reference.recipe_number([""] * 6, said, ["5", "1", "1", "4", "1", "0"]) == [1.5, 1.5, 1.5, 1.5, 0.0, 0.0]
    assert reference.number([""] * 6, said, ["5", "1", "1", "4", "1", "0"]) == [0.0] * 6
    assert "recipe_number" not in reference.DEFAULT


@pytest.mark.parametrize(
    ("texts", "right", "wanted"),
    [
        (["8", "8.0", "8.", "9", "9"], [1, 1, 1, 0, 0], 1),
        (["$1,200", "1200", "7", "7", "1200 dollars"], [1, 1, 0, 0, 1], 1),
        (["3", "1/2", "3", "0.5", ".5"], [0, 1, 0, 1, 1], 1),
        (["12%", "12", "3", "3", "12 percent"], [1, 1, 0, 0, 1], 1),
        (["Paris", " Paris.", "Rome"], [1, 1, 0], 1),
    ],
)
def test_a_majority_counts_numbers_in_any_form(texts, right, wanted):
    assert reference.majority(texts, right) == wanted


# (reference, answer, True if both are mathematically equal)
EQUATIONS = [
    ("12", "13 = 12", 0), ("12", "12 = 13", 0), ("12", "x = 11 = 12", 0), ("12", "x = 12", 1), ("12", "10 + 2 = 12",
    1),
    ("12", "f(2) = 12", 1), ("2\\sqrt{3}", "3 = 2\\sqrt{3}", 0), ("2\\sqrt{3}", "\\sqrt{12} = 2\\sqrt{3}", 1),
    ("x=5", "5", 1), ("5", "x=5", 1), ("1000", "1e3", 1), ("1e3", "1000", 1), ("2e3+x", "x+2000", 1), ("1000", "1e2",
    0),
    ("\\frac{1}{2^{98}}", "\\frac{1}{2^{99}}", 0), ("1/2^98", "1/2^98", 1), ("\\frac{\\sqrt{2}}{2^{98}}",
    "\\frac{\\sqrt{2}}{2^{99}}", 0),
    ("10^{-9}\\pi", "10^{-10}\\pi", 0), ("1/3", "0.3333333333", 0), ("1234567", "1 234 567", 1), ("0.5", "50%", 1),
    ("(1,2)", "\\{1,2\\}", 0), ("\\{1,2\\}", "\\{2,1\\}", 1), ("(1,2)", "(1,2)", 1), ("\\sqrt{2}", "1.41421356", 0),
    ("\\infty", "-\\infty", 0), ("\\infty", "\\infty", 1), ("x^2+1", "1+x^2", 1), ("12", "12 or 13", 0),
    ("2x", "x*2", 1), (r"\frac{1}{2}x", "x/2", 1), ("5!", "120", 1), ("120", "5!", 1), (r"\sqrt{4}", "2", 1), ("5",
    "|-5|", 1),
    ("-5", "-(5)", 1), ("y=3x", "y=3x", 1), ("12", "The answer is 12.", 1), ("12", "x = 12 cm", 1), ("x^2+y^2=25",
    "y^2+x^2=25", 1),
    ("4", "4ab", 0), ("4ab", "4bc", 0), ("4ab", "4ba", 1), ("4ab", r"\sqrt{16}", 0),
    (r"\sqrt{16}", "4ab", 0), ("10", "2x = 10", 1), ("1", "e^0", 1), ("ab", "ba", 1),
    *((truth, said, 0) for truth, said in ALGEBRA if "and" not in truth and "\u2030" not in truth),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "said", "equal"), EQUATIONS)
def test_equality_as_mathematics(truth, said, equal):
    pytest.importorskip("math_verify")
    assert math_answer.math_equal([""], [f"<answer>{said}</answer>"], [truth]) == [float(equal)]
    assert math_answer.math_equal([""], [f"<answer>{said}</answer>"], [["\\pi+x", truth]]) == [float(equal)]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        *[
            (f"{word} 18", None)
            for word in ("not", "more than", "Less than", "fewer than", "greater than", "other than")
        ],
        *[
            (f"18 {unit}", "18")
            for unit in ("kw", "ea", "kWh", "mph", "rpm", "tbsp", "gal", "mos", "wks", "kgs", "pcs")
        ],
        *[("2 doz", "24"), ("at least 18", "18"), ("5 more", "5"), ("18 ab", None), ("18 r 2", None)],
    ],
)
def test_words_beside_a_number(said, wanted):
    number = numbers.read(said)
    assert (None if number is None else str(number)) == wanted


@pytest.mark.parametrize(
    ("said", "truth", "equal"),
    [
        ("y=5", "x=5", False),
        ("x=5", "x=5", True),
        ("5", "x=5", True),
        ("x = 5", "5", True),
        ("x_1=5", "x_2=5", False),
        ("1+1=3", "3", False),
        ("1 + 2 = 3", "3", True),
        ("2*3=6", "6", True),
        ("7 - 2 = 4", "4", False),
        ("x = 1 + 2 = 3", "3", True),
        ("not 12", "12", False),
        ("It is not 12", "12", False),
        ("12, not 13", "13", False),
        ("notation 12", "12", True),
    ],
)
def test_an_answer_that_says_another_thing_is_not_equal(said, truth, equal):
    assert math_answer.math_equal([""], [f"<answer>{said}</answer>"], [truth]) == [float(equal)]


@pytest.mark.parametrize(
    ("said", "truth"),
    [
        ("\u221a2", r"\sqrt{2}"),
        ("2\u221a3", r"2\sqrt{3}"),
        ("\u221a(x+1)", r"\sqrt{x+1}"),
        ("x\u00b2", "x^2"),
        ("x\u207b\u00b9\u2070", "x^{-10}"),
        ("x \u2264 5", r"x \le 5"),
        ("x\u00b2+1", "1+x^2"),
    ],
)
def test_mathematics_in_unicode(said, truth):
    pytest.importorskip("math_verify")
    score = lambda said: math_answer.math_equal([""], [f"<answer>{said}</answer>"], [truth])  # noqa: E731
    assert score(said) == [1.0] and score(f"{said}+y") == [0.0]
