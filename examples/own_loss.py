"""A loss of your own: podrl checks its properties and trains with it; a configuration key sets its parameter.

    python examples/own_loss.py

Two minutes on a laptop. The function is the policy loss of a token; KL, entropy and the mean over tokens are added as
to any other policy loss.
"""

import jax.numpy as jnp

import podrl
from podrl import testing


def tanh_clip(logprob_BT, old_logprob_BT, advantage_BT, *, scale=0.5):
    """Bounds the ratio smoothly: close to 1 it hardly changes, and it always stays between 1 - scale and 1 + scale."""
    ratio_BT = jnp.exp(jnp.clip(logprob_BT - old_logprob_BT, -20, 20))
    return -scale * jnp.tanh((ratio_BT - 1) / scale) * advantage_BT


def main(workdir="runs/own_loss", **settings):
    # Checks that the loss is finite, ignores masked tokens and has the right sign. An error ends the script here.
    testing.check_policy_loss(tanh_clip, scale=0.7)
    wanted = {"grpo.policy_loss_args": {"scale": 0.7}, "grpo.num_iterations": 2, "trainer.max_steps": 40}
    return podrl.run("grpo_gemma.py", wanted | settings, workdir=workdir, loss=tanh_clip)


if __name__ == "__main__":
    raise SystemExit(main())
