"""Optimizer state in the host's memory gives the same updates as optimizer state on the devices."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from podrl.mesh.build import make_mesh
from podrl.offload import HOST, Cut, cut
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.objective import CrossEntropy, SupervisedRows


def _trained(case, updates: int = 3):
    state, frozen = case.state()
    step, batch, metrics = case.step(CrossEntropy()), case.batch(SupervisedRows), {}
    for _ in range(updates):
        state, metrics = step(state, frozen, batch)
    return state, metrics


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mesh", "lora"), [("fsdp=2,tensor=2", 0), ("fsdp=2", 2)])
def test_state_on_the_host_makes_the_same_updates(tiny, mesh, lora, param_dtype):
    case = dataclasses.replace(tiny(mesh, lora=lora, learning_rate=1e-2, max_grad_norm=0.5), param_dtype=param_dtype)
    hosted = dataclasses.replace(case, optimizer=dataclasses.replace(case.optimizer, on_host=True))
    (here, metrics), (there, same) = _trained(case), _trained(hosted)
    # If the CPU's compiler fuses a product and a sum, they are rounded once instead of twice.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6 if param_dtype == "float32" else 1e-3)
    jax.tree.map(lambda a, b: close(np.asarray(a, np.float32), np.asarray(b, np.float32)), here, there)
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(jax.tree.map(float, same), rel=1e-4)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(there.opt_state) if x.ndim > 2}
    assert kinds == {HOST}
    assert HOST not in {x.sharding.memory_kind for x in jax.tree.leaves(there.params)}


def test_an_update_without_a_finite_gradient_leaves_the_state_on_the_host_as_it_is(tiny):
    case = tiny("fsdp=2", learning_rate=1e-2)
    hosted = dataclasses.replace(case, optimizer=dataclasses.replace(case.optimizer, on_host=True))
    state, frozen = hosted.state()
    state = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    before = jax.tree.map(np.asarray, state)
    after, metrics = hosted.step(CrossEntropy())(state, frozen, hosted.batch(SupervisedRows))
    assert float(metrics["actor/nonfinite"]) == 1.0
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, after.opt_state), before.opt_state)


def test_an_optimizer_of_ones_own_is_refused():
    with pytest.raises(
        ValueError, match=r"^RLTrainingConfig\.offload='optimizer' .* set RLTrainingConfig\.offload='none'"
    ):
        RLTrainingConfig(eval_every_n_steps=0, max_steps=1, offload="optimizer", actor_optimizer=optax.sgd(1.0))


def test_cuts_lie_along_whole_axes_in_whole_tiles():
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])

    def cut_of(shape, *spec):
        return cut(shape, NamedSharding(mesh, PartitionSpec(*spec)))

    assert cut_of((28, 64, 64), None, "fsdp", "tensor") == Cut(28)
    assert cut_of((160, 64), None, "fsdp") == Cut(10)
    assert cut_of((160, 64), "tensor", "fsdp") is None
    assert cut_of((64,)) is None
    assert cut_of((3, 96, 8, 64), None, None, "tensor") == Cut(48, 1)
