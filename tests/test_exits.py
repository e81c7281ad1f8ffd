"""A test that calls os._exit fails; it does not end the process in which other tests wait."""

import os
import sys
import threading

import exits
import pytest
from exits import exit_only_between_tests
from waits import until


def test_a_call_of_exit_by_a_test_is_an_error_of_the_test():
    with pytest.raises(AssertionError, match=r"'MainThread' called os\._exit\(42\) .* during .*test_a_call_of_exit"):
        os._exit(42)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_of_exit_on_another_thread_ends_only_that_thread():
    thread = threading.Thread(target=os._exit, args=(42,))
    thread.start()
    thread.join()


def test_a_process_that_a_test_forks_ends_itself(monkeypatch):
    codes = []
    leave = exit_only_between_tests(codes.append)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    leave(3)
    assert codes == [3]


def test_a_test_that_waits_for_the_exit_for_ever_is_ended_after_all(monkeypatch, capsys):
    monkeypatch.setattr(exits, "_STUCK_S", 0.01)
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    codes = []
    with pytest.raises(AssertionError):
        exit_only_between_tests(codes.append)(7)
    until(lambda: codes == [7], "the exit")
    assert "called os._exit(7)" in capsys.readouterr().err
