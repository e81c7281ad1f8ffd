"""podrl's default prompt, the completion that earns its rewards, and GSM8K's answers."""

import json
import pathlib

import pytest

import podrl
from podrl.data import template
from podrl.data.tokenizer import Tokenizer
from podrl.rewards import reference

TINY = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"


def test_system_text_opens_the_users_turn():
    tokenizer = Tokenizer(TINY)
    text = template.wrap(tokenizer, "2+2?", system=template.SYSTEM_PROMPT)
    assert text == f"<bos><start_of_turn>user\n{template.SYSTEM_PROMPT}\n\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    assert template.wrap(tokenizer, "2+2?") == "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    assert template.wrap(tokenizer, "2+2?", system="Hm.", form="plain") == "Hm.\n\n2+2?\n"


def test_the_completion_earns_every_reference_reward():
    text = template.completion("2+2=4.", "4")
    tags = (template.REASONING_START, template.REASONING_END, template.ANSWER_START, template.ANSWER_END)
    assert tags == reference.TAGS and all(tag in template.SYSTEM_PROMPT for tag in tags)
    earned = [fn([""], [text], answer=["4"])[0] for fn in map(reference.BUILT_IN.__getitem__, reference.DEFAULT)]
    assert earned == [3.0, 2.0, 3.0, 1.5]


@pytest.mark.parametrize(("solution", "answer"), [("so\n#### 72", "72"), ("#### 1,200 ", "1200"), ("# #### -5", "-5")])
def test_gsm8k_answer(solution, answer):
    assert template.gsm8k_answer(solution) == answer


def test_gsm8k_answer_missing():
    with pytest.raises(ValueError, match=r"'the answer is 4' has no '####'"):
        template.gsm8k_answer("the answer is 4")


def test_every_answer_of_the_real_gsm8k_is_a_number():
    path = pathlib.Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip("GSM8K is not on this machine")
    with path.open() as lines:
        answers = [template.gsm8k_answer(json.loads(line)["answer"]) for line in lines]
    assert len(answers) > 1000
    assert all(float(a) == int(float(a)) for a in answers)
