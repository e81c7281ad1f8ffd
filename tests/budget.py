"""Bounds the time that a run of CI spends on tests that `.ci/nightly` runs, too."""

import os
import time
from typing import Any

import pytest

ENDS = "PODRL_CI_ENDS"  # environment variable of .ci/run: when the time is over, in seconds of the epoch


def leave_to_nightly(item: Any) -> None:
    """Skips a test that is marked nightly if the time of this run of CI is over; for the hook pytest_runtest_setup."""
    ends = os.environ.get(ENDS)
    if ends and time.time() > float(ends) and item.get_closest_marker("nightly"):
        pytest.skip("left to .ci/nightly: the time of this run is over")
