"""Chunked log-probabilities equal the naive [B, T, V] form in values and gradients on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.mesh.build import make_mesh
from podrl.models import decoder
from podrl.models.config import gemma2_config
from podrl.trainer.logprob import token_logprobs

B, T, D, V = 4, 12, 16, 50


def _config(tied=True, softcap=4.0, vocab=V):
    config = gemma2_config(
        vocab_size=vocab, num_layers=1, model_dim=D, ffn_dim=8, num_heads=2, num_kv_heads=1, head_dim=8
    )
    return dataclasses.replace(config, tie_embeddings=tied, logit_softcap=softcap)


def _inputs(config, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    name, shape = ("embed", (config.vocab_size, D)) if config.tie_embeddings else ("unembed", (D, config.vocab_size))
    params = {name: jax.random.normal(keys[0], shape)}
    hidden_BTD = jax.random.normal(keys[1], (B, T, D))
    tokens_BT = jax.random.randint(keys[2], (B, T), 0, config.vocab_size)
    segment_BT = jnp.asarray(np.where(np.arange(T) < 5, 1, np.where(np.arange(T) < 10, 2, 0)) * np.ones((B, 1), int))
    weight_2BT = jax.random.normal(keys[3], (2, B, T))
    return params, hidden_BTD, tokens_BT, segment_BT, weight_2BT


def _naive(params, hidden_BTD, tokens_BT, segment_BT, config, temperature):
    logits_BTV = decoder.unembed(params, hidden_BTD, config) / temperature
    logp_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    picked_BT = jnp.take_along_axis(logp_BTV[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]
    first = jnp.zeros((B, 1))
    keep_BT = jnp.concatenate([first, (segment_BT[:, 1:] == segment_BT[:, :-1]) & (segment_BT[:, 1:] > 0)], axis=1)
    return (
        jnp.concatenate([first, picked_BT], axis=1) * keep_BT,
        jnp.concatenate([first, entropy_BT[:, :-1]], axis=1) * keep_BT,
    )


def _value_and_grad(run, inputs):
    params, hidden_BTD, tokens_BT, segment_BT, weight_2BT = inputs

    def total(params, hidden_BTD):
        results = run(params, hidden_BTD, tokens_BT, segment_BT)
        return sum(jnp.sum(x * w) for x, w in zip(results, weight_2BT, strict=True)), results

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, hidden_BTD)


def _compare(config, temperature, mesh=None, chunk_elements=1 << 26):
    inputs = _inputs(config)
    got = _value_and_grad(
        lambda *a: token_logprobs(*a, config, temperature=temperature, mesh=mesh, chunk_elements=chunk_elements),
        inputs,
    )
    expected = _value_and_grad(lambda *a: _naive(*a, config, temperature), inputs)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(y).max()) > 0.1
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("softcap", "temperature"), [(4.0, 0.7), (0.0, 1.0), (0.0, 1.5), (4.0, 1.0)])
def test_equals_the_naive_form(tied, softcap, temperature):
    _compare(_config(tied, softcap), temperature)


@pytest.mark.parametrize("vocab", [300, 384])
def test_vocabulary_chunks_that_overlap_count_once(vocab):
    """A chunk has at most 128 ids here: 300 ids make three chunks of 100, 384 make three of 128, and 257 make three of
    86, of which two overlap."""
    _compare(_config(vocab=vocab), 0.9, chunk_elements=1)
    _compare(_config(vocab=257, tied=False), 0.9, chunk_elements=1)


@pytest.mark.parametrize(
    ("spec", "count"), [("fsdp=4", 4), ("data=2,fsdp=2,tensor=2", 8), ("data=2,tensor=2", 4), ("fsdp=2,seq=4", 8)]
)
def test_mesh_does_not_change_the_result(spec, count):
    mesh = make_mesh(spec, jax.devices()[:count])
    _compare(_config(), 0.7, mesh=mesh)
    _compare(_config(vocab=514, tied=False), 0.7, mesh=mesh, chunk_elements=1)


def test_vocabulary_that_does_not_split_stays_whole():
    _compare(_config(vocab=51), 0.7, mesh=make_mesh("data=2,tensor=2", jax.devices()[:4]))


def test_large_logits_stay_finite():
    config = _config(softcap=0.0)
    params, hidden_BTD, tokens_BT, segment_BT, _ = _inputs(config)
    run = jax.grad(lambda h: token_logprobs(params, h, tokens_BT, segment_BT, config)[0].sum())
    assert np.isfinite(run(hidden_BTD * 1e4)).all()


def test_errors_name_values_and_keys():
    config = _config()
    params, hidden_BTD, tokens_BT, segment_BT, _ = _inputs(config)
    with pytest.raises(ValueError, match=r"temperature=0.*rollout.temperature"):
        token_logprobs(params, hidden_BTD, tokens_BT, segment_BT, config, temperature=0.0)
    mesh = make_mesh("data=8", jax.devices()[:8])
    with pytest.raises(ValueError, match=r"4 packed rows do not split over 8 data shards"):
        token_logprobs(params, hidden_BTD, tokens_BT, segment_BT, config, mesh=mesh)
