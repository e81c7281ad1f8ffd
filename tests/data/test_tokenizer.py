"""Tokenizers from files: the embedded one, SentencePiece models, special ids, chat templates, broken directories."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from pieces import train as pieces_file

import podrl
from podrl.data import problems, template, train_tokenizer
from podrl.data.conversation import prompts_of
from podrl.data.tokenizer import Tokenizer, foreign, right_padded

TINY = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.load(TINY)


def pieces(tokenizer, text):
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


def test_ids_are_gemmas(tiny):
    assert (tiny.pad_id, tiny.bos_id, tiny.eos_ids) == (0, 2, (1, tiny.token_id("<end_of_turn>")))
    assert tiny.token_id("<unk>") == 3 and tiny.vocab_size == 384
    assert tiny.turn_end_id == tiny.token_id("<end_of_turn>")


def test_each_digit_and_each_tag_is_one_piece(tiny):
    text = "<reasoning>25+17=42.</reasoning><answer>42</answer>"
    expected = ["<reasoning>", *"25+17=42.", "</reasoning>", "<answer>", "4", "2", "</answer>"]
    assert pieces(tiny, text) == expected


def test_problem_text_survives_the_round_trip_and_fits(tiny):
    for index in range(300):
        p = problems.GENERATOR.problem("held_out" if index % 3 == 0 else "train", index)
        completion = template.completion(p.reasoning, p.answer)
        assert tiny.decode(tiny.encode(p.question)) == p.question
        assert tiny.decode(tiny.encode(completion)) == completion
        assert len(tiny.encode(template.wrap(tiny, p.question))) <= 52
        assert len(tiny.encode(completion)) < 40


def test_any_ascii_text_survives_the_round_trip(tiny):
    text = "A cat's 3 hats\ncost $4.50 (each)?  Yes & no; x_1 = {y} ~ [z] \\ ^ ` | @ # % * ! \" <a>"
    assert tiny.decode(tiny.encode(text)) == text


def test_special_pieces_are_not_decoded_but_tags_are(tiny):
    ids = [tiny.bos_id, *tiny.encode("<answer>7</answer><end_of_turn>"), tiny.eos_ids[0], tiny.pad_id]
    assert tiny.decode(ids) == "<answer>7</answer>"


def test_encode_adds_the_start_only_when_asked(tiny):
    assert tiny.encode("7", start=True) == [tiny.bos_id, *tiny.encode("7")]


def test_chat_template(tiny):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Go"},
    ]
    assert tiny.apply_chat_template(messages) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
        "<start_of_turn>user\nGo<end_of_turn>\n<start_of_turn>model\n"
    )
    assert tiny.apply_chat_template(messages[:2], add_generation_prompt=False).endswith("Hi<end_of_turn>\n")
    with pytest.raises(ValueError, match="unknown role tool"):
        tiny.apply_chat_template([{"role": "tool", "content": "x"}])


def test_training_gives_the_committed_files(tmp_path):
    train_tokenizer.write(tmp_path / "a")
    train_tokenizer.write(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        written = (tmp_path / "a" / name).read_bytes()
        assert written == (tmp_path / "b" / name).read_bytes()
        # The content is compared, not the bytes: the library's layout of the file may change with its version.
        mine, theirs = json.loads(written), json.loads((TINY / name).read_text())
        assert mine.get("model", mine) == theirs.get("model", theirs), name
        assert mine.get("added_tokens") == theirs.get("added_tokens"), name


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: model\.path"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer(tmp_path)


def test_broken_files_are_named(tmp_path):
    shutil.copytree(TINY, tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text('{\n"bos_token": }')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json line 2 is not JSON"):
        Tokenizer(tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "t" / "generation_config.json").unlink()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file: .*\.$"):
        Tokenizer(tmp_path / "t")


def _with_added(directory, token, *, special):
    shutil.copytree(TINY, directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": 384, "content": token, "special": special, **flags})
    file.write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 384}))


def test_a_special_token_without_an_embedding_is_refused_only_in_text(tmp_path):
    _with_added(tmp_path / "t", "<image_soft_token>", special=True)
    tokenizer = Tokenizer(tmp_path / "t")
    assert tokenizer.vocab_size == 384 and tokenizer.encode("7") == Tokenizer(TINY).encode("7")
    with pytest.raises(ValueError, match=r"<image_soft_token> \(id 384\), for which the model in .* ids are below 384"):
        tokenizer.encode("7<image_soft_token>")
    (tmp_path / "t" / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 385}}))
    assert Tokenizer(tmp_path / "t").vocab_size == 385
    _with_added(tmp_path / "u", "<word>", special=False)
    assert Tokenizer(tmp_path / "u").vocab_size == 385  # an ordinary token counts, although the model has no embedding


def test_the_vocabulary_ends_after_the_largest_id(tmp_path):
    shutil.copytree(TINY, tmp_path / "t")
    model = {"type": "WordLevel", "vocab": {"<eos>": 0, "a": 900}, "unk_token": "<eos>"}
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    assert Tokenizer(tmp_path / "t").vocab_size == 901


def test_ids_come_from_the_model_files_where_the_tokenizer_names_none(tmp_path):
    shutil.copytree(TINY, tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "a", "template": "x"}]})
    )
    (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": 20}))
    (tmp_path / "t" / "config.json").write_text(json.dumps({"bos_token_id": 30, "eos_token_id": 21}))
    tokenizer = Tokenizer(tmp_path / "t")
    assert tokenizer.eos_ids == (20,) and tokenizer.bos_id == 30 and tokenizer.pad_id == 20
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"no chat template.*data\.template=plain"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_chat_template_file_wins_and_may_not_touch_python(tmp_path):
    shutil.copytree(TINY, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}|{{ bos_token }}")
    assert Tokenizer(tmp_path / "t").apply_chat_template([{"role": "user", "content": "x"}]) == "x|<bos>"
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="refuses roles"):
        Tokenizer(tmp_path / "t").apply_chat_template([{"role": "user", "content": "x"}])


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory):
    """Makes a directory with a SentencePiece model like Gemma's: specials first, turn marks as user symbols."""
    directory = tmp_path_factory.mktemp("sp")
    stored = pieces_file(
        vocab_size=120,
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n"],
    )
    (directory / "tokenizer.model").write_bytes(stored)
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "pad_token": "<pad>"}
    added = {"added_tokens_decoder": {"4": {"special": True}, "5": {"special": True}}}
    chat = {"chat_template": train_tokenizer.CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | added | chat))
    return directory


