"""After a run directory was damaged, or a disk was full, training goes on and complete data is still there."""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from processes import TWO_DEVICES, job, run, same_end, trained_steps

from podrl.storage.checkpoint import read_state

pytestmark = [pytest.mark.e2e, pytest.mark.nightly("podrl/storage")]
CHECKPOINT = "podrl/storage/checkpoint.py"
PLAIN = ("--config.eval.problems=0", TWO_DEVICES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("whole") / "run"
    run(workdir, *PLAIN)
    return workdir


def data_files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files with the arrays of a checkpoint, largest first."""
    files = [p for p in (checkpoint / "state").rglob("*") if p.is_file()]
    return sorted(files, key=lambda p: p.stat().st_size, reverse=True)


@pytest.mark.parametrize(
    "damage",
    ["truncated", *(pytest.param(how, marks=pytest.mark.nightly(CHECKPOINT)) for how in ("emptied", "deleted"))],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    (workdir / "summary.json").unlink()
    if damage == "deleted":
        shutil.rmtree(workdir / "checkpoints" / "6" / "state")
    else:
        for file in (
            data_files(workdir / "checkpoints" / "6")[:1]
            if damage == "truncated"
            else data_files(workdir / "checkpoints" / "6")
        ):
            os.truncate(file, file.stat().st_size // 2 if damage == "truncated" else 0)
    resumed = run(workdir, *PLAIN)
    assert "checkpoints/6 cannot be read" in resumed.stderr and "Traceback" not in resumed.stderr
    assert "Resumed after step 4" in resumed.stdout
    same_end(workdir, whole)
    assert trained_steps(workdir) == [1, 2, 3, 4, 5, 6]


def test_checkpoints_that_are_all_damaged_are_an_error_that_names_them_and_deletes_none(whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    for step in (4, 6):
        for file in data_files(workdir / "checkpoints" / str(step)):
            os.truncate(file, 0)
    failed = run(workdir, *PLAIN, code=1)
    assert "Traceback" not in failed.stderr
    for text in ("podrl: error: None of the checkpoints", "step 4: ", "step 6: ", "--workdir"):
        assert text in failed.stderr
    assert trained_steps(workdir) == [1, 2, 3, 4, 5, 6]
    assert {p.name for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()} == {"4", "6"}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[pathlib.Path]:
    """Mounts a file system of 24 MiB; yields its directory."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_does_not_stop_training_and_keeps_the_last_good_checkpoint(small_disk, whole, tmp_path):
    workdir = small_disk / "run"
    filler = small_disk / "filler"
    with job(workdir, *PLAIN, "--config.log.to=tensorboard", logs=tmp_path) as full:
        full.wait_for("the checkpoint of step 2", (workdir / "checkpoints" / "2").exists)
        with contextlib.suppress(OSError), filler.open("wb") as out:
            while True:
                out.write(b"x" * 4096)
                out.flush()
        code = full.end()
    assert trained_steps_from_output(full.stdout) == 6, full.stderr
    assert "could not be written" in full.stderr and "newest complete checkpoint is step" in full.stderr
    assert code == 1, "a run whose last step is not saved must not say that all is well"
    assert "podrl: error: Step 6 was reached but could not be saved" in full.stderr
    assert "Traceback" not in full.stderr, full.stderr
    kept, _ = read_state(workdir / "checkpoints")
    assert 2 <= kept < 6
    filler.unlink()
    resumed = run(workdir, *PLAIN, logs=tmp_path)
    assert f"Resumed after step {kept}" in resumed.stdout
    same_end(workdir, whole)


def trained_steps_from_output(text: str) -> int:
    """Returns the largest step in the progress lines of a run's output."""
    return max(int(line.split()[1].partition("/")[0]) for line in text.splitlines() if line.startswith("step "))


def test_damage_that_one_of_several_trainers_meets_sends_all_of_them_to_the_checkpoint_before(tmp_path):
    pod = ("--local_processes=3", "--config.roles.trainer.hosts=0-1", "--fake_devices=1", "--config.checkpoint.every=1")
    small = (*PLAIN, *pod, "--config.rollout.max_prompt_length=64", "--config.trainer.max_steps=2")
    workdir = run(tmp_path / "run", *small).workdir
    whole = pathlib.Path(shutil.copytree(workdir, tmp_path / "whole"))
    (workdir / "summary.json").unlink()
    own = [path for path in (workdir / "checkpoints/2/state/ocdbt.process_1").rglob("*") if path.parent.name == "d"]
    assert own, "the second trainer must have written its shards to files of its own"
    for file in own:
        os.truncate(file, 0)
    resumed = run(workdir, *small)
    assert "Resumed after step 1" in resumed.stdout and "Traceback" not in resumed.stderr
    lines = [line for line in resumed.stderr.splitlines() if "checkpoints/2 cannot be read" in line]
    assert len(lines) == 2 and sum("another process could not read its part" in line for line in lines) == 1, lines
    same_end(workdir, whole)
    assert trained_steps(workdir) == [1, 2]
