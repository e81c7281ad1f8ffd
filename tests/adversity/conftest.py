"""Leaves tests that are marked nightly to .ci/nightly when a run of CI has taken its time."""

import pytest
from budget import leave_to_nightly


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    leave_to_nightly(item)
