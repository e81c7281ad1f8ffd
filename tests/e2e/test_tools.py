"""A model that learns to ask a calculator: what it said, what it was given, and what became of it in a few steps."""

import json
import re

import pytest
from processes import comparable, run

from podrl.environments.calculator import calculator

pytestmark = pytest.mark.e2e
SHORT = (
    *("--config.trainer.max_steps=12", "--config.trainer.eval_every_n_steps=12", "--config.checkpoint.every=12"),
    *("--config.eval.problems=64", "--config.eval.samples=1", "--config.log.tensorboard=False"),
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
    assert not any(name.endswith("format") for name in scored), "sums have none"


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


def test_the_calculator_over_mcp_gives_the_same_run(done, tmp_path):
    pytest.importorskip("mcp")
    other = run(tmp_path / "run", base=("--config=grpo_tools.py:mcp", *SHORT))
    assert comparable(done.workdir) == comparable(other.workdir)
