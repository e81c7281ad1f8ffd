"""Answers keep the value that the user wrote, from a file of any format to the reward that compares with them."""

import csv
import itertools
import json
import math
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from podrl.data import labels, pairs, sft, shape, sources
from podrl.data.mixture import split
from podrl.data.pipeline import DataConfig, PromptStream, held_out_prompts
from podrl.data.problem_generator import RandomDraws
from podrl.rewards import reference, text
from podrl.runtime import plain

WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda word: word.strip() and "####" not in word
)
NUMBERS = st.one_of(
    st.just(0), st.just(0.0), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-9, 9)
)
SCALARS = st.one_of(NUMBERS, WORDS)
ANSWERS = st.one_of(SCALARS, st.lists(SCALARS, min_size=1, max_size=3))
QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def arrives(got, written):
    """Returns True if a text has the value that was written; a number must keep every digit and have no exponent."""
    if isinstance(written, list) != isinstance(got, list):
        return False
    if isinstance(written, list):
        return len(got) == len(written) and all(map(arrives, got, written))
    if isinstance(written, str):
        return got == written.strip()
    return Decimal(got) == Decimal(str(written)) and "e" not in got.lower() and not got.endswith(".0")


FILES = itertools.count()


def new(tmp_path, suffix):
    """Returns the path of a new file for every example, because the cache finds records by a file's name, size and
    time."""
    return tmp_path / f"{next(FILES)}{suffix}"


def stream(tokenizer, config, count):
    batch = next(PromptStream.from_config(config, tokenizer, prompts_per_step=count, max_prompt_length=512))
    return batch.fields["answer"]


def write_jsonl(path, answers):
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": a}) + "\n" for i, a in enumerate(answers)))


def write_csv(path, answers):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *((f"q{i}", a) for i, a in enumerate(answers))])


def write_parquet(path, answers):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"question": [f"q{i}" for i in range(len(answers))], "answer": answers}), path
    )


@QUICK
@given(st.lists(ANSWERS, min_size=1, max_size=6))
@example([0, 0.0, -0.0, 18.0, 0.00001, 10**30, -1e22, 1.5e-300, sys.float_info.max, "0", ["0", 0], [18.0]])
def test_json_answers_arrive_with_their_value(tokenizer, tmp_path, answers):
    file, other = new(tmp_path, ".jsonl"), new(tmp_path, ".jsonl")
    write_jsonl(file, answers)
    write_jsonl(other, ["other"])
    shared: dict[str, Any] = {"shuffle": False, "eval_fraction": 0.0, "cache": ""}
    given_data: dict[str, Any]
    for given_data in (
        {"path": str(file)},
        {"sources": ({"path": str(file)},)},
        {"sources": ({"path": str(file), "transforms": ({"rename": {"question": "prompt"}},)},)},
    ):
        got = stream(tokenizer, DataConfig(**given_data, **shared), len(answers))
        assert all(map(arrives, got, answers)), (got, answers)
    sources = {"sources": ({"path": str(file), "weight": 50.0}, {"path": str(other), "weight": 1.0})}
    mixed = PromptStream.from_config(
        DataConfig(**sources, **shared), tokenizer, prompts_per_step=len(answers), max_prompt_length=512
    )
    fields = next(mixed).fields
    asked = [
        (question, got) for question, got in zip(fields["question"], fields["answer"], strict=True) if got != "other"
    ]
    assert asked
    assert all(arrives(got, answers[int(question[1:])]) for question, got in asked)


@QUICK
@given(st.lists(WORDS | NUMBERS, min_size=1, max_size=6))
def test_csv_answers_are_the_texts_that_stand_there(tokenizer, tmp_path, answers):
    write_csv(file := new(tmp_path, ".csv"), answers)
    config = DataConfig(path=str(file), shuffle=False, eval_fraction=0.0, cache="")
    assert stream(tokenizer, config, len(answers)) == [str(one).strip() for one in answers]


@QUICK
@given(
    st.one_of(
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6),
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6),
        st.lists(WORDS, min_size=1, max_size=6),
        st.lists(st.lists(st.integers(-99, 99), min_size=1, max_size=3), min_size=1, max_size=6),
    )
)
@example([0, 1])
@example([0.0, 18.0])
def test_parquet_answers_arrive_with_their_value(tokenizer, tmp_path, answers):
    write_parquet(file := new(tmp_path, ".parquet"), answers)
    config = DataConfig(path=str(file), shuffle=False, eval_fraction=0.0, cache="")
    got = stream(tokenizer, config, len(answers))
    assert all(map(arrives, got, answers)), (got, answers)


