"""A run names at its start the settings under which it cannot change its weights, and no other settings."""

import io
from typing import Any

import jax
import pytest
import rich.console
from ml_collections import ConfigDict

from podrl.job.config import complete, parse
from podrl.job.describe import no_update_lines, print_plan
from podrl.job.placement import Meshes
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.mesh.build import make_mesh

TEMPLATE: dict[str, Any] = {
    "rollout": {"prompts_per_step": 4, "max_prompt_length": 32, "max_tokens_to_generate": 16},
    "trainer": {"max_steps": 10, "eval_every_n_steps": 0, "learning_rate": 1e-3, "critic_learning_rate": 1e-3},
    "grpo": {"num_generations": 2},
}


def job(algorithm="grpo", **sections):
    values: dict[str, Any] = {"algorithm": algorithm}
    for name in {"rollout", "trainer", *({"grpo"} if algorithm == "grpo" else ()), *sections}:
        values[name] = {**TEMPLATE.get(name, {}), **sections.get(name, {})}
    return parse(ConfigDict(complete(values)).to_dict())


CASES = [
    ("grpo", {"trainer": {"learning_rate": 0.0}}, "trainer.learning_rate=0 "),
    ("grpo", {"trainer": {"learning_rate": 1e-45}}, "trainer.learning_rate=1e-45"),
    ("ppo", {"trainer": {"learning_rate": 0.0}}, "trainer.learning_rate=0 "),
    ("ppo", {"ppo": {"critic_warmup": 10}}, "ppo.critic_warmup=10 lasts for all 10 steps"),
    ("ppo", {"ppo": {"critic_warmup": 99}}, "ppo.critic_warmup=99"),
    ("ppo", {"ppo": {"critic_warmup": 5, "num_iterations": 2}}, "ppo.critic_warmup=5 lasts for all 5 steps"),
    ("ppo", {"trainer": {"critic_learning_rate": 0.0}}, "trainer.critic_learning_rate=0"),
    ("grpo", {"reward": {"fns": ("answer", "number"), "weights": (0.0, 0.0)}}, "reward.weights"),
    ("grpo", {"rollout": {"top_k": 1}}, "rollout.top_k=1"),
    ("grpo", {"rollout": {"min_p": 1.0}}, "rollout.min_p=1"),
]


@pytest.mark.parametrize(("algorithm", "changes", "words"), CASES)
def test_a_run_that_cannot_learn_says_so(algorithm, changes, words):
    (text,) = no_update_lines(job(algorithm, **changes))
    assert words in text


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("grpo", {}),
        ("ppo", {}),
        ("ppo", {"ppo": {"critic_warmup": 9}}),
        ("ppo", {"rollout": {"top_k": 1}}),  # equal samples still get different advantages from a critic
        ("grpo", {"trainer": {"learning_rate": 1e-30, "schedule": "cosine", "warmup_fraction": 0.9}}),
        ("grpo", {"reward": {"fns": ("answer", "number"), "weights": (0.0, -1.0)}}),
        ("grpo", {"reward": {"fns": ("answer",), "weights": (0.0,)}, "grpo": {"entropy_coef": 0.01}}),
        ("grpo", {"reward": {"fns": ("answer",), "weights": (0.0,)}, "grpo": {"overlong_shaping": True}}),
        ("grpo", {"rollout": {"top_k": 1}, "grpo": {"advantage_estimator": "reinforce_plus_plus"}}),
        ("grpo", {"grpo": {"epsilon": 0.0}}),  # the first update starts from a ratio of 1, which is not clipped
    ],
)
def test_a_run_that_can_learn_says_nothing(algorithm, changes):
    assert no_update_lines(job(algorithm, **changes)) == []


def test_a_dry_run_prints_it():
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    described = job("ppo", ppo={"critic_warmup": 10})
    print_plan(console, described, Meshes(mesh, mesh, mesh, mesh), "runs/x", dry=True)
    assert "Warning: ppo.critic_warmup=10 lasts for all 10 steps" in out.getvalue()


def test_what_is_no_diagnosis_is_refused():
    with pytest.raises(ValueError, match="num_generations=1"):
        GRPOConfig(num_generations=1)
    with pytest.raises(ValueError, match="max_steps=0"):
        job(trainer={"max_steps": 0})
    with pytest.raises(ValueError, match="alpha"):
        job(model={"lora": {"rank": 4, "alpha": 0.0}})
    assert PPOConfig(num_generations=1).num_generations == 1  # PPO needs no group: its advantages come from the critic
