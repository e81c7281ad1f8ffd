"""Pairs of answers: which tokens are learned, files and the embedded task, exact resume."""

import json

import numpy as np
import pytest

from podrl.data.pairs import PairStream, held_out_pairs
from podrl.data.pipeline import DataConfig
from podrl.rewards import reference


def write(tmp_path, *rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learned(tokenizer, batch, b):
    return tokenizer.decode([int(t) for t, m in zip(batch.tokens_BT[b], batch.mask_BT[b], strict=True) if m])


def test_the_embedded_task_prefers_the_reference_form(tokenizer):
    batch = next(PairStream(DataConfig(), tokenizer, pairs=6, max_length=112))
    assert batch.tokens_BT.shape == batch.mask_BT.shape == (12, 112)
    for b in range(0, 12, 2):
        chosen, rejected = (learned(tokenizer, batch, i) for i in (b, b + 1))
        assert reference.accuracies(chosen, "0")["format"] and not reference.accuracies(rejected, "0")["format"]
        before = [batch.tokens_BT[i, : int(batch.mask_BT[i].argmax())].tolist() for i in (b, b + 1)]
        assert before[0] == before[1] and len(before[0]) > 4
        for i in (b, b + 1):
            assert batch.tokens_BT[i, batch.length_B[i] - 1] == tokenizer.turn_end_id
            assert not batch.mask_BT[i, batch.length_B[i] :].any()


def test_files_of_prompts_and_of_questions(tokenizer, tmp_path):
    path = write(
        tmp_path,
        {"prompt": "Say yes:", "chosen": " yes", "rejected": " no"},
        {"question": "1 + 1?", "chosen": "2", "rejected": "3"},
    )
    stream = PairStream(DataConfig(path=path, shuffle=False), tokenizer, pairs=2, max_length=96)
    batch = next(stream)
    assert [learned(tokenizer, batch, b).strip() for b in range(4)] == ["yes", "no", "2", "3"]
    assert batch.text[0] == "Say yes: yes"
    assert "<start_of_turn>user" in batch.text[2] and "1 + 1?" in batch.text[2]


@pytest.mark.parametrize("before", ["prompt", "question"])
def test_pairs_are_read_from_parquet(tokenizer, tmp_path, before):
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").Table
    row = {before: "1 + 1?", "chosen": "2", "rejected": "3"}
    parquet.write_table(table.from_pylist([row]), tmp_path / "pairs.parquet")
    paths = (str(tmp_path / "pairs.parquet"), write(tmp_path, row))
    streams = [PairStream(DataConfig(path=path), tokenizer, pairs=1, max_length=96) for path in paths]
    batches = [next(stream) for stream in streams]
    np.testing.assert_array_equal(*(batch.tokens_BT for batch in batches))
    assert [learned(tokenizer, batches[0], b).strip() for b in range(2)] == ["2", "3"]


def test_a_stream_goes_on_where_it_was(tokenizer):
    def stream():
        return PairStream(DataConfig(size=40), tokenizer, pairs=4, max_length=112)

    whole = stream()
    batches = [next(whole) for _ in range(3)]
    other = stream()
    other.restore(batches[0].data_state)
    for expected in batches[1:]:
        np.testing.assert_array_equal(next(other).tokens_BT, expected.tokens_BT)


def test_pairs_with_a_long_answer_are_left_out(tokenizer, tmp_path):
    short = {"prompt": "p", "chosen": "a", "rejected": "b"}
    path = write(tmp_path, short, {"prompt": "p", "chosen": "a", "rejected": "b " * 50})
    stream = PairStream(DataConfig(path=path), tokenizer, pairs=4, max_length=16)
    assert set(next(stream).text) == {"pa", "pb"} and stream.skipped > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, r"pairs.jsonl line 1 has prompt, chosen: a pair needs .*'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "the question that they answer in 'prompt' or 'question'"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "line 1 prefers an answer to itself"),
        (
            {"prompt": "p", "better": "a", "worse": "b"},
            r"prompt, better, worse: .*; 'chosen' is missing\. .* rename",
        ),
        ({"prompt": "p", "chosen": "a", "rejected": None}, r"; 'rejected' is null\. .* rename it in data\.sources"),
        ({"prompt": [{"role": "user", "content": "p"}], "chosen": "a"}, r"; 'rejected' is missing\. .* rename it"),
        ({"ask": "p", "chosen": "a", "rejected": "b"}, r"; 'question' is missing\. .* field in data\.question_field"),
        ({"prompt": "p", "chosen": "a", "rejected": 3}, r"; 'rejected' is '3' \(int\), which is not text"),
    ],
)
def test_what_is_no_pair_is_refused(tokenizer, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        PairStream(DataConfig(path=write(tmp_path, row)), tokenizer, pairs=1, max_length=16)


def test_pairs_held_out_of_a_file_and_of_a_file_of_their_own(tokenizer, tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1), "chosen": str(i + 1), "rejected": "?"} for i in range(40)]
    data = DataConfig(path=write(tmp_path, *rows), eval_fraction=0.3)
    sizes: dict = {"pairs": 4, "max_length": 96, "key": ""}
    held = [text for batch in held_out_pairs(data, tokenizer, count=99, **sizes) for text in batch.text]
    stream = PairStream(data, tokenizer, pairs=4, max_length=96)
    trained = {text for _ in range(stream.steps_per_epoch) for text in next(stream).text}
    assert len(held) > 4 and not trained & set(held)
    assert len(held_out_pairs(data, tokenizer, count=5, **sizes)[1].length_B) == 2
    # Records without answers are not held out; a file for evaluation is used whole.
    bare = write(tmp_path, *({k: v for k, v in row.items() if k != "answer"} for row in rows[:3]))
    assert held_out_pairs(DataConfig(path=bare), tokenizer, count=9, **sizes) == []
    (batch,) = held_out_pairs(DataConfig(path="problems", eval_path=bare), tokenizer, count=9, **sizes)
    assert len(batch.text) == 6 and "2 + 1?" in batch.text[-1]


