"""Chat templates that would exhaust memory or time are refused in one sentence; templates of real models are not."""

import pytest

from podrl.data.chat import MOST, ChatTemplate

SAID = [{"role": "user", "content": "How many?"}]


def render(source: str, messages=SAID) -> str:
    return ChatTemplate(source, "a_model").render(messages, add_generation_prompt=True, tokens={"bos_token": "<bos>"})


@pytest.mark.parametrize(
    ("source", "words"),
    {
        "a large number": ("{{ 'x' * 1000000000 }}", "1,048,576"),
        "a product": ("{{ 'x' * 100000 * 100000 }}", "'*'"),
        "a list": ("{{ [0] * 1000000 * 1000 }}", "'*'"),
        "a sum": (
            "{% set a = 'x' * 600000 %}{{ a + a }}",
            "'+'",
        ),
        "a power": ("{{ 10 ** 999999 }}", "'**'"),
        "nested loops": ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "loops"),
        "a long loop": ("{% for i in range(10 ** 9) %}x{% endfor %}", "loops"),
        "much text": ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes"),
        "padding": ("{{ '%1000000000d' | format(1) }}", "pads"),
        "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        "division": ("{{ 1 / 0 }}", "division"),
        "types": ("{{ messages + 1 }}", "TypeError"),
        "no end": ("{% for %}", "cannot be used"),
    }.values(),
)
def test_what_explodes_or_fails_is_one_sentence(source, words):
    with pytest.raises(ValueError, match="chat template of a_model") as caught:
        render(source)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_long_conversations_are_no_explosion():
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    long = [{"role": "user", "content": "x" * (2 * MOST)}]
    assert render(source, long) == "<bos>[user]" + "x" * (2 * MOST)
    assert render(source, SAID * 3) == "<bos>" + "[user]How many?" * 3


def test_a_template_starts_every_conversation_with_the_same_bounds():
    template = ChatTemplate("{% for i in range(1000000) %}{% endfor %}ok", "a_model")
    for _ in range(3):
        assert template.render(SAID, add_generation_prompt=False, tokens={}) == "ok"
