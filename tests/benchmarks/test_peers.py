"""Comparisons with other frameworks: each virtual environment is built once, and the figures come from the rounds of
both sides."""

import pytest

from benchmarks import peers
from benchmarks.peers.trl_job import REWARDS
from podrl.rewards import reference


def test_an_environment_is_built_once_and_again_where_it_was_left_half_way(tmp_path, monkeypatch):
    commands, fails = [], iter([True, False, False])

    def output(command):
        commands.append(command)
        (tmp_path / "env-trl").mkdir(exist_ok=True)
        if "install" in command and next(fails):
            raise ValueError("no network")
        return ""

    monkeypatch.setattr(peers, "_output", output)
    with pytest.raises(ValueError, match="no network"):
        peers._environment(tmp_path, "trl")
    assert peers._environment(tmp_path, "trl") == tmp_path / "env-trl" / "bin" / "python"
    assert len(commands) == 4
    peers._environment(tmp_path, "trl")
    assert len(commands) == 4
    (tmp_path / "env-trl" / "built.txt").write_text("trl==0.1\n")
    peers._environment(tmp_path, "trl")
    assert len(commands) == 6


def test_ratios_are_of_rounds_and_without_the_first_steps():
    ours = [{"step_s": [9.0, 9.0, 1.0, 1.0], "rewards": [0, 1, 2, 3], "tokens": 10.0} for _ in range(3)]
    theirs = [{"step_s": [9.0, 9.0, s, s], "rewards": [1, 1, 1, 5], "tokens": 20.0} for s in (2.0, 3.0, 10.0)]
    found = peers.compared({"podrl": ours, "trl": theirs})
    assert found["ratio"] == 3 and found["trl_rounds"] == [2, 3, 10] and found["podrl_step_s"] == 1
    assert (found["podrl_first_reward"], found["podrl_last_reward"], found["trl_last_reward"]) == (0, 3, 5)
    assert found["trl_tokens"] == 20


def test_both_sides_have_the_same_rewards():
    assert all(callable(getattr(reference, name)) for name in REWARDS)
