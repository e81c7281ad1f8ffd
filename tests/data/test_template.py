"""podrl's default prompt, the completion that earns its rewards, and GSM8K's answers."""

import json
import pathlib
import re
import shutil

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


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if messages[0].role != 'system' %}{{ turn('system', 'You help.') }}{% endif %}{{ all }}", "You help."),
        ("{{ turn('system', 'Today: 26 Jul 2024') }}{{ all }}", "Today: 26 Jul 2024"),
        ("{{ all }}", ""),
        ("{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]{% endif %}{% endfor %}", ""),
        ("{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}{{ all }}", ""),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no system turn') }}{% endif %}{{ all }}", ""),
    ],
)
def test_words_that_the_template_writes_by_itself_are_found_without_marks_of_turns(source, words, tmp_path):
    start, end = "<start_of_turn>", "<end_of_turn>\n"
    every = f"{{% for m in messages %}}{start}{{{{ m.role }}}}\n{{{{ m.content }}}}{end}{{% endfor %}}{start}model\n"
    source = re.sub(r"{{ turn\('(\w+)', '(.+?)'\) }}", rf"{start}\1\n\2{end}", source).replace("{{ all }}", every)
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(source)
    assert template.own_words(Tokenizer(tmp_path)) == words
