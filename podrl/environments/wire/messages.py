"""Translates requests of Anthropic's /v1/messages into chat completions, and answers into content blocks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podrl.environments.wire import chat
from podrl.environments.wire.fields import Fields
from podrl.environments.wire.requests import Answer, Choice, ParsedRequest, RefusedRequest, UnsentText, usage
from podrl.mappings import ChatMessage, JsonObject

# Fields that are not served, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "output_config": ({},),
    "service_tier": ("auto", "standard_only"),
}
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "return_token_ids")


def read(body: object, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request; see wire.chat.read for arguments and errors."""
    fields = Fields(body)
    translated = {name: fields.take(name) for name in _SAME}
    if (max_tokens := fields.integer("max_tokens", 1, 2**31 - 1)) is None:
        raise fields.refusal("max_tokens", None, "must be a whole number from 1 on")
    translated |= {"max_tokens": max_tokens, "stop": [*fields.stop("stop_sequences")]}
    for name, values in _NEUTRAL.items():
        fields.neutral(name, *values)
    if (value := fields.take("tool_choice")) is not None:
        choice = Fields(value, "tool_choice")
        translated["tool_choice"] = choice.text("type")
        if choice.flag("disable_parallel_tool_use"):
            translated["parallel_tool_calls"] = False
        choice.end()
    system = _text(fields.take("system"), "system")
    sent = fields.array("messages") or []
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.array("tools") or [])]
    fields.end()
    messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(sent):
        _add(messages, message, f"messages[{i}]")
    if messages and messages[-1]["role"] == "assistant":
        why = "The last message is the assistant's, and a begun answer cannot be continued: end with the user's."
        raise RefusedRequest(400, "unsupported_parameter", why, "messages")
    return chat.read(translated | {"messages": messages, "tools": tools}, models, parser)


def write(request: ParsedRequest, answer: Answer, parser: str) -> JsonObject:
    """Writes the body of the response."""
    choice = answer.choices[0]
    message = chat.choice_message(request, answer, 0, parser)
    content: list[JsonObject] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        use = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **use})
    stop_sequence = choice.stop if choice.stop in request.stop else None
    reason = "max_tokens" if choice.stop == "length" else "stop_sequence" if stop_sequence else "end_turn"
    stop = {"stop_reason": "tool_use" if "tool_calls" in message else reason, "stop_sequence": stop_sequence}
    ids = {"prompt_token_ids": list(answer.prompt_ids), "token_ids": list(choice.tokens)}
    counts = usage(answer)
    body = _head(request, answer.id) | {"content": content, **stop}
    body["usage"] = _usage(counts["prompt_tokens"], counts["completion_tokens"])
    return body | (ids if request.return_ids else {})


class AnswerStream:
    """Writes a streamed answer as events; see wire.chat.AnswerStream for the arguments."""

    def __init__(self, request: ParsedRequest, id: str, created: int, parser: str) -> None:
        del created
        self._request, self._parser, self._id = request, parser, id
        self._unsent, self._started, self._opened = UnsentText(request), False, False

    def part(self, index: int, choice: Choice) -> Iterator[JsonObject]:
        """Yields the events of a part of the answer."""
        yield from self._text(self._unsent.part(index, choice).text)

    def end(self, answer: Answer) -> Iterator[JsonObject]:
        """Yields the last events, with everything that `part` has not written."""
        body = write(self._request, answer, self._parser)
        (_, unsent), *_ = self._unsent.rest(answer)
        yield from self._start()
        calls = body["stop_reason"] == "tool_use"
        for at, block in enumerate(body["content"]):
            if block["type"] == "text":
                yield from self._text(block["text"] if calls else unsent.text)
            else:
                empty = {**block, "input": {}}
                yield {"type": "content_block_start", "index": at, "content_block": empty}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
                yield {"type": "content_block_delta", "index": at, "delta": delta}
            yield {"type": "content_block_stop", "index": at}
        stop = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": stop, "usage": body["usage"]}
        yield {"type": "message_stop"}

    def _start(self) -> Iterator[JsonObject]:
        if not self._started:
            self._started = True
            # The usage is 0 here, because the number of prompt tokens is known only with the whole answer. The event
            # message_delta reports it.
            empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(0, 0)}
            yield {"type": "message_start", "message": _head(self._request, self._id) | empty}

    def _text(self, text: str) -> Iterator[JsonObject]:
        yield from self._start()
        if not text:
            return
        if not self._opened:
            self._opened = True
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def _head(request: ParsedRequest, id: str) -> dict[str, Any]:
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": request.model}


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": sampled}


def _add(messages: list[ChatMessage], value: object, path: str) -> None:
    """Translates a message: each of its tool results becomes a message of its own."""
    fields = Fields(value, path)
    role, content = fields.take("role"), fields.take("content")
    fields.end()
    if role not in ("user", "assistant"):
        raise fields.refusal("role", role, "must be user or assistant")
    if not isinstance(content, list):
        messages.append({"role": role, "content": content})
        return
    texts: list[str] = []
    calls: list[JsonObject] = []
    begin = len(messages)
    for i, block in enumerate(content):
        block_fields = Fields(block, f"{path}.content[{i}]")
        block_fields.take("cache_control")  # a label, which changes nothing
        kind = block_fields.text("type")
        if kind == "text":
            block_fields.neutral("citations", [])
            texts.append(block_fields.text("text") or "")
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block_fields.text("name"), "arguments": json.dumps(block_fields.take("input") or {})}
            calls.append({"id": block_fields.text("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            if texts:
                raise block_fields.refusal("type", kind, "must come before the texts of its message")
            block_fields.flag("is_error")  # the text of the result tells the model about the error
            result = _text(block_fields.take("content"), f"{path}.content[{i}].content")
            messages.append({"role": "tool", "tool_call_id": block_fields.text("tool_use_id"), "content": result})
        else:
            raise block_fields.refusal(
                "type", kind, "cannot be honoured: only 'text', 'tool_use' and 'tool_result' are served"
            )
        block_fields.end()
    if texts or calls or begin == len(messages):
        message: dict[str, object] = {"role": role, "content": "".join(texts) or (None if calls else "")}
        messages.append(message | ({"tool_calls": calls} if calls else {}))


def _text(value: object, path: str) -> str:
    """Joins the texts of a system prompt or of a tool's result."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise RefusedRequest(400, "invalid_type", f"{path} must be a text or a list of blocks.", path)
    texts = []
    for i, block in enumerate(value):
        fields = Fields(block, f"{path}[{i}]")
        fields.take("cache_control")  # a label, which changes nothing
        fields.neutral("citations", [])
        if (kind := fields.text("type")) != "text":
            raise fields.refusal("type", kind, "cannot be honoured: only 'text' is served")
        texts.append(fields.text("text") or "")
        fields.end()
    return "".join(texts)


def _tool(value: object, path: str) -> JsonObject:
    fields = Fields(value, path)
    if (kind := fields.text("type")) not in (None, "custom"):
        raise fields.refusal("type", kind, "cannot be honoured: only 'custom' is served")
    fields.take("cache_control")
    function = {name: fields.take(name) for name in ("name", "description", "strict")}
    function["parameters"] = fields.take("input_schema")
    fields.end()
    return {"type": "function", "function": function}
