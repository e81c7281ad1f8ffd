"""Runs whose directory is in a bucket: killed, preempted, resumed and exported as on a disk."""

import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from processes import TWO_DEVICES, environment, job, run, same_end, trained_steps

from podrl.models import from_pretrained

pytestmark = pytest.mark.e2e
RUN = "gs://bucket/runs/a"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> pathlib.Path:
    return run(tmp_path_factory.mktemp("uninterrupted") / "run", TWO_DEVICES).workdir


@pytest.mark.nightly("podrl/storage")
def test_killed_and_preempted_it_ends_as_an_undisturbed_run_on_a_disk(uninterrupted, bucket, tmp_path):
    def saved(step: int) -> bool:
        return bool(bucket.read(f"runs/a/checkpoints/{step}/commit_success.txt"))

    with job(RUN, TWO_DEVICES, logs=tmp_path / "1") as first:
        first.wait_for("the checkpoint of step 2", lambda: saved(2), every_s=0.02)
        first.kill()
    killed = bucket.download("runs/a", tmp_path / "killed")
    assert set(trained_steps(killed)) >= {1, 2} and not (killed / "summary.json").exists()

    with job(RUN, TWO_DEVICES, logs=tmp_path / "2") as second:
        second.wait_for("the resuming", lambda: "Resumed after step" in second.stdout)
        second.signal(signal.SIGTERM)
        second.finish(75)
    assert f"Resumed after step {max(saved_steps(killed))} from {RUN}." in second.stdout
    assert f"saved in {RUN}" in second.stdout

    last = run(RUN, TWO_DEVICES, logs=tmp_path / "3")
    assert f"Written to {RUN}" in last.stdout
    here = bucket.download("runs/a", tmp_path / "here")
    same_end(here, uninterrupted)
    assert trained_steps(here) == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in here.iterdir()} == {path.name for path in uninterrupted.iterdir()}

    out = tmp_path / "model"
    command = [sys.executable, "-m", "podrl.export", f"--workdir={RUN}", f"--out={out}", "--dtype=float32"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("Step 6 of"), done.stderr
    command[3:5] = [f"--workdir={uninterrupted}", f"--out={tmp_path / 'same'}"]
    subprocess.run(command, env=environment(), check=True)
    exported, same = (jax.tree.leaves(from_pretrained(path).params) for path in (out, tmp_path / "same"))
    assert all(np.array_equal(a, b) for a, b in zip(exported, same, strict=True))


def saved_steps(workdir: pathlib.Path) -> list[int]:
    return [int(path.parent.name) for path in workdir.glob("checkpoints/*/commit_success.txt")]


@pytest.mark.nightly("podrl/storage/checkpoint.py", "podrl/storage/storage.py", "podrl/storage/mirror.py")
def test_the_trainers_of_a_pod_save_to_it_together(bucket, tmp_path):
    pod = (
        "--local_processes=4",
        "--config.roles.trainer.hosts=0-1",
        "--fake_devices=2",
        "--config.trainer.max_steps=2",
    )
    run("gs://bucket/runs/pod", *pod, logs=tmp_path / "bucket")
    on_disk = run(tmp_path / "run", *pod).workdir
    same_end(bucket.download("runs/pod", tmp_path / "here"), on_disk)


@pytest.mark.parametrize(
    ("workdir", "without", "message"),
    [
        ("gs://nowhere/run", (), "--workdir=gs://nowhere/run: there is no bucket nowhere."),
        (RUN, ("STORAGE_EMULATOR_HOST",), f"--workdir={RUN}: there are no Google credentials here for bucket bucket."),
    ],
)
def test_a_bucket_that_cannot_be_used_is_told_in_one_line_before_anything_is_loaded(
    bucket, tmp_path, monkeypatch, workdir, without, message
):
    for name in without:
        monkeypatch.delenv(name)
    failed = run(workdir, logs=tmp_path, code=1)
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("podrl: error: ")]
    assert line.startswith(f"podrl: error: {message}")
    assert "Traceback" not in failed.stderr and "Roles" not in failed.stdout
