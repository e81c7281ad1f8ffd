"""With rollout.merge_adapters the engine decodes with the adapters merged into the actor's weights; nothing else
changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrl
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.cluster.config import ClusterConfig, Role
from podrl.engine.config import RolloutConfig, Sampling
from podrl.job.config import TINY
from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig
from podrl.trainer.config import RLTrainingConfig
from podrl.types import Policy, Prompts, Rollouts

PROMPT = np.array([[5, 9, 20, 31, 7]])


def make_cluster(*, merged: bool, base_dtype: str = "", rank: int = 2) -> podrl.RLCluster:
    config = ClusterConfig(
        role_to_mesh={
            Role.ACTOR: make_mesh("fsdp=2,tensor=2", jax.devices()[:4]),
            Role.ROLLOUT: make_mesh("data=2", jax.devices()[4:6]),
        },
        training_config=RLTrainingConfig(eval_every_n_steps=0),
        rollout_config=RolloutConfig(
            max_prompt_length=8, max_tokens_to_generate=12, lanes=4, data_type="float32", merge_adapters=merged
        ),
    )
    lora = LoraConfig(rank=rank, alpha=8.0, base_dtype=base_dtype)
    cluster = podrl.RLCluster(actor=TINY, cluster_config=config, lora=lora)
    cluster.actor.prepare(PolicyLoss(KLLossSettings()))
    return cluster


def change_adapters(cluster: podrl.RLCluster, seed: int) -> None:
    """Draws random adapters, because fresh adapters multiply by zero and change nothing."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: jax.device_put(0.05 * rng.standard_normal(x.shape, np.float32), x.sharding), cluster.state.params
    )
    cluster.state = dataclasses.replace(cluster.state, params=params)


def sample(cluster: podrl.RLCluster, policy: Policy) -> Rollouts:
    prompts = Prompts(PROMPT.astype(np.int32), np.array([5]), np.array([0]), [""], {}, b"")
    return cluster.rollout.generate(policy, prompts, group_size=4, step=0, sampling=Sampling(max_new=12))


@pytest.mark.nightly("podrl/models", "podrl/cluster")
@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["", "int8"])
def test_merged_weights_sample_what_adapters_on_the_base_do(base_dtype):
    runs = []
    for merged in (False, True):
        cluster = make_cluster(merged=merged, base_dtype=base_dtype)
        change_adapters(cluster, 0)
        policy = cluster.sync_weights(3)
        assert any("_lora_" in name for name in policy.params["layers"]) != merged
        assert policy.version == 3
        runs.append(sample(cluster, policy))
    np.testing.assert_array_equal(runs[0].tokens_BT, runs[1].tokens_BT)
    np.testing.assert_allclose(runs[0].logprob_BT, runs[1].logprob_BT, atol=1e-4)


def test_every_version_moves_the_whole_model_anew_and_compiles_once():
    cluster = make_cluster(merged=True)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    change_adapters(cluster, 0)
    first = cluster.sync_weights(1)
    jax.block_until_ready(first.params)
    change_adapters(cluster, 1)
    compiled.clear()
    second = jax.block_until_ready(cluster.sync_weights(2))
    assert not [event for event in compiled if event.endswith("backend_compile_duration")]
    state, frozen = cluster.state.params["layers"], cluster.actor.frozen["layers"]
    delta_LDF = jnp.einsum("LDR,LRF->LDF", state["gate_lora_a"], state["gate_lora_b"], precision="highest")
    want = np.asarray(frozen["gate"]) + 8.0 / 2 * np.asarray(delta_LDF)
    np.testing.assert_allclose(second.params["layers"]["gate"], want, atol=1e-5)
    assert (np.asarray(first.params["layers"]["gate"]) != np.asarray(second.params["layers"]["gate"])).any()
    np.testing.assert_array_equal(second.params["embed"], cluster.actor.frozen["embed"])
    assert len(cluster.weights.publisher.plan.leaves) == len(jax.tree.leaves(second.params))


def test_a_model_without_adapters_is_not_touched_by_it():
    cluster = make_cluster(merged=True, rank=0)
    policy = cluster.sync_weights(0)
    np.testing.assert_array_equal(policy.params["layers"]["q"], cluster.state.params["layers"]["q"])
