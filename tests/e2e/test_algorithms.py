"""Algorithms that do more than GRPO, as whole runs: killed and resumed bitwise, with the metrics they promise."""

import pytest
from processes import job, run, same_end, trained_steps

pytestmark = pytest.mark.e2e
VARIANTS = {
    # A critic, two passes over two mini-batches, a KL coefficient that moves, and a first step of the critic alone.
    "ppo": (
        *("--config.algorithm=ppo", "--config.ppo.kl_target=0.001", "--config.ppo.kl_horizon=50.0"),
        *("--config.ppo.num_iterations=2", "--config.trainer.mini_batch_size=8", "--config.ppo.critic_warmup=1"),
        "--config.trainer.critic_learning_rate=1e-3",
    ),
    # Batches in flight whose groups were replaced from further prompts.
    "dapo": (
        *("--config.algorithm=dapo", "--config.grpo.max_staleness=1", "--config.grpo.overlong_filter=True"),
        "--config.reward.fns=('answer',)",
    ),
    "remax": ("--config.algorithm=remax", "--config.grpo.kl_in_reward=0.02"),
}
PROMISED = {
    "ppo": (
        *("critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/explained_variance"),
        *("actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "actor/approx_kl", "actor/grad_norm"),
        *("reward/kl", "reward/kl_coef", "sampler/abs_diff"),
    ),
    "dapo": ("dynamic_sampling/groups_drawn", "dynamic_sampling/groups_replaced", "sampler/abs_diff"),
    "remax": ("reward/kl", "actor/pg_loss"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_killed_run_ends_as_one_that_never_was(name, tmp_path):
    args = (*VARIANTS[name], "--config.eval.problems=0", "--config.trainer.max_steps=4", "--config.checkpoint.every=1")
    whole, workdir = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    done = run(whole, *args)
    with job(workdir, *args) as started:
        started.wait_for_step(2)
        started.kill()
    resumed = run(workdir, *args)
    assert "Resumed after step" in resumed.stdout
    same_end(workdir, whole)
    records = {r["step"]: r for r in done.records() if "time/step" in r}
    assert trained_steps(workdir) == sorted(records) == [1, 2, 3, 4]
    for metric in PROMISED[name]:
        assert records[4][metric] is not None, metric
    if name == "ppo":
        assert "actor/pg_loss" not in records[1] and "critic/vf_loss" in records[1]
        assert len({r["reward/kl_coef"] for r in records.values()}) > 2
    if name == "dapo":
        assert all(4 <= r["dynamic_sampling/groups_drawn"] <= 12 for r in records.values())
        assert any(r["dynamic_sampling/groups_replaced"] > 0 for r in records.values())
