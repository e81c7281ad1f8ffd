"""Tokenizers: text to token ids and back, from the tokenizer files of a Hugging Face directory."""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import sentencepiece
import tokenizers
from etils import epath
from jaxtyping import Int

from podrl.data.chat import ChatTemplate
from podrl.mappings import ChatMessage, JsonObject, ToolSchema
from podrl.storage.regular import load_object, regular
from podrl.storage.storage import locate

# The tokenizer files of a model directory; each is read if it exists. The exporter of a model copies the files that
# exist, so that other libraries can load the directory it writes.
FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    "additional_chat_templates/tool_use.jinja",
)
ORDINARY = -1  # stands for any token that is not special
# A text that continues another text is encoded after an anchor, so that it is not encoded like a beginning. The anchor
# is the first of the texts below that shares no token with the text to encode.
_ANCHORS = ("\n", "0", ".", "a")
_WORD = "zq0x"  # stands for the model's words, or for a call's name, in a rendering that shows how a turn ends
_USER_TURN = {"role": "user", "content": "ask"}
_ASSISTANT_TURN = {"role": "assistant", "content": _WORD}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": _WORD, "arguments": {}}}],
}


class _Backend(Protocol):
    size: int  # largest token id plus one
    added: Mapping[int, str]  # texts, by id, of the special tokens that are added to the vocabulary
    special: Mapping[int, str]  # texts, by id, of all special tokens
    # Texts, by id, of tokens that are found before a text is cut into pieces, all of `special` included.
    marks: Mapping[int, str]
    start: Sequence[int] | None  # ids before a plain text; None if files of this kind do not say which

    def encode(self, text: str) -> list[int]: ...

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Tokenizer:
    """A tokenizer with the ids and the chat template of its model.

    Attributes:
      directory: directory of the tokenizer files.
      files: names of the tokenizer files that the directory has.
      vocab_size: largest id that `encode` returns, plus one; a model's embedding may have more rows.
      pad_id: id that fills rows: the model's padding token, or the first end id if the model names none.
      bos_id: id of the start token; None if the model names none. `start_ids` says whether a text begins with it.
      start_ids: ids that the tokenizer's own post-processor puts before a plain text; often the start token, or none.
      eos_ids: every id that ends a completion, the chat template's included; the tokenizer's own end token is first.
      turn_end_id: id that ends the model's turn: the mark that the chat template writes after the turn, else the first
        end id.
      tools: schemas of the functions that the model may call; the chat template gets them with every conversation that
        brings no schemas of its own.
    """

    def __init__(self, directory: str | epath.PathLike, *, tools: Sequence[ToolSchema] = ()) -> None:
        """Reads `tokenizer.json` (preferred) or SentencePiece's `tokenizer.model`, and the JSON files beside it.

        Args:
          directory: Hugging Face model directory, local or gs://.
          tools: schemas of the functions that the model may call.

        Raises:
          FileNotFoundError: the directory does not exist, or it has neither tokenizer file.
          ValueError: a file is not what its name says, no file names an end token, or a named token does not exist.
        """
        self.directory = epath.Path(locate(directory))
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"Tokenizer directory {self.directory} does not exist: model.path, or the key tokenizer, must name a "
                "Hugging Face directory."
            )
        self.files = tuple(name for name in FILES if (self.directory / name).exists())
        self._config = _read_json(self.directory / "tokenizer_config.json")
        self._backend = _open_backend(self.directory, self._config)
        model = _read_json(self.directory / "config.json")
        self._beyond = self._special_tokens_beyond(model)
        self.vocab_size = self._backend.size if not self._beyond else min(self._beyond)
        generation = _read_json(self.directory / "generation_config.json")
        self._rows = self.vocab_size if self._beyond else max(self.vocab_size, _rows_of(model) or 0)
        self._tokens = self._special_tokens()
        self.tools = tuple(tools)
        self._templates = self._read_templates()
        turn_ends = [i for turn in (_ASSISTANT_TURN, _CALLED) if (i := self._end_of(turn)) is not None]
        self.eos_ids = self._end_ids(generation, model, turn_ends)
        self.turn_end_id = next(iter(turn_ends), self.eos_ids[0])
        self.bos_id = self._one_id("bos", generation, model)
        pad = self._one_id("pad", generation, model)
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self.start_ids = self._start_of_text()
        self._special, self._written = self._find_special()
        self._starts = re.compile(f"(?={self._written.pattern})")

    @classmethod
    def load(cls, directory: str | epath.PathLike, *, tools: Sequence[ToolSchema] = ()) -> "Tokenizer":
        """Loads a tokenizer, as the constructor does."""
        return cls(directory, tools=tools)

    def encode(self, text: str, *, start: bool = False, behind: int | None = None) -> list[int]:
        """Encodes `text`; special tokens written in it become their ids.

        Args:
          text: text to encode.
          start: True to put `start_ids` before the ids, unless the ids begin with `start_ids` already. Set it for every
            plain text. Never set it for a rendering of the chat template: the template writes the start token if the
            model wants one.
          behind: id of the token before the text, or ORDINARY; None if nothing is before the text. Llama's and
            Mistral's tokenizers put a space before a text that nothing precedes, and some of them also after a special
            token.

        Raises:
          ValueError: the text holds a special token for which the model in the same directory has no embedding.
        """
        ids = self._within(text, self._backend.encode(text) if behind is None else self._encode_behind(text, behind))
        begin = list(self.start_ids) if start else []
        return ids if ids[: len(begin)] == begin else begin + ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes a text as `encode` does: (ids, span of each token in characters: first, last + 1).

        Every character is in a span: a character that normalisation drops is in the span of the next token. If several
        tokens are the bytes of one character, each has the span of the character. A token that normalisation inserts
        before a character has the span of that character, too.

        Raises:
          ValueError: the text holds a special token for which the model in the same directory has no embedding.
        """
        ids, offsets = self._backend.encode_spans(text)
        spans, before = [], 0
        for start, end in offsets:  # a library's offsets may leave out the spaces of a token
            spans.append((min(start, before), end))
            before = end
        for i in range(len(spans) - 2, -1, -1):
            if spans[i][0] == spans[i][1]:
                spans[i] = spans[i + 1]
        return self._within(text, ids), spans

    def _encode_behind(self, text: str, token: int) -> list[int]:
        """Encodes a text that follows another text, whose last token is `token`."""
        anchors = (self._backend.token_text(token),) if token in self._special else _ANCHORS
        ids = self._backend.encode(text)
        if not self._changed_by(anchors):
            return ids
        found = (self._split_behind(anchor, text) for anchor in anchors)
        return next((own for own in found if own is not None), ids)

    def _split_behind(self, anchor: str, text: str) -> list[int] | None:
        """Encodes a text after the text `anchor`; None if a token holds characters of both texts."""
        before, ids = self._backend.encode(anchor), self._backend.encode(anchor + text)
        return ids[len(before) :] if ids[: len(before)] == before else None

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a process has few tokenizers
    def _changed_by(self, anchors: tuple[str, ...]) -> bool:
        """Returns True if some text is encoded differently after an anchor than alone, for example because the
        tokenizer inserts a space before a text that stands alone."""
        words = [(word, self._backend.encode(word)) for word in ("a", "1", "(", " a", "\n\na")]
        behind = [(self._split_behind(anchor, word), ids) for anchor in anchors for word, ids in words]
        return any(own is not None and own != ids for own, ids in behind)

    def _within(self, text: str, ids: list[int]) -> list[int]:
        """Returns the ids of a text unchanged, after a check.

        Raises:
          ValueError: the model in the same directory has no embedding for one of the ids.
        """
        if self._beyond and (found := self._beyond.keys() & set(ids)):
            names = ", ".join(f"{self._beyond[i]} (id {i})" for i in sorted(found))
            raise ValueError(
                f"The text {text[:80]!r} holds {names}, for which the model in {self.directory} has no embedding: its "
                f"ids are below {self.vocab_size}. Take it out of the data."
            )
        return ids

    def encode_plain(self, text: str, *, behind: int = ORDINARY) -> list[int]:
        """Encodes text of unknown origin, such as a tool's output: special tokens written in it stay text.

        A single character that is a special token cannot stay text and is dropped.

        Args:
          text: text to encode.
          behind: id of the token before the text, or ORDINARY.
        """
        if not self._starts.search(text):
            ids = self._encode_behind(text, behind)
            if self._special.isdisjoint(ids):
                return ids
        # The text is cut after the first character of every special token, so that no part holds a whole special token.
        cuts = [0, *(found.start() + 1 for found in self._starts.finditer(text)), len(text)]
        ids: list[int] = []
        for start, end in itertools.pairwise(cuts):
            ids += self._encode_behind(text[start:end], ids[-1] if ids else behind)
        if self._special.isdisjoint(ids):
            return ids
        # A special token can still be among the ids: it may appear only after the text is normalised, or have just one
        # character. So each character is encoded alone, and characters that are special tokens are dropped.
        parts = [self._encode_behind(character, ORDINARY) for character in text]
        return [i for part in parts if self._special.isdisjoint(part) for i in part]

    def special_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the span (first character, last + 1) of every special token written in a text, from left to right."""
        return (found.span() for found in self._written.finditer(text))

    def holds_special(self, text: str) -> bool:
        """True if a text holds special tokens."""
        return bool(self._starts.search(text)) or not self._special.isdisjoint(self._backend.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes `ids` to text; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids])

    def token_id(self, token: str) -> int | None:
        """Returns the id of a piece; None if the vocabulary lacks it."""
        return self._backend.token_id(token)

    def token_text(self, token: int) -> str:
        """Returns the piece with this id, special or not."""
        return self._backend.token_text(token)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of text that a token stands for; b'' for a special token and for the unknown token."""
        return b"" if token in self._textless else self._backend.token_bytes(token)

    @functools.cached_property
    def _textless(self) -> set[int]:
        unknown = (self._tokens.get("unk_token", ""), "<unk>", "[UNK]")
        return self._special | {i for text in unknown if (i := self._backend.token_id(text)) is not None}

    @functools.cached_property
    def splits_text(self) -> bool:
        """True if the bytes of a test text's tokens, as `token_bytes` returns them, join to the bytes of the text."""
        text = "It is 42, or (1.5)x!\n\n a  b"  # other characters may be unknown to a small vocabulary
        return b"".join(map(self.token_bytes, self.encode_plain(text))) == text.encode()

    @property
    def bos_token(self) -> str:
        """The text of the start token; '' if the model has none."""
        return self._tokens.get("bos_token", "")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolSchema] | None = None,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Formats a conversation as the model's text, start token included; pass it to `encode` without `start`.

        Args:
          messages: mappings with 'role' (system, user, assistant or tool) and 'content'.
          add_generation_prompt: True to end with the opening of the model's turn.
          tools: schemas of the functions that the model may call; None takes the tokenizer's own schemas.
          marks: two texts, written before and after each stretch that the template marks as the model's words.

        Raises:
          ValueError: the tokenizer has no chat template, `messages` is not a list of messages, or the template refuses
            them.
        """
        _check_messages(messages)
        tools = self.tools if tools is None else tools
        template = self._templates.get("tool_use" if tools else "default", self._templates.get("default"))
        if template is None:
            raise ValueError(
                f"{self.directory} has no chat template: add chat_template.jinja or set data.template=plain."
            )
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tokens=self._tokens, tools=tools, marks=marks
        )

    @functools.cached_property
    def tools_digest(self) -> str:
        """The checksum of `tools`; '' if there are none."""
        return hashlib.sha256(json.dumps(self.tools).encode()).hexdigest()[:16] if self.tools else ""

    @functools.cached_property
    def unnamed_tools(self) -> tuple[str, ...]:
        """The names of those `tools` that the chat template does not write into a prompt."""
        if not self.tools:
            return ()
        text = "" if not self.has_chat_template else self.apply_chat_template([{"role": "user", "content": "?"}])
        return tuple(name for tool in self.tools if (name := str(tool["function"]["name"])) not in text)

    def _special_tokens_beyond(self, model: JsonObject) -> dict[int, str]:
        """Finds the special tokens at the end of the vocabulary that have no embedding in the model: {id: text}.

        Gemma 3's token for images is one of them. The result is empty if an ordinary token has no embedding either.
        """
        rows = _rows_of(model)
        if rows is None:
            return {}
        found, last = {}, self._backend.size - 1
        while last >= rows and last in self._backend.added:
            found[last] = self._backend.added[last]
            last -= 1
        return found if last < rows else {}

    def _special_tokens(self) -> dict[str, str]:
        """Maps names of special tokens, such as 'bos_token', to the tokens' texts."""
        named = {**_read_json(self.directory / "special_tokens_map.json"), **self._config}
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = named.get(name)
            token = token.get("content") if isinstance(token, Mapping) else token
            if not isinstance(token, str | None):
                raise ValueError(
                    f"{self.directory} has {name}={str(token)[:80]!r} in tokenizer_config.json or "
                    "special_tokens_map.json: it must be a text, or an object with the text 'content'."
                )
            if token is not None:
                found[name] = token
        return found

    def _find_special(self) -> tuple[set[int], re.Pattern[str]]:
        """Finds the ids that text of unknown origin must not get: (the ids, a pattern of the special tokens' texts)."""
        named = {self._backend.token_id(text): text for text in self._tokens.values()}
        named |= {i: self._backend.token_text(i) for i in self.eos_ids}
        found = {i: text for i, text in {**named, **self._backend.special}.items() if i is not None and text}
        written = "|".join(map(re.escape, sorted(found.values(), key=len, reverse=True))) or "(?!)"
        # The unknown token is not among the ids, because it also stands for characters without a piece.
        return set(found) - {self._backend.token_id(self._tokens.get("unk_token", ""))}, re.compile(written)

    def _one_id(self, name: str, *configs: JsonObject) -> int | None:
        token = self._tokens.get(f"{name}_token")
        if token is not None:
            return self._backend.token_id(token)
        values = (config.get(key) for config in configs for key in [f"{name}_token_id"])
        none = (None, -1) if name == "pad" else (None,)  # old conversions of Llama write -1 for an absent padding token
        found = next((i for i in values if i not in none), None)
        return None if found is None else self._checked(f"{name}_token_id", found)

    def _checked(self, key: str, value: object) -> int:
        """Checks and returns `value`, the id that a file gives for `key`.

        Raises:
          ValueError: the value is not an id of the vocabulary.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self._rows:
            raise ValueError(
                f"{self.directory} has {key}={value!r} in config.json, generation_config.json or tokenizer.json: it "
                f"must be an id of the vocabulary, from 0 to {self._rows - 1}."
            )
        return value

    def _end_ids(self, generation: JsonObject, model: JsonObject, turns: Sequence[int]) -> tuple[int, ...]:
        """Lists the end tokens: the tokenizer's own, the end tokens of the first file that lists some, and the chat
        template's.

        Raises:
          ValueError: there are no end tokens, or one of them is not in the vocabulary.
        """
        name = self._tokens.get("eos_token", "")
        own = self._backend.token_id(name)
        if name and own is None:
            raise ValueError(
                f"{self.directory} names eos_token={name!r} in tokenizer_config.json or special_tokens_map.json: it "
                "must be a token of the vocabulary."
            )
        listed = next((c["eos_token_id"] for c in (generation, model) if c.get("eos_token_id") is not None), [])
        listed = [self._checked("eos_token_id", i) for i in (listed if isinstance(listed, list) else [listed])]
        ends = tuple(dict.fromkeys(i for i in (own, *listed, *turns) if i is not None))
        if not ends:
            raise ValueError(
                f"{self.directory} names no end token: set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json."
            )
        return ends

    def _end_of(self, turn: ChatMessage) -> int | None:
        """Returns the id of the mark that the chat template writes after `turn`; None if it writes none."""
        for before in ([_USER_TURN], [{"role": "system", "content": "be brief"}, _USER_TURN], []):
            try:
                text = self.apply_chat_template([*before, turn], add_generation_prompt=False) if self._templates else ""
            except ValueError:
                continue
            _, found, tail = text.rpartition(_WORD)
            # After a call the template first closes the call, then the turn: so the turn's mark is the last one.
            marks = [i for i in self._backend.encode(tail) if self._is_mark(i)] if found else []
            return next(iter(marks if turn is _ASSISTANT_TURN else reversed(marks)), None)
        return None

    def _is_mark(self, token: int) -> bool:
        text = self._backend.marks.get(token, "")
        return bool(text.strip(" \t\r\n\u2581"))  # some added tokens of Gemma are only spaces or line ends

    def _start_of_text(self) -> tuple[int, ...]:
        """Returns the ids that stand before a plain text.

        tokenizer.json lists these ids. tokenizer.model does not list them: with it the text begins with the start token
        alone, or with nothing if add_bos_token in tokenizer_config.json is false.
        """
        start = self._backend.start
        if start is None:
            bos = self._backend.token_id(self._tokens.get("bos_token", ""))
            start = [] if self._config.get("add_bos_token") is False or bos is None else [bos]
        return tuple(self._checked("start token of the post-processor", i) for i in start)

    def _read_templates(self) -> dict[str, ChatTemplate]:
        """Reads the chat templates by their names: 'default', and 'tool_use' if there is one for prompts with tools.

        As in transformers, a template in a file of its own replaces the template in tokenizer_config.json. Directories
        of models that also read images may have their only template in chat_template.json.
        """
        files = {name: self.directory / name for name in self.files if name.endswith(".jinja")}
        file, tools = files.get("chat_template.jinja"), files.get("additional_chat_templates/tool_use.jinja")
        elsewhere = _read_json(self.directory / "chat_template.json")
        source = _read_text(file) if file else self._config.get("chat_template", elsewhere.get("chat_template"))
        listed = source if isinstance(source, list) else [{"name": "default", "template": source}]
        try:
            named = {str(entry["name"]): entry["template"] for entry in listed}
        except (KeyError, TypeError):
            named = {"default": source}
        if wrong := [text for text in named.values() if not isinstance(text, str | None)]:
            raise ValueError(
                f"{self.directory} has chat_template={str(wrong[0])[:80]!r} in tokenizer_config.json or "
                "chat_template.json: it must be a text, or a list of objects with the texts 'name' and 'template'."
            )
        named |= {"tool_use": _read_text(tools)} if tools else {}
        templates = {name: text for name in ("default", "tool_use") if isinstance(text := named.get(name), str)}
        return {name: ChatTemplate(text, str(self.directory)) for name, text in templates.items()}


def _rows_of(model: JsonObject) -> int | None:
    """Returns the number of rows of a model's embedding; None if the model's config.json does not say it."""
    inner = model.get("text_config")
    rows = {**(inner if isinstance(inner, Mapping) else {}), **model}.get("vocab_size")
    return rows if isinstance(rows, int) else None


def _check_messages(messages: object) -> None:
    """Refuses a value that is not a conversation, because a template would write the value in its Python form.

    Raises:
      ValueError: the value is not a list of messages; the message names the place and the value.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(f"{str(messages)[:80]!r} is not a conversation: it must be a list of messages.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] is {str(message)[:80]!r}: it must have the texts 'role' and 'content'.")
        if not isinstance(message.get("content"), str | None):
            raise ValueError(f"messages[{i}] has the content {str(message['content'])[:80]!r}: it must be text.")


