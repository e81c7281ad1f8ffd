"""CI leaves a test to .ci/nightly if the test is marked nightly and the time of CI's run is over."""

import time

import pytest
from budget import ENDS, leave_to_nightly


class Item:
    """Stands in for a test that pytest collected; it has the marks that are named."""

    def __init__(self, *marks):
        self._marks = marks

    def get_closest_marker(self, name):
        return name if name in self._marks else None


def test_only_nightly_tests_are_left_out_and_only_after_the_time(monkeypatch):
    monkeypatch.setenv(ENDS, str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match=r"left to \.ci/nightly"):
        leave_to_nightly(Item("nightly"))
    leave_to_nightly(Item("slow"))
    monkeypatch.setenv(ENDS, str(time.time() + 1e6))
    leave_to_nightly(Item("nightly"))
    monkeypatch.delenv(ENDS)
    leave_to_nightly(Item("nightly"))
