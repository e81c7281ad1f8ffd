"""An agent program that asks over HTTP is trained in windows of tokens: the answers it got are in the samples; a killed
run, whose open episodes begin again, ends the same."""

import pytest
from processes import comparable, job, run, same_weights, samples

pytest.importorskip("httptools", reason="needs the extra [agents]")
pytestmark = pytest.mark.e2e
SHORT = (
    *("--config=grpo_agents.py", "--config.trainer.max_steps=4", "--config.trainer.eval_every_n_steps=4"),
    *("--config.rollout.prompts_per_step=4", "--config.env.processes=4", "--config.eval.problems=4"),
    *("--config.eval.samples=1", "--config.checkpoint.every=1", "--config.log.to=()"),
    *("--config.log.samples_every=1", "--config.log.samples=32"),
    *("--config.grpo.max_staleness=2", "--config.rollout.window_tokens=8"),
)


@pytest.mark.nightly("podrl/environments/front_worker.py", "podrl/environments/host.py", "podrl/rollout/branches.py")
def test_a_program_is_trained_over_http_and_a_killed_run_ends_the_same(tmp_path):
    one = run(tmp_path / "one" / "run", base=SHORT)
    with job(tmp_path / "two" / "run", base=SHORT) as killed:
        killed.wait_for_step(2)
        killed.kill()
    two = run(killed.workdir, base=SHORT)
    steps = [record for record in comparable(one.workdir) if "actor/grad_norm" in record]
    assert len(steps) == 4 and steps[0]["sampler/abs_diff_stale_0"] < 1e-5  # all tokens of later steps are stale
    assert any(record["rollout/mixed_samples"] > 0 for record in steps)
    assert any(record["actor/grad_norm"] > 0 for record in steps)
    assert all(record["env/failed/agent"] == 0 and record["env/chat_requests"] >= 1 for record in steps)
    trained = [sample for sample in samples(one.workdir) if "reward" in sample]
    answered = [turn for sample in trained for turn in sample["turns"] if turn["by"] == "environment"]
    assert trained and all("<tool_output>" in turn["text"] for turn in answered)
    assert any(record["env/calls"] for record in steps)
    assert samples(one.workdir) == samples(two.workdir) and comparable(one.workdir) == comparable(two.workdir)
    same_weights(one.workdir, two.workdir)