def _read_text(path: epath.Path) -> str:
    try:
        return regular(path).read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.") from error


def _read_json(path: epath.Path) -> JsonObject:
    """Reads the object in a JSON file; {} if there is no such file."""
    return load_object(path) if path.exists() else {}


def _open_backend(directory: epath.Path, config: JsonObject) -> _Backend:
    fast, slow = directory / "tokenizer.json", directory / "tokenizer.model"
    if fast.exists():
        return _Json(fast, config)
    if slow.exists():
        return _SentencePiece(slow, _added_tokens(config) | _added_elsewhere(directory))
    raise FileNotFoundError(
        f"{directory} holds neither tokenizer.json nor tokenizer.model: a model's directory needs one of them, beside "
        "config.json and the weights (model.path)."
    )


def _added_tokens(config: JsonObject) -> dict[int, tuple[str, bool]]:
    """Reads the tokens that tokenizer_config.json adds: (text, whether the token is special) by id.

    Raises:
      ValueError: the field `added_tokens_decoder` does not hold objects with 'content' and 'special' by id.
    """
    entries = config.get("added_tokens_decoder") or {}
    try:
        return {int(i): (_token_text(token), bool(token.get("special"))) for i, token in entries.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"added_tokens_decoder in tokenizer_config.json is {str(entries)[:80]!r}: it must map ids to objects "
            f"with 'content' and 'special' ({error})."
        ) from None


