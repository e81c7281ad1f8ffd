"""A tiny Gemma 2 model, samples of varied lengths, and their packed batches, for every test of the trainer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from packed_rows import packed_rows

from podrl.algorithms.policy_rows import ReferencedRows
from podrl.mesh.build import make_mesh
from podrl.mesh.rules import batch_shards
from podrl.models import parameters
from podrl.models.config import ModelConfig, gemma2_config
from podrl.trainer import packing
from podrl.trainer import state as state_lib
from podrl.trainer.optimizer import AdamSettings, Optimizer, make_optimizer
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.step import make_train_step

B, T, PROMPT, V = 8, 20, 3, 40


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Everything that a training step needs, on one mesh."""

    config: ModelConfig
    mesh: jax.sharding.Mesh
    optimizer: Optimizer
    param_dtype: str = ""

    @property
    def dtype(self):
        """Returns the dtype of parameters and computation: float32, or float64 with the plugin
        tests/trainer/in_float64.py."""
        return np.dtype(np.float32).name

    def params(self):
        """Draws random parameters; adapters are random too, so that they have an effect."""
        abstract = parameters.abstract_params(self.config, self.mesh, jnp.dtype(self.param_dtype or self.dtype))
        return jax.tree.map(
            lambda x, leaf: jax.device_put(x.astype(leaf.dtype), leaf.sharding), _host_params(self.config), abstract
        )

    def state(self):
        return state_lib.init_state(self.params(), self.config, self.optimizer, self.mesh)

    def samples(self, seed=0, lengths=None):
        """Draws (lengths, arrays in the sample layout) of B sequences with prompts of PROMPT tokens."""
        rng = np.random.default_rng(seed)
        length_B = np.asarray(lengths) if lengths is not None else rng.integers(PROMPT + 1, T + 1, B)
        place_T = np.arange(T)
        return length_B, {
            "tokens_BT": rng.integers(0, V, (B, T)),
            "mask_BT": (place_T >= PROMPT) & (place_T < length_B[:, None]),
            "advantage_BT": np.repeat(rng.normal(size=(B, 1)), T, axis=1).astype(np.float32),
            "old_logprob_BT": -rng.uniform(2, 5, (B, T)).astype(np.float32),
            "ref_logprob_BT": -rng.uniform(2, 5, (B, T)).astype(np.float32),
            "sampler_logprob_BT": -rng.uniform(2, 5, (B, T)).astype(np.float32),
        }

    def batch(self, kind=ReferencedRows, *, row=40, rows=4, seed=0, lengths=None, **changed):
        length_B, samples = self.samples(seed, lengths)
        shards = batch_shards(self.mesh)
        shape = PackShape.for_worst_case(B, T, max_tokens_per_row=row, rows_per_micro_batch=rows, shards=shards)
        packed = packed_rows(kind, packing.place(length_B, shape), **(samples | changed))
        return state_lib.put_batch(packed, self.mesh)

    def step(self, loss, **kwargs):
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype or self.dtype}
        return make_train_step(self.config, loss, self.optimizer, self.mesh, **(dtypes | kwargs))


@functools.cache
def _host_params(config):
    params = jax.tree.map(np.array, jax.jit(lambda key: parameters.init_params(config, key))(jax.random.key(0)))
    for name, x in params["layers"].items():
        if name.endswith("_lora_b"):
            x += 0.02
    return params


@pytest.fixture
def tiny(quick_compilation):
    """Returns a maker of cases: tiny(spec='fsdp=1', lora=0, **optimizer fields) -> Tiny."""

    def build(spec="fsdp=1", *, lora=0, **optimizer):
        config = gemma2_config(
            vocab_size=V, num_layers=2, model_dim=16, ffn_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, window=6
        )
        if lora:
            config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=lora))
        sizes = [int(part.split("=")[1]) for part in spec.split(",")]
        mesh = make_mesh(spec, jax.devices()[: int(np.prod(sizes))])
        # Plain gradient descent by default, so that a parameter's change is the gradient itself.
        chosen = (
            make_optimizer(AdamSettings(**({"max_grad_norm": 0.0} | optimizer)))
            if optimizer
            else Optimizer(optax.sgd(1.0))
        )
        return Tiny(config, mesh, chosen)

    return build
