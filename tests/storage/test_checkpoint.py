"""Checkpoints are restored bit for bit, damaged ones are skipped, a full disk does not stop training."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_hosts import measure
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.storage.checkpoint import CheckpointConfig, Checkpoints, read_state
from podrl.storage.seal import seal, unseal

# When one read of a damaged checkpoint fails, Orbax closes its event loop while tensorstore still completes other
# reads; the callbacks of these reads then find the loop closed. The error that matters has been raised by then.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def _state(value: float):
    mesh = make_mesh("fsdp=4", jax.devices()[:4])
    sharded, whole = NamedSharding(mesh, Spec("fsdp")), NamedSharding(mesh, Spec())
    weight = jax.random.normal(jax.random.key(0), (64, 32)) * value
    return {"w": jax.device_put(weight, sharded), "step": jax.device_put(jnp.int32(value), whole)}


def _abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _saved(path, steps, keep=3, **more):
    checkpoints = Checkpoints(path, keep=keep, **more)
    for step in steps:
        assert checkpoints.save(step, _state(step), {"data_state": f"s{step}"}, {"tokens": np.arange(step)})
    assert checkpoints.wait()
    return checkpoints


def test_round_trip_keeps_bits_shardings_and_host_values(tmp_path):
    checkpoints = _saved(tmp_path, [2])
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    checkpoints.close()
    assert restored is not None and restored.step == 2
    assert _equal(restored.state, _state(2))
    assert restored.state["w"].sharding == _state(2)["w"].sharding
    assert restored.host == {"data_state": "s2"}
    np.testing.assert_array_equal(restored.arrays["tokens"], np.arange(2))


def test_host_arrays_without_elements_are_saved(tmp_path):
    """Empty arrays come back with their dtype and shape, although Orbax refuses to save them; a pending batch without
    any sampled token has such arrays."""
    checkpoints = Checkpoints(tmp_path)
    arrays = {"0.partial.kept_X": np.zeros((0,), np.float32), "b": np.zeros((3, 0, 2), bool), "c": np.ones(2)}
    assert checkpoints.save(1, _state(1), {}, arrays) and checkpoints.wait()
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    checkpoints.close()
    assert restored is not None and restored.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert restored.arrays[name].dtype == array.dtype and np.array_equal(restored.arrays[name], array)


def test_the_state_can_be_read_without_its_mesh(tmp_path):
    _saved(tmp_path, [1, 2]).close()
    step, state = read_state(tmp_path)
    assert step == 2 and isinstance(state["w"], np.ndarray) and _equal(state, _state(2))
    assert read_state(tmp_path, 1)[0] == 1
    with pytest.raises(ValueError, match=r"no checkpoint of step 7: it has \[1, 2\]"):
        read_state(tmp_path, 7)


def test_no_checkpoint_is_none_and_a_missing_step_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_latest(_abstract(_state(0))) is None
    with pytest.raises(ValueError, match="no checkpoint of step 9"):
        checkpoints.restore(9, _abstract(_state(0)))
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = _saved(tmp_path, [1, 2, 3, 4], keep=2)
    assert checkpoints.steps() == [3, 4]
    checkpoints.close()


def test_some_are_kept_for_good_by_step_and_by_time(tmp_path):
    checkpoints = _saved(tmp_path / "steps", range(1, 8), keep=2, keep_every=3)
    assert checkpoints.steps() == [3, 6, 7]
    checkpoints.close()
    again = Checkpoints(tmp_path / "steps", keep=1, keep_every=3)  # a later process keeps the same steps
    assert again.save(8, _state(8), {}, {}) and again.wait() and again.steps() == [3, 6, 8]
    again.close()
    _saved(tmp_path / "hours", range(1, 4), keep=9).close()
    now = time.time()
    for step, hours in ((1, 9.0), (2, 8.5), (3, 7.9)):
        record = tmp_path / "hours" / str(step) / "_CHECKPOINT_METADATA"
        made = json.loads(record.read_text()) | {"commit_timestamp_nsecs": int((now - 3600 * hours) * 1e9)}
        record.write_text(json.dumps(made))
    timed = Checkpoints(tmp_path / "hours", keep=1, keep_hours=1.0)
    assert timed.save(4, _state(4), {}, {}) and timed.wait() and timed.steps() == [1, 3, 4]
    timed.close()


def _damage(directory):
    for file in sorted((directory / "state").rglob("*")):
        if file.is_file() and "/d/" in str(file):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [_damage, lambda d: shutil.rmtree(d / "state")])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(tmp_path, damage, caplog):
    _saved(tmp_path / "c", [1, 2]).close()
    damage(tmp_path / "c" / "2")
    checkpoints = Checkpoints(tmp_path / "c", keep=3)
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    assert restored is not None and restored.step == 1 and _equal(restored.state, _state(1))
    assert "2 cannot be read" in caplog.text
    assert (tmp_path / "damaged_checkpoint_2").is_dir()
    assert checkpoints.save(2, _state(2), {}, {}) and checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.close()


def test_nothing_readable_is_an_error_that_lists_what_was_tried(tmp_path):
    _saved(tmp_path, [1]).close()
    _damage(tmp_path / "1")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"None of the checkpoints.*step 1"):
        checkpoints.restore_latest(_abstract(_state(0)))
    checkpoints.close()


def _large():
    return {"w": jnp.asarray(np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32))}


@contextlib.contextmanager
def _no_large_files():
    """Simulates a disk on which files are limited to 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit fails, but does not kill
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_save_that_cannot_be_written_leaves_the_last_good_one(tmp_path, caplog):
    checkpoints = _saved(tmp_path, [1])
    with _no_large_files():
        checkpoints.save(2, _large(), {}, {})
        checkpoints.wait()
    assert checkpoints.failures >= 1
    assert "could not be written" in caplog.text and "Training goes on" in caplog.text
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    assert restored is not None and restored.step == 1 and _equal(restored.state, _state(1))
    assert checkpoints.save(3, _state(3), {}, {}) and checkpoints.wait()
    assert 3 in checkpoints.steps()
    checkpoints.close()


