"""The podrl side of docs/from-*.md runs as it is printed, on the embedded model."""

import json
import re
import subprocess
import sys

import pytest
from metric_names import ROOT, unlisted
from processes import environment

from podrl.rundir.metrics import read_metrics


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / f"from-{page}.md").read_text(), re.DOTALL)


def finished(command: list[str], folder) -> str:
    env = environment()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["tunix", "trl", "verl"])
def test_scripts_are_short(page):
    for block in (*blocks(page, "python"), *blocks(page, "bash")):
        lines = block.rstrip().splitlines()
        assert len([line for line in lines if line.strip()]) <= 25
        assert max(map(len, lines)) <= 130


@pytest.mark.e2e
def test_scripts_train(tmp_path):
    """One process runs both, so that the second finds compiled what the first has in common with it."""
    for page in ("tunix", "trl"):
        (tmp_path / f"{page}_twin.py").write_text(blocks(page, "python")[1])
    both = "import trl_twin, tunix_twin; print('reached', tunix_twin.main(), trl_twin.main())"
    assert "reached 3 3" in finished([sys.executable, "-c", both], tmp_path)


@pytest.mark.e2e
def test_the_command_trains(tmp_path):
    records = [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "my_reward.py").write_text(blocks("verl", "python")[0])
    command = blocks("verl", "bash")[1].replace("python -m", f"{sys.executable} -m")
    finished(["bash", "-ec", command], tmp_path)
    trained = read_metrics(tmp_path / "run")
    assert [record["step"] for record in trained] == [1, 2] and all("reward/score" in record for record in trained)
    assert unlisted(trained[-1]) == []
