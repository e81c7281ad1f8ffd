"""Renders a conversation by its chat template, and finds the parts of the text that a model is to learn.

The text is the template's rendering of the whole conversation. If the template marks the model's words by
{% generation %}, these marks decide which parts are learned. Otherwise the parts are found by comparing renderings: a
turn of the assistant begins where the prompt for that turn ends, and ends with the end mark that the template writes
after the turn. A template may write a turn differently once other turns follow; for example, some templates drop the
thoughts of earlier turns. The model then learns the turn as the rendering of the whole conversation shows it.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podrl.config import require
from podrl.data import shape, template
from podrl.data.template import TextPart
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.mappings import ChatMessage, JsonObject, Record, ToolSchema
from podrl.runtime import plain
from podrl.types import Prompts

_log = logging.getLogger(__name__)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the fields from which templates read thoughts
# Largest number of characters of a turn's header, of the text between the header and the turn's words, and of its end
# mark.
_MOST = 256
_QUESTION = {"role": "user", "content": "ask"}  # question that is put before a turn if the template demands one


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[ToolSchema] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Renders a conversation as text, and makes sure that the text holds every message.

    Args:
      tokenizer: tokenizer whose chat template writes the text.
      messages: the conversation, in a form that podrl.data.shape.turns_fault has accepted.
      tools: schemas of the functions that the model may call; None takes the tokenizer's own schemas.
      add_generation_prompt: True to end with the opening of the model's turn.

    Raises:
      ValueError: the template refuses the messages, or leaves one out; the error names that message.
    """
    writing = _Writing(tokenizer, messages, tools)
    return writing.write(writing.messages, add_generation_prompt=True) if add_generation_prompt else writing.whole


def parts(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, tools: Sequence[ToolSchema] | None = None, first: int = 0
) -> list[TextPart]:
    """Renders a conversation as parts whose texts join to the template's text; the assistant's turns are learned.

    A turn whose 'weight' is 0 is not learned. The last part has `ends` set if it is a turn of the assistant after which
    the template writes no end mark.

    Args:
      tokenizer: tokenizer whose chat template writes the text.
      messages: the conversation, in a form that podrl.data.shape.turns_fault has accepted.
      tools: schemas of the functions that the model may call; None takes the tokenizer's own schemas.
      first: index of the first message that may be learned; the assistant's turns before it are not learned.

    Raises:
      ValueError: the template refuses the messages, leaves one out, or writes a turn so that it cannot be found in the
        text; the error names that message.
    """
    writing = _Writing(tokenizer, messages, tools)
    turns = [i for i, message in enumerate(messages) if i >= first and shape.is_learned(message)]
    assert turns, "no turn of the assistant to learn"
    if spans := writing.marked():
        begin = writing.turn(turns[0]).start if first else 0
        texts = [
            writing.turn(i)
            for i, message in enumerate(messages)
            if i >= first and message["role"] == "assistant" and i not in turns
        ]
        spans = [
            span
            for span in spans
            if span.start >= begin and not any(turn.start <= span.start < turn.end for turn in texts)
        ]
        if not any(span.end > span.start for span in spans):
            raise writing.fault(turns[-1], "marks nothing of the turns that are to be learned as the model's words")
    else:
        spans = [writing.turn(i) for i in turns]
        for i, before, span in zip(turns[1:], spans, spans[1:], strict=False):
            if span.start < before.end:
                raise writing.fault(i, "writes this turn so that it overlaps the turn before it")
    text_parts, end, whole = [], 0, writing.whole
    for span in spans:
        text_parts.append(TextPart(whole[end : span.start]))
        text_parts.append(TextPart(whole[span.start : span.end], learned=True))
        end = span.end
    if spans and spans[-1].open and end == len(whole) and turns[-1] == len(messages) - 1:
        text_parts[-1] = text_parts[-1]._replace(ends=True)
    text_parts.append(TextPart(whole[end:]))
    learned = "".join(part.text for part in text_parts if part.learned)
    if any(_thoughts(messages[i]) not in learned for i in turns):
        _warn_dropped(str(tokenizer.directory))
    return [part for part in text_parts if part.text or part.ends]


