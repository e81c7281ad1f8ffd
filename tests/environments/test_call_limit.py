"""Exactly as many calls are run as the limit allows, in any turns and of any kind; later text is never a call."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from podrl.environments.calls import SEPARATOR
from podrl.environments.config import EnvironmentConfig
from podrl.environments.protocol import Task, Turn
from podrl.environments.tools import EXCEEDED, WithTools

TOOL = {"name": "t", "key": "t", "schema": {}, "query": "query", "tag": "", "description": ""}
WRITTEN = {  # for each format a function that writes a call of the named tool; '' gives a call that cannot be read
    "call_tool": lambda name: f'<call_tool name="{name}">q</call_tool>' if name else "what</call_tool>",
    "hermes": lambda name: f"<tool_call>{json.dumps({'name': name}) if name else '{'}</tool_call>",
}


class Scripted:
    """A model that writes a given script, and counts the calls that are run."""

    def __init__(self, texts, stop):
        self.said, self.seen, self.run, self.out_of_calls = iter(texts), [], 0, False
        self._stop = stop

    async def observe(self, observation, *, stop, records=(), **_):
        self.seen += [record["text"] for record in records]
        text = next(self.said, "the end")
        own = next((end for end in stop if text.endswith(end)), None)
        return Turn(text, own or ("eos" if self._stop or "</call_tool>" not in text else "length"))

    async def call(self, key, name, arguments):
        self.run += 1
        return {"text": f"answer {self.run}", "failed": "", "seconds": 0.0, "replayed": False}


@given(
    form=st.sampled_from(sorted(WRITTEN)),
    most=st.integers(0, 5),
    turns=st.lists(st.lists(st.sampled_from(["t", "t", "t", "unknown", ""]), min_size=1, max_size=4), max_size=6),
)
def test_exactly_so_many_calls_count(form, most, turns):
    """Failed calls count too, and the calls of a turn count in their order. After the refusal of a call ('Max tool
    calls exceeded.') no text is a call."""
    if form == "call_tool":
        turns = [[name] for turn in turns for name in turn]
    model = Scripted(["".join(map(WRITTEN[form], turn)) for turn in turns], stop=form == "hermes")
    config = EnvironmentConfig(environment="tools", tools=("calculator",), parser=form, max_tool_calls=most)
    answered = WithTools(config, [TOOL], Task("p"), model)
    turn = asyncio.run(answered.say())
    wanted = [name for calls in turns for name in calls]
    assert model.run == sum(name == "t" for name in wanted[:most]) <= most
    assert model.out_of_calls == (len(wanted) > most) == (EXCEEDED in model.seen)
    before = len([text for text in model.seen if text != EXCEEDED])
    assert before == min(most, len(wanted)) and model.seen[:before].count(EXCEEDED) == 0
    assert SEPARATOR not in turn.text and answered.calls == len(turn.calls)


def test_a_call_in_a_thought_is_a_draft_and_the_turn_goes_on():
    draft, real = '<think>perhaps <call_tool name="t">a</call_tool>', 'no</think><call_tool name="t">b</call_tool>'
    model = Scripted([draft, real, "the end"], stop=False)
    config = EnvironmentConfig(environment="tools", tools=("calculator",))
    turn = asyncio.run(WithTools(config, [TOOL], Task("p"), model).say())
    assert (model.run, model.seen, turn.text) == (1, ["answer 1"], "the end")
    assert [call.arguments for call in turn.calls] == [{"": "b"}]


def test_a_tool_may_have_a_limit_of_its_own():
    model = Scripted([WRITTEN["call_tool"]("t")] * 3 + [WRITTEN["call_tool"]("other"), "the end"], stop=False)
    config = EnvironmentConfig(environment="tools", tools=("calculator",), max_calls_per_tool={"t": 2})
    answered = WithTools(config, [TOOL, {**TOOL, "name": "other"}], Task("p"), model)
    asyncio.run(answered.say())
    assert model.seen == ["answer 1", "answer 2", "Max calls of t exceeded.", "answer 3"]
    assert answered.calls == 4 and not model.out_of_calls
