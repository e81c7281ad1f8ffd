"""A mirrored directory arrives complete in the bucket; after failures the copy is repaired, and the writer sees no
error."""

import logging
import os
import time

import pytest
from waits import until

from podrl.storage import mirror
from podrl.storage.mirror import Mirror
from podrl.storage.storage import StorageError


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(mirror, "_RETRY_S", 0.02)


def _files(directory):
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


def test_files_are_fetched_changed_and_brought_back(tmp_path):
    remote = tmp_path / "remote"
    (remote / "checkpoints" / "2").mkdir(parents=True)
    (remote / "metrics.jsonl").write_text("1\n")
    copied = Mirror(remote)
    assert _files(copied.local) == {"metrics.jsonl": "1\n"}
    copied.start()
    with (copied.local / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    (copied.local / "tensorboard").mkdir()
    (copied.local / "tensorboard" / "events").write_text("e")
    (copied.local / "config.tmp").write_text("half")
    os.symlink("metrics.jsonl", copied.local / "link")
    assert copied.push(20)
    assert _files(remote) == {"metrics.jsonl": "1\n2\n", "tensorboard/events": "e"}
    (copied.local / "summary.json").write_text("{}")
    assert copied.close(20)
    assert (remote / "summary.json").exists() and not copied.local.exists()


def test_only_what_changed_is_written_again(tmp_path):
    copied = Mirror(tmp_path)
    (copied.local / "a").write_text("mine")
    copied.start()
    (tmp_path / "a").write_text("theirs")
    assert copied.push(20)
    assert (tmp_path / "a").read_text() == "theirs"
    (copied.local / "a").write_text("mine, longer")
    assert copied.close(20)
    assert (tmp_path / "a").read_text() == "mine, longer"


def test_folders_that_are_wanted_are_fetched_and_what_is_removed_is_removed_there(tmp_path):
    remote = tmp_path / "remote"
    for folder in ("outside", "tensorboard"):
        (remote / folder).mkdir(parents=True)
        (remote / folder / "3").write_text(folder)
    copied = Mirror(remote, folders=("outside", "absent"))
    assert _files(copied.local) == {"outside/3": "outside"}
    copied.start()
    (copied.local / "outside" / "4").write_text("4")
    assert copied.push(20)
    (copied.local / "outside" / "3").unlink()
    assert copied.close(20)
    assert _files(remote) == {"outside/4": "4", "tensorboard/3": "tensorboard"}


def test_what_is_hurried_arrives_soon_and_not_at_every_change(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_SOON_S", 0.3)
    copied = Mirror(tmp_path)
    copied.start()
    copies, copy = [], copied._copy
    monkeypatch.setattr(copied, "_copy", lambda: (copies.append(time.monotonic()), copy()))
    for number in range(30):
        (copied.local / "a").write_text(str(number))
        copied.hurry()
        time.sleep(0.02)
    until(lambda: (tmp_path / "a").exists() and (tmp_path / "a").read_text() == "29", "the last copy")
    assert 1 <= len(copies) <= 4
    assert copied.close(20)


def test_trouble_is_told_once_and_ends_when_it_ends(tmp_path, caplog):
    copied = Mirror(tmp_path / "remote")
    (copied.local / "a").write_text("1")
    copied.start()
    (tmp_path / "remote" / "tensorboard").write_text("a file where a directory must be made")
    (copied.local / "tensorboard").mkdir()
    (copied.local / "tensorboard" / "events").write_text("e")
    with caplog.at_level(logging.ERROR):
        assert not copied.push(0.5)
    assert len(caplog.records) == 1 and "cannot be written to" in caplog.text
    (tmp_path / "remote" / "tensorboard").unlink()
    assert copied.close(20)
    assert _files(tmp_path / "remote") == {"a": "1", "tensorboard/events": "e"}


def test_what_could_not_be_copied_is_kept(tmp_path):
    copied = Mirror(tmp_path / "remote")
    copied.start()
    (tmp_path / "remote").write_text("in the way")
    (copied.local / "a").write_text("1")
    assert not copied.close(0.2)
    assert (copied.local / "a").read_text() == "1"


def test_a_first_copy_that_fails_is_an_error(tmp_path):
    (tmp_path / "remote").write_text("in the way")
    copied = Mirror(tmp_path / "remote")
    (copied.local / "a").write_text("1")
    with pytest.raises(StorageError, match="cannot be written to"):
        copied.start()
