"""A model learns to call a calculator: the words of the model, the answers of the tool, and progress within a few
steps."""

import json
import re
import sys
from pathlib import Path

import pytest
from processes import comparable, environment, job, run, samples
from servers import serving

sys.path.insert(0, str(Path(__file__).parent.parent / "view"))
import browser as chromium

from podrl.environments.calculator import calculator
from podrl.rundir.trace import read_step
from podrl.runtime.local_pod import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.optimised]
SHORT = (
    *("--config.trainer.max_steps=12", "--config.trainer.eval_every_n_steps=12", "--config.checkpoint.every=12"),
    *("--config.eval.problems=64", "--config.eval.samples=1", "--config.log.to=()"),
    *("--config.log.samples_every=1", "--config.log.samples=16"),
)
CALL = re.compile(r'<call_tool name="calculator">([^<]*)</call_tool>\n<tool_output>(\d+)</tool_output>\n\n')


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run(tmp_path_factory.mktemp("tools") / "run", base=("--config=grpo_tools.py", *SHORT))


def test_calling_is_learned(done):
    records = comparable(done.workdir)
    steps = [record for record in records if "actor/grad_norm" in record]
    assert len(steps) == 12 and steps[0]["episode/calls"] < 0.3 and steps[-1]["episode/calls"] > 0.45
    before, after = (record["eval/greedy_answer"] for record in records if "eval/greedy_answer" in record)
    assert before < 0.02 and after > 0.6
    scored = {name for record in records for name in record if name.startswith(("eval/", "accuracy/"))}
    assert {"eval/greedy_answer", "accuracy/answer"} <= scored
    assert not any(name.endswith("format") for name in scored), "sums have no format to score"


def test_calls_are_in_the_timeline(done):
    spans = [json.loads(line) for line in (done.workdir / "spans.jsonl").read_text().splitlines()]
    calls = [span for span in spans if span["lane"] == "tools"]
    made = [record["step"] for record in comparable(done.workdir) if record.get("episode/calls")]
    asked = {step: sum(span["step"] == step for span in calls) for step in made}
    assert {span["name"] for span in calls} == {"calculator"} and all(span["s"] >= 0 for span in calls)
    assert len(made) == 12 and all(asked.values()), asked
    assert any("failed" in span for span in calls) and any("failed" not in span for span in calls)


def test_calls_are_answered_by_the_calculator(done):
    samples = [json.loads(line) for line in (done.workdir / "samples.jsonl").read_text().splitlines()]
    answered = [found for sample in samples for found in CALL.findall(sample["completion"])]
    assert len(answered) > 20 and all(calculator(query) == output for query, output in answered)
    trained = [sample for sample in samples if "reward" in sample]
    assert len(trained) == 12 * 16
    for sample in trained:
        calls = [turn for turn in sample["turns"] if turn["by"] == "calculator"]
        assert len(calls) <= 2 and sample["turns"][0]["by"] == "model"
        assert all(turn["versions"][0] >= 0 for turn in sample["turns"] if turn["by"] == "model")


# The job of the fixture `done`, but with four steps and with the calculator over MCP.
OVER_MCP = ("--config=grpo_tools.py:mcp", *SHORT, "--config.trainer.max_steps=4", "--config.eval.problems=1")

OVER_HTTP = pytest.mark.nightly("podrl/environments/servers.py", "podrl/environments/mcp_worker.py")


def served(kind, port):
    """Serves the calculator over the MCP transport `kind` on a port of this machine."""
    command = [sys.executable, "-m", "podrl.environments.calculator_server", f"--transport={kind}", f"--port={port}"]
    return serving(command, port, environment())


def steps_of(workdir):
    """Returns the training records of the first four steps and their samples."""
    records = [record for record in comparable(workdir) if "actor/grad_norm" in record][:4]
    trained = [{name: value for name, value in one.items() if not name.startswith("eval/")} for one in records]
    return trained, [sample for sample in samples(workdir) if sample["step"] <= 4 and "reward" in sample]


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    """Runs the job over MCP on two hosts: one trains, the other samples and calls the calculator."""
    pytest.importorskip("mcp")
    two = ("--local_processes=2", "--fake_devices=1")
    return run(tmp_path_factory.mktemp("pod") / "run", *two, base=OVER_MCP)


def test_the_calculator_over_stdio_to_a_pod_gives_the_same_run(done, pod):
    assert steps_of(pod.workdir) == steps_of(done.workdir)


