"""The Pathways transport with a stand-in for the Pathways service: when it is chosen, its calls, casts, buckets,
donation."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import arrived, some_values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.transfer import pathways
from podrl.transfer.move import drive
from podrl.transfer.pathways import PathwaysTransport
from podrl.transfer.plan import make_plan
from podrl.transfer.publish import transport_for


def a_transfer():
    devices = jax.devices()
    trainer, rollout = make_mesh("fsdp=2,tensor=2", devices[:4]), make_mesh("tensor=4", devices[4:])
    specs = [Spec("tensor", "fsdp"), Spec(), Spec()]
    leaves = [some_values((16, 8), np.dtype(np.float32), 0), some_values((5,), np.dtype(np.float32), 1), np.int32(3)]
    before = [NamedSharding(trainer, spec) for spec in specs]
    after = [NamedSharding(rollout, spec) for spec in specs]
    placed = [jax.device_put(x, s) for x, s in zip(leaves, before, strict=True)]
    return leaves, before, after, placed


class Service:
    """Stands in for the reshard function of Pathways: records its calls and moves arrays by jax.device_put."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, sharding, *, donate=False, may_alias=None, cache_resharding_plans=False):
        self.calls.append((len(x), donate, cache_resharding_plans))
        moved = jax.block_until_ready(jax.device_put(x, sharding))
        if donate:
            for array in x:
                array.delete()
        return moved


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_moves_bucket_by_bucket(donate, bucket_bytes):
    leaves, before, after, placed = a_transfer()
    plan = make_plan(placed, after, dtype=jnp.bfloat16, bucket_bytes=bucket_bytes)
    service = Service()
    moved = drive(PathwaysTransport(plan, before, after, reshard=service), placed, donate=donate)
    arrived(moved, [np.asarray(x) for x in leaves], after, jnp.bfloat16)
    assert all(x.is_deleted() == donate for x in placed)
    assert all(cached for _, _, cached in service.calls)
    # Cast arrays are always freed, the integer array only if its owner donates it.
    assert sum(n for n, given_up, _ in service.calls if given_up) == (3 if donate else 2)
    assert len(service.calls) == (2 if bucket_bytes > 8 else 3)


def test_chosen_by_the_platform():
    assert pathways.chosen("proxy") and pathways.chosen("proxy,cpu")
    assert not any(map(pathways.chosen, ("cpu", "", "proxyless", "tpu")))


def test_without_the_package_it_says_what_is_missing(monkeypatch):
    _, before, after, placed = a_transfer()
    monkeypatch.setattr(pathways, "MODULE", "pathwaysutils_not_here.reshard")
    was = jax.config.jax_platforms
    jax.config.update("jax_platforms", "proxy,cpu")
    try:
        with pytest.raises(ValueError, match=r"JAX_PLATFORMS='proxy,cpu' .*pip install .*\[pathways\]'"):
            transport_for(make_plan(placed, after), before, after)
    finally:
        jax.config.update("jax_platforms", was)


def test_the_package_has_the_function_we_call():
    module = pytest.importorskip(pathways.MODULE)
    parameters = inspect.signature(module.reshard).parameters
    assert list(parameters)[:2] == ["x", "sharding"]
    assert {"donate", "cache_resharding_plans"} <= set(parameters)
