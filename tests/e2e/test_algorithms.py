"""Whole runs of algorithms beyond GRPO: a killed run ends bitwise as an undisturbed one, with documented metrics."""

import itertools

import jax
import numpy as np
import pytest
from processes import SMALL, TWO_DEVICES, job, run, same_end, trained_steps

from podrl.storage.checkpoint import read_state

pytestmark = pytest.mark.e2e
VARIANTS = {
    # A critic, two passes over two mini-batches, a KL coefficient that moves, and a first step that trains only the
    # critic.
    "ppo": (
        *("--config.algorithm=ppo", "--config.ppo.kl_target=0.001", "--config.ppo.kl_horizon=50.0"),
        *("--config.ppo.num_iterations=2", "--config.trainer.mini_batch_size=2", "--config.ppo.critic_warmup=1"),
        "--config.trainer.critic_learning_rate=1e-3",
    ),
    # A batch is in flight while dynamic sampling replaces groups of the next batch.
    "dapo": (
        *("--config.algorithm=dapo", "--config.grpo.max_staleness=1", "--config.grpo.overlong_filter=True"),
        "--config.reward.fns=('answer',)",
    ),
    # The loss has a KL with a coefficient that moves. There are two passes, and a batch is in flight.
    "steered": (
        *("--config.grpo.beta=0.1", "--config.grpo.kl_target=0.001", "--config.grpo.kl_horizon=50.0"),
        *("--config.grpo.num_iterations=2", "--config.grpo.max_staleness=1"),
    ),
    # With windows of 8 tokens, several versions of the weights sample one batch, including its greedy completions.
    "remax": (
        *("--config.algorithm=remax", "--config.grpo.kl_in_reward=0.02"),
        *("--config.grpo.max_staleness=2", "--config.rollout.window_tokens=8"),
    ),
}
UPDATES = {"ppo": 4, "steered": 2}  # updates of a step; other variants make 1
PROMISED = {
    "ppo": (
        *("critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/explained_variance"),
        *("actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "actor/approx_kl", "actor/grad_norm"),
        *("reward/kl", "reward/kl_coef", "sampler/abs_diff"),
    ),
    "dapo": ("dynamic_sampling/groups_drawn", "dynamic_sampling/groups_replaced", "sampler/abs_diff"),
    "steered": ("actor/kl", "actor/kl_coef"),
    "remax": ("reward/kl", "actor/pg_loss", "actor/ratio_stale_2"),
}


ABOUT = {
    "dapo": pytest.mark.nightly("podrl/learner/generation.py", "podrl/learner/grpo.py"),
    "steered": pytest.mark.nightly("podrl/learner/control.py", "podrl/learner/grpo.py"),
    "remax": pytest.mark.nightly("podrl/learner/generation.py", "podrl/rollout/group_player.py"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ABOUT.get(name, pytest.mark.optimised)) for name in VARIANTS]
)
def test_a_killed_run_ends_as_one_that_never_was(name, tmp_path):
    args = (*VARIANTS[name], TWO_DEVICES, "--config.eval.problems=0", "--config.checkpoint.every=1")
    args += (f"--config.trainer.max_steps={4 * UPDATES.get(name, 1)}",)
    base = [flag.replace("config.grpo.", "config.ppo.") for flag in SMALL] if name == "ppo" else SMALL
    whole, workdir = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    done = run(whole, *args, base=base)
    with job(workdir, *args, base=base) as started:
        started.wait_for_step(2)
        started.wait_for("a checkpoint", lambda: any((workdir / "checkpoints" / step).exists() for step in "1234"))
        started.kill()
    resumed = run(workdir, *args, base=base)
    assert "Resumed after step" in resumed.stdout
    same_end(workdir, whole)
    records = {r["step"]: r for r in done.records() if "time/step" in r}
    assert trained_steps(workdir) == sorted(records) == [1, 2, 3, 4]
    for metric in PROMISED[name]:
        assert records[4][metric] is not None, metric
    if name == "ppo":
        assert "actor/pg_loss" not in records[1] and "critic/vf_loss" in records[1]
        assert len({r["reward/kl_coef"] for r in records.values()}) > 2
    if name == "steered":
        # The first step begins with the reference's weights, so its KL is below the target and the coefficient falls.
        # In later steps the measured KL decides.
        coefs = [records[step]["actor/kl_coef"] for step in (1, 2, 3, 4)]
        assert coefs[0] == 0.1 and len(set(coefs)) == 4
        assert all((b > a) == (records[i]["actor/kl"] > 0.001) for i, (a, b) in enumerate(itertools.pairwise(coefs), 1))
    if name == "dapo":
        assert all(4 <= r["dynamic_sampling/groups_drawn"] <= 12 for r in records.values())
        assert any(r["dynamic_sampling/groups_replaced"] > 0 for r in records.values())


