"""A pytest plugin that replaces podrl's float32 by float64 in this process, so that the trainer computes in float64.

podrl names float32 wherever precision matters (accumulators, softmax, logits), so a program differs from the real one
only in its dtype, and a difference of more than 1e-12 between two forms of it is not a rounding error.
"""

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jnp.float32, np.float32 = jnp.float64, np.float64