def test_a_failed_save_whose_writers_go_on_for_a_while_does_not_fail_the_next_one(tmp_path, caplog):
    """A thread creates files in the failed save's directory for a second, as tensorstore's threads may, so that the
    directory cannot be removed at once.

    The writer begins after Orbax has made the directories. If they existed before, Orbax could not make them, and its
    threads would wait five minutes for them, beyond the end of the test.
    """
    checkpoints = _saved(tmp_path, [1])
    left = tmp_path / "2.orbax-checkpoint-tmp"

    def write() -> None:
        while not any(left.glob("state*")):
            time.sleep(0.001)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                (left / "state").mkdir(parents=True, exist_ok=True)
                for i in range(50):
                    (left / "state" / str(i)).touch()

    writer = threading.Thread(target=write)
    writer.start()
    with _no_large_files():
        checkpoints.save(2, _large(), {}, {})
        checkpoints.wait()
    failed = checkpoints.failures
    assert checkpoints.save(2, _state(2), {}, {}) and checkpoints.wait()
    writer.join()
    assert failed == checkpoints.failures == 1 and checkpoints.steps() == [1, 2]
    assert not list(tmp_path.glob("*tmp*"))
    checkpoints.close()


def test_no_thread_waits_for_directories_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    """A save that cannot make its directories fails, its threads end long before Orbax's limit of five minutes, and the
    next save succeeds."""
    checkpoints = _saved(tmp_path, [1])
    before = set(threading.enumerate())
    make = os.mkdir

    def mkdir(path, *args, **kwargs):
        if "2.orbax" in os.fspath(path):
            raise OSError(errno.ENOSPC, "No space left on device", os.fspath(path))
        make(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        checkpoints.save(2, _state(2), {}, {})
        checkpoints.wait()
    assert checkpoints.failures == 1 and "No space left on device" in caplog.text
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=200)  # Orbax's own limit is 300 s
        assert not thread.is_alive(), thread
    assert checkpoints.save(3, _state(3), {}, {}) and checkpoints.wait() and checkpoints.steps() == [1, 3]
    checkpoints.close()


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"^CheckpointConfig\.keep=0"):
        CheckpointConfig(keep=0)