def _thoughts(message: ChatMessage) -> str:
    """Returns the thoughts of an assistant's turn, from a field of their own or from its content; '' for none."""
    within = str(message.get("content")).partition("</think>")
    thoughts = next((message[name] for name in _REASONING if message.get(name)), within[0] if within[1] else "")
    return thoughts.rpartition("<think>")[2].strip()


@functools.cache
def _warn_dropped(directory: str) -> None:
    """Warns, once per model directory, that thoughts in the data are not learned."""
    _log.warning(
        "The chat template of %s leaves thoughts of the data out of its text, so they are not learned: see "
        "docs/data.md, Conversations.",
        directory,
    )


class _Span(NamedTuple):
    """Characters of the whole text that are learned, from `start` to `end`; `open` is True if they have no end mark."""

    start: int
    end: int
    open: bool = False


class _Writing:
    """The renderings of one conversation, and the places of its turns in the rendering of the whole.

    Attributes:
      messages: the conversation, in a form that the template writes in full.
      whole: text of all messages, as the template renders them.
    """

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None
    ) -> None:
        """Finds a form of the messages that the template writes in full.

        Raises:
          ValueError: the template writes no form in full; the error is about the messages as they were passed.
        """
        self._tokenizer = tokenizer
        self.write = functools.partial(tokenizer.apply_chat_template, tools=tools)
        key = _json((messages, tools or tokenizer.tools))
        # A word that does not occur in any message. If it is put into a field of a message, it stands in the rendering
        # only where the template wrote this field.
        self._word = next(word for n in range(len(key)) if (word := f"zq{n}x") not in key)
        fault: ValueError | None = None
        for self.messages in _forms([_normalized(message) for message in messages]):
            try:
                self.whole = self.write(self.messages, add_generation_prompt=False)
                self._check_written()
                break
            except ValueError as error:
                fault = fault or error
        else:
            assert fault is not None
            raise fault
        if tools and self.whole == tokenizer.apply_chat_template(self.messages, add_generation_prompt=False, tools=()):
            others = _json([message.get("content") for message in messages if message["role"] != "assistant"])
            names = [str(_function(tool).get("name", "")) for tool in tools]
            if missing := [name for name in names if name not in others]:
                raise ValueError(
                    f"The chat template of {tokenizer.directory} ignores 'tools', and no message names "
                    f"{', '.join(missing)}: describe them in a system message, or leave 'tools' out."
                )

    def fault(self, i: int, why: str) -> ValueError:
        """Makes the error about message `i`; `why` says what the template does wrong with it."""
        return ValueError(
            f"messages[{i}] ({self.messages[i]['role']}): the chat template of {self._tokenizer.directory} {why}. The "
            f"message is {_json(self.messages[i])[:200]}. Change the message, or give the model a chat_template.jinja "
            "that writes it."
        )

    def marked(self) -> list[_Span]:
        """Returns the parts that the template itself marks as the model's words; empty if it has no usable marks."""
        opens, closes = f"{self._word}o", f"{self._word}c"
        text = self.write(self.messages, add_generation_prompt=False, marks=(opens, closes))
        pieces = re.split(f"({opens}|{closes})", text)
        if "".join(piece for piece in pieces if piece not in (opens, closes)) != self.whole:
            return []  # the template changes the text inside the marks, as its filter `trim` does
        spans, at, start = [], 0, 0
        for piece in pieces:
            if piece == opens:
                start = at
            elif piece == closes:
                spans.append(_Span(start, at))
            else:
                at += len(piece)
        return spans

    def turn(self, i: int) -> _Span:
        """Finds the assistant's turn at index i in the whole text, its end mark included.

        Raises:
          ValueError: the turn cannot be found.
        """
        before = self._before(i)
        prompt = self.write(before, add_generation_prompt=True)
        alone = self.write([*before, self.messages[i]], add_generation_prompt=False)
        as_asked = alone.startswith(prompt) and self.whole.startswith(prompt)
        if as_asked:
            opened = start = len(prompt)
        else:
            headers = self._headers(before, prompt)
            opened = self._start(i, prompt, headers, alone, before, [])
            start = self._start(i, prompt, headers, self.whole, self.messages[:i], self.messages[i + 1 :])
        # After the output of a tool, Gemma 4's prompt opens no turn, although the whole text has a header there.
        # Falcon's header begins with a line feed, unless it is the first header of the text.
        if not prompt.endswith(self._header):
            opened, start = (
                at + max(len(header) * text.startswith(header, at) for header in (self._header, self._header.lstrip()))
                for text, at in ((alone, opened), (self.whole, start))
            )
        span = self._end(i, alone[opened:], start)
        if not as_asked:
            self._check_alone(i, span)
        return span

    def _check_alone(self, i: int, span: "_Span") -> None:
        """Raises ValueError if the span of the turn at index i reaches into the words of a message beside it.

        To find where the words of a neighbouring message begin or end in the text, their first or last character is
        changed and the conversation is rendered again.
        """
        for k in (i - 1, i + 1):
            words = self.messages[k].get("content") if 0 <= k < len(self.messages) else None
            if not words or self.messages[k]["role"] == "assistant":
                continue
            other = "x" if words[-1 if k < i else 0] != "x" else "y"
            changed = {**self.messages[k], "content": words[:-1] + other if k < i else other + words[1:]}
            text = self.write([*self.messages[:k], changed, *self.messages[k + 1 :]], add_generation_prompt=False)
            place = _shared(text, self.whole)
            if span.start < place if k < i else place < span.end:
                raise self.fault(i, f"writes this turn so that it cannot be told from messages[{k}]")

    @functools.cached_property
    def _header(self) -> str:
        """The text that a generation prompt adds after a question: the opening of the assistant's turn."""
        try:
            question, prompt = (self.write([_QUESTION], add_generation_prompt=opens) for opens in (False, True))
        except ValueError:
            return ""
        return prompt[_shared(question, prompt) :]

    def _before(self, i: int) -> Sequence[ChatMessage]:
        """Returns the messages before index i, and a question if the template demands one before the model's turn."""
        try:
            self.write(self.messages[:i], add_generation_prompt=True)
        except ValueError:
            return [*self.messages[:i], _QUESTION]
        return self.messages[:i]

    def _headers(self, before: Sequence[ChatMessage], prompt: str) -> Mapping[int, str]:
        """Finds the places in a prompt where the turn's header may end, and a text by which to find each place again.

        A prompt may have white space, tags or special tokens after the header, and may open a thought with them.

        Returns:
          {end of a header: the header's text from its last special token or its last line that is not empty, whichever
          text is shorter}.
        """
        base = _shared(prompt, self.write(before, add_generation_prompt=False))
        starts = [start for start, _ in self._tokenizer.special_spans(prompt)]
        tags = (base + tag.start() for tag in re.finditer("<", prompt[base:]))
        headers = {}
        for end in {*range(len(prompt.rstrip()), len(prompt) + 1), *starts, *tags}:
            if end == len(prompt) or prompt[base:end].strip():
                line = prompt.rfind("\n", 0, len(prompt[:end].rstrip())) + 1
                headers[end] = prompt[max([line, *(start for start in starts if start < end)]) : end]
        return headers

    def _start(
        self,
        i: int,
        prompt: str,
        headers: Mapping[int, str],
        text: str,
        before: Sequence[ChatMessage],
        behind: Sequence[ChatMessage],
    ) -> int:
        """Finds where the words of the turn at index i begin in a rendering that does not begin with the turn's prompt.

        The messages are rendered again with a made-up word in place of the turn's words: the header is in the text
        before this word. Between the header and the words the template may write more, such as Mistral's space.

        Args:
          i: index of the turn.
          prompt: rendering of the messages before the turn, with the opening of the model's turn.
          headers: result of `_headers` for this prompt.
          text: rendering of `before`, the turn, and `behind`.
          before: messages before the turn.
          behind: messages after the turn.
        """
        turn = self.messages[i]
        message = {key: value for key, value in turn.items() if key not in _REASONING} | {"content": self._word}
        if calls := turn.get("tool_calls"):
            message["tool_calls"] = [_called(call, self._word) for call in calls]
        spoken, word, _ = self.write([*before, message, *behind], add_generation_prompt=False).partition(self._word)
        if not word:
            raise self.fault(i, "does not write the turn")
        shared = text[: _shared(text, spoken)]
        near = max(len(spoken) - _MOST, 0)
        found = [
            (shared.rfind(header, near) + len(header), end)
            for end, header in headers.items()
            if header in shared[near:]
        ]
        if not found:
            raise self.fault(i, f"begins the turn with {spoken[-80:]!r}, but its prompt ends with {prompt[-80:]!r}")
        place, end = max(found)
        return place + (len(prompt) - end if text.startswith(prompt[end:], place) else 0)

    def _end(self, i: int, alone: str, start: int) -> _Span:
        """Finds where the turn at index i ends.

        Args:
          i: index of the turn.
          alone: the conversation rendered with this turn as its last message, from the turn's first word to the end.
          start: index in the whole text at which the turn's words begin.
        """
        if not alone:
            raise self.fault(i, "writes nothing of the turn")
        mark, closing = self._ending
        text = alone.removesuffix(closing)
        if mark is None or self.messages[i].get("tool_calls"):  # a turn with calls may have another end mark
            mark = next((text[a:b] for a, b in self._tokenizer.special_spans(text) if b == len(text)), "")
        text = text.removesuffix(mark)
        whole = self.whole[start:]
        stop = len(text)
        if not whole.startswith(text):
            stop = self._stop(i, text, start)
        behind = [(a, b) for a, b in self._tokenizer.special_spans(whole[stop : stop + _MOST])]
        if behind and behind[0][0] == 0:
            end = stop + behind[0][1]
            found, rest = whole[stop:end], whole[end : end + _MOST].lstrip()
            # A special token after a turn without a mark opens the next header. It is an end mark only if it is one of
            # the model's end tokens.
            other = bool(mark) and any(a == 0 for a, _ in self._tokenizer.special_spans(rest))
            if found == mark or other or self._tokenizer.token_id(found) in self._tokenizer.eos_ids:
                return _Span(start, start + end)
        return _Span(start, start + stop, open=not mark)

    def _stop(self, i: int, turn_text: str, start: int) -> int:
        """Counts the characters of the turn at index i in the whole text, if the text has only a part of the turn.

        Args:
          i: index of the turn.
          turn_text: the turn's words, as the template writes them where the turn is the last one.
          start: index in the whole text at which the turn's words begin.
        """
        message, whole = self.messages[i], self.whole[start:]
        content = message.get("content", "")
        for words in (content, content.rstrip()) if content is not None and not message.get("tool_calls") else ():
            extended = {**message, "content": words + self._word}
            text = self.write([*self.messages[:i], extended, *self.messages[i + 1 :]], add_generation_prompt=False)
            head, _, tail = text.partition(self._word)
            if head + tail == self.whole and len(head) >= start:
                return len(head) - start
        # A turn with calls ends at a special token. A special token is a candidate if the text before it is the turn
        # with one stretch left out. Of the candidates, the one that keeps most of the turn's end is taken. If there is
        # no candidate, the turn ends at the first special token after the last call.
        called = [str(_function(call).get("name")) for call in message.get("tool_calls", ())]
        last = turn_text[max(0, *(turn_text.rfind(name) for name in called[-1:])) :] if called else turn_text
        places = [place for place, _ in self._tokenizer.special_spans(whole[: len(turn_text) + _MOST])]
        if cuts := [place for place in places if _is_cut(whole[:place], turn_text)]:
            return max(cuts, key=lambda place: _shared_end(whole[:place], turn_text))
        if ends := [place for place in places if whole[:place].endswith(last)]:
            return ends[0]
        raise self.fault(
            i,
            f"writes the turn as {turn_text!r} when it is last, but as {whole[: len(turn_text)]!r} when other "
            "turns follow",
        )

    @functools.cached_property
    def _ending(self) -> tuple[str | None, str]:
        """The text that the template writes after the words of a last turn: (end mark, text after the mark).

        The end mark is the special token that ends the turn; of adjacent special tokens, it is the last. It is '' if
        the template writes no mark, and None if the template refuses a conversation of a question and an answer.
        """
        messages = [_QUESTION, {"role": "assistant", "content": self._word}]
        try:
            last, earlier = (
                self.write(turns, add_generation_prompt=False) for turns in (messages, [*messages, _QUESTION])
            )
        except ValueError:
            return None, ""
        last, earlier = (text.partition(self._word)[2] for text in (last, earlier))
        shared, mark, ends, closing = _shared(last, earlier), "", 0, ""
        for start, end in self._tokenizer.special_spans(last):
            # A special token after other text is not a mark, because some templates always write the next prompt. A
            # token that the template writes only after a last turn is not a mark either.
            if mark and (start > ends or ends <= shared < end):
                break
            mark, ends = last[start:end], end
            closing = last[end:] if end <= shared else closing
        return mark, closing

    def _check_written(self) -> None:
        """Raises ValueError if the template leaves out a message or a call, or quotes a call's arguments as a text.

        Made-up words are put into every message and call, and are looked for in the rendering.
        """
        probe: list[ChatMessage] = []
        words: list[tuple[int, str, Sequence[str]]] = []
        for i, message in enumerate(self.messages):
            if calls := message.get("tool_calls"):
                names = [f"{self._word}{i}c{k}" for k in range(len(calls))]
                probe.append({**message, "tool_calls": list(map(_called, calls, names))})
                for call, name in zip(calls, names, strict=True):
                    function = _function(call)
                    own = [f"{name}n", *([f"{name}k", f"{name}v"] if "arguments" in function else [])]
                    words.append((i, f"does not write its call of {function.get('name')!r}", own))
            else:
                probe.append({**message, "content": f"{message.get('content', '')}{self._word}{i}m"})
                words.append((i, "leaves it out", [f"{self._word}{i}m"]))
        text = self.write(probe, add_generation_prompt=False)
        for i, why, needed in words:
            if not all(word in text for word in needed):
                raise self.fault(i, why)
            if any(f'\\"{word}' in text for word in needed if word.endswith("k")):
                raise self.fault(i, "writes the arguments of its call as text within text")