def test_pairs_of_several_sources_come_by_weight_and_are_held_out_of_each(tokenizer, tmp_path):
    for name in "ab":
        rows = [
            {"question": f"{name} {i}?", "chosen": f"{name}{i}{'!' * (i % 9)}", "rejected": "0", "answer": "0"}
            for i in range(60)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (
        {"path": str(tmp_path / "a.jsonl"), "weight": 2.0},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1.0, "template": "plain"},
        {"path": "problems", "weight": 1.0},
    )
    data = DataConfig(sources=sources, system_prompt="", eval_fraction=0.2, cache="")
    whole = PairStream(data, tokenizer, pairs=8, max_length=112)
    batches = [next(whole) for _ in range(6)]
    chosen = [learned(tokenizer, batch, b) for batch in batches for b in range(0, 16, 2)]
    assert [sum(text.startswith(name) for text in chosen) for name in "ab"] == [24, 12]
    turns = {text[0]: "user" in whole for batch in batches for whole, text in texts(tokenizer, batch)}
    assert turns["a"] and not turns["b"]
    again = PairStream(data, tokenizer, pairs=8, max_length=112)
    again.restore(batches[2].data_state)
    for batch in batches[3:]:
        np.testing.assert_array_equal(next(again).tokens_BT, batch.tokens_BT)
    held = held_out_pairs(data, tokenizer, count=9, pairs=9, max_length=112, key="dpo.max_length")[0]
    apart = [learned(tokenizer, held, b) for b in range(0, 18, 2)]
    assert [text[0] for text in apart[::3]] == ["a"] * 3 and [text[0] for text in apart[1::3]] == ["b"] * 3
    assert not set(apart) & set(chosen)


def texts(tokenizer, batch):
    """Yields, for each chosen answer, the text of prompt and answer, and the text that is learned."""
    for b in range(0, len(batch.tokens_BT), 2):
        yield tokenizer.decode(batch.tokens_BT[b, : batch.length_B[b]].tolist()), learned(tokenizer, batch, b)
