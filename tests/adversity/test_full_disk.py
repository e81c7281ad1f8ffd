"""podrl prints one sentence if a disk is full, small or read-only, and the last good checkpoint stays good."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from podrl.rundir.metrics import LogConfig, MetricsLog
from podrl.rundir.run import Run
from podrl.storage.checkpoint import Checkpoints, read_state

# Orbax's threads leave reads and files behind when a save fails; the error that matters has been raised by then.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
_QUIET = LogConfig(to=())
_MB = 1_000_000


def _mount(options: str, place: pathlib.Path) -> bool:
    return not subprocess.run(["mount", *options.split(), str(place)], check=False, capture_output=True).returncode


@pytest.fixture
def disk(tmp_path) -> Iterator[pathlib.Path]:
    """Mounts a file system of 12 MB; tests change its limits by `_mount` with the option remount."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or not _mount(f"-t tmpfs -o size={12 * _MB} tmpfs", place):
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _state(seed: int, size: int = 4 * _MB):
    """Makes a state of random numbers, which no compression makes smaller."""
    words = np.random.default_rng(seed).integers(0, 2**32, size // 4, np.uint32)
    return {"w": jax.numpy.asarray(words)}


def _abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _fill(place: pathlib.Path, *, leave: int = 0) -> None:
    with contextlib.suppress(OSError), (place / "filler").open("wb") as out:
        while True:
            out.write(b"x" * 4096)
            out.flush()
    if leave:
        os.truncate(place / "filler", (place / "filler").stat().st_size - leave)


def _good(directory: pathlib.Path, step: int, seed: int) -> bool:
    return np.array_equal(read_state(directory, step)[1]["w"], np.asarray(_state(seed)["w"]))


def test_the_oldest_goes_first_where_keep_plus_one_have_no_room_and_it_is_said(disk, caplog):
    checkpoints = Checkpoints(disk / "checkpoints", keep=2)
    for step in (1, 2, 3, 4):
        assert checkpoints.save(step, _state(step), {}, {}) and checkpoints.wait()
        said = [r.getMessage() for r in caplog.records if "is removed first" in r.getMessage()]
        assert len(said) == max(0, step - 2)
        if said:
            assert f"the checkpoint of step {step} takes about 4.0 MB" in said[-1]
            assert f"checkpoints/{step - 2} is removed first" in said[-1]
    assert checkpoints.steps() == [3, 4] and checkpoints.failures == 0
    checkpoints.close()
    assert _good(disk / "checkpoints", 3, 3) and _good(disk / "checkpoints", 4, 4)


def test_what_is_damaged_goes_before_what_is_good(disk, caplog):
    damaged = disk / "damaged_checkpoint_7"
    damaged.mkdir()
    (damaged / "content").write_bytes(os.urandom(4 * _MB))
    checkpoints = Checkpoints(disk / "checkpoints", keep=2)
    for step in (1, 2):
        assert checkpoints.save(step, _state(step), {}, {}) and checkpoints.wait()
    assert not damaged.exists() and checkpoints.steps() == [1, 2]
    assert "damaged_checkpoint_7 is removed first" in caplog.text
    checkpoints.close()


def test_the_newest_is_never_given_up(disk, caplog):
    checkpoints = Checkpoints(disk / "checkpoints", keep=1)
    assert checkpoints.save(1, _state(1), {}, {}) and checkpoints.wait()
    _fill(disk, leave=_MB)
    assert not checkpoints.save(2, _state(2), {}, {})
    assert "it needs about 4.0 MB and 1." in caplog.text and "newest complete checkpoint is step 1" in caplog.text
    (disk / "filler").unlink()
    assert checkpoints.save(3, _state(3), {}, {}) and checkpoints.wait()
    assert checkpoints.steps() == [3]
    checkpoints.close()


def test_a_disk_that_cannot_hold_one_is_refused_before_the_first_step(disk):
    checkpoints = Checkpoints(disk / "checkpoints")
    sentence = (
        r"The disk of .*checkpoints has 1[0-9.]+ MB free and one checkpoint of this run takes about 16\.0 MB: free"
    )
    with pytest.raises(ValueError, match=sentence):
        checkpoints.restore_latest(_abstract(_state(0, 16 * _MB)))
    assert checkpoints.restore_latest(_abstract(_state(0))) is None
    checkpoints.close()


def test_a_save_that_meets_a_full_disk_half_way_leaves_the_one_before_good(disk, caplog):
    """The inodes run out while files are written, although there is room for their bytes."""
    checkpoints = Checkpoints(disk / "checkpoints", keep=2)
    assert checkpoints.save(1, _state(1), {"n": 1}, {}) and checkpoints.wait()
    taken = sum(1 for _ in disk.rglob("*")) + 1
    assert _mount(f"-o remount,nr_inodes={taken + 12}", disk)
    checkpoints.save(2, _state(2), {"n": 2}, {})
    assert not checkpoints.wait() and checkpoints.failures == 1
    assert "could not be written" in caplog.text and "newest complete checkpoint is step 1" in caplog.text
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    assert restored is not None and restored.step == 1 and restored.host == {"n": 1}
    assert np.array_equal(restored.state["w"], _state(1)["w"])
    assert _mount("-o remount,nr_inodes=9999", disk)
    assert checkpoints.save(3, _state(3), {}, {}) and checkpoints.wait() and checkpoints.steps() == [1, 3]
    checkpoints.close()
    left = [path.name for path in (disk / "checkpoints").iterdir()]
    assert sorted(left) == ["1", "3"], "the failed save must leave no files"


@pytest.mark.parametrize("trouble", ["is full", "ead-only"])
def test_a_run_directory_that_cannot_be_written_gets_one_sentence(disk, trouble):
    workdir = disk / "run"
    workdir.mkdir()
    if trouble == "is full":
        _fill(disk)
    else:
        assert _mount("-o remount,ro", disk)
    for place in (workdir, disk / "new"):
        with pytest.raises(
            ValueError, match=f"checkpoint_root_directory=.* cannot be a run directory.*{trouble}"
        ) as caught:
            Run(place, config={"seed": 1})
        assert "\n" not in str(caught.value)


def test_lines_of_a_later_step_are_dropped_on_a_full_disk_too(disk):
    log = MetricsLog(disk, _QUIET, start=0, run_config={})
    for step in (1, 2, 3):
        log.write(step, {"loss": step})
    log.close()
    _fill(disk)
    log = MetricsLog(disk, _QUIET, start=3, run_config={})
    log.close()
    assert (disk / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
