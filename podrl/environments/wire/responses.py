"""The dialect of /v1/responses: items in and items out, translated to and from a request of /v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podrl.environments.wire import chat
from podrl.environments.wire.fields import Fields
from podrl.environments.wire.requests import (
    Answer,
    Choice,
    ParsedRequest,
    RefusedRequest,
    UnsentText,
    finish_reason,
    token_logprobs,
    usage,
)
from podrl.mappings import JsonObject

OBJECT = "response"
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# Fields that are not served, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "text": ({}, {"format": {"type": "text"}}),
}
_SAME = ("model", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "stream", "return_token_ids")


def read(body: object, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request; see wire.chat.read for arguments and errors."""
    fields = Fields(body)
    translated = {name: fields.take(name) for name in _SAME}
    translated["max_completion_tokens"] = fields.integer("max_output_tokens", 1, 2**31 - 1)
    include = fields.array("include") or []
    if unknown := [name for name in include if name not in (_LOGPROBS, _ENCRYPTED)]:
        raise fields.refusal("include", unknown[0], f"cannot be honoured: only {_LOGPROBS!r} is served")
    for name, values in _NEUTRAL.items():
        fields.neutral(name, *values)
    if (options := fields.take("stream_options")) is not None:
        stream_options = Fields(options, "stream_options")
        stream_options.neutral("include_obfuscation", False)
        stream_options.end()
    instructions, sent = fields.text("instructions"), fields.take("input")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.array("tools") or [])]
    fields.end()
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    if not isinstance(items, list) or not items:
        raise fields.refusal("input", sent, "must be a text or a list of at least one item")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    return chat.read(
        translated | {"messages": messages, "tools": tools, "logprobs": _LOGPROBS in include}, models, parser
    )


def write(request: ParsedRequest, answer: Answer, parser: str) -> JsonObject:
    """Writes the body of the response."""
    reason = finish_reason(answer.choices[0])
    counts = usage(answer)
    body = _head(request, answer.id, answer.created, "incomplete" if reason == "length" else "completed")
    body |= {"incomplete_details": {"reason": "max_output_tokens"}} if reason == "length" else {}
    body |= {
        "output": _items(request, answer, parser),
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
    }
    ids = {"prompt_token_ids": list(answer.prompt_ids), "token_ids": list(answer.choices[0].tokens)}
    return body | (ids if request.return_ids else {})


class AnswerStream:
    """Writes a streamed answer as events; see wire.chat.AnswerStream for the arguments."""

    def __init__(self, request: ParsedRequest, id: str, created: int, parser: str) -> None:
        self._request, self._parser, self._id = request, parser, id
        self._unsent, self._number, self._opened = UnsentText(request), 0, False
        self._head = _head(request, id, created, "in_progress")

    def part(self, index: int, choice: Choice) -> Iterator[JsonObject]:
        """Yields the events of a part of the answer."""
        shown = self._unsent.part(index, choice)
        yield from self._open()
        yield self._delta(shown)

    def end(self, answer: Answer) -> Iterator[JsonObject]:
        """Yields the last events, with everything that `part` has not written."""
        body = write(self._request, answer, self._parser)
        (_, unsent), *_ = self._unsent.rest(answer)
        if not self._number:
            yield from self._start()
        for at, item in enumerate(body["output"]):
            if item["type"] == "message":
                (content,) = item["content"]
                yield from self._open()
                calls = len(body["output"]) > 1
                yield self._delta(
                    Choice(content["text"], unsent.tokens, unsent.logprobs, unsent.pieces) if calls else unsent
                )
                place = {"item_id": item["id"], "output_index": at, "content_index": 0}
                yield self._event("response.output_text.done", place | {k: content[k] for k in ("text", "logprobs")})
                yield self._event("response.content_part.done", {**place, "part": content})
            else:
                started = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", {"output_index": at, "item": started})
                place = {"item_id": item["id"], "output_index": at}
                arguments = item["arguments"]
                yield self._event("response.function_call_arguments.delta", {**place, "delta": arguments})
                complete = {**place, "name": item["name"], "arguments": arguments}
                yield self._event("response.function_call_arguments.done", complete)
            yield self._event("response.output_item.done", {"output_index": at, "item": item})
        yield self._event(f"response.{body['status']}", {"response": body})

    def _start(self) -> Iterator[JsonObject]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", {"response": self._head})

    def _open(self) -> Iterator[JsonObject]:
        """Yields the events before the first text."""
        if self._opened:
            return
        self._opened = True
        if not self._number:
            yield from self._start()
        item = {**_message(self._id, []), "status": "in_progress"}
        yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", {**place, "part": _text("", [])})

    def _delta(self, choice: Choice) -> JsonObject:
        place = {"item_id": _message(self._id, [])["id"], "output_index": 0, "content_index": 0}
        shown = {"delta": choice.text, "logprobs": _logprobs(self._request, choice)}
        return self._event("response.output_text.delta", place | shown)

    def _event(self, kind: str, fields: JsonObject) -> JsonObject:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _head(request: ParsedRequest, id: str, created: int, status: str) -> dict[str, Any]:
    """Writes a response without its output, its token counts and the reason why it is incomplete."""
    model_request = request.model_request
    flat = ({"type": "function", "strict": False, **tool["function"]} for tool in model_request.tools)
    return {
        "id": f"resp_{id}",
        "object": OBJECT,
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": model_request.max_new,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": model_request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": list(flat),
        "top_p": model_request.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }


