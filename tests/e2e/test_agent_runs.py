"""An agent program that calls the model over HTTP is trained: the answers that it received are in the samples. A killed
run, or a run that loses a rollout host, begins its open episodes again and ends as an undisturbed run."""

import collections
import os
import signal

import pytest
from processes import comparable, job, run, same_end, same_weights, samples
from test_pods import process

from podrl.learner.run_environments import ERRORS

pytest.importorskip("httptools", reason="needs the extra [agents]")
pytestmark = pytest.mark.e2e
SHORT = (
    *("--config=grpo_agents.py", "--config.trainer.max_steps=4", "--config.trainer.eval_every_n_steps=4"),
    *("--config.rollout.prompts_per_step=4", "--config.env.processes=4", "--config.eval.problems=4"),
    *("--config.eval.samples=1", "--config.checkpoint.every=1", "--config.log.to=()"),
    *("--config.log.samples_every=1", "--config.log.samples=32"),
)
WINDOWS = (*SHORT, "--config.grpo.max_staleness=2", "--config.rollout.window_tokens=8")


@pytest.mark.nightly("podrl/environments/front_worker.py", "podrl/environments/host.py", "podrl/rollout/branches.py")
def test_a_program_is_trained_over_http_and_a_killed_run_ends_the_same(tmp_path):
    one = run(tmp_path / "one" / "run", base=WINDOWS)
    with job(tmp_path / "two" / "run", base=WINDOWS) as killed:
        killed.wait_for_step(2)
        killed.kill()
    two = run(killed.workdir, base=WINDOWS)
    steps = [record for record in comparable(one.workdir) if "actor/grad_norm" in record]
    assert len(steps) == 4 and steps[0]["sampler/abs_diff_stale_0"] < 1e-5  # later steps have no token of age 0
    assert any(record["rollout/mixed_samples"] > 0 for record in steps)
    assert any(record["actor/grad_norm"] > 0 for record in steps)
    assert all(record["env/failed/agent"] == 0 and record["env/chat_requests"] >= 1 for record in steps)
    trained = [sample for sample in samples(one.workdir) if "reward" in sample]
    answered = [turn for sample in trained for turn in sample["turns"] if turn["by"] == "environment"]
    assert trained and all("<tool_output>" in turn["text"] for turn in answered)
    assert any(record["env/calls"] for record in steps)
    assert samples(one.workdir) == samples(two.workdir) and comparable(one.workdir) == comparable(two.workdir)
    same_weights(one.workdir, two.workdir)


# A program that solves sums. While the file `hold` exists, its episodes for sample 1 of each prompt of training step 2
# do not end, although the sums are solved.
_HELD = """
import pathlib
import time

from podrl import agent
from podrl.environments import sums_agent


def solve(task):
    held = (task["step"], task["mode"]) == (2, "train")
    if held:
        with open("solved", "a") as file:
            file.write(f"{task['index']}.{task['sample']}\\n")
    result = sums_agent.solve(task)
    while held and task["sample"] == 1 and pathlib.Path("hold").exists():
        time.sleep(0.05)
    return result


agent.serve(solve)
"""


@pytest.mark.nightly("podrl/learner/pods", "podrl/environments/front_worker.py", "podrl/environments/host.py")
def test_a_program_of_a_rollout_host_that_is_lost_in_mid_step_leaves_no_trace(tmp_path):
    """The lost host has finished episodes, which are not played again, and open ones, which the other host begins
    again."""
    pod = ("--local_processes=3", "--topology=split", "--config.roles.trainer.hosts=0", "--restarts=0")
    pod += ("--config.env.program=python agent.py", "--config.trainer.max_steps=3", "--config.eval.problems=0")
    folder = {name: tmp_path / name for name in ("whole", "lost")}
    for path in folder.values():
        path.mkdir()
        (path / "agent.py").write_text(_HELD)
    whole = run(folder["whole"] / "run", *pod, base=SHORT)
    (folder["lost"] / "hold").touch()
    with job(folder["lost"] / "run", *pod, base=SHORT) as lost:
        finished = lost.workdir / "outside" / "2.jsonl"
        lost.wait_for("28 finished episodes", lambda: finished.exists() and finished.read_text().count("\n") == 28)
        os.kill(process(lost.process.pid, 2), signal.SIGKILL)
        lost.wait_for("the loss", lambda: "rollout 0 takes over prompts" in lost.stderr)
        (folder["lost"] / "hold").unlink()
        lost.finish()
    same_end(lost.workdir, whole.workdir)
    assert any(record.get("env/calls") for record in lost.records())
    solved = collections.Counter((folder["lost"] / "solved").read_text().split())
    assert len(solved) == 32 and len(again := {sample for sample, times in solved.items() if times > 1}) == 2
    assert all(sample.endswith(".1") for sample in again)


# A program that solves sums, and raises an error for the samples whose number is in FAILING.
_FAILS = """
import sys

from podrl import agent
from podrl.environments import sums_agent


def solve(task):
    result = sums_agent.solve(task)
    if task["sample"] in FAILING:
        print("the reason is here", file=sys.stderr)
        raise RuntimeError("broken")
    return result


agent.serve(solve)
"""


@pytest.mark.nightly("podrl/environments/programs.py", "podrl/rollout/episodes.py", "podrl/learner/rollouts.py")
def test_a_program_that_always_fails_ends_the_job_and_one_that_fails_at_times_is_trained(tmp_path):
    failing = ("--config.env.program=python agent.py", "--config.trainer.max_steps=2", "--config.eval.problems=0")
    for name, samples_ in (("always", range(8)), ("at times", [3])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.py").write_text(_FAILS.replace("FAILING", str([*samples_])))
    always = run(tmp_path / "always" / "run", *failing, base=SHORT, code=1)
    assert "env.failed_share=0.2" in always.stderr and "RuntimeError: broken" in always.stderr
    assert not any("time/step" in record for record in always.records())
    (log,) = (always.workdir / ERRORS).iterdir()
    assert "the reason is here" in log.read_text()
    steps = [r for r in run(tmp_path / "at times" / "run", *failing, base=SHORT).records() if "time/step" in r]
    assert [step["env/failed/agent"] for step in steps] == [0.125, 0.125]
    assert any(step["actor/grad_norm"] > 0 for step in steps)


BY_HEART = {"path": "sums", "name": "by_heart", "env": "none", "system_prompt": "By heart."}
MIXED = (f"--config.data.sources={({'path': 'sums'}, BY_HEART)!r}", "--config.env.others=('none',)")


@pytest.mark.nightly("podrl/environments/host.py", "podrl/rollout/episodes.py", "podrl/learner/ppo.py")
@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [("--config.model.lora.rank=4", *MIXED), ("--config.algorithm=ppo", "--config.ppo.beta=0.0")]
)
def test_a_program_is_trained_with_adapters_in_a_mixture_and_with_a_critic(how, tmp_path):
    few = ("--config.trainer.max_steps=2", "--config.trainer.eval_every_n_steps=0", "--config.checkpoint.every=2")
    done = run(tmp_path / "run", base=(*SHORT, *few, *how))
    steps = [record for record in done.records() if "actor/grad_norm" in record]
    assert len(steps) == 2 and all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["sampler/abs_diff"] < 1e-5 for step in steps)
    trained = [sample for sample in samples(done.workdir) if "reward" in sample]
    mixed = how[1:] == MIXED
    assert {"By heart." in sample["prompt"] for sample in trained} == ({True, False} if mixed else {False})
    answered = [sample for sample in trained if any(turn["by"] == "environment" for turn in sample["turns"])]
    assert answered and not any("By heart." in sample["prompt"] for sample in answered)
