"""Wrong command lines, files and environments are refused in one sentence, and leave nothing behind.

The cases are in bad_*.py; their commands run in forks of one process (fork_server.py).
"""

import dataclasses
import json
import pathlib
import socket

import bad_commands
import bad_data
import bad_flags
import bad_models
import pytest
from commands import Bad, Commands, Done, run_for_real

from podrl.rundir.run import Run

pytestmark = pytest.mark.e2e
CASES = bad_flags.CASES | bad_data.CASES | bad_models.CASES | bad_commands.CASES
REAL = ("override: unknown key", "data: broken line", "generate: dtype")


@pytest.fixture(scope="module")
def commands():
    started = Commands()
    yield started
    started.close()


def refused(bad: Bad, done: Done) -> None:
    """Asserts exit code 1, and one sentence on stderr that has all words and no traceback.

    Warnings may precede the sentence; on a busy machine a line about a stage of over three seconds may precede it, too.
    """
    *before, said = done.stderr.strip().split("\n")
    assert all(line.startswith(("WARNING:", "Warning: ")) or " s so far" in line for line in before), done.stderr
    assert done.code == 1, f"exit code {done.code}:\n{done.stdout[-1000:]}\n{said}"
    assert "Traceback" not in said, said
    assert said.startswith("podrl: error: " if bad.command == "launch" else f"podrl.{bad.command}: "), said
    for word in bad.words:
        assert word in said, f"{word!r} is not in:\n{said}"
    assert len(said) < 1200, said
    assert said.endswith((".", "?")), f"not a whole sentence:\n{said}"


def nothing_in_the_way(directory: pathlib.Path) -> None:
    """Asserts that a corrected command can use the failed command's directory, although its configuration differs."""
    mine = directory / "run"
    if mine.is_dir() and not (directory / "given").exists():
        Run(mine, config={"another": json.dumps("configuration")})


def test_there_are_enough_of_them():
    assert len(CASES) >= 250


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_sentence(name, commands, tmp_path):
    bad = CASES[name]
    bad.prepare(tmp_path)
    refused(bad, commands.run(bad, tmp_path))
    if bad.command == "launch" and not any(file.startswith("run") for file in bad.files):
        nothing_in_the_way(tmp_path)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (Bad([*bad_flags.BASE, "--workdir=gs://b/run"], ["--workdir=gs://b/run"]), 42),
        (bad_commands.generate("--prompts=gs://b/p.jsonl", ["--prompts=gs://b/p.jsonl"]), 1),
    ],
    ids=["launch", "generate"],
)
def test_without_a_network_a_bucket_is_given_up_within_20_s(bad, code, commands, tmp_path):
    bad.prepare(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{silent.getsockname()[1]}", "NO_GCE_CHECK": "true"}
        done = commands.run(dataclasses.replace(bad, environment=nowhere), tmp_path, deadline_s=20)
    assert done.code == code, done
    *waits, said = done.stderr.strip().split("\n")
    assert all(" so far" in line for line in waits), waits
    assert bad.words[0] in said and "bucket b cannot be reached" in said


@pytest.mark.parametrize("name", REAL)
def test_a_process_of_its_own_says_the_same(name, commands, tmp_path):
    bad = CASES[name]
    for kind in ("fork", "real"):
        (tmp_path / kind).mkdir()
        bad.prepare(tmp_path / kind)
    real = run_for_real(bad, tmp_path / "real")
    refused(bad, real)
    assert _without_progress(commands.run(bad, tmp_path / "fork")) == _without_progress(real)


def _without_progress(done: Done) -> Done:
    """Leaves out the lines about a stage of over three seconds, which come only on a busy machine."""
    kept = [
        "".join(x for x in text.splitlines(keepends=True) if " s so far" not in x)
        for text in (done.stdout, done.stderr)
    ]
    return Done(done.code, *kept)
