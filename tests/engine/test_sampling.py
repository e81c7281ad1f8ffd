import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.engine.config import Sampling, preset
from podrl.engine.keys import sample_keys, threefry
from podrl.engine.sampling import LaneSampling, draw

R = 2048
_draw = jax.jit(draw)


def lanes(count: int, sampling: Sampling, seed: int = 0) -> LaneSampling:
    def fill(value, dtype):
        return jnp.full(count, value, dtype)

    return LaneSampling(
        temperature_R=fill(sampling.temperature, jnp.float32),
        top_p_R=fill(sampling.top_p, jnp.float32),
        min_p_R=fill(sampling.min_p, jnp.float32),
        top_k_R=fill(sampling.top_k or 0, jnp.int32),
        key_R2=jnp.asarray(sample_keys(seed, 0, np.zeros(count, int), np.arange(count))),
    )


def distribution(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Computes the distribution that `Sampling` describes by sorting the tokens, in float64."""
    if sampling.temperature == 0:
        return np.eye(len(logits_V))[np.argmax(logits_V)]
    logits_V = logits_V.astype(np.float64) / sampling.temperature
    order = np.argsort(-logits_V, kind="stable")
    weight = np.exp(logits_V[order] - logits_V[order[0]])
    if sampling.top_k:
        weight[sampling.top_k :] = 0
    weight /= weight.sum()
    kept = np.cumsum(weight) - weight < sampling.top_p  # a token stays while the tokens before it weigh less than top_p
    weight = np.where(kept & (weight >= sampling.min_p * weight[0]), weight, 0)
    result = np.zeros_like(weight)
    result[order] = weight / weight.sum()
    return result


def test_threefry_known_answers():
    # Random123's kat_vectors, threefry2x32, 20 rounds.
    zero, ones = np.uint32(0), np.uint32(0xFFFFFFFF)
    with np.errstate(over="ignore"):
        assert [hex(x) for x in threefry(zero, zero, zero, zero)] == ["0x6b200159", "0x99ba4efe"]
        assert [hex(x) for x in threefry(ones, ones, ones, ones)] == ["0x1cb996fc", "0xbb002be7"]


def test_keys_differ_in_every_argument():
    base = (1, 2, np.array([3]), np.array([4]))
    keys = [sample_keys(*base)]
    for i in range(4):
        changed = list(base)
        changed[i] = changed[i] + 1
        keys.append(sample_keys(*changed))
    keys.append(sample_keys(1, 2, np.array([3 + (1 << 40)]), np.array([4])))
    assert len({tuple(key[0]) for key in keys}) == 6


CASES = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(top_k=3),
    Sampling(top_p=0.8),
    Sampling(min_p=0.2, temperature=1.3),
    Sampling(top_k=40, top_p=0.7, min_p=0.05, temperature=1.5),
]


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_samples_follow_the_distribution(sampling):
    """Checks chi-square at fixed seeds: the statistic stays under its mean plus 4.5 standard deviations."""
    logits_V = np.random.default_rng(5).normal(size=600).astype(np.float32) * 3
    expected_V = distribution(logits_V, sampling)
    whole_V = distribution(logits_V, Sampling(temperature=sampling.temperature))
    logits_RV = jnp.broadcast_to(jnp.asarray(logits_V), (R, 600))
    setting, live_R = lanes(R, sampling), jnp.ones(R, bool)
    count_V = np.zeros(600)
    for position in range(12):
        drawn = _draw(logits_RV, setting, jnp.full(R, position, jnp.int32), live_R)
        token_R = np.asarray(drawn.token_R)
        count_V += np.bincount(token_R, minlength=600)
        np.testing.assert_allclose(drawn.logprob_R - np.log(drawn.kept_R), np.log(expected_V[token_R]), atol=2e-5)
        np.testing.assert_allclose(drawn.logprob_R, np.log(whole_V[token_R]), atol=2e-5)
        np.testing.assert_allclose(drawn.kept_R, whole_V[expected_V > 0].sum(), rtol=1e-5)
        raw_V = logits_V - np.log(np.exp(logits_V.astype(np.float64)).sum())
        np.testing.assert_allclose(drawn.raw_logprob_R, raw_V[token_R], atol=2e-5)
        assert not drawn.failed_R.any()
    assert count_V[expected_V == 0].sum() == 0
    expected_V = expected_V * count_V.sum()
    big = expected_V > 8
    cells = np.append(count_V[big], count_V[~big].sum()), np.append(expected_V[big], expected_V[~big].sum())
    observed, mean = cells[0][cells[1] > 0], cells[1][cells[1] > 0]
    statistic, freedom = ((observed - mean) ** 2 / mean).sum(), len(mean) - 1
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 5, (statistic, freedom)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.5, 4.0, 60.0]),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 50, 100_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-4]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_logprob_and_kept_mass_are_those_of_the_distribution(seed, scale, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # The logits are shuffled multiples of scale / 64: no two are equal, and rounding never moves the edge of a filter.
    rng = np.random.default_rng(seed)
    steps_V = rng.permutation(300) if scale else np.zeros(300)
    logits_V = (steps_V * max(scale, 0.01) / 64).astype(np.float32)
    logits_RV = jnp.broadcast_to(jnp.asarray(logits_V), (8, 300))
    drawn = _draw(logits_RV, lanes(8, sampling, seed), jnp.arange(8), jnp.ones(8, bool))
    token_R, logprob_R = np.asarray(drawn.token_R), np.asarray(drawn.logprob_R)
    if not sampling.filtered or temperature == 0:
        assert (drawn.kept_R == 1).all()
    whole_V = distribution(logits_V, Sampling(temperature=temperature))
    if scale:
        np.testing.assert_allclose(logprob_R, np.log(whole_V[token_R]), atol=1e-4)
    if scale == 0:  # all tokens tie, so every filter keeps all of them
        wanted_R = np.zeros(8) if temperature == 0 else np.full(8, -np.log(300))
        np.testing.assert_allclose(logprob_R, wanted_R, atol=1e-5)
        return
    expected_V = distribution(logits_V, sampling)
    edge = np.abs(
        np.cumsum(np.sort(distribution(logits_V, Sampling(temperature=temperature or 1.0, top_k=top_k)))[::-1]) - top_p
    )
    if edge.min() > 1e-5:
        given_R = np.exp(logprob_R.astype(np.float64)) / drawn.kept_R
        np.testing.assert_allclose(np.log(given_R), np.log(expected_V[token_R]), atol=1e-4)


def test_top_1_and_a_tiny_nucleus_are_greedy():
    logits_RV = jnp.asarray(np.random.default_rng(0).normal(size=(64, 1000)), jnp.float32)
    best_R = np.argmax(logits_RV, axis=-1)
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0), preset("greedy")):
        drawn = _draw(logits_RV, lanes(64, sampling), jnp.zeros(64, jnp.int32), jnp.ones(64, bool))
        np.testing.assert_array_equal(drawn.token_R, best_R)
        np.testing.assert_allclose(drawn.logprob_R - np.log(drawn.kept_R), 0.0, atol=2e-6)


@pytest.mark.parametrize("sampling", [*CASES, preset("greedy")], ids=str)
def test_a_lane_does_not_depend_on_the_filters_of_its_neighbours(sampling):
    logits_RV = jnp.asarray(np.random.default_rng(1).normal(size=(8, 300)) * 3, jnp.float32)
    alone, other = lanes(8, sampling, 1), lanes(8, Sampling(top_k=7, temperature=0.5), 2)
    even_R = jnp.arange(8) % 2 == 0
    pick = lambda x, y: jnp.where(even_R.reshape(-1, *[1] * (x.ndim - 1)), x, y)  # noqa: E731
    where = (jnp.zeros(8, jnp.int32), jnp.ones(8, bool))
    mixed, pure = _draw(logits_RV, jax.tree.map(pick, alone, other), *where), _draw(logits_RV, alone, *where)
    for a, b in zip(jax.tree.leaves(mixed), jax.tree.leaves(pure), strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])


@pytest.mark.parametrize("sampling", [*CASES, preset("greedy")], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
def test_no_distribution_is_a_failure_of_that_lane_alone(sampling, value, where):
    """No token outside the vocabulary is drawn, although the sampler searches in blocks that do not divide the
    vocabulary."""
    logits_RV = np.random.default_rng(2).normal(size=(4, 300)).astype(np.float32)
    good = _draw(jnp.asarray(logits_RV), lanes(4, sampling), jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
    logits_RV[1, {"first": 0, "middle": 260, "last": 299, "all": slice(None)}[where]] = value
    drawn = _draw(jnp.asarray(logits_RV), lanes(4, sampling), jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
    fails = not np.isneginf(value) or where == "all"  # ruling out one token still leaves a distribution
    np.testing.assert_array_equal(drawn.failed_R, [False, fails, False, False])
    assert ((drawn.token_R >= 0) & (drawn.token_R < 300)).all()
    for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(good), strict=True):
        np.testing.assert_array_equal(np.delete(a, 1), np.delete(b, 1))


def test_presets_and_bad_values():
    assert preset("standard", max_new=9) == Sampling(temperature=0.7, top_k=50, top_p=0.95, max_new=9)
    assert preset("liberal").top_k == 2000
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 1.5}, {"stop_strings": ("",)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)
    with pytest.raises(ValueError, match="greedy, standard, liberal"):
        preset("greedyy")  # pyright: ignore[reportArgumentType]
