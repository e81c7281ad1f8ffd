"""A run that is killed at any moment and started again by the same command ends as an undisturbed run."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Callable

import jax
import pytest
from processes import TWO_DEVICES, Job, await_end, job, run, same_end, trained_steps

from podrl.storage.checkpoint import read_state

pytestmark = pytest.mark.e2e
EVALUATING = (TWO_DEVICES, "--config.trainer.eval_every_n_steps=2")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(workdir, *EVALUATING)
    assert trained_steps(workdir) == [1, 2, 3, 4, 5, 6]
    return workdir


def killed(workdir: pathlib.Path, wait: Callable[[Job], None], *args: str) -> None:
    """Starts (or resumes) the run and kills it once `wait` returns; its reward workers must not outlive it."""
    with job(workdir, *args) as started:
        wait(started)
        workers = started.children()
        started.kill()
    await_end(workers)


def while_writing_a_checkpoint(after: int) -> Callable[[Job], None]:
    """Returns a function that waits until a run begins the checkpoint of a step after `after`, and stops it before the
    checkpoint is finished."""

    def unfinished(started: Job) -> list[pathlib.Path]:
        root = started.workdir / "checkpoints"
        names = [name for name in os.listdir(root) if not name.isdigit()] if root.is_dir() else []
        return [
            root / name for name in names if name.partition(".")[0].isdigit() and int(name.partition(".")[0]) > after
        ]

    def caught(started: Job) -> bool:
        if not unfinished(started):
            return False
        started.signal(signal.SIGSTOP)
        os.waitpid(started.process.pid, os.WUNTRACED)
        if unfinished(started):
            return True
        started.signal(signal.SIGCONT)
        return False

    return lambda started: started.wait_for("a checkpoint being written", lambda: caught(started), every_s=0.0)


@pytest.mark.nightly("podrl/storage", "podrl/learner/loop.py", "podrl/rundir")
@pytest.mark.optimised  # compiled as a user's run is
def test_killed_before_the_first_checkpoint_between_two_during_one_and_before_the_last_evaluation(
    uninterrupted, tmp_path
):
    workdir = tmp_path / "run"
    for step in (1, 3):
        killed(workdir, lambda started, step=step: started.wait_for_step(step), *EVALUATING)
    killed(workdir, while_writing_a_checkpoint(after=2), *EVALUATING)
    left = [name for name in os.listdir(workdir / "checkpoints") if not name.isdigit()]
    assert left, "the kill came too late: no unfinished checkpoint is left"

    def last_step_saved(started: Job) -> None:
        started.wait_for("the checkpoint of step 6", (workdir / "checkpoints" / "6").exists, every_s=0.0)

    killed(workdir, last_step_saved, *EVALUATING)
    assert not (workdir / "summary.json").exists()
    resumed = run(workdir, *EVALUATING)
    assert "Resumed after step" in resumed.stdout
    same_end(workdir, uninterrupted)
    assert (workdir / "summary.json").exists()
    with contextlib.suppress(FileNotFoundError):
        assert [name for name in os.listdir(workdir / "checkpoints") if not name.isdigit()] == []


# Flags of runs with adapters, a batch in flight, and several updates per step.
STALE_LORA = ("--config.grpo.max_staleness=1", "--config.model.lora.rank=4", "--config.trainer.learning_rate=2e-3")
SEVERAL_UPDATES = (
    *("--config.grpo.num_iterations=2", "--config.trainer.mini_batch_size=2", "--config.trainer.schedule=cosine"),
    "--config.trainer.max_steps=24",  # counts updates; a step makes 4
    "--config.trainer.param_dtype=bfloat16",  # with a float32 master copy
)


@pytest.mark.nightly("podrl/trainer", "podrl/models/lora.py", "podrl/rollout/group_player.py", "podrl/learner/grpo.py")
def test_adapters_with_a_batch_in_flight_and_several_updates_a_step_resume_too(tmp_path):
    variant = (*STALE_LORA, *SEVERAL_UPDATES, "--config.eval.problems=0", TWO_DEVICES)
    whole, workdir = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    run(whole, *variant)
    killed(workdir, lambda started: started.wait_for_step(3), *variant)
    run(workdir, *variant)
    same_end(workdir, whole)
    assert trained_steps(workdir) == [1, 2, 3, 4, 5, 6]
    leaves = jax.tree_util.tree_leaves_with_path(read_state(workdir / "checkpoints")[1])
    assert any("master" in jax.tree_util.keystr(path) for path, _ in leaves)
