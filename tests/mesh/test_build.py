"""Mesh strings, device order and the split between roles."""

import dataclasses

import jax
import pytest

from podrl.mesh.build import check_decodes, describe_mesh, make_mesh, parse_mesh, split_devices, with_own_axes


@dataclasses.dataclass(frozen=True)
class Chip:
    """Stands in for a device; it has only the attributes that the mesh builder reads."""

    process_index: int
    id: int


def chips(hosts: list[int], per_host: int) -> list[Chip]:
    return [Chip(h, h * 2048 + i) for h in hosts for i in range(per_host)]


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("fsdp=4", (1, 1, 4, 1, 1)),
        ("data=2,tensor=2", (2, 1, 1, 1, 2)),
        (" tensor = 2 , data = 3 ", (3, 1, 1, 1, 2)),
        ("fsdp=4,tp=2", (1, 1, 4, 1, 2)),
        ("dp=2,model=3", (2, 1, 1, 1, 3)),
        ("auto", (1, 1, -1, 1, 1)),
        ("data=-1,tensor=2", (-1, 1, 1, 1, 2)),
        ("fsdp=4,seq=2", (1, 1, 4, 2, 1)),
        ("dp=2,cp=4", (2, 1, 1, 4, 1)),
        ("fsdp=16,expert=4", (1, 4, 16, 1, 1)),
        ("ep=-1", (1, -1, 1, 1, 1)),
        ("", (1, 1, 1, 1, 1)),
    ],
)
def test_parse(spec, sizes):
    assert parse_mesh(spec) == sizes


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "fdsp=4",
            "names axis 'fdsp': give axes and sizes such as fsdp=4,tensor=2 .axes are data, expert, fsdp, seq, tensor",
        ),
        ("fsdp=2,fsdp=2", "gives axis 'fsdp' twice"),
        ("tp=2,tensor=2", "gives axis 'tensor' twice"),
        ("fsdp=two", "gives 'fsdp' the size 'two'"),
        ("fsdp", "gives 'fsdp' the size ''"),
        ("fsdp=0", "sizes are positive, or -1"),
        ("data=-1,fsdp=-1", "two sizes of -1"),
    ],
)
def test_parse_refuses(spec, says):
    with pytest.raises(ValueError, match=says):
        parse_mesh(spec, key="roles.trainer.mesh")


def test_devices_are_sorted_by_process_then_id():
    mesh = make_mesh("data=2,tensor=2", chips([1, 0], 2)[::-1])
    assert [(d.process_index, d.id) for d in mesh.devices.flat] == [(0, 0), (0, 1), (1, 2048), (1, 2049)]
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 2}


@dataclasses.dataclass(frozen=True)
class PathwaysChip(Chip):
    """Stands in for a device behind the Pathways proxy, whose devices all belong to process 0."""

    slice_index: int
    virtual_task_index: int


