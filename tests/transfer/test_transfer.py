"""Any tree between any two layouts arrives bit for bit, without host arrays and without compiling twice."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import arrived, bits, some_values, transfers
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.transfer.in_place import InPlaceTransport
from podrl.transfer.local import LocalTransport, RelayoutTransport
from podrl.transfer.move import drive
from podrl.transfer.plan import make_plan
from podrl.transfer.publish import reshard, transport_for


@pytest.mark.parametrize("kind", [LocalTransport, InPlaceTransport])
@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=transfers())
def test_any_layout_to_any_layout(kind, case):
    leaves, before, after, dtype, bucket_bytes = case
    placed = [jax.device_put(x, s) for x, s in zip(leaves, before, strict=True)]
    plan = make_plan(placed, after, dtype=dtype, bucket_bytes=bucket_bytes)
    arrived(drive(kind(plan, before, after), placed), leaves, after, dtype)
    for leaf, array in zip(leaves, placed, strict=True):
        assert (bits(array) == bits(leaf)).all()


TRAINER, ROLLOUT = "fsdp=2,tensor=2", "tensor=4"


def a_tree(mesh):
    """Makes a small model: stacked layers, a norm, a scalar, and a tied embedding that appears once."""
    specs = {
        "embed": Spec("tensor", "fsdp"),
        "layers": {"q": Spec(None, "fsdp", "tensor"), "norm": Spec()},
        "scale": Spec(),
    }
    shapes = {"embed": (16, 8), "layers": {"q": (3, 8, 4), "norm": (3, 8)}, "scale": ()}
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, Spec))
    values = jax.tree.map(
        lambda s: some_values(s, np.dtype(np.float32), len(s)), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return values, shardings


def trainer_and_rollout():
    devices = jax.devices()
    return make_mesh(TRAINER, devices[:4]), make_mesh(ROLLOUT, devices[4:])


def test_nothing_compiles_and_no_host_array_is_made_after_the_first_call(monkeypatch, caplog):
    trainer, rollout = trainer_and_rollout()
    values, before = a_tree(trainer)
    _, after = a_tree(rollout)
    tree = jax.device_put(values, before)
    array_type, reads = type(tree["scale"]), []
    for bucket_bytes in (64, 1 << 20):  # in several buckets and in one
        plan = make_plan(tree, after, dtype=jnp.bfloat16, bucket_bytes=bucket_bytes)
        transport = LocalTransport(plan, jax.tree.leaves(before), jax.tree.leaves(after))
        jax.block_until_ready(drive(transport, jax.tree.leaves(tree)))
        monkeypatch.setattr(array_type, "__array__", lambda self, *a, **k: reads.append(self.shape))
        monkeypatch.setattr(array_type, "_value", property(lambda self: reads.append(self.shape)))
        with (
            jax.log_compiles(True),
            caplog.at_level(logging.WARNING),
            jax.transfer_guard_host_to_device("disallow_explicit"),
            jax.transfer_guard_device_to_host("disallow_explicit"),
        ):
            moved = jax.block_until_ready(drive(transport, jax.tree.leaves(tree)))
        monkeypatch.undo()
        assert not reads
        assert not [r.message for r in caplog.records if "ompil" in r.message]
        assert (bits(moved[0]) == bits(values["embed"].astype(jnp.bfloat16))).all()


def test_compile_log_does_log(caplog):
    """Guards the test that finds no compilation in jax's log: a compilation does show there."""
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
    assert any("ompil" in r.message for r in caplog.records)


