"""A stopped run saves, prints how to resume, leaves no process behind, and resumes as if never stopped."""

import pathlib
import signal

import pytest
from processes import TWO_DEVICES, await_end, job, run, same_end, trained_steps

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(workdir, TWO_DEVICES)
    return workdir


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_a_signal_saves_exits_75_and_the_same_command_resumes(number, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    with job(workdir, TWO_DEVICES) as stopped:
        stopped.wait_for_step(2)  # saved at 2 and 4: the signal's own checkpoint is likely to be another
        workers = stopped.children()
        stopped.signal(number)
        stopped.finish(75)
    assert workers
    await_end(workers)
    assert f"{signal.Signals(number).name}: stopping" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    done = trained_steps(workdir)
    assert done == list(range(1, len(done) + 1)) and 2 <= len(done) < 6
    assert f"Stopped after step {len(done)} of 6" in stopped.stdout
    assert max(int(p.name) for p in (workdir / "checkpoints").iterdir()) == len(done)
    assert "Resume with: python -m podrl.launch --config=grpo_gemma.py" in stopped.stdout
    assert f"--workdir={workdir}" in stopped.stdout
    resumed = run(workdir, TWO_DEVICES)
    assert f"Resumed after step {len(done)} " in resumed.stdout
    same_end(workdir, uninterrupted)
