"""The text that rewards and accuracies read of a sample that received observations while it was generated."""

import types
from typing import Any

import numpy as np
import pytest

from podrl.environments import calls
from podrl.learner.evaluate import _Scores
from podrl.learner.generation import Generator
from podrl.rewards import math_answer
from podrl.rewards.reference import accuracies

MODEL = {"by": "model", "versions": [0, 0], "tokens": 4}
SAYS = (r"Solution: \\boxed{42}", "Final answer: $42$", "<answer>42</answer>", "The answer is 42.")


def episode(says, by="search", **more):
    told = calls.format_of("call_tool", ["search"]).observation([calls.ToolOutput([says])], "ab12cd34").text
    call = '<call_tool name="search">the problem</call_tool>'
    turns = [MODEL | {"text": call}, {"by": by, "text": told}, MODEL | {"text": "I do not know."}]
    return (
        call + told + "I do not know.",
        call + "I do not know.",
        {"turns": turns, "metrics": {}, "seconds": 0.0, **more},
    )


def given(completion, said, own):
    """Returns the arguments that reward functions get for a sample: `completions` and fields."""
    generator: Any = object.__new__(Generator)
    tokenizer = types.SimpleNamespace(decode=lambda ids: own)
    generator._cluster = types.SimpleNamespace(env_client=object(), tokenizer=tokenizer)
    added = []
    generator._end(types.SimpleNamespace(add=lambda *a: added.append(a)), 0, 0, completion, said, [1, 2])
    return added[0][1:]


@pytest.mark.parametrize("by", ["search", "model", "environment"])
@pytest.mark.parametrize("says", SAYS)
def test_a_tools_words_are_not_the_models(says, by):
    whole, own, said = episode(says, by)
    text, fields = given(whole, said, own)
    assert text == own == fields["model_text"] and fields["sample_text"] == whole and says.split()[-1][:2] not in text
    assert math_answer.math_equal(["q"], [text], ["42"]) == [0.0]


def test_the_text_that_an_environment_gives_is_scored():
    assert given("<answer>42</answer>", episode("x", text="<answer>42</answer>")[2], "own")[0] == "<answer>42</answer>"
    # This sample received no observation.
    assert given("alone", {"turns": [MODEL | {"text": "alone"}]}, "alone")[0] == "alone"


def test_accuracies_read_the_models_words():
    whole, _, said = episode("<answer>42</answer>")
    whole = whole.replace("&lt;", "<")  # a user's environment does not escape tags
    held: Any = types.SimpleNamespace(scorer=accuracies, name="")
    scores = _Scores(held, "greedy", 1)
    prompts = types.SimpleNamespace(text=["q"], length_P=np.array([1]), fields={"answer": ["42"]})
    rollouts: Any = types.SimpleNamespace(
        completions=[whole], episodes=[said], prompts=prompts, group_B=np.zeros(1, np.int32)
    )
    scores.add(rollouts, {}, show=1)
    assert scores.by_metric()["eval/greedy_answer"].tolist() == [[0.0]]
