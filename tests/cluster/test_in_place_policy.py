"""In-place weight moves keep one policy on the rollout mesh; other weight moves leave earlier policies as they were."""

import dataclasses

import jax
import numpy as np
import pytest

import podrl
from podrl.cluster.config import ClusterConfig, Role
from podrl.engine.config import RolloutConfig
from podrl.job.config import TINY
from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig
from podrl.trainer.config import RLTrainingConfig
from podrl.transfer.publish import WeightMismatchError


def make_cluster(*, rank: int = 0, merged: bool = False) -> podrl.RLCluster:
    config = ClusterConfig(
        role_to_mesh={
            Role.ACTOR: make_mesh("fsdp=2,tensor=2", jax.devices()[:4]),
            Role.ROLLOUT: make_mesh("data=2,tensor=2", jax.devices()[4:]),
        },
        training_config=RLTrainingConfig(eval_every_n_steps=0),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8, merge_adapters=merged),
    )
    return podrl.RLCluster(actor=TINY, cluster_config=config, lora=LoraConfig(rank=rank) if rank else None)


def change(cluster: podrl.RLCluster) -> None:
    params = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))(cluster.state.params)
    cluster.state = dataclasses.replace(cluster.state, params=params)


def places(tree) -> list[list[int]]:
    """Returns the addresses of the shards of every leaf."""
    return [[s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("merged", [False, True])
def test_every_policy_lies_where_the_one_before_lay(merged):
    cluster = make_cluster(rank=2 if merged else 0, merged=merged)
    kept = cluster.sync_weights(1)
    first = cluster.sync_weights(1, in_place=True)
    at = places(first.params)
    change(cluster)
    second = cluster.sync_weights(2, in_place=True)
    assert places(second.params) == at
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    want = cluster.actor.params() if not merged else cluster.weights.merge(cluster.state.params, cluster.actor.frozen)
    jax.tree.map(np.testing.assert_array_equal, second.params, want)
    assert (np.asarray(kept.params["layers"]["q"]) != np.asarray(second.params["layers"]["q"])).any()
    cluster.close()


def test_adapters_replace_adapters_and_the_base_stays():
    cluster = make_cluster(rank=2)
    first = cluster.sync_weights(1, in_place=True)
    change(cluster)
    second = cluster.sync_weights(2, in_place=True)
    assert first.params["layers"]["q_lora_a"].is_deleted()
    assert second.params["layers"]["q"] is first.params["layers"]["q"]
    jax.tree.map(np.testing.assert_array_equal, second.params, cluster.actor.params())
    cluster.close()


def test_a_refused_version_can_be_moved_again():
    cluster = make_cluster()
    first = cluster.sync_weights(1, in_place=True)
    cluster.weights.publisher.verify = refuse
    with pytest.raises(WeightMismatchError):
        cluster.sync_weights(2, in_place=True)
    del cluster.weights.publisher.verify
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    jax.tree.map(np.testing.assert_array_equal, cluster.sync_weights(2, in_place=True).params, cluster.actor.params())
    cluster.close()


def refuse(policy):
    raise WeightMismatchError("a bit was flipped")
