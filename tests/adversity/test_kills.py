"""A run that is killed at chosen or random moments ends bitwise as an undisturbed run, or can be repeated.

Each topology gets one combination of staleness, adapters and tools. The combination differs from commit to commit;
kills.py as a command tests more of them. A CI run that leaves tests out (--since) kills after one step; a nightly run
or a run by hand kills after each step of STEPS_OF.
"""

import pathlib
import random
import subprocess

import pytest
from kills import (
    ANSWERS,
    GRID,
    STEPS,
    VARIANTS,
    Life,
    calls_made,
    disturbed,
    killed_after_steps,
    killed_in_calls,
    undisturbed,
)
from processes import comparable, job, run, same_end

pytestmark = pytest.mark.e2e
# Number of kills of each variant. A life of a pod costs twice as much as a life of a single process. DPO and SFT are
# killed in tests/e2e/test_supervised_runs.py.
KILLS = {
    "single": 2,
    "opd": 1,
    "ppo": 2,
    "kto": 1,
    "reward_model": 1,
    "wall": 2,
    "wall, split": 2,
    "hybrid": 2,
    "hybrid, split": 1,
}
# By variant: the source files whose change makes CI kill the variant; otherwise only nightly runs kill it. Other tests
# kill the variants without files at every change, at chosen moments: a single process in this file, PPO in
# tests/e2e/test_algorithms.py, training on the data's answers in tests/e2e/test_supervised_runs.py, a pod with the wall
# clock in tests/e2e/test_wall_clock.py. The variant with a teacher is killed in tests/e2e/test_pods.py when the
# comparison with the teacher changes.
ABOUT = {
    "single": (),
    "opd": (),
    "ppo": (),
    "kto": (),
    "reward_model": (),
    "wall": ("podrl/rollout/batches.py", "podrl/rollout/clock.py", "podrl/rollout/journal.py"),
    "wall, split": (),
    "hybrid": ("podrl/models/delta.py",),
    "hybrid, split": (),
}
TOOLS = pytest.mark.nightly("podrl/environments/journal.py", "podrl/rollout/episodes.py")
OPTIMISED = ("single", "shared")  # a process and a pod whose programs are compiled as for users
# Only the case of a split pod runs at every change; tests/e2e/test_algorithms.py kills a single process at every
# change.
GROUPS = pytest.mark.nightly("podrl/learner/pods", "podrl/storage/checkpoint.py", "podrl/rollout/open_groups.py")
# Steps after which a process is killed. In a split pod the death of a rollout host mostly ends no other process.
STEPS_OF = {"single": (1, 3), "shared": (2, 3), "split": (1, 2, 3)}


def _cases(names):
    return [pytest.param(name, marks=[pytest.mark.optimised] * (name in OPTIMISED)) for name in names]


def _nightly(variant: str) -> pytest.MarkDecorator:
    return pytest.mark.nightly(*ABOUT[variant])


def _commit() -> int:
    """Returns a number made from the tested commit's id; 0 outside a checkout."""
    words = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    try:
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 0


def _combination(topology: str) -> str:
    names = [name for name in GRID if name.endswith(topology)]
    return names[(_commit() + 3 * list(STEPS_OF).index(topology)) % len(names)]


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(*case.values, marks=[*case.marks, *[GROUPS] * (case.values != ("split",))])
        for case in _cases(STEPS_OF)
    ],
)
def test_runs_killed_after_their_steps_end_as_undisturbed_ones(topology, tmp_path, pytestconfig):
    """With --since a process dies after one step, which the commit decides; otherwise after each step in turn."""
    variant, rng = _combination(topology), random.Random(_commit())
    whole = undisturbed(variant, tmp_path / "whole")
    _knows_all_versions(whole.workdir)
    steps = rng.sample(STEPS_OF[topology], 1) if pytestconfig.getoption("since") else STEPS_OF[topology]
    kills = killed_after_steps(variant, tmp_path, whole, rng, steps)
    assert kills, f"No kill met a live run of {variant}."
    print(f"{variant}: {kills}")  # noqa: T201 - shows which combination was run