def test_parquet_numbers_of_other_types(tokenizer, tmp_path):
    import pyarrow

    for column, wanted in (
        (pyarrow.array([0.1, 18.0], pyarrow.float32()), ["0.1", "18"]),
        (pyarrow.array([Decimal("1.50"), Decimal("0.00")]), ["1.5", "0"]),
        (pyarrow.array([0, 7], pyarrow.uint8()), ["0", "7"]),
    ):
        write_parquet(file := new(tmp_path, ".parquet"), column)
        config = DataConfig(path=str(file), shuffle=False, eval_fraction=0.0, cache="")
        assert stream(tokenizer, config, 2) == wanted


def test_digits_beyond_a_float_are_kept(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": 0.12345678901234567891}\n')
    config = DataConfig(path=str(tmp_path / "a.jsonl"), eval_fraction=0.0, cache="")
    assert stream(tokenizer, config, 1) == ["0.12345678901234567891"]


NO_ANSWERS = ("NaN", "Infinity", "-Infinity", "1e400", "1e-400", "[1, NaN]", "[[1]]", "true", "{}", '[""]', '"5 ####"')


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_what_is_no_answer_is_refused_with_its_line(tmp_path, answer):
    (tmp_path / "a.jsonl").write_text(f'{{"question": "q", "answer": {answer}}}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: 'answer' is .*\. An answer is a text or a number"):
        split(DataConfig(path=str(tmp_path / "a.jsonl"), cache=""))


@pytest.mark.parametrize("answer", [None, "", "  ", []])
def test_what_is_left_empty_is_no_answer(answer):
    assert not shape.answers({"question": "q", "answer": answer}, "x")
    assert "answer" not in shape.fields({"question": "q", "answer": answer})


@pytest.mark.parametrize(
    ("solution", "final"),
    [
        ("so #### 1,200", "1200"),
        ("#### $1,234,567.50", "$1234567.50"),
        ("#### 3,4", "3,4"),
        ("#### (1,200)", "(1,200)"),
        ("#### 0", "0"),
        (["#### 4", "four"], ["4", "four"]),
    ],
)
def test_the_final_answer_of_a_solution(solution, final):
    assert shape.fields({"question": "q", "answer": solution})["answer"] == final


def test_a_held_out_answer_of_zero_arrives(tokenizer, tmp_path):
    write_jsonl(tmp_path / "zero.jsonl", [0] * 40)
    config = DataConfig(path=str(tmp_path / "zero.jsonl"), eval_fraction=0.3, cache="")
    (held,) = held_out_prompts(config, tokenizer, count=8, max_prompt_length=64)
    assert set(held.fields["answer"]) == {"0"}


ZERO, NONE = "<reasoning>r</reasoning><answer>0</answer>", "<reasoning>r</reasoning><answer>None</answer>"


@pytest.mark.parametrize("truth", [0, 0.0, "0", [5, 0], np.int64(0), np.float32(0), Decimal("0.0")])
def test_every_reward_reads_a_reference_of_zero(truth):
    asked = {"prompts": ["q"] * 2, "completions": [ZERO, NONE], "answer": [truth] * 2}
    assert reference.answer(**asked)[0] == 3.0 > reference.answer(**asked)[1]
    assert reference.number(**asked) == [1.5, 0.0]
    assert text.TextReward("exact_match")(**asked) == [1.0, 0.0]
    assert text.TextReward("token_f1")(**asked) == [1.0, 0.0]
    assert reference.accuracies(ZERO, truth)["answer"] == 1.0


@pytest.mark.parametrize("score", [reference.answer, reference.number, text.TextReward("exact_match")])
def test_a_missing_reference_is_an_error_and_not_the_word_none(score):
    with pytest.raises(ValueError, match="None must be text or a number"):
        score(prompts=["q"], completions=[NONE], answer=[None])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_as_text_is_that_number_in_plain_digits(value):
    written = plain.text(value)
    assert float(written) == value
    assert set(written) <= set("-.0123456789")
    assert not math.isclose(value, 0) or written in ("0", written.rstrip("0"))


TURNS = st.sampled_from(
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user"},
        {"role": 1, "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        "hi",
        None,
    ]
)
ODD = st.sampled_from([None, True, 0, 18.0, math.nan, "", " ", "#### 4", "x ####", [], {}, [None], ["a"], {"a": 1}])
NAMES = ("question", "answer", "prompt", "messages", "completion", "chosen", "rejected", "label", "solution", "tools")
ROWS = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.one_of(ODD, WORDS, st.lists(TURNS, max_size=3)), max_size=5),
    min_size=1,
    max_size=2,
)


