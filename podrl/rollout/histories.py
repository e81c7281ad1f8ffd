"""The conversations of requests as tokens: sampled ids are never encoded again where an answer is known.

A request that goes on from an earlier answer repeats it as messages. Those are recognised, and the tokens of the prompt
and of the answer are taken as they were; only what is new is encoded.
"""

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.data import conversation
from podrl.data.chat import Message
from podrl.data.tokenizer import ORDINARY, Tokenizer
from podrl.environments.calls import Json, Output, Tags, format_of
from podrl.environments.dr_tulu import query_of
from podrl.environments.wire.asks import Refused

# Stands for the model's words where a template is asked what it writes around them; of Unicode's private use.
_WORDS, _OPEN, _CLOSE = "\ue0f3", "\ue0f0", "\ue0f1"
_THOUGHTS = f"<think>\n{_WORDS}\n</think>\n\n{_WORDS}"  # what a template that drops thoughts does not leave whole
_MOST = 1 << 24  # tokens of all conversations that are remembered
Tools = Sequence[Mapping[str, Any]]


class Histories:
    """Encodes conversations, and remembers the tokens of those that were answered.

    Attributes:
      extended: requests that went on from a known answer.
      forks: requests that repeat a known answer and were encoded anew all the same, because the chat template writes
        earlier turns otherwise than they were.
    """

    def __init__(self, tokenizer: Tokenizer, parser: str) -> None:
        """Takes the tokenizer, whose chat template is used, and how the model writes a call (env.parser)."""
        self._tokenizer, self._parser = tokenizer, parser
        self._known: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
        self._tokens = self.extended = self.forks = 0

    def encode(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The prompt of a conversation.

        Raises:
          Refused: the chat template cannot write it.
        """
        form = format_of(self._parser, [tool["function"]["name"] for tool in tools])
        try:
            offered = tools if isinstance(form, Json) else []
            known, count = self._longest_known(messages, tools)
            if known is not None:
                behind = self._behind(messages, count, offered, form, int(known[-1]))
                if behind is not None:
                    self.extended += 1
                    return [*known.tolist(), *behind]
                self.forks += 1
            written = self._parts(_folded(messages, form), offered)
        except ValueError as error:
            raise Refused(
                400, "invalid_messages", f"The conversation cannot be rendered: {error}", "messages"
            ) from None
        return self._encoded(written, None)

    def remember(self, messages: Sequence[Message], answer: Message, tools: Tools, ids: Sequence[int]) -> None:
        """Keeps the tokens of a conversation with its answer; those that were used least recently go."""
        *_, key = _keys([*messages, answer], tools)
        if (old := self._known.pop(key, None)) is not None:
            self._tokens -= len(old)
        self._known[key] = np.asarray(ids, np.int32)
        self._tokens += len(ids)
        while self._tokens > _MOST:
            self._tokens -= len(self._known.popitem(last=False)[1])

    def _longest_known(self, messages: Sequence[Message], tools: Tools) -> tuple[np.ndarray | None, int]:
        """Tokens of the longest beginning that is known and that no assistant or system message follows; its length."""
        keys = _keys(messages, tools)
        last = max((i for i, message in enumerate(messages) if message["role"] in ("assistant", "system")), default=-1)
        if 0 <= last < len(messages) - 1 and messages[last]["role"] == "assistant" and keys[last] in self._known:
            self._known.move_to_end(keys[last])
            return self._known[keys[last]], last + 1
        return None, 0

    def _behind(
        self, messages: Sequence[Message], count: int, tools: Tools, form: Tags | Json, last: int
    ) -> list[int] | None:
        """Tokens of the messages behind the first `count`; None where the template changes what stands before them.

        Args:
          last: the last token before them.
        """
        said = str(messages[count - 1].get("content") or "")
        words = _THOUGHTS if "</think>" in said else _WORDS
        stand_in = {"role": "assistant", "content": words}
        try:
            whole = self._parts(_folded([*messages[: count - 1], stand_in, *messages[count:]], form), tools)
            before = self._parts(_folded(messages[: count - 1], form), tools)
        except ValueError:  # a template that wants calls before their outputs, say
            return None
        at = next((i for i, (text, _) in enumerate(whole) if words in text), None)
        if at is None:
            return None
        (head, _, tail), given = whole[at][0].rpartition(words), whole[at][1]
        shown = "".join(text for text, _ in whole[:at]) + head
        if shown != "".join(text for text, _ in before):
            return None
        rest = [(tail, given), *whole[at + 1 :]]
        if last in self._tokenizer.eos_ids:  # the end of the model's turn is not written again
            place = next(i for i, (text, _) in enumerate(rest) if text)
            rest[place] = (rest[place][0].removeprefix(self._tokenizer.token_text(last)), rest[place][1])
        return self._encoded(rest, last)

    def _parts(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, bool]]:
        """The rendering in parts: (text, whether it is of a message that holds what is written as a special token).

        A conversation that ends with the assistant's own words, open, goes on from them.
        """
        messages = list(messages)
        opened = str(messages.pop()["content"]) if messages and messages[-1].get("open") else ""
        risky = [i for i, message in enumerate(messages) if self._is_risky(message)]
        whole = conversation.render(self._tokenizer, messages, tools=tools)
        parts = [(whole, False)]
        if risky:
            parts = self._around(messages, tools, risky, whole)
        return [*parts, (opened, self._tokenizer.holds_special(opened))] if opened else parts

    def _is_risky(self, message: Message) -> bool:
        return isinstance(message.get("content"), str) and self._tokenizer.holds_special(message["content"])

    def _around(
        self, messages: Sequence[Message], tools: Tools, risky: Sequence[int], whole: str
    ) -> list[tuple[str, bool]]:
        """Splits a rendering at the texts of some messages.

        Raises:
          ValueError: the template writes one of them otherwise than it is.
        """
        for form in (str, str.strip):  # many templates strip a text, which the marks prevent
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
            "does not write that message as it is: leave the token out"
        )

    def _encoded(self, parts: Sequence[tuple[str, bool]], last: int | None) -> list[int]:
        """Tokens of parts behind a token, None where they begin the text; special tokens in messages stay text."""
        ids: list[int] = []
        for text, given in parts:
            if not text:
                continue
            before = ids[-1] if ids else last
            if given:
                ids += self._tokenizer.encode_plain(text, behind=ORDINARY if before is None else before)
            else:
                ids += self._tokenizer.encode(text, behind=before)
        return ids


def canonical(message: Message) -> list[Any]:
    """What two tellings of a message must have in common to be the same; thoughts beside the content may differ."""
    calls = [
        [call.get("id"), call["function"]["name"], _object(call["function"]["arguments"])]
        for call in message.get("tool_calls") or []
    ]
    return [message["role"], message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")]


def _keys(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """A digest of every beginning of a conversation, that of one message first."""
    digest = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    keys = []
    for message in messages:
        digest.update(json.dumps(canonical(message), sort_keys=True).encode() + b"\n")
        keys.append(digest.digest())
    return keys


def _folded(messages: Sequence[Message], form: Tags | Json) -> Sequence[Message]:
    """The conversation as the model's format has it.

    With tags a call and its output stand in the model's own turn: an assistant's message, the tools' behind it and the
    assistant's next one are one message then, which is `open` where the conversation ends with an output.
    """
    if isinstance(form, Json):
        return [_with_objects(message) for message in messages]
    folded: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            if not folded or folded[-1]["role"] != "assistant":
                raise ValueError("a tool's message stands behind no message of the assistant")
            output = form.observation([Output([str(message["content"])])], "").text
            folded[-1] = {**folded[-1], "content": folded[-1]["content"] + output, "open": True}
            continue
        text = message.get("content") or ""
        for call in message.get("tool_calls", ()):
            text += _called(form, call["function"])
        if message["role"] == "assistant" and folded and folded[-1].get("open"):
            folded[-1] = {"role": "assistant", "content": folded[-1]["content"] + text}
        else:
            if folded:
                folded[-1].pop("open", None)  # its turn has ended
            folded.append({"role": message["role"], "content": text})
    return folded


def _called(form: Tags, function: Mapping[str, Any]) -> str:
    arguments = _object(function["arguments"])
    if not isinstance(arguments, dict):
        arguments = {"query": arguments}
    query = query_of({"properties": arguments})
    return form.written(function["name"], arguments, query)


def _with_objects(message: Message) -> Message:
    """A message whose calls have objects for arguments, as most chat templates want them."""
    if not (calls := message.get("tool_calls")):
        return message
    made = [{**c, "function": {**c["function"], "arguments": _object(c["function"]["arguments"])}} for c in calls]
    return {**message, "tool_calls": made}


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
