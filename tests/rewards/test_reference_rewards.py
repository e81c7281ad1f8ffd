"""The reference rewards on completions scored by hand, and the accuracies of an evaluation."""

import pytest

from podrl.rewards import numbers, reference

GOOD = "<reasoning>2+2=4.</reasoning><answer>4</answer>"


def score(name, completion, answer="4"):
    (value,) = reference.BUILT_IN[name](["?"], [completion], answer=[answer], question=["?"])
    return value


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (GOOD, 3.0),
        (f" \n{GOOD}\n ", 3.0),
        ("<reasoning>a\nb</reasoning>\nso\n<answer>x</answer>", 3.0),
        (f"Well. {GOOD}", 0.0),
        (f"{GOOD} Done.", 0.0),
        ("<reasoning></reasoning><answer>4</answer>", 0.0),
        ("<reasoning>a</reasoning><answer></answer>", 0.0),
        ("<answer>4</answer><reasoning>a</reasoning>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_exact_format(completion, expected):
    assert score("exact_format", completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (GOOD, 2.0),
        ("", -2.0),
        ("<reasoning>a</reasoning>4", 0.0),
        ("<answer>4</answer><reasoning>a</reasoning>", 2.0),
        (GOOD + "<answer>", 1.0),
        (GOOD + GOOD, -2.0),
    ],
)
def test_approximate_format(completion, expected):
    assert score("approximate_format", completion) == expected


@pytest.mark.parametrize(
    ("given", "truth", "expected"),
    [
        ("4", "4", 3.0),
        (" 4", "4", 1.5),
        ("4\n", "4", 1.5),
        ("4.0", "4", 0.5),
        ("110", "100", 0.5),
        ("90", "100", 0.5),
        ("111", "100", 0.25),
        ("80", "100", 0.25),
        ("120", "100", 0.25),
        ("121", "100", -1.0),
        ("79", "100", -1.0),
        ("-100", "100", -1.0),
        ("-95", "-100", 0.5),
        ("four", "4", -0.5),
        ("$4", "4", 0.5),
        ("1,100", "1000", 0.5),
        ("4 or 5", "4", -0.5),
        ("nan", "4", -0.5),
        ("inf", "4", -0.5),
        ("0.0", "0", 0.5),
        ("7", "0", -1.0),
    ],
)
def test_answer(given, truth, expected):
    assert score("answer", f"<reasoning>r</reasoning><answer>{given}</answer>", truth) == expected


def test_answer_needs_the_format():
    assert score("answer", "<answer>4</answer>") == 0.0


@pytest.mark.parametrize(
    ("completion", "truth", "expected"),
    [
        (GOOD, "4", 1.5),
        (GOOD, "5", 0.0),
        ("<answer>about 4.0 eggs", "4", 1.5),
        ("<answer>\n$4 or 5", "4", 0.0),
        ("<answer>...", "4", 0.0),
        ("4", "4", 0.0),
        ("<answer>none</answer>", "4", 0.0),
    ],
)
def test_number(completion, truth, expected):
    assert score("number", completion, truth) == expected


def test_answers_may_be_numbers_and_batches_must_match():
    assert reference.answer(["?"], [GOOD], answer=[4]) == [3.0]
    with pytest.raises(ValueError, match="shorter"):
        reference.answer(["?", "?"], [GOOD, GOOD], answer=["4"])


@pytest.mark.parametrize(
    ("completion", "truth", "expected"),
    [
        (GOOD, "4", (1, 1, 1)),
        ("<answer>21", "20", (0, 1, 0)),
        ("<reasoning>r</reasoning><answer>30</answer>", "20", (0, 0, 1)),
        ("20", "20", (0, 0, 0)),
        ("<answer>0", "0", (1, 1, 0)),
    ],
)
def test_accuracies(completion, truth, expected):
    assert reference.accuracies(completion, truth) == dict(zip(("answer", "partial", "format"), expected, strict=True))
    assert list(reference.accuracies(completion, truth, has_format=False)) == ["answer", "partial"]


def test_pass_at_k():
    # 1 - C(3,2)/C(5,2) = 1 - 3/10; 1 if fewer than k samples are wrong; k=1 gives the share of right samples.
    assert reference.pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert reference.pass_at_k(5, 4, 2) == 1.0 and reference.pass_at_k(5, 0, 5) == 0.0
    assert reference.pass_at_k(8, 2, 1) == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"pass@6 of 2 right in 5"):
        reference.pass_at_k(5, 2, 6)


def test_the_reference_of_a_group_is_read_once():
    for cached in (numbers.read, numbers.of_reference):
        cached.cache_clear()
    for guess in range(8):
        reference.accuracies(f"<answer>{guess}</answer>", "41 apples")
    assert numbers.of_reference.cache_info().misses == 1
    assert numbers.read.cache_info().misses == 9  # one for the reference, one for each of the 8 answers