def test_steady_moves_in_place_compile_nothing_and_copy_nothing_but_the_result(caplog):
    trainer, rollout = trainer_and_rollout()
    values, before = a_tree(trainer)
    _, after = a_tree(rollout)
    moved = reshard(jax.device_put(values, before), after, dtype=jnp.bfloat16)
    tree = jax.device_put(jax.tree.map(lambda x: x + 1, values), before)
    plan = make_plan(tree, after, dtype=jnp.bfloat16)
    transport = transport_for(plan, jax.tree.leaves(before), jax.tree.leaves(after))
    assert isinstance(transport, InPlaceTransport)
    at = {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        lent = {s.data.unsafe_buffer_pointer() for x in transport.aliases(i, leaf) for s in x.addressable_shards}
        assert lent <= at
    with (
        jax.log_compiles(True),
        caplog.at_level(logging.WARNING),
        jax.transfer_guard_host_to_device("disallow_explicit"),
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        moved = jax.block_until_ready(reshard(tree, after, dtype=jnp.bfloat16))
    assert not [r.message for r in caplog.records if "ompil" in r.message]
    assert (bits(moved["embed"]) == bits((values["embed"] + 1).astype(jnp.bfloat16))).all()


def test_what_was_lent_can_be_donated_after_a_move():
    trainer, rollout = trainer_and_rollout()
    # A program makes the arrays: device_put may alias an aligned numpy array, whose memory no program may overwrite.
    x = jnp.ones((64, 64), device=NamedSharding(trainer, Spec("fsdp")))
    at = x.addressable_data(0).unsafe_buffer_pointer()
    reshard([x], [NamedSharding(rollout, Spec("tensor"))])
    updated = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    assert updated.addressable_data(0).unsafe_buffer_pointer() == at


def moved_by(kind, tree, shardings, *, donate=False, dtype=None):
    """Moves a tree to `shardings` by the transport `kind`."""
    leaves, treedef = jax.tree.flatten(tree)
    targets = jax.tree.leaves(shardings)
    plan = make_plan(tree, shardings, dtype=dtype)
    moved = drive(kind(plan, [leaf.sharding for leaf in leaves], targets), leaves, donate=donate)
    return jax.tree.unflatten(treedef, moved)


def same(tree, values):
    return all(map(lambda x, y: (bits(x) == bits(y)).all(), jax.tree.leaves(tree), jax.tree.leaves(values)))


@pytest.mark.parametrize("kind", [LocalTransport, InPlaceTransport])
@pytest.mark.parametrize("donate", [False, True])
def test_sources_survive_unless_given_up(kind, donate):
    trainer, rollout = trainer_and_rollout()
    values, before = a_tree(trainer)
    _, after = a_tree(rollout)
    tree = jax.device_put(values, before)
    moved = moved_by(kind, tree, after, donate=donate)
    assert all(x.is_deleted() == donate for x in jax.tree.leaves(tree))
    assert same(moved, values)


@pytest.mark.parametrize("kind", [RelayoutTransport, InPlaceTransport])
@pytest.mark.parametrize("target", ["fsdp=2,tensor=2", "tensor=4"])
def test_colocated_result_shares_no_memory_with_its_source(kind, target):
    devices = jax.devices()[:4]
    values, before = a_tree(make_mesh(TRAINER, devices))
    _, after = a_tree(make_mesh(target, devices))
    tree = jax.device_put(values, before)
    plan = make_plan(tree, after)
    assert RelayoutTransport.fits(plan)
    assert plan.moved_bytes == 0 or target == "tensor=4"
    moved = moved_by(kind, tree, after)
    pointers = [
        {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(t) for s in x.addressable_shards}
        for t in (tree, moved)
    ]
    assert not pointers[0] & pointers[1]
    jax.tree.map(lambda x: x.delete(), tree)
    assert same(moved, values)


@pytest.mark.parametrize("kind", [RelayoutTransport, InPlaceTransport])
def test_colocated_donation_hands_unchanged_leaves_on(kind):
    mesh = make_mesh(TRAINER, jax.devices()[:4])
    values, before = a_tree(mesh)
    tree = jax.device_put(values, before)
    moved = moved_by(kind, tree, before, donate=True)
    assert moved["embed"] is tree["embed"]
    assert same(moved, values)


@pytest.mark.parametrize("kind", [LocalTransport, InPlaceTransport])
def test_overlapping_meshes_share_no_memory(kind):
    source = make_mesh("auto", jax.devices()[:2])
    target = make_mesh("auto", jax.devices()[1:4], auto="data=-1")
    x = jax.device_put(np.arange(12, dtype=np.float32), NamedSharding(source, Spec()))
    moved = moved_by(kind, x, NamedSharding(target, Spec()))
    x.delete()
    assert np.array_equal(moved, np.arange(12))


def test_empty_tree_and_single_device():
    assert reshard({}, {}) == {}
    rollout = make_mesh(ROLLOUT, jax.devices()[4:])
    x = jnp.arange(8, dtype=jnp.float32)
    assert np.array_equal(reshard([x], [NamedSharding(rollout, Spec("tensor"))])[0], np.arange(8))


def test_ready_callback():
    trainer, rollout = trainer_and_rollout()
    values, before = a_tree(trainer)
    _, after = a_tree(rollout)
    seconds = []
    reshard(jax.device_put(values, before), after, on_ready=seconds.append)
    assert len(seconds) == 1 and seconds[0] > 0


def test_a_tree_on_several_meshes_moves_as_one():
    trainer, rollout = trainer_and_rollout()
    x = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(trainer, Spec("fsdp")))
    step = jax.device_put(np.int32(3), jax.devices()[7])
    moved = reshard(
        {"step": step, "x": x}, {"step": NamedSharding(trainer, Spec()), "x": NamedSharding(rollout, Spec())}
    )
    assert np.array_equal(moved["x"], np.arange(16)) and int(moved["step"]) == 3
    assert moved["step"].sharding.mesh == trainer
