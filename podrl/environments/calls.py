"""Parses the tool calls that a model writes, and formats tool outputs for it: DR-Tulu's tags, and JSON calls."""

import contextlib
import dataclasses
import difflib
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from podrl.mappings import JsonObject

Cuts = tuple[tuple[tuple[int, int], ...], ...]
QUERY = ""  # key of the text between tags in Call.arguments, until `fitted` finds the argument's name in the schema
# Possessive quantifiers (`*+`, `++`) do not backtrack, so matching takes linear time for every text of a model.
_ATTRIBUTE = re.compile(r"""\s++([\w.:-]++)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>]++))""")
_CLOSING = re.compile(r"\s*+>")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EDGE = re.compile(r"<(/?)tool_call>")
_THOUGHT = re.compile(r"<(/?)think>")
_FENCE = re.compile(r"```\w*+\s*+")
_LEAD = re.compile(r"\s*+(?:```\w*+\s*+)?+")
_ARGUMENTS = ("arguments", "parameters")
_CALLED = (*_ARGUMENTS, "tool_calls", "function_call")  # keys that a JSON object has only if it is a call
_SOMETHING_CALLED = re.compile(
    rf"""(?:\[\s*+)?\{{\s*+["']?+(?:name|function|type|tool|tool_name|{"|".join(_CALLED)})["']?+\s*+:"""
)
# A code fence or a tag at the end of the text before a JSON value. It shows that the value is not a quotation in a
# sentence, and so is meant as a call.
_SET_OFF = re.compile(r"(?:```\w*+|(?<!<answer)>)\s*+\Z")
_BEHIND = " \t\r\n,;"  # characters that may separate two calls
_BEGIN = re.compile(r"[\[{]")
_PART = re.compile(
    r"""([\[\]{}])|"[^"\\]*+(?:\\.[^"\\]*+)*+"(?=\s*+[:,\]}])|[\s:,]++|-?\d[\d.eE+-]*+|true|false|null|NaN|-?Infinity""",
    re.DOTALL,
)
_TAG = re.compile(r"<[|/]{0,2}+([A-Za-z_:-]{3,24}+)\|?+>?+")
# Tags that a turn may have without attempting a call, even if they resemble the name of a tool.
_NO_CALLS = frozenset(("answer", "think", "tool_output", "tool_response", "snippet", "webpage"))
_ALIKE = 0.8  # smallest difflib ratio at which a tag counts as a misspelt tag of a call
_LAST_TAGS = 64  # only the last 64 different tags of a turn are compared with the tags of calls
DEPTH = 64  # deepest nesting of arrays and objects in JSON of a model, a tool or a client
_SHOWN = 80  # largest number of characters of the model's text that a message quotes
_STRUCTURE = re.compile(
    r"<(?=\||/?(?:tool_output|snippet|webpage|call_tool|call|tool|tool_call|tool_response|answer)\b)", re.IGNORECASE
)
# Separates outputs that become messages of their own in the chat template. The character is in Unicode's private use
# area, and outputs are stripped of it.
SEPARATOR = "\ue0f2"
# Other names of the parsers: DR-Tulu's names, and chat models whose templates ask for the format.
ALIASES = {"v20250824": "call_tool", "unified": "tool", "qwen3": "hermes", "llama3": "json", "gemma": "json"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it.

    Attributes:
      name: name of the tool; '' if no name can be read.
      arguments: arguments by name; QUERY is the key of the text between tags.
      problem: text for the model about a fault in how the call is written; '' if there is no fault.
    """

    name: str
    arguments: JsonObject = dataclasses.field(default_factory=dict)
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class ToolOutput:
    """A tool's output.

    Attributes:
      texts: documents, or one text if `tag` is ''.
      tag: name of the tag around each document; '' for none.
    """

    texts: Sequence[str]
    tag: str = ""


@dataclasses.dataclass(frozen=True)
class Observation:
    """The text that the model reads after its calls.

    Attributes:
      text: the whole text.
      cuts: character ranges that came from tools, grouped by call; see
        podrl.environments.workers.EpisodeObservation.cuts.
    """

    text: str
    cuts: Cuts


class Tags:
    """Reads calls in tags: `<call_tool name="t" k="v">query</call_tool>`, `<tool name="t">query</tool>`, `<t>q</t>`.

    Attributes:
      role: role of observations; 'raw' appends them to the model's own turn.
      stop: closing tags of calls; generation stops at each.
      tags: all other tags of this format. The learner refuses a tokenizer that has one of these tags as a special
        token: calls are read from the text of a turn, and the text of a turn has no special tokens.
    """

    role = "raw"
    tags: tuple[str, ...] = ("<tool_output>", "</tool_output>", "<snippet", "</snippet>", "<webpage", "</webpage>")

    def __init__(
        self, openings: Sequence[str], closings: Sequence[str], tools: Sequence[str], *, legacy: bool = False
    ) -> None:
        self._openings, self.stop, self._legacy = tuple(openings), tuple(closings), legacy
        self._tools, self._json = tuple(tools), Json(tools, tags=False)
        self.tags = (*(f"<{opening}" for opening in openings), *type(self).tags)

    def calls(self, text: str, stop: str) -> list[Call]:
        """Reads the call at the end of a turn, in time linear in the length of the turn.

        Args:
          text: text of the turn, including the stop string.
          stop: reason why the turn ended, see podrl.environments.protocol.Turn.

        Returns:
          One call or none. The call has a `problem` if it cannot be read, for example because the model ended its turn
          within the call, misspelt a tag, or wrote the call in the format of another parser. A call within a thought is
          a draft and is ignored. If a limit of tokens ended the turn, there is no call.
        """
        visible, thought = self.spoken(text)
        if stop == "eos":
            return self._unread(visible)
        if stop not in self.stop or not visible.endswith(stop) or thought:
            return []
        inner = visible[: -len(stop)]
        end = len(inner)
        for start, tag in reversed(list(self._opened(inner, [stop[2:-1]] if self._legacy else self._openings))):
            # An attribute never contains another opening tag, so each part of the text is read only once.
            if (call := self._call(inner, start + len(tag) + 1, end, tag)) is not None:
                return [call]
            end = start
        return [Call("", problem=f"No tool call can be read. Write {self._example()}.")]

    def spoken(self, text: str) -> tuple[str, str]:
        """Splits a turn into (text outside of thoughts, text of an unfinished thought); see `_spoken`."""
        places: list[tuple[int, int]] = []
        opened: dict[str, int] = {}  # positions of opening tags that are not closed yet
        edges = [rf"<(?:{'|'.join(map(re.escape, self._openings))})(?=[\s>])", *map(re.escape, self.stop)]
        for edge in re.finditer("|".join(edges), text) if self._openings else ():
            closes = edge[0] in self.stop
            pair = edge[0].strip("</>") if self._legacy else ""
            if not closes:
                opened[pair] = edge.start()
            elif pair in opened:
                places.append((opened.pop(pair), edge.end()))
        return _spoken(text, places)

    def _opened(self, text: str, tags: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Finds the positions and names of opening tags, in their order."""
        names = "|".join(map(re.escape, tags))
        return ((found.start(), found[1]) for found in re.finditer(rf"<({names})(?=[\s>])", text) if names)

    def _unread(self, visible: str) -> list[Call]:
        """Returns a call with a problem if a turn without a closing tag seems to attempt a call, else no call."""
        names = "|".join(map(re.escape, self._openings))
        if names and re.search(rf"<(?:{names})(?=[\s>(/=:]|\Z)", visible):
            return [Call("", problem=f"The call is not closed. Write {self._example()}.")]
        for word in _near(visible, self._openings):
            attribute = "" if self._legacy else r"\s++[\w.:-]{1,40}+\s*+=|\(|"
            if re.search(rf"</{word}|<{word}(?:{attribute}\s*+\Z)", visible):
                return [Call("", problem=f"<{word}> calls nothing. Write {self._example()}.")]
        if _in_other_tags(visible, self._tools) or (_names_one(visible, self._tools) and self._json.untagged(visible)):
            return [Call("", problem=f"No call can be read. Write {self._example()}.")]
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

    def before(self, text: str) -> str:
        """Returns the text of a turn before its call."""
        return text[: max((text.rfind(f"<{opening}") for opening in self._openings), default=-1)]

    def written(self, name: str, arguments: JsonObject, query: str) -> str:
        """Writes a call as the model does: argument `query` between the tags, all other arguments as attributes."""
        opening = name if self._legacy else f'{self._openings[0]} name="{html.escape(name)}"'
        others = {key: value for key, value in arguments.items() if key != query}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in others.items()}
        attributes = "".join(f' {key}="{html.escape(text)}"' for key, text in texts.items())
        between = arguments.get(query, "")
        between = between if isinstance(between, str) else json.dumps(between)
        return f"<{opening}{attributes}>{between}{f'</{name}>' if self._legacy else self.stop[0]}"

    def _example(self) -> str:
        if not self._openings:
            return "an answer: there are no tools"
        name = "" if self._legacy else ' name="TOOL"'
        return f"<{self._openings[0]}{name}>QUERY{self.stop[0]}"

    def observation(self, outputs: Sequence[ToolOutput], call_id: str) -> Observation:
        """Formats outputs as DR-Tulu does. The id of a document is `call_id` and the document's number in its call."""
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
    """Reads calls that the model writes as JSON and then ends its turn: in <tool_call> tags (hermes) or bare (json).

    The chat template lists the tools in the prompt, and formats their outputs as turns.
    """

    role = "tool"
    stop: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[str], *, tags: bool) -> None:
        self._tools, self._tags = tuple(tools), tags
        self.tags = (_OPEN, _CLOSE) if tags else ()

    def calls(self, text: str, stop: str) -> list[Call]:
        """Reads all calls of a turn, in time linear in the length of the turn.

        Args:
          text: text of the turn.
          stop: reason why the turn ended, see podrl.environments.protocol.Turn.

        Returns:
          The calls; none unless the model ended the turn itself ('eos'). An incomplete call, or a call in wrong tags,
          has a `problem`. Calls within a thought are drafts and are ignored.
        """
        if stop != "eos":
            return []
        visible, thought = self.spoken(text)
        read = self._tagged if self._tags else self.untagged
        found = read(visible)
        if not found and _in_other_tags(visible, self._tools):
            where = f"between {_OPEN} and {_CLOSE}" if self._tags else "as JSON, without tags around it"
            return [Call("", problem=f"No call can be read. Write it {where}.")]
        if not found and read(thought):
            return [Call("", problem="The call stands in a thought that has no end. Write </think> before the call.")]
        return found

    def spoken(self, text: str) -> tuple[str, str]:
        """Splits a turn into (text outside of thoughts, text of an unfinished thought); see `_spoken`."""
        return _spoken(text, _json_in(text)[0] if _THOUGHT.search(text) else ())

    def before(self, text: str) -> str:
        """Returns the text of a turn before its first call."""
        begin = text.rfind("</think>") + 1
        found = re.compile(re.escape(_OPEN) if self._tags else r"```|[\[{]|<\|python_tag\|>").search(text, begin)
        return text[: found.start()] if found else text

    def _tagged(self, visible: str) -> list[Call]:
        found: list[Call] = []
        ends = dict(_json_in(visible)[0])
        at = visible.find(_OPEN)
        while at >= 0:
            inside = at + len(_OPEN)
            lead = _LEAD.match(visible, inside)
            at = lead.end() if lead is not None else inside
            if visible.startswith(_OPEN, at):
                continue  # the opening tag is written twice
            while at in ends:  # skips whole JSON values, so that a tag inside an argument is not read as a tag
                at = ends[at]
                while visible[at : at + 1] and visible[at] in _BEHIND:
                    at += 1
            edge = _EDGE.search(visible, at)
            if edge is None or not edge[1]:
                found.append(Call("", problem=f"The call is not closed: {_CLOSE} is missing."))
            else:
                try:
                    found += map(_json_call, _listed(visible[inside : edge.start()]))
                except ValueError as error:
                    found.append(_no_json(error))
            at = visible.find(_OPEN, edge.start()) if edge is not None else -1
        if not found:
            begun = _SOMETHING_CALLED.search(visible) or re.search(
                rf"""["'](?:{"|".join(_CALLED)})["']\s*+:""", visible
            )
            if _CLOSE in visible or (
                begun and (_names_one(visible, self._tools) or any(_near(visible, ["tool_call"])))
            ):
                found.append(Call("", problem=f"No call can be read. Write it between {_OPEN} and {_CLOSE}."))
        return found

    def untagged(self, visible: str) -> list[Call]:
        """Reads the calls of a turn that is JSON, or that ends with a call of a known tool."""
        visible = visible.strip().removeprefix("<|python_tag|>").strip()
        places, broken = _json_in(visible)
        wrong: ValueError | None = None
        if visible.startswith(("{", "[", "```")):
            try:
                return self._called(visible, whole=True)
            except ValueError as error:
                wrong = error
        begin = end = len(visible.removesuffix("```").rstrip(_BEHIND))
        for start, stop in reversed(places):
            if visible[stop:end].strip(_BEHIND):
                break
            begin = end = start
        try:
            if begin < len(visible) and (found := self._called(visible[begin:], whole=False)):
                return found
        except ValueError as error:
            wrong = wrong or error
        if wrong is not None:
            begun = not isinstance(wrong, _MoreError) and _SOMETHING_CALLED.match(_FENCE.sub("", visible, count=1))
            return [_no_json(wrong)] if begun or _names_one(visible, self._tools) else []
        if broken and _names_one(visible[broken[0] :], self._tools):
            try:
                _listed(visible[broken[0] :])
            except ValueError as error:
                return [_no_json(error)]
        if places and _SET_OFF.search(visible[: places[-1][0]]):
            last = visible[slice(*places[-1])]
            if any(f'"{key}"' in last for key in _CALLED) and _names_one(last, self._tools):
                return [Call("", problem="The call must end the turn: nothing may follow its JSON.")]
        return []

    def _called(self, body: str, *, whole: bool) -> list[Call]:
        """Reads the calls in a JSON text; returns none if the JSON is an answer and not a call.

        Args:
          body: the JSON text.
          whole: True if `body` is the whole turn. If so, an object with a name and arguments counts as a call even if
            no tool has this name.

        Raises:
          ValueError: the text is not JSON.
        """
        values = _listed(body)
        parsed = [_json_call(value) for value in values]
        if any(call.name in self._tools for call in parsed) or any(map(self._is_meant, values)):
            return parsed
        if whole and any(call.name for call in parsed) and any(f'"{key}"' in body for key in _ARGUMENTS):
            return parsed
        return parsed if any(call.arguments and _alike(call.name, self._tools) for call in parsed[-_LAST_TAGS:]) else []

    def _is_meant(self, value: object) -> bool:
        """Returns True for an object with a key of a call (`_CALLED`), and a known tool's name as a key or value."""
        words = (*value, *value.values()) if isinstance(value, dict) and any(key in value for key in _CALLED) else ()
        return any(isinstance(word, str) and word in self._tools for word in words)

    def observation(self, outputs: Sequence[ToolOutput], call_id: str) -> Observation:
        """Formats outputs so that each becomes a message of the chat template."""
        del call_id
        written = _Writer()
        for index, output in enumerate(outputs):
            written.begin()
            written.add(SEPARATOR if index else "")
            written.fill("\n\n".join(output.texts).replace(SEPARATOR, ""))
        return written.observation()


