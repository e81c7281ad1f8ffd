"""Under LoRA each side holds one base: actor and reference share it; only adapters are trained and moved."""

import jax
import numpy as np
import pytest
from packed_rows import packed_rows

import podrl
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.policy_rows import ReferencedRows
from podrl.cluster.config import ClusterConfig, Mode, Role
from podrl.engine.config import RolloutConfig, Sampling
from podrl.job.config import TINY
from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig, parameters
from podrl.trainer import packing
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape

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
    made = podrl.RLCluster(actor=TINY, cluster_config=config, lora=LoraConfig(rank=2, base_dtype=request.param))
    made.keep_reference()
    made.actor.prepare(PolicyLoss(KLLossSettings(beta=0.1)))
    return made


def buffers(tree) -> dict[str, list[int]]:
    """Returns the addresses of every leaf's shards."""
    return {
        jax.tree_util.keystr(path): [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def update(cluster):
    rng = np.random.default_rng(0)
    length_B = np.full(8, T)
    sizes = {"sequences": 8, "max_length": cluster.config.longest}
    placement = packing.place(length_B, pack_shape(cluster.training_config, cluster.actor_mesh, **sizes))
    tokens_BT, mask_BT = rng.integers(1, 300, (8, T)), np.arange(T) >= np.full((8, 1), 8)
    advantage_BT = rng.normal(size=(8, T))
    batch = packed_rows(ReferencedRows, placement, tokens_BT=tokens_BT, mask_BT=mask_BT, advantage_BT=advantage_BT)
    return cluster.update_actor(cluster.actor.put(batch))


def test_actor_and_reference_are_the_same_base_before_and_after_an_update(cluster):
    base = buffers(cluster.actor.frozen)
    assert buffers(cluster.actor.reference) == base and len(base) >= 10
    update(cluster)
    assert buffers(cluster.actor.frozen) == base == buffers(cluster.actor.reference)
    whole = buffers(cluster.actor.params())
    assert base.items() <= whole.items()
    assert {name for name in whole if name not in base} == {name for name in whole if "_lora_" in name}


def test_the_optimizer_holds_moments_of_adapters_only(cluster):
    adapters, base = size(cluster.state.params), size(cluster.actor.frozen)
    assert all("_lora_" in name for name in buffers(cluster.state.params))
    assert 20 * adapters < base
    moments = cluster.state.opt_state
    assert size(moments.mu) == size(moments.nu) == adapters
    assert size(moments) <= 3 * adapters + 8


def test_only_adapters_move_once_the_base_is_there(cluster):
    first = cluster.sync_weights(1)
    moved = [leaf.path for leaf in cluster.weights.publisher.plan.leaves]
    assert len(moved) == 14 and all("_lora_" in path for path in moved)
    update(cluster)
    second = cluster.sync_weights(2)
    names = buffers(parameters.split_trainable(second.params, cluster.model)[1])
    old, new = buffers(first.params), buffers(second.params)
    assert all(old[name] == new[name] for name in names)
    for name in ("q_lora_a", "q_lora_b"):
        assert (np.asarray(first.params["layers"][name]) != np.asarray(second.params["layers"][name])).any()
        np.testing.assert_array_equal(second.params["layers"][name], cluster.state.params["layers"][name])


def test_log_probabilities_of_samples_follow_the_actor_and_not_the_reference(cluster):
    rng = np.random.default_rng(3)
    tokens_BT, length_B = rng.integers(1, 300, (3, 9)), np.array([9, 5, 7])
    real_BT = (np.arange(9) < length_B[:, None]) & (np.arange(9) > 0)
    before_BT, reference_BT = (
        get(tokens_BT, length_B) for get in (cluster.get_old_per_token_logps, cluster.get_ref_per_token_logps)
    )
    for found_BT in (before_BT, reference_BT):
        assert ((found_BT < 0) == real_BT).all() and (found_BT[~real_BT] == 0).all()
    update(cluster)
    after_BT = cluster.get_actor_per_token_logps(tokens_BT, length_B)
    assert np.abs(after_BT - before_BT).max() > 1e-6
    np.testing.assert_array_equal(cluster.get_ref_per_token_logps(tokens_BT, length_B), reference_BT)


def test_the_engine_knows_which_samples_are_of_an_evaluation(cluster):
    """The engine remembers the lengths of samples of evaluations only, not of training; the next evaluation expects
    these lengths."""
    sampling = Sampling(temperature=1.0, max_new=T - 8)
    for mode, known in ((Mode.TRAIN, False), (Mode.EVAL, True), (Mode.EVAL, True)):
        rollouts = cluster.generate(["a", "bc", "d"], mode=mode, group_size=2, step=5, sampling=sampling)
        lengths = rollouts.length_B - np.repeat(rollouts.prompts.length_P, 2)
        for asked, looks in (("train", False), ("eval", True)):
            again = cluster.rollout.player(rollouts.prompts, group_size=2, step=5, sampling=sampling, mode=asked)
            assert again.request.expected == dict(enumerate(lengths.tolist()) if known and looks else ())


def test_metrics_of_users_are_averaged_once_and_handed_to_their_loggers(cluster):
    seen = []
    assert cluster.with_external_metrics_logger(lambda step, values: seen.append((step, dict(values)))) is cluster
    cluster.buffer_metrics({"mine/x": 1.0})
    cluster.buffer_metrics({"mine/x": 4.0, "mine/y": 2.0})
    cluster.buffer_metrics_async({"mine/x": 5.0}, mode=Mode.EVAL)
    assert cluster.metrics.take() == {"mine/x": 2.5, "mine/y": 2.0, "eval/mine/x": 5.0}
    assert cluster.metrics.take() == {}
    cluster.metrics.log(3, {"loss": 0.5})
    assert seen == [(3, {"loss": 0.5})]
