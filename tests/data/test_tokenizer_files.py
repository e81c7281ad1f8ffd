"""Published forms of tokenizer files: start tokens, end marks, saved state, added tokens, as in transformers."""

import itertools
import json
import pathlib
import re
import string

import numpy as np
import pytest
import tokenizers
from embedded import EMBEDDED
from pieces import train as pieces_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

import podrl
from podrl.data import train_tokenizer
from podrl.data.answers import Example, encode
from podrl.data.config import DataConfig
from podrl.data.conversation import prompts_of
from podrl.data.dialogue import Dialogue
from podrl.data.pipeline import PromptStream, Renderer
from podrl.data.stream import Limit
from podrl.data.template import TextPart, turn
from podrl.data.tokenizer import ORDINARY, Tokenizer

TINY = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|end▁of▁sentence|>")
BEGIN, END, EOT, _, IM_END, R1_END = range(256, 262)
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User:' + m.content }}{% else %}"
    "{{ 'Assistant:' + m.content + '<|end▁of▁sentence|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:<think>\n' }}{% endif %}"
)
_NO_MARK = "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
_SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
)
_CALLS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls %}{{ c.function.name }}<|eot_id|>"
    "{% else %}<|im_end|>{% endfor %}{% endfor %}"
)


def _directory(where, *, begins=False, config=None, generation=None, template=None, change=None, model=None):
    """Writes the files of a byte-level tokenizer with the special tokens of several families."""
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if begins:
        named = [(SPECIAL[0], BEGIN)]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=named)
    if change:
        change(tokenizer)
    where.mkdir(parents=True)
    tokenizer.save(str(where / "tokenizer.json"))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "bos_token": SPECIAL[0]}
    given |= ({"chat_template": template} if template else {}) | (config or {})
    (where / "tokenizer_config.json").write_text(json.dumps(given))
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (where / name).write_text(json.dumps(content))
    return where


@pytest.mark.parametrize(
    ("template", "end", "others"),
    [
        (_CHATML, IM_END, ()),
        (_LLAMA, EOT, ()),
        (_R1, R1_END, ()),
        (_NO_MARK, END, ()),
        (_SYSTEM_FIRST, IM_END, ()),
        (_CALLS, IM_END, (EOT,)),
        (None, END, ()),
    ],
)
def test_the_template_decides_what_ends_a_turn(tmp_path, template, end, others):
    tokenizer = Tokenizer(_directory(tmp_path / "t", template=template, generation={"eos_token_id": END}))
    assert tokenizer.turn_end_id == end
    assert tokenizer.eos_ids == tuple(dict.fromkeys((END, end, *others)))


_STARTS = {  # post-processor, add_bos_token in tokenizer_config.json, whether plain text begins with the start token
    "files": (True, None, True),
    "none": (False, None, False),
    "files, and asked": (True, True, True),
    "files, and refused": (True, False, True),
}


@pytest.mark.parametrize("case", _STARTS)
@pytest.mark.parametrize("template", [_CHATML, _LLAMA])
def test_one_rule_gives_the_start_token_everywhere(tmp_path, case, template):
    begins, asked, has = _STARTS[case]
    config = {} if asked is None else {"add_bos_token": asked}
    model = {"vocab_size": 300, "bos_token_id": BEGIN, "eos_token_id": END}
    tokenizer = Tokenizer(_directory(tmp_path / "t", begins=begins, config=config, template=template, model=model))
    limit, own = Limit(999, "key", "error"), [BEGIN] if has else []
    plain = [*own, *tokenizer.encode("1+1=")]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}])
    rendered = tokenizer.encode(chat)
    assert (rendered[0] == BEGIN) == (template is _LLAMA) and rendered.count(BEGIN) == (template is _LLAMA)

    def first(records):
        batch = next(PromptStream.from_list(records, tokenizer, prompts_per_step=1, max_prompt_length=999))
        return batch.tokens_PT[0, : batch.length_P[0]].tolist()

    def made(texts, **more):
        prompts = prompts_of(texts, tokenizer, max_length=999, **more)
        return prompts.tokens_PT[0, : prompts.length_P[0]].tolist()

    assert first(["1+1="]) == made(["1+1="]) == plain
    turns = [{"role": "user", "content": "1+1="}]
    assert first([{"messages": turns}]) == made([turns]) == made(["1+1="], chat=True) == rendered
    for prompt, ids in ((TextPart("1+1="), plain), (TextPart(chat, rendered=True), rendered)):
        example = encode([prompt, turn("2")], tokenizer, limit)
        assert isinstance(example, Example) and example.tokens[:-2] == ids
    asked_plain = Renderer(DataConfig(template="plain", system_prompt=""), tokenizer).prompt({"question": "1+1="})
    assert not asked_plain.rendered and asked_plain.text == "1+1=\n"
    # A text that begins with the start token already has one.
    assert tokenizer.encode("<|begin_of_text|>1", start=True) == tokenizer.encode("<|begin_of_text|>1")


