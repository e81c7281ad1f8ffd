"""The commands of docs/real-model.md that run without a TPU: dry runs, launchers, and the sizes of plans."""

import json
import math
import re
import shlex
import string
import subprocess
import sys

import pytest
from metric_names import ROOT
from processes import environment

from launch import gke, xpk
from podrl.job.config import TINY
from podrl.job.config_file import find_config, load_config
from podrl.mesh.build import parse_mesh
from podrl.models.sizes import config_of
from podrl.plan.chips import parse_topology

BUCKET = {"BUCKET": "gs://my-bucket", "IMAGE": "registry/podrl:1"}


def commands(start: str, **names: str) -> list[list[str]]:
    """Lists the page's commands that begin with `start`, split into words, with their variables replaced."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "real-model.md").read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [
        shlex.split(string.Template(line).substitute(BUCKET | names), comments=True)
        for line in lines
        if line.startswith(start)
    ]


def test_plans_are_of_the_meshes_and_sizes_of_their_configurations():
    found = commands("python -m podrl.plan ")
    assert len(found) == 2
    for words in found:
        flags = dict(word.removeprefix("--").split("=", 1) for word in words[3:])
        values = load_config(find_config(flags["config"])).to_dict()
        assert config_of(values["model"]["size"]).num_layers in (28, 42)
        for role in ("trainer", "rollout"):
            topology = parse_topology(flags[role], key=role)
            assert math.prod(parse_mesh(values["roles"][role]["mesh"])) == math.prod(topology.shape) * topology.slices


def test_launchers_take_the_commands(capsys):
    (words,) = commands("python -m launch.xpk ")
    assert xpk.main(words[3:]) == 0
    (words,) = commands("python -m launch.gke ")
    assert gke.main(words[3:]) == 0
    # xpk's script has one command for all hosts, and the JobSet of GKE one for each of the two roles.
    assert capsys.readouterr().out.count("grpo_real.py:gemma4_e4b_v5e16") == 3
    (gemma, qwen) = commands("launch/tpu_vm.sh ")
    assert "--config=grpo_real.py:gemma4_e4b_v5e16" in gemma and "--config=grpo_real.py:qwen3_06b_v6e8" in qwen


@pytest.mark.e2e
def test_dry_runs_end_well(tmp_path):
    records = [{"question": f"What is {n} + 4?", "answer": f"{n} + 4 = {n + 4}\n#### {n + 4}"} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = [
        w
        for w in commands("python -m podrl.launch ", MODEL=str(TINY), DATA=f"{tmp_path}/train.jsonl")
        if w[-1] == "--dry_run"
    ]
    assert len(found) == 3
    for words in found:
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Data: " in done.stdout and "16 x 8" in done.stdout, done.stdout
