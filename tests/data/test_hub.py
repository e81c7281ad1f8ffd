"""Models and data sets of a hub: pinned, downloaded once, resumed, offline, gated, and pushed back."""

import json
import pathlib

import jax
import numpy as np
import pytest
from hub_server import serving_hub

import podrl
from podrl.data.mixture import split
from podrl.data.pipeline import DataConfig
from podrl.data.tokenizer import Tokenizer
from podrl.job.config import ModelSource
from podrl.rundir.card import card
from podrl.storage import hub
from podrl.storage.storage import StorageError

TINY = pathlib.Path(podrl.TINY)
pytest.importorskip("huggingface_hub")


def rows(start, count=3):
    lines = [json.dumps({"question": f"q{i}", "answer": f"{i}"}) for i in range(start, start + count)]
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving_hub() as found:
        found.files["models/acme/tiny"] = {
            path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file() and path.suffix != ".safetensors"
        } | {"weights.bin": b"x"}
        found.files["datasets/acme/sums"] = {
            "main/train-00000-of-00002.jsonl": rows(0),
            "main/train-00001-of-00002.jsonl": rows(3),
            "main/test-00000-of-00001.jsonl": rows(6),
            "hard/train.jsonl": rows(9),
        }
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield found
    forget()


def forget():
    """Empties the caches, as in a new process."""
    hub._snapshot.cache_clear()
    hub._listed.cache_clear()


def gets(server, ending):
    return [entry for entry in server.asked if entry[0] == "GET" and "/resolve/" in entry[1] and ending in entry[1]]


def test_a_model_is_downloaded_once_and_then_used_offline(server, monkeypatch):
    values = hub.pinned({"model": {"path": "acme/tiny"}}, {})
    pinned = values["model"]["path"]
    assert pinned == f"acme/tiny@{server.commit('models/acme/tiny')}"
    directory = ModelSource(pinned).directory
    assert Tokenizer(directory).encode("2+2") == Tokenizer(TINY).encode("2+2")
    assert not gets(server, "weights.bin") and len(gets(server, "tokenizer.json")) == 1
    forget()
    assert ModelSource(pinned).directory == directory and len(gets(server, "tokenizer.json")) == 1
    forget()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server listens at this port
    assert ModelSource(pinned).directory == directory


def test_python_takes_a_name_of_the_hub_where_it_takes_a_directory(server):
    server.files["models/acme/tiny"]["model.safetensors"] = (TINY / "model.safetensors").read_bytes()
    mesh = podrl.make_mesh("fsdp=1", jax.devices()[:1])
    config = podrl.ClusterConfig(
        role_to_mesh={podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh},
        training_config=podrl.RLTrainingConfig(eval_every_n_steps=0, max_steps=1),
        rollout_config=podrl.RolloutConfig(max_prompt_length=16, max_tokens_to_generate=16),
    )
    cluster = podrl.RLCluster(actor="acme/tiny", cluster_config=config)
    assert cluster.tokenizer.encode("2+2") == Tokenizer(TINY).encode("2+2")
    embed = podrl.from_pretrained("acme/tiny").params["embed"]
    np.testing.assert_array_equal(embed, podrl.from_pretrained(TINY).params["embed"])
    np.testing.assert_array_equal(embed, np.asarray(cluster.actor.params()["embed"], np.float32))
    assert len(gets(server, "model.safetensors")) == 1
    with pytest.raises(ValueError, match="acme/none is not a directory here, nor a model of the hub"):
        podrl.RLCluster(actor="acme/none", cluster_config=config)


def test_a_run_keeps_its_commit_when_the_branch_moves(server):
    first = hub.pinned({"data": {"sources": ({"path": "hf:acme/sums:main:train"},)}}, {})
    commit = server.commit("datasets/acme/sums")
    assert first["data"]["sources"][0]["path"] == f"hf:acme/sums@{commit}:main:train"
    server.files["datasets/acme/sums"]["main/train-00000-of-00002.jsonl"] = rows(100)
    asked = {"data": {"sources": ({"path": "hf:acme/sums:main:train"},)}}
    assert hub.pinned(asked, first) == first
    assert hub.pinned(asked, {}) != first
    other = {"data": {"sources": ({"path": "hf:acme/sums:main:test"},)}}
    assert hub.pinned(other, first)["data"]["sources"][0]["path"].endswith(":main:test")


