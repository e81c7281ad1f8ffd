"""Supervised examples: learned tokens, the mixture of styles, other files, exact resume."""

import json

import numpy as np
import pytest

from podrl.data.pipeline import DataConfig, held_out_prompts
from podrl.data.sft import STYLES, SFTConfig, SFTStream
from podrl.rewards import reference


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learned(tokenizer, batch, b):
    """Joins the pieces that the model learns in row b."""
    return "".join(
        tokenizer.token_text(t) for t, m in zip(batch.tokens_BT[b], batch.mask_BT[b], strict=True) if m
    ).replace("▁", " ")


def formats(tokenizer, stream, steps):
    texts = [learned(tokenizer, batch, b) for batch in (next(stream) for _ in range(steps)) for b in range(64)]
    return [reference.accuracies(text.removesuffix("<end_of_turn>"), "0")["format"] for text in texts]


def test_the_target_and_its_end_are_learned_and_nothing_else(tokenizer):
    stream = SFTStream(DataConfig(), SFTConfig(batch_size=8, max_length=96), tokenizer)
    batch = next(stream)
    assert batch.tokens_BT.shape == batch.mask_BT.shape == (8, 96)
    for b in range(8):
        text, length = learned(tokenizer, batch, b), batch.length_B[b]
        assert text.startswith("<reasoning>") and text.endswith("</answer><end_of_turn>")
        assert batch.text[b].endswith(text.removesuffix("<end_of_turn>"))
        assert batch.tokens_BT[b, length - 1] == tokenizer.turn_end_id
        assert (batch.tokens_BT[b, length:] == tokenizer.pad_id).all() and not batch.mask_BT[b, length:].any()
        first = int(batch.mask_BT[b].argmax())
        assert batch.mask_BT[b, first:length].all()


def test_two_phases(tokenizer):
    config = SFTConfig(batch_size=64, full_steps=2, tagged_share=0.35)
    stream = SFTStream(DataConfig(), config, tokenizer)
    assert all(formats(tokenizer, stream, 2))
    assert np.mean(formats(tokenizer, stream, 8)) == pytest.approx(0.35, abs=0.07)


def test_no_style_is_in_the_reference_form():
    texts = [style.format(reasoning="2+2=4.", answer="4") for style in STYLES]
    assert all(reference.accuracies(text, "4")["format"] == 0 for text in texts)
    assert all("4" in text for text in texts)


def test_resume_is_exact(tokenizer):
    config = SFTConfig(batch_size=4, full_steps=2, tagged_share=0.5)
    whole = SFTStream(DataConfig(), config, tokenizer)
    batches = [next(whole) for _ in range(6)]
    resumed = SFTStream(DataConfig(), config, tokenizer)
    resumed.restore(batches[1].data_state)
    for batch in batches[2:]:
        other = next(resumed)
        assert np.array_equal(other.tokens_BT, batch.tokens_BT) and np.array_equal(other.mask_BT, batch.mask_BT)
        assert other.data_state == batch.data_state


def test_shards_together_are_the_whole_batch(tokenizer):
    def make(index, count):
        return SFTStream(DataConfig(), SFTConfig(batch_size=4), tokenizer, shard_index=index, shard_count=count)

    parts = np.concatenate([next(make(0, 2)).tokens_BT, next(make(1, 2)).tokens_BT])
    assert np.array_equal(parts, next(make(0, 1)).tokens_BT)
    with pytest.raises(ValueError, match=r"sft\.batch_size=4 does not split over 3"):
        make(0, 3)