def test_sentencepiece_model(piece_model):
    tokenizer = Tokenizer(piece_model)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 2, (1, 5))
    question = problems.GENERATOR.problem("train", 3).question
    prompt = template.wrap(tokenizer, question)
    ids = tokenizer.encode(prompt)
    assert ids[:2] == [2, 4] and ids.count(2) == 1
    assert tokenizer.decode(ids) == f"user\n{question}\nmodel\n"
    assert tokenizer.token_id("no such piece") is None
    assert tokenizer.token_id("<unk>") == 3


def test_broken_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece model"):
        Tokenizer(tmp_path)


@pytest.mark.nightly("podrl/data")
@pytest.mark.parity
def test_transformers_reads_the_embedded_tokenizer(tiny):
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(TINY)
    assert (other.pad_token_id, other.bos_token_id, other.eos_token_id) == (0, 2, 1)
    for index in range(20):
        p = problems.GENERATOR.problem("train", index)
        prompt = template.wrap(tiny, p.question, system="Be brief." if index % 2 else "")
        messages = [{"role": "system", "content": "Be brief."}] if index % 2 else []
        messages += [{"role": "user", "content": p.question}]
        assert other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt
        assert other.encode(prompt, add_special_tokens=False) == tiny.encode(prompt)
        ids = tiny.encode(template.completion(p.reasoning, p.answer) + "<end_of_turn>")
        assert other.decode(ids, skip_special_tokens=True) == tiny.decode(ids)


def test_rows_are_padded_on_the_right_to_one_width():
    tokens_BT, length_B = right_padded([[5, 6, 7], [], [8]], 9)
    np.testing.assert_array_equal(tokens_BT, [[5, 6, 7], [9, 9, 9], [8, 9, 9]])
    np.testing.assert_array_equal(length_B, [3, 0, 1])
    assert tokens_BT.dtype == length_B.dtype == np.int32
    assert right_padded([[5]], 9, width=3)[0].tolist() == [[5, 9, 9]]
    assert right_padded([[]], 9)[0].tolist() == [[9]]


def test_prompts_of_texts_are_bounded(tiny):
    prompts = prompts_of(["1+1", "12"], tiny, max_length=8)
    assert [tiny.decode(row[:n]) for row, n in zip(prompts.tokens_PT, prompts.length_P, strict=True)] == ["1+1", "12"]
    assert prompts.index_P.tolist() == [0, 1] and prompts.text == ["1+1", "12"]
    assert prompts.tokens_PT[:, 0].tolist() == [tiny.bos_id] * 2
    with pytest.raises(ValueError, match=r"A prompt has 4 tokens: rollout.max_prompt_length=2"):
        prompts_of(["1+1", "12"], tiny, max_length=2)


def test_a_tokenizer_of_another_model_is_told(tmp_path):
    model = TINY
    assert foreign(model, model) == ""
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    assert foreign(tmp_path, model) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not the tokenizer.json of the model in" in foreign(tmp_path, model)
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in foreign(tmp_path, model)
