"""Encodes the conversations of requests, and keeps the sampled ids of earlier answers.

A request that continues an earlier answer repeats that answer as a message. Histories recognises the message, takes the
tokens of the earlier prompt and answer unchanged, and encodes only the new messages.
"""

import collections
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from podrl.data import conversation
from podrl.data.tokenizer import ORDINARY, Tokenizer
from podrl.environments.calls import Json, Tags, ToolOutput, check_depth, format_of
from podrl.environments.dr_tulu import query_of
from podrl.environments.wire.requests import RefusedRequest
from podrl.mappings import ChatMessage, JsonObject, ToolSchema

# Marks from Unicode's private use area. A template is rendered with _WORDS in place of an answer, to find the text
# around the answer; _OPEN and _CLOSE enclose the content of a message.
_WORDS, _OPEN, _CLOSE = "\ue0f3", "\ue0f0", "\ue0f1"
_THOUGHTS = f"<think>\n{_WORDS}\n</think>\n\n{_WORDS}"  # a template that drops thoughts changes this text
_MOST = 1 << 24  # largest number of remembered tokens, in all conversations together


class Histories:
    """Encodes conversations, and remembers the tokens of answered conversations.

    Attributes:
      extended: number of conversations that continue a known answer.
      forks: number of conversations that repeated a known answer but were encoded from their text, because the chat
        template renders earlier turns differently from how they were sampled.
      continued: True if `extended` counts the conversation that was encoded last.
      forked: True if `forks` counts the conversation that was encoded last.
    """

    def __init__(self, tokenizer: Tokenizer, parser: str, *, append: bool = False) -> None:
        """Keeps the arguments.

        Args:
          tokenizer: tokenizer of the model, with its chat template.
          parser: format in which the model writes a tool call (env.parser).
          append: True to continue a known answer also where the chat template now renders earlier turns differently.
        """
        self._tokenizer, self._parser, self._append = tokenizer, parser, append
        self._answers: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
        self._tokens = self.extended = self.forks = 0
        self.continued = self.forked = False

    def encode(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> list[int]:
        """Encodes a conversation as a prompt.

        Raises:
          RefusedRequest: the chat template cannot render the conversation.
        """
        form = format_of(self._parser, [tool["function"]["name"] for tool in tools])
        self.continued = self.forked = False
        try:
            offered = tools if isinstance(form, Json) else []
            known, count = self._last_answer(messages, tools)
            if known is not None:
                new = self._new(messages, count, offered, form, int(known[-1]))
                if new is not None:
                    self.extended, self.continued = self.extended + 1, True
                    return [*known.tolist(), *new]
                self.forks, self.forked = self.forks + 1, True
            written = self._parts(_folded(messages, form), offered)
        except ValueError as error:
            raise RefusedRequest(
                400, "invalid_messages", f"The conversation cannot be rendered: {error}", "messages"
            ) from None
        return self._encoded(written, None)

    def knows(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> bool:
        """Returns True if a conversation continues an answer whose tokens are remembered."""
        return self._last_answer(messages, tools)[0] is not None

    def remember(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        answers: Iterable[tuple[ChatMessage, Sequence[int]]],
    ) -> None:
        """Keeps the tokens of a conversation with each of its answers.

        Forgets the least recently used conversations as soon as the tokens of all are more than `_MOST`.

        Args:
          messages: conversation without the answer.
          tools: tools that the request offered.
          answers: (assistant's message, token ids of prompt and answer) for each answer.
        """
        prompt = _digest(messages, tools)
        for message, ids in answers:
            whole = prompt.copy()
            whole.update(_line(message))
            if (old := self._answers.pop(key := whole.digest(), None)) is not None:
                self._tokens -= len(old)
            self._answers[key] = np.asarray(ids, np.int32)
            self._tokens += len(ids)
        while self._tokens > _MOST:
            self._tokens -= len(self._answers.popitem(last=False)[1])

    def _last_answer(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]
    ) -> tuple[np.ndarray | None, int]:
        """Looks up a conversation up to its last answer.

        Returns:
          (token ids, number of messages) of the conversation up to its last answer, or (None, 0) if this part is not
          known, if no message follows it, or if a system message follows it.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] in ("assistant", "system")), default=-1)
        if not 0 <= last < len(messages) - 1 or messages[last]["role"] != "assistant":
            return None, 0
        if (ids := self._answers.get(key := _digest(messages[: last + 1], tools).digest())) is None:
            return None, 0
        self._answers.move_to_end(key)
        return ids, last + 1

    def _new(
        self, messages: Sequence[ChatMessage], count: int, tools: Sequence[ToolSchema], form: Tags | Json, last: int
    ) -> list[int] | None:
        """Encodes the messages after a known answer.

        Args:
          messages: whole conversation.
          count: number of messages up to the known answer, which is the last of them.
          tools: tools for the chat template.
          form: format of the model's tool calls.
          last: last token of the known answer.

        Returns:
          Token ids; None if the chat template refuses the conversation, loses the known answer, renders nothing after
          it, or (without `append`) renders the known answer or a message before it differently than before.
        """
        answer = str(messages[count - 1].get("content") or "")
        words = _THOUGHTS if "</think>" in answer and not self._append else _WORDS
        stand_in = {"role": "assistant", "content": words}
        try:
            whole = self._parts(_folded([*messages[: count - 1], stand_in, *messages[count:]], form), tools)
            before = self._parts(_folded(messages[: count - 1], form), tools)
        except ValueError:  # a template may refuse, for example, an output without a call before it
            return None
        at = next((i for i, (text, _) in enumerate(whole) if words in text), None)
        if at is None:
            return None
        (head, _, tail), is_plain = whole[at][0].rpartition(words), whole[at][1]
        rendered = "".join(text for text, _ in whole[:at]) + head
        if rendered != "".join(text for text, _ in before) and not self._append:
            return None
        rest = [(tail, is_plain), *whole[at + 1 :]]
        if last in self._tokenizer.eos_ids:  # the answer has its end token already
            place = next((i for i, (text, _) in enumerate(rest) if text), None)
            if place is None:
                return None
            rest[place] = (rest[place][0].removeprefix(self._tokenizer.token_text(last)), rest[place][1])
        return self._encoded(rest, last)

    def _parts(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> list[tuple[str, bool]]:
        """Renders a conversation as parts: (text, True if special tokens in it must stay text).

        A last message that is `open` is an unfinished turn of the assistant; its text comes after the rendering.
        """
        messages = list(messages)
        opened = str(messages.pop()["content"]) if messages and messages[-1].get("open") else ""
        risky = [i for i, message in enumerate(messages) if self._is_risky(message)]
        whole = conversation.render(self._tokenizer, messages, tools=tools)
        parts = [(whole, False)]
        if risky:
            parts = self._around(messages, tools, risky, whole)
        return [*parts, (opened, self._tokenizer.holds_special(opened))] if opened else parts

    def _is_risky(self, message: ChatMessage) -> bool:
        """Returns True if the content of a message has the text of a special token."""
        return isinstance(message.get("content"), str) and self._tokenizer.holds_special(message["content"])

    def _around(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], risky: Sequence[int], whole: str
    ) -> list[tuple[str, bool]]:
        """Splits a rendering at the contents of the messages `risky`.

        Raises:
          ValueError: the template changes the content of one of these messages.
        """
        for form in (str, str.strip):  # many templates strip contents, but cannot strip inside the marks
            marked = list(messages)
            for i in risky:
                text = str(messages[i]["content"]).replace(_OPEN, "").replace(_CLOSE, "")
                marked[i] = {**messages[i], "content": _OPEN + form(text) + _CLOSE}
            first, *rest = conversation.render(self._tokenizer, marked, tools=tools).split(_OPEN)
            parts = [(first, False)]
            for inside, _, after in (part.partition(_CLOSE) for part in rest):
                parts += [(inside, True), (after, False)]
            if "".join(text for text, _ in parts) == whole:
                return parts
        named = self._tokenizer.special_spans(str(messages[risky[0]]["content"]))
        found = [str(messages[risky[0]]["content"])[start:end] for start, end in named]
        raise ValueError(
            f"message {risky[0]} holds {', '.join(found) or 'the text of a special token'}, and the chat template "
            "changes the text of that message: leave the token out"
        )

    def _encoded(self, parts: Sequence[tuple[str, bool]], last: int | None) -> list[int]:
        """Encodes the output of `_parts`; `last` is the token before the text, None if the text begins the sequence."""
        ids: list[int] = []
        for text, is_plain in parts:
            if not text:
                continue
            before = ids[-1] if ids else last
            if is_plain:
                ids += self._tokenizer.encode_plain(text, behind=ORDINARY if before is None else before)
            else:
                ids += self._tokenizer.encode(text, behind=before)
        return ids


def canonical(message: ChatMessage) -> list[object]:
    """Returns the fields by which a message is recognised; separate fields with thoughts are left out."""
    calls = [
        [call.get("id"), call["function"]["name"], _object(call["function"]["arguments"])]
        for call in message.get("tool_calls") or []
    ]
    return [message["role"], message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")]


def _digest(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> hashlib.blake2b:
    """Hashes tools and a conversation; a further message is added to the hash by `update(_line(message))`."""
    digest = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    for message in messages:
        digest.update(_line(message))
    return digest


def _line(message: ChatMessage) -> bytes:
    return json.dumps(canonical(message), sort_keys=True).encode() + b"\n"


def _folded(messages: Sequence[ChatMessage], form: Tags | Json) -> Sequence[ChatMessage]:
    """Rewrites a conversation for the model's format of tool calls.

    In a format of tags, a call and its output are text of the model's own turn. So an assistant's message, the tools'
    messages after it and the assistant's next message become one message. The new message is `open` if it ends with an
    output.
    """
    if isinstance(form, Json):
        return [_with_objects(message) for message in messages]
    folded: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            if not folded or folded[-1]["role"] != "assistant":
                raise ValueError("a message with role 'tool' must follow a message of the assistant")
            output = form.observation([ToolOutput([str(message["content"])])], "").text
            folded[-1] = {**folded[-1], "content": folded[-1]["content"] + output, "open": True}
            continue
        text = message.get("content") or ""
        for call in message.get("tool_calls", ()):
            text += _called(form, call["function"])
        if message["role"] == "assistant" and folded and folded[-1].get("open"):
            folded[-1] = {"role": "assistant", "content": folded[-1]["content"] + text}
        else:
            if folded:
                folded[-1].pop("open", None)  # the turn has ended
            folded.append({"role": message["role"], "content": text})
    return folded


def _called(form: Tags, function: JsonObject) -> str:
    """Writes a call in tags."""
    arguments = _object(function["arguments"])
    if not isinstance(arguments, dict):
        arguments = {"query": arguments}
    query = query_of({"properties": arguments})
    return form.written(function["name"], arguments, query)


def _with_objects(message: ChatMessage) -> ChatMessage:
    """Replaces the JSON text of a message's calls by objects, which most chat templates need."""
    if not (calls := message.get("tool_calls")):
        return message
    parsed = [{**c, "function": {**c["function"], "arguments": _object(c["function"]["arguments"])}} for c in calls]
    return {**message, "tool_calls": parsed}


def _object(arguments: str) -> Any:
    """Parses the arguments of a call; text that is not JSON, or nests too deep, stays text."""
    try:
        value = json.loads(arguments)
        check_depth(value)
        return value
    except (ValueError, RecursionError):
        return arguments
