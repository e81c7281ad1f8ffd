"""The rules that map logical axes to mesh axes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as Spec

from podrl.mesh import rules
from podrl.mesh.build import make_mesh


@dataclasses.dataclass(frozen=True)
class Weight:
    shape: tuple[int, ...]
    axes: tuple[str, ...]


@pytest.mark.parametrize(
    ("axes", "shape", "mesh", "spec"),
    [
        (("vocab", "embed"), (8, 8), "fsdp=2,tensor=4", Spec("tensor", "fsdp")),
        (("vocab", "embed"), (6, 8), "fsdp=2,tensor=4", Spec(None, "fsdp")),
        (("vocab", "embed"), (8, 7), "fsdp=2,tensor=4", Spec("tensor")),
        (("layers", "embed", "heads", "head_dim"), (3, 8, 4, 2), "fsdp=4,tensor=2", Spec(None, "fsdp", "tensor")),
        (("layers", "embed", "kv_heads", "head_dim"), (3, 8, 1, 2), "fsdp=4,tensor=2", Spec(None, "fsdp")),
        (("layers", "norm"), (3, 8), "fsdp=8", Spec()),
        (("batch", "time"), (8, 5), "data=4,tensor=2", Spec("data")),
        (("batch", "time"), (8, 5), "data=4,fsdp=2", Spec(("data", "fsdp"))),
        (("heads", "mlp"), (4, 4), "data=4,tensor=2", Spec("tensor")),
        (("batch", "time"), (8, 6), "fsdp=4,seq=2", Spec("fsdp", "seq")),
        (("batch", "time"), (8, 5), "fsdp=4,seq=2", Spec("fsdp")),
        (("vocab", "embed"), (8, 8), "fsdp=4,seq=2", Spec(None, ("fsdp", "seq"))),
        (("replica", "time", "embed"), (8, 8, 8), "data=2,fsdp=2,seq=2", Spec("data", "seq", "fsdp")),
        (("batch", "time"), (8, 5), "data=2,expert=2,fsdp=2", Spec(("data", "expert", "fsdp"))),
        (("replica", "time", "embed"), (8, 8, 8), "data=2,expert=2,fsdp=2", Spec(("data", "expert"), None, "fsdp")),
        (("layers", "expert", "mlp", "embed"), (3, 4, 8, 8), "expert=4,fsdp=2", Spec(None, "expert", None, "fsdp")),
        (("layers", "expert", "mlp", "embed"), (3, 6, 8, 8), "expert=4,fsdp=2", Spec(None, None, None, "fsdp")),
        ((), (), "fsdp=8", Spec()),
    ],
)
def test_spec(axes, shape, mesh, spec):
    assert rules.spec_for(axes, shape, make_mesh(mesh, jax.devices())) == spec


def test_refusals():
    mesh = make_mesh("auto", jax.devices())
    with pytest.raises(ValueError, match="'emebd' has no rule: known axes are act, batch, embed"):
        rules.spec_for(("emebd",), (4,), mesh)
    with pytest.raises(ValueError, match="do not fit shape"):
        rules.spec_for(("embed",), (4, 4), mesh)


def test_tree_of_shardings():
    mesh = make_mesh("fsdp=4,tensor=2", jax.devices())
    tree = {"a": Weight((8, 8), ("vocab", "embed")), "b": {"c": Weight((3,), ("norm",))}}
    placed = rules.shardings(tree, mesh)
    assert placed["a"].spec == Spec("tensor", "fsdp")
    assert placed["b"]["c"].is_fully_replicated


def test_constrain():
    mesh = make_mesh("data=4,tensor=2", jax.devices())
    out_BT = jax.jit(lambda x: rules.constrain(x, ("batch", "time"), mesh))(jnp.zeros((8, 2)))
    assert out_BT.sharding.is_equivalent_to(rules.sharding_for(("batch", "time"), (8, 2), mesh), 2)
    x_BT = jnp.zeros((8, 2))
    assert rules.constrain(x_BT, ("batch", "time"), None) is x_BT