def _normalized(message: ChatMessage) -> ChatMessage:
    """Copies a message without empty calls and None fields, with its thoughts under both names that templates use."""
    fields = _without_none(message)
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = [_with(_without_none(call), _without_none(_function(call))) for call in calls]
    thoughts = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if thoughts is None else {"thinking": thoughts, **fields, "reasoning_content": thoughts}


def _without_none(fields: JsonObject) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _forms(messages: Sequence[ChatMessage]) -> Iterator[Sequence[ChatMessage]]:
    """Yields the messages in every form that templates may expect of calls.

    Arguments are an object or JSON text. The content of a turn without words is absent, '' or None.
    """
    yield messages
    if not any("tool_calls" in message for message in messages):
        return
    for read in (_object, _text):
        for blank in ({}, {"content": ""}, {"content": None}):
            yield [_formed(message, read, blank) if "tool_calls" in message else message for message in messages]


def _formed(message: ChatMessage, read: Callable[[Any], object], blank: ChatMessage) -> ChatMessage:
    calls = [
        _with(call, {**_function(call), "arguments": read(_function(call).get("arguments"))})
        for call in message["tool_calls"]
    ]
    fields = {name: value for name, value in message.items() if name != "content" or value}
    return {**blank, **fields, "tool_calls": calls}