@pytest.mark.parametrize("form", [None, sft.check_form, pairs.check_form, labels.check_form])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, fraction=st.sampled_from([0.0, 0.4]))
@example(rows=[{"prompt": [{"role": 1}, "hi"], "question": "q", "answer": 0}], fraction=0.0)
@example(rows=[{"messages": ["hi"], "prompt": "p", "completion": "c", "label": True}], fraction=0.4)
def test_a_record_of_any_form_is_read_or_refused_with_its_line(tmp_path, form, rows, fraction):
    file = new(tmp_path, ".jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        opened = split(DataConfig(path=str(file), eval_fraction=fraction, cache=""), form)
    except ValueError as error:
        assert str(file) in str(error)
    else:
        assert sum(len(part.train) + len(part.held_out) for part in opened.parts) == len(rows)


def test_a_field_of_a_name_that_podrl_uses_keeps_its_value():
    record = {"question": "q", "answer": 0, "solution": 7}
    assert shape.fields(record) == {"question": "q", "answer": "0", "solution": 7}
    assert shape.fields({**record, "solution": None}) == {"question": "q", "answer": "0", "solution": "0"}
    (reference_form, _) = sft.forms(record, shape.fields(record), RandomDraws(0, 0, 0))
    assert "<answer>0</answer>" in reference_form[0].text


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_narrow_floats_of_parquet_keep_what_was_written_at_any_depth(tmp_path, kind):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    narrow = getattr(pyarrow, kind)()
    columns = {"alone": (0.1, narrow), "list": ([0.1, None], pyarrow.list_(narrow))}
    columns["object"] = ({"x": [0.1], "y": "z"}, pyarrow.struct({"x": pyarrow.list_(narrow), "y": pyarrow.string()}))
    halves = lambda x: np.float16(x) if kind == "float16" and isinstance(x, float) else x  # noqa: E731
    made = {
        name: pyarrow.array([json.loads(json.dumps(value), parse_float=lambda text: halves(float(text)))], of)
        for name, (value, of) in columns.items()
    }
    parquet.write_table(pyarrow.table({"question": ["q"], **made}), tmp_path / "t.parquet")
    (record,) = sources.read(str(tmp_path / "t.parquet"))
    assert record == {"question": "q", "alone": 0.1, "list": [0.1, None], "object": {"x": [0.1], "y": "z"}}


def test_objects_of_a_parquet_column_have_the_keys_that_each_was_given(tmp_path):
    """Arrow gives every object the union of the keys; a key that a call did not have must not be learned as null."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    calls = [{"name": "f", "arguments": {"city": "x"}}, {"name": "g", "arguments": {"day": "y"}}]
    turns = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls
    ]
    table = pyarrow.table({"messages": turns, "answer": ["1", None]})
    parquet.write_table(table, tmp_path / "t.parquet")
    records = sources.read(str(tmp_path / "t.parquet"))
    assert [record["messages"][1]["tool_calls"] for record in records] == [[call] for call in calls]


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"question": "\\ud83d\\ude00"}\n{"question": "a\\ud800b"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl line 2 holds half of a surrogate pair"):
        sources.read(str(tmp_path / "t.jsonl"))


def test_the_mark_of_an_answer_is_no_heading():
    assert shape.final_answer("2+2=4\n#### 4\n") == "4"
    assert shape.final_answer("#### Title\nfoo") == "#### Title\nfoo"
    assert sft.plain_solution("2+2=4\n#### 4") == "2+2=4"
    assert sft.plain_solution("one\n#### Title\nfoo") == "one\n#### Title\nfoo"


def test_a_field_that_is_null_is_not_there():
    assert shape.prompt_field({"messages": None, "prompt": "x"}) == "prompt"
    assert shape.prompt_field({"question": None}) == "question", (
        "the field is named if the record has no other question"
    )
    sft.check_form({"messages": None, "prompt": "x", "completion": "y"}, "line 1", DataConfig())


@pytest.mark.parametrize("value", [True, math.nan, {"a": 1}])
def test_an_answer_that_nobody_trains_on_may_be_anything(tmp_path, value):
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": turns, "answer": value}) + "\n")
    opened = split(DataConfig(path=str(tmp_path / "t.jsonl"), cache="", eval_fraction=0.0), sft.check_form)
    assert opened.unanswered
