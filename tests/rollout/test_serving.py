"""Tests podrl.serve's answers: equal alone and in a batch, sent in parts, and continued from their sampled ids."""

import contextlib
import dataclasses
import itertools
import json
import shutil
import threading

import jax
import pytest
from waits import PATIENCE_S, until

from podrl import serve
from podrl.environments.front import FrontSettings
from podrl.environments.wire import chat, completions, generate, reward
from podrl.environments.wire.requests import Answer, AnswerPart, RefusedRequest
from podrl.storage import hub
from podrl.workers.user_code import Limits

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODELS = ["policy"]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
numbers = itertools.count()


@pytest.fixture(scope="module")
def serving():
    arguments = ["--model=tiny_tools", "--parser=call_tool", "--lanes=8", "--context=160"]
    serving, context = serve._load(serve._parser().parse_args(arguments), jax.devices()[:1])
    assert context == 160
    yield serving
    serving.close()


def test_history_append_goes_on_where_a_template_drops_thoughts(tmp_path):
    """The option --history reaches the encoder of conversations; the template drops thoughts as Qwen3's does."""
    shutil.copytree(hub.local("tiny_tools"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    forgets = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content if loop.last or m.role == 'user' else "
    forgets += "m.content.split('</think>')[-1] }}<eos>{% endfor %}{% if add_generation_prompt %}model: {% endif %}"
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": forgets}))
    arguments = [f"--model={tmp_path / 'model'}", "--lanes=8", "--context=160", "--history=append"]
    serving, _ = serve._load(serve._parser().parse_args(arguments), jax.devices()[:1])
    try:
        said = {"role": "assistant", "content": "<think>1</think>2"}
        known = [*serving.histories.encode(user("1 + 1?"), []), *serving._tokenizer.encode("<think>1</think>2<eos>")]
        serving.histories.remember(user("1 + 1?"), [], [(said, known)])
        prompt = answer(serving, chat, messages=[*user("1 + 1?"), said, *user("And?")], max_tokens=1).prompt_ids
        assert prompt[: len(known)] == known
    finally:
        serving.close()


def add(serving, dialect, **body):
    number = next(numbers)
    serving.add(number, dialect.read(body, MODELS, "call_tool"))
    return number


def run(serving, until=None):
    """Steps the server until all requests are answered, or `until` times; returns each request's updates by number."""
    outputs = {}
    for _ in itertools.count() if until is None else range(until):
        if not serving.busy:
            break
        for number, output in serving.step():
            outputs.setdefault(number, []).append(output)
    return outputs


def answer(serving, dialect, **body):
    number = add(serving, dialect, **body)
    return run(serving)[number][-1]


def sampled(answer):
    assert isinstance(answer, Answer)
    return [(list(choice.tokens), list(choice.logprobs), choice.text, choice.stop) for choice in answer.choices]


def user(text):
    return [{"role": "user", "content": text}]


def test_an_answer_is_what_it_is_alone_whenever_it_joins_the_batch(serving):
    bodies = [{"messages": user(f"What is {i} + 17?"), "seed": i, "n": 1 + i % 3, "max_tokens": 40} for i in range(8)]
    alone = [sampled(answer(serving, chat, **body)) for body in bodies]
    together, outputs = [], {}
    for body in bodies:
        together.append(add(serving, chat, **body))
        for number, new in run(serving, until=1).items():
            outputs.setdefault(number, []).extend(new)
    outputs |= run(serving)
    assert [sampled(outputs[number][-1]) for number in together] == alone
    assert len({str(one) for one in alone}) == len(alone)


def test_requests_without_a_seed_differ_and_are_the_same_in_the_next_server(serving):
    body = {"prompt": "How", "max_tokens": 12, "n": 2}
    serving._repeated.clear()
    first = [sampled(answer(serving, completions, **body)) for _ in range(2)]
    serving._repeated.clear()
    assert [sampled(answer(serving, completions, **body)) for _ in range(2)] == first
    assert len({str(one) for answers in first for one in answers}) == 4


def test_parts_join_to_the_answer(serving):
    number = add(serving, completions, prompt="What is 4 + 5?", max_tokens=60, n=2, seed=3, stream=True, logprobs=0)
    *parts, whole = run(serving)[number]
    assert parts and all(isinstance(part, AnswerPart) and part.id == whole.id for part in parts)
    for index, choice in enumerate(whole.choices):
        outputs = [part.choice for part in parts if part.index == index]
        tokens = [token for part in outputs for token in part.tokens]
        assert tokens == list(choice.tokens)[: len(tokens)]
        assert choice.text.startswith("".join(part.text for part in outputs))
        assert [p for part in outputs for p in part.pieces] == list(choice.pieces)[: len(tokens)]
    assert sampled(answer(serving, completions, prompt="What is 4 + 5?", max_tokens=60, n=2, seed=3)) == sampled(whole)


def test_limits_and_stops_are_honoured(serving):
    eight = answer(serving, generate, token_ids=[2, 8, 180], sampling_params={"max_tokens": 8, "seed": 1})
    ((tokens, logprobs, _, stop),) = sampled(eight)
    assert len(tokens) == len(logprobs) == 8 and stop == "length" and eight.prompt_ids == [2, 8, 180]
    text = sampled(answer(serving, completions, prompt="What", max_tokens=8, temperature=0))[0][2]
    cut = answer(serving, completions, prompt="What", max_tokens=8, temperature=0, stop=[text[3:5]])
    assert cut.choices[0].text == text[: text.index(text[3:5]) + 2] and cut.choices[0].stop == text[3:5]
    # The server leaves out of `stop_token_ids` the ids that end every answer, so the list is not too long.
    given = [*tokens[2:3], *serving._tokenizer.eos_ids * 20]
    ids = answer(serving, generate, token_ids=[2, 8, 180], sampling_params={"stop_token_ids": given, "seed": 1})
    assert ids.choices[0].tokens == tokens[: tokens.index(tokens[2]) + 1]
    full = answer(serving, generate, token_ids=[2, *[20] * 150], sampling_params={"seed": 2, "temperature": 3})
    assert len(full.choices[0].tokens) == 9 and full.choices[0].stop == "length"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"token_ids": [2] * 160}, "context_length_exceeded"),
        ({"token_ids": [100_000]}, "invalid_prompt"),
        ({"token_ids": [2], "sampling_params": {"stop_token_ids": [100_000]}}, "unsupported_parameter"),
        ({"token_ids": [2], "sampling_params": {"stop_token_ids": list(range(60))}}, "unsupported_parameter"),
        ({"token_ids": [2], "sampling_params": {"stop": ["a<eos>"]}}, "unsupported_parameter"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused(serving, body, code):
    with pytest.raises(RefusedRequest) as caught:
        add(serving, generate, **body)
    assert caught.value.code == code and not serving.busy
    assert code != "context_length_exceeded" or "context length" in str(caught.value)


def test_rewards_are_refused_outside_training(serving):
    request = reward.read({"request": "chatcmpl-1", "reward": 1}, ["policy"], "call_tool")
    with pytest.raises(RefusedRequest, match="This endpoint serves a checkpoint and takes no rewards"):
        serving.add(0, request)


def test_a_request_that_is_dropped_leaves_the_batch(serving):
    kept = add(serving, completions, prompt="How", max_tokens=30, seed=5)
    dropped = add(serving, completions, prompt="What", max_tokens=100, temperature=3, n=3)
    outputs = run(serving, until=2)
    serving.cancel(dropped)
    outputs |= run(serving)
    assert list(outputs) == [kept] and sampled(outputs[kept][-1]) == sampled(
        answer(serving, completions, prompt="How", max_tokens=30, seed=5)
    )


def test_requests_that_wait_for_lanes_may_be_dropped(serving):
    added = [add(serving, completions, prompt=f"What {i}", max_tokens=20, temperature=3, n=6) for i in range(6)]
    outputs = run(serving, until=1)
    for number in added[1:]:
        serving.cancel(number)
    assert list(outputs | run(serving)) == added[:1] and not serving._session.open and not serving._session.busy


def test_a_tools_answer_goes_on_with_the_sampled_ids(serving):
    before = serving.histories.extended
    messages = user("What is 4821*7703?")
    request = chat.read({"messages": messages, "tools": [CALCULATOR], "n": 64, "seed": 1}, MODELS, "call_tool")
    serving.add(number := next(numbers), request)
    first = run(serving)[number][-1]
    written = [choice["message"] for choice in chat.write(request, first, "call_tool")["choices"]]
    index = next(i for i, message in enumerate(written) if "tool_calls" in message)
    (call,) = written[index]["tool_calls"]
    output = {"role": "tool", "tool_call_id": call["id"], "content": "37136163 <eos>"}
    given = {"messages": [*messages, written[index], output], "tools": [CALCULATOR], "seed": 1}
    second = answer(serving, chat, **given)
    known = [*first.prompt_ids, *first.choices[index].tokens]
    assert second.prompt_ids[: len(known)] == known and serving.histories.extended == before + 1
    tokenizer = serving._tokenizer
    behind = second.prompt_ids[len(known) :]
    assert tokenizer.decode(behind) == "\n<tool_output>37136163 <eos></tool_output>\n\n"
    assert not set(behind) & set(tokenizer.eos_ids)  # a tool's output stays text
    third = answer(
        serving, chat, messages=[*given["messages"], assistant(second), *user("And 2 + 2?")], tools=[CALCULATOR], seed=1
    )
    known = [*second.prompt_ids, *second.choices[0].tokens]
    assert third.prompt_ids[: len(known)] == known
    assert tokenizer.decode(third.prompt_ids[len(known) :]).endswith("user\nAnd 2 + 2?\nmodel\n")
    changed = dataclasses.replace(
        request.model_request, messages=[*messages, {**written[index], "content": "x"}, output]
    )
    assert serving.histories.encode(changed.messages, changed.tools)[: len(known)] != known


def assistant(answer):
    return chat.assistant_message(
        answer.choices[0], stop=(), tools=[CALCULATOR], parser="call_tool", id=f"{answer.id}_0"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--lanes=0", "--lanes=0 must be at least 1"),
        ("--context=1", "--context=1 must be at least 2"),
        ("--port=70000", "--port=70000 must be from 0 to 65535"),
        ("--seed=-1", "--seed=-1 must be at least 0"),
        ("--temperature=nan", "--temperature=nan must be 0"),
        ("--top_p=2", "--top_p=2.0 must be a number in"),
        ("--model=/nowhere", "--model=/nowhere is not a directory"),
    ],
)
def test_wrong_arguments_are_refused_by_name(argument, message):
    args = serve._parser().parse_args(["--model=tiny", argument])
    with pytest.raises(ValueError, match=message):
        serve._check(args)
        serve._load_model(args.model, None, None)


