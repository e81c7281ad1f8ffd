"""Tests /v1/responses and /v1/messages: both are translated to and from a request of chat completions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrl.environments.wire import chat, messages, responses
from podrl.environments.wire.requests import Answer, Choice, RefusedRequest
from podrl.rollout.histories import canonical

MODELS, PARSER = ["policy"], "hermes"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CHAT = {
    "model": "policy:aside",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                for i in (1, 2)
            ],
        },
        *({"role": "tool", "tool_call_id": f"c{i}", "content": f"{i}"} for i in (1, 2)),
        {"role": "user", "content": "Go on."},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}],
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
}
SHARED = {"model": "policy:aside", "temperature": 0.5, "top_p": 0.9}
RESPONSES = SHARED | {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}]},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
        },
        *(
            {"type": "function_call", "id": "f", "call_id": f"c{i}", "name": "add", "arguments": '{"a": 1}'}
            for i in (1, 2)
        ),
        *({"type": "function_call_output", "call_id": f"c{i}", "output": f"{i}"} for i in (1, 2)),
        {"role": "user", "content": "Go on."},
    ],
    "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}],
    "max_output_tokens": 9,
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "store": False,
}
MESSAGES = SHARED | {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "What?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I add."},
                *({"type": "tool_use", "id": f"c{i}", "name": "add", "input": {"a": 1}} for i in (1, 2)),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "2", "is_error": False},
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    "max_tokens": 9,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "disabled"},
}
BODIES = [(responses, RESPONSES), (messages, MESSAGES)]
HI = {responses: {"input": "hi"}, messages: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}}
BOTH = {
    "response_format": {"type": "json_object"},
    "a_field_of_tomorrow": 1,
    "temperature": -1,
    "model": "gpt-5",
    "stream": 1,
    "n": 2,
}
REFUSED = {
    responses: BOTH
    | {
        "previous_response_id": "resp_1",
        "conversation": "c",
        "background": True,
        "store": True,
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_schema"}},
        "truncation": "auto",
        "top_logprobs": 3,
        "max_tool_calls": 1,
        "tool_choice": "required",
        "include": ["web_search_call.results"],
        "stream_options": {"include_obfuscation": True},
        "max_output_tokens": 0,
    },
    messages: BOTH
    | {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "container": "c",
        "mcp_servers": [{}],
        "service_tier": "priority",
        "max_tokens": 0,
        "tool_choice": {"type": "any"},
    },
}


def answer(text, stop="eos"):
    return Answer("a1", 5, [1, 2, 3], [Choice(text, [4, 5], [-0.5, -1.5], ["h", "o"], stop)])


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_a_conversation_with_calls_is_the_same_request_in_every_dialect(dialect, body):
    assert dialect.read(body, MODELS, PARSER).model_request == chat.read(CHAT, MODELS, PARSER).model_request


@pytest.mark.parametrize(
    ("dialect", "name", "value"), [(d, name, value) for d in REFUSED for name, value in REFUSED[d].items()]
)
def test_what_cannot_be_honoured_is_refused_by_its_name(dialect, name, value):
    dialect.read(HI[dialect], MODELS, PARSER)
    with pytest.raises(RefusedRequest) as refused:
        dialect.read(HI[dialect] | {name: value}, MODELS, PARSER)
    assert name in str(refused.value) or (refused.value.param or "").startswith(name) or name == "model"


@pytest.mark.parametrize(
    ("dialect", "item", "why"),
    [
        (responses, {"type": "reasoning", "summary": []}, "type 'reasoning'"),
        (responses, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "type 'input_image'"),
        (responses, {"role": "critic", "content": "x"}, "role='critic'"),
        (responses, 5, "must be an object"),
        (messages, {"role": "user", "content": [{"type": "image", "source": {}}]}, "type='image'"),
        (messages, {"role": "assistant", "content": "The answer is"}, "cannot be continued"),
        (messages, {"role": "system", "content": "x"}, "role='system'"),
        (messages, {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}, "type='tool_use'"),
        (messages, {"role": "user", "content": [{"type": "text", "text": 5}]}, "must be a text"),
    ],
)
def test_items_that_the_model_cannot_read_are_refused(dialect, item, why):
    name = "input" if dialect is responses else "messages"
    with pytest.raises(RefusedRequest, match=why):
        dialect.read(
            {"model": "policy", "max_tokens": 9, name: [item]} if name == "messages" else {name: [item]}, MODELS, PARSER
        )


@pytest.mark.parametrize("text", ["Nine.", f"I add.\n{CALL}", CALL + CALL, "", "<tool_call>{broken</tool_call>"])
def test_an_answer_that_comes_back_is_recognised(text):
    """The message that a client sends back for an answer equals the message that the endpoint remembers."""
    request = chat.read(CHAT, MODELS, PARSER)
    message = answer(text, "</tool_call>" if text.endswith("</tool_call>") else "eos")
    remembered = chat.choice_message(request, message, 0, PARSER)
    items = responses.write(request, message, PARSER)["output"]
    more = {"role": "user", "content": "And?"}
    again = responses.read({"input": [*items, more]}, MODELS, PARSER).model_request.messages or ()
    assert canonical(again[-2]) == canonical(remembered)
    block = messages.write(request, message, PARSER)["content"]
    given = {"max_tokens": 9, "messages": [{"role": "assistant", "content": block}, more]}
    again = messages.read(given, MODELS, PARSER).model_request.messages or ()
    assert canonical(again[-2]) == canonical(remembered)


def test_answers_say_how_they_ended_and_what_they_cost():
    request = messages.read(MESSAGES | {"stop_sequences": ["\n"], "tools": []}, MODELS, PARSER)
    for stop, text, reason in [("eos", "a", "end_turn"), ("length", "a", "max_tokens"), ("\n", "a\n", "stop_sequence")]:
        body = messages.write(request, answer(text, stop), PARSER)
        assert body["stop_reason"] == reason and body["content"] == [{"type": "text", "text": "a"}]
        assert body["stop_sequence"] == ("\n" if reason == "stop_sequence" else None)
        assert body["usage"]["input_tokens"] == 3 and body["usage"]["output_tokens"] == 2
    asked = {"include": ["message.output_text.logprobs"], "return_token_ids": True}
    request = responses.read({"input": "hi", **asked}, MODELS, PARSER)
    body = responses.write(request, answer("ho", "length"), PARSER)
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["total_tokens"] == 5 and body["token_ids"] == [4, 5]
    assert [one["logprob"] for one in body["output"][0]["content"][0]["logprobs"]] == [-0.5, -1.5]


def streamed(dialect, body, parts, whole):
    """Streams an answer whose text comes in parts; returns the events."""
    request = dialect.read(body, MODELS, PARSER)
    stream = dialect.AnswerStream(request, "a1", 5, PARSER)
    made = [event for part in parts for event in stream.part(0, Choice(part, (), ()))]
    return request, [*made, *stream.end(answer(whole, "\n" if whole.endswith("\n") else "eos"))]


@given(st.lists(st.text("ab\n", max_size=3), max_size=5), st.booleans())
def test_a_streamed_answer_of_messages_is_the_whole_one(parts, more):
    text = "".join(parts).replace("\n", "") + "\n"
    parts = [part.replace("\n", "") for part in parts][: None if more else 1]
    request, events = streamed(messages, HI[messages] | {"stop_sequences": ["\n"]}, parts, text)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    shown = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    whole = messages.write(request, answer(text, "\n"), PARSER)
    assert [{"type": "text", "text": shown}] * bool(shown) == whole["content"]
    assert events[-2]["delta"]["stop_reason"] == "stop_sequence" and events[-2]["usage"] == whole["usage"]
    begun, ended = ([event["type"] for event in events].count(f"content_block_{kind}") for kind in ("start", "stop"))
    assert begun == ended == bool(shown)


@given(st.lists(st.text("ab", max_size=3), max_size=5))
def test_a_streamed_answer_of_responses_is_the_whole_one(parts):
    text = "".join(parts) + "c"
    request, events = streamed(responses, HI[responses], parts, text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == responses.write(request, answer(text), PARSER)


def test_streamed_calls_hold_their_arguments():
    _, events = streamed(messages, MESSAGES | {"tool_choice": {"type": "auto"}}, [], f"I add.\n{CALL}")
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    (arguments,) = (e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta")
    assert blocks == ["text", "tool_use"] and json.loads(arguments) == {"a": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    for text in (CALL, f"I add.\n{CALL}"):
        request, events = streamed(responses, RESPONSES, [], text)
        (arguments,) = (e["arguments"] for e in events if e["type"] == "response.function_call_arguments.done")
        assert json.loads(arguments) == {"a": 1}
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == responses.write(request, answer(text), PARSER)["output"] == events[-1]["response"]["output"]
