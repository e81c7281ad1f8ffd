"""When CI leaves a test to .ci/nightly."""

import time

import pytest
from budget import ENDS, NEAR, leave_to_nightly


class Item:
    """A collected test."""

    def __init__(self, *, near):
        self.stash = pytest.Stash()
        self.stash[NEAR] = near


def test_only_tests_far_from_the_change_are_left_out_and_only_after_the_time(monkeypatch):
    monkeypatch.setenv(ENDS, str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match=r"left to \.ci/nightly"):
        leave_to_nightly(Item(near=False))
    leave_to_nightly(Item(near=True))
    monkeypatch.setenv(ENDS, str(time.time() + 1e6))
    leave_to_nightly(Item(near=False))
    monkeypatch.delenv(ENDS)
    leave_to_nightly(Item(near=False))
