"""Journals with checksums: every flipped bit is noticed or harmless, and a damaged line never costs a valid line."""

import asyncio
import json
import logging

import pytest

from podrl.environments.journal import Files
from podrl.rollout.journal import NAME, WallJournal
from podrl.storage import sealed_lines

SHAPES = ({"index": int, "sample": int, "n": int, "request": str, "answer": dict},)
RECORDS = [
    {"index": 2, "sample": 0, "n": 0, "request": "a0", "answer": {"text": "4"}},
    {"index": 2, "sample": 1, "n": 0, "request": "b1", "answer": {"text": '{"é": 1e3}', "more": [None, 0.5]}},
    {"index": 3, "sample": 0, "n": 1, "request": "c2", "answer": {}},
]
CONTENT = b"".join(map(sealed_lines.encode, RECORDS))


def flips(content):
    for place in range(len(content)):
        for bit in range(8):
            yield place, content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_every_flipped_bit_is_noticed_or_harmless():
    for place, damaged in flips(CONTENT):
        found = sealed_lines.decode(damaged, SHAPES)
        records = [record for _, record in found.records]
        assert not found.unsealed and not found.torn
        assert all(record in RECORDS for record in records), f"a flip at {place} made another record"
        assert found.damaged or records == RECORDS, f"a flip at {place} is not noticed"
        assert len(records) >= len(RECORDS) - 2, "a damaged newline costs two lines, any other flip costs one line"


def test_a_last_line_is_torn_at_every_byte_and_nothing_else_is_cut(tmp_path):
    path, whole = tmp_path / "7.jsonl", len(CONTENT) - len(sealed_lines.encode(RECORDS[-1]))
    for size in range(whole, len(CONTENT)):
        path.write_bytes(CONTENT[:size])
        found = sealed_lines.read(path, SHAPES)
        kept = 3 if size == len(CONTENT) - 1 else 2  # the last line is complete even without its newline
        assert len(found.records) == kept and not found.damaged and found.torn == (size - whole if kept == 2 else 0)
        with sealed_lines.open_to_append(path, SHAPES) as file:
            file.write(sealed_lines.encode(RECORDS[0]))
        again = sealed_lines.read(path, SHAPES)
        assert [record for _, record in again.records] == [*RECORDS[:kept], RECORDS[0]] and not again.damaged


def test_a_damaged_line_stays_in_the_file_when_more_is_written(tmp_path):
    path = tmp_path / "7.jsonl"
    for place, damaged in flips(CONTENT):
        if place % 7:
            continue  # only a few bits, because files are slow
        path.write_bytes(damaged)
        before = sealed_lines.read(path, SHAPES)
        with sealed_lines.open_to_append(path, SHAPES) as file:
            file.write(sealed_lines.encode(RECORDS[0]))
        assert path.read_bytes().startswith(damaged)
        assert sealed_lines.read(path, SHAPES).records[:-1] == before.records


@pytest.mark.parametrize("key", RECORDS[0])
@pytest.mark.parametrize("value", [[], {"a": 1}, None, True, 0.5, "x", 3])
def test_an_old_line_has_values_of_its_types(key, value, tmp_path):
    old = {**RECORDS[0], key: value}
    good = isinstance(value, SHAPES[0][key]) and not isinstance(value, bool)
    (tmp_path / "7.jsonl").write_bytes(CONTENT + json.dumps(old).encode() + b"\n")
    assert len(asyncio.run(Files(tmp_path).read("7"))) == (3 if key == "request" or key == "answer" or not good else 4)
    found = sealed_lines.read(tmp_path / "7.jsonl", SHAPES)
    assert [number for number, _ in found.damaged] == ([] if good else [4])


@pytest.mark.parametrize("line", [b"[]", b"{}", b"7", b"\xff", b"\x00{}", b"[" * 100_000, b"9" * 5000, b""])
def test_what_is_no_record_is_damaged(line):
    found = sealed_lines.decode(CONTENT + line + b"\n" + CONTENT, SHAPES)
    assert [number for number, _ in found.damaged] == [4] and len(found.records) == 6


def test_a_damaged_answer_is_said_and_asked_for_again(tmp_path, caplog):
    path = tmp_path / "7.jsonl"
    path.write_bytes(CONTENT.replace(b'"text": "4"', b'"text": "5"'))
    files = Files(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(files.read("7"))
    assert list(found) == [(2, 1, 0), (3, 0, 1)]
    assert "Line 1 of" in caplog.text and "makes the call again" in caplog.text
    asyncio.run(files.add("7", RECORDS[0]))
    files.close()
    assert list(asyncio.run(Files(tmp_path).read("7")).values()) == [*RECORDS[1:], RECORDS[0]]


def test_a_journal_of_an_earlier_version_is_read_and_said(tmp_path, caplog):
    (tmp_path / "7.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    files = Files(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert list(asyncio.run(files.read("7")).values()) == RECORDS
    assert "3 lines of" in caplog.text and "no checksum" in caplog.text
    files.close()


def test_an_answer_that_did_not_reach_the_disk_is_not_known(tmp_path, monkeypatch):
    """An answer must not count as on disk if its write failed: when it is sent again, it is written again."""
    files = Files(tmp_path)

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(files.add("7", RECORDS[0]))
    (tmp_path / "7.jsonl").write_bytes(CONTENT[:10])  # as much as the disk had room for
    asyncio.run(files.add("7", RECORDS[0]))
    files.close()
    assert (tmp_path / "7.jsonl").read_bytes() == sealed_lines.encode(RECORDS[0])


GROUP = {"index": 4, "asked": 1, "runs": [[[1, 3]], [[1, 2]]], "tokens": [3, 2], "late": []}
DECISIONS = [{"step": 1, "again": [4]}, {"step": 1, "groups": [GROUP], "queue": {"queue/ready": 1.0}}]


def test_every_flipped_bit_in_the_clocks_journal_is_refused_or_harmless(tmp_path):
    journal = WallJournal(tmp_path)
    for line in DECISIONS:
        journal.write(line)
    content = (tmp_path / NAME).read_bytes()
    for place, damaged in flips(content):
        if place % 5:
            continue  # only a few bits, because files are slow; the test above flips every bit
        (tmp_path / NAME).write_bytes(damaged)
        try:
            again = WallJournal(tmp_path)
        except ValueError as error:
            assert "is damaged" in str(error) and "remove the line" in str(error)
        else:
            assert again.batch(1) == DECISIONS[1] and again.again(1) == [4]


def test_the_clocks_journal_says_where_it_is_damaged(tmp_path):
    lines = [sealed_lines.encode({"step": step, "again": []}) for step in (1, 2, 3)]
    (tmp_path / NAME).write_bytes(lines[0] + lines[1].replace(b"2", b"4", 1) + lines[2])
    with pytest.raises(ValueError, match=r"Line 2 of .*batches.jsonl is damaged .* belong to step 1 and step 3"):
        WallJournal(tmp_path)


def test_a_torn_line_of_an_earlier_version_is_passed_over(tmp_path):
    old = [json.dumps(line).encode() + b"\n" for line in DECISIONS]
    (tmp_path / NAME).write_bytes(old[0] + b'{"step": 1, "gro\n' + old[1])
    assert WallJournal(tmp_path).batch(1) == DECISIONS[1]