def _items(request: ParsedRequest, answer: Answer, parser: str) -> list[JsonObject]:
    message = chat.choice_message(request, answer, 0, parser)
    calls = message.get("tool_calls", ())
    items = []
    if message["content"] or not calls:
        items.append(_message(answer.id, [_text(message["content"], _logprobs(request, answer.choices[0]))]))
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        items.append(item | call["function"])
    return items


def _message(id: str, content: list[JsonObject]) -> JsonObject:
    return {"type": "message", "id": f"msg_{id}", "status": "completed", "role": "assistant", "content": content}


def _text(text: str, logprobs: list[JsonObject]) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(request: ParsedRequest, choice: Choice) -> list[JsonObject]:
    return (token_logprobs(request, choice) or {"content": []})["content"]


def _add(messages: list[dict[str, Any]], item: object, path: str) -> None:
    """Translates an item to a message of chat completions, or adds it to the assistant's message before it."""
    fields = Fields(item, path)
    kind = fields.text("type") or "message"
    for label in ("id", "status"):  # labels of items that come from earlier answers; they change nothing
        fields.take(label)
    if kind == "message":
        role, content = fields.take("role"), fields.take("content")
        messages.append({"role": role, "content": _content(content, f"{path}.content")})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {name: fields.text(name) for name in ("name", "arguments")}
        call = {"id": fields.text("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(fields.take("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": fields.text("call_id"), "content": output})
    else:
        why = f"{path} has type {kind!r}: only 'message', 'function_call' and 'function_call_output' are served."
        raise RefusedRequest(400, "unsupported_parameter", why, path)
    fields.end()


def _content(value: object, path: str) -> Any:
    """Translates the parts of a message's content; content that is no list is returned unchanged."""
    if not isinstance(value, list):
        return value
    parts = []
    for i, part in enumerate(value):
        fields = Fields(part, f"{path}[{i}]")
        kind = fields.text("type")
        fields.take("logprobs")  # a part of an earlier answer, which changes nothing
        fields.neutral("annotations", [])
        kind = "text" if kind in ("input_text", "output_text") else kind
        parts.append({"type": kind, "text": fields.take("text")})
        if kind == "text":  # wire.chat refuses all other kinds
            fields.end()
    return parts


def _tool(value: object, path: str) -> JsonObject:
    fields = Fields(value, path)
    if (kind := fields.text("type")) != "function":
        raise fields.refusal("type", kind, "cannot be honoured: only 'function' is served")
    function = {name: fields.take(name) for name in ("name", "description", "parameters", "strict")}
    fields.end()
    return {"type": "function", "function": function}
