"""The collective transport: any two disjoint meshes, two real processes, and the TPU compiler."""

import math
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers
from cases import arrived, bits, transfers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.transfer.collective import CollectiveTransport
from podrl.transfer.move import drive
from podrl.transfer.plan import PlacedLeaf, make_plan


def leaves_on(mesh, specs, shapes):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return values, shardings, [jax.device_put(v, s) for v, s in zip(values, shardings, strict=True)]


@pytest.mark.parametrize(
    ("source", "target", "bucket_bytes"),
    [
        ("fsdp=2,tensor=2", "tensor=4", 1 << 20),
        ("fsdp=4", "data=2,tensor=2", 1),
        ("data=2,fsdp=2", "tensor=2", 1 << 20),
        ("tensor=2", "data=2,tensor=2", 1 << 20),
        ("fsdp=4", "auto=1", 1 << 20),
        ("auto=1", "fsdp=2,tensor=3", 1 << 20),
        ("fsdp=4", "data=3", 1 << 20),
        ("data=2,tensor=2", "fsdp=2", 1 << 20),
    ],
)
def test_any_two_meshes(source, target, bucket_bytes):
    def build(spec, devices):
        spec = "" if spec == "auto=1" else spec
        sizes = [int(n) for n in re.findall(r"=(\d)", spec)]
        return make_mesh(spec, devices[: math.prod(sizes)])

    trainer, rollout = build(source, jax.devices()), build(target, jax.devices()[::-1])
    specs = [Spec("tensor", "fsdp"), Spec(None, "fsdp", "tensor"), Spec(), Spec(), Spec(("data", "fsdp"))]
    shapes = [(12, 24), (3, 12, 12), (5,), (), (24,)]
    values, before, placed = leaves_on(trainer, specs, shapes)
    after = [NamedSharding(rollout, spec) for spec in [*specs[:4], Spec(None)]]
    plan = make_plan(placed, after, dtype=jnp.bfloat16, bucket_bytes=bucket_bytes)
    moved = drive(CollectiveTransport(plan, before, after), placed)
    for value, array, sharding in zip(values, moved, after, strict=True):
        assert array.sharding == sharding
        want = value.astype(jnp.bfloat16)
        for shard in array.addressable_shards:
            assert (bits(shard.data) == bits(want[shard.index])).all()
    assert not any(x.is_deleted() for x in placed)


@settings(max_examples=16, derandomize=True, suppress_health_check=list(HealthCheck))
@given(transfers(disjoint=True), st.sampled_from([0, 1 << 20]))
def test_any_layout_to_any_layout(case, flat_bytes):
    leaves, before, after, dtype, bucket_bytes = case
    placed = [jax.device_put(x, s) for x, s in zip(leaves, before, strict=True)]
    plan = make_plan(placed, after, dtype=dtype, bucket_bytes=bucket_bytes)
    transport = CollectiveTransport(plan, before, after, flat_bytes=flat_bytes)
    arrived(drive(transport, placed), leaves, after, dtype)


def test_shared_devices_are_refused():
    mesh = make_mesh("fsdp=2", jax.devices()[:2])
    other = make_mesh("fsdp=2", jax.devices()[1:3])
    x = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, Spec()))
    target = NamedSharding(other, Spec())
    with pytest.raises(ValueError, match=r"devices \[1\] are in both"):
        CollectiveTransport(make_plan([x], [target]), [x.sharding], [target])


