"""A recorded step is repeated bitwise, or repeated on the same samples under a changed setting."""

import subprocess
import sys

import numpy as np
import pytest
from processes import CURRICULUM, DEADLINE_S, TWO_DEVICES, chose, environment, run

from podrl.rundir import trace

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    twice = ("--config.trainer.max_steps=8", "--config.grpo.num_iterations=2")
    done = run(tmp_path_factory.mktemp("recorded") / "run", *twice, *CURRICULUM, TWO_DEVICES)
    assert chose(done.records())
    return done.workdir


def replayed(recorded, cwd, *args):
    command = [sys.executable, "-m", "podrl.replay", str(recorded), *args]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_step_is_done_again_bitwise(recorded, tmp_path):
    done = replayed(recorded, tmp_path, "--step=3")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.split()
    assert "Step 3 again, from checkpoint 2" in done.stdout and "Different" not in done.stdout
    equal, among = int(said[said.index("of") - 1]), int(said[said.index("of") + 1])
    assert equal == among > 25


def test_a_changed_setting_trains_on_the_same_samples(recorded, tmp_path):
    changes = ("--change=grpo.beta=0.5", "--change=grpo.epsilon=0.0001")
    done = replayed(recorded, tmp_path, "--step=3", *changes, f"--keep={tmp_path / 'kept'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "actor/grad_norm" in done.stdout and "actor/kl_coef" in done.stdout
    assert "reward/" not in done.stdout and "sampler/" not in done.stdout and "tokens/" not in done.stdout
    before, now = (trace.read_step(tmp_path / "kept" / name, 3) for name in ("unchanged", "changed"))
    trained = before.tokens["trained"] > 0
    assert trained.sum() > 0 and before.tokens["clipped"].mean() < now.tokens["clipped"].mean() <= 0.5
    # The first of two passes clips nothing. The second clips nearly every token that it would push further, so these
    # tokens keep half of their weight.
    clipped = now.tokens["clipped"] == 0.5
    np.testing.assert_allclose(now.tokens["weight"][clipped], before.tokens["advantage"][clipped] / 2, rtol=1e-5)
    row = next(
        line for line in done.stdout.splitlines() if line.split("│")[1:2] and line.split("│")[1].strip() == "all"
    )
    assert [int(cell) for cell in (row.split("│")[2], row.split("│")[4])] == [
        trained.sum(),
        (now.tokens["clipped"] > 0).sum(),
    ]
    assert "Tokens whose weight changed most" in done.stdout


def test_what_cannot_be_replayed_is_said(recorded, tmp_path):
    assert "has steps 1 to 4" in replayed(recorded, tmp_path, "--step=9").stderr
    assert "of a key that the run's" in replayed(recorded, tmp_path, "--step=3", "--change=grpo.bta=1").stderr
    assert "no config.json" in replayed(tmp_path, tmp_path, "--step=3").stderr
