"""A pytest plugin that replaces podrl's float32 by float64 in this process, so that the trainer computes in float64.

podrl names float32 wherever precision matters (accumulators, softmax, logits), so a program in float64 differs from
the real program only in its dtype. If two forms of it differ by more than 1e-12, the cause is not rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jnp.float32, np.float32 = jnp.float64, np.float64