def _flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_one_flipped_bit_of_a_leaf_is_named_and_the_checkpoint_before_is_used(tmp_path, caplog):
    _saved(tmp_path / "c", [1, 2]).close()
    files = [p for p in (tmp_path / "c" / "2" / "state").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    _flip(largest, 8 * largest.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"cannot be read|not what was saved"):
        Checkpoints(tmp_path / "c").restore(2, _abstract(_state(0)))
    with pytest.raises(ValueError, match=r"cannot be read|not what was saved|Error"):
        read_state(tmp_path / "c", 2)
    checkpoints = Checkpoints(tmp_path / "c")
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    assert restored is not None and restored.step == 1 and _equal(restored.state, _state(1))
    assert "2 cannot be read" in caplog.text
    checkpoints.close()


def test_sums_are_those_of_the_devices_so_that_a_copy_that_went_wrong_is_found(tmp_path):
    """The files are complete and undamaged, but differ from the arrays on the devices."""
    checkpoints = _saved(tmp_path, [1, 2])
    checkpoints.close()
    shutil.rmtree(tmp_path / "2" / "state")
    shutil.copytree(tmp_path / "1" / "state", tmp_path / "2" / "state")
    with pytest.raises(ValueError, match="2 of 2 leaves of the state are not what was saved, such as step"):
        Checkpoints(tmp_path).restore(2, _abstract(_state(0)))


def test_host_values_and_arrays_are_checked_too(tmp_path):
    _saved(tmp_path, [1, 2, 3]).close()
    shutil.rmtree(tmp_path / "3" / "arrays")
    shutil.copytree(tmp_path / "2" / "arrays", tmp_path / "3" / "arrays")
    host = tmp_path / "2" / "host" / "metadata"
    host.write_text(host.read_text().replace('"s2"', '"s3"'))
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="1 of 1 host arrays are not what was saved, such as tokens"):
        checkpoints.restore(3, _abstract(_state(0)))
    with pytest.raises(ValueError, match=r"host data in .* is not what podrl wrote: its checksum is"):
        checkpoints.restore(2, _abstract(_state(0)))
    checkpoints.close()


def test_an_older_checkpoint_in_the_place_of_a_newer_one_is_noticed_and_set_aside(tmp_path, caplog):
    """The older checkpoint is undamaged: only the name of its directory is wrong."""
    _saved(tmp_path / "c", [1, 2]).close()
    shutil.rmtree(tmp_path / "c" / "2")
    shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / "2")
    said = "it is of step 1: another checkpoint is in the place of step 2"
    with pytest.raises(ValueError, match=said):
        read_state(tmp_path / "c")
    checkpoints = Checkpoints(tmp_path / "c")
    restored = checkpoints.restore_latest(_abstract(_state(0)))
    assert restored is not None and restored.step == 1 and _equal(restored.state, _state(1)) and said in caplog.text
    assert (tmp_path / "damaged_checkpoint_2").is_dir() and checkpoints.steps() == [1]
    checkpoints.close()


def test_a_checkpoint_of_before_steps_were_inside_is_read(tmp_path):
    _saved(tmp_path, [1]).close()
    host = tmp_path / "1" / "host" / "metadata"
    values = unseal(json.loads(host.read_text()))
    assert values.pop("step") == 1
    host.write_text(json.dumps(seal(values)))
    assert read_state(tmp_path)[0] == 1


@pytest.mark.parametrize("text", ["{}", "[1]", "null", '{"a": 1}', "", "\xff", "[" * 100_000, '{"state": {}}'])
def test_host_data_that_is_not_ours_falls_back_with_a_sentence(tmp_path, caplog, text):
    _saved(tmp_path / "c", [1, 2]).close()
    (tmp_path / "c" / "2" / "host" / "metadata").write_bytes(text.encode("latin-1"))
    checkpoints = Checkpoints(tmp_path / "c")
    restored = checkpoints.restore_latest(_abstract(_state(0)), lambda host, arrays: host["data_state"])
    assert restored is not None and restored.step == 1 and restored.content == "s1"
    (line,) = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
    assert "host data" in line or "KeyError: 'data_state'" in line
    checkpoints.close()


def test_a_checkpoint_of_before_there_were_checksums_is_read_and_said_to_be_unchecked(tmp_path, caplog):
    _saved(tmp_path, [1]).close()
    (tmp_path / "1" / "host" / "metadata").write_text('{"data_state": "s1"}')
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore_latest(_abstract(_state(0)), lambda host, arrays: host["data_state"])
    assert restored is not None and restored.content == "s1" and "without checksums" in caplog.text
    checkpoints.close()


@pytest.mark.slow
def test_each_host_saves_its_own_part_and_other_hosts_with_another_mesh_restore_it():
    found = measure(2, rows=1024)
    whole = 2 * 1024 * 32768
    assert [(f["hosts"], f["what"]) for f in found] == [(4, "save")] * 4 + [(4, "restore")] * 4 + [(2, "restore")] * 2
    # The devices of each host hold an equal share of the bytes. A restore also compares the checksums of the leaves.
    assert all(f["share"] == whole / f["hosts"] for f in found)