def test_teachers_and_evaluation_sets_are_pinned_too(server):
    asked = {"model": {"teachers": ({"path": "acme/tiny"}, {"path": "./old"})}}
    asked |= {"eval": {"sets": ({"name": "own", "path": "hf:acme/sums:main:test"},)}}
    first = hub.pinned(asked, {})
    assert first["model"]["teachers"] == ({"path": f"acme/tiny@{server.commit('models/acme/tiny')}"}, {"path": "./old"})
    commit = server.commit("datasets/acme/sums")
    assert first["eval"]["sets"] == ({"name": "own", "path": f"hf:acme/sums@{commit}:main:test"},)
    assert asked["model"]["teachers"][0]["path"] == "acme/tiny", "pinned() must not change its argument"
    assert hub.pinned(asked, first) == first
    assert hub.pinned(asked, asked) == asked, "a run that began without pinned commits resumes without them"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hf:acme/sums:main:train", range(6)),
        ("hf:acme/sums:main:test", range(6, 9)),
        ("hf:acme/sums:hard:train", range(9, 12)),
    ],
)
def test_splits_are_files_of_the_data_set(server, name, found):
    opened = split(DataConfig(path=name, eval_fraction=0.0))
    assert [record["question"] for record in opened.parts[0].train] == [f"q{i}" for i in found]


def test_the_card_of_a_data_set_says_what_its_splits_are(server):
    files = server.files["datasets/acme/sums"]
    rows = "  data_files:\n  - split: train\n    path: ['main/train-*', 'hard/*']\n"
    files["README.md"] = f"---\nconfigs:\n- config_name: all\n{rows}---\n".encode()
    opened = split(DataConfig(path="hf:acme/sums:all:train", eval_fraction=0.0))
    assert len(opened.parts[0].train) == 9
    with pytest.raises(ValueError, match=r"hold the split 'dev' of 'all'; the data set has hard/train\.jsonl"):
        split(DataConfig(path="hf:acme/sums:all:dev"))
    with pytest.raises(ValueError, match="must be hf:ORG/NAME:SPLIT"):
        split(DataConfig(path="hf:acme/sums"))


def test_an_interrupted_download_goes_on_where_it_broke_off(server):
    big = server.files["models/acme/tiny"]["model.safetensors"] = (
        bytes(range(256)) * 96_000
    )  # more than two blocks of the download
    server.cuts.add("model.safetensors")
    try:
        directory = hub.local("acme/tiny")
    except StorageError as error:
        assert "a download goes on where it stopped" in str(error)
        directory = hub.local("acme/tiny")
    assert pathlib.Path(directory, "model.safetensors").read_bytes() == big
    ranges = [entry[2] for entry in gets(server, "model.safetensors")]
    assert len(ranges) == 2 and ranges[0] == "" and int(ranges[1].removeprefix("bytes=").rstrip("-")) > 0


def test_what_cannot_be_had_is_said_in_a_sentence(server, monkeypatch):
    server.gated.add("models/acme/tiny")
    with pytest.raises(ValueError, match=r"acme/tiny is gated: accept its licence .* set HF_TOKEN .*no token here"):
        hub.local("acme/tiny")
    with pytest.raises(ValueError, match="acme/none is not a directory here, nor a model of the hub"):
        hub.pinned({"model": {"path": "acme/none"}}, {})
    with pytest.raises(ValueError, match="acme/sums has no revision 'v9'"):
        hub.pinned({"data": {"path": "hf:acme/sums@v9:main:train"}}, {})
    with pytest.raises(ValueError, match="acme/sums has no revision 'v9'"):
        hub.data_files("hf:acme/sums@v9:main:train")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pathlib.Path(hub.local("acme/tiny"), "config.json").exists()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="acme/other is not a directory here, and a request to the hub for main"):
        hub.local("acme/other")


def test_paths_of_this_machine_are_no_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("little", "runs/mine", "./a/b", "/a/b", "gs://a/b", "a/b/c", "~/a"):
        assert hub.parse_name(path) is None and hub.local(path) == path
    assert hub.parse_name("tiny") is None and hub.local("tiny") == str(hub.EMBEDDED["tiny"])
    assert hub.parse_name("acme/tiny@v1") == hub.Name("acme/tiny", "v1", "model")


def test_a_model_is_pushed_with_its_card(server, tmp_path, monkeypatch):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir(), out.mkdir()
    (run / "summary.json").write_text('{"before": {"greedy_answer": 0.25}, "after": {"greedy_answer": 0.816}}')
    config = {"model": {"path": "acme/tiny@abc", "lora": {"rank": 4}}, "data": {"path": "hf:acme/sums@def:main:train"}}
    config |= {"algorithm": "grpo", "trainer": {"max_steps": 9, "learning_rate": 1e-3}, "reward": {"fns": ["answer"]}}
    (out / "README.md").write_text(card(run, config, 9))
    (out / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="that this account may read or write"):
        hub.push(out, "acme/made")
    with pytest.raises(ValueError, match="--push=made must be ORG/NAME"):
        hub.push(out, "made")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert hub.push(out, "acme/made").startswith(f"{server.url}/acme/made/commit/")
    sent = server.files["models/acme/made"]
    assert sent["config.json"] == b"{}"
    text = sent["README.md"].decode()
    for said in ('base_model: "acme/tiny"', 'datasets: ["acme/sums"]', "| data | hf:acme/sums@def:main:train |"):
        assert said in text
    assert "| algorithm | grpo, adapters of rank 4 |" in text and "| greedy_answer | 0.25 | 0.816 |" in text
