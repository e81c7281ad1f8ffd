"""A stopped run saves, prints how to resume, leaves no process behind, and resumes as if never stopped."""

import signal

import pytest
from processes import TWO_DEVICES, await_end, job, run, same_end, trained_steps

pytestmark = pytest.mark.e2e


def test_a_signal_saves_exits_75_and_the_same_command_resumes(tmp_path):
    """Sends SIGTERM and SIGINT to two starts of one run; a third start finishes it."""
    whole, workdir, before = run(tmp_path / "whole" / "run", TWO_DEVICES).workdir, tmp_path / "run", 0
    for number, step in ((signal.SIGTERM, 1), (signal.SIGINT, 3)):
        with job(workdir, TWO_DEVICES) as stopped:
            if before:
                said = f"Resumed after step {before} "
                stopped.wait_for(said, lambda said=said, stopped=stopped: said in stopped.stdout)
            stopped.wait_for_step(step)
            workers = stopped.children()
            stopped.signal(number)
            stopped.finish(75)
        assert workers
        await_end(workers)
        assert f"{signal.Signals(number).name}: stopping" in stopped.stderr
        assert "Traceback" not in stopped.stderr
        done = trained_steps(workdir)
        assert done == list(range(1, len(done) + 1)) and max(step, before) <= len(done) < 6
        assert f"Stopped after step {len(done)} of 6" in stopped.stdout
        assert max(int(p.name) for p in (workdir / "checkpoints").iterdir()) == len(done)
        assert "Resume with: python -m podrl.launch --config=grpo_gemma.py" in stopped.stdout
        assert f"--workdir={workdir}" in stopped.stdout
        before = len(done)
    resumed = run(workdir, TWO_DEVICES)
    assert f"Resumed after step {before} " in resumed.stdout
    same_end(workdir, whole)
