"""Streams of labelled answers: rows of a record, prompts with the answers of other records, and refused records."""

import json

import numpy as np
import pytest
from embedded import TINY

from podrl.data.labels import LabelStream
from podrl.data.pipeline import DataConfig
from podrl.data.tokenizer import Tokenizer


def written(tmp_path, *records):
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(path=str(path), shuffle=False)


def test_records_of_a_file_and_prompts_with_the_answers_of_others(tmp_path):
    data = written(
        tmp_path,
        {"prompt": "How many? ", "completion": "four apples", "label": True},
        {"prompt": "Who? ", "completion": "Tom", "label": False},
    )
    tokenizer = Tokenizer(TINY)
    batch = next(LabelStream(data, tokenizer, answers=2, max_length=24))
    assert batch.desirable_B.tolist() == [True, False]
    assert batch.text == ["How many? four apples", "Who? Tom"]
    ends = [tokenizer.turn_end_id]
    prompts = [tokenizer.encode("How many? ", start=True), tokenizer.encode("Who? ", start=True)]
    answers = [tokenizer.encode("four apples") + ends, tokenizer.encode("Tom") + ends]
    tokens_BT, length_B, mask_BT = batch.unrelated()
    for b, (prompt, answer) in enumerate(zip(prompts, reversed(answers), strict=True)):
        assert tokens_BT[b, : length_B[b]].tolist() == prompt + answer
        assert mask_BT[b].tolist() == [0.0] * len(prompt) + [1.0] * len(answer) + [0.0] * (24 - length_B[b])
    # An answer that does not fit is cut off at its end.
    shortest = max(map(len, (prompts[0] + answers[0], prompts[1] + answers[1])))
    tight = next(LabelStream(data, tokenizer, answers=2, max_length=shortest))
    cut_BT, cut_B, cut_mask_BT = tight.unrelated()
    np.testing.assert_array_equal(cut_B, np.minimum(length_B, shortest))
    np.testing.assert_array_equal(cut_BT[0, : cut_B[0]], tokens_BT[0, : cut_B[0]])
    np.testing.assert_array_equal(cut_mask_BT[0, : cut_B[0]], mask_BT[0, : cut_B[0]])


def test_half_of_the_embedded_task_is_good_and_the_stream_resumes():
    stream = LabelStream(DataConfig(), Tokenizer(TINY), answers=64, max_length=112)
    first, second = next(stream), next(stream)
    assert 0.3 < first.desirable_B.mean() < 0.7
    assert all(text.count("<answer>") == 1 for text, good in zip(first.text, first.desirable_B, strict=True) if good)
    again = LabelStream(DataConfig(), Tokenizer(TINY), answers=64, max_length=112)
    again.restore(first.data_state)
    resumed = next(again)
    np.testing.assert_array_equal(resumed.tokens_BT, second.tokens_BT)
    np.testing.assert_array_equal(resumed.desirable_B, second.desirable_B)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            r"line 1 has prompt, completion: .*; 'label' is missing\. .* rename",
        ),
        ({"prompt": "a", "completion": None, "label": True}, r"line 1 has .*; 'completion' is null\. .* data\.sources"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, r"line 1: 'label' is 'yes' but must be true"),
        ({"prompt": "a", "label": True}, r"line 1 has prompt, label: a labelled answer needs the text 'completion'"),
        ({"completion": "b", "label": True}, "the question that it answers in 'prompt' or 'question'"),
    ],
)
def test_refused_records(tmp_path, record, message):
    with pytest.raises(ValueError, match=message):
        LabelStream(written(tmp_path, record), Tokenizer(TINY), answers=2, max_length=24)


def test_labels_that_are_all_the_same_are_warned_of(tmp_path, caplog):
    good = {"prompt": "a", "completion": "b", "label": True}
    LabelStream(written(tmp_path, good, good | {"label": False}), Tokenizer(TINY), answers=2, max_length=24)
    assert not caplog.text
    LabelStream(written(tmp_path, good, good), Tokenizer(TINY), answers=2, max_length=24)
    assert "All of the first 2 records have 'label': true" in caplog.text


def test_labels_of_several_sources_come_by_weight_and_the_stream_resumes(tmp_path):
    for name, label in (("good", True), ("bad", False)):
        rows = [{"question": f"{i}?", "completion": f"{name} {i}", "label": label} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = tuple({"path": str(tmp_path / f"{name}.jsonl"), "weight": w} for name, w in (("good", 1.0), ("bad", 3.0)))
    data = DataConfig(sources=sources, system_prompt="", eval_fraction=0.0, cache="")
    tokenizer = Tokenizer(TINY)
    whole = LabelStream(data, tokenizer, answers=8, max_length=64)
    batches = [next(whole) for _ in range(5)]
    for batch in batches:
        assert batch.desirable_B.sum() == 2
        assert [("good" in text) for text in batch.text] == batch.desirable_B.tolist()
    again = LabelStream(data, tokenizer, answers=8, max_length=64)
    again.restore(batches[1].data_state)
    for batch in batches[2:]:
        same = next(again)
        np.testing.assert_array_equal(same.tokens_BT, batch.tokens_BT)
        np.testing.assert_array_equal(same.desirable_B, batch.desirable_B)
        np.testing.assert_array_equal(same.unrelated()[0], batch.unrelated()[0])
