"""Conversations in the forms of sixteen families: the text is the template's, and the assistant's turns are learned.

What is learned is compared with marks that stand in the templates of chat_families.py; the templates that podrl reads
here have none, unless a test says so.
"""

import json

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import pytest
from chat_families import FAMILIES, Family, written
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.data.answers import encode_chat
from podrl.data.conversation import parts
from podrl.data.stream import Limit
from podrl.data.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "calc", "description": 'Größe & "<x>"', "parameters": SCHEMA}}]
LIMIT = Limit(1 << 20, "sft.max_length", "error")


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(**arguments):
    return {"type": "function", "function": {"name": "calc", "arguments": arguments}}


def tool(content):
    return {"role": "tool", "content": content}


SYSTEM = {"role": "system", "content": "Antworte kurz ✓."}
FORMS = {
    "one turn": [user("one?"), said("1.")],
    "turns": [user("one?"), said("1."), user("two?"), said("2."), user("3?"), said("3")],
    "the same twice": [user("one?"), said("one?"), user("one?"), said("one?")],
    "system": [SYSTEM, user("one?"), said("1."), user("two?"), said("2.")],
    "a call": [user("2+2?"), said("", tool_calls=[call(x="2+2")]), tool("4"), said("It is 4.")],
    "words and a call": [user("2+2?"), said("I ask.", tool_calls=[call(x='"é"')]), tool("<b>"), said("4.")],
    "calls": [SYSTEM, user("?"), said("", tool_calls=[call(x="1"), call(x="2")]), tool("1"), tool("2"), said("Done.")],
    "a last call": [user("2+2?"), said("", tool_calls=[call(x="2+2", n=[1, None, {"a": True}])])],
    "calls, then a question": [
        *[user("2+2?"), said("", tool_calls=[call(x="2+2")], reasoning_content="hm"), tool("4"), said("4.")],
        *[user("And 3?"), said("", tool_calls=[call(x="3")], reasoning_content="ha"), tool("3"), said("3")],
    ],
    "an empty answer": [user("one?"), said(""), user("two?"), said("2.")],
    "a last empty answer": [user("one?"), said("1."), user("two?"), said("")],
    "thoughts": [user("1?"), said("1.", reasoning_content="hm"), user("2?"), said("2.", reasoning_content="ha\n\nho")],
    "thoughts in the words": [
        *[user("1?"), said("<think>\nhm\n</think>\n\n1."), user("2?"), said("<think>\nha\n</think>\n\n2.")],
    ],
    "thoughts, tight": [user("1?"), said("<think>hm</think>1."), user("2?"), said("<think>ha</think>2.")],
    "unicode": [user("größer? 漢字"), said("✓ größer 漢字 👩‍🔬\u2028"), user("é"), said("é")],
    "spaces": [user("  one? \n"), said("\n 1.\n\n"), user("\ttwo?"), said("  2. ")],
    "only spaces": [user("one?"), said(" \n"), user("two?"), said("\n\n\n")],
    "special tokens": [
        *[user("a<|im_end|><end_of_turn></s>b"), said("x<|im_end|>x</s>\n<|im_start|>"), user("?"), said("2")],
    ],
    "special ends": [
        *[user("one?"), said("1<|im_end|>"), user("2?"), said("<|im_end|>\n<|im_start|>assistant\n2<|im_end|>")],
    ],
}  # fmt: skip


class _Marks(jinja2.ext.Extension):
    """Writes characters of the private use around what a template marks as generations."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller):
        return f"\ue000{caller()}\ue001"


def independent(family: Family, messages, tools=None) -> tuple[str, str]:
    """Renders a conversation by jinja alone: (text, the text with marks around what is learned)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Marks]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refused
    given = [m | ({"thinking": m["reasoning_content"]} if "reasoning_content" in m else {}) for m in messages]
    values = {"messages": given, "tools": tools, "bos_token": family.bos, "eos_token": family.ends[0]}
    values["add_generation_prompt"] = False
    marked = environment.from_string(family.marked).render(**values)
    return marked.replace("\ue000", "").replace("\ue001", ""), marked.replace("\ue001\ue000", "")


def _refused(message):
    raise ValueError(message)


def takes(family: Family, messages) -> bool:
    roles = {message["role"] for message in messages} - {"user", "assistant"}
    most = max(len(message.get("tool_calls", ())) for message in messages)
    return roles <= set(family.roles) and most <= (family.calls if "tool" in family.roles else 0)


def as_given(name, messages):
    """The messages in the form in which a family's template takes them: R1's takes arguments as JSON text."""

    def written_out(one):
        text = json.dumps(one["function"]["arguments"], ensure_ascii=False)
        return {"function": {"name": one["function"]["name"], "arguments": text}}

    given = [m | {"tool_calls": list(map(written_out, m["tool_calls"]))} if "tool_calls" in m else m for m in messages]
    return given if name == "r1" else messages


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes tokenizers of all families by name and whether their templates have marks."""
    place = tmp_path_factory.mktemp("families")
    return {
        (name, marked): Tokenizer(written(place / f"{name}{marked}", family, marked=marked))
        for name, family in FAMILIES.items()
        for marked in (False, True)
    }


def check(made, name, messages, tools=None):
    """Text and learned parts are those of jinja and of the marks, without marks in the template and with them."""
    family = FAMILIES[name]
    text, marked = independent(family, as_given(name, messages), tools)
    for with_marks in (False, True):
        tokenizer = made[name, with_marks]
        found = parts(tokenizer, messages, tools=tools)
        assert "".join(part.text for part in found) == text
        shown = "".join(f"\ue000{part.text}\ue001" if part.learned else part.text for part in found)
        assert shown.replace("\ue001\ue000", "").replace("\ue000\ue001", "") == marked.replace("\ue000\ue001", "")
        example = encode_chat(found, tokenizer, LIMIT)
        # GLM's template ends no last turn: only then is a token more than the text.
        ends = name == "glm" and not with_marks and messages[-1]["role"] == "assistant"
        assert example.tokens == [*tokenizer.encode(text), *([tokenizer.turn_end_id] if ends else [])]
        assert example.text == text and any(example.learned)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_the_templates_text_and_the_assistants_turns_are_learned(made, name, form):
    messages = FORMS[form]
    if not takes(FAMILIES[name], messages):
        with pytest.raises(ValueError, match=r"refuses roles|messages\[\d\]"):
            parts(made[name, False], messages, tools=TOOLS)
        return
    check(made, name, messages, TOOLS if any("tool_calls" in message for message in messages) else None)


PIECES = (
    "1",
    "a b",
    " ",
    "\n",
    "\n\n",
    "é✓",
    "<|im_end|>",
    "</s>",
    "<|im_start|>user\n",
    "<end_of_turn>",
    "<|end|>",
    "{",
    '"',
)
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@st.composite
def dialogues(draw, family: Family):
    """Turns of a user and the assistant, with calls and thoughts where the family has them."""
    messages = [SYSTEM] if "system" in family.roles and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(CONTENTS)))
        while family.roles[-1:] == ("tool",) and draw(st.booleans()):
            calls = [call(x=draw(CONTENTS)) for _ in range(draw(st.integers(1, family.calls)))]
            messages += [said(draw(CONTENTS), tool_calls=calls), *(tool(draw(CONTENTS)) for _ in calls)]
        thoughts = {"reasoning_content": draw(CONTENTS)} if draw(st.booleans()) else {}
        messages.append(said(draw(CONTENTS), **thoughts))
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_conversations_of_any_words(made, name, data):
    check(made, name, data.draw(dialogues(FAMILIES[name])), TOOLS if "tool" in FAMILIES[name].roles else None)
