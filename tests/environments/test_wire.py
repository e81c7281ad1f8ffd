"""Tests the dialects of the front: parsing of requests, fields refused by name, written answers and streams."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrl.environments.wire import chat, completions, generate
from podrl.environments.wire.requests import Answer, Choice, ParsedRequest, RefusedRequest

MODELS = ["policy"]
HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
GOOD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

NEVER = {
    "response_format": {"type": "json_object"},
    "logit_bias": {"50256": -100},
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 3,
    "ignore_eos": True,
    "bad_words": ["no"],
    "guided_json": {},
    "structured_outputs": {"json": {}},
    "best_of": 2,
    "prompt_logprobs": 1,
    "a_field_of_tomorrow": 1,
    "n": 0,
    "temperature": -1,
    "top_p": 0,
    "top_k": -2,
    "seed": -1,
    "stop": [""],
    "max_tokens": 0,
    "store": True,
    "model": "gpt-5",
}
CHAT = NEVER | {
    "top_logprobs": 5,
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "add_generation_prompt": False,
    "tools": [{"type": "web_search"}],
    "stream": "yes",
    "stream_options": {"include_usage": True, "other": 1},
    "messages": [],
}
TEXT = NEVER | {"logprobs": 1, "echo": True, "suffix": "end", "prompt": ["a", "b"]}
IDS = {name: value for name, value in NEVER.items() if name != "store"} | {"logprobs": 2}


def refusal(dialect, body, parser="hermes"):
    with pytest.raises(RefusedRequest) as caught:
        dialect.read(body, MODELS, parser)
    return caught.value


@pytest.mark.parametrize("name", CHAT)
def test_chat_refuses_by_name_what_it_cannot_honour(name):
    refused = refusal(chat, HI | {name: CHAT[name]})
    assert (refused.param or "").split(".")[0].split("[")[0] == name
    assert refused.status == (404 if name == "model" else 400)
    assert name in str(refused) or name == "model"


@pytest.mark.parametrize("name", TEXT)
def test_completions_refuse_by_name_what_they_cannot_honour(name):
    assert refusal(completions, {"prompt": "hi"} | {name: TEXT[name]}).param == name


@pytest.mark.parametrize("name", IDS)
def test_generate_refuses_by_name_what_it_cannot_honour(name):
    if name == "model":
        assert refusal(generate, {"token_ids": [1], "model": IDS[name]}).status == 404
    else:
        refused = refusal(generate, {"token_ids": [1], "sampling_params": {name: IDS[name]}})
        assert refused.param == f"sampling_params.{name}"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": None},
        {"role": "function", "name": "f", "content": "x"},
        {"role": "assistant", "content": "x", "audio": {"id": "1"}},
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]},
        "hi",
    ],
)
def test_messages_that_hold_no_text_are_refused(message):
    assert "messages[1]" in str(refusal(chat, {"messages": [HI["messages"][0], message]}))


def test_values_that_ask_for_nothing_are_taken():
    neutral = {
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "parallel_tool_calls": True,
        "store": False,
        "service_tier": "auto",
        "top_logprobs": 0,
        "user": "me",
        "metadata": {"run": "1"},
        "tool_choice": "auto",
        "audio": None,
        "stream": None,
    }
    assert chat.read(HI | neutral, MODELS, "hermes") == chat.read(HI, MODELS, "hermes")


def test_a_chat_request_is_read_whole():
    body = {
        "model": "policy:aside",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **call("add", {"a": 1, "b": 2})}]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [TOOL],
        "n": 2,
        "stop": "\n\n",
        "seed": 7,
        "max_tokens": 50,
        "max_completion_tokens": 40,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "return_token_ids": True,
    }
    request = chat.read(body, MODELS, "call_tool")
    model_request = request.model_request
    assert model_request.messages[0] == {"role": "system", "content": "Be brief."}
    assert model_request.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert (
        model_request.samples,
        model_request.seed,
        model_request.max_new,
        model_request.temperature,
        model_request.aside,
    ) == (2, 7, 40, 0.5, True)
    assert model_request.stop == ("\n\n", "</call_tool>", "</call>") and request.stop == ("\n\n",)
    assert (request.stream, request.usage, request.logprobs, request.return_ids, model_request.parts) == (
        True,
        True,
        True,
        True,
        False,
    )
    assert ParsedRequest.from_fields(json.loads(json.dumps(dataclasses.asdict(request)))).model_request.stop == list(
        model_request.stop
    )


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def answered(text, met="eos", tools=(TOOL,), parser="hermes", **body):
    request = chat.read(HI | {"tools": list(tools)} | body, MODELS, parser)
    answer = Answer("a1", 5, [1, 2], [Choice(text, [7, 8], [-0.5, -0.25], ["x", "y"], met)])
    return request, answer, chat.write(request, answer, parser)["choices"][0]


def test_calls_are_read_in_the_models_format():
    _, _, choice = answered(f"I add. {GOOD}")
    (made,) = choice["message"]["tool_calls"]
    assert made == {
        "id": "call_a1_0_0",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    assert choice["message"]["content"] == "I add." and choice["finish_reason"] == "tool_calls"


def test_a_call_in_tags_has_its_query_under_the_tools_name_for_it():
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}
    text = '<call_tool name="calculator">1 + 2</call_tool>'
    _, _, choice = answered(text, "</call_tool>", [tool], "call_tool")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"expression": "1 + 2"}'
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "eos"),
        ('<tool_call>{"name": "subtract", "arguments": {}}</tool_call>', "eos"),
        (GOOD + '<tool_call>{"name": "ad', "eos"),
        (GOOD, "length"),
    ],
)
def test_what_is_no_whole_call_stays_text(text, stop):
    _, _, choice = answered(text, stop)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == ("length" if stop == "length" else "stop")


@pytest.mark.parametrize("arguments", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": [2]}, {"a": 1, "b": True}])
def test_a_call_that_does_not_fit_a_strict_schema_stays_text(arguments):
    text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    assert "tool_calls" not in answered(text, tools=[strict])[2]["message"]
    assert "tool_calls" in answered(text)[2]["message"]
    assert "tool_calls" in answered(GOOD, tools=[strict])[2]["message"]


@pytest.mark.parametrize(
    "function",
    [
        {"name": "a b"},
        {"name": ""},
        {"name": "f", "parameters": {"properties": {"x": 3}}},
        {"name": "f", "parameters": {"properties": [], "required": []}},
        {"name": "f", "parameters": {"required": [{}]}},
        {"name": "f", "parameters": "{}"},
        {"name": "f", "returns": {}},
    ],
)
def test_tools_that_no_call_can_be_read_by_are_refused(function):
    assert refusal(chat, HI | {"tools": [{"type": "function", "function": function}]}).param.startswith("tools[0].")


def test_without_tools_a_call_is_text():
    assert answered(GOOD, tools=())[2]["message"]["content"] == GOOD
    assert answered(GOOD, tool_choice="none")[2]["message"]["content"] == GOOD


def test_the_clients_stop_string_is_cut_off_and_the_ids_are_kept():
    _, _, choice = answered("one END", "END", stop=["END"], return_token_ids=True, logprobs=True)
    assert choice["message"]["content"] == "one " and choice["token_ids"] == [7, 8]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["x", "y"]


def test_generate_answers_with_ids():
    request = generate.read(
        {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "stop_token_ids": [9]}}, MODELS, ""
    )
    assert request.model_request.ids == (1, 2) and request.model_request.stop_ids == (9,)
    choices = [Choice("x", [7, 9], [-1.0, -1 / 3], [], "eos"), Choice("", [], []), Choice("y", [2**31 - 1], [-0.0])]
    fields, numbers = Answer("r", 0, [1, 2], choices).to_frame()
    answer = Answer.from_frame(json.loads(json.dumps(fields)), numbers)  # the front gets the answer as a frame
    body = json.loads(json.dumps(generate.write(request, answer, "")))
    assert body["request_id"] == "r" and list(answer.prompt_ids) == [1, 2]
    assert [choice["token_ids"] for choice in body["choices"]] == [[7, 9], [], [2**31 - 1]]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", None, None]
    logprobs = [[entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in body["choices"]]
    assert logprobs == [[-1.0, -1 / 3], [], [-0.0]]


@given(
    text=st.text("abX", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.lists(st.text("abX", min_size=1, max_size=3), max_size=2, unique=True),
    n=st.integers(1, 2),
)
@pytest.mark.parametrize("dialect", [chat, completions, generate])
def test_a_stream_tells_what_the_whole_answer_tells(dialect, text, cuts, stop, n):
    """The chunks of a stream join to the whole answer, however it is cut into parts, and for all stop strings."""
    first = min((place for s in stop if (place := text.find(s)) >= 0), default=None)
    met = ""
    if first is not None:  # the engine ends an answer at the first complete stop string
        ends = [text.find(s) + len(s) for s in stop if s in text]
        text = text[: min(ends)]
        met = max((s for s in stop if text.endswith(s)), key=len)
    choice = Choice(text, list(range(len(text))), [-1.0] * len(text), list(text), met or "eos")
    answer = Answer("a", 1, [1], [choice] * n)
    body = {chat: HI, completions: {"prompt": "x"}, generate: {"token_ids": [1]}}[dialect]
    limits = {"stop": stop, "n": n, "logprobs": 0 if dialect is completions else True}
    if dialect is generate:
        body = body | {"sampling_params": limits | {"logprobs": 1}, "stream": True}
    else:
        body = body | limits | {"stream": True, "return_token_ids": True}
    request = dialect.read(body, MODELS, "hermes")
    stream, chunks = dialect.AnswerStream(request, "a", 1, "hermes"), []
    # Parts never hold a whole stop string, because it would have ended the answer.
    places = sorted({0, *(cut for cut in cuts if cut < len(text) - (len(met) > 0))})
    for begin, end in itertools.pairwise(places):
        part = Choice(text[begin:end], choice.tokens[begin:end], choice.logprobs[begin:end], choice.pieces[begin:end])
        for index in range(n):
            chunks += stream.part(index, part)
    chunks += stream.end(answer)
    whole = dialect.write(request, answer, "hermes")
    for index in range(n):
        entries = [entry for chunk in chunks for entry in chunk["choices"] if entry["index"] == index]
        assert [token for entry in entries for token in entry.get("token_ids", [])] == list(choice.tokens)
        if dialect is chat:
            assert (
                "".join(entry["delta"].get("content", "") for entry in entries)
                == whole["choices"][index]["message"]["content"]
            )
            assert entries[0]["delta"]["role"] == "assistant"
        elif dialect is completions:
            assert "".join(entry["text"] for entry in entries) == whole["choices"][index]["text"]
        assert [entry["finish_reason"] for entry in entries if entry["finish_reason"]] == ["stop"]


def test_a_streamed_call_comes_whole():
    request, answer, _ = answered(f"I add. {GOOD}", stream=True, stream_options={"include_usage": True})
    chunks = list(chat.AnswerStream(request, "a1", 5, "hermes").end(answer))
    (delta,) = [chunk["choices"][0]["delta"] for chunk in chunks[:1]]
    assert delta["tool_calls"][0]["index"] == 0 and delta["tool_calls"][0]["function"]["name"] == "add"
    assert delta["content"] == "I add." and chunks[1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