def _knows_all_versions(workdir):
    """Asserts that trainers know the version of every token they train on."""
    for record in (record for record in comparable(workdir) if "actor/ratio" in record):
        assert sum(v for k, v in record.items() if k.startswith("rollout/share_stale_")) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "variant", [pytest.param(*case.values, marks=[*case.marks, _nightly(case.values[0])]) for case in _cases(KILLS)]
)
def test_killed_runs_end_as_undisturbed_ones(variant, tmp_path):
    whole = undisturbed(variant, tmp_path / "whole")
    guarantee = "podrl.replay repeats all of it bitwise" if "wall" in variant else "started again ends bitwise the same"
    assert (guarantee in (tmp_path / "whole" / "output.txt").read_text()) == (variant not in ANSWERS)
    rng, wanted = random.Random(variant), KILLS[variant]
    kills = len(disturbed(variant, tmp_path / "killed", whole, wanted, rng))
    for spare in range(wanted - kills):
        # The run may end before a random moment comes, but a first life always reaches its first changes.
        again = disturbed(variant, tmp_path / f"spare-{spare}", whole, 1, rng, by_time=0.0)
        assert len(again) == 1, f"No kill met a live run of {variant}."


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    return undisturbed("tools", tmp_path_factory.mktemp("tools")).workdir


@TOOLS
@pytest.mark.parametrize("variant", ["tools", "tools, split"])
def test_answers_that_were_used_are_given_again(variant, with_tools, tmp_path):
    """The run is killed before its only checkpoint, when all samples are drawn, and the tool then changes its answers.
    The resumed run must still end as an undisturbed run."""
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
    assert not list((workdir / "outside").iterdir())  # a checkpoint has made the records superfluous


@TOOLS
@pytest.mark.parametrize("variant", ["tools", "tools, split"])
def test_killed_between_call_and_answer_at_every_step(variant, with_tools, tmp_path):
    """The process that makes the call dies, and the next start goes on; a split pod starts its rollout host again."""
    drawn, asked, kills = _calls(with_tools), [], []
    for step, calls in enumerate(drawn):
        asked.append(sum(drawn[:step]) + calls // 2 + len(asked))  # an unanswered call is made again, and counts twice
    for lot in [asked] if "split" in variant else [[call] for call in asked]:
        life, moments = killed_in_calls(variant, tmp_path / "run", lot)
        assert life.process.returncode in (-9, 0), life.output()
        kills += moments
    made, recorded = calls_made(tmp_path), _recorded(tmp_path / "run")
    if life.process.returncode:
        life = Life(variant, tmp_path / "run")
        assert life.end() == 0, life.output()
        # Calls recorded before the last kill were not repeated; calls under way at that time were repeated.
        assert calls_made(tmp_path) - made == sum(drawn) - recorded
    assert len(kills) == len(drawn) == STEPS
    assert life.output().count("it is started again") == (STEPS if "split" in variant else 0)
    same_end(tmp_path / "run", with_tools)
    assert calls_made(tmp_path) <= sum(drawn) + 16 * len(kills)  # at most env.concurrency calls are under way


@TOOLS
@pytest.mark.nightly("podrl/storage/mirror.py", "podrl/storage/storage.py")
def test_a_bucket_has_the_answers_for_another_machine(with_tools, bucket, monkeypatch, tmp_path):
    """The bucket refuses every checkpoint until the run is killed; the next start, on another disk, has only the
    bucket."""
    (tmp_path / "world").write_text("first")
    place, settings = "gs://bucket/runs/tools", {"base": VARIANTS["tools"], "logs": tmp_path}
    drawn = {f"{step}.jsonl": answers for step, answers in enumerate(_calls(with_tools))}

    def recorded():
        names = [f"runs/tools/outside/{name}" for name in drawn]
        return dict(zip(drawn, [bucket.read(name).count(b"\n") for name in names], strict=True))

    monkeypatch.setattr(type(bucket), "refused", "runs/tools/checkpoints/")
    with job(place, **settings) as first:
        first.wait_for("all answers", lambda: bucket.refusals and recorded() == drawn, every_s=0.1)
        first.kill()
    monkeypatch.setattr(type(bucket), "refused", "")
    (tmp_path / "world").write_text("second")
    run(place, **settings)
    here = bucket.download("runs/tools", tmp_path / "here")
    same_end(here, with_tools)
    assert '"replayed": true' in (here / "samples.jsonl").read_text()
    assert bucket.names("runs/tools/outside/") == []  # a checkpoint has made the records superfluous


def _recorded(workdir):
    """Counts the answers that a run has on its disk for steps that are not yet in a checkpoint."""
    return sum(path.read_text().count("\n") for path in (workdir / "outside").glob("*.jsonl"))


def _calls(workdir):
    """Counts the answers that each step of a run received."""
    steps = [record for record in comparable(workdir) if "tools/calculator/calls" in record]
    return [round(step["tools/calculator/calls"]) for step in steps]
