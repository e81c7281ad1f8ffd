"""Two runs are compared by the loss weights of a step's tokens, and by which tokens were clipped."""

import dataclasses

import numpy as np
import pytest
from test_trace import recorded

from podrl.rundir import trace
from podrl.rundir.weights import compare


def traced(path, weight, clipped):
    """Makes a recorded step: token i has the advantage i - 2, and all tokens are in the loss. `weight` and `clipped`
    compute the other two columns from the number of tokens."""
    path.mkdir()
    recorded(path, [10])
    step = trace.read_step(path, 10)
    count = len(step.tokens["tokens"])
    columns = {"advantage": np.arange(count) - 2.0, "trained": np.ones(count), "weight": weight(count)}
    return dataclasses.replace(step, tokens={**step.tokens, **columns, "clipped": clipped(count)})


def test_tokens_are_counted_by_the_sign_of_their_advantage(tmp_path):
    before = traced(tmp_path / "a", lambda n: np.arange(n) - 2.0, np.zeros)
    now = traced(
        tmp_path / "b", lambda n: np.where(np.arange(n) < 5, 0.0, np.arange(n) - 2.0), lambda n: np.arange(n) < 5
    )
    count = len(before.tokens["tokens"])
    found = compare(before, now, most=2)
    positive, negative, zero, whole = found.counts
    assert negative == ["negative", "2", "0", "2", "1.5", "0", "2"]
    assert zero == ["zero", "1", "0", "1", "0", "0", "0"]
    assert positive[:4] == ["positive", str(count - 3), "0", "2"] and positive[-1] == "2"
    assert whole[1] == str(count) and whole[3] == "5" and whole[-1] == "4"
    # The two largest changes: weights -2 and 2 became 0. Positions are counted from the sample's first token.
    assert [row[1:] for row in found.changed] == [
        ["0", "0", "0", "-2", "-2", "0", "0", "1"],
        ["0", "0", "4", "2", "2", "0", "0", "1"],
    ]
    assert found.changed[0][0] == repr(before.pieces[int(before.tokens["tokens"][0])])


def test_what_cannot_be_compared_is_said(tmp_path):
    whole = traced(tmp_path / "a", np.ones, np.zeros)
    (tmp_path / "b").mkdir()
    recorded(tmp_path / "b", [10])
    with pytest.raises(ValueError, match="in steps that update a policy"):
        compare(whole, trace.read_step(tmp_path / "b", 10))
    other = dataclasses.replace(whole, tokens={**whole.tokens, "tokens": whole.tokens["tokens"] + 1})
    with pytest.raises(ValueError, match="other samples"):
        compare(whole, other)
