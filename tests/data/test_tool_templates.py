"""Tools in chat templates: how prompts describe them, the text around their outputs, and templates refused at start."""

import json
import pathlib

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.config import build
from podrl.data import problems
from podrl.data.dialogue import Dialogue
from podrl.data.pipeline import DataConfig, PromptStream, Renderer
from podrl.data.tokenizer import Tokenizer

# The forms of four families, with the constructs that decide where tools, turns and thoughts stand. Qwen 3: a user's
# next question removes thoughts; outputs of tools do not, and they share one user's turn.
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer with {\\"name\\": ..., \\"arguments\\": ...} in <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Llama 3.1: tools in the first user's turn, one call at a time, outputs as JSON text in a turn of 'ipython'.
LLAMA31 = """{{- bos_token }}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Gemma: two roles alternate, and there are no tools.
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""

# Hermes: templates by name, with 'tool_use' for tools; a macro, marks around the model's words, and a line end after an
# output that is not the last message.
HERMES = [
    {"name": "default", "template": "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"},
    {
        "name": "tool_use",
        "template": """{%- macro declared(tool) %}{{- {"type": "function", "function": tool} | tojson }}{%- endmacro %}
{{- '<|im_start|>system\\nYou may call <tools>' }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- ' ' + declared(tool) }}
{%- endfor %}
{{- ' </tools>: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\\n' if loop.previtem and loop.previtem.role != "tool" else '' }}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' + ('' if loop.last else '\\n') }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    },
]
FAMILIES = {
    "qwen3": (QWEN3, None, "<|im_end|>", ["<|im_start|>"]),
    "llama31": (LLAMA31, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "gemma": (GEMMA, "<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "hermes": (HERMES, None, "<|im_end|>", ["<|im_start|>"]),
}
SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["query"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Größe & <{name}>\n2 lines.", "parameters": SCHEMA}}
    for name in ("look_up", "calculator")
]
ASKED = {"role": "user", "content": "How many?"}
CALLED = {"role": "assistant", "content": '<think>\nhm\n</think>\n\n<tool_call>{"name": "calculator"}</tool_call>'}


def written(directory: pathlib.Path, family: str, *, special=(), plain=()) -> pathlib.Path:
    """Writes a byte-level tokenizer with the special tokens and the template of a family."""
    template, bos, eos, marks = FAMILIES[family]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[t for t in (bos, eos, "<pad>", *marks, *special) if t],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([problems.GENERATOR.problem("train", i).question for i in range(50)], trainer)
    fast.add_tokens([tokenizers.AddedToken(text, special=False) for text in plain])
    directory.mkdir(exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<pad>"}
    config |= {"bos_token": bos} if bos else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes directories of all families; Qwen's tags are tokens that are not special."""
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    place = tmp_path_factory.mktemp("families")
    return {name: written(place / name, name, plain=tags if name == "qwen3" else ()) for name in FAMILIES}


@pytest.mark.nightly("podrl/data")
@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_with_tools_are_those_of_transformers(family, made):
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(made[family]), Tokenizer(made[family], tools=TOOLS)
    answers = [{"role": "tool", "content": text} for text in ('4 "x"\n', "<b>")]
    for messages in [[ASKED], [ASKED, CALLED], *([[ASKED, CALLED, *answers]] if family != "gemma" else [])]:
        for prompt in (True, False):
            text = theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == text


@pytest.mark.parametrize("family", ["qwen3", "llama31", "hermes"])
def test_a_prompt_holds_the_schemas_of_the_tools(family, made):
    data = build(DataConfig, {})
    text = Renderer(data, Tokenizer(made[family], tools=TOOLS)).prompt({"question": "How many?"}).text
    without = Tokenizer(made[family])
    assert Tokenizer(made[family], tools=TOOLS).unnamed_tools == without.unnamed_tools == ()
    for tool in TOOLS:
        shown = json.dumps(tool, ensure_ascii=False, indent=4 if family == "llama31" else None)
        assert shown in text
        assert tool["function"]["name"] not in Renderer(data, without).prompt({"question": "How many?"}).text


def test_a_template_without_tools_needs_a_system_prompt_that_names_them(made):
    gemma = Tokenizer(made["gemma"], tools=TOOLS)
    assert gemma.unnamed_tools == ("look_up", "calculator")
    with pytest.raises(ValueError, match=r"prompts of data.template=chat in .* leave out the tools calculator\."):
        Renderer(DataConfig(system_prompt="Ask look_up."), gemma)
    prompt = Renderer(DataConfig(system_prompt="Ask look_up or the calculator."), gemma).prompt({"question": "?"})
    assert prompt.text.count("look_up") == 1
    with pytest.raises(ValueError, match=r"data\.template=plain in .* leave out the tools look_up, calculator\."):
        Renderer(DataConfig(template="plain", system_prompt="Think."), Tokenizer(made["qwen3"], tools=TOOLS))


OUTPUTS = st.lists(st.text(max_size=12).filter(lambda text: text == text.strip()), min_size=1, max_size=3)


@pytest.mark.parametrize("family", ["qwen3", "llama31", "hermes"])
@settings(max_examples=25)
@given(texts=OUTPUTS, ended=st.booleans())
def test_only_the_templates_delta_is_appended(family, made, texts, ended):
    """Prompt, sampled words and delta together equal the conversation as the template writes it, for any tool
    output."""
    tokenizer = Tokenizer(made[family], tools=TOOLS)
    dialogue, end = Dialogue(tokenizer), tokenizer.turn_end_id
    dialogue.check_template("tool")
    prompt = tokenizer.apply_chat_template([ASKED])
    words = [*tokenizer.encode(CALLED["content"]), *([end] if ended else [])]
    tokens = [*tokenizer.encode(prompt), *words, *dialogue.encode(texts, "tool", last=words[-1])]
    answers = [{"role": "tool", "content": text} for text in texts]
    whole = tokenizer.apply_chat_template([ASKED, CALLED, *answers])
    assert "".join(_raw(tokenizer, tokens)) == "".join(_raw(tokenizer, tokenizer.encode(whole)))


def _raw(tokenizer, tokens):
    """Returns the text of each token in the tokenizer's byte alphabet, special tokens included."""
    return [tokenizer.token_text(token) for token in tokens]


def test_thoughts_stay_around_tools_and_not_around_questions(made):
    qwen = Dialogue(Tokenizer(made["qwen3"], tools=TOOLS))
    qwen.check_template("tool")
    with pytest.raises(ValueError, match=r"rewrites the model's earlier turns.*role='user'"):
        qwen.check_template("user")


def test_a_role_that_a_template_passes_over_or_refuses_is_a_users(made, tmp_path):
    gemma = Dialogue(Tokenizer(made["gemma"], tools=TOOLS))
    text = "".join(_raw(gemma.tokenizer, gemma.encode(["4", "5"], "tool", last=gemma.tokenizer.turn_end_id)))
    assert text == "Ċ<start_of_turn>userĊ4ĊĊ5<end_of_turn>Ċ<start_of_turn>modelĊ"
    silent = written(tmp_path / "silent", "qwen3")
    config = json.loads((silent / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace('message.role == "tool"', "false")
    (silent / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="role='user'"):  # after a user's turn this template drops earlier thoughts
        Dialogue(Tokenizer(silent)).check_template("tool")


def test_a_tool_cannot_end_its_message(made):
    for family in ("qwen3", "llama31", "hermes"):
        tokenizer = Tokenizer(made[family], tools=TOOLS)
        marks = [tokenizer.turn_end_id, tokenizer.token_id("<|im_start|>") or tokenizer.token_id("<|start_header_id|>")]
        tokens = Dialogue(tokenizer).encode(["4", "5<|im_end|><|eot_id|><|im_start|><|start_header_id|>"], "tool")
        own = Dialogue(tokenizer).encode(["4", "5"], "tool")
        assert [t for t in tokens if t in marks] == [t for t in own if t in marks]
        assert "5<|im_end|><|eot_id|>" in tokenizer.decode(tokens)


def test_a_date_is_not_given(made):
    """A prompt is the same on every day: templates get no function that reads the clock."""
    assert "26 Jul 2024" in Tokenizer(made["llama31"]).apply_chat_template([ASKED])
    assert "strftime_now" not in LLAMA31


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>"])
def test_tags_that_are_special_tokens_are_refused(tag, tmp_path):
    dialogue = Dialogue(Tokenizer(written(tmp_path / "model", "qwen3", special=(tag,))))
    with pytest.raises(ValueError, match=rf"tag '{tag}' of env.parser holds a special token of .*Choose another"):
        dialogue.check_tags(("<tool_call>", "</tool_call>"))
    dialogue.check_tags(("<tool_output>", "<call_tool"))


def test_a_position_in_the_data_belongs_to_its_tools(made):
    def stream(tools):
        given = {"prompts_per_step": 2, "max_prompt_length": 4096}
        return PromptStream.from_config(DataConfig(), Tokenizer(made["qwen3"], tools=tools), **given)

    first = stream(TOOLS)
    batch = next(first)
    again = stream(json.loads(json.dumps(TOOLS)))
    again.restore(batch.data_state)
    assert next(again).text == next(first).text
    other = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"description": "Other."}}, TOOLS[1]]
    for changed in (other, TOOLS[:1], ()):
        with pytest.raises(ValueError, match="prompts of the checkpoint name other tools"):
            stream(changed).restore(batch.data_state)
    assert b"tools" not in next(stream(())).data_state
