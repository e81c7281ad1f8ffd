"""Values as plain unsigned words while they travel: no program on the way interprets, widens or rounds them.

XLA for CPU widens bfloat16 to float32 around a collective; words of 16 bits it leaves alone. Leaves of different
dtypes but equal width can share a buffer.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint32)}
# Values narrower than a byte travel as a byte each.
_NARROW = ("bool", "int4", "uint4", "int2", "uint2")


def word(dtype: np.dtype) -> np.dtype:
    """The word a dtype travels in."""
    return _WORDS[np.dtype(dtype).itemsize]


def words(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """How many words an array of this shape is."""
    return math.prod(shape) * (2 if np.dtype(dtype).itemsize == 8 else 1)


def to_words(x: Array) -> Shaped[Array, " n"]:
    """A flat array of words."""
    if x.dtype.name in _NARROW:
        return x.astype(jnp.int8 if x.dtype.name.startswith("int") else jnp.uint8).view(jnp.uint8).reshape(-1)
    return jax.lax.bitcast_convert_type(x, word(x.dtype)).reshape(-1)


def from_words(x: Shaped[Array, " n"], shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """The inverse of `to_words`."""
    name = np.dtype(dtype).name
    if name in _NARROW:
        return x.view(jnp.int8 if name.startswith("int") else jnp.uint8).reshape(shape).astype(dtype)
    if np.dtype(dtype).itemsize == 8:
        shape = (*shape, 2)
    return jax.lax.bitcast_convert_type(x.reshape(shape), dtype)
