"""One tiny model and few engines, shared by the tests of this folder: compiling is what costs time here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh.build import make_mesh
from podrl.models import decoder
from podrl.models.config import LoraConfig, gemma2_config
from podrl.rollout.config import RolloutConfig
from podrl.rollout.rollout import RolloutWorker
from podrl.types import Policy, Prompts

EOS = (1, 2, 3, 4, 5)
MODEL = dataclasses.replace(
    gemma2_config(
        vocab_size=300, num_layers=2, model_dim=32, ffn_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, window=6
    ),
    lora=LoraConfig(rank=2, alpha=4.0, pattern="q|v|down"),
)
# A pool so small that four lanes with long samples must spill, prompts that need two chunks, groups over two visits.
TIGHT = RolloutConfig(
    max_tokens_to_generate=12,
    temperature=1.0,
    max_prompt_length=20,
    kv_cache_size=64,
    lanes=8,
    steps_per_dispatch=4,
    segment_tokens=8,
    pool_tokens=12 * 8,
    prefill_tokens=16,
    members_per_visit=2,
)


def letters(tokens: list[int]) -> str:
    """Two letters per token, so that a stop string may sit inside a token or across two."""
    return "".join("abc"[t % 3] + "abc"[t // 3 % 3] for t in tokens)


class Tiny:
    """The tiny model's weights on a mesh, prompts for it, and its full forward pass."""

    def __init__(self, mesh_spec: str, devices: int):
        self.mesh = make_mesh(mesh_spec, jax.devices()[:devices])
        self.shardings = jax.tree.map(
            lambda x: x.sharding, decoder.abstract_params(MODEL, self.mesh, jnp.dtype("float32"))
        )
        self._init = jax.jit(self._random, out_shardings=self.shardings)
        self._forward = jax.jit(self._logprobs)
        self.params = self.make_params(0)

    def make_params(self, seed: int):
        return self._init(jax.random.key(seed))

    @staticmethod
    def _random(key):
        """Initial weights, but with adapters that do something."""

        def grow(path, x):
            return x + 0.3 * jax.random.normal(key, x.shape) if "lora_b" in str(path[-1]) else x

        return jax.tree_util.tree_map_with_path(grow, decoder.init_params(MODEL, key))

    def worker(self, config: RolloutConfig, **kwargs) -> RolloutWorker:
        worker = RolloutWorker(
            MODEL, self.mesh, config, **{"pad_id": 0, "eos_ids": EOS, "decode": letters, "seed": 3, **kwargs}
        )
        worker.warm_up(self.params)
        return worker

    def _logprobs(self, params, tokens_BT, length_B):
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        segment_BT = (position_BT < length_B[:, None]).astype(jnp.int32)
        hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, position_BT, MODEL)
        return jax.nn.log_softmax(decoder.unembed(params, hidden_BTD, MODEL))

    def logprobs(self, tokens_BT: np.ndarray, length_B: np.ndarray, params=None) -> np.ndarray:
        """log p(. | tokens < t) at index t, float64 (B, T, V), from the full forward pass in fixed shapes."""
        params = self.params if params is None else params
        B, T = tokens_BT.shape
        out = np.zeros((B, T, MODEL.vocab_size))
        for b in range(0, B, 8):
            rows = np.zeros((8, 64), np.int32)
            lengths = np.zeros(8, np.int32)
            n = min(8, B - b)
            rows[:n, :T], lengths[:n] = tokens_BT[b : b + n, :64], length_B[b : b + n]
            out[b : b + n, 1:] = np.asarray(self._forward(params, rows, lengths))[:n, : T - 1]
        return out


def make_prompts(lengths, seed: int = 0, index=None) -> Prompts:
    """Random prompts of the given lengths; a prompt's tokens depend on its index only."""
    index = np.arange(len(lengths)) if index is None else np.asarray(index)
    tokens_PT = np.zeros((len(lengths), max(lengths)), np.int32)
    for p, (length, i) in enumerate(zip(lengths, index, strict=True)):
        tokens_PT[p, :length] = np.random.default_rng([seed, int(i)]).integers(6, 300, length)
    texts = [letters(list(row[:n])) for row, n in zip(tokens_PT, lengths, strict=True)]
    return Prompts(tokens_PT, np.asarray(lengths), index, texts, {}, b"")


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny("data=2", 2)


@pytest.fixture(scope="session")
def tight(tiny) -> RolloutWorker:
    return tiny.worker(TIGHT)


@pytest.fixture(scope="session")
def policy(tiny) -> Policy:
    return Policy(tiny.params, 7)


@pytest.fixture(scope="session")
def prompts_of():
    return make_prompts


@pytest.fixture(scope="session")
def tight_config() -> RolloutConfig:
    return TIGHT


@pytest.fixture(scope="session")
def tiny_on():
    return Tiny