class _Writer:
    """Writes an observation, and notes which character ranges came from tools."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._cuts: list[list[tuple[int, int]]] = []

    def begin(self) -> None:
        """Begins the output of the next call."""
        self._cuts.append([])

    def add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def fill(self, text: str) -> None:
        """Adds text that a tool returned."""
        start = self._length
        self.add(escaped(text))
        if text:
            self._cuts[-1].append((start, self._length))

    def observation(self) -> Observation:
        return Observation("".join(self._parts), tuple(tuple(cuts) for cuts in self._cuts))


Format = Tags | Json


def format_of(parser: str, tools: Sequence[str]) -> Format:
    """Returns the format that a parser reads.

    Args:
      parser: name of the parser, or an alias of it (EnvironmentConfig.parser).
      tools: names of the tools that the model may call.
    """
    match ALIASES.get(parser, parser):
        case "call_tool":
            return Tags(["call_tool"], ["</call_tool>", "</call>"], tools)
        case "tool":
            return Tags(["tool"], ["</tool>"], tools)
        case "legacy":
            return Tags(tools, [f"</{tool}>" for tool in tools], tools, legacy=True)
        case "hermes":
            return Json(tools, tags=True)
        case "json":
            return Json(tools, tags=False)
    raise AssertionError(parser)


def in_template(parser: str) -> bool:
    """Returns True if the chat template lists the tools in the prompt, as it does for parsers of JSON calls."""
    return isinstance(format_of(parser, []), Json)


def escaped(text: str) -> str:
    """Escapes tags in a tool's text that mean something to the model's format, to rewards, or to a chat template."""
    return _STRUCTURE.sub("&lt;", text)


def call_id(key: str, number: int) -> str:
    """Makes the id of a sample's call, eight hexadecimal digits, from the sample's key and the call's number."""
    return hashlib.blake2b(f"{key}/{number}".encode(), digest_size=4).hexdigest()


