"""Files of records: every format gives the same records, and a bad file is named with line and reason."""

import datetime
import decimal
import importlib.util
import json
import os
import re
import sys
import tracemalloc

import numpy as np
import pytest
from array_record.python import array_record_module

from podrl.data import shape, sources
from podrl.data.config import EMBEDDED, REASONING
from podrl.data.pipeline import DataConfig, PromptStream
from podrl.runtime import plain

ROWS = [{"question": 'Two, and "two"?', "answer": "x\n#### 4"}, {"question": "é?", "answer": "#### 1,200"}]
ASKS = ("question", "prompt", "messages")


def check(record, place):
    """Checks a record as a job checks its data."""
    shape.check(record, place)
    shape.answers(record, place)


def write_jsonl(path, rows=ROWS):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")


def everything(records):
    return [dict(records[i]) for i in range(len(records))]


def test_jsonl(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    records = sources.read(str(tmp_path / "a.jsonl"), ASKS, check)
    assert everything(records) == ROWS
    assert records.place(1) == f"{tmp_path}/a.jsonl line 2"


def test_csv_as_kaggle_writes_gsm8k(tmp_path):
    # The file has quoted fields with commas, doubled quotes and line breaks, a byte-order mark, and Windows line ends.
    text = 'question,answer\r\n"Two, and ""two""?","x\n#### 4"\r\né?,"#### 1,200"\r\n'
    (tmp_path / "main_train.csv").write_bytes(text.encode("utf-8-sig"))
    records = sources.read(str(tmp_path / "main_train.csv"), ASKS, check)
    assert everything(records) == ROWS
    assert records.place(1).endswith("main_train.csv line 4")


def test_array_record(tmp_path):
    path = str(tmp_path / "a.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for row in ROWS:
        writer.write(json.dumps(row).encode())
    writer.close()
    records = sources.read(path, ASKS, check)
    assert everything(records) == ROWS
    places: list[str] = []
    sources.read(path, check=lambda record, place: places.append(place))
    assert places == [f"{path} record 0", f"{path} record 1"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert everything(sources.read(str(path), ASKS, check)) == ROWS
    with pytest.raises(ValueError, match="no column 'label' among question, answer"):
        sources.read(str(path), ("label",))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        sources.read(str(path))


def test_parquet_without_its_library_names_the_extra(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"\[parquet\]'"):
        sources.read(str(tmp_path / "a.parquet"))


def test_several_files_in_the_order_of_their_names(tmp_path):
    write_jsonl(tmp_path / "p-1.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "p-0.jsonl", ROWS[:1])
    assert everything(sources.read(str(tmp_path / "p-*.jsonl"), ASKS, check)) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a\.jsonl is empty"),
        ("a.jsonl", "\n \n", r"a\.jsonl is empty"),
        ("a.jsonl", '{"question": "q", "answer": "1"}\n{"question": \n', r"a\.jsonl line 2 is not JSON \(.*\): '\{\"q"),
        ("a.jsonl", "[1]\n", r"a\.jsonl line 1 holds list '\[1\]'"),
        ("a.jsonl", '\n{"answer": "1"}\n', r"a\.jsonl line 2 has answer: it must hold 'question', 'prompt' or 'mess"),
        (
            "a.jsonl",
            '{"question": "q", "answer": [[1]]}',
            r"line 1: 'answer' is \[\[1\]\]: .* must be text or a number",
        ),
        ("a.jsonl", '{"question": " ", "answer": "1"}', r"line 1: 'question' is ' ' but must be text"),
        ("a.jsonl", '{"question": ["q"], "answer": "1"}', r"line 1: 'question' is \['q'\] but must be text"),
        ("a.csv", "", r"a\.csv is empty"),
        ("a.csv", "question,answer\n", r"a\.csv is empty"),
        (
            "a.csv",
            "ask,reply\nq,1\n",
            r"a\.csv line 1: no column 'question' or .* among ask, reply",
        ),
        ("a.csv", "question,answer\nq,1\nq\n", r"a\.csv line 3 has 1 values for the 2 columns question, answer"),
        ("a.csv", 'question,answer\n"q,1\n', r"a\.csv line 2 is not CSV"),
        ("a.csv", "question,answer\n,1\n", r"a\.csv line 2: 'question' is '' but must be text"),
        ("a.txt", "q", r"a\.txt ends in '\.txt', which is not a known format: use \.jsonl"),
    ],
)
def test_bad_files_are_named_with_line_and_reason(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        sources.read(str(tmp_path / name), ASKS, check)


def test_bad_bytes_are_named_with_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "q", "answer": "1"}\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 is not UTF-8"):
        sources.read(str(tmp_path / "a.jsonl"), ASKS, check)


def test_a_path_that_cannot_be_read_is_told_all_other_forms(tmp_path):
    (tmp_path / "a.txt").write_text("q")
    for name in ("a.txt", "problem"):
        with pytest.raises((ValueError, FileNotFoundError)) as refused:
            sources.read(str(tmp_path / name))
        assert {*EMBEDDED, REASONING} <= set(re.findall(r"\w+:?", str(refused.value)))
        assert name == "problem" or "tfds:NAME/SPLIT or hf:ORG/NAME:CONFIG:SPLIT." in str(refused.value)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl does not exist: the path must name a file"):
        sources.read(str(tmp_path / "no.jsonl"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        sources.read(str(tmp_path / "no-*.jsonl"))
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(FileNotFoundError, match="is a directory"):
        sources.read(str(tmp_path / "d.jsonl"))


@pytest.mark.skipif(importlib.util.find_spec("tensorflow_datasets") is None, reason="extra [tfds] is not installed")
def test_tfds_is_read_without_tensorflow(tmp_path, tokenizer, monkeypatch):
    """Reads a data set that is prepared on this disk: splits, parts of splits, texts, and the stream of its prompts."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    import tensorflow_datasets as tfds

    class Pens(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        RELEASE_NOTES = {"1.0.0": "first"}  # noqa: RUF012

        def _info(self):
            kinds = {"question": tfds.features.Text(), "answer": tfds.features.Text(), "id": np.int64}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(kinds))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, 20), "test": self._generate_examples(20, 25)}

        def _generate_examples(self, first, last):
            for i in range(first, last):
                yield i, {"question": f"Zoë has {i} pens?", "answer": str(i), "id": i}

    Pens(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    found = {split: sources.read(f"tfds:pens/{split}", check=check) for split in ("train", "test", "train[:50%]")}
    assert {split: len(records) for split, records in found.items()} == {"train": 20, "test": 5, "train[:50%]": 10}
    records = list(found["test"])
    assert sorted(record["id"] for record in records) == list(range(20, 25))
    assert all(record["question"] == f"Zoë has {record['id']} pens?" for record in records)
    assert found["test"].place(2) == "tfds:pens/test record 2"
    data = DataConfig(path="tfds:pens/train", system_prompt="", eval_fraction=0.2)
    drawn = next(PromptStream.from_config(data, tokenizer, prompts_per_step=4, max_prompt_length=64))
    assert drawn.fields["answer"] == [str(i) for i in drawn.fields["id"]] and "tensorflow" not in sys.modules


def test_tfds_names(monkeypatch):
    with pytest.raises(ValueError, match="tfds:gsm8k/train"):
        sources.read("tfds:gsm8k")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"\[tfds\]'"):
        sources.read("tfds:gsm8k/train")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_file_takes_a_few_bytes_per_record(tmp_path, suffix):
    """The records stay in the file: reading it takes less than 64 bytes of memory per record."""
    path, count = tmp_path / f"a{suffix}", 4000
    rows = [{"question": f"q{i}?", "answer": f"{i}", "unused": "x" * 500} for i in range(count)]
    if suffix == ".jsonl":
        write_jsonl(path, rows)
    else:
        path.write_text("question,answer,unused\n" + "".join(f"q{i}?,{i},{'x' * 500}\n" for i in range(count)))
    tracemalloc.start()
    try:
        records = sources.read(str(path), ASKS, check)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(records) == count and records[count - 1]["answer"] == f"{count - 1}"
    assert held < 64 * count < path.stat().st_size / 8


def test_a_file_that_changes_under_a_run_is_an_error_and_not_other_data(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path)
    records = sources.read(str(path), ASKS, check)
    write_jsonl(path, [ROWS[0], {"question": "e?", "answer": "#### 1,300"}])
    assert dict(records[0]) == ROWS[0]
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 is no longer what it was"):
        records[1]


def test_every_record_is_shown_to_a_check_once_with_its_place(tmp_path):
    write_jsonl(tmp_path / "p-1.jsonl")
    (tmp_path / "p-2.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    seen = []
    records = sources.read(str(tmp_path / "p-*.jsonl"), check=lambda record, place: seen.append((record, place)))
    assert seen == [(records[i], records.place(i)) for i in range(3)]
    assert [place for _, place in seen] == [f"{tmp_path}/p-1.jsonl line {n}" for n in (1, 2)] + [
        f"{tmp_path}/p-2.jsonl line 1"
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.array_record"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_has_no_end_is_refused_by_name(tmp_path, name, kind):
    """Reading a pipe without a writer or /dev/zero would never end, whether it is given by name or by pattern."""
    if kind == "a pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, f"{tmp_path}/*{name[1:]}"):
        with pytest.raises(ValueError, match=rf"{name} is {kind}.* must be a regular file"):
            sources.read(str(path))


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([["q"], ["1"], ["2"]], names=["question", "answer", "answer"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"several columns have the name 'answer'"):
        sources.read(str(tmp_path / "a.parquet"))


def test_values_of_arrow_are_those_of_json(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    when = datetime.datetime(2024, 5, 1, 12, 30)
    row = {"question": b"q", "at": when, "day": when.date(), "hour": when.time(), "for": datetime.timedelta(hours=2)}
    row |= {
        "cost": decimal.Decimal("1.50"),
        "count": decimal.Decimal("3.00"),
        "more": [{"day": when.date(), "no": None}],
    }
    row |= {"exact": decimal.Decimal("12345678901234567.25")}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (found,) = everything(sources.read(str(tmp_path / "a.parquet"), ASKS, check))
    times = {"at": "2024-05-01T12:30:00", "day": "2024-05-01", "hour": "12:30:00", "for": "2:00:00"}
    assert found == {"question": "q", **times, "cost": 1.5, "count": 3, "more": [{"day": "2024-05-01"}]} | {
        "exact": 12345678901234567.25
    }
    assert plain.text(found["exact"]) == "12345678901234567.25" and isinstance(found["count"], int)
    sources.check_json(found, "row 0")
    with pytest.raises(ValueError, match=r"row 0: the field 'image' is .*, which JSON does not hold"):
        sources.check_json({"image": {"bytes": b"\xff"}}, "row 0")


def test_a_long_document_in_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n" + "a" * 200_000 + ",4\n")
    assert len(sources.read(str(tmp_path / "a.csv"), ASKS, check)[0]["question"]) == 200_000


def test_a_file_that_is_written_again_is_read_again(tmp_path):
    before = None
    for i in range(3):  # the file keeps its size, and its time changes by a nanosecond
        (tmp_path / "a.jsonl").write_text(json.dumps({"question": str(i)}) + "\n")
        os.utime(tmp_path / "a.jsonl", ns=(10**18, 10**18 + i))
        assert sources.identity(str(tmp_path / "a.jsonl")) != before
        before = sources.identity(str(tmp_path / "a.jsonl"))
