"""A run pins its model and data set of the hub in config.json, resumes after the branch moved, and pushes its model."""

import json
import pathlib
import subprocess
import sys

import pytest
from hub_server import serving_hub
from processes import environment, run, trained_steps

import podrl

pytestmark = pytest.mark.e2e


@pytest.mark.nightly("podrl/storage/hub.py")
def test_a_run_from_the_hub_keeps_its_revision_and_is_pushed_back(tmp_path, monkeypatch):
    rows = [
        {"question": f"Tom has {i} apples and buys {i + 1}. How many?", "answer": f"{2 * i + 1}"} for i in range(40)
    ]
    with serving_hub() as server:
        tiny = pathlib.Path(podrl.TINY)
        server.files["models/acme/tiny"] = {path.name: path.read_bytes() for path in tiny.iterdir() if path.is_file()}
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        server.files["datasets/acme/sums"] = {"main/train.jsonl": lines.encode()}
        commits = [server.commit(name) for name in ("models/acme/tiny", "datasets/acme/sums")]
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        flags = ["--config.model.path=acme/tiny", "--config.data.path=hf:acme/sums:main:train"]
        flags += ["--config.eval.problems=0", "--config.data.system_prompt="]
        run(tmp_path / "run", *flags, "--config.trainer.max_steps=2")
        server.files["datasets/acme/sums"]["main/train.jsonl"] = b'{"question": "moved", "answer": "1"}\n'
        run(tmp_path / "run", *flags, "--config.trainer.max_steps=4")
        assert trained_steps(tmp_path / "run") == [1, 2, 3, 4]
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        config = config.get("content", config)
        assert config["model"]["path"] == f"acme/tiny@{commits[0]}"
        assert config["data"]["path"] == f"hf:acme/sums@{commits[1]}:main:train"
        command = [sys.executable, "-m", "podrl.export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
        done = subprocess.run(
            [*command, "--push=acme/made"],
            env=environment(HF_TOKEN="secret"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and f"{server.url}/acme/made/commit" in done.stdout, done.stderr
        assert {"README.md", "config.json", "model.safetensors"} <= set(server.files["models/acme/made"])
        assert f"hf:acme/sums@{commits[1]}" in server.files["models/acme/made"]["README.md"].decode()
