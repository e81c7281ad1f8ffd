"""Conversations under the chat templates of nineteen families: the text is the template's, and the assistant's turns
are learned.

The learned parts are compared with marks in the templates of chat_families.py. The templates that podrl reads have no
marks, unless a test says so.
"""

import dataclasses
import json
import re

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import pytest
from chat_families import FAMILIES, Family, written
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.data.answers import encode_chat
from podrl.data.config import DataConfig
from podrl.data.conversation import parts, render
from podrl.data.dialogue import Dialogue
from podrl.data.labels import LabelStream
from podrl.data.pairs import PairStream, held_out_pairs
from podrl.data.pipeline import PromptStream
from podrl.data.sft import SFTConfig, SFTStream
from podrl.data.stream import Limit
from podrl.data.template import TextPart
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


def tools_for(name, messages=({"tool_calls": []},)):
    """Returns the schemas for a conversation with calls, if the family's template writes schemas."""
    writes = re.search(r"\btools\b", FAMILIES[name].template)
    return TOOLS if writes and any("tool_calls" in message for message in messages) else None


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
    "the same call twice": [
        *[user("?"), said("", tool_calls=[call()]), tool(""), said("", tool_calls=[call()]), tool(""), said("")],
    ],
    "lines and a call": [user("?"), said("\n\n\n\n", tool_calls=[call()]), tool(""), said(""), user("?"), said("1")],
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
    """Jinja's tag {% generation %}, which writes private-use characters around the text that it encloses."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller):
        return f"\ue000{caller()}\ue001"


def independent(family: Family, messages, tools=None) -> tuple[str, str]:
    """Renders a conversation by jinja alone; returns the text, and the text with marks around its learned parts."""
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
    """Returns the messages in the form that a family's template takes: R1's takes arguments as JSON text."""

    def written_out(one):
        text = json.dumps(one["function"]["arguments"], ensure_ascii=False)
        return {"function": {"name": one["function"]["name"], "arguments": text}}

    given = [m | {"tool_calls": list(map(written_out, m["tool_calls"]))} if "tool_calls" in m else m for m in messages]
    return given if name == "r1" else messages


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes the tokenizers of all families, by (name, whether the template has marks)."""
    place = tmp_path_factory.mktemp("families")
    return {
        (name, marked): Tokenizer(written(place / f"{name}{marked}", family, marked=marked))
        for name, family in FAMILIES.items()
        for marked in (False, True)
    }


def check(made, name, messages, tools=None):
    """Asserts that the text equals jinja's and the learned parts equal the marks, for templates with and without
    marks."""
    family = FAMILIES[name]
    text, marked = independent(family, as_given(name, messages), tools)
    for with_marks in (False, True):
        tokenizer = made[name, with_marks]
        found = parts(tokenizer, messages, tools=tools)
        assert "".join(part.text for part in found) == text
        shown = "".join(f"\ue000{part.text}\ue001" if part.learned else part.text for part in found)
        assert shown.replace("\ue001\ue000", "").replace("\ue000\ue001", "") == marked.replace("\ue000\ue001", "")
        example = encode_chat(found, tokenizer, LIMIT)
        # GLM's template leaves the last turn open: only then is there one token more than the text has.
        ends = name == "glm" and not with_marks and messages[-1]["role"] == "assistant"
        assert example.tokens == [*tokenizer.encode(text), *([tokenizer.turn_end_id] if ends else [])]
        assert example.text == text and any(example.learned)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_the_templates_text_and_the_assistants_turns_are_learned(made, name, form):
    messages = FORMS[form]
    if not takes(FAMILIES[name], messages):
        with pytest.raises(ValueError, match=r"refuses roles|messages\[\d\]"):
            parts(made[name, False], messages)
        return
    check(made, name, messages, tools_for(name, messages))


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


@st.composite
def dialogues(draw, family: Family):
    """Draws turns of a user and the assistant, with calls and thoughts if the family has them."""
    contents = st.lists(st.sampled_from((*PIECES, *family.ends, *family.special)), max_size=5).map("".join)
    messages = [SYSTEM] if "system" in family.roles and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(contents)))
        while family.roles[-1:] == ("tool",) and draw(st.booleans()):
            calls = [call(x=draw(contents)) for _ in range(draw(st.integers(1, family.calls)))]
            messages += [said(draw(contents), tool_calls=calls), *(tool(draw(contents)) for _ in calls)]
        thoughts = {"reasoning_content": draw(contents)} if draw(st.booleans()) else {}
        messages.append(said(draw(contents), **thoughts))
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, derandomize=True)
@given(data=st.data())
def test_conversations_of_any_words(made, name, data):
    check(made, name, data.draw(dialogues(FAMILIES[name])), tools_for(name))