@pytest.mark.nightly("podrl/data")
@pytest.mark.parity
@pytest.mark.parametrize("case", _STARTS)
def test_transformers_begins_plain_texts_alike(tmp_path, case):
    transformers = pytest.importorskip("transformers")
    begins, asked, _ = _STARTS[case]
    where = _directory(tmp_path / "t", begins=begins, config={} if asked is None else {"add_bos_token": asked})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(where), Tokenizer(where)
    for text in ("1+1=", "", " x", "<|im_start|>user\n"):
        assert ours.encode(text, start=True) == theirs(text)["input_ids"]


@pytest.mark.nightly("podrl/data")
@pytest.mark.parity
@pytest.mark.parametrize("name", EMBEDDED)
def test_transformers_begins_plain_texts_of_the_embedded_checkpoints_alike(name):
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(TINY.parent / name), Tokenizer(TINY.parent / name)
    for text in ("Tom has 3 apples.", "", "<answer>7</answer>"):
        assert ours.encode(text, start=True) == theirs(text)["input_ids"]


def test_the_embedded_checkpoints_begin_plain_texts(tmp_path):
    for name, kind in (("tiny", {}), ("tiny_tools", {"calls": True}), ("tiny_search", {"search": True})):
        train_tokenizer.write(tmp_path / name, **kind)
        written = json.loads((tmp_path / name / "tokenizer.json").read_text())
        assert (
            written["post_processor"]
            == json.loads((TINY.parent / name / "tokenizer.json").read_text())["post_processor"]
        )
        assert Tokenizer(TINY.parent / name).start_ids == (2,)


def test_saved_truncation_padding_and_dropout_are_not_applied(tmp_path):
    def saved(tokenizer):
        tokenizer.model = models.BPE(
            {**{c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, "ab": 262, "abc": 263},
            [("a", "b"), ("ab", "c")],
            dropout=0.5,
        )
        tokenizer.enable_truncation(max_length=8)
        tokenizer.enable_padding(length=12, pad_id=END, pad_token=SPECIAL[1])

    tokenizer = Tokenizer(_directory(tmp_path / "t", change=saved))
    for text, count in (("x", 1), ("1" * 27, 27), ("abc" * 40, 40)):
        assert len(tokenizer.encode(text)) == len(tokenizer.encode_spans(text)[0]) == count
    assert {tuple(tokenizer.encode("abc" * 40)) for _ in range(20)} == {(263,) * 40}


def test_a_token_of_the_config_alone_is_added_where_ids_agree(tmp_path):
    added = {"added_tokens_decoder": {"262": {"content": "<|new|>", "special": True}}}
    tokenizer = Tokenizer(_directory(tmp_path / "a", config=added))
    assert tokenizer.encode("x<|new|>") == [*tokenizer.encode("x"), 262] and tokenizer.decode([262]) == ""
    for i, text in (("300", "<|new|>"), ("7", "<|im_end|>")):
        config = {"added_tokens_decoder": {i: {"content": text, "special": True}}}
        with pytest.raises(ValueError, match=f"{re.escape(repr(text))} has the id {i} in tokenizer_config.json"):
            Tokenizer(_directory(tmp_path / i, config=config))


def test_a_piece_of_the_vocabulary_that_the_config_names_is_read_whole(tmp_path):
    (end,) = Tokenizer(_directory(tmp_path / "whole")).encode("<|im_end|>")
    config = {"added_tokens_decoder": {str(end): {"content": "<|im_end|>", "special": True}}}
    directory = _directory(tmp_path / "piece", config=config)
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["id"] != end]
    raw["model"]["vocab"]["<|im_end|>"] = end
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    _, found, _ = Tokenizer(directory).encode("a<|im_end|>b")
    assert found == end


def test_a_token_is_special_where_either_file_says_so(tmp_path):
    def plain(tokenizer):
        tokenizer.add_tokens([AddedToken("<f>", special=False, normalized=False)])

    added = {"added_tokens_decoder": {"262": {"content": "<f>", "special": True}}}
    for config, text in (({}, "x<f>y"), (added, "xy")):
        tokenizer = Tokenizer(_directory(tmp_path / text, change=plain, config=config))
        assert tokenizer.decode(tokenizer.encode("x<f>y<|im_end|>")) == text


