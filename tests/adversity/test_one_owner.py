"""Two runs never write to one directory: the second is refused; a dead run's directory is taken over."""

import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from processes import SMALL, TWO_DEVICES, job, run, trained_steps
from waits import until

from podrl.rundir.run import Run
from podrl.storage import lock
from podrl.storage.lock import Lock, Owner
from podrl.storage.storage import locate

_HOLD = """
import pathlib, sys, time
from podrl.storage.lock import Lock
Lock(pathlib.Path(sys.argv[1]), sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts another process that owns the directory."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def _record(place, owner: Owner) -> None:
    (place / lock.NAME).write_text(owner.text())


def _elsewhere() -> Owner:
    return dataclasses.replace(Owner.me(), machine="another", shown="process 7 on far since 2026")


def test_the_second_is_refused_in_one_sentence_that_names_the_first(tmp_path, holder):
    with pytest.raises(ValueError, match=rf"--workdir=run is in use by process {holder.pid} on .* since 20.*: wait"):
        Lock(tmp_path, "run")
    holder.send_signal(signal.SIGSTOP)  # alive, although it does not renew its lease
    with pytest.raises(ValueError, match="is in use by"):
        Lock(tmp_path, "run")


def test_a_killed_owner_is_succeeded_at_once_and_nothing_is_left_in_the_end(tmp_path, holder, caplog):
    holder.kill()
    taken = Lock(tmp_path, "run")  # the kernel may still be removing the process
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} "):
        Lock(tmp_path, "run")
    taken.release()
    assert list(tmp_path.iterdir()) == []
    Lock(tmp_path, "run").release()
    assert "waiting" not in caplog.text


@pytest.mark.parametrize("left", [b"", b"{", b"null", b'{"pid": 1}', b"\xff\x00", b"[" * 9999])
def test_any_remains_of_a_lock_are_taken_over(tmp_path, left):
    (tmp_path / lock.NAME).write_bytes(left)
    Lock(tmp_path, "run").release()


def test_the_owner_of_a_process_number_that_is_used_again_is_dead(tmp_path):
    me = Owner.me()
    assert me.alive() is True
    earlier = dataclasses.replace(me, born="1")
    assert earlier.alive() is False and _elsewhere().alive() is None
    _record(tmp_path, earlier)
    Lock(tmp_path, "run").release()


def test_a_run_that_is_refused_touches_nothing(tmp_path):
    with Run(tmp_path, config={"seed": 1}):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match="is in use by"):
            Run(tmp_path, config={"seed": 2})
        with Run(tmp_path, config={"seed": 1}, leads=False) as follower:  # the leader's lock counts for the whole pod
            assert not follower.stopping()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with Run(tmp_path, config={"seed": 2}):
        pass
    assert not (tmp_path / lock.NAME).exists()


def test_a_start_that_fails_gives_the_directory_back(tmp_path):
    (tmp_path / "checkpoints").write_text("no directory")
    for _ in range(2):
        with pytest.raises((ValueError, OSError), match=r"(?i)exists|directory"):
            Run(tmp_path)
    (tmp_path / "checkpoints").unlink()
    with Run(tmp_path):
        pass


@pytest.fixture
def quick(monkeypatch):
    """Shortens leases, so that they expire soon."""
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    monkeypatch.setattr(lock, "EXPIRY_S", 1.0)


@pytest.fixture(params=["network file system", "bucket"])
def shared(request, tmp_path, quick, monkeypatch):
    """Simulates a directory that other machines write to; its lock's record is a file or an object."""
    if request.param == "bucket":
        bucket = request.getfixturevalue("bucket")
        folder = f"runs/{tmp_path.name}"

        class Record:
            def write_text(self, text):
                bucket.put(f"{folder}/{lock.NAME}", text.encode())

            def read(self):
                return bucket.read(f"{folder}/{lock.NAME}")

        return locate(f"gs://bucket/{folder}"), Record()
    mounts = f"server:/x {tmp_path} nfs4 rw 0 0\n"
    proc = lock._proc
    monkeypatch.setattr(lock, "_proc", lambda name: mounts if name == "self/mounts" else proc(name))

    class File(pathlib.PosixPath):
        def read(self):
            return self.read_bytes() if self.exists() else b""

    return tmp_path, File(tmp_path / lock.NAME)


