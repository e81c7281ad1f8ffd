"""Under LoRA a side holds one base: actor and reference share its buffers; only adapters are trained and moved."""

import jax
import numpy as np
import pytest

import podrl
from podrl.algorithms.policy_loss import PolicyLoss
from podrl.cluster.config import ClusterConfig, Role
from podrl.learner.setup import TINY
from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig, decoder
from podrl.rollout.config import RolloutConfig
from podrl.trainer import packing
from podrl.trainer.config import RLTrainingConfig

T = 24


@pytest.fixture(scope="module", params=["", "int8"])
def cluster(request):
    config = ClusterConfig(
        role_to_mesh={
            Role.ACTOR: make_mesh("fsdp=2", jax.devices()[:2]),
            Role.ROLLOUT: make_mesh("data=2", jax.devices()[2:4]),
        },
        training_config=RLTrainingConfig(eval_every_n_steps=0, learning_rate=1e-2),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=T - 8),
    )
    made = podrl.RLCluster(
        actor=TINY, cluster_config=config, lora=LoraConfig(rank=2, base_dtype=request.param), updates_per_step=1
    )
    made.keep_reference()
    made.prepare_actor(PolicyLoss(beta=0.1))
    return made


def buffers(tree) -> dict[str, list[int]]:
    """Where the shards of every leaf lie."""
    return {
        jax.tree_util.keystr(path): [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def update(cluster):
    rng = np.random.default_rng(0)
    length_B = np.full(8, T)
    zeros_BT = np.zeros((8, T), np.float32)
    batch = packing.pack(
        packing.place(length_B, cluster.pack_shape(8)),
        tokens_BT=rng.integers(1, 300, (8, T)),
        mask_BT=np.arange(T) >= np.full((8, 1), 8),
        advantage_BT=rng.normal(size=8).astype(np.float32),
        old_logprob_BT=zeros_BT,
        ref_logprob_BT=zeros_BT,
        sampler_logprob_BT=zeros_BT,
    )
    return cluster.update_actor(cluster.put_batch(batch))


def test_actor_and_reference_are_the_same_base_before_and_after_an_update(cluster):
    base = buffers(cluster.frozen)
    assert buffers(cluster._reference) == base and len(base) >= 10
    update(cluster)
    assert buffers(cluster.frozen) == base == buffers(cluster._reference)
    whole = buffers(cluster.actor_params())
    assert base.items() <= whole.items()
    assert {name for name in whole if name not in base} == {name for name in whole if "_lora_" in name}


def test_the_optimizer_holds_moments_of_adapters_only(cluster):
    adapters, base = size(cluster.state.params), size(cluster.frozen)
    assert all("_lora_" in name for name in buffers(cluster.state.params))
    assert 20 * adapters < base
    moments = cluster.state.opt_state
    assert size(moments.mu) == size(moments.nu) == adapters
    assert size(moments) <= 3 * adapters + 8


def test_only_adapters_move_once_the_base_is_there(cluster):
    first = cluster.sync_weights(1)
    moved = [leaf.path for leaf in cluster._publisher.plan.leaves]
    assert len(moved) == 14 and all("_lora_" in path for path in moved)
    update(cluster)
    second = cluster.sync_weights(2)
    names = buffers(decoder.split_trainable(second.params, cluster.model)[1])
    old, new = buffers(first.params), buffers(second.params)
    assert all(old[name] == new[name] for name in names)
    for name in ("q_lora_a", "q_lora_b"):
        assert (np.asarray(first.params["layers"][name]) != np.asarray(second.params["layers"][name])).any()
        np.testing.assert_array_equal(second.params["layers"][name], cluster.state.params["layers"][name])