def test_mutated_tokenizers_encode_or_are_refused(tmp_path):
    """Every field of tokenizer.json in turn gets a wrong value; the library may panic on such a file."""
    where = _directory(tmp_path / "t", begins=True, template=_LLAMA)
    given = json.loads((where / "tokenizer.json").read_text())
    given["model"]["vocab"] = dict(list(given["model"]["vocab"].items())[:4])

    def places(node, path=()):
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield (*path, key)
            yield from places(node[key], (*path, key))

    read = 0
    for path in places(given):
        for value in (None, 10**12, "", []):
            changed = json.loads(json.dumps(given))
            node = changed
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            (where / "tokenizer.json").write_text(json.dumps(changed))
            try:
                tokenizer = Tokenizer(where)
                tokenizer.decode(tokenizer.encode("a b <|im_end|>", start=True))
                read += 1
            except ValueError as error:
                assert len(str(error)) < 2000
    assert read


@pytest.mark.parametrize(
    ("generation", "config", "message"),
    [
        ({"eos_token_id": 10**12}, {}, "eos_token_id=1000000000000 .*from 0 to 261"),
        ({"eos_token_id": [257, 262]}, {}, "eos_token_id=262"),
        ({"eos_token_id": -1}, {}, "eos_token_id=-1"),
        ({"eos_token_id": "7"}, {}, "eos_token_id='7'"),
        ({"eos_token_id": True}, {}, "eos_token_id=True"),
        ({"pad_token_id": 10**12}, {}, "pad_token_id="),
        ({"bos_token_id": 262}, {"bos_token": None}, "bos_token_id=262"),
        ({}, {"eos_token": "<|nowhere|>"}, "eos_token='<|nowhere|>'"),
        ({}, {"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({}, {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder"),
        ({}, {"added_tokens_decoder": {"7": {"content": 7}}}, "added_tokens_decoder"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path, generation, config, message):
    where = _directory(tmp_path / "t", config=config, generation=generation, model={"vocab_size": 262})
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        Tokenizer(where)


def test_tokens_beyond_the_pieces_of_a_sentencepiece_model(tmp_path):
    pieces = pieces_file(vocab_size=120, eos_piece="<eos>", bos_piece="<bos>")

    def directory(name, config, added=None):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.model").write_bytes(pieces)
        given = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": _CHATML, **config}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(given))
        if added is not None:
            (tmp_path / name / "added_tokens.json").write_text(json.dumps(added))
        return tmp_path / name

    ends = {"120": ("<|im_start|>", True), "121": ("<|im_end|>", True), "122": ("<think>", False)}
    listed = {i: {"content": text, "special": special} for i, (text, special) in ends.items()}
    tokenizer = Tokenizer(directory("a", {"added_tokens_decoder": listed}))
    assert tokenizer.vocab_size == 123 and tokenizer.start_ids == (2,) and tokenizer.turn_end_id == 121
    ids = tokenizer.encode("<|im_start|>1<think><|im_end|>")
    assert [ids[0], *ids[-2:]] == [120, 122, 121] and tokenizer.decode(ids) == "1<think>"
    assert tokenizer.encode_spans("1<think>")[1][-1] == (1, 8) and tokenizer.token_text(122) == "<think>"
    older = Tokenizer(directory("b", {"add_bos_token": False}, {text: int(i) for i, (text, _) in ends.items()}))
    assert older.encode("<|im_start|>1<think><|im_end|>") == ids and older.start_ids == ()
    assert "added_tokens.json" in older.files
    for name, wrong in (("c", {"7": "<|im_end|>"}), ("d", {"130": "<eos>"}), ("e", {"-1": "<x>"})):
        config = {"added_tokens_decoder": {i: {"content": text, "special": True} for i, text in wrong.items()}}
        with pytest.raises(ValueError, match="the id must be that of the token's own piece"):
            Tokenizer(directory(name, config))


@pytest.mark.parametrize(
    "given",
    [
        "hello",
        [5],
        [{"role": "user", "content": "x"}],
        [[{"content": "x"}]],
        [["x"]],
        [None],
        [[{"role": "user", "content": [1]}]],
        [[{"role": "user", "content": None}]],
        [[{"role": "user"}]],
        [[]],
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_neither_text_nor_messages_is_refused(given, chat):
    with pytest.raises(ValueError, match="text"):
        prompts_of(given, Tokenizer(TINY), max_length=99, chat=chat)


def test_conversations_are_rendered():
    tokenizer = Tokenizer(TINY)
    turns = [{"role": "user", "content": "1+1?"}]
    prompts = prompts_of([turns, "1+1?"], tokenizer, max_length=99, chat=True)
    assert prompts.text == [tokenizer.apply_chat_template(turns)] * 2
    np.testing.assert_array_equal(prompts.tokens_PT[0], prompts.tokens_PT[1])


def test_damaged_files_are_refused_in_a_sentence(tmp_path):
    """Every field of the JSON files in turn gets a wrong value: the result is a tokenizer, or a ValueError."""
    wrong = (None, -1, 1.5, True, "x", [None], {"content": 3})
    fields = ("bos_token", "eos_token", "pad_token", "added_tokens_decoder", "chat_template", "add_bos_token")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    cases = [("tokenizer_config.json", field) for field in fields]
    cases += [(file, field) for file in ("generation_config.json", "config.json") for field in (*ids, "vocab_size")]
    where = _directory(tmp_path / "t", template=_CHATML, generation={}, model={"vocab_size": 262})
    for (file, field), value in itertools.product(cases, wrong):
        before = (where / file).read_text()
        (where / file).write_text(json.dumps({**json.loads(before), field: value}))
        try:
            Tokenizer(where).encode("x", start=True)
        except ValueError as error:
            assert len(str(error)) < 500
        (where / file).write_text(before)


@pytest.mark.parametrize("jinja", [False, True])
def test_chat_templates_in_files_of_their_own(tmp_path, jinja):
    where = _directory(tmp_path / "model")
    name, content = (
        ("chat_template.jinja", _CHATML) if jinja else ("chat_template.json", json.dumps({"chat_template": _CHATML}))
    )
    (where / name).write_text(content)
    (where / "additional_chat_templates").mkdir()
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]
    (where / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}" + _CHATML)
    tokenizer, asks = Tokenizer(where), [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(asks) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(asks, tools=tools).startswith("calc<|im_start|>user")
    assert tokenizer.turn_end_id == IM_END
    assert {name, "additional_chat_templates/tool_use.jinja"} <= set(tokenizer.files)


def test_space_that_a_special_token_takes_is_no_token_behind_it(tmp_path):
    """Phi 3's marks include the line end after them. An observation must get the same tokens alone as in the whole
    conversation."""
    taking = [AddedToken(text, special=True, normalized=False, rstrip=True) for text in ("<|end|>", "<|user|>")]
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    where = _directory(tmp_path / "model", template=template, change=lambda made: made.add_special_tokens(taking))
    tokenizer = Tokenizer(where)
    asks, says, more = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    end = tokenizer.turn_end_id
    assert tokenizer.token_text(end) == "<|end|>"
    sample = [*tokenizer.encode(tokenizer.apply_chat_template([asks])), *tokenizer.encode("b"), end]
    sample += Dialogue(tokenizer).encode("c", "user", last=end)
    assert sample == tokenizer.encode(tokenizer.apply_chat_template([asks, says, more]))
    assert sample == [*sample[:-1], *tokenizer.encode("\n")] and tokenizer.decode(sample).count("\n") == 2


def _beginning_with_a_space(where, kind):
    """Makes a tokenizer in Llama's and Mistral's form, which puts a space before the beginning of a text."""
    where.mkdir()
    (where / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    if kind == "pieces":
        (where / "tokenizer.model").write_bytes(pieces_file(vocab_size=420, byte_fallback=True, add_dummy_prefix=True))
        return Tokenizer(where)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.ascii_letters]
    tokens += ["\u2581a", "bc", "\u2581\u2581"]
    merges = [("\u2581", "a"), ("b", "c"), ("\u2581", "\u2581")]
    model = models.BPE({text: i for i, text in enumerate(tokens)}, merges, byte_fallback=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    if kind == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens[:3]])
    made.save(str(where / "tokenizer.json"))
    return Tokenizer(where)


TEXTS = ("abc", " abc", "bc", "\nabc", "a\n", "0", ".1", "", "  a", "\u00e9")


@pytest.mark.parametrize("kind", ["normalizer", "first", "always", "never", "pieces"])
def test_no_space_is_put_into_what_follows_a_text(tmp_path, kind):
    tokenizer = _beginning_with_a_space(tmp_path / "model", kind)
    assert (tokenizer.encode("bc") == tokenizer.encode("bc", behind=ORDINARY)) == (kind == "never")
    for before, text in itertools.product(filter(None, TEXTS), TEXTS):
        first = tokenizer.encode(before)
        wanted = tokenizer.decode(first) + text  # the decoder removes a text's own first space, too
        example = encode([TextPart(before), turn(text)], tokenizer, Limit(99, "sft.max_length", "error"))
        assert isinstance(example, Example) and tokenizer.decode(example.tokens) == wanted
        assert tokenizer.decode([*first, *Dialogue(tokenizer).encode(text, last=first[-1])]) == wanted
        assert tokenizer.decode([*first, *Dialogue(tokenizer).encode(text)]) == wanted
    hostile = "a</s>b<s>\nc</s>"
    assert tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode_plain(hostile)]) == "a" + hostile
