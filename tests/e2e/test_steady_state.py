"""Nothing is compiled after the first step, and weights reach the rollout mesh without becoming host arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

import podrl
from podrl.job.config import TINY
from podrl.models.config import LoraConfig
from podrl.rundir.run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.optimised]
COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILES.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
)


def make_cluster(
    lora: LoraConfig | None = None, rollout: Mapping[str, Any] | None = None, reference: Any = None, **training
) -> podrl.RLCluster:
    trainer = podrl.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    sampler = podrl.make_mesh("data=2,tensor=2", jax.devices()[4:])
    roles = {podrl.Role.ACTOR: trainer, podrl.Role.REFERENCE: trainer, podrl.Role.ROLLOUT: sampler}
    return podrl.RLCluster(
        actor=TINY,
        lora=lora,
        reference=reference,
        cluster_config=podrl.ClusterConfig(
            role_to_mesh=roles,
            training_config=podrl.RLTrainingConfig(
                **{"max_steps": 5} | training, eval_every_n_steps=0, learning_rate=1e-3
            ),
            rollout_config=podrl.RolloutConfig(
                max_prompt_length=64, max_tokens_to_generate=16, lanes=8, **(rollout or {})
            ),
        ),
    )


def lengths(prompts, completions, **fields) -> list[float]:
    """Rewards completions by their length."""
    return [float(len(text)) for text in completions]


# Four prompts per step: short prompts, long prompts, both, long prompts, short prompts.
SHORT = [f"Tom has {n} apples." for n in range(4)]
LONG = [f"Ana buys {n} books and {n + 1} pens. " + "Then she loses 2 pens. " * 3 for n in range(4)]
PROMPTS = [*SHORT, *LONG, *SHORT[:2], *LONG[:2], *LONG, *SHORT]


# The code at these paths decides which programs are compiled. Cases with this mark run only if it changes.
UPDATES = pytest.mark.nightly("podrl/trainer", "podrl/cluster", "podrl/learner/grpo.py", "podrl/engine/engine.py")


@pytest.mark.parametrize(
    ("lora", "settings", "algorithm"),
    [
        pytest.param(None, {}, {"beta": 0.04}, id="plain"),
        pytest.param(
            *(None, {"mini_batch_size": 2, "max_steps": 20}, {"beta": 0.0, "num_iterations": 2}),
            id="mu2-mini-batches",
            marks=UPDATES,
        ),
        pytest.param(
            LoraConfig(rank=4), {"rollout": {"top_k": 20}}, {"beta": 0.04, "max_staleness": 1}, id="stale-lora"
        ),
        pytest.param(
            *(LoraConfig(rank=4), {"rollout": {"merge_adapters": True}}, {"beta": 0.04}),
            id="merged-lora",
            marks=UPDATES,
        ),
        pytest.param(None, {}, {"beta": 0.04, "kl_target": 0.01, "kl_horizon": 50.0}, id="steered", marks=UPDATES),
        pytest.param(
            *(None, {"reference": TINY}, {"beta": 0.0, "teacher_coef": 1.0, "teacher_kl": "full"}),
            id="teacher",
            marks=UPDATES,
        ),
        pytest.param(
            LoraConfig(rank=4),
            {"reference": TINY},
            {"beta": 0.0, "teacher_coef": 1.0, "teacher_kl": "top_k", "teacher_top_k": 8},
            id="teacher-lora",
            marks=UPDATES,
        ),
    ],
)
def test_nothing_compiles_after_the_first_step(lora, settings, algorithm):
    cluster = make_cluster(lora, **settings)
    seen: list[tuple[int, float]] = []

    def note(prompts, completions, rewards, **fields) -> dict[str, float]:
        seen.append((len(COMPILES), float(np.mean([len(prompt) for prompt in prompts]))))
        return {}

    config = podrl.GRPOConfig(num_generations=4, **algorithm)
    learner = podrl.GRPOLearner(cluster, config, reward_fns=lengths, metric_fns=[note])
    watched = Run(None)
    assert learner.train(PROMPTS, prompts_per_step=4, run=watched) == 5
    counts, means = zip(*seen, strict=True)
    assert counts[0] > 0, "the listener must have counted compilations"
    assert len(set(means)) > 1, "the steps must have prompts of different lengths"
    assert counts == (counts[0],) * 5
    assert any("CallsInFlight.describe_waits" in repr(source) for source in watched.watchdog.wait_sources)
    cluster.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_publishing_makes_no_host_array_and_compiles_nothing(monkeypatch, in_place):
    cluster = make_cluster()
    first = jax.block_until_ready(cluster.sync_weights(0, in_place=in_place))
    leaves = jax.tree.leaves(cluster.state.params)
    array_type, reads, compiled = type(leaves[0]), [], len(COMPILES)
    to_host = array_type.__array__

    def spy(self, *args, **kwargs):
        reads.append((self.dtype, self.size))
        return to_host(self, *args, **kwargs)

    monkeypatch.setattr(array_type, "__array__", spy)
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        policy = jax.block_until_ready(cluster.sync_weights(1, in_place=in_place))
    monkeypatch.undo()
    # The host gets only the checksums, 4 bytes per leaf and device of both meshes.
    assert reads and all(dtype == np.uint32 for dtype, _ in reads)
    assert sum(size for _, size in reads) <= len(leaves) * 8
    assert len(COMPILES) == compiled
    assert policy.version == 1
    assert all(x.is_deleted() == in_place for x in jax.tree.leaves(first.params))
    for sent, arrived in zip(leaves, jax.tree.leaves(policy.params), strict=True):
        assert (np.asarray(sent.astype(arrived.dtype)) == np.asarray(arrived)).all()
    cluster.close()
