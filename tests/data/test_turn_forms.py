"""Conversations in ShareGPT's form or with content in parts are read as the same conversations in podrl's form."""

import json

import numpy as np
import pytest
from chat_families import FAMILIES, written

from podrl.data import shape
from podrl.data.config import DataConfig
from podrl.data.conversation import prompts_of
from podrl.data.labels import LabelStream
from podrl.data.pairs import PairStream
from podrl.data.pipeline import PromptStream
from podrl.data.sft import SFTConfig, SFTStream
from podrl.data.tokenizer import Tokenizer

SYSTEM, ASK, SAY = (
    {"role": r, "content": c} for r, c in (("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"))
)
ASK2, SAY2, WRONG = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return Tokenizer(written(tmp_path_factory.mktemp("forms") / "qwen25", FAMILIES["qwen25"]))


def share(turns):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names.get(turn["role"], turn["role"]), "value": turn["content"]} for turn in turns]


def parts(turns):
    """Splits every content into two parts in OpenAI's form."""
    cut = lambda text: [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}]  # noqa: E731
    return [{**turn, "content": cut(turn["content"])} for turn in turns]


def sft(tokenizer, path):
    batch = next(SFTStream(DataConfig(path=path), SFTConfig(batch_size=1, max_length=64), tokenizer))
    return batch.tokens_BT, batch.mask_BT


def pairs(tokenizer, path):
    batch = next(PairStream(DataConfig(path=path), tokenizer, pairs=1, max_length=64))
    return batch.tokens_BT, batch.mask_BT


def labels(tokenizer, path):
    batch = next(LabelStream(DataConfig(path=path), tokenizer, answers=1, max_length=64))
    return batch.tokens_BT, batch.mask_BT


def prompts(tokenizer, path):
    data = DataConfig(path=path, eval_fraction=0.0)
    batch = next(PromptStream.from_config(data, tokenizer, prompts_per_step=1, max_prompt_length=64))
    return batch.tokens_PT, np.asarray(batch.text)


CHAT = [SYSTEM, ASK, SAY, ASK2, SAY2]
KINDS = {
    "sft": (sft, {"messages": CHAT}),
    "sft, completion": (sft, {"prompt": CHAT[:-1], "completion": CHAT[-1:]}),
    "pairs": (pairs, {"prompt": CHAT[:-1], "chosen": [SAY2], "rejected": [WRONG]}),
    "whole pairs": (pairs, {"chosen": CHAT, "rejected": [*CHAT[:-1], WRONG]}),
    "labels": (labels, {"prompt": CHAT[:-1], "completion": [SAY2], "label": True}),
    "prompts": (prompts, {"messages": CHAT}),
    "prompts in the field prompt": (prompts, {"prompt": CHAT[:-1]}),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_conversation_is_the_same_one(chatml, tmp_path, kind, suffix):
    made, record = KINDS[kind]
    forms = {"own": lambda turns: turns, "share": share, "parts": parts}
    found = {}
    for name, form in forms.items():
        row = {key: form(value) if isinstance(value, list) else value for key, value in record.items()}
        if name == "share" and "messages" in row:
            row["conversations"] = row.pop("messages")
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "jsonl":
            path.write_text(json.dumps(row) + "\n")
        else:
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([row]), path)
        found[name] = made(chatml, str(path))
    for name in ("share", "parts"):
        for got, want in zip(found[name], found["own"], strict=True):
            np.testing.assert_array_equal(got, want)


def test_the_system_text_beside_a_conversation_is_its_first_turn():
    record = {"conversations": share([ASK, SAY]), "system": "Be brief.", "id": 3}
    assert shape.normal(record) == {"messages": [SYSTEM, ASK, SAY], "id": 3}
    assert shape.normal({**record, "system": ""})["messages"] == [ASK, SAY]


def test_conversations_of_python_may_have_parts(chatml):
    one, other = prompts_of([[SYSTEM, ASK], parts([SYSTEM, ASK])], chatml, max_length=64).text
    assert one == other
    listed = PromptStream.from_list([{"messages": parts([ASK])}], chatml, prompts_per_step=1, max_prompt_length=64)
    assert "1+1?" in next(listed).text[0]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]},
            "'image_url'",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio'"),
        ({"role": "user", "content": ["a", "b"]}, "'a'"),
        ({"role": "user", "content": []}, "must be text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "a part of type 'text'"),
        ({"from": "function_call", "value": "{}"}, "human, gpt, user"),
        ({"from": "human", "value": None}, "must be text"),
        ({"from": "human", "role": "user", "content": 3}, "must be text"),
        ({"from": "human", "text": "a"}, "human, gpt, user"),
        (3, "without the text 'role'"),
    ],
)
def test_parts_and_speakers_that_podrl_does_not_know_are_refused_with_their_place(chatml, tmp_path, turn, message):
    path = tmp_path / "turns.jsonl"
    for field, record in (("messages", {"messages": [turn, SAY]}), ("conversations", {"conversations": [turn, SAY]})):
        path.write_text(json.dumps(record) + "\n")
        with pytest.raises(ValueError, match=r"turns.jsonl line 1") as raised:
            sft(chatml, str(path))
        assert message in str(raised.value), field
        with pytest.raises(ValueError, match=r"turns.jsonl line 1"):
            prompts(chatml, str(path))


def test_compressed_files_are_refused_by_name(chatml, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.jsonl.gz is compressed.*gunzip"):
        sft(chatml, str(tmp_path / "a.jsonl.gz"))
