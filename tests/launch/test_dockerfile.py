"""The Dockerfile, read as text: pinned bases, locked packages, sources that exist, a user that is not root."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "launch" / "Dockerfile").read_text()
LINES = [line for line in re.sub(r"\\\n\s*", " ", TEXT).splitlines() if line and not line.startswith("#")]


def instructions(name: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in LINES if line.split()[0] == name]


def test_every_base_is_pinned_to_a_patch_release():
    defaults = dict(argument.split("=", 1) for argument in instructions("ARG"))
    for base in instructions("FROM"):
        name = base.split()[0].replace("${BASE}", defaults["BASE"])
        assert re.fullmatch(r"python:3\.(11|12|13)\.\d+-slim-\w+", name), name


def test_the_last_user_is_not_root():
    assert instructions("USER") == ["${RUN_AS}"] and "RUN_AS=podrl" in instructions("ARG")
    assert any("--uid 1000 podrl" in line for line in instructions("RUN"))
    assert LINES.index("USER ${RUN_AS}") > max(
        index for index, line in enumerate(LINES) if line.startswith(("FROM", "RUN", "COPY"))
    )


def test_packages_come_from_the_lock_file_alone():
    (install,) = [line for line in instructions("RUN") if "pip install" in line]
    assert "-r /requirements.lock" in install and "--no-cache-dir" in install


def test_what_is_copied_is_in_the_context_and_in_the_repository():
    allowed = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().split()
    assert allowed[0] == "*"
    for copy in instructions("COPY"):
        if not copy.startswith("--from"):
            source = copy.split()[0]
            assert f"!{source}" in allowed
            # requirements.lock is made by the release; code must be here.
            assert source == "requirements.lock" or (ROOT / source).is_dir()
