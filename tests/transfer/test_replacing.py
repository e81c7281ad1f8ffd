"""Weights that replace older ones arrive unchanged, free the old ones, and reuse their memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import arrived, transfers
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.transfer.collective import CollectiveTransport
from podrl.transfer.in_place import InPlaceTransport
from podrl.transfer.local import LocalTransport, RelayoutTransport
from podrl.transfer.move import drive
from podrl.transfer.pathways import PathwaysTransport
from podrl.transfer.plan import make_plan
from podrl.transfer.publish import Publisher, transport_for


def by_a_service(plan, before, after):
    return PathwaysTransport(plan, before, after, reshard=lambda x, sharding, **_: jax.device_put(x, sharding))


@pytest.mark.parametrize("kind", [LocalTransport, InPlaceTransport, CollectiveTransport, by_a_service])
@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=transfers(disjoint=True))
def test_successors_of_any_layout(kind, case):
    leaves, before, after, dtype, bucket_bytes = case
    others = [np.ascontiguousarray(np.flip(x)).reshape(x.shape) for x in leaves]
    placed, next_placed = ([jax.device_put(x, s) for x, s in zip(v, before, strict=True)] for v in (leaves, others))
    transport = kind(make_plan(placed, after, dtype=dtype, bucket_bytes=bucket_bytes), before, after)
    old = drive(transport, placed)
    new = drive(transport, next_placed, replacing=old)
    arrived(new, others, after, dtype)
    assert all(x.is_deleted() for x in old)
    assert not any(x.is_deleted() for x in (*placed, *next_placed))
    arrived(drive(transport, placed), leaves, after, dtype)
    arrived(new, others, after, dtype)


def a_move(*, colocated: bool):
    devices = jax.devices()
    trainer = make_mesh("fsdp=2,tensor=2", devices[:4])
    rollout = make_mesh("data=2,tensor=2", devices[:4] if colocated else devices[4:])
    specs = [Spec("tensor", "fsdp"), Spec(), Spec("fsdp")]
    values = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in ((16, 8), (5,), (8,))]
    before, after = ([NamedSharding(mesh, spec) for spec in specs] for mesh in (trainer, rollout))
    placed = [jax.device_put(x, s) for x, s in zip(values, before, strict=True)]
    return values, before, after, placed


@pytest.mark.parametrize("donate", [False, True])
def test_a_new_layout_of_the_same_devices(donate):
    values, before, after, placed = a_move(colocated=True)
    plan = make_plan(placed, after, bucket_bytes=64)
    old = drive(RelayoutTransport(plan, before, after), placed)
    new = drive(RelayoutTransport(plan, before, after), placed, donate=donate, replacing=old)
    for array, value, sharding in zip(new, values, after, strict=True):
        np.testing.assert_array_equal(array, value)
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert all(x.is_deleted() for x in old)


@pytest.mark.parametrize("donate", [False, True])
def test_devices_that_share_a_memory_write_over_the_old_weights(donate):
    values, before, after, placed = a_move(colocated=False)
    transport = transport_for(make_plan(placed, after, dtype=jnp.bfloat16), before, after)
    assert isinstance(transport, InPlaceTransport)
    old = drive(transport, placed)
    at = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in old]
    new = drive(transport, placed, donate=donate, replacing=old)
    arrived(new, values, after, jnp.bfloat16)
    assert [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in new] == at
    assert all(x.is_deleted() for x in old)
    assert all(x.is_deleted() == donate for x in placed)


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_a_publisher_replaces_what_it_is_given_and_nothing_else(transport):
    values, _, after, placed = a_move(colocated=False)
    publisher = Publisher(placed, after, target_dtype=jnp.bfloat16, transport=transport)
    first, second = publisher.publish(placed, 1), publisher.publish(placed, 2)
    third = publisher.publish(placed, 3, replacing=first.params)
    assert all(x.is_deleted() for x in first.params)
    arrived(second.params, values, after, jnp.bfloat16)
    arrived(third.params, values, after, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"Weights to replace: leaf .* but the plan has bfloat16"):
        publisher.publish(placed, 4, replacing=placed)
    arrived(third.params, values, after, jnp.bfloat16)
