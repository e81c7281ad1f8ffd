"""Prompts that only a teacher reads: the hint's place in every form of a record, and refused hints."""

import json

import pytest
from embedded import TINY

from podrl.data.config import DataConfig
from podrl.data.hint import TEACHER_PROMPT, with_hint
from podrl.data.pipeline import PromptStream, held_out_prompts
from podrl.data.tokenizer import Tokenizer

HINT = "The answer is {answer}."


def test_a_hint_stands_behind_what_is_asked_or_in_its_place():
    fields = {"answer": ["4", "four"], "level": 2}
    asks = {"question": "2 + 2?"}
    assert with_hint(asks, fields, HINT, "question") == {"question": "2 + 2?\n\nThe answer is 4."}
    assert with_hint({"prompt": "Q: 2 + 2 A:"}, fields, "{level}: {prompt}", "question") == {"prompt": "2: Q: 2 + 2 A:"}
    turns = [{"role": "user", "content": "2 + {answer}?"}, {"role": "assistant", "content": "4"}]
    found = with_hint({"messages": turns}, fields, HINT, "question")
    assert found["messages"][0]["content"] == "2 + {answer}?\n\nThe answer is 4.", (
        "braces in the question are not replaced"
    )
    assert found["messages"][1] == turns[1] and turns[0]["content"] == "2 + {answer}?"


@pytest.mark.parametrize("answer", [None, "", [], {"a": 1}, float("nan")])
def test_a_record_without_the_field_of_its_hint_is_refused(answer):
    with pytest.raises(ValueError, match=r"data.hint names \{answer\}, and it is .* name a field of text .* prompt, "):
        with_hint({"question": "2 + 2?"}, {"answer": answer}, HINT, "question")
    with pytest.raises(ValueError, match=r"data.hint has no place in a conversation without a user's turn"):
        with_hint({"messages": [{"role": "system", "content": "x"}]}, {"answer": "4"}, HINT, "question")


def test_a_stream_gives_the_teacher_prompts_of_its_own_and_nobody_else_any(tmp_path):
    records = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
    records[3]["answer"] = "four " * 40
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    tokenizer = Tokenizer(TINY)
    config = DataConfig(path=str(data), hint=HINT, shuffle=False, eval_fraction=0.25)
    stream = PromptStream.from_config(config, tokenizer, prompts_per_step=4, max_prompt_length=40, hint_tokens=40)
    plain = PromptStream.from_config(
        DataConfig(path=str(data), shuffle=False, eval_fraction=0.25),
        tokenizer,
        prompts_per_step=4,
        max_prompt_length=40,
    )
    first, other = next(stream), next(plain)
    for text, ids, answer in zip(first.text, first.fields[TEACHER_PROMPT], first.fields["answer"], strict=True):
        end = text.index("?") + 1
        assert ids == tokenizer.encode(f"{text[:end]}\n\nThe answer is {answer}.{text[end:]}")
        assert len(ids) <= 80
    assert TEACHER_PROMPT not in other.fields
    held = held_out_prompts(config, tokenizer, count=2, max_prompt_length=40)
    assert all(TEACHER_PROMPT not in prompts.fields for prompts in held)
    long = DataConfig(path=str(data), hint=HINT, shuffle=False, long_prompts="error")
    strict = PromptStream.from_config(long, tokenizer, prompts_per_step=8, max_prompt_length=40, hint_tokens=40)
    with pytest.raises(ValueError, match=r"rollout.max_prompt_length \+ grpo.teacher_hint_tokens=80 must be at least"):
        next(strict)
