"""Tool calls as models write them and outputs as models read them: DR-Tulu's tags, and JSON calls of chat models."""

import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cuts = tuple[tuple[tuple[int, int], ...], ...]
QUERY = ""  # the argument that the text between tags is, before the tool's own name for it is known
_ATTRIBUTE = re.compile(r"""\s+([\w.:-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_CLOSING = re.compile(r"\s*>")
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
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
      name: of the tool; '' where none can be read.
      arguments: by name; the text between tags is under QUERY.
      problem: why it cannot be run; '' where it can.
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
        """The call that a turn ends with; none where no tag ended it."""
        if stop not in self.stop or not text.endswith(stop):
            return []
        inner = text[: -len(stop)]
        starts = sorted(
            ((m.start(), tag) for tag in self._openings for m in re.finditer(re.escape(f"<{tag}"), inner)), reverse=True
        )
        for start, tag in starts:
            if (call := self._call(inner, start + len(tag) + 1, tag)) is not None:
                return [call]
        return [Call("", problem=f"No tool call can be read. Write {self._example()}.")]

    def _call(self, text: str, at: int, tag: str) -> Call | None:
        attributes: dict[str, str] = {}
        while (found := _ATTRIBUTE.match(text, at)) is not None:
            attributes[found[1]] = html.unescape(next(g for g in found.groups()[1:] if g is not None))
            at = found.end()
        if (end := _CLOSING.match(text, at)) is None:
            return None
        name = tag if self._legacy else attributes.pop("name", "")
        if not name:
            return Call("", problem=f"The call names no tool. Write {self._example()}.")
        return Call(name, {**attributes, QUERY: text[end.end() :].strip()})

    def _example(self) -> str:
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
    """Calls as JSON, in a turn that ends by itself: in <tool_call> tags (hermes), or the whole turn (json).

    The chat template tells the model of its tools, and forms the turns of their outputs.
    """

    role = "tool"
    stop: tuple[str, ...] = ()

    def __init__(self, *, tags: bool) -> None:
        self._tags = tags
        self.tags = ("<tool_call>", "</tool_call>") if tags else ()

    def calls(self, text: str, stop: str) -> list[Call]:
        """All calls of a turn that the model ended; none of one that a limit ended."""
        if stop != "eos":
            return []
        if self._tags:
            return [_json_call(found) for found in _HERMES.findall(text)]
        text = text.strip().removeprefix("<|python_tag|>").strip()
        if not text.startswith("{"):
            return []
        call = _json_call(text)
        return [] if call.problem else [call]

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
            return Json(tags=True)
        case "json":
            return Json(tags=False)
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
    """Arguments with the text between the tags under its name, and words made numbers where the schema has numbers."""
    properties = schema.get("properties", {})
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        name = name if name != QUERY else query
        kind = properties.get(name, {}).get("type")
        result[name] = _as(value, kind) if isinstance(value, str) else value
    return result


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


def _json_call(text: str) -> Call:
    try:
        value = json.loads(text)
    except ValueError as error:
        return Call("", problem=f"The call is no JSON: {error}.")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", problem='The call must be an object {"name": ..., "arguments": {...}}.')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write it as text
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {QUERY: arguments}
    if not isinstance(arguments, dict):
        return Call(value["name"], problem=f"The arguments must be an object, not {json.dumps(arguments)[:80]}.")
    return Call(value["name"], arguments)


def _as(text: str, kind: Any) -> Any:
    """A word of an attribute as the schema's type, where it is one; the tool's own message says so otherwise."""
    try:
        match kind:
            case "integer":
                return int(text)
            case "number":
                return float(text)
            case "boolean" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "array" | "object":
                return json.loads(text)
    except ValueError:
        pass
    return text