def _function(call: JsonObject) -> JsonObject:
    return call.get("function", call)


def _with(call: JsonObject, function: JsonObject) -> JsonObject:
    return {**call, "function": function} if "function" in call else function


def _called(call: JsonObject, word: str) -> JsonObject:
    """Returns a call with made-up words for its name and arguments."""
    function = {**_function(call), "name": f"{word}n"}
    if "arguments" in function:
        arguments = {f"{word}k": f"{word}v"}
        function["arguments"] = _text(arguments) if isinstance(function["arguments"], str) else arguments
    call_fields = dict(_with(call, function))
    name = _function(call).get("name")
    if isinstance(call_fields.get("id"), str) and name:  # Kimi's template writes a call's name only as part of its id
        call_fields["id"] = call_fields["id"].replace(name, function["name"])
    return call_fields


def _object(arguments: Any) -> Any:
    try:
        read = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shared(a: str, b: str) -> int:
    """Counts the characters that two texts share at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def _shared_end(a: str, b: str) -> int:
    """Counts the characters that two texts share at their end."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[len(a) - middle :] == b[len(b) - middle :] else (low, middle - 1)
    return low


def _is_cut(text: str, of: str) -> bool:
    """Returns True if `text` equals `of`, or `of` without one stretch of characters."""
    return len(text) <= len(of) and _shared(text, of) + _shared_end(text, of) >= len(text)


