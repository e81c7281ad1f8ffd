"""Conversations in the chat forms of several families give the same text and ids as transformers.

The templates are written for these tests: each has the constructs of a family's real template, but not its text.
"""

import json

import pytest
import sentencepiece
import tokenizers
from pieces import train as pieces_file

from podrl.data import problems
from podrl.data.tokenizer import Tokenizer

# Constructs of Llama 3: set blocks, a system message taken off the front, trim, whitespace control, tojson, `is
# defined`.
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if tools is not none %}{{- "<|start_header_id|>tools<|end_header_id|>\\n\\n" + (tools | tojson) }}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if date_string is defined %}{{- "Today: " + date_string + "\\n" }}{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
        {{- content + (message['content'] | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Constructs of Qwen: a default system text, namespace, reversed slices, loop.first and loop.last, string methods; the
# thoughts of earlier turns are cut away.
QWEN = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Constructs of Mistral: a filtered loop, continue. Roles must alternate; the system text stands before the last user's
# turn.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant.") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["content"] == "" %}{%- continue %}{%- endif %}
    {%- if message["role"] == "user" %}
        {%- if message == user_messages[-1] and (system_message is defined) %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

FORMS = {
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "qwen": (QWEN, None, "<|im_end|>", ["<|im_start|>"]),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"]),
}
ASKED = {"role": "user", "content": "  What is 17 + 25?\n"}
TOLD = {"role": "system", "content": "Antworte kurz, bitte — größer als 3 ✓."}
CONVERSATIONS = [
    [ASKED],
    [TOLD, ASKED],
    [
        TOLD,
        ASKED,
        {"role": "assistant", "content": "<think>\n17+25\n</think>\n\n42 "},
        {"role": "user", "content": "And\n\n5?"},
    ],
]


@pytest.fixture(params=FORMS)
def directory(request, tmp_path):
    """Makes a byte-level tokenizer with the special tokens and the template of a family."""
    template, bos, eos, marks = FORMS[request.param]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[t for t in (bos, eos, "<pad>", *marks) if t],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([problems.GENERATOR.problem("train", i).question for i in range(50)], trainer)
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<pad>"}
    config |= {"bos_token": bos} if bos else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return tmp_path


@pytest.mark.nightly("podrl/data")
@pytest.mark.parity
def test_conversations_are_those_of_transformers(directory):
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == text
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text) == ids and len(ids) >= 20
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_ids[0] == theirs.eos_token_id and ours.pad_id == theirs.pad_token_id


def test_conversations_in_each_form(directory):
    """Compares each family's form of a short conversation with the expected text, which is written out."""
    tokenizer = Tokenizer(directory)
    text = tokenizer.apply_chat_template([TOLD, {"role": "user", "content": "2?"}])
    told = TOLD["content"]
    expected = {
        "<|eot_id|>": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        f"{told}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|im_end|>": f"<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n",
        "</s>": f"<s>[INST] {told}\n\n2?[/INST]",
    }
    end = tokenizer.token_text(tokenizer.eos_ids[0])
    assert text == expected[end]
    assert tokenizer.token_text(tokenizer.turn_end_id) == end
    ids = tokenizer.encode(text)
    assert [i for i in ids if i == tokenizer.bos_id] == ([tokenizer.bos_id] if tokenizer.bos_id is not None else [])


def test_roles_that_do_not_alternate_are_refused_in_the_templates_words(directory):
    tokenizer = Tokenizer(directory)
    if tokenizer.bos_token != "<s>":
        assert tokenizer.apply_chat_template([ASKED, ASKED])
        return
    with pytest.raises(ValueError, match=r"refuses roles .*must alternate user/assistant"):
        tokenizer.apply_chat_template([ASKED, ASKED])


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def pieces(request, tmp_path_factory):
    """Makes a directory with a SentencePiece file with byte fallback, as Llama 2, Mistral and Gemma have."""
    directory = tmp_path_factory.mktemp(request.param)
    stored = pieces_file(model_type=request.param, vocab_size=420, byte_fallback=True)
    (directory / "tokenizer.model").write_bytes(stored)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


def test_pieces_are_those_of_the_sentencepiece_library(pieces):
    ours = Tokenizer(pieces)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    for text in [
        "Tom has 12 apples.",
        "  two  spaces\n\nand lines\t",
        "größer ✓ 漢字",
        "",
        problems.GENERATOR.problem("train", 7).question,
    ]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.encode(text, start=True) == [2, *ids]
        assert ours.decode([2, *ids, 1]) == theirs.decode(ids) == text
    # Control pieces such as '<s>' in a text become their ids; the SentencePiece library would encode them as plain
    # text.
    assert ours.encode("<s>1</s>") == [2, *theirs.encode("1"), 1]