SYSTEMS = ("trl_grpo", "prime_rl", "verl_grpo", "open_instruct_grpo", "nemo_grpo", "slime_grpo", "areal", "tinker_ppo")


@pytest.mark.nightly("podrl/algorithms/presets.py", "podrl/algorithms/surrogates.py", "podrl/algorithms/corrections.py")
@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_preset_named_after_a_system_learns_in_20_steps(name, tmp_path):
    """With each preset, 20 steps on the embedded task raise the share of right greedy answers by over 25 points, and
    the mean reward by over 1."""
    few = ("--config.trainer.max_steps=20", "--config.trainer.eval_every_n_steps=20", "--config.checkpoint.every=20")
    few += ("--config.eval.problems=64", "--config.eval.samples=1", "--config.log.to=()")
    records = run(tmp_path / "run", f"--config.algorithm={name}", *few, base=("--config=grpo_gemma.py",)).records()
    before, after = (record["eval/greedy_answer"] for record in records if "eval/greedy_answer" in record)
    rewards = [record["reward/mean"] for record in records if "actor/grad_norm" in record]
    assert before < 0.4 and after > before + 0.25, (before, after)
    assert len(rewards) == 20 and np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 1, rewards


def test_nothing_drifts_at_learning_rate_0(tmp_path):
    """Float32 weights stay bitwise the same. One program scores policy and reference for the reward's KL, so this KL is
    exactly 0."""
    args = (
        TWO_DEVICES,
        "--config.trainer.learning_rate=0.0",
        "--config.grpo.num_iterations=2",
        "--config.grpo.kl_in_reward=0.1",
    )
    args += ("--config.trainer.mini_batch_size=2", "--config.eval.problems=0", "--config.trainer.max_steps=12")
    done = run(tmp_path / "run", *args)
    records = [r for r in done.records() if "time/step" in r]
    assert len(records) == 3
    for record in records:
        assert record["reward/kl"] == 0.0 and record["actor/pg_clipfrac"] == 0.0
        # Training and scoring are two programs, which may round the last bit of a log-probability differently.
        assert record["actor/ratio"] == pytest.approx(1.0, abs=1e-6) and abs(record["actor/kl"]) < 1e-10
        assert record["sampler/abs_diff"] < 1e-5
    start, end = (read_state(tmp_path / "run" / "checkpoints", step)[1]["params"] for step in (2, 3))
    jax.tree.map(np.testing.assert_array_equal, start, end)


def test_a_sampler_that_disagrees_stops_the_run_with_a_diagnosis(tmp_path):
    args = (
        TWO_DEVICES,
        "--config.rollout.data_type=bfloat16",
        "--config.grpo.mismatch_bound=1e-4",
        "--config.grpo.mismatch_patience=2",
    )
    done = run(tmp_path / "run", *args, "--config.eval.problems=0", code=1)
    assert done.stdout.count("Warning: step 1: the trainer does not reproduce the sampler") == 1
    assert "step 2 in a row" in done.stderr and "rollout.data_type" in done.stderr and "Traceback" not in done.stderr
