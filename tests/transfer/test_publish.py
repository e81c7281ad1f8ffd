"""Versions and checksums of published weights, and the refusal of received weights that differ from the sent
weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.models import parameters
from podrl.models.config import Experts, gemma2_config
from podrl.transfer.plan import ShardLayout
from podrl.transfer.publish import Publisher, WeightMismatchError
from podrl.transfer.verify import checksum_program, fold
from podrl.types import Policy


def parts(colocated=False):
    devices = jax.devices()
    trainer = make_mesh("fsdp=2,tensor=2", devices[:4])
    rollout = make_mesh("data=2,tensor=2", devices[:4] if colocated else devices[4:])
    specs = {"embed": Spec("tensor", "fsdp"), "norm": Spec(), "step": Spec()}
    rng = np.random.default_rng(0)
    values = {
        "embed": rng.standard_normal((8, 6)).astype(np.float32),
        "norm": rng.standard_normal(5).astype(np.float32),
        "step": np.int32(7),
    }
    params = {k: jax.device_put(v, NamedSharding(trainer, specs[k])) for k, v in values.items()}
    targets = {k: NamedSharding(rollout, s) for k, s in {**specs, "embed": Spec("tensor")}.items()}
    return values, params, targets


@pytest.mark.parametrize(("colocated", "transport"), [(False, "auto"), (True, "auto"), (False, "collective")])
def test_publish(colocated, transport):
    values, params, targets = parts(colocated)
    publisher = Publisher(params, targets, target_dtype=jnp.bfloat16, transport=transport)
    for version in (1, 2):
        policy = publisher.publish(params, version)
        assert policy.version == version
        publisher.verify(policy)
    assert np.array_equal(policy.params["embed"], values["embed"].astype(jnp.bfloat16))
    assert policy.params["step"].dtype == jnp.int32
    assert all(policy.params[k].sharding == targets[k] for k in targets)
    assert not params["embed"].is_deleted()
    publisher.publish(params, 3, donate=True)
    assert params["embed"].is_deleted()


@pytest.mark.parametrize("transport", ["auto", "collective"])
@pytest.mark.parametrize(("trainer", "rollout"), [("expert=4", "expert=2,fsdp=2"), ("expert=2,fsdp=2", "expert=4")])
def test_experts_may_be_cut_differently_on_both_sides(trainer, rollout, transport):
    base = gemma2_config(vocab_size=8, num_layers=2, model_dim=8, ffn_dim=8, num_heads=2, num_kv_heads=1, head_dim=4)
    config = dataclasses.replace(base, experts=Experts(count=8, chosen=2, ffn_dim=4))
    source, target = make_mesh(trainer, jax.devices()[:4]), make_mesh(rollout, jax.devices()[4:])
    before, after = (
        jax.tree.map(lambda x: x.sharding, parameters.abstract_params(config, mesh, jnp.dtype("float32")))
        for mesh in (source, target)
    )
    params = jax.jit(lambda key: parameters.init_params(config, key), out_shardings=before)(jax.random.key(0))
    publisher = Publisher(params, after, target_dtype=jnp.bfloat16, transport=transport)
    policy = publisher.publish(params, 1)
    publisher.verify(policy)
    for name in ("expert_in", "expert_out"):
        sent, got = params["layers"][name], policy.params["layers"][name]
        assert before["layers"][name].spec != got.sharding.spec == after["layers"][name].spec
        assert np.array_equal(got, np.asarray(sent).astype(jnp.bfloat16))
    swapped = policy.params["layers"] | {"expert_in": jnp.roll(policy.params["layers"]["expert_in"], 1, axis=1)}
    with pytest.raises(WeightMismatchError, match="expert_in"):
        publisher.verify(Policy(params=policy.params | {"layers": swapped}, version=1))


def flip(array, device_index=None):
    """Flips one bit of an array's first element, on every replica or on one device only."""
    shards = []
    for k, shard in enumerate(array.addressable_shards):
        data = np.array(shard.data)
        if shard.index[0].start in (None, 0) and device_index in (None, k):
            data.reshape(-1).view(np.uint16)[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@pytest.mark.parametrize("device_index", [None, 0])
@pytest.mark.parametrize("name", ["embed", "norm"])
def test_a_flipped_bit_is_refused_by_name(name, device_index):
    _, params, targets = parts()
    publisher = Publisher(params, targets, target_dtype=jnp.bfloat16)
    policy = publisher.publish(params, 4)
    bad = Policy(params={**policy.params, name: flip(policy.params[name], device_index)}, version=4)
    with pytest.raises(WeightMismatchError, match=rf"Version 4 arrived changed .* differ for \['{name}'\]\."):
        publisher.verify(bad)
    publisher.verify(policy)


def test_torn_replicas_of_the_trainer_are_refused():
    _, params, targets = parts()
    publisher = Publisher(params, targets)
    params["norm"] = flip(params["norm"], 1)
    with pytest.raises(WeightMismatchError, match=r"replicas of \['norm'\] differ on the trainer mesh"):
        publisher.publish(params, 1)


def test_wrong_version_and_wrong_tree():
    _, params, targets = parts()
    publisher = Publisher(params, targets)
    first = publisher.publish(params, 1)
    changed = {**params, "norm": params["norm"] + 1}
    second = publisher.publish(changed, 2)
    with pytest.raises(WeightMismatchError, match=r"Version 2 arrived changed .*\['norm'\]"):
        publisher.verify(Policy(params=first.params, version=2))
    with pytest.raises(WeightMismatchError, match="has version 9, but the published versions are 1, 2"):
        publisher.verify(Policy(params=second.params, version=9))
    with pytest.raises(ValueError, match="structure"):
        publisher.publish({"embed": params["embed"]}, 3)
    with pytest.raises(ValueError, match=r"leaf \['norm'\] is bfloat16\[5\]"):
        publisher.publish({**params, "norm": params["norm"].astype(jnp.bfloat16)}, 3)


def test_empty_tree():
    publisher = Publisher({}, {})
    assert publisher.publish({}, 5) == Policy(params={}, version=5)


def test_checksum_by_hand_and_by_layout():
    """Computes the checksum of two values in Python integers: the sum of each value times the hash of its position."""

    def weight(position):
        x = (position + 0x9E3779B9) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return (x ^ (x >> 16)) | 1

    values = np.array([3, 5], np.int32)
    for spec in (Spec(), Spec("tensor")):
        mesh = make_mesh("tensor=2", jax.devices()[:2])
        sharding = NamedSharding(mesh, spec)
        program = checksum_program([(2,)], [np.dtype(np.int32)], [sharding], mesh)
        sums_Wl = np.asarray(program([jax.device_put(values, sharding)]))
        assert fold(sums_Wl, [ShardLayout.of(sharding, 1)]) == ([(3 * weight(0) + 5 * weight(1)) % 2**32], [])
