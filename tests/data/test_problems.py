"""The embedded task: right answers, fixed streams, and held-out problems that training never sees."""

import operator
import re

import pytest

from podrl.data.problem_generator import held_out
from podrl.data.problems import GENERATOR

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_step_is_true_and_leads_to_the_answer(split):
    for index in range(400):
        p = GENERATOR.problem(split, index, seed=3)
        results = [0]
        for step in p.steps:
            match = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step)
            assert match, step
            left, right, result = int(match[1]), int(match[3]), int(match[4])
            assert OPERATORS[match[2]](left, right) == result and 0 <= result <= 99 and max(left, right) <= 99, step
            if match[2] == "/":
                assert left % right == 0, step
            if len(results) > 1:
                assert results[-1] in (left, right) or left == int(re.match(r"\d+", p.steps[0])[0])
            results.append(result)
        assert p.answer == str(results[-1])
        assert p.reasoning == " ".join(f"{s}." for s in p.steps)
        given = {int(n) for n in re.findall(r"\d+", p.question)}
        computed = set(results[1:])
        used = {int(n) for step in p.steps for n in re.findall(r"\d+", step)}
        assert used <= given | computed | {2}, p  # 'twice' stands for 2
        assert given <= used, p


def test_numbers_of_steps_are_one_two_two_three():
    counts = [len(GENERATOR.problem("train", i).steps) for i in range(2000)]
    shares = [counts.count(n) / len(counts) for n in (1, 2, 3)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.05)


def test_held_out_problems_share_no_key_with_training():
    train = {GENERATOR.problem("train", i).key for i in range(3000)}
    evaluation = {p.key for p in GENERATOR.distinct("held_out", 200)}
    assert len(evaluation) == 200
    assert not train & evaluation
    assert all(held_out(key) for key in evaluation) and not any(held_out(key) for key in train)


def test_the_stream_is_a_fixed_function_of_split_index_and_seed():
    # The expected values are literals, because checkpoints would resume on other data if the sequence changed.
    assert GENERATOR.problem("train", 0).steps == ("37-29=8", "8+18=26", "26/2=13")
    assert GENERATOR.problem("train", 0).question.startswith("Ana starts with 37 eggs. She sells 29. She buys 18 more.")
    assert GENERATOR.problem("train", 5) == GENERATOR.problem("train", 5)
    assert GENERATOR.problem("train", 5) != GENERATOR.problem("train", 5, seed=1)


def test_source_is_random_access():
    source = GENERATOR.source("train", 10, seed=7)
    assert len(source) == 10 and source[9] == GENERATOR.problem("train", 9, 7)


def test_refusals():
    with pytest.raises(ValueError, match="Split 'test' does not exist"):
        GENERATOR.problem("test", 0)
    with pytest.raises(ValueError, match="-1 must be 0 or more"):
        GENERATOR.problem("train", -1)
    with pytest.raises(ValueError, match=r"data\.size"):
        GENERATOR.source("train", 0)