@pytest.mark.nightly("podrl/view", "podrl/rundir", "tests/view")
@pytest.mark.skipif(not chromium.CHROMIUM, reason="needs a browser: Debian's package chromium")
def test_the_page_shows_a_run_of_two_hosts_with_tools(pod, tmp_path):
    shown = {
        "curves": ["tools/calculator/calls", "step 4 of 4"],
        "timeline": ["Calls of tools", "calculator", "trainer 0", "rollout 0", "critical path"],
        "groups": ["<b>calculator</b>", 'class="tokens"', "sample 7", 'class="given"', ", sampled · logprob"],
        "samples": ["128 samples", "/groups?run=0&amp;step=4"],
        "run": ["Roles (2 x cpu)", "host 1: ", "greedy_answer", "time/publish"],
    }
    called = next(b for b, episode in enumerate(read_step(str(pod.workdir), 4).episodes) if len(episode["turns"]) > 1)
    more = {"curves": "&find=tools/calculator", "samples": "&step=4", "groups": f"&step=4&group={called // 8}"}
    with chromium.served(pod.workdir) as address, chromium.browser(tmp_path / "profile") as page:
        for view, texts in shown.items():
            page.open(f"{address}/{view}?run=0{more.get(view, '')}")
            if view == "groups":
                page.ask("document.querySelector('.tokens').focus()")
                page.key("ArrowRight")
            document = page.ask("document.documentElement.outerHTML")
            assert [text for text in texts if text not in document] == [], view
            assert page.ask("seen.shift") < 0.1, (view, page.ask("seen.shifts"))
        assert page.said == []


@OVER_HTTP
def test_the_calculator_over_sse_gives_the_same_run(done, tmp_path):
    pytest.importorskip("mcp")
    (port,) = free_ports(1)
    with served("sse", port):
        other = run(tmp_path / "run", f"--config.env.mcp=('http://127.0.0.1:{port}/sse',)", base=OVER_MCP)
    assert steps_of(other.workdir) == steps_of(done.workdir)


@OVER_HTTP
def test_a_server_that_is_gone_ends_the_run_and_the_same_command_goes_on(done, tmp_path):
    """The server (streamable HTTP) is killed in mid-run, and the run ends with an error that names the server. The next
    start finds the server again."""
    pytest.importorskip("mcp")
    (port,) = free_ports(1)
    target = f"http://127.0.0.1:{port}/mcp"
    flags = (f"--config.env.mcp=('{target}',)", "--config.env.server_deadline_s=1")
    with served("streamable-http", port) as server, job(tmp_path / "run", *flags, base=OVER_MCP) as first:
        first.wait_for_step(1)
        server.kill()
        assert first.end() == 42, first.stderr
    assert f"MCP server {target} has been away for 1 s" in first.stderr and "Traceback" not in first.stderr
    with served("streamable-http", port):
        last = run(tmp_path / "run", *flags, base=OVER_MCP)
    assert steps_of(last.workdir) == steps_of(done.workdir)


@pytest.mark.nightly("configs/sft_tools.py", "podrl/learner/answers")
def test_the_checkpoint_is_trained_by_its_command(tmp_path):
    """Runs a few steps of the command: at first all targets are calls, then some are guesses. All steps would take
    minutes (see configs/sft_tools.py)."""
    few = ("--config.trainer.max_steps=4", "--config.sft.full_steps=2", "--config.log.to=()")
    done = run(tmp_path / "run", base=("--config=sft_tools.py", *few))
    losses = [record["sft/loss"] for record in done.records() if "actor/grad_norm" in record]
    assert len(losses) == 4 and losses[-1] < losses[0]


BY_HEART = {"path": "sums", "name": "by_heart", "env": "none", "system_prompt": "By heart."}
MIXED = (f"--config.data.sources={({'path': 'sums'}, BY_HEART)!r}", "--config.env.others=('none',)")


@pytest.mark.nightly("podrl/rollout/episodes.py", "podrl/learner/ppo.py")
@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [("--config.model.lora.rank=4",), ("--config.algorithm=ppo", "--config.ppo.beta=0.0")], ids=["lora", "ppo"]
)
def test_other_ways_to_train_take_samples_with_calls(how, tmp_path):
    """Makes two steps that train adapters, or two that train a critic too; the calculator's answers are in the rows."""
    few = ("--config.trainer.max_steps=2", "--config.trainer.eval_every_n_steps=0", "--config.checkpoint.every=2")
    mixed = MIXED if "lora" in how[0] else ()
    all_samples = ("--config.log.samples=128",)
    done = run(tmp_path / "run", base=("--config=grpo_tools.py", *SHORT, *few, *all_samples, *how, *mixed))
    records = comparable(done.workdir)
    steps = [record for record in records if "actor/grad_norm" in record]
    assert len(steps) == 2 and all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["episode/calls"] > 0 and step["episode/given_tokens"] > 0 for step in steps)
    if mixed:  # in samples without the calculator the model writes calls, too, but they get no answer
        rows = [json.loads(line) for line in (done.workdir / "samples.jsonl").read_text().splitlines()]
        wrote = [row for row in rows if "<call_tool" in row["completion"]]
        assert {("By heart." in row["prompt"], len(row["turns"]) > 1) for row in wrote} == {
            (False, True),
            (True, False),
        }
