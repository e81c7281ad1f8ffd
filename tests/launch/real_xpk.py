"""Where the real xpk is: beside this interpreter (CI links it there from an environment of its own) or on PATH."""

import pathlib
import shutil
import sys

import pytest


def program() -> pathlib.Path:
    """The program; skips the test where it is not installed."""
    beside = pathlib.Path(sys.executable).parent / "xpk"
    found = str(beside) if beside.exists() else shutil.which("xpk")
    if found is None:
        pytest.skip("xpk is not installed (pip install xpk==1.16.0, in an environment of its own)")
    return pathlib.Path(found).resolve()


def interpreter() -> pathlib.Path:
    """The interpreter that has xpk's modules; skips the test as `program`."""
    return program().parent / "python"