WORKER = """
    import sys
    import jax
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), cluster_detection_method="deactivate")
    import numpy as np
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as Spec
    from podrl.mesh.build import make_mesh
    from podrl.transfer.publish import Publisher, WeightMismatchError

    rank = jax.process_index()
    hosts = [[d for d in jax.devices() if d.process_index == p] for p in (0, 1)]
    trainer, rollout = make_mesh("fsdp=2,tensor=2", hosts[0]), make_mesh("tensor=4", hosts[1])
    shapes = {"embed": (16, 8), "layers": (3, 8, 8), "norm": (5,), "scale": ()}
    specs = {"embed": Spec("tensor", "fsdp"), "layers": Spec(None, "fsdp", "tensor"), "norm": Spec(), "scale": Spec()}
    before = {k: NamedSharding(trainer, s) for k, s in specs.items()}
    after = {k: NamedSharding(rollout, s) for k, s in specs.items()}
    abstract = {k: jax.ShapeDtypeStruct(shapes[k], jnp.float32, sharding=before[k]) for k in shapes}
    publisher = Publisher(abstract, after, target_dtype=jnp.bfloat16)
    for version in (1, 2):
        rng = np.random.default_rng(version)
        values = {k: np.asarray(rng.standard_normal(s), np.float32) for k, s in shapes.items()}
        params = jax.device_put(values, before) if rank == 0 else None
        policy = publisher.publish(params, version)
        if rank == 1:
            for name, array in policy.params.items():
                for shard in array.addressable_shards:
                    assert (np.asarray(shard.data) == values[name].astype(jnp.bfloat16)[shard.index]).all(), name
    try:
        publisher.publish(params, 3 + rank)
        assert rank == 0
    except WeightMismatchError as error:
        assert rank == 1 and "Version 4 was expected, version 3 was sent" in str(error)
    print("arrived", version, flush=True)
"""


@pytest.mark.e2e
def test_two_processes(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    address = f"127.0.0.1:{workers.free_port()}"
    said = workers.run(script, [[address, str(rank)] for rank in (0, 1)], devices=4)
    assert all("arrived 2" in text for text in said), said


def collective_bytes(hlo):
    """Counts the bytes that the collective-permutes of a compiled program send, summed over all pairs of devices."""
    total = 0
    for line in hlo.splitlines():
        shape = re.search(r"= \(?(u8|u16|u32)\[(\d+)\].* collective-permute(?:-start)?\(", line)
        if shape:
            (pairs,) = re.findall(r"source_target_pairs=\{(.*?\})\}", line)
            total += int(shape[2]) * int(shape[1][1:]) // 8 * pairs.count("{")
    return total


@pytest.mark.nightly("podrl/transfer")
@pytest.mark.slow
def test_compiles_for_tpu(monkeypatch):
    """A v5e 4x4 is split into 8 chips for the trainer and 8 for the rollout. Every value that is sharded crosses once,
    as bfloat16."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    trainer, rollout = make_mesh("fsdp=8", devices[:8]), make_mesh("data=2,tensor=4", devices[8:])
    specs = {"embed": Spec("tensor", "fsdp"), "up": Spec(None, "fsdp", "tensor"), "norm": Spec()}
    shapes = {"embed": (4096, 1024), "up": (2, 1024, 4096), "norm": (2, 1024)}
    source = {k: PlacedLeaf(shapes[k], np.dtype(np.float32), NamedSharding(trainer, specs[k])) for k in shapes}
    target = {k: NamedSharding(rollout, specs[k]) for k in shapes}
    plan = make_plan(source, target, dtype=jnp.bfloat16)
    transport = CollectiveTransport(plan, [x.sharding for x in jax.tree.leaves(source)], jax.tree.leaves(target))
    (programs,) = transport.programs
    shapes_of = transport.arguments(0)
    packing = programs.pack.lower(*shapes_of["pack"]).compile()
    assert "all-to-all" not in packing.as_text() and "all-gather" not in packing.as_text()
    text = programs.cross.lower(*shapes_of["cross"]).compile().as_text()
    # Every value crosses once, except the small norm, which goes to all eight devices.
    assert transport.crossing_bytes == 2 * (math.prod(shapes["embed"]) + math.prod(shapes["up"]) + 8 * 2 * 1024)
    assert collective_bytes(text) == transport.crossing_bytes
    assert "all-gather" in programs.unpack.lower(*shapes_of["unpack"]).compile().as_text()