def prompt(
    record: Record,
    tokenizer: Tokenizer,
    *,
    system: str,
    form: template.Form,
    question_field: str = shape.QUESTION,
) -> TextPart:
    """Renders a record as the text that the model continues.

    Args:
      record: record with a question. The chat template renders the record's `messages`, or a `prompt` that is a list.
        If the job has no tools, it also renders the schemas in the record's field `tools`. A `prompt` of text is used
        as it is. A question in a field of its own is wrapped by `template.wrap`.
      tokenizer: the model's tokenizer, whose chat template is used.
      system: instructions before a question; '' for none.
      form: form of a wrapped question: 'chat' for a turn of the chat template, 'plain' for plain text.
      question_field: name of the field with the question; podrl.data.shape.prompt_field says which field holds
        the question.

    Raises:
      ValueError: the model's chat template refuses the conversation, or its rendering lacks a message or the question.
    """
    name = shape.prompt_field(record, question_field)
    value = record[name]
    if isinstance(value, list):
        tools = None if tokenizer.tools else shape.schemas(record)  # if the job has tools, every prompt offers them
        return TextPart(render(tokenizer, shape.conversation(record, name), tools=tools), rendered=True)
    if name == "prompt" and question_field != "prompt":
        return TextPart(value)
    question = plain.text(value).strip()
    text = template.wrap(tokenizer, question, system=system, form=form)
    if "".join(question.split()) not in "".join(text.split()):
        raise ValueError(
            f"The chat template of {tokenizer.directory} leaves out the question: {question[:80]!r} is not in the "
            f"prompt {text[-160:]!r}. Correct the template, or set data.template=plain."
        )
    return TextPart(text, rendered=form == "chat")