def fitted(arguments: JsonObject, schema: JsonObject, query: str) -> JsonObject:
    """Fits a call's arguments to the tool's schema.

    The text between the tags moves from QUERY to `query`. An empty text is left out unless `query` is a required
    argument that no attribute sets. Texts become numbers, booleans, arrays or objects where the schema has these types.

    Args:
      arguments: arguments of a Call.
      schema: JSON schema of the tool's arguments.
      query: name of the argument that holds the text between the tags.

    Returns:
      The arguments by the names of the schema.
    """
    properties, required = schema.get("properties", {}), schema.get("required", ())
    named = {name: value for name, value in arguments.items() if name != QUERY}
    between = arguments.get(QUERY)
    if QUERY in arguments and (between or (query in required and query not in named)):
        named[query] = between
    return {name: _as(value, properties.get(name)) for name, value in named.items()}


def decoded(text: str) -> Any:
    """Decodes JSON that came from a model, a tool or a server.

    Raises:
      ValueError: the text is not JSON, contains NaN or an infinity, or nests arrays and objects more than 64 deep.
    """
    (value,) = _values(text, most=1)
    return value


def abbreviated(word: str) -> str:
    """Cuts a text of the model after 80 characters and adds '...', for a message or a record."""
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."


def shortened(
    text: str,
    cuts: Cuts,
    limit: int,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Shortens an observation so that each group of `cuts` has about `limit` tokens at most.

    The middle of a long range is left out. Tokens that a short range does not use are granted to the longer ranges of
    its group.

    Args:
      text: observation to shorten.
      cuts: character ranges that may be shortened, see podrl.environments.workers.EpisodeObservation.cuts.
      limit: largest number of tokens in the ranges of one group.
      encode: function from text to token ids, without tokens such as BOS at the ends.
      decode: function from token ids to text.

    Returns:
      The text, in which '... [912 tokens left out] ...' replaces each middle that was left out.
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
    """Divides `limit` among ranges: short ranges get all they need, long ranges get equal shares of the rest."""
    shares, left = [0] * len(lengths), limit
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for done, i in enumerate(order):
        shares[i] = min(lengths[i], left // (len(order) - done))
        left -= shares[i]
    return shares


class _MoreError(ValueError):
    """A JSON value is followed by text that may not follow it."""


def _spoken(text: str, calls: Iterable[tuple[int, int]]) -> tuple[str, str]:
    """Splits a turn into (text outside of thoughts, text of an unfinished thought).

    Text before a first `</think>` without an opening tag is a thought that the prompt opened. A think tag inside an
    argument of a call is part of the argument, unless the call itself is drafted in a thought.

    Args:
      text: text of the turn.
      calls: (start, end) of each call in the turn, ascending.
    """
    parts, thought, at, seen = [], None, 0, False
    places = iter(calls)
    begin = end = 0
    for tag in _THOUGHT.finditer(text):
        while end <= tag.start():
            begin, end = next(places, (len(text), len(text) + 1))
        if begin < tag.start() and thought is None:
            continue
        if not tag[1]:
            if thought is None:
                parts.append(text[at : tag.start()])
                thought = tag.end()
        elif thought is not None or not seen:
            parts = parts if thought is not None else []
            thought, at = None, tag.end()
        seen = True
    return ("".join(parts), text[thought:]) if thought is not None else ("".join([*parts, text[at:]]), "")


def _json_in(text: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Finds the JSON in a text in one pass. A JSON decoder would start again at each bracket, in quadratic time.

    Returns:
      (start and end of each outermost object or array, start of each call whose JSON is incomplete or malformed).
    """
    whole: list[tuple[int, int]] = []
    broken: list[int] = []
    opened: list[int] = []
    at = 0
    while True:
        if not opened:
            if (begin := _BEGIN.search(text, at)) is None:
                return whole, broken
            opened, at = [begin.start()], begin.end()
        part = _PART.match(text, at)
        bracket = part[1] if part is not None else None
        if part is None or (bracket in ("]", "}") and bracket != {"[": "]", "{": "}"}[text[opened[-1]]]):
            if (start := next((one for one in opened if _SOMETHING_CALLED.match(text, one)), None)) is not None:
                broken.append(start)
                while whole and whole[-1][0] > start:
                    whole.pop()
            opened, at = [], at + 1
        elif bracket in ("[", "{"):
            opened.append(at)
            at += 1
        else:
            at = part.end()
            if bracket is not None:
                start = opened.pop()
                while whole and whole[-1][0] > start:
                    whole.pop()
                whole.append((start, at))


def _listed(text: str) -> list[object]:
    """Decodes the JSON of calls: an object, a list, or several of them in a row, with or without a code fence.

    Raises:
      ValueError: the text is not JSON.
    """
    text = text.strip()
    if (fence := _FENCE.match(text)) is not None:
        text = text[fence.end() :]
    listed: list[object] = []
    for value in _values(text.strip().removesuffix("```")):
        inner = value.get("tool_calls", value) if isinstance(value, dict) else value
        listed += inner if isinstance(inner, list) else [inner]
    return listed or [None]


def _no_json(error: ValueError) -> Call:
    return Call("", problem=f"The call is no JSON: {error}.")


def _json_call(value: Any) -> Call:
    for key in ("tool_call", "function_call", "function") if isinstance(value, dict) else ():
        inner = {"name": value[key]} if isinstance(value.get(key), str) else value.get(key)
        value = {**value, **inner} if isinstance(inner, dict) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Call("", problem='The call must be an object {"name": ..., "arguments": {...}}.')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(text := arguments, str):  # some models write the object as a JSON string, or only the query
        with contextlib.suppress(ValueError):
            arguments = decoded(text)
        arguments = arguments if isinstance(arguments, dict | None) else {QUERY: text}
    if not isinstance(arguments, dict | None):
        return Call(
            value["name"], problem=f"The arguments must be an object, not {abbreviated(json.dumps(arguments))}."
        )
    return Call(value["name"], arguments or {})


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{abbreviated(text)} is no finite number")
    return value


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)


def _values(text: str, most: int | None = None) -> list[object]:
    """Decodes consecutive JSON values, separated by white space, `,` or `;`.

    Args:
      text: the JSON text.
      most: largest number of values; None for no limit. With a limit, only white space may separate values.

    Raises:
      ValueError: the text is not JSON, or nests too deep; `_MoreError` if a value was read and something else follows.
    """
    values, at = [], 0
    text = text.strip()
    while True:
        try:
            value, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise ValueError(f"it nests deeper than {DEPTH} arrays and objects") from None
        except ValueError as error:
            if values:
                raise _MoreError(f"after its end, {error}") from None
            raise
        check_depth(value)
        values.append(value)
        while at < len(text) and (text[at].isspace() or (text[at] in ",;" and most is None)):
            at += 1
        if at == len(text):
            return values
        if len(values) == most:
            raise _MoreError(f"more follows its end: char {at}")


def check_depth(value: object) -> None:
    """Raises ValueError if arrays and objects nest deeper than `DEPTH`, because recursive code could fail on them."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it nests deeper than {DEPTH} arrays and objects")


def _near(text: str, names: Sequence[str]) -> Iterator[str]:
    """Yields the names of tags in a text that equal or resemble one of `names`."""
    for word in list(dict.fromkeys(found[1] for found in _TAG.finditer(text)))[-_LAST_TAGS:]:
        if (word in names or word.lower() not in _NO_CALLS) and _alike(word, names):
            yield word


def _alike(word: str, names: Iterable[str]) -> bool:
    """Returns True for a word that equals or resembles one of `names`; letter case, `_`, `:` and `-` are ignored."""
    plain = re.sub(r"[_:-]", "", word[:_SHOWN].lower())
    ratios = (difflib.SequenceMatcher(None, plain, re.sub(r"[_:-]", "", name.lower())).ratio() for name in names)
    return word in names or any(ratio >= _ALIKE for ratio in ratios)


def _names_one(text: str, tools: Sequence[str]) -> bool:
    """Returns True if a text contains the name of a tool in quotation marks."""
    return bool(tools and re.search(rf"""["'](?:{"|".join(map(re.escape, tools))})["']""", text))


def _in_other_tags(visible: str, tools: Sequence[str]) -> bool:
    """Returns True if a turn calls a known tool by tags: `<... name="search">` anywhere, or `<search>...</search>` at
    its end."""
    names = "|".join(map(re.escape, tools))
    if names and re.search(rf"""<\w[\w:-]*+\s++name\s*+=\s*+["']?+(?:{names})(?![\w.-])""", visible):
        return True
    last = re.search(rf"</({names})\s*+>\s*+\Z", visible) if names else None
    return last is not None and last[1] not in _NO_CALLS and bool(re.search(rf"<{re.escape(last[1])}[\s>]", visible))


def _kinds(property_: object) -> list[object]:
    """Lists the types that a property of a schema allows; empty if the property enumerates its values."""
    if not isinstance(property_, Mapping) or "enum" in property_:
        return []
    kind = property_.get("type")
    kinds = [kind] if isinstance(kind, str) else list(kind) if isinstance(kind, list) else []
    return [*kinds, *(kind for one in _alternatives(property_) for kind in _kinds(one))]


def _alternatives(property_: JsonObject) -> list[object]:
    """Lists the alternative schemas of a property (anyOf, oneOf)."""
    return [one for key in ("anyOf", "oneOf") if isinstance(property_.get(key), list) for one in property_[key]]


def _choices(property_: object) -> list[object]:
    """Lists the values that a property of a schema enumerates."""
    if not isinstance(property_, Mapping):
        return []
    own = property_["enum"] if isinstance(property_.get("enum"), list) else []
    return [*own, *(choice for one in _alternatives(property_) for choice in _choices(one))]


def _as(value: object, property_: object) -> object:
    """Converts an argument that is a text to an enumerated value or a type of the schema.

    Text that fits no value and no type is returned unchanged: the tool then reports what is wrong.
    """
    kinds, choices = _kinds(property_), _choices(property_)
    if not isinstance(value, str) or value in choices:
        return value
    with contextlib.suppress(ValueError):
        meant = decoded(value.lower()) if choices else value
        for choice in choices:
            if choice == meant and type(choice) in (type(meant), float):
                return choice
    for kind in kinds if "string" not in kinds else ():
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
