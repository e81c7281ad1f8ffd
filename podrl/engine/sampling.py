"""Draws one token per lane from logits, with traced settings, and returns the token's probability."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from podrl.engine.keys import threefry

_BLOCK = 256  # tokens per block of the two-level search
_OFF = -jnp.inf


@flax.struct.dataclass
class LaneSampling:
    """Sampling settings of R lanes, see `podrl.engine.config.SamplingSettings`; a top_k of 0 is off.

    Attributes:
      temperature_R, top_p_R, min_p_R, top_k_R: the settings.
      key_R2: random key of the lane's sample.
    """

    temperature_R: Float[Array, " R"]
    top_p_R: Float[Array, " R"]
    min_p_R: Float[Array, " R"]
    top_k_R: Int[Array, " R"]
    key_R2: UInt[Array, "R 2"]


@flax.struct.dataclass
class Draw:
    """One token per lane, with its probabilities.

    Attributes:
      token_R: id of the token; always in the vocabulary.
      logprob_R: log-probability of the token at the lane's temperature, over the whole vocabulary, nats; 0 in greedy
        lanes, which draw from a point mass.
      kept_R: probability, at the lane's temperature, of all tokens that the lane's filters kept; exactly 1 without
        filters. The token was drawn with log-probability logprob_R - log(kept_R).
      raw_logprob_R: log-probability of the token under softmax of the logits, nats.
      failed_R: True if there is no distribution, because a logit was NaN or +infinity or all were -infinity, or if no
        logit of a greedy lane equals their maximum (the comment in `draw` says why); the other fields are then invalid.
    """

    token_R: Int[Array, " R"]
    logprob_R: Float[Array, " R"]
    kept_R: Float[Array, " R"]
    raw_logprob_R: Float[Array, " R"]
    failed_R: Bool[Array, " R"]


def draw(
    logits_RV: Float[Array, "R V"], settings: LaneSampling, position_R: Int[Array, " R"], live_R: Bool[Array, " R"]
) -> Draw:
    """Samples a token for each lane by inverting the cumulative distribution in two levels.

    The vocabulary is cut into blocks of 256. One uniform number picks a block in proportion to its probability, a
    second number picks a token inside the block. So one pass over the vocabulary and one pass over a block replace a
    sort.

    Args:
      logits_RV: logits, float32, soft cap applied.
      settings: sampling settings of each lane.
      position_R: position that the sampled token will have; it decides the random numbers together with the lane's key.
      live_R: True if the lane samples; filters are skipped if no live lane uses one.
    """
    top_R = jnp.max(logits_RV, axis=-1)
    greedy_R = settings.temperature_R <= 0
    scale_R = 1.0 / jnp.where(greedy_R, 1.0, settings.temperature_R)
    scaled_RV = (logits_RV - top_R[:, None]) * scale_R[:, None]  # no value is above 0
    filtered_R = ((settings.top_k_R > 0) | (settings.top_p_R < 1) | (settings.min_p_R > 0)) & ~greedy_R
    floor_R, whole_R = jax.lax.cond(
        jnp.any(filtered_R & live_R),
        lambda: (_floor(scaled_RV, settings), jnp.sum(jnp.exp(scaled_RV), axis=-1)),
        lambda: (jnp.full_like(top_R, _OFF), jnp.ones_like(top_R)),
    )
    weight_RV = jnp.where(scaled_RV >= floor_R[:, None], jnp.exp(scaled_RV), 0.0)
    sampled_R, total_R = _invert(weight_RV, settings.key_R2, position_R)
    raw_total_R = jnp.sum(jnp.exp(logits_RV - top_R[:, None]), axis=-1)
    failed_R = ~(jnp.isfinite(raw_total_R) & (total_R > 0))
    # Index of the first maximum. jnp.argmax gives the same index, but on CPU it compares one number after the other and
    # takes ten times as long.
    V = logits_RV.shape[-1]
    first_R = jnp.min(jnp.where(logits_RV == top_R[:, None], jnp.arange(V, dtype=jnp.int32), V), axis=-1)
    # The compiler may compute the logits twice, with different last bits. If no logit then equals the maximum, a greedy
    # lane fails.
    failed_R |= greedy_R & (first_R == V)
    token_R = jnp.where(greedy_R, first_R, sampled_R)
    token_R = jnp.where(failed_R, 0, token_R)
    chosen_R = jnp.take_along_axis(logits_RV, token_R[:, None], axis=-1)[:, 0] - top_R
    all_R = jnp.where(filtered_R, whole_R, total_R)
    return Draw(
        token_R=token_R,
        logprob_R=jnp.where(greedy_R, 0.0, chosen_R * scale_R - jnp.log(all_R)),
        kept_R=jnp.where(filtered_R, jnp.minimum(total_R / whole_R, 1.0), 1.0),
        raw_logprob_R=chosen_R - jnp.log(raw_total_R),
        failed_R=failed_R,
    )


def uniform(key_R2: UInt[Array, "R 2"], position_R: Int[Array, " R"]) -> tuple[Array, Array]:
    """Draws two independent uniform numbers in [0, 1) for each lane, of 24 random bits each."""
    words = threefry(key_R2[:, 0], key_R2[:, 1], position_R.astype(jnp.uint32), jnp.zeros_like(key_R2[:, 0]))
    first_R, second_R = ((word >> 8).astype(jnp.float32) * (2.0**-24) for word in words)
    return first_R, second_R


def _invert(
    weight_RV: Float[Array, "R V"], key_R2: UInt[Array, "R 2"], position_R: Int[Array, " R"]
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Draws a token with a probability in proportion to its weight; returns (token, sum of the weights)."""
    R, V = weight_RV.shape
    blocks = -(-V // _BLOCK)
    weight_RJI = jnp.pad(weight_RV, ((0, 0), (0, blocks * _BLOCK - V))).reshape(R, blocks, _BLOCK)
    mass_RJ = jnp.sum(weight_RJI, axis=-1)
    first_R, second_R = uniform(key_R2, position_R)
    block_R, total_R = _pick(mass_RJ, first_R)
    inside_RI = jnp.take_along_axis(weight_RJI, block_R[:, None, None], axis=1)[:, 0]
    offset_R, _ = _pick(inside_RI, second_R)
    return block_R * _BLOCK + offset_R, total_R


def _pick(weight_RI: Float[Array, "R I"], uniform_R: Float[Array, " R"]) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Picks an index in proportion to its weight, never an index of weight 0; returns (index, sum of the weights)."""
    upto_RI = jnp.cumsum(weight_RI, axis=-1)
    total_R = upto_RI[:, -1]
    past_RI = upto_RI <= (uniform_R * total_R)[:, None]
    index_R = jnp.sum(past_RI, axis=-1, dtype=jnp.int32)
    # Rounding may make the target equal to the total, which no cumulative sum exceeds. The right index is then the last
    # index with a weight.
    place_RI = jnp.where(weight_RI > 0, jnp.arange(weight_RI.shape[-1], dtype=jnp.int32), 0)
    last_R = jnp.max(place_RI, axis=-1)
    return jnp.minimum(index_R, last_R), total_R


def _floor(scaled_RV: Float[Array, "R V"], settings: LaneSampling) -> Float[Array, " R"]:
    """Returns the smallest scaled logit that each lane may draw after top-k, top-p and min-p."""
    V = scaled_RV.shape[-1]
    top_k_R = jnp.where(settings.top_k_R > 0, jnp.minimum(settings.top_k_R, V), V).astype(jnp.float32)
    key_RV = _ordered(scaled_RV)
    floor_R = _largest_floor(key_RV, jnp.ones_like(scaled_RV), top_k_R)
    weight_RV = jnp.where(key_RV >= floor_R[:, None], jnp.exp(scaled_RV), 0.0)
    wanted_R = settings.top_p_R * jnp.sum(weight_RV, axis=-1)
    nucleus_R = _largest_floor(key_RV, weight_RV, wanted_R)
    floor_R = jnp.maximum(floor_R, jnp.where(settings.top_p_R < 1, nucleus_R, floor_R))
    relative_R = jnp.log(jnp.maximum(settings.min_p_R, 1e-38))
    return jnp.maximum(_value(floor_R), jnp.where(settings.min_p_R > 0, relative_R, _OFF))


def _ordered(x: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Maps floats to uint32 keys of the same order."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _value(key: UInt[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Maps a key of `_ordered` back to its float."""
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32((1 << 31) - 1), ~key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest_floor(
    key_RV: UInt[Array, "R V"], weight_RV: Float[Array, "R V"], wanted_R: Float[Array, " R"]
) -> UInt[Array, " R"]:
    """Finds, bit by bit, the largest key such that the tokens at or above it weigh at least `wanted_R` together.

    The result is at least the key of -3e38, so that no token with the logit -infinity is kept.
    """

    def bit(i: Array, floor_R: Array) -> Array:
        trial_R = floor_R | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight_R = jnp.sum(jnp.where(key_RV >= trial_R[:, None], weight_RV, 0.0), axis=-1)
        return jnp.where(weight_R >= wanted_R, trial_R, floor_R)

    with jax.named_scope("filters"):
        floor_R = jax.lax.fori_loop(0, 32, bit, jnp.zeros(wanted_R.shape, jnp.uint32))
    return jnp.maximum(floor_R, _ordered(jnp.float32(-3e38)))
