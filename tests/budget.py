"""Bounds the time that `.ci/run` spends on tests with the mark `nightly`; `.ci/nightly` runs these tests, too."""

import os
import time
from typing import Any

import pytest

ENDS = "PODRL_CI_ENDS"  # environment variable that .ci/run sets: when its time is over, in seconds since 1970


def leave_to_nightly(item: Any) -> None:
    """Skips a test with the mark `nightly` once the time of this run of CI is over; called by the hook
    pytest_runtest_setup."""
    ends = os.environ.get(ENDS)
    if ends and time.time() > float(ends) and item.get_closest_marker("nightly"):
        pytest.skip("left to .ci/nightly: the time of this run is over")
