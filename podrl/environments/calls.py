"""Tool calls as models write them and outputs as models read them: DR-Tulu's tags, and JSON calls of chat models."""

import dataclasses
import difflib
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Cuts = tuple[tuple[tuple[int, int], ...], ...]
QUERY = ""  # the argument that the text between tags is, before the tool's own name for it is known
_ATTRIBUTE = re.compile(r"""\s++([\w.:-]++)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>]++))""")
_CLOSING = re.compile(r"\s*+>")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT = re.compile(r"<(/?)think>")
_FENCE = re.compile(r"```\w*+\s*+")
_SOMETHING_CALLED = re.compile(r"""(?:\[\s*+)?\{\s*+["'](?:name|function|type)["']\s*+:""")
_NAMED = re.compile(r"""["']name["']\s*+:\s*+["']([^"']*+)["']""")
_TAG = re.compile(r"<[|/]{0,2}+([A-Za-z_:-]{3,24}+)\|?+>?+")
_ALIKE = 0.8  # of difflib's ratio, from which a tag is a misspelt one
_LAST_TAGS = 64  # different tags of a turn that are compared with those of calls
_DEPTH = 64  # of arrays and objects in each other that JSON of a model or a tool may have
_SHOWN = 80  # characters of a word of the model's that a message repeats
_STRUCTURE = re.compile(
    r"<(?=\||/?(?:tool_output|snippet|webpage|call_tool|call|tool|tool_call|tool_response|answer)\b)", re.IGNORECASE
)
SEPARATOR = "\ue0f2"  # between outputs that become messages of their own in the chat template; of Unicode's private use
# The names of DR-Tulu's parsers, and of chat models whose templates ask for these forms.
ALIASES = {"v20250824": "call_tool", "unified": "tool", "qwen3": "hermes", "llama3": "json", "gemma": "json"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it.

    Attributes:
      name: name of the tool; '' where none can be read.
      arguments: arguments by name; the text between tags is under QUERY.
      problem: why the call cannot be run, as the model is told; '' where it can.
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Output:
    """A tool's output: documents, or one text where `tag` is ''."""

    texts: Sequence[str]
    tag: str = ""


@dataclasses.dataclass(frozen=True)
class Observation:
    """Text for the model, and the ranges of it that each call filled (podrl.environments.workers.Say.cuts)."""

    text: str
    cuts: Cuts


class Tags:
    """Calls in tags: `<call_tool name="t" k="v">query</call_tool>`, `<tool name="t">query</tool>`, `<t>query</t>`.

    Attributes:
      role: how observations enter the sample.
      stop: strings that end a call.
      tags: what else the model writes or reads, and no special token may be.
    """

    role = "raw"
    tags: tuple[str, ...] = ("<tool_output>", "</tool_output>", "<snippet", "</snippet>", "<webpage", "</webpage>")

    def __init__(self, openings: Sequence[str], closings: Sequence[str], *, legacy: bool = False) -> None:
        self._openings, self.stop, self._legacy = tuple(openings), tuple(closings), legacy
        self.tags = (*(f"<{opening}" for opening in openings), *type(self).tags)

    def calls(self, text: str, stop: str) -> list[Call]:
        """The call that a turn ends with, in time linear in its length.

        A turn that the model itself ended in the midst of a call, or with a misspelt tag, holds one with a `problem`.
        A call in a thought is a draft, and none; so is any text of a turn that a limit ended.
        """
        said, thought = spoken(text)
        if stop == "eos":
            return self._never_closed(said)
        if stop not in self.stop or not said.endswith(stop) or thought:
            return []
        inner = said[: -len(stop)]
        end = len(inner)
        for start, tag in reversed(list(self._opened(inner, [stop[2:-1]] if self._legacy else self._openings))):
            # No attribute holds another opening: each part of the text is read once.
            if (call := self._call(inner, start + len(tag) + 1, end, tag)) is not None:
                return [call]
            end = start
        return [Call("", problem=f"No tool call can be read. Write {self._example()}.")]

    def _opened(self, text: str, tags: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Places and names of opening tags, in their order."""
        names = "|".join(map(re.escape, tags))
        return ((found.start(), found[1]) for found in re.finditer(rf"<({names})(?=[\s>])", text) if names)

    def _never_closed(self, said: str) -> list[Call]:
        """The call that a turn began and did not end."""
        if next(self._opened(said, self._openings), None) is not None:
            return [Call("", problem=f"The call is not closed. Write {self._example()}.")]
        for word in _near(said, self._openings):
            if (
                f"</{word}>" in said
                if self._legacy
                else re.search(rf"<{re.escape(word)}\s++[\w.:-]{{1,40}}+\s*+=", said)
            ):
                return [Call("", problem=f"<{word}> calls nothing. Write {self._example()}.")]
        return []

    def _call(self, text: str, at: int, end: int, tag: str) -> Call | None:
        attributes: dict[str, str] = {}
        while (found := _ATTRIBUTE.match(text, at, end)) is not None:
            attributes[found[1]] = html.unescape(next(g for g in found.groups()[1:] if g is not None))
            at = found.end()
        if (closed := _CLOSING.match(text, at, end)) is None:
            return None
        name = tag if self._legacy else attributes.pop("name", "")
        if not name:
            return Call("", problem=f"The call names no tool. Write {self._example()}.")
        return Call(name, {**attributes, QUERY: text[closed.end() :].strip()})

    def _example(self) -> str:
        if not self._openings:
            return "an answer: there are no tools"
        name = "" if self._legacy else ' name="TOOL"'
        return f"<{self._openings[0]}{name}>QUERY{self.stop[0]}"

    def observation(self, outputs: Sequence[Output], call_id: str) -> Observation:
        """DR-Tulu's form; its ids count the documents of a call."""
        written = _Writer()
        written.add("\n")
        for output in outputs:
            written.begin()
            written.add("" if self._legacy else "<tool_output>")
            tag = output.tag or ("snippet" if self._legacy else "")
            for index, text in enumerate(output.texts):
                number = "" if self._legacy else f"-{index}"
                written.add("\n" * bool(index) + (f"<{tag} id={call_id}{number}>\n" if tag else ""))
                written.fill(text)
                written.add(f"\n</{tag}>" if tag else "")
            written.add("" if self._legacy else "</tool_output>")
        written.add("\n\n")
        return written.observation()


class Json:
    """Calls as JSON, in a turn that ends by itself: in <tool_call> tags (hermes), or the turn itself (json).

    The chat template tells the model of its tools, and forms the turns of their outputs.
    """

    role = "tool"
    stop: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[str], *, tags: bool) -> None:
        self._tools, self._tags = frozenset(tools), tags
        self.tags = (_OPEN, _CLOSE) if tags else ()

    def calls(self, text: str, stop: str) -> list[Call]:
        """All calls of a turn that the model ended, in time linear in its length; none of one that a limit ended.

        A call that was cut, or that stands in wrong tags, has a `problem`. Calls in a thought are drafts, and none.
        """
        if stop != "eos":
            return []
        said, thought = spoken(text)
        found = self._tagged(said) if self._tags else self._untagged(said)
        if not found and (self._tagged(thought) if self._tags else self._untagged(thought)):
            return [Call("", problem="The call stands in a thought that has no end. Write </think> before the call.")]
        return found

    def _tagged(self, said: str) -> list[Call]:
        _, *pieces = said.split(_OPEN)
        found: list[Call] = []
        for index, piece in enumerate(pieces):
            if not piece.strip() and index + 1 < len(pieces):
                continue  # an opening that is written twice
            if _CLOSE not in piece:
                found.append(Call("", problem=f"The call is not closed: {_CLOSE} is missing."))
                continue
            try:
                found += _json_calls(piece.partition(_CLOSE)[0])
            except ValueError as error:
                try:  # the tag may stand in an argument
                    found += _json_calls(piece.rpartition(_CLOSE)[0])
                except ValueError:
                    found.append(_no_json(error))
        meant = _SOMETHING_CALLED.search(said) and (self._names_a_tool(said) or any(_near(said, ["tool_call"])))
        if not pieces and (meant or _CLOSE in said):
            found.append(Call("", problem=f"No call can be read. Write it between {_OPEN} and {_CLOSE}."))
        return found

    def _untagged(self, said: str) -> list[Call]:
        """Calls of a turn that is JSON, or that ends with the call of a known tool."""
        said = said.strip().removeprefix("<|python_tag|>").strip()
        whole = said.startswith(("{", "[", "```"))
        begin = None if whole else _SOMETHING_CALLED.search(said)
        if not whole and begin is None:
            return []
        body = said if begin is None else said[begin.start() :]
        known = self._names_a_tool(body)
        try:
            made = _json_calls(body)
        except _MoreError as error:  # words behind a call that are not JSON: the call is quoted, unless it comes first
            return [_no_json(error)] if known and whole else []
        except ValueError as error:
            begun = whole and _SOMETHING_CALLED.match(_FENCE.sub("", body, count=1))
            return [_no_json(error)] if known or begun else []
        if not any(call.name for call in made):
            return []  # an answer in JSON
        given = whole and ('"arguments"' in body or '"parameters"' in body)
        return made if given or any(call.name in self._tools for call in made) else []

    def _names_a_tool(self, text: str) -> bool:
        return any(found[1] in self._tools for found in _NAMED.finditer(text))

    def observation(self, outputs: Sequence[Output], call_id: str) -> Observation:
        """The outputs, each a message of the template."""
        del call_id
        written = _Writer()
        for index, output in enumerate(outputs):
            written.begin()
            written.add(SEPARATOR if index else "")
            written.fill("\n\n".join(output.texts).replace(SEPARATOR, ""))
        return written.observation()


class _Writer:
    """An observation while it is written."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._cuts: list[list[tuple[int, int]]] = []

    def begin(self) -> None:
        """The output of another call begins."""
        self._cuts.append([])

    def add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def fill(self, text: str) -> None:
        """Adds what a tool gave."""
        start = self._length
        self.add(escaped(text))
        if text:
            self._cuts[-1].append((start, self._length))

    def observation(self) -> Observation:
        return Observation("".join(self._parts), tuple(tuple(cuts) for cuts in self._cuts))


Format = Tags | Json


def format_of(parser: str, tools: Sequence[str]) -> Format:
    """The format of a parser's name (EnvironmentConfig.parser); `tools` are the names the model may call."""
    match ALIASES.get(parser, parser):
        case "call_tool":
            return Tags(["call_tool"], ["</call_tool>", "</call>"])
        case "tool":
            return Tags(["tool"], ["</tool>"])
        case "legacy":
            return Tags(list(tools), [f"</{tool}>" for tool in tools], legacy=True)
        case "hermes":
            return Json(tools, tags=True)
        case "json":
            return Json(tools, tags=False)
    raise AssertionError(parser)


def in_template(parser: str) -> bool:
    """True where the chat template tells the model of its tools: the parser reads JSON calls of chat models."""
    return isinstance(format_of(parser, []), Json)


def escaped(text: str) -> str:
    """A tool's text without tags that mean something to the model's format, to rewards, or to a chat template."""
    return _STRUCTURE.sub("&lt;", text)


def call_id(key: str, number: int) -> str:
    """Eight hexadecimal digits for call `number` of the sample with this key."""
    return hashlib.blake2b(f"{key}/{number}".encode(), digest_size=4).hexdigest()


def fitted(arguments: Mapping[str, Any], schema: Mapping[str, Any], query: str) -> dict[str, Any]:
    """Arguments with the text between the tags under its name, and words made numbers where the schema has numbers.

    Text that is empty is left out where the tool does not ask for it, or is given it as an attribute.
    """
    properties, required = schema.get("properties", {}), schema.get("required", ())
    named = {name: value for name, value in arguments.items() if name != QUERY}
    between = arguments.get(QUERY)
    if QUERY in arguments and (between or (query in required and query not in named)):
        named[query] = between
    return {name: _as(value, _kinds(properties.get(name))) for name, value in named.items()}


def spoken(text: str) -> tuple[str, str]:
    """A turn's words outside of its thoughts, and those of a thought that has no end.

    Words before a first `</think>` are a thought that the prompt opened.
    """
    parts, thought, at, seen = [], None, 0, False
    for tag in _THOUGHT.finditer(text):
        if not tag[1]:
            if thought is None:
                parts.append(text[at : tag.start()])
                thought = tag.end()
        elif thought is not None or not seen:
            parts = parts if thought is not None else []
            thought, at = None, tag.end()
        seen = True
    return ("".join(parts), text[thought:]) if thought is not None else ("".join([*parts, text[at:]]), "")


def decoded(text: str) -> Any:
    """JSON of a model, a tool or a server.

    Raises:
      ValueError: it is none, holds NaN or an infinity, or nests deeper than 64 arrays and objects.
    """
    (value,) = _values(text, most=1)
    return value


def told(word: str) -> str:
    """A word of the model's as a message or a record repeats it."""
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."


def shortened(
    text: str,
    cuts: Cuts,
    limit: int,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """An observation in which each group of `cuts` has about `limit` tokens at most, by leaving out middles.

    Ranges that are short leave their room to the longer ones of their group.

    Args:
      text, cuts, limit: of a Say.
      encode, decode: the tokenizer's, without tokens of its own at the ends.

    Returns:
      The text; '... [912 tokens left out] ...' stands for what was cut.
    """
    parts, at = [], 0
    for group in cuts:
        ids = [encode(text[start:end]) for start, end in group]
        for (start, end), tokens, most in zip(group, ids, _shares([len(one) for one in ids], limit), strict=True):
            parts.append(text[at:start])
            if len(tokens) <= most:
                parts.append(text[start:end])
            else:
                head, tail = (most + 1) // 2, most // 2
                parts.append(f"{decode(tokens[:head])} ... [{len(tokens) - most} tokens left out] ... ")
                parts.append(decode(tokens[len(tokens) - tail :]))
            at = end
    return "".join([*parts, text[at:]])


def _shares(lengths: Sequence[int], limit: int) -> list[int]:
    """Shares `limit` out: short ones get all they need, the others equal parts of what is left."""
    shares, left = [0] * len(lengths), limit
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for done, i in enumerate(order):
        shares[i] = min(lengths[i], left // (len(order) - done))
        left -= shares[i]
    return shares


class _MoreError(ValueError):
    """What follows a JSON value is none."""


def _json_calls(text: str) -> list[Call]:
    """The calls of a text: an object, a list, or several behind each other, in a fence or not.

    Raises:
      ValueError: the text is no JSON.
    """
    text = text.strip()
    if (fence := _FENCE.match(text)) is not None:
        text = text[fence.end() :]
    values = _values(text.strip().removesuffix("```"))
    listed = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [_json_call(value) for value in listed] or [_json_call(None)]


def _no_json(error: ValueError) -> Call:
    return Call("", problem=f"The call is no JSON: {error}.")


def _json_call(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(inner := value.get("function"), dict | str):
        value = {**value, **(inner if isinstance(inner, dict) else {"name": inner})}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Call("", problem='The call must be an object {"name": ..., "arguments": {...}}.')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write it as text
        try:
            arguments = decoded(arguments)
        except ValueError:
            arguments = {QUERY: arguments}
    if not isinstance(arguments, dict | None):
        return Call(value["name"], problem=f"The arguments must be an object, not {told(json.dumps(arguments))}.")
    return Call(value["name"], arguments or {})


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{told(text)} is no finite number")
    return value


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)


def _values(text: str, most: int | None = None) -> list[Any]:
    """JSON values behind each other, with white space, `,` or `;` between; at most `most`."""
    values, at = [], 0
    text = text.strip()
    while True:
        try:
            value, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise ValueError(f"it nests deeper than {_DEPTH} arrays and objects") from None
        except ValueError as error:
            if values:
                raise _MoreError(f"after its end, {error}") from None
            raise
        _check_depth(value)
        values.append(value)
        while at < len(text) and (text[at].isspace() or (text[at] in ",;" and most is None)):
            at += 1
        if at == len(text):
            return values
        if len(values) == most:
            raise _MoreError(f"more follows its end: char {at}")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEPTH + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"it nests deeper than {_DEPTH} arrays and objects")


def _near(text: str, names: Sequence[str]) -> Iterator[str]:
    """The words of tags in a text that nearly are one of `names`; letter case, `_` and `-` say nothing."""
    for word in list(dict.fromkeys(found[1] for found in _TAG.finditer(text)))[-_LAST_TAGS:]:
        plain = re.sub(r"[_:-]", "", word.lower())
        for name in names:
            if difflib.SequenceMatcher(None, plain, re.sub(r"[_:-]", "", name.lower())).ratio() >= _ALIKE:
                yield word
                break


def _kinds(property_: Any) -> list[Any]:
    """The types that a property of a schema may have."""
    if not isinstance(property_, Mapping):
        return []
    kind = property_.get("type")
    kinds = [kind] if isinstance(kind, str) else list(kind) if isinstance(kind, list) else []
    for name in ("anyOf", "oneOf"):
        for one in property_[name] if isinstance(property_.get(name), list) else ():
            kinds += [one["type"]] if isinstance(one, Mapping) and isinstance(one.get("type"), str) else []
    return kinds


def _as(value: Any, kinds: Sequence[Any]) -> Any:
    """A word of an attribute as the schema's type, where it is one; the tool's own message says so otherwise."""
    if not isinstance(value, str) or "string" in kinds:
        return value
    for kind in kinds:
        try:
            match kind:
                case "integer":
                    return int(value)
                case "number":
                    return _number(value)
                case "boolean" if value.lower() in ("true", "false"):
                    return value.lower() == "true"
                case "array" | "object":
                    return decoded(value)
        except ValueError:
            continue
    return value