@pytest.mark.nightly("podrl/data")
@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_masks_are_those_of_transformers(made, name):
    transformers = pytest.importorskip("transformers")
    ours = made[name, True]
    theirs = transformers.AutoTokenizer.from_pretrained(ours.directory)
    for form, messages in FORMS.items():
        # If a generation ends with a character of several bytes, transformers learns only the first of that character's
        # tokens.
        if not takes(FAMILIES[name], messages) or (name, form) == ("glm", "unicode"):
            continue
        tools = tools_for(name, messages)
        example = encode_chat(parts(ours, messages, tools=tools), ours, LIMIT)
        wanted = theirs.apply_chat_template(
            as_given(name, messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        assert example.tokens == wanted["input_ids"] and example.learned == wanted["assistant_masks"]
        unmarked = encode_chat(parts(made[name, False], messages, tools=tools), made[name, False], LIMIT)
        assert unmarked.tokens[: len(example.tokens)] == wanted["input_ids"]
        assert unmarked.learned[: len(example.tokens)] == wanted["assistant_masks"]


def test_a_token_across_a_border_is_learned_whole(made):
    tokenizer = made["qwen25", False]
    crossing = tokenizer.encode("assistant\n\n\n1")
    assert len(crossing) < len(tokenizer.encode("assistant\n") + tokenizer.encode("\n\n1"))
    example = encode_chat([TextPart("assistant\n"), TextPart("\n\n1", learned=True)], tokenizer, LIMIT)
    assert example.tokens == crossing and example.learned == [0, 1, 1, 1]
    assert tokenizer.token_text(crossing[1]) == "ĊĊ"


def shown(tokenizer, messages, **more):
    return "".join(part.text for part in parts(tokenizer, messages, **more) if part.learned)


@pytest.mark.parametrize("blank", [{"content": ""}, {"content": None}, {}])
@pytest.mark.parametrize("arguments", [{"x": "1"}, '{"x": "1"}'])
@pytest.mark.parametrize("name", ["qwen25", "qwen3", "hermes", "llama3", "mistral3", "r1", "glm", "harmony"])
def test_a_call_is_learned_in_the_templates_form_however_it_is_given(made, name, blank, arguments):
    called = {"role": "assistant", **blank, "tool_calls": [{"function": {"name": "calc", "arguments": arguments}}]}
    plain = said("", tool_calls=[call(x="1")])
    text = shown(made[name, False], [user("?"), called, tool("1"), said("1")], tools=tools_for(name))
    assert text == shown(made[name, False], [user("?"), plain, tool("1"), said("1")], tools=tools_for(name))
    assert "calc" in text and "\\" not in text and "None" not in text


def test_what_is_none_is_not_there(made):
    for name in ("llama3", "qwen25", "harmony", "hermes"):
        plain, padding = FORMS["a call"], {"strict": None, "description": None}
        calls = [{"id": None, "function": call(x="2+2")["function"] | padding}]
        padded = [plain[0], plain[1] | {"tool_calls": calls}, *plain[2:]]
        assert parts(made[name, False], padded) == parts(made[name, False], plain)
        plain = [user("?"), said("1")]
        padded = [message | {"tool_calls": None, "reasoning_content": None, "name": None} for message in plain]
        assert parts(made[name, False], padded) == parts(made[name, False], plain)
        assert parts(made[name, False], [plain[0], plain[1] | {"tool_calls": []}]) == parts(made[name, False], plain)


def test_thoughts_that_a_template_drops_are_told_of_once(tmp_path, caplog):
    names = ("qwen3", "r1", "r1")
    for tokenizer in [Tokenizer(written(tmp_path / name, FAMILIES[name])) for name in names]:
        parts(tokenizer, [user("?"), said("1", reasoning_content="hm")])
    told = [record.args for record in caplog.records if "leaves thoughts" in record.msg]
    assert told == [(str(tmp_path / "r1"),)]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("family", ["qwen3", "glm", "harmony"])
def test_thoughts_are_learned_under_every_name(made, family, name):
    assert "hm, so" in shown(made[family, False], [user("?"), said("1", **{name: "hm, so"})])


# Kimi: a turn's header has the message's name, and a call is known by its id.
KIMI = (
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' + (m.name or m.role) + '<|im_middle|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.id + '<|of|>' }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{{ '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}"
)
KIMIS = Family(KIMI, ("<|im_end|>",), ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|call|>", "<|of|>"))


def test_a_name_in_the_header_of_a_turn_leaves_the_users_words_alone(tmp_path):
    tokenizer = Tokenizer(written(tmp_path / "model", KIMIS))
    chat = [user("a") | {"name": "Bob"}, said("1") | {"name": "Al"}, user("b"), said("2")]
    assert shown(tokenizer, chat) == "1<|im_end|>2<|im_end|>"
    called = [{"id": f"functions.calc:{i}", **call(x=str(i))} for i in range(2)]
    chat = [user("a"), said("", tool_calls=called)]
    assert shown(tokenizer, chat).startswith('<|call|>functions.calc:0<|of|>{"x": "0"}<|call|>functions.calc:1')
    called[1]["id"] = "call_1"
    with pytest.raises(ValueError, match=r"messages\[1\] \(assistant\).*does not write its call of 'calc'"):
        parts(tokenizer, chat)


def test_a_turn_that_cannot_be_told_from_the_message_before_it_is_refused(tmp_path):
    template = (  # the header is the number of letters in the turn
        "{% for m in messages %}{{ m.content | length | string + '<|im_middle|>' + m.content + '<|im_end|>' }}"
        "{% endfor %}{{ '0<|im_middle|>' if add_generation_prompt }}"
    )
    tokenizer = Tokenizer(written(tmp_path / "model", dataclasses.replace(KIMIS, marked=template)))
    with pytest.raises(ValueError, match=r"messages\[1\] \(assistant\).*cannot be told from messages\[0\]"):
        parts(tokenizer, [user("a 0 is"), said("1")])


def test_the_header_of_a_first_turn_is_not_learned(tmp_path):
    # Falcon: every turn but the first opens with a line end.
    template = (
        "{% for m in messages %}{{ '\\n' if not loop.first }}{{ '<|' + m.role + '|>\\n' + m.content }}"
        "{{ eos_token if m.role == 'assistant' }}"
        "{{ '\\n<|assistant|>\\n' if loop.last and add_generation_prompt }}{% endfor %}"
    )
    tokenizer = Tokenizer(written(tmp_path / "model", Family(template, ("<|endoftext|>",))))
    assert shown(tokenizer, [said("1"), user("a"), said("2")]) == "1<|endoftext|>2<|endoftext|>"


def test_the_header_of_a_prompt_that_is_always_written_is_not_learned(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\\n' }}"
    )
    tokenizer = Tokenizer(written(tmp_path / "model", Family(template, ("<|im_end|>",), ("<|im_start|>",))))
    assert shown(tokenizer, [user("a"), said("1"), user("b"), said("2")]) == "1<|im_end|>2<|im_end|>"


def test_words_that_end_with_a_special_token_end_no_turn(made):
    chat = [user("a"), said("<sop>"), user("b"), said("1<|endoftext|>"), user("c"), said("2")]
    assert shown(made["glm", False], chat) == "".join(
        f"\n<think></think>\n{words}" for words in ("<sop><|user|>", "1<|endoftext|><|user|>", "2")
    )
    chat = [user("a"), said("1<|im_end|>"), user("b"), said("<|endoftext|>")]
    assert shown(made["phi4", False], chat) == "1<|im_end|><|im_end|><|endoftext|><|im_end|>"


@pytest.mark.parametrize("name", ["phi4", "gemma2", "r1"])
def test_tools_that_a_template_passes_over_are_refused_unless_a_message_names_them(made, name):
    tokenizer = made[name, False]
    chat = [user("2+2?"), said("4")]
    with pytest.raises(ValueError, match=rf"{name}False ignores 'tools', and no message names calc: describe"):
        parts(tokenizer, chat, tools=TOOLS)
    assert shown(tokenizer, [user("2+2? Call calc."), said("4")], tools=TOOLS) == shown(tokenizer, chat, tools=[])


@pytest.mark.parametrize("tools", ["x", 3, [3], [{"function": "calc"}], '{"name": "calc"}', "[[1]]"])
def test_tools_that_are_none_are_refused_with_their_place(made, tmp_path, tools):
    data = rows(tmp_path, {"messages": [user("?"), said("1")], "tools": tools})
    with pytest.raises(
        ValueError, match=r"line 1 has messages, tools: .*'tools' is .* must be a list of the functions'"
    ):
        SFTStream(data, SFTConfig(batch_size=1), made["qwen25", False])


@pytest.mark.parametrize("marked", [False, True])
def test_a_turn_of_weight_0_is_not_learned(made, tmp_path, marked):
    tokenizer = made["qwen25", marked]
    chat = [user("1?"), said("1", weight=0), user("2?"), said("2", weight=1), user("3?"), said("3", weight=0.0)]
    assert shown(tokenizer, [*chat, user("4?"), said("4")]) == "2<|im_end|>4<|im_end|>"
    assert shown(tokenizer, [*chat, user("4?"), said("4")], first=4) == "4<|im_end|>"
    whole = "".join(part.text for part in parts(tokenizer, chat))
    assert whole == "".join(part.text for part in parts(tokenizer, [m | {"weight": None} for m in chat]))
    for field, value in (("weight", 0.5), ("weight", "0"), ("weight", [1])):
        with pytest.raises(ValueError, match=rf"line 1 has messages: .*{field}' of turn 1 .* and must be 0 or 1"):
            data = rows(tmp_path, {"messages": [user("1?"), said("1", **{field: value})]})
            SFTStream(data, SFTConfig(batch_size=1), tokenizer)
    with pytest.raises(ValueError, match="every turn of the assistant has weight 0"):
        SFTStream(rows(tmp_path, {"messages": chat[:2]}), SFTConfig(batch_size=1), tokenizer)
    record = {"prompt": [user("1?")], "completion": [said("1", weight=0)], "label": True}
    with pytest.raises(ValueError, match="each answer must have a turn of the assistant to learn"):
        LabelStream(rows(tmp_path, record), tokenizer, answers=1, max_length=99)


def test_marks_that_leave_nothing_to_learn_are_refused(tmp_path):
    template = FAMILIES["phi4"].marked.replace("m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}")
    family = dataclasses.replace(FAMILIES["phi4"], marked=template)
    tokenizer = Tokenizer(written(tmp_path / "model", family, marked=True))
    chat = [user("1?"), said("1"), user("2?"), said("2")]
    assert shown(tokenizer, chat) == "2<|im_end|>"  # the marks of the template leave out the first answer
    with pytest.raises(ValueError, match=r"messages\[1\] \(assistant\): .* marks nothing of the turns"):
        parts(tokenizer, [*chat[:3], chat[3] | {"weight": 0}])


SILENT = "{% for m in messages %}{% if m.role in ROLES and not m.tool_calls %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # fmt: skip # noqa: E501


@pytest.mark.parametrize(
    ("roles", "messages", "message"),
    [
        ("('user', 'assistant')", FORMS["a call"], r"messages\[1\] \(assistant\).*does not write its call of 'calc'"),
        ("('user', 'assistant')", [user("?"), tool("4"), said("4")], r"messages\[1\] \(tool\).*leaves it out"),
        ("('user', 'assistant')", [SYSTEM, user("?"), said("4")], r"messages\[0\] \(system\).*leaves it out"),
        ("('user',)", [user("?"), said("4")], r"messages\[1\] \(assistant\).*leaves it out"),
    ],
)
def test_a_message_that_is_passed_over_is_refused_by_its_number(tmp_path, roles, messages, message):
    tokenizer = Tokenizer(written(tmp_path / "model", Family(SILENT.replace("ROLES", roles), ("<|im_end|>",))))
    with pytest.raises(ValueError, match=message):
        parts(tokenizer, messages)
    with pytest.raises(ValueError, match=message):
        render(tokenizer, messages)


@pytest.mark.parametrize("earlier", ["m.content | replace('one', 'ONE')", "m.content[:3]"])
def test_of_earlier_turns_that_a_template_rewrites_what_it_writes_is_learned_or_refused(tmp_path, earlier):
    template = FAMILIES["phi4"].template.replace(
        "m.content + '<|im", f"(m.content if loop.last else {earlier}) + '<|im", 1
    )
    tokenizer = Tokenizer(
        written(tmp_path / "model", Family(template, ("<|im_end|>",), ("<|im_start|>", "<|im_sep|>")))
    )
    chat = [user("?"), said("one more"), user("?"), said("two")]
    if "replace" in earlier:
        assert shown(tokenizer, chat) == "ONE more<|im_end|>two<|im_end|>"
        return
    with pytest.raises(ValueError, match=r"messages\[1\] \(assistant\).*leaves it out"):
        parts(tokenizer, chat)


def test_a_template_without_an_end_mark_is_followed_by_the_tokenizers(made):
    tokenizer = made["glm", False]
    example = encode_chat(parts(tokenizer, [user("?"), said("1")]), tokenizer, LIMIT)
    assert example.tokens[-1] == tokenizer.turn_end_id and example.learned[-1] == 1
    last = encode_chat(parts(tokenizer, [user("?"), said("1"), user("?")]), tokenizer, LIMIT)
    assert last.tokens == tokenizer.encode(
        render(tokenizer, [user("?"), said("1"), user("?")], add_generation_prompt=False)
    )


def test_tools_of_a_record_choose_the_template_for_tools(tmp_path):
    place = written(tmp_path / "model", FAMILIES["qwen25"])
    config = json.loads((place / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": FAMILIES["hermes"].template},
        {"name": "tool_use", "template": config["chat_template"]},
    ]
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(place)
    assert "# Tools" in render(tokenizer, [user("?")], tools=TOOLS)
    assert "Help." not in render(tokenizer, [user("?")]) and "# Tools" not in render(tokenizer, [user("?")])


def rows(tmp_path, *records):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(path=str(path), system_prompt="", eval_fraction=0.0, shuffle=False)


def read(tokenizer, batch, b, *, learned=True):
    pairs = zip(batch.tokens_BT[b, : batch.length_B[b]].tolist(), batch.mask_BT[b], strict=False)
    text = "".join(tokenizer.token_text(token) for token, mask in pairs if mask or not learned)
    return text.replace("Ġ", " ").replace("Ċ", "\n")


def test_supervised_records_of_turns(made, tmp_path):
    tokenizer = made["qwen25", False]
    chat = [*FORMS["a call"]]
    data = rows(
        tmp_path,
        {"messages": chat, "tools": TOOLS},
        {"messages": chat, "tools": json.dumps(TOOLS)},
        {"prompt": chat[:3], "completion": chat[3:], "tools": TOOLS},
        {"prompt": chat[:3], "completion": "It is 4.", "tools": TOOLS},
    )
    batch = next(SFTStream(data, SFTConfig(batch_size=4, max_length=900), tokenizer))
    whole = tokenizer.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=False)
    call_text = '<tool_call>\n{"name": "calc", "arguments": {"x": "2+2"}}\n</tool_call><|im_end|>'
    assert [batch.text[b] for b in range(4)] == [whole] * 4
    assert [read(tokenizer, batch, b) for b in range(4)] == [call_text + "It is 4.<|im_end|>"] * 2 + [
        "It is 4.<|im_end|>"
    ] * 2
    assert read(tokenizer, batch, 0, learned=False).startswith("<|im_start|>system\nHelp.\n# Tools\n{")


def test_pairs_of_turns(made, tmp_path):
    tokenizer = made["qwen25", False]
    asked, good, bad = [user("a?"), said("b"), user("c?")], [said("yes")], [said("no")]
    data = rows(
        tmp_path,
        {"prompt": asked, "chosen": good, "rejected": bad},
        {"prompt": asked, "chosen": "yes", "rejected": "no"},
        {"chosen": asked + good, "rejected": asked + bad},
        {"prompt": "c?", "chosen": asked + good, "rejected": asked + bad},
        {"question": "c?", "chosen": good, "rejected": bad},
    )
    batch = next(PairStream(data, tokenizer, pairs=5, max_length=200))
    assert [read(tokenizer, batch, b) for b in range(10)] == ["yes<|im_end|>", "no<|im_end|>"] * 5
    whole = tokenizer.apply_chat_template(asked + good, add_generation_prompt=False)
    assert [read(tokenizer, batch, b, learned=False) + "\n" for b in (0, 2, 4, 6)] == [whole] * 4
    assert "c?" in batch.text[8] and "a?" not in batch.text[8]


@pytest.mark.parametrize("name", ["mistral3", "qwen3", "r1", "command"])
def test_answers_to_questions_are_turns_of_the_template(made, tmp_path, name):
    tokenizer = made[name, False]
    whole = {text: shown(tokenizer, [user("1?"), said(text)]) for text in ("yes", "no")}
    data = rows(tmp_path, {"question": "1?", "chosen": "yes", "rejected": "no"})
    batch = next(PairStream(data, tokenizer, pairs=1, max_length=100))
    assert [read(tokenizer, batch, b) for b in range(2)] == list(map(as_pieces(tokenizer), whole.values()))
    data = rows(tmp_path, {"question": "1?", "completion": "yes", "label": True})
    batch = next(LabelStream(data, tokenizer, answers=1, max_length=100))
    assert read(tokenizer, batch, 0) == as_pieces(tokenizer)(whole["yes"])
    data = rows(tmp_path, {"question": "1?", "answer": "4"})
    batch = next(SFTStream(data, SFTConfig(batch_size=1, max_length=200), tokenizer))
    wanted = shown(tokenizer, [user("1?"), said("<reasoning>4</reasoning><answer>4</answer>")])
    assert read(tokenizer, batch, 0) == as_pieces(tokenizer)(wanted)


def as_pieces(tokenizer):
    """Returns a function that writes a text as pieces, as `read` does."""
    return lambda text: "".join(map(tokenizer.token_text, tokenizer.encode(text))).replace("Ġ", " ").replace("Ċ", "\n")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a?", "chosen": [said("x")], "rejected": [said("y")]},
            "an answer that is turns needs a 'prompt' that is turns",
        ),
        (
            {"prompt": "z?", "chosen": [user("a?"), said("x")], "rejected": [user("a?"), said("y")]},
            "'prompt' is none of",
        ),
        ({"chosen": [user("a?"), said("x")], "rejected": [user("a?")]}, "must have a turn of the assistant"),
        (
            {"chosen": [user("a?"), said("x")], "rejected": [user("a?"), said("x"), user("b?")]},
            "that the other has not",
        ),
        (
            {"chosen": [user("a?"), said("x")], "rejected": [user("b?"), said("y")]},
            r"'chosen' and 'rejected' must ask the same question; they differ in .*'a\?'.* and .*'b\?'",
        ),
        (
            {"chosen": [SYSTEM, user("a?"), said("x")], "rejected": [user("a?"), said("y")]},
            "must ask the same question; they differ in .*system.* and .*user",
        ),
        (
            {"prompt": [user("a?")], "chosen": [said(3)], "rejected": [said("y")]},
            r"'content' of turn 0 \(assistant\) is '3'",
        ),
        ({"prompt": [user("a?")], "chosen": [said("x")], "rejected": 3}, "'rejected' must be a text or turns"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_at_the_start(made, tmp_path, record, message):
    with pytest.raises(ValueError, match=f"rows.jsonl line 1 has .*{message}"):
        PairStream(rows(tmp_path, record), made["qwen25", False], pairs=1, max_length=200)


def test_pairs_that_the_template_makes_equal_are_refused(made, tmp_path):
    data = rows(tmp_path, {"prompt": [user("a?")], "chosen": [said("x")], "rejected": [said("x\n")]})
    next(PairStream(data, made["qwen25", False], pairs=1, max_length=200))
    with pytest.raises(ValueError, match=r"line 1: 'chosen' and 'rejected' are the same tokens \('.*x<\|eot_id\|>'\)"):
        next(PairStream(data, made["llama3", False], pairs=1, max_length=200))


def test_held_out_pairs_may_be_whole_conversations(made, tmp_path):
    pairs = [{"chosen": [user(ask), said("x")], "rejected": [user(ask), said("y")]} for ask in ("a", "b")]
    (tmp_path / "held.jsonl").write_text(json.dumps(pairs[1]) + "\n")
    data = dataclasses.replace(rows(tmp_path, pairs[0]), eval_path=str(tmp_path / "held.jsonl"))
    (held,) = held_out_pairs(data, made["phi4", False], count=4, pairs=2, max_length=99, key="reward_model.max_length")
    assert [text.count("b<|im_end|>") for text in held.text] == [1, 1]
    assert "a<|im_end|>" in next(PairStream(data, made["phi4", False], pairs=1, max_length=99)).text[0]


def test_labelled_turns_and_their_unrelated_answers(made, tmp_path):
    tokenizer = made["qwen25", False]
    answer = [said("", tool_calls=[call(x="2+2")]), tool("4"), said("It is 4.")]
    data = rows(
        tmp_path,
        {"prompt": [user("2+2?")], "completion": answer, "label": True, "tools": TOOLS},
        {"prompt": [user("5?")], "completion": "5", "label": False},
    )
    batch = next(LabelStream(data, tokenizer, answers=2, max_length=900))
    call_text = '<tool_call>\n{"name": "calc", "arguments": {"x": "2+2"}}\n</tool_call><|im_end|>'
    assert read(tokenizer, batch, 0) == call_text + "It is 4.<|im_end|>" and read(tokenizer, batch, 1) == "5<|im_end|>"
    tokens_BT, length_B, mask_BT = batch.unrelated()
    theirs = tokens_BT[1, : length_B[1]][mask_BT[1, : length_B[1]] > 0].tolist()
    assert theirs == [t for t, m in zip(batch.tokens_BT[0].tolist(), batch.mask_BT[0], strict=True) if m]
    assert length_B[1] - mask_BT[1].argmax() == batch.length_B[0] - batch.mask_BT[0].argmax()


def test_prompts_hold_the_calls_of_their_conversations(made):
    tokenizer, chat = made["qwen25", False], FORMS["a call"]
    stream = PromptStream.from_list(
        [{"messages": chat[:3]}, {"messages": chat}, {"prompt": chat[:3]}],
        *[tokenizer],
        prompts_per_step=3,
        max_prompt_length=900,
    )
    batch = next(stream)
    assert [text.endswith("4\n</tool_response><|im_end|>\n<|im_start|>assistant\n") for text in batch.text] == [
        True
    ] * 3
    assert all('{"name": "calc", "arguments": {"x": "2+2"}}' in text for text in batch.text)


def test_prompts_name_the_tools_of_their_records(made):
    tokenizer, chat = made["qwen25", False], [user("2+2?")]
    records = [{"messages": chat, "tools": TOOLS}, {"prompt": chat, "tools": json.dumps(TOOLS)}]
    records += [{"messages": chat, "tools": ["calc"]}, {"messages": chat}]
    given = {"prompts_per_step": 4, "max_prompt_length": 900}
    batch = next(PromptStream.from_list(records, tokenizer, **given))
    wanted = tokenizer.apply_chat_template(chat, tools=TOOLS)
    assert batch.text == [wanted, wanted, *[tokenizer.apply_chat_template(chat)] * 2]
    own = Tokenizer(tokenizer.directory, tools=[{"type": "function", "function": {"name": "other"}}])
    batch = next(PromptStream.from_list(records[:1] * 4, own, **given))
    assert "other" in batch.text[0] and "calc" not in batch.text[0]
    with pytest.raises(ValueError, match=r"record 0: The chat template of .*phi4False ignores 'tools'"):
        next(PromptStream.from_list(records[:1] * 4, made["phi4", False], **given))


NO_TURNS = (
    *({"role": "user"}, {"content": "x"}, user(None), user(["x"]), user("") | {"tool_calls": [call(x="1")]}),
    *(said(None), said("", tool_calls=[{}]), said("", tool_calls="x"), said("x", reasoning_content=3)),
)


@pytest.mark.parametrize("turn", NO_TURNS)
def test_turns_that_are_none_are_refused_with_their_place(made, tmp_path, turn):
    data = rows(tmp_path, {"messages": [user("?"), said("1")]}, {"messages": [user("?"), turn, said("1")]})
    with pytest.raises(ValueError, match=r"line 2 has messages: .*turn 1"):
        SFTStream(data, SFTConfig(batch_size=1), made["qwen25", False])


def test_an_observation_follows_a_thought_that_the_prompt_opened(made):
    tokenizer = made["qwen3_opens", False]
    dialogue = Dialogue(tokenizer)
    dialogue.check_template("tool")
    prompt, words = tokenizer.encode(render(tokenizer, [user("?")])), tokenizer.encode("hm\n</think>\n\ncall")
    tokens = [*prompt, *words, tokenizer.turn_end_id, *dialogue.encode("4", "tool", last=tokenizer.turn_end_id)]
    whole = [user("?"), said("<think>\nhm\n</think>\n\ncall"), tool("4")]
    assert "".join(map(tokenizer.token_text, tokens)) == "".join(
        map(tokenizer.token_text, tokenizer.encode(render(tokenizer, whole)))
    )
