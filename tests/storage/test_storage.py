"""Paths on disks and in buckets (of the storage emulator), and the errors of missing buckets."""

import socket
import sys

import numpy as np
import pytest

from podrl.data import sources
from podrl.data.tokenizer import Tokenizer
from podrl.job.config import TINY
from podrl.job.job import check_storage
from podrl.models import from_pretrained
from podrl.storage.storage import (
    StorageError,
    absolute,
    check,
    complete_steps,
    file_size,
    is_remote,
    locate,
    remove_tree,
)


def test_a_url_is_absolute_already(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(absolute("gs://bucket/run/1")) == "gs://bucket/run/1"
    assert absolute("run") == tmp_path / "run"


def test_a_local_path_stays_one(tmp_path):
    assert locate(tmp_path) == tmp_path and not is_remote(tmp_path)
    check(tmp_path, "--workdir", writes=True)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://", "gs:///run", "hf://model"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="give a local path or gs://BUCKET/PATH"):
        locate(url)


def test_without_gcsfs_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"pip install .*\[gcs\]'"):
        locate("gs://bucket/run")


def test_what_is_not_there_is_said(bucket):
    check("gs://bucket/run", "--workdir", writes=True)
    check("gs://bucket/data.jsonl", "data.path")
    with pytest.raises(ValueError, match="--workdir=gs://nowhere/run: there is no bucket nowhere"):
        check("gs://nowhere/run", "--workdir", writes=True)
    with pytest.raises(ValueError, match=r"data.path=gs://nowhere/a.jsonl: there is no bucket nowhere"):
        check("gs://nowhere/a.jsonl", "data.path")
    with pytest.raises(FileNotFoundError, match=r"Data file gs://bucket/absent.jsonl does not exist"):
        sources.read("gs://bucket/absent.jsonl")


def test_without_credentials_what_to_do_is_said(bucket, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    with pytest.raises(ValueError, match="no Google credentials here for bucket bucket"):
        check("gs://bucket/run", "--workdir", writes=True)


def test_a_server_that_does_not_answer_is_worth_another_try(bucket, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr("google.cloud.storage.retry.DEFAULT_RETRY._timeout", 0.1)
    with pytest.raises(StorageError, match="bucket bucket cannot be reached"):
        check("gs://bucket/run", "--workdir", writes=True)


@pytest.fixture
def black_hole():
    """Returns the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("workdir", "values", "key"),
    [
        ("gs://b/run", {}, "--workdir=gs://b/run"),
        ("run", {"data": {"path": "gs://b/x.jsonl"}}, "data.path=gs://b/x.jsonl"),
        ("run", {"data": {"eval_path": "gs://b/x.jsonl"}}, "data.eval_path=gs://b/x.jsonl"),
        ("run", {"model": {"path": "gs://b/m"}}, "model.path=gs://b/m"),
        ("run", {"model": {"reference": "gs://b/m"}}, "model.reference=gs://b/m"),
        ("run", {"reward": {"model": "gs://b/m"}}, "reward.model=gs://b/m"),
    ],
)
def test_without_a_network_every_path_of_a_job_is_given_up_soon(black_hole, monkeypatch, workdir, values, key):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", black_hole)
    monkeypatch.setattr("podrl.storage.storage.ANSWER_S", 0.2)
    with pytest.raises(StorageError, match=rf"^{key}: bucket b cannot be reached: nothing answered within 0\.2 s"):
        check_storage(workdir, values)


def test_without_a_network_a_model_given_to_python_is_given_up_soon(black_hole, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", black_hole)
    monkeypatch.setattr("podrl.storage.storage.ANSWER_S", 0.2)
    with pytest.raises(StorageError, match="gs://b/m: bucket b cannot be reached"):
        from_pretrained("gs://b/m")


def test_data_is_read_from_a_bucket(bucket):
    line = b'{"question": "1 + %d?", "answer": "%d"}\n'
    urls = [bucket.put(f"data/part-{i}.jsonl", line % (i, i + 1)) for i in range(2)]
    assert sources.read(urls[1])[0]["answer"] == "2"
    assert [record["answer"] for record in sources.read("gs://bucket/data/part-*.jsonl")] == ["1", "2"]
    with pytest.raises(ValueError, match="ArrayRecord files are read from disks only"):
        sources.read(bucket.put("data/a.array_record", b"x"))


def test_a_model_directory_is_read_from_a_bucket(bucket):
    for file in TINY.iterdir():
        bucket.put(f"tiny/{file.name}", file.read_bytes())
    assert file_size(locate("gs://bucket/tiny") / "model.safetensors") == (TINY / "model.safetensors").stat().st_size
    here, there = from_pretrained(TINY), from_pretrained("gs://bucket/tiny")
    assert here.config == there.config
    tokens_BT = np.arange(8)[None]
    np.testing.assert_array_equal(here(tokens_BT), there(tokens_BT))
    assert Tokenizer("gs://bucket/tiny").encode("1 + 1") == Tokenizer(TINY).encode("1 + 1")


def test_a_step_counts_once_its_checkpoint_is_committed(bucket):
    assert complete_steps(locate("gs://bucket/c")) == []
    for name in ("1/commit_success.txt", "1/state/a", "2/state/a"):
        bucket.put(f"c/{name}", b"x")
    assert complete_steps(locate("gs://bucket/c")) == [1]
    remove_tree(locate("gs://bucket/c/1"))
    assert bucket.names("c/") == ["c/2/state/a"]