def _token_text(token: JsonObject) -> str:
    if not isinstance(content := token.get("content", ""), str):
        raise TypeError(f"'content' is {content!r}")
    return content


def _added_elsewhere(directory: epath.Path) -> dict[int, tuple[str, bool]]:
    """Reads the tokens of added_tokens.json, a file of older directories, by id; all of them count as special.

    Raises:
      ValueError: an id is not an integer.
    """
    entries = _read_json(directory / "added_tokens.json")
    if wrong := [name for name, i in entries.items() if isinstance(i, bool) or not isinstance(i, int)]:
        raise ValueError(
            f"{directory / 'added_tokens.json'} gives {wrong[0]!r} the id {entries[wrong[0]]!r}, not a number."
        )
    return {i: (text, True) for text, i in entries.items()}


class _Json:
    """Encodes and decodes by a tokenizer.json, with the `tokenizers` library."""

    def __init__(self, path: epath.Path, config: JsonObject) -> None:
        self._path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_read_text(path))
        except Exception as error:
            # The library raises plain Exception for any malformed file.
            raise ValueError(f"{path} is not a tokenizer file: {str(error).rstrip('.')}.") from error
        # The file keeps the state of the program that saved it: its truncation, its padding, and the dropout that lets
        # BPE skip merges at random. All of them are switched off.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None
        named = _added_tokens(config)
        self._add(path, named)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokens = self._tokenizer.get_added_tokens_decoder()
        # As in transformers, a token is special if tokenizer.json or tokenizer_config.json says so.
        special = {i for i, token in tokens.items() if token.special} | {
            i for i, (_, is_special) in named.items() if is_special
        }
        self.added: Mapping[int, str] = {i: token.content for i, token in tokens.items() if i in special}
        self.special: Mapping[int, str] = self.added
        self.marks: Mapping[int, str] = {i: token.content for i, token in tokens.items()}
        whole = self._encoded("a", add_special_tokens=True)
        self.start: Sequence[int] | None = [
            i
            for i, _ in itertools.takewhile(
                lambda pair: pair[1], zip(whole.ids, whole.special_tokens_mask, strict=True)
            )
        ]

    def _add(self, path: epath.Path, added: Mapping[int, tuple[str, bool]]) -> None:
        """Adds the tokens of tokenizer_config.json that tokenizer.json lacks.

        Raises:
          ValueError: the two files give a token different ids.
        """
        whole = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        for i, (text, special) in sorted(added.items()):
            if not text:
                continue
            # If the text is a piece of the vocabulary, it keeps its id when added, and is never split from then on.
            if text not in whole:
                add = self._tokenizer.add_special_tokens if special else self._tokenizer.add_tokens
                add([tokenizers.AddedToken(text, special=special, normalized=False)])
            if (found := self._tokenizer.token_to_id(text)) != i:
                raise ValueError(
                    f"{text!r} has the id {i} in tokenizer_config.json and {found} in {path}: they must be the same."
                )

    def _encoded(self, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            # If the parts of a file do not fit together, the library's Rust code may panic, which is no Exception.
            if type(error).__name__ != "PanicException" and not isinstance(error, Exception):
                raise
            raise ValueError(f"{self._path} cannot encode {text[:80]!a}: {error}") from None

    def encode(self, text: str) -> list[int]:
        return self._encoded(text).ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._encoded(text)
        return encoded.ids, encoded.offsets

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i not in self.special], skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_text(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        if token in self.marks:
            return self.marks[token].encode()
        piece = self.token_text(token)
        if self._by_bytes:
            return bytes(_BYTES.get(character, 0x3F) for character in piece)
        return _bytes_of(piece)

    @functools.cached_property
    def _by_bytes(self) -> bool:
        """True if each character of a piece stands for a byte, as in GPT-2's vocabulary."""
        decoder = self._tokenizer.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()


class _SentencePiece:
    """Encodes and decodes by a SentencePiece model. It finds control pieces written in a text, as `tokenizers` does."""

    def __init__(self, path: epath.Path, added: Mapping[int, tuple[str, bool]]) -> None:
        """Reads the model.

        Args:
          path: path of the file `tokenizer.model`.
          added: tokens that other files of the directory add, as (text, whether the token is special) by id. Some of
            them are pieces of the model.

        Raises:
          ValueError: the file is not a SentencePiece model, or the id of an added token contradicts the model's pieces:
            a token that is a piece must have the piece's id, and any other token must have an id beyond all pieces.
        """
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=regular(path).read_bytes())
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        self._controls: Mapping[str, int] = {}
        self._beyond: Mapping[int, str] = {}
        pieces = self._model.get_piece_size()
        controls = {i: self._model.id_to_piece(i) for i in range(pieces) if self._model.is_control(i)}
        for i, (text, _) in added.items():
            known = self.token_id(text) if text else i
            if (
                i < 0
                or (i < pieces and text and text != self._model.id_to_piece(i))
                or (i >= pieces and known is not None)
            ):
                raise ValueError(
                    f"The token {text!r} is added with id {i}. {path} has {pieces} pieces, and the piece with this id "
                    f"is {self._model.id_to_piece(i) if 0 <= i < pieces else 'none'}: the id must be that of the "
                    f"token's own piece, or, for a token without a piece, {pieces} or more."
                )
        self._beyond = {i: text for i, (text, _) in added.items() if i >= pieces and text}
        self.size = max(self._beyond, default=pieces - 1) + 1
        self.added: Mapping[int, str] = {i: text for i, text in self._beyond.items() if added[i][1]}
        skipped = {*controls, *(i for i, (_, special) in added.items() if special)}
        self.special: Mapping[int, str] = {i: self.token_text(i) for i in sorted(skipped)}
        self.marks: Mapping[int, str] = {**{i: self.token_text(i) for i in added}, **self.special}
        self.start: Sequence[int] | None = None
        cut = {**controls, **self._beyond}
        self._controls = {text: i for i, text in cut.items()}
        longest = sorted(self._controls, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest)) + ")")

    def encode(self, text: str) -> list[int]:
        return self.encode_spans(text)[0]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for part in self._pattern.split(text) if self._controls else [text]:
            if part in self._controls:
                ids.append(self._controls[part])
                spans.append((at, at + len(part)))
            elif part:
                found = self._model.encode(part, return_type="offset_mapping")
                ids += found["ids"]
                spans += [(at + start, at + end) for start, end in found["offsets"]]
            at += len(part)
        return ids, spans

    def decode(self, ids: list[int]) -> str:
        texts = []
        for beyond, run in itertools.groupby((i for i in ids if i not in self.special), self._beyond.get):
            same = list(run)
            texts += [self._model.decode(same)] if beyond is None else [beyond] * len(same)
        return "".join(texts)

    def token_id(self, token: str) -> int | None:
        if token in self._controls:
            return self._controls[token]
        found = self._model.piece_to_id(token)
        return None if found == self._model.unk_id() and token != self._model.id_to_piece(found) else found

    def token_text(self, token: int) -> str:
        return self._beyond.get(token) or self._model.id_to_piece(token)

    def token_bytes(self, token: int) -> bytes:
        if token in self.marks:
            return self.marks[token].encode()
        return b"" if self._model.is_unknown(token) else _bytes_of(self._model.id_to_piece(token))


