"""Runs killed at chosen and random moments end bitwise as undisturbed runs; kills.py kills more often."""

import random

import pytest
from kills import STEPS, Life, disturbed, undisturbed
from processes import same_end

pytestmark = pytest.mark.e2e
# At least 20 in all; a life of a pod costs twice that of one process.
KILLS = {"single": 4, "lora, stale": 4, "ppo": 4, "dpo": 4, "shared": 2, "split, stale": 2}


@pytest.mark.parametrize(("variant", "wanted"), KILLS.items(), ids=list(KILLS))
def test_killed_runs_end_as_undisturbed_ones(variant, wanted, tmp_path):
    whole = undisturbed(variant, tmp_path / "whole")
    rng = random.Random(variant)
    kills = len(disturbed(variant, tmp_path / "killed", whole, wanted, rng))
    for spare in range(wanted - kills):
        # The run ended before a moment came; a first life always comes to its first changes.
        again = disturbed(variant, tmp_path / f"spare-{spare}", whole, 1, rng, by_time=0.0)
        assert len(again) == 1, f"No kill met a live run of {variant}."


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    return undisturbed("tools", tmp_path_factory.mktemp("tools")).workdir


@pytest.mark.parametrize("variant", ["tools", "tools, split"])
def test_answers_that_were_used_are_given_again(variant, with_tools, tmp_path):
    """All is drawn, nothing is saved, then the tool answers otherwise: the end is that of a run without a kill."""
    workdir = tmp_path / "run"
    first = Life(variant, workdir, at=f"/checkpoints/{STEPS}")
    assert first.end() in (-9, 42), first.output()
    kept = {path.name: len(path.read_text().splitlines()) for path in (workdir / "outside").iterdir()}
    assert set(kept) == {f"{step}.jsonl" for step in range(STEPS)} and sum(kept.values()) > 20
    (tmp_path / "world").write_text("second")
    last = Life(variant, workdir)
    assert last.end() == 0, last.output()
    same_end(workdir, with_tools)
    assert '"replayed": true' in (workdir / "samples.jsonl").read_text()
    assert not list((workdir / "outside").iterdir())  # a checkpoint has passed them