# The tests below use OpenAI's client, as agent programs do.


@pytest.fixture(scope="module")
def front(serving):
    """A front whose requests `answering` answers. Its `grace_s` is long enough for every retry of a client."""
    pytest.importorskip("openai", reason="needs package openai, of the extra [test]")
    settings = FrontSettings(parser="call_tool", context_tokens=160, grace_s=2 * PATIENCE_S)
    with serve.PolledFront(settings, Limits()) as front:
        yield front


@contextlib.contextmanager
def answering(serving, front):
    """Runs podrl.serve's loop on a thread until the block of the `with` statement ends."""
    ended = threading.Event()
    thread = threading.Thread(target=serve.run, args=(serving, front, ended.is_set))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        front.wake()
        thread.join()


@contextlib.contextmanager
def client(front, **settings):
    import openai

    given = {"base_url": front.address, "api_key": front.key, "max_retries": 0, "timeout": PATIENCE_S}
    with openai.OpenAI(**{**given, **settings}) as client:
        yield client


class Polled:
    """A front whose polls return prepared requests, and which keeps the replies in `replies`."""

    def __init__(self, *events):
        self._events, self.replies = [*events], {}

    def poll(self, timeout_s):
        return self._events.pop(0) if self._events else []

    def reply(self, number, message):
        self.replies[number] = message