# GPT-2 writes a byte that is printable in Latin-1 as that character, and any other byte as a character from 256 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _bytes_of(piece: str) -> bytes:
    """Returns the bytes of a SentencePiece piece: one byte such as '<0x0A>', or a text whose spaces are U+2581."""
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def foreign(directory: str | epath.PathLike, model: str | epath.PathLike) -> str:
    """Compares the files of a tokenizer with those of a model; returns the difference as a sentence, '' if none."""
    mine, theirs = epath.Path(locate(directory)), epath.Path(locate(model))
    for name in ("tokenizer.json", "tokenizer.model"):
        why = "the same id may stand for different text"
        if (theirs / name).exists():
            if not (mine / name).exists():
                return f"The tokenizer of {mine} has no {name}, but the model in {theirs} has one: {why}."
            if (mine / name).read_bytes() != (theirs / name).read_bytes():
                return f"{mine / name} is not the {name} of the model in {theirs}: {why}."
    return ""


def right_padded(
    rows: Sequence[Sequence[int]], pad_id: int, *, width: int | None = None
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Pads B token sequences on the right: (token rows of one width T, length of each sequence in tokens).

    Args:
      rows: token ids of each sequence.
      pad_id: id that fills the row after the end of a sequence.
      width: T, at least the length of the longest sequence. None takes the length of the longest sequence, at least 1.
    """
    length_B = np.array([len(row) for row in rows], np.int32)
    tokens_BT = np.full((len(rows), max(int(length_B.max(initial=0)), 1) if width is None else width), pad_id, np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row
    return tokens_BT, length_B
