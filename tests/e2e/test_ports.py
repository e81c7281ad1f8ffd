"""The podrl code of docs/from-*.md runs as it is printed, on the embedded model."""

import http.server
import json
import re
import subprocess
import sys
import threading

import pytest
from metric_names import ROOT, unlisted
from processes import environment
from servers import serving

from podrl.rundir.metrics import read_metrics
from podrl.runtime.local_pod import free_ports


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / f"from-{page}.md").read_text(), re.DOTALL)


def finished(command: list[str], folder) -> str:
    env = environment()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["tunix", "trl", "verl", "dr-tulu"])
def test_scripts_are_short(page):
    for block in (*blocks(page, "python"), *blocks(page, "bash")):
        lines = block.rstrip().splitlines()
        assert len([line for line in lines if line.strip()]) <= 25
        assert max(map(len, lines)) <= 130


@pytest.mark.nightly("docs/from-tunix.md", "docs/from-trl.md", "podrl/learner/learner.py", "podrl/learner/settings.py")
@pytest.mark.e2e
def test_scripts_train(tmp_path):
    """One process runs the scripts of docs/from-tunix.md and docs/from-trl.md, so that programs which both need are
    compiled only once."""
    for page in ("tunix", "trl"):
        (tmp_path / f"{page}_twin.py").write_text(blocks(page, "python")[1])
    both = "import trl_twin, tunix_twin; print('reached', tunix_twin.main(), trl_twin.main())"
    assert "reached 3 3" in finished([sys.executable, "-c", both], tmp_path)


@pytest.mark.nightly("docs/from-verl.md", "podrl/rewards/compose.py", "podrl/job/config.py")
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


class Judge(http.server.BaseHTTPRequestHandler):
    """Stands in for the server of a judge model; it scores every answer 1."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": "SCORE: 1"}}]}).encode())

    def log_message(self, format, *args):
        """Drops the line that the base class would print for every request."""


@pytest.mark.nightly("docs/from-dr-tulu.md", "podrl/environments", "podrl/rewards")
@pytest.mark.e2e
def test_the_search_job_trains(tmp_path):
    """The embedded model trains: lengths, prompts and steps are smaller than on the page."""
    pytest.importorskip("mcp", reason="needs the extra [tools]")
    pytest.importorskip("yaml", reason="needs the extra [tools]")
    truth = {"query": "When was the bridge of Belmora built?", "rubrics": [{"description": "dates it", "weight": 1.0}]}
    record = {"messages": [{"role": "user", "content": truth["query"]}], "ground_truth": json.dumps(truth)}
    (tmp_path / "train.jsonl").write_text(4 * (json.dumps(record) + "\n"))
    (tmp_path / "tulu.py").write_text(blocks("dr-tulu", "python")[0])
    (tmp_path / "prompt.yaml").write_text("system_prompt: Cite.\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "The bridge of Belmora was built in 1473."}\n')
    start, command = blocks("dr-tulu", "bash")[1].splitlines()[0], blocks("dr-tulu", "bash")[2]
    port, judge = free_ports(2)
    small = {
        "rollout": {"max_prompt_length": 96, "max_response_tokens": 96, "max_tokens_to_generate": 16},
        "trainer": {"max_steps": 1},
        "grpo": {"num_generations": 2},
        "eval": {"problems": 0},
    }
    small["rollout"] |= {"kv_cache_size": 256, "prompts_per_step": 2}
    flags = " ".join(f"--config.{name}.{key}={n}" for name, keys in small.items() for key, n in keys.items())
    command = command.replace("max_score=2\n", f"max_score=2 {flags}\n").replace("python -m", f"{sys.executable} -m")
    command = command.replace(":8000/", f":{port}/").replace(":8001/", f":{judge}/")
    words = (
        start.partition("#")[0].replace("port=8000", f"port={port}").replace("texts.jsonl", f"{tmp_path}/texts.jsonl")
    )
    scoring = http.server.ThreadingHTTPServer(("127.0.0.1", judge), Judge)
    threading.Thread(target=scoring.serve_forever, daemon=True).start()
    with scoring, serving([sys.executable, *words.split()[1:]], port, environment()):
        finished(["bash", "-ec", command], tmp_path)
        scoring.shutdown()
    (trained,) = [one for one in read_metrics(tmp_path / "run") if "reward/mean" in one]
    assert trained["reward/rubric"] == 0.5 and {"reward/citations", "reward/searches"} <= set(trained)
    assert (tmp_path / "my_model" / "config.json").exists() and unlisted(trained) == []
