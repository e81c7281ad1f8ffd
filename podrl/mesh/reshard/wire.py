"""Values as plain unsigned words while they travel: no program on the way interprets, widens or rounds them.

XLA for CPU widens bfloat16 to float32 around a collective; words of 16 bits it leaves alone. Leaves of different
dtypes but equal width can share a buffer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint32)}
# Values narrower than a byte travel as a byte each.
_NARROW = ("bool", "int4", "uint4", "int2", "uint2")


def word(dtype: np.dtype) -> np.dtype:
    """The word a dtype travels in."""
    return _WORDS[np.dtype(dtype).itemsize]


def word_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Shape of an array of this dtype as words."""
    return (*shape, 2) if np.dtype(dtype).itemsize == 8 else shape


def to_words(x: Array) -> Array:
    """The same bits as words."""
    if x.dtype.name in _NARROW:
        return x.astype(jnp.int8 if x.dtype.name.startswith("int") else jnp.uint8).view(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, word(x.dtype))


def from_words(x: Array, dtype: np.dtype) -> Array:
    """The inverse of `to_words`."""
    name = np.dtype(dtype).name
    if name in _NARROW:
        return x.view(jnp.int8 if name.startswith("int") else jnp.uint8).astype(dtype)
    return jax.lax.bitcast_convert_type(x, dtype)