def test_what_is_open_may_finish_when_the_server_ends(serving, monkeypatch):
    monkeypatch.setattr(serve, "_FINISH_S", PATIENCE_S)  # a slow machine may need more than 10 s
    request = completions.read({"prompt": "How", "max_tokens": 30, "seed": 1}, MODELS, "")
    front, ends = Polled([(-1, request)], [(-2, request)]), iter([False])
    serve.run(serving, front, lambda: next(ends, True))
    assert isinstance(front.replies[-1], Answer) and front.replies[-2].status == 503
    serve.run(serving, front, lambda: True)  # no request is open


def test_requests_still_open_at_the_deadline_are_given_up(serving, monkeypatch):
    monkeypatch.setattr(serve, "_FINISH_S", 0.0)
    request = completions.read({"prompt": "How", "max_tokens": 150, "seed": 1, "temperature": 3}, MODELS, "")
    front, ends = Polled([(-3, request)]), iter([False])
    serve.run(serving, front, lambda: next(ends, True))
    assert not front.replies and not serving.busy


def test_openais_client_gets_answers(serving, front):
    import openai

    arguments = {"model": "policy", "messages": user("What is 4 + 5?"), "seed": 4, "n": 2, "max_tokens": 40}
    with client(front) as openai_client, answering(serving, front):
        assert [model.id for model in openai_client.models.list()] == ["policy", "policy:aside"]
        whole = openai_client.chat.completions.create(**arguments, logprobs=True, extra_body={"return_token_ids": True})
        streamed = {0: "", 1: ""}
        chunks = openai_client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        for chunk in chunks:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
            usage = chunk.usage
        assert [streamed[i] for i in range(2)] == [choice.message.content for choice in whole.choices]
        assert usage == whole.usage and usage.completion_tokens == sum(len(c.token_ids) for c in whole.choices)
        for choice in whole.choices:
            assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
        text = openai_client.completions.create(
            model="policy", prompt=whole.prompt_token_ids, seed=4, max_tokens=40, n=2
        )
        assert [choice.text for choice in text.choices] == list(streamed.values())
        aside = openai_client.chat.completions.create(**{**arguments, "model": "policy:aside"})
        assert [choice.message.content for choice in aside.choices] == list(streamed.values())
        with pytest.raises(openai.BadRequestError, match="response_format"):
            openai_client.chat.completions.create(**arguments, response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            openai_client.chat.completions.create(model="policy", messages=user("word " * 200))
    with client(front, api_key="podrl-x") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_openais_client_calls_tools_until_it_is_told_the_answer(serving, front):
    before = serving.histories.extended
    messages = user("What is 4821*7703?")
    with client(front) as openai_client, answering(serving, front):
        arguments = {"model": "policy", "tools": [CALCULATOR], "seed": 1}
        many = openai_client.chat.completions.create(**arguments, messages=messages, n=64)
        choice = next(choice for choice in many.choices if choice.message.tool_calls)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert "expression" in json.loads(call.function.arguments)
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "37136163"})
        final = openai_client.chat.completions.create(**arguments, messages=messages)
    assert final.choices[0].message.content and serving.histories.extended == before + 1


def test_openais_client_that_retries_too_early_is_answered_once(serving, front):
    """The answer is held back until the client has timed out and asks again; the retry joins the open request."""
    import openai

    retried = threading.Event()

    def sending(request):
        if request.headers["x-stainless-retry-count"] != "0":
            retried.set()

    # Retries go on until one of them finds the answer, however slow the machine is.
    patience = {"timeout": 0.5, "max_retries": 1000}
    with (
        openai.DefaultHttpxClient(event_hooks={"request": [sending]}) as hooked,
        client(front, http_client=hooked, **patience) as openai_client,
    ):
        answers, events = [], []
        arguments = {"model": "policy", "prompt": "How", "max_tokens": 3}
        thread = threading.Thread(target=lambda: answers.append(openai_client.completions.create(**arguments)))
        thread.start()
        until(lambda: events.extend(front.poll(0.0)) or events)
        assert retried.wait(PATIENCE_S)
        assert len(events) == 1 and not front.poll(0.0)
        serving.add(*events[0])
        for number, outputs in run(serving).items():
            front.reply(number, outputs[-1])
        thread.join(PATIENCE_S)
    assert len(answers) == 1 and not front.poll(0.0)
