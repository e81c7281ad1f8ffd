"""The incremental search for stop strings finds the same end as a search in the text of every prefix."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from podrl.engine.stops import StopFinder

LANGUAGES = {
    "ascii": "the answer is 42.\n</answer> STOP #### ",
    "umlauts": "Größe süß naïve café ñandú ",
    "cyrillic": "ответ равен сорока двум ",
    "chinese": "最终答案是四十二。停止，谢谢！",
    "hindi": "उत्तर बयालीस है ",
    "emoji": "🛑🎉👩‍👩‍👧‍👦🇩🇪✅😀",
}
TEXT = st.sampled_from(sorted(LANGUAGES)).flatmap(lambda name: st.text(LANGUAGES[name], min_size=1, max_size=12))


def byte_level(merges: tuple[str, ...]) -> Tokenizer:
    """Makes tokens of single bytes, and some longer ones, as in GPT-2, Llama 3 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    pairs = []
    for text in merges:
        whole = "".join(alphabet_of(byte) for byte in text.encode())
        for end in range(2, len(whole) + 1):
            if whole[:end] not in vocab:
                vocab[whole[:end]] = len(vocab)
                pairs.append((whole[: end - 1], whole[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def alphabet_of(byte: int) -> str:
    """Maps each byte to its character in byte-level vocabularies (OpenAI's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def byte_fallback(characters: str) -> Tokenizer:
    """Makes tokens of characters, and byte tokens such as `<0xE4>` for missing characters, as in Gemma and Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set(characters))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {
    "bytes": byte_level(()),
    "words": byte_level(("the", "answer", "сорок", "答案", "停", "है", "🛑🎉", "</answer>")),
    "fallback": byte_fallback("abcdefghijklmnopqrstuvwxyz "),
}


def oracle(strings, decode, tokens):
    return next((n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in strings)), None)


def found(strings, decode, tokens, sizes):
    """Feeds tokens in groups of the given `sizes`, in turn; returns (the finder's result, most tokens decoded at
    once)."""
    widest = 0

    def counted(part):
        nonlocal widest
        widest = max(widest, len(part))
        return decode(part)

    finder, seen, turn = StopFinder(strings, counted), 0, 0
    while seen < len(tokens):
        seen, turn = min(seen + sizes[turn % len(sizes)], len(tokens)), turn + 1
        end = finder.find(tokens[:seen])
        if end is not None:
            return end, widest
    return None, widest


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(
    parts=st.lists(TEXT, min_size=1, max_size=14),
    stops=st.lists(TEXT, min_size=1, max_size=3),
    place=st.integers(0, 14),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4),
)
@example(parts=["最终答案是"] * 14, stops=["四十二。停"], place=14, sizes=[8])
@example(parts=["🎉🎉🎉🎉"] * 14, stops=["🛑😀✅🛑"], place=13, sizes=[4, 1])
def test_a_stop_string_is_found_at_its_first_token(name, parts, stops, place, sizes):
    tokenizer = TOKENIZERS[name]
    text = "".join([*parts[:place], stops[0], *parts[place:]])
    tokens = tokenizer.encode(text).ids
    assert tokenizer.decode(tokens) == text
    end, _ = found(stops, tokenizer.decode, tokens, sizes)
    assert end is not None and end == oracle(stops, tokenizer.decode, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(data=st.data(), sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_any_tokens_at_all(name, data, sizes):
    """Draws any tokens that a model may draw: bytes that are not a character, special tokens without text, pieces of
    stop strings."""
    tokenizer = TOKENIZERS[name]
    stop = data.draw(TEXT)
    pieces = st.one_of(TEXT.map(lambda t: tokenizer.encode(t).ids), st.just([-1] * 7))
    tokens = [t for part in data.draw(st.lists(pieces, max_size=12)) for t in part] + tokenizer.encode(stop).ids
    # With byte fallback, one invalid byte makes the decoder write U+FFFD for its whole run of byte tokens, and so
    # perhaps for the stop string.
    if name != "fallback":
        tokens = data.draw(st.lists(st.integers(0, 255), max_size=40)) + tokens
    decode = lambda part: tokenizer.decode([t for t in part if t >= 0])  # noqa: E731
    end, _ = found([stop], decode, tokens, sizes)
    assert end is not None and end == oracle([stop], decode, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_only_the_tail_is_decoded(name, language):
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(LANGUAGES[language] * 60).ids
    end, widest = found(["nowhere!"], tokenizer.decode, tokens, [8])
    assert end is None and widest < 300 < len(tokens)


def test_given_tokens_are_not_searched():
    tokenizer = TOKENIZERS["bytes"]
    finder = StopFinder(["停止"], tokenizer.decode)
    tokens = tokenizer.encode("停止 and 停").ids
    assert finder.find(tokens) == 6
    finder.restart(len(tokens) - 3)
    assert finder.find(tokens) is None
    tokens += tokenizer.encode("止").ids
    assert finder.find(tokens) == len(tokens)
