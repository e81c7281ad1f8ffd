"""Profiles begin and end at the requested steps, by flag or signal, and never end a run."""

import os
import signal

import jax
import jax.numpy as jnp
import pytest

from podrl.rundir.profiler import Profiler, parse_steps
from podrl.rundir.run import Run


class Calls:
    """Stands in for jax's profiler and records its calls, because a process can have only one profiler."""

    def __init__(self, monkeypatch, error=None):
        self.made, self._error = [], error
        monkeypatch.setattr(jax.profiler, "start_trace", self._start)
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.made.append("end"))

    def _start(self, folder, profiler_options):
        if self._error is not None:
            raise self._error
        self.made.append(folder)


def test_the_flag_is_two_steps_in_their_order():
    assert parse_steps("120:125") == (120, 125) and parse_steps("3:3") == (3, 3) and parse_steps("") is None
    for wrong in ("5", "5:3", "0:2", "a:b", "1:2:3", "-1:2"):
        with pytest.raises(ValueError, match=r"--profile=.*as in 120:125"):
            parse_steps(wrong)


def test_steps_that_are_asked_for_are_profiled(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    profiler = Profiler(str(tmp_path), "rollout 1", (2, 3))
    seen = []
    for step in range(6):
        profiler.decide(step)
        profiler.after(step)
        seen.append(len(calls.made))
    assert calls.made == [str(tmp_path / "profile" / "rollout_1"), "end"]
    assert seen == [0, 1, 1, 2, 2, 2]  # the profile begins after step 1 and ends after step 3


def test_a_run_that_resumes_within_profiles_the_rest_and_a_late_one_nothing(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    late = Profiler(str(tmp_path), steps=(2, 3))
    late.after(3)
    assert calls.made == []
    within = Profiler(str(tmp_path), steps=(2, 5))
    within.after(3)
    within.close()
    assert len(calls.made) == 2


def test_a_signal_asks_for_the_next_steps_of_all_processes(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    with Run(tmp_path / "run") as run:
        other = Profiler(str(tmp_path / "other"), "rollout 0")
        os.kill(os.getpid(), signal.SIGUSR2)
        for step in range(7, 12):
            other.planned = run.profiler.decide(step)  # as the leader's message says
            run.profiler.after(step)
            other.after(step)
    mine, theirs = str(tmp_path / "run" / "profile" / "trainer_0"), str(tmp_path / "other" / "profile" / "rollout_0")
    assert calls.made == [mine, theirs, "end", "end"]


def test_a_profile_that_cannot_begin_is_said_and_not_tried_again(tmp_path, monkeypatch, caplog):
    Calls(monkeypatch, RuntimeError("another profile is under way"))
    profiler = Profiler(str(tmp_path), steps=(1, 9))
    for step in range(4):
        profiler.after(step)
    assert caplog.text.count("another profile is under way") == 1


def test_a_profile_holds_what_ran(tmp_path):
    profiler = Profiler(str(tmp_path), steps=(1, 1))
    profiler.after(0)
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((8, 8))))
    profiler.after(1)
    (found,) = (tmp_path / "profile" / "trainer_0").rglob("*.xplane.pb")
    assert b"jit_" in found.read_bytes()
    assert b"step_num" in found.read_bytes(), "without step_num, XProf shows no times per step"
