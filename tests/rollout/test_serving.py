"""Answers of podrl.serve: sampled together as alone, told in parts, and gone on from without encoding them again."""

import dataclasses
import itertools

import jax
import pytest

from podrl import serve
from podrl.environments.wire import chat, completions, generate
from podrl.environments.wire.asks import Answer, Part, Refused

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
    serving, context = serve._loaded(serve._parser().parse_args(arguments), jax.devices()[:1])
    assert context == 160
    yield serving
    serving.close()


def ask(serving, dialect, **body):
    number = next(numbers)
    serving.ask(number, dialect.read(body, MODELS, "call_tool"))
    return number


def run(serving, until=None):
    """Steps until all is answered, or some number of steps; what was told, by number."""
    told = {}
    for _ in itertools.count() if until is None else range(until):
        if not serving.busy:
            break
        for number, said in serving.step():
            told.setdefault(number, []).append(said)
    return told


def answer(serving, dialect, **body):
    number = ask(serving, dialect, **body)
    return run(serving)[number][-1]


def sampled(answer):
    assert isinstance(answer, Answer)
    return [(list(choice.tokens), list(choice.logprobs), choice.text, choice.stop) for choice in answer.choices]


def user(text):
    return [{"role": "user", "content": text}]


def test_an_answer_is_what_it_is_alone_whenever_it_joins_the_batch(serving):
    bodies = [{"messages": user(f"What is {i} + 17?"), "seed": i, "n": 1 + i % 3, "max_tokens": 40} for i in range(8)]
    alone = [sampled(answer(serving, chat, **body)) for body in bodies]
    together, told = [], {}
    for body in bodies:
        together.append(ask(serving, chat, **body))
        for number, said in run(serving, until=1).items():
            told.setdefault(number, []).extend(said)
    told |= run(serving)
    assert [sampled(told[number][-1]) for number in together] == alone
    assert len({str(one) for one in alone}) == len(alone)


def test_requests_without_a_seed_differ_and_are_the_same_in_the_next_server(serving):
    body = {"prompt": "How", "max_tokens": 12, "n": 2}
    serving._repeated.clear()
    first = [sampled(answer(serving, completions, **body)) for _ in range(2)]
    serving._repeated.clear()
    assert [sampled(answer(serving, completions, **body)) for _ in range(2)] == first
    assert len({str(one) for answers in first for one in answers}) == 4


def test_parts_join_to_the_answer(serving):
    number = ask(serving, completions, prompt="What is 4 + 5?", max_tokens=60, n=2, seed=3, stream=True, logprobs=0)
    *parts, whole = run(serving)[number]
    assert parts and all(isinstance(part, Part) and part.id == whole.id for part in parts)
    for index, choice in enumerate(whole.choices):
        told = [part.choice for part in parts if part.index == index]
        tokens = [token for part in told for token in part.tokens]
        assert tokens == list(choice.tokens)[: len(tokens)]
        assert choice.text.startswith("".join(part.text for part in told))
        assert [p for part in told for p in part.pieces] == list(choice.pieces)[: len(tokens)]
    assert sampled(answer(serving, completions, prompt="What is 4 + 5?", max_tokens=60, n=2, seed=3)) == sampled(whole)


def test_limits_and_stops_are_honoured(serving):
    eight = answer(serving, generate, token_ids=[2, 8, 180], sampling_params={"max_tokens": 8, "seed": 1})
    ((tokens, logprobs, _, stop),) = sampled(eight)
    assert len(tokens) == len(logprobs) == 8 and stop == "length" and eight.prompt_ids == [2, 8, 180]
    text = sampled(answer(serving, completions, prompt="What", max_tokens=8, temperature=0))[0][2]
    cut = answer(serving, completions, prompt="What", max_tokens=8, temperature=0, stop=[text[3:5]])
    assert cut.choices[0].text == text[: text.index(text[3:5]) + 2] and cut.choices[0].stop == text[3:5]
    ids = answer(serving, generate, token_ids=[2, 8, 180], sampling_params={"stop_token_ids": tokens[2:3], "seed": 1})
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
    with pytest.raises(Refused) as caught:
        ask(serving, generate, **body)
    assert caught.value.code == code and not serving.busy
    assert code != "context_length_exceeded" or "context length" in str(caught.value)


def test_a_request_that_is_dropped_leaves_the_batch(serving):
    kept = ask(serving, completions, prompt="How", max_tokens=30, seed=5)
    dropped = ask(serving, completions, prompt="What", max_tokens=100, temperature=3, n=3)
    told = run(serving, until=2)
    serving.drop(dropped)
    told |= run(serving)
    assert list(told) == [kept] and sampled(told[kept][-1]) == sampled(
        answer(serving, completions, prompt="How", max_tokens=30, seed=5)
    )


def test_a_tools_answer_goes_on_with_the_sampled_ids(serving):
    before = serving.histories.extended
    messages = user("What is 4821*7703?")
    wanted = chat.read({"messages": messages, "tools": [CALCULATOR], "n": 64, "seed": 1}, MODELS, "call_tool")
    serving.ask(number := next(numbers), wanted)
    first = run(serving)[number][-1]
    written = [choice["message"] for choice in chat.write(wanted, first, "call_tool")["choices"]]
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
    assert not set(behind) & set(tokenizer.eos_ids)  # what a tool says stays text
    third = answer(
        serving, chat, messages=[*given["messages"], said(second), *user("And 2 + 2?")], tools=[CALCULATOR], seed=1
    )
    known = [*second.prompt_ids, *second.choices[0].tokens]
    assert third.prompt_ids[: len(known)] == known
    assert tokenizer.decode(third.prompt_ids[len(known) :]).endswith("user\nAnd 2 + 2?\nmodel\n")
    changed = dataclasses.replace(wanted.ask, messages=[*messages, {**written[index], "content": "x"}, output])
    assert serving.histories.encode(changed.messages, changed.tools)[: len(known)] != known


def said(answer):
    return chat.message(answer.choices[0], stop=(), tools=[CALCULATOR], parser="call_tool", id=f"{answer.id}_0")
