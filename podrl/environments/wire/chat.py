"""The dialect of /v1/chat/completions: messages in, one message out, tool calls read from the model's own format."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podrl.environments.calls import Call, fitted, format_of
from podrl.environments.dr_tulu import query_of
from podrl.environments.wire.fields import Fields
from podrl.environments.wire.requests import (
    Answer,
    Choice,
    ModelRequest,
    ParsedRequest,
    RefusedRequest,
    UnsentText,
    finish_reason,
    token_logprobs,
    usage,
    visible_text,
)
from podrl.mappings import JsonObject, ToolSchema

OBJECT = "chat.completion"
_ROLE_ALIASES = {"developer": "system"}
_SERVED_ROLES = ("system", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def read(body: object, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request.

    Args:
      body: JSON of the body.
      models: names of the served models, the default first.
      parser: format in which the model writes a tool call (env.parser).

    Raises:
      RefusedRequest: a field cannot be honoured; the message names the field.
    """
    fields = Fields(body)
    model, aside = fields.model(models)
    sent = fields.array("messages")
    if not sent:
        raise fields.refusal("messages", sent, "must be a list of at least one message")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(sent)]
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.array("tools") or [])]
    if _choice(fields) == "none":
        tools = []
    if len(set(names(tools))) < len(tools):
        raise fields.refusal("tools", names(tools), "names a tool twice")
    form = format_of(parser, names(tools)) if tools else None
    if form is None or form.role == "raw":  # a turn has at most one call, so the value may be false
        fields.flag("parallel_tool_calls")
    logprobs = fields.flag("logprobs")
    fields.neutral("top_logprobs", 0)
    output, stop = fields.streaming() | fields.token_ids(), fields.stop()
    limits = [fields.integer(name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    sampling = fields.sampling()
    fields.end()
    model_request = ModelRequest(
        messages=messages,
        tools=tools,
        stop=tuple(dict.fromkeys((*stop, *(form.stop if form else ())))),
        max_new=min((limit for limit in limits if limit is not None), default=None),
        aside=aside,
        pieces=logprobs and not output["ids_as_tokens"],
        parts=output["stream"] and not tools,  # calls are read from the whole answer
        **sampling,
    )
    return ParsedRequest(model_request, model, stop, logprobs=logprobs, **output)


def names(tools: Sequence[ToolSchema]) -> list[str]:
    """Returns the names of tools."""
    return [tool["function"]["name"] for tool in tools]


def assistant_message(
    choice: Choice, *, stop: Sequence[str], tools: Sequence[ToolSchema], parser: str, id: str
) -> dict[str, Any]:
    """Writes an answer as the assistant's message.

    Args:
      choice: sampled answer.
      stop: the client's stop strings; the text ends before the stop string that was met.
      tools: tools that the request offered.
      parser: format in which the model writes a tool call.
      id: prefix of the ids of the calls, see `call_ids`.

    Returns:
      The message. It has `tool_calls` if every call in the text can be made. The text stays content, as the model wrote
      it, if a call is malformed, names a tool that was not offered, or does not fit a strict schema.
    """
    if tools:
        form = format_of(parser, names(tools))
        calls = form.calls(choice.text, choice.stop)
        arguments = _arguments(calls, {tool["function"]["name"]: tool["function"] for tool in tools})
        if arguments:
            tool_calls = []
            for k, (call, values) in enumerate(zip(calls, arguments, strict=True)):
                function = {"name": call.name, "arguments": json.dumps(values, ensure_ascii=False)}
                tool_calls.append({"id": f"call_{id}_{k}", "type": "function", "function": function})
            before = form.before(choice.text).rstrip() or None
            return {"role": "assistant", "content": before, "refusal": None, "tool_calls": tool_calls}
    return {"role": "assistant", "content": visible_text(choice, stop), "refusal": None}


def _arguments(calls: Sequence[Call], functions: Mapping[str, JsonObject]) -> list[JsonObject]:
    """Returns the arguments of each call; empty if there is no call, or if one of the calls cannot be made."""
    values = []
    for call in calls:
        if call.problem or call.name not in functions:
            return []
        schema = functions[call.name].get("parameters") or {}
        arguments = fitted(call.arguments, schema, query_of(schema))
        if functions[call.name].get("strict") and not _fits(arguments, schema):
            return []
        values.append(arguments)
    return values


def call_ids(answer: Answer, index: int) -> str:
    """Returns the prefix of the ids of the tool calls in choice `index`."""
    return f"{answer.id}_{index}"


def write(request: ParsedRequest, answer: Answer, parser: str) -> JsonObject:
    """Writes the body of the response."""
    choices = []
    for index, choice in enumerate(answer.choices):
        message = choice_message(request, answer, index, parser)
        reason = "tool_calls" if "tool_calls" in message else finish_reason(choice)
        body = {"index": index, "message": message, "finish_reason": reason}
        body |= {"logprobs": token_logprobs(request, choice)}
        choices.append(body | ({"token_ids": list(choice.tokens)} if request.return_ids else {}))
    body = _head(request, answer.id, answer.created, OBJECT) | {"choices": choices, "usage": usage(answer)}
    return body | ({"prompt_token_ids": list(answer.prompt_ids)} if request.return_ids else {})


class AnswerStream:
    """Writes a streamed answer as chunks."""

    def __init__(self, request: ParsedRequest, id: str, created: int, parser: str) -> None:
        """Begins a stream.

        Args:
          request: parsed request.
          id: name of the answer.
          created: time of the request, seconds since 1970.
          parser: format in which the model writes a tool call.
        """
        self._request, self._parser = request, parser
        self._head = _head(request, id, created, f"{OBJECT}.chunk")
        self._unsent = UnsentText(request)
        self._started: set[int] = set()

    def part(self, index: int, choice: Choice) -> Iterator[JsonObject]:
        """Yields the chunks of a part of choice `index`."""
        shown = self._unsent.part(index, choice)
        yield self._chunk(index, {"content": shown.text}, shown)

    def end(self, answer: Answer) -> Iterator[JsonObject]:
        """Yields the last chunks, with everything that `part` has not written."""
        for index, unsent in self._unsent.rest(answer):
            message = choice_message(self._request, answer, index, self._parser)
            delta: dict[str, object] = {"content": unsent.text}
            reason = finish_reason(unsent)
            if "tool_calls" in message:
                calls = [{"index": k, **call} for k, call in enumerate(message["tool_calls"])]
                delta, reason = {"content": message["content"], "tool_calls": calls}, "tool_calls"
            yield self._chunk(index, delta, unsent)
            yield self._chunk(index, {}, Choice("", (), ()), reason)
        yield from ending(self._request, self._head, answer)

    def _chunk(self, index: int, delta: JsonObject, choice: Choice, reason: str | None = None) -> JsonObject:
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", **delta}
        body: dict[str, object] = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if choice.tokens:
            body["logprobs"] = token_logprobs(self._request, choice)
            if self._request.return_ids:
                body["token_ids"] = list(choice.tokens)
        return {**self._head, "choices": [body]}


def ending(request: ParsedRequest, head: JsonObject, answer: Answer) -> Iterator[JsonObject]:
    """Yields the last chunk of a stream, if the client wants the prompt's ids or the token counts."""
    more = {"prompt_token_ids": list(answer.prompt_ids)} if request.return_ids else {}
    if more or request.usage:
        yield {**head, "choices": [], **more, **({"usage": usage(answer)} if request.usage else {})}


def choice_message(request: ParsedRequest, answer: Answer, index: int, parser: str) -> JsonObject:
    """Writes choice `index` of an answer as the assistant's message, see `assistant_message`."""
    choice, tools = answer.choices[index], request.model_request.tools
    return assistant_message(choice, stop=request.stop, tools=tools, parser=parser, id=call_ids(answer, index))


def _head(request: ParsedRequest, id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": created, "model": request.model}


def _choice(fields: Fields) -> str:
    """Reads `tool_choice`: 'auto' or 'none'."""
    value = fields.take("tool_choice")
    if value is not None and value not in ("auto", "none"):
        raise fields.refusal("tool_choice", value, "cannot be honoured: only 'auto' or 'none' is served")
    return value or "auto"


def _message(value: object, path: str) -> JsonObject:
    """Parses a message; the result has its content as text, and a role of chat templates."""
    fields = Fields(value, path)
    role = fields.text("role") or ""
    role = _ROLE_ALIASES.get(role, role)
    if role not in _SERVED_ROLES:
        raise fields.refusal("role", role, f"must be developer, {', '.join(_SERVED_ROLES)}")
    message: dict[str, object] = {"role": role, "content": _content(fields.take("content"), path)}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if role == "assistant":
        for thoughts in _THOUGHTS:
            if (text := fields.text(thoughts)) is not None:
                message["reasoning_content"] = text
        calls = fields.array("tool_calls")
        if calls:
            message["tool_calls"] = [_call(call, f"{path}.tool_calls[{k}]") for k, call in enumerate(calls)]
        fields.neutral("annotations", [])
        fields.neutral("refusal", "")
    if role == "tool" and (call_id := fields.text("tool_call_id")) is not None:
        message["tool_call_id"] = call_id
    if message["content"] is None and "tool_calls" not in message:
        if role != "assistant":
            raise fields.refusal("content", None, "must be a text or a list of parts")
        message["content"] = ""
    fields.end()
    return message


def _content(value: object, path: str) -> str | None:
    """Joins the text parts of the content of a message."""
    if value is None or isinstance(value, str):
        return value
    path = f"{path}.content"
    if not isinstance(value, list):
        raise RefusedRequest(400, "invalid_type", f"{path} must be a text or a list of parts.", path)
    texts = []
    for i, part in enumerate(value):
        fields = Fields(part, f"{path}[{i}]")
        kind, text = fields.text("type"), fields.take("text")
        if kind != "text" or not isinstance(text, str):
            raise RefusedRequest(
                400, "unsupported_parameter", f"{path}[{i}] has type {kind!r}: the model reads only 'text'.", path
            )
        fields.take("cache_control")  # a label of other providers, which changes nothing
        fields.end()
        texts.append(text)
    return "".join(texts)


def _call(value: object, path: str) -> JsonObject:
    """Parses a tool call of an earlier turn; the result has its arguments as JSON text."""
    fields = Fields(value, path)
    kind, id_ = fields.text("type"), fields.text("id")
    if kind not in (None, "function"):
        raise fields.refusal("type", kind, "cannot be honoured: only 'function' is served")
    function = Fields(fields.take("function"), f"{path}.function")
    name, arguments = function.text("name"), function.text("arguments")
    if not name:
        raise function.refusal("name", name, "must name a function")
    function.end()
    fields.take("index")  # some clients copy this field from a streamed call
    fields.end()
    return {"id": id_ or "", "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def _tool(value: object, path: str) -> JsonObject:
    """Parses a tool; the result has the form that chat templates take."""
    fields = Fields(value, path)
    kind = fields.text("type")
    if kind != "function":
        raise fields.refusal("type", kind, "cannot be honoured: only 'function' is served")
    function = Fields(fields.take("function"), f"{path}.function")
    name, description, parameters = function.text("name"), function.text("description"), function.take("parameters")
    if not name or not _NAME.fullmatch(name):
        raise function.refusal("name", name, "must be a name of letters, digits and _ . : / -, 128 at most")
    if parameters is not None and not isinstance(parameters, dict):
        raise function.refusal("parameters", parameters, "must be a JSON schema, an object")
    properties, required = (
        (parameters or {}).get(key, kind()) for key, kind in (("properties", dict), ("required", list))
    )
    if not isinstance(properties, dict) or not all(isinstance(schema, dict | bool) for schema in properties.values()):
        raise function.refusal("parameters", parameters, "must have 'properties', an object of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise function.refusal("parameters", parameters, "must have 'required', a list of names")
    strict = {"strict": True} if function.flag("strict") else {}
    function.end()
    fields.end()
    declaration = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": declaration | strict}


def _fits(arguments: JsonObject, schema: JsonObject) -> bool:
    """Returns True if arguments fit a strict schema: all required arguments are there, none is unknown, and each has
    the right type."""
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= set(arguments) <= set(properties):
        return False
    for name, value in arguments.items():
        kinds = properties[name].get("type") if isinstance(properties[name], Mapping) else None
        kinds = [kinds] if isinstance(kinds, str) else kinds or []
        if kinds and not any(_is(kind, value) for kind in kinds):
            return False
    return True


def _is(kind: Any, value: object) -> bool:
    """Returns True if a value has the type `kind` of JSON schema; a boolean is no number."""
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    types = {"string": str, "number": (int, float), "integer": int, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, types.get(kind, object))