def test_prompt_and_completion(tokenizer, tmp_path):
    path = write(tmp_path, {"prompt": "2+2=", "completion": "4"})
    batch = next(SFTStream(DataConfig(path=path), SFTConfig(batch_size=1, max_length=8), tokenizer))
    assert [tokenizer.token_text(t) for t in batch.tokens_BT[0]] == [
        *["<bos>", "2", "+", "2", "="],
        "4",
        "<end_of_turn>",
        "<pad>",
    ]
    assert batch.mask_BT[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "completion": "4"},
        {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]},
        {"question": "2+2=", "answer": "4"},
    ],
    ids=["completion", "messages", "question"],
)
def test_parquet_is_learned_from_as_json_lines_are(tokenizer, tmp_path, row):
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").Table
    parquet.write_table(table.from_pylist([row, row]), tmp_path / "rows.parquet")
    paths = (str(tmp_path / "rows.parquet"), write(tmp_path, row, row))
    data = [DataConfig(path=path, system_prompt="", eval_fraction=0.0) for path in paths]
    batches = [next(SFTStream(each, SFTConfig(batch_size=2, max_length=64), tokenizer)) for each in data]
    np.testing.assert_array_equal(*(batch.tokens_BT for batch in batches))
    np.testing.assert_array_equal(*(batch.mask_BT for batch in batches))
    assert "4" in learned(tokenizer, batches[0], 1)


def test_every_assistant_turn_of_a_chat_is_learned(tokenizer, tmp_path):
    roles = ("system", "user", "assistant", "user", "assistant")
    texts = ("Sum.", "2+2", " 4 ", "5", "9")
    chat = {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]}
    data = DataConfig(path=write(tmp_path, chat))
    batch = next(SFTStream(data, SFTConfig(batch_size=1, max_length=64), tokenizer))
    assert learned(tokenizer, batch, 0) == "4<end_of_turn>9<end_of_turn>"
    # The tokens equal the tokens of the whole chat.
    whole = tokenizer.encode(tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=False))
    assert batch.tokens_BT[0, : batch.length_B[0]].tolist() == whole


def test_questions_and_answers_are_written_in_the_reference_form(tokenizer, tmp_path):
    path = write(tmp_path, {"question": "2 and 2?", "answer": "It is 2+2=<<2+2=4>>4.\n#### 4"})
    data = DataConfig(path=path, system_prompt="", eval_fraction=0.0)
    batch = next(SFTStream(data, SFTConfig(batch_size=1), tokenizer))
    assert learned(tokenizer, batch, 0) == "<reasoning>It is 2+2=4.</reasoning><answer>4</answer><end_of_turn>"


def test_questions_held_out_for_evaluation_are_not_learned(tokenizer, tmp_path):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(20)]
    data = DataConfig(path=write(tmp_path, *rows), system_prompt="", eval_fraction=0.4)
    (held,) = held_out_prompts(data, tokenizer, count=20, max_prompt_length=40)
    stream = SFTStream(data, SFTConfig(batch_size=1), tokenizer)
    learned_texts = "".join(next(stream).text[0] for _ in range(stream.steps_per_epoch))
    assert stream.steps_per_epoch + len(held.text) == 20 and len(held.text) > 2
    assert not any(f"user\n{question}<" in learned_texts for question in held.fields["question"])


def test_long_examples(tokenizer, tmp_path):
    path = write(tmp_path, {"prompt": "1", "completion": "2"}, {"prompt": "1" * 20, "completion": "2"})
    stream = SFTStream(DataConfig(path=path), SFTConfig(batch_size=4, max_length=8), tokenizer)
    assert next(stream).length_B.tolist() == [4] * 4 and stream.skipped >= 3
    stream = SFTStream(DataConfig(path=path, long_prompts="error"), SFTConfig(batch_size=4, max_length=8), tokenizer)
    with pytest.raises(ValueError, match=r"has 23 tokens: sft\.max_length=8"):
        next(stream)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x"},
        {"prompt": "x", "completion": 4},
        {"messages": []},
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x"}, "y"]},
        {"question": "x", "answer": None},
    ],
)
def test_bad_records_are_named(tokenizer, tmp_path, row):
    path = write(tmp_path, {"prompt": "1", "completion": "2"}, row)
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2 has .*: an example needs 'messages'"):
        SFTStream(DataConfig(path=path), SFTConfig(batch_size=1), tokenizer)


def test_bad_configurations():
    with pytest.raises(ValueError, match=r"SFTConfig\.batch_size=0"):
        SFTConfig(batch_size=0)
    with pytest.raises(ValueError, match=r"SFTConfig\.tagged_share=1\.5"):
        SFTConfig(tagged_share=1.5)
