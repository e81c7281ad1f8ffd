"""Finds the real xpk, beside this interpreter (CI links it there from its own environment) or on PATH."""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest
import yaml


def program() -> pathlib.Path:
    """Returns the path of xpk; skips the test where it is not installed."""
    beside = pathlib.Path(sys.executable).parent / "xpk"
    found = str(beside) if beside.exists() else shutil.which("xpk")
    if found is None:
        pytest.skip("xpk is not installed (pip install xpk==1.16.0, in an environment of its own)")
    return pathlib.Path(found).resolve()


def interpreter() -> pathlib.Path:
    """Returns the Python interpreter that has xpk's modules; skips the test if xpk is not installed."""
    return program().parent / "python"


def manifest(command: Sequence[str], folder: pathlib.Path) -> dict:
    """Returns the JobSet that xpk would submit for a command of launch.xpk; writes it to `folder` on the way."""
    path = folder / "manifest.yaml"
    # --dry-run --skip-validation need no cluster, no gcloud and no docker; --project-number avoids a look-up.
    more = [f"--output-manifest-file={path}", "--dry-run", "--skip-validation", "--project-number=1"]
    words = [str(program()), *command[1:], *more]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return yaml.safe_load(path.read_text())
