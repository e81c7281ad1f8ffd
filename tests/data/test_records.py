"""One form of a record: training, the Python API and podrl.generate make the same prompt from it."""

import json

import pytest

import podrl
from podrl import generate
from podrl.data import shape
from podrl.data.mixture import split
from podrl.data.pipeline import DataConfig, PromptStream
from podrl.rewards.compose import RewardConfig, Rewards

RECORDS = [
    {"question": "2+2?", "answer": "#### 4"},
    {"prompt": "The sum of 2 and 3 is", "answer": 5},
    {"prompt": [{"role": "user", "content": "3+3?"}], "answer": "6"},
    {"messages": [{"role": "user", "content": "4+4?"}, {"role": "assistant", "content": "8"}], "answer": "8"},
    {"question": "no answer", "messages": [{"role": "user", "content": "5+5?"}]},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(path)


def test_training_python_and_generate_make_the_same_prompts(file, tokenizer):
    config = DataConfig(path=file, shuffle=False, eval_fraction=0.0)
    given = {"prompts_per_step": len(RECORDS), "max_prompt_length": 256}
    trained = next(PromptStream.from_config(config, tokenizer, **given))
    listed = next(PromptStream.from_list(RECORDS, tokenizer, **given))
    arguments = generate._parser().parse_args([f"--model={podrl.TINY}", f"--prompts={file}", "--out=o"])
    generated, _ = generate._tokenise(generate.read_prompts(file), tokenizer, arguments)
    for p, row in enumerate(generated):
        assert trained.tokens_PT[p, : trained.length_P[p]].tolist() == row, p
        assert listed.tokens_PT[p, : listed.length_P[p]].tolist() == row, p
    assert trained.text[1] == RECORDS[1]["prompt"]
    for p, question in ((2, "3+3?"), (3, "4+4?"), (4, "5+5?")):  # exactly the chat template's text
        assert trained.text[p] == tokenizer.apply_chat_template([{"role": "user", "content": question}])
    assert trained.fields["question"] == ["2+2?", RECORDS[1]["prompt"], "3+3?", "4+4?", "5+5?"]
    assert trained.fields["answer"] == ["4", "5", "6", "8", None]
    assert listed.fields["answer"] == ["#### 4", 5, "6", "8", None]  # the list's own fields stay unchanged


def test_a_question_field_of_another_name_asks_before_all(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2?", "messages": []}\n')
    config = DataConfig(path=str(path), question_field="prompt", system_prompt="", eval_fraction=0.0)
    batch = next(PromptStream.from_config(config, tokenizer, prompts_per_step=1, max_prompt_length=64))
    assert list(batch.text) == [tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}])]


def test_a_missing_answer_is_said_where_a_reward_needs_it(file):
    unanswered = split(DataConfig(path=file, eval_fraction=0.0)).unanswered
    assert unanswered == [(f"{file} line 5 lacks 'answer' (it has question, messages)", ())]
    with Rewards(RewardConfig(fns=("exact_format", "r1_format"))) as free:
        free.check_answers(unanswered)
    with Rewards(RewardConfig(fns=("exact_format", "number", _near))) as asking:
        asking.check_answers([])
        asking.check_answers([(unanswered[0][0], ["exact_format"])])  # the source's own rewards need no answer
        with pytest.raises(
            ValueError, match=r"line 5 lacks 'answer' .*, and number, _near \(reward\.fns, .*\) read an"
        ):
            asking.check_answers(unanswered)


def test_a_conversation_of_the_assistant_alone_asks_nothing():
    said = {"messages": [{"role": "assistant", "content": "8"}]}
    with pytest.raises(ValueError, match="x: 'messages' holds only the assistant's turn: put a user's turn before it"):
        shape.check(said, "x")


def _near(prompts, completions, answer, **fields):
    return [0.0] * len(completions)