def test_a_lease_is_renewed_and_given_back(shared):
    place, record = shared
    taken = Lock(place, "run")
    first = Owner.parse(record.read())
    until(lambda: Owner.parse(record.read()) != first, "the renewal of the lease")
    now = Owner.parse(record.read())
    assert first is not None and now is not None and now.beat > first.beat and now.token == first.token
    with pytest.raises(ValueError, match="in use by"):
        Lock(place, "run")
    taken.release()
    assert record.read() == b""


def test_the_lease_of_a_process_that_died_on_this_machine_is_taken_over_at_once(shared, caplog):
    place, record = shared
    record.write_text(dataclasses.replace(Owner.me(), born="1").text())
    Lock(place, "run").release()
    assert "waiting" not in caplog.text


def test_a_lease_of_elsewhere_is_taken_over_when_it_is_not_renewed(shared, caplog):
    place, record = shared
    record.write_text(_elsewhere().text())
    Lock(place, "run").release()
    assert "on far since" in caplog.text and "waiting up to 1 s" in caplog.text


def test_a_lease_of_elsewhere_that_is_renewed_is_respected(shared, monkeypatch):
    place, record = shared
    other = _elsewhere()
    record.write_text(other.text())
    pause = time.sleep

    def beat(seconds):
        record.write_text(dataclasses.replace(other, beat=7).text())
        pause(seconds)

    monkeypatch.setattr(lock.time, "sleep", beat)
    with pytest.raises(ValueError, match=r"in use by process .* on far"):
        Lock(place, "run")


def test_an_owner_whose_lease_was_taken_over_ends(shared):
    place, record = shared
    taken = Lock(place, "run")

    def check() -> None:
        record.write_text(_elsewhere().text())
        taken.check()

    with pytest.raises(ValueError, match=r"--workdir=run was taken over by process .* on far"):
        until(check)
    taken.release()
    assert Owner.parse(record.read()) is not None, "release() must keep the lease of the other owner"


def test_a_lease_of_elsewhere_that_is_given_back_is_free_before_it_expires(tmp_path, monkeypatch):
    """The other owner removes the lease's file; a process that waited for the lease makes a new file at the path."""
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    proc = lock._proc
    mounts = f"server:/x {tmp_path} nfs4 rw 0 0\n"
    monkeypatch.setattr(lock, "_proc", lambda name: mounts if name == "self/mounts" else proc(name))
    _record(tmp_path, _elsewhere())
    pause = time.sleep

    def leave(seconds):
        (tmp_path / lock.NAME).unlink(missing_ok=True)
        pause(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(lock.time, "sleep", leave)
        taken = Lock(tmp_path, "run")
    owner = Owner.parse((tmp_path / lock.NAME).read_bytes())
    assert owner is not None and owner.alive()
    taken.release()
    assert list(tmp_path.iterdir()) == []


def test_of_those_that_claim_a_free_bucket_at_once_one_gets_it(bucket, quick, tmp_path):
    """All claimants read before the first one writes; a bucket accepts a write only over the version that its writer
    has read."""
    place = locate(f"gs://bucket/runs/{tmp_path.name}")
    claims = [(lock._Object(place), dataclasses.replace(Owner.me(), token=str(n), shown=f"host {n}")) for n in range(4)]
    assert [held.read() for held, _ in claims] == [None] * 4
    with concurrent.futures.ThreadPoolExecutor(len(claims)) as pool:
        got = list(pool.map(lambda claim: claim[0].write(claim[1]), claims))
    assert sorted(got) == [False, False, False, True]
    winner, owner = claims[got.index(True)]
    assert all(held.read() == owner for held, _ in claims)
    with pytest.raises(ValueError, match=f"in use by {owner.shown}: "):
        Lock(place, "run")
    winner.remove()
    Lock(place, "run").release()


@pytest.mark.e2e
def test_of_two_runs_one_trains_and_the_other_ends_with_1(tmp_path):
    small = (*SMALL, TWO_DEVICES, "--config.eval.problems=0", "--config.trainer.max_steps=3")
    with job(tmp_path / "run", base=small, logs=tmp_path / "1") as first:
        first.wait_for_step(1)
        first.signal(signal.SIGSTOP)  # stopped, so that it cannot end and release its lease
        second = run(tmp_path / "run", base=small, logs=tmp_path / "2", code=1)
        assert f"is in use by process {first.process.pid} on" in second.stderr
        assert len([line for line in second.stderr.splitlines() if line]) == 1, second.stderr
        first.signal(signal.SIGCONT)
        first.finish()
    assert trained_steps(tmp_path / "run") == [1, 2, 3]
