"""The task of sums: right answers, a fixed stream, expressions held out of training, and examples whose tool output is
not learned."""

import operator
import re

import numpy as np
import pytest
from embedded import EMBEDDED

from podrl.config import build
from podrl.data.pipeline import DataConfig, PromptStream, has_format, held_out_prompts
from podrl.data.problem_generator import RandomDraws, held_out
from podrl.data.sft import SFTConfig, SFTStream
from podrl.data.sums import GENERATOR
from podrl.data.template import CALL_END, CALL_START, OUTPUT_END, OUTPUT_START, SYSTEM_PROMPT
from podrl.data.tokenizer import Tokenizer
from podrl.data.train_tokenizer import CALL_TAGS, write

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DATA = build(DataConfig, {"path": "sums", "seed": 1})


@pytest.fixture(scope="module")
def tools():
    return Tokenizer(EMBEDDED["tiny_tools"])


def test_sums_have_no_format_to_score():
    assert not has_format(DATA)
    assert has_format(DataConfig()) and has_format(DataConfig(path="questions.jsonl"))
    assert has_format(DataConfig(path="questions.jsonl", system_prompt=""))
    assert not has_format(DataConfig(path="questions.jsonl", system_prompt="Answer in <answer> tags."))
    assert has_format(DataConfig(path="sums", system_prompt=SYSTEM_PROMPT))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_right_and_questions_hold_the_values(split):
    seen = set()
    for index in range(500):
        found = GENERATOR.problem(split, index, seed=3)
        a, o, b = re.fullmatch(r"(\d{3,5})([-+*])(\d{3,5})", found.expression).groups()
        assert found.answer == str(OPERATORS[o](int(a), int(b))) and found.answer.isdigit(), found
        assert set(re.findall(r"\d+", found.question)) == {a, b}, found
        seen.add((o, found.question[0].isdigit() or found.question.startswith(("What", "How"))))
    assert len(seen) == 6, "each operation appears as a plain sum and as a story"


def test_held_out_sums_share_no_expression_with_training():
    train = {GENERATOR.problem("train", i).expression for i in range(3000)}
    evaluation = {found.expression for found in GENERATOR.distinct("held_out", 200)}
    assert len(evaluation) == 200 and not train & evaluation
    assert all(map(held_out, evaluation)) and not any(map(held_out, train))


def test_the_stream_is_a_fixed_function_of_split_index_and_seed():
    # The expected values are literals, because checkpoints would resume on other data if the sequence changed.
    first = GENERATOR.problem("train", 0, seed=1)
    assert first.question == "Max has 5086 packs of 4778 eggs. How many eggs does Max have now?"
    assert first.fields == {"question": first.question, "answer": "24300908", "expression": "5086*4778"}
    assert GENERATOR.problem("train", 0, seed=2) != first


def test_a_guess_has_the_length_and_first_digit_of_the_answer_and_little_else():
    right = 0
    for index in range(200):
        found = GENERATOR.problem("train", index)
        (part,) = found.guessed(RandomDraws(index))
        guess = re.fullmatch(r"<answer>(\d+)</answer>", part.text)[1]
        assert len(guess) == len(found.answer) and guess[0] == found.answer[0]
        right += guess == found.answer
    assert right < 4


def test_prompts_carry_the_fields_that_rewards_and_evaluations_read(tools):
    stream = PromptStream.from_config(DATA, tools, prompts_per_step=4, max_prompt_length=48)
    prompts = next(stream)
    held = held_out_prompts(DATA, tools, count=4, max_prompt_length=48)[0]
    for batch in (prompts, held):
        assert set(batch.fields) == {"question", "answer", "expression"}
        assert all(q in text for q, text in zip(batch.fields["question"], batch.text, strict=True))
    assert all(map(held_out, held.fields["expression"])) and not any(map(held_out, prompts.fields["expression"]))


def test_tags_of_a_call_are_single_pieces_that_decoding_keeps(tools):
    for tag in (CALL_START, CALL_END, OUTPUT_START, OUTPUT_END):
        assert len(tools.encode(tag)) == 1
    text = f"{CALL_START}4821*7703{CALL_END}{OUTPUT_START}37136163{OUTPUT_END}<answer>37136163</answer>"
    ids = tools.encode(text)
    assert tools.decode(ids) == text
    assert len(ids) == len("4821*7703" + "37136163" * 2) + 6
    assert tools.vocab_size == 388


def test_the_tokenizer_is_made_again_by_its_command_and_keeps_the_first_ones_pieces(tmp_path, tools, tokenizer):
    write(tmp_path, calls=True)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (EMBEDDED["tiny_tools"] / file.name).read_bytes(), file.name
    assert all(tools.token_text(i) == tokenizer.token_text(i) for i in range(tokenizer.vocab_size))
    assert [tools.token_text(tokenizer.vocab_size + i) for i in range(4)] == list(CALL_TAGS)


def test_the_output_of_a_call_is_given_and_only_the_answer_ends_the_turn(tools):
    batch = next(SFTStream(DATA, SFTConfig(batch_size=32), tools))
    for b, text in enumerate(batch.text):
        ids, mask = batch.tokens_BT[b, : batch.length_B[b]], batch.mask_BT[b, : batch.length_B[b]]
        learned = [tools.token_text(int(i)) for i in ids[mask > 0]]
        prompt, call, output, answer = re.fullmatch(
            rf"(.*model\n)({CALL_START}.*?{CALL_END})(\n{OUTPUT_START}.*?{OUTPUT_END}\n\n)(<answer>.*</answer>)",
            text,
            re.S,
        ).groups()
        assert prompt.startswith("<bos>") and "".join(learned) == f"{call}{answer}<end_of_turn>"
        assert tools.decode(ids[mask == 0]).endswith(output)
    np.testing.assert_array_equal(np.diff(batch.mask_BT, prepend=0).clip(min=0).sum(axis=1), 2)


def test_the_share_that_calls_falls_after_the_full_steps(tools):
    stream = SFTStream(DATA, SFTConfig(batch_size=64, tagged_share=0.16, full_steps=2), tools)
    shares = [np.mean([CALL_START in text for text in next(stream).text]) for _ in range(10)]
    assert shares[:2] == [1.0, 1.0] and np.mean(shares[2:]) == pytest.approx(0.16, abs=0.06)
