"""The transfer plan alone: boxes, buckets, and the time to make it."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.transfer.plan import PlacedLeaf, ShardLayout, make_plan

TWO, FOUR = {"data": 1, "fsdp": 2, "tensor": 1}, {"data": 2, "fsdp": 1, "tensor": 2}


def leaf(shape, sizes, spec, dtype="float32", first_id=0):
    return PlacedLeaf(shape, np.dtype(dtype), ShardLayout.abstract(sizes, spec, len(shape), first_id=first_id))


def test_boxes_by_hand():
    """Rows sharded over 2 devices become columns over tensor=2, replicated over data=2: four boxes of 2x3, each read
    twice."""
    plan = make_plan(
        [leaf((4, 6), TWO, Spec("fsdp"))], [ShardLayout.abstract(FOUR, Spec(None, "tensor"), 2, first_id=2)]
    )
    (one,) = plan.leaves
    assert (one.box, one.source_slots, one.target_slots) == ((2, 3), (1, 2), (2, 1))
    assert one.source_WM.tolist() == [[0, 1]] * 4
    assert one.slot_WM.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert plan.links.tolist() == [[s, t, 24] for s in (0, 1) for t in (2, 3, 4, 5)]
    assert plan.moved_bytes == plan.target_bytes == 2 * 4 * 6 * 4
    assert plan.seconds(96.0) == 1.0


def test_cuts_that_do_not_nest():
    """3 shards become 2: a box is a sixth of the array; device 1 holds the two middle boxes, one for each target."""
    plan = make_plan(
        [leaf((12,), {"data": 3}, Spec("data"))], [ShardLayout.abstract({"data": 2}, Spec("data"), 1, first_id=3)]
    )
    (one,) = plan.leaves
    assert one.source_WM.tolist() == [[0, 0, 1], [1, 2, 2]]
    assert one.slot_WM.tolist() == [[0, 1, 0], [1, 0, 1]]


def test_replicas_of_the_source_send_equal_shares():
    sizes = {"data": 4, "fsdp": 2, "tensor": 1}
    target = ShardLayout.abstract({"data": 1, "fsdp": 1, "tensor": 8}, Spec("tensor"), 2, first_id=8)
    plan = make_plan([leaf((16, 8), sizes, Spec(None, "fsdp"))], [target])
    sent = {source: 0 for source in range(8)}
    for source, _, size in plan.links.tolist():
        sent[source] += size
    assert set(sent.values()) == {16 * 8 * 4 // 8}


def test_a_device_reads_from_itself_where_it_can():
    mesh = {"data": 4}
    plan = make_plan([leaf((8,), mesh, Spec())], [ShardLayout.abstract(mesh, Spec("data"), 1)])
    assert plan.moved_bytes == 0


def test_buckets_are_bounded():
    source = [leaf((8, 100), TWO, Spec("fsdp"), first_id=0) for _ in range(5)] + [leaf((64, 1000), TWO, Spec("fsdp"))]
    target = [ShardLayout.abstract(TWO, Spec(None, "fsdp"), 2, first_id=2)] * 6
    plan = make_plan(source, target, dtype="bfloat16", bucket_bytes=2000)
    assert [(b.leaves, b.parts) for b in plan.buckets] == [((0, 1), 1), ((2, 3), 1), ((5,), 32), ((4,), 1)]
    assert plan.largest_bucket <= 2000
    large = plan.leaves[5]
    covered = {large.part_start(p) + k for p in range(large.parts) for k in range(large.part_size)}
    assert covered == set(range(large.box[large.part_axis]))


def test_refusals():
    mesh = make_mesh("fsdp=4", jax.devices()[:4])
    x = jax.ShapeDtypeStruct((6, 4), np.float32, sharding=NamedSharding(mesh, Spec(None, "fsdp")))
    with pytest.raises(
        ValueError, match=r"Leaf \['a'\].*target mesh: dimension 0 of size 6 does not divide into 4 shards"
    ):
        make_plan({"a": x}, {"a": NamedSharding(mesh, Spec("fsdp"))})
    with pytest.raises(ValueError, match="trees differ"):
        make_plan({"a": x}, {"b": NamedSharding(mesh, Spec())})
    with pytest.raises(ValueError, match="NamedSharding, not NoneType"):
        make_plan({"a": jax.ShapeDtypeStruct((4,), np.float32)}, {"a": NamedSharding(mesh, Spec())})


def llama(layers, dim, ffn, heads, kv_heads, head_dim, vocab):
    """Returns shapes and specs of a stacked Llama under the default rules."""
    spec = {"D": "fsdp", "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor"}
    size = {"L": layers, "D": dim, "F": ffn, "N": heads, "K": kv_heads, "H": head_dim, "V": vocab}
    names = {"embed": "VD", "unembed": "DV", "q": "LDNH", "k": "LDKH", "v": "LDKH", "o": "LNHD"}
    names |= {"gate": "LDF", "up": "LDF", "down": "LFD", "norm": "LH"}
    shapes = {name: tuple(size[c] for c in letters) for name, letters in names.items()}
    return shapes, {name: Spec(*(spec.get(c) for c in letters)) for name, letters in names.items()}


@pytest.mark.parametrize("model", [(80, 8192, 28672, 64, 8, 128, 128256), (126, 16384, 53248, 128, 8, 128, 128256)])
def test_pod_scale_planning_is_cheap(model):
    shapes, specs = llama(*model)
    before, after = {"data": 1, "fsdp": 256, "tensor": 1}, {"data": 32, "fsdp": 1, "tensor": 8}
    source = {k: leaf(shapes[k], before, specs[k]) for k in shapes}
    target = {k: ShardLayout.abstract(after, specs[k], len(shapes[k]), first_id=256) for k in shapes}
    plan = make_plan(source, target, dtype="bfloat16", bucket_bytes=256 << 20)
    assert make_plan(source, target, dtype="bfloat16", bucket_bytes=256 << 20) is plan
    norm_bytes = 2 * np.prod(shapes["norm"])  # on all 256 devices; every other leaf has 32 copies
    assert plan.moved_bytes == 32 * (plan.source_bytes // 2 - norm_bytes) + 256 * norm_bytes
    assert plan.largest_bucket <= 256 << 20
    text = plan.explain(bandwidth=50e9)
    assert "65536 links" in text and "expected" in text and "largest" in text