def test_one_controllers_devices_are_kept_together_by_slice_then_task():
    # There are two slices of two tasks, each with two chips. Neither the order of the chips' ids nor their order in the
    # list is an order by slice or by task.
    found = [PathwaysChip(0, i, slice_index=(i // 2) % 2, virtual_task_index=i % 2) for i in (5, 0, 3, 6, 1, 4, 7, 2)]
    mesh = make_mesh("data=2,fsdp=2,tensor=2", found)
    grid = [[[d.id for d in row] for row in plane] for plane in mesh.devices]
    assert grid == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
    trainer, rollout = split_devices(found, "fsdp=4", "data=2,tensor=2")
    assert {d.slice_index for d in trainer} == {0} and {d.slice_index for d in rollout} == {1}


def test_the_rest():
    assert dict(make_mesh("data=-1,tensor=2", jax.devices()).shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert dict(make_mesh("auto", jax.devices()[:3]).shape) == {"data": 1, "fsdp": 3, "tensor": 1}
    assert dict(make_mesh("auto", jax.devices()[:3], auto="data=-1").shape) == {"data": 3, "fsdp": 1, "tensor": 1}


def test_error_has_the_numbers():
    with pytest.raises(ValueError, match=r"roles\.rollout\.mesh tensor=8 needs 8 devices, hosts 2-3 have 4"):
        make_mesh("tensor=8", chips([2, 3], 2), key="roles.rollout.mesh")
    with pytest.raises(ValueError, match="mesh fsdp=2 needs 2 devices, host 0 has 3"):
        make_mesh("fsdp=2", chips([0], 3))
    with pytest.raises(ValueError, match="needs a multiple of 2 devices, hosts 0, 2 have 3"):
        make_mesh("fsdp=-1,tensor=2", [Chip(0, 0), Chip(0, 1), Chip(2, 0)])


def test_too_few_cpu_devices_say_how_to_fake_more():
    with pytest.raises(ValueError, match=r"needs 16 .*XLA_FLAGS=--xla_force_host_platform_device_count=16 before"):
        make_mesh("fsdp=4,tensor=4", jax.devices()[:8])
    with pytest.raises(ValueError, match=r"needs 16 .* by --config\.fake_devices=16\.$"):
        make_mesh("fsdp=4,tensor=4", jax.devices()[:8], key="roles.trainer.mesh")
    with pytest.raises(ValueError, match=r"\(-1 takes the rest\)\.$"):  # enough CPU devices: no advice
        make_mesh("fsdp=2", jax.devices()[:3])
    with pytest.raises(ValueError, match=r"\(-1 takes the rest\)\.$"):
        make_mesh("fsdp=4", chips([0], 3))


@pytest.mark.parametrize(
    ("count", "trainer", "rollout", "taken"),
    [
        (8, "fsdp=4", "data=2,tensor=2", 4),
        (8, "fsdp=2", "data=-1", 2),
        (8, "auto", "tensor=2", 6),
        (8, "auto", "auto", 4),
        (3, "auto", "auto", 2),
        (6, "fsdp=-1,tensor=2", "auto", 2),
    ],
)
def test_disjoint_split(count, trainer, rollout, taken):
    first, second = split_devices(chips([0], count), trainer, rollout)
    assert [d.id for d in first] == list(range(taken))
    assert [d.id for d in second] == list(range(taken, count))


def test_a_single_device_serves_both_roles():
    one = chips([0], 1)
    assert split_devices(one, "auto", "auto") == (one, one)


def test_split_refuses():
    with pytest.raises(ValueError, match=r"needs 4 devices and .*rollout.mesh='tensor=8' needs 8, host 0 has 8"):
        split_devices(chips([0], 8), "fsdp=4", "tensor=8")
    with pytest.raises(ValueError, match=r"host 0 has 4: .* by --config\.fake_devices=12\.$"):
        split_devices(jax.devices()[:4], "fsdp=4", "tensor=8")
    with pytest.raises(ValueError, match=r"roles\.trainer\.mesh fsdp=4 needs 4 devices, host 0 has 1"):
        make_mesh("fsdp=4", split_devices(chips([0], 1), "fsdp=4", "auto")[0], key="roles.trainer.mesh")


def test_describe():
    assert describe_mesh(make_mesh("fsdp=2,tensor=2", jax.devices()[:4])) == "fsdp=2,tensor=2"
    assert describe_mesh(make_mesh("auto", jax.devices()[:1])) == "one device"


def test_seq_and_expert_are_axes_only_where_they_cut():
    devices = chips([0], 8)
    assert make_mesh("fsdp=4,expert=1", devices[:4]) == make_mesh("fsdp=4", devices[:4])
    mesh = make_mesh("expert=4,fsdp=2", devices)
    assert dict(mesh.shape) == {"data": 1, "expert": 4, "fsdp": 2, "tensor": 1} and with_own_axes(mesh) is mesh
    named = with_own_axes(jax.sharding.Mesh(mesh.devices.reshape(2, 4), ("fsdp", "ep")))
    assert named is not None and dict(named.shape) == dict(mesh.shape)
    assert [d.id for d in named.devices.flat] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert make_mesh("fsdp=4,seq=1", devices[:4]) == make_mesh("fsdp=4", devices[:4])
    mesh = make_mesh("fsdp=2,seq=2,tensor=2", devices)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "seq": 2, "tensor": 2}
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    assert describe_mesh(mesh) == "fsdp=2,seq=2,tensor=2"
    named = with_own_axes(jax.sharding.Mesh(mesh.devices.reshape(2, 2, 2), ("tp", "fsdp", "sp")))
    assert named is not None and dict(named.shape) == dict(mesh.shape)
    assert [d.id for d in named.devices.flat] == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("mesh", ["data=2,seq=4", "seq=-1", make_mesh("seq=2", chips([0], 2))])
def test_decoding_does_not_cut_rows(mesh):
    with pytest.raises(
        ValueError, match=r"roles.rollout.mesh='.*seq=.*' cuts rows along time .* data, expert, fsdp and tensor"
    ):
        check_decodes(mesh, key="roles.rollout.mesh")
    check_decodes("auto", key="roles.rollout.mesh")
