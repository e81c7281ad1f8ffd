"""Bounds the time of a stage of CI: what it has not begun by then is left to `.ci/nightly`."""

import os
import time
from typing import Any

import pytest

ENDS = "PODRL_CI_ENDS"  # environment variable of .ci/run: when the time of a stage is over, in seconds of the epoch
NEAR = pytest.StashKey[bool]()  # whether a collected test runs in any case: near a change, and short


def leave_to_nightly(item: Any) -> None:
    """Skips a test that is not near a change if the time of its stage is over; for the hook pytest_runtest_setup."""
    ends = os.environ.get(ENDS)
    if ends and time.time() > float(ends) and not item.stash.get(NEAR, False):
        pytest.skip("left to .ci/nightly: the time of this stage is over")