def prompts_of(
    conversations: Sequence[str | Sequence[ChatMessage]], tokenizer: Tokenizer, *, max_length: int, chat: bool = False
) -> Prompts:
    """Makes prompts of plain texts and of conversations.

    Args:
      conversations: prompts, each a text or a list of messages; the chat template renders messages.
      tokenizer: the model's tokenizer, whose chat template is used.
      max_length: largest number of tokens that a prompt may have.
      chat: True if a text is a user's turn, which the chat template renders; if False, the model continues the text
        itself.

    Raises:
      ValueError: a prompt is neither a text nor messages that can be rendered, or has more than `max_length` tokens.
    """
    if isinstance(conversations, str):
        raise ValueError(f"The prompts are the text {conversations[:80]!r}: give a list of texts or of conversations.")
    require(isinstance(conversations, Iterable), "prompts", conversations, "a list of texts or of conversations")
    texts, rows = [], []
    for i, prompt in enumerate(conversations):
        as_it_is = isinstance(prompt, str) and not chat
        try:
            texts.append(prompt if isinstance(prompt, str) and not chat else _rendered(prompt, tokenizer))
        except ValueError as error:
            raise ValueError(f"Prompt {i} must be a text or a list of messages that can be rendered: {error}") from None
        rows.append(tokenizer.encode(texts[-1], start=as_it_is))
    tokens_PT, length_P = right_padded(rows, tokenizer.pad_id)
    if (longest := tokens_PT.shape[1]) > max_length:
        raise ValueError(
            f"A prompt has {longest} tokens: rollout.max_prompt_length={max_length} must be at least that."
        )
    return Prompts(tokens_PT, length_P, np.arange(len(texts)), texts, {}, b"")


def _rendered(conversation: Any, tokenizer: Tokenizer) -> str:
    turns = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
    turns = shape.normal_turns(turns) if isinstance(turns, list | tuple) else turns
    if fault := shape.turns_fault(turns):
        raise ValueError(fault)
    return render(tokenizer, turns)
