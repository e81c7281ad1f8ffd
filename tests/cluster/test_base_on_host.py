"""If the frozen weights under adapters wait in the host's memory, training and weight moves give the same bits."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from packed_rows import packed_rows

import podrl
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.policy_rows import ReferencedRows
from podrl.cluster.config import ClusterConfig, Role
from podrl.engine.config import RolloutConfig
from podrl.job.config import complete, parse
from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig
from podrl.offload import HOST
from podrl.storage.hub import EMBEDDED
from podrl.trainer import packing
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape

T = 24


def _cluster(offload, source="tiny", mesh="fsdp=2,tensor=2", critic=False, **rollout):
    """Makes a cluster whose adapters and reference are random, on four devices, with two others for the rollout."""
    roles = {Role.ACTOR: make_mesh(mesh, jax.devices()[:4]), Role.ROLLOUT: make_mesh("data=2", jax.devices()[4:6])}
    config = ClusterConfig(
        role_to_mesh=roles | ({Role.CRITIC: roles[Role.ACTOR]} if critic else {}),
        training_config=RLTrainingConfig(eval_every_n_steps=0, max_steps=4, learning_rate=1e-2, offload=offload),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=T - 8, **rollout),
    )
    return podrl.RLCluster(
        actor=str(EMBEDDED[source]),
        critic=str(EMBEDDED[source]) if critic else None,
        cluster_config=config,
        lora=LoraConfig(rank=2, base_dtype="int8" if source == "tiny" else ""),
    )


def _batch(cluster):
    rng = np.random.default_rng(0)
    sizes = {"sequences": 8, "max_length": cluster.config.longest}
    placement = packing.place(np.full(8, T), pack_shape(cluster.training_config, cluster.actor_mesh, **sizes))
    tokens_BT, mask_BT = rng.integers(1, 90, (8, T)), np.arange(T) >= np.full((8, 1), 8)
    columns = {"tokens_BT": tokens_BT, "mask_BT": mask_BT, "advantage_BT": rng.normal(size=(8, T))}
    return cluster.actor.put(packed_rows(ReferencedRows, placement, **columns))


def _kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 2}


def _equal(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)


@pytest.mark.parametrize(
    ("source", "mesh"),
    [
        ("tiny", "fsdp=2,tensor=2"),
        ("tiny", "fsdp=2,seq=2"),
        ("tiny_moe", "fsdp=2,expert=2"),
        ("tiny_hybrid", "fsdp=4"),
    ],
)
def test_updates_scores_and_moved_weights_have_the_same_bits(source, mesh):
    results = []
    for offload in ("none", "base"):
        cluster = _cluster(offload, source, mesh)
        cluster.keep_reference()
        cluster.actor.prepare(PolicyLoss(KLLossSettings(beta=0.1)))
        batch = _batch(cluster)
        metrics = [jax.tree.map(float, cluster.update_actor(batch)) for _ in range(2)]
        tokens_BT, length_B = np.random.default_rng(1).integers(1, 90, (4, 16)), np.array([16, 9, 12, 16])
        reference_BT = cluster.get_ref_per_token_logps(tokens_BT, length_B)
        assert cluster.actor.reference is cluster.actor.frozen
        assert _kinds(cluster.actor.frozen["layers"]) == {HOST if offload == "base" else "device"}
        moved = cluster.sync_weights().params
        assert _kinds(moved) == {"device"}
        results.append((metrics, cluster.state.params, reference_BT, moved))
    assert results[0][0][1]["actor/grad_norm"] > 0
    _equal(*results)


def test_merged_weights_have_the_same_bits():
    moved = [_cluster(offload, merge_adapters=True).sync_weights().params for offload in ("none", "base")]
    _equal(*moved)


def _buffers(tree):
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards]


def test_a_critic_shares_the_base_of_the_actor_on_the_host():
    cluster = _cluster("all")
    critic, actor = cluster.make_critic(), cluster.actor
    assert critic is not None and _kinds(critic.frozen["layers"]) == {HOST}
    assert _buffers(critic.frozen["layers"]) == _buffers(actor.frozen["layers"])


def test_a_critic_of_its_own_has_its_base_on_the_host():
    waiting, here = (_cluster(offload, critic=True).critic for offload in ("base", "none"))
    assert waiting is not None and here is not None
    assert _kinds(waiting.frozen["layers"]) == {HOST} and _kinds(here.frozen["layers"]) == {"device"}
    _equal(waiting.frozen, here.frozen)


def test_layers_kept_for_the_backward_pass_are_refused():
    with pytest.raises(ValueError, match=r"RLTrainingConfig\.remat='none' keeps the copies .*='dots'"):
        RLTrainingConfig(eval_every_n_steps=0, offload="base", remat="none")


def test_a_job_without_adapters_is_refused():
    trainer = {"offload": "base", "max_steps": 1, "eval_every_n_steps": 0}
    with pytest.raises(ValueError, match=r"model\.lora\.rank=0 trains all weights"):
        parse(ConfigDict(complete({"trainer": trainer})).to_dict())
    rank = {"model": {"lora": {"rank": 4}}}
    assert parse(ConfigDict(complete({"trainer": trainer} | rank)).to_dict()).trainer.hosts_base
    everything = trainer | {"offload": "all"}
    assert parse(ConfigDict(complete({"algorithm": "sft", "trainer": everything} | rank)).to_dict()).trainer.hosts_base
