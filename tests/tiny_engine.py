"""A tiny model and settings of its engine, shared by the tests of podrl/engine and podrl/rollout, which then compile
less."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.engine.config import RolloutConfig, Sampling
from podrl.mesh.build import make_mesh
from podrl.models import decoder, parameters
from podrl.models.config import LoraConfig, ModelConfig, gemma2_config
from podrl.rollout.worker import RolloutWorker
from podrl.types import STOP_EOS, STOP_LENGTH, Policy, Prompts

EOS = (1, 2, 3, 4, 5)
MODEL = dataclasses.replace(
    gemma2_config(
        vocab_size=300, num_layers=2, model_dim=32, ffn_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, window=6
    ),
    lora=LoraConfig(rank=2, alpha=4.0, pattern="q|v|down"),
)
# The pool is so small that four lanes with long samples must spill. A prompt is prefilled in two chunks, and the lanes
# of a group need two read lists.
TIGHT = RolloutConfig(
    max_tokens_to_generate=12,
    temperature=1.0,
    max_prompt_length=20,
    kv_cache_size=64,
    lanes=8,
    steps_per_dispatch=4,
    page_tokens=8,
    pool_tokens=12 * 8,
    prefill_tokens=16,
    members_per_read=2,
)


def letters(tokens: list[int]) -> str:
    """Maps each token to two letters, so that a stop string may begin inside a token or span two."""
    return "".join("abc"[t % 3] + "abc"[t // 3 % 3] for t in tokens)


class Tiny:
    """The tiny model's weights on a mesh, prompts for it, and its full forward pass."""

    def __init__(self, mesh_spec: str, devices: int, model: ModelConfig = MODEL, dtype: str = "float32"):
        self.mesh, self.model, self.dtype = make_mesh(mesh_spec, jax.devices()[:devices]), model, jnp.dtype(dtype)
        self.shardings = jax.tree.map(
            lambda x: x.sharding, parameters.abstract_params(model, self.mesh, jnp.dtype(dtype))
        )
        self._init = jax.jit(self._random, out_shardings=self.shardings)
        self._forward = jax.jit(self._logprobs)
        self.params = self.make_params(0)

    def make_params(self, seed: int):
        return self._init(jax.random.key(seed))

    def _random(self, key):
        """Makes initial weights whose LoRA adapters change the output: their B matrices are not 0."""

        def grow(path, x):
            return x + 0.3 * jax.random.normal(key, x.shape, x.dtype) if "lora_b" in str(path[-1]) else x

        return jax.tree_util.tree_map_with_path(grow, parameters.init_params(self.model, key, self.dtype))

    def worker(self, config: RolloutConfig, *, warm: bool = True, **kwargs) -> RolloutWorker:
        """Makes a RolloutWorker; `warm=False` skips the warm-up, so only the programs that a test runs are compiled."""
        worker = RolloutWorker(
            self.model, self.mesh, config, **{"pad_id": 0, "eos_ids": EOS, "decode": letters, "seed": 3, **kwargs}
        )
        if warm:
            worker.warm_up(self.params)
        return worker

    def _logprobs(self, params, tokens_BT, length_B):
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        segment_BT = (position_BT < length_B[:, None]).astype(jnp.int32)
        hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, position_BT, self.model)
        return jax.nn.log_softmax(decoder.unembed(params, hidden_BTD, self.model))

    def logprobs(self, tokens_BT: np.ndarray, length_B: np.ndarray, params=None) -> np.ndarray:
        """Computes log p(. | tokens < t) at index t, float64 (B, T, V), from the full forward pass in fixed shapes."""
        params = self.params if params is None else params
        B, T = tokens_BT.shape
        out = np.zeros((B, T, self.model.vocab_size))
        for b in range(0, B, 8):
            rows = np.zeros((8, 64), np.int32)
            lengths = np.zeros(8, np.int32)
            n = min(8, B - b)
            rows[:n, :T], lengths[:n] = tokens_BT[b : b + n, :64], length_B[b : b + n]
            out[b : b + n, 1:] = np.asarray(self._forward(params, rows, lengths))[:n, : T - 1]
        return out

    def rounding(self, tokens_BT: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        """Computes how much log p(token t | tokens < t), (B, T), may change if each weight changes by its last bit.

        Deep models with random weights amplify rounding, at some tokens a hundredfold; which tokens these are depends
        on the machine.
        """

        def rounded(x: jax.Array, rng: np.random.Generator) -> jax.Array:
            return x * (1 + rng.choice(np.float32([-6e-8, 6e-8]), x.shape)).astype(x.dtype)

        exact_BT, found = self.chosen(tokens_BT, length_B), []
        for seed in range(4):
            rng = np.random.default_rng(seed)
            other = jax.tree.map(functools.partial(rounded, rng=rng), self.params)
            found.append(np.abs(self.chosen(tokens_BT, length_B, other) - exact_BT))
        return np.max(found, axis=0)

    def chosen(self, tokens_BT: np.ndarray, length_B: np.ndarray, params=None) -> np.ndarray:
        """Computes log p(token t | tokens < t), float64 (B, T), from the full forward pass."""
        logprob_BTV = self.logprobs(tokens_BT, length_B, params)
        return np.take_along_axis(logprob_BTV, tokens_BT[..., None], axis=2)[..., 0]


def make_prompts(lengths, seed: int = 0, index=None) -> Prompts:
    """Makes random prompts of the given lengths; a prompt's tokens depend on its index only."""
    index = np.arange(len(lengths)) if index is None else np.asarray(index)
    tokens_PT = np.zeros((len(lengths), max(lengths)), np.int32)
    for p, (length, i) in enumerate(zip(lengths, index, strict=True)):
        tokens_PT[p, :length] = np.random.default_rng([seed, int(i)]).integers(6, 300, length)
    texts = [letters(list(row[:n])) for row, n in zip(tokens_PT, lengths, strict=True)]
    return Prompts(tokens_PT, np.asarray(lengths), index, texts, {}, b"")


def check_samples(tiny, rollouts, sampling: Sampling, *, eos=EOS, atol: float = 1e-4) -> None:
    """Compares every sampled token with the full forward pass, and checks that the arrays of `rollouts` agree with each
    other.

    A log-probability may differ by `atol`; where it differs more, the bound is `atol` plus four times
    `tiny.rounding()`.
    """
    reference_BTV = tiny.logprobs(rollouts.tokens_BT, rollouts.length_B)
    B, T = rollouts.tokens_BT.shape
    chosen_BT = np.take_along_axis(reference_BTV, rollouts.tokens_BT[..., None], axis=2)[..., 0]
    sampled = rollouts.mask_BT > 0
    allowed_BT = np.full((B, T), atol)
    if (np.abs(rollouts.raw_logprob_BT - chosen_BT)[sampled] > atol).any():
        allowed_BT += 4 * tiny.rounding(rollouts.tokens_BT, rollouts.length_B)

    def check_close(found_BT: np.ndarray, expected_BT: np.ndarray) -> None:
        error = np.abs(found_BT - expected_BT)[sampled]
        assert (error <= allowed_BT[sampled]).all(), (error, allowed_BT[sampled])

    check_close(rollouts.raw_logprob_BT, chosen_BT)
    assert (rollouts.kept_BT[~sampled] == 1).all() and (rollouts.kept_BT > 0).all()
    assert sampling.filtered or (rollouts.kept_BT == 1).all()
    if sampling.temperature > 0:
        scaled_BTV = reference_BTV / sampling.temperature
        scaled_BTV = scaled_BTV - np.log(np.exp(scaled_BTV).sum(axis=-1, keepdims=True))
        chosen_BT = np.take_along_axis(scaled_BTV, rollouts.tokens_BT[..., None], axis=2)[..., 0]
        check_close(rollouts.logprob_BT, chosen_BT)
    if sampling.temperature == 0:
        best_BT = reference_BTV.max(axis=-1)
        check_close(rollouts.raw_logprob_BT, best_BT)
        assert not rollouts.logprob_BT.any()
    prompt_B = np.repeat(rollouts.prompts.length_P, B // len(rollouts.prompts.length_P))
    place_T = np.arange(T)
    np.testing.assert_array_equal(sampled, (place_T >= prompt_B[:, None]) & (place_T < rollouts.length_B[:, None]))
    np.testing.assert_array_equal(rollouts.version_BT >= 0, sampled)
    for b in range(B):
        new = rollouts.tokens_BT[b, prompt_B[b] : rollouts.length_B[b]]
        ends = np.isin(new, [*eos, *sampling.stop_ids])
        assert not ends[:-1].any()
        if rollouts.stop_B[b] == STOP_EOS:
            assert ends[-1]
        elif rollouts.stop_B[b] == STOP_LENGTH:
            assert len(new) == sampling.max_new
        assert not rollouts.tokens_BT[b, rollouts.length_B[b] :].any()


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


@pytest.fixture(scope="session")
def check():
    return check_samples
