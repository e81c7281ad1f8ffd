"""For on-policy samples, ratios and corrections between trainer and sampler are 1, whatever filters the sampler has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.corrections import CORRECTIONS, importance_weight
from podrl.algorithms.policy_loss import LossSettings, PolicyLoss, with_old
from podrl.algorithms.policy_rows import PolicyRows
from podrl.engine.config import Sampling, preset
from podrl.trainer.objective import Forward
from podrl.types import Layout

SAMPLINGS = {
    "none": Sampling(max_new=12),
    "temperature": Sampling(temperature=0.7, max_new=12),
    "top_k": Sampling(top_k=50, max_new=12),
    "top_p": Sampling(top_p=0.8, max_new=12),
    "min_p": Sampling(min_p=0.3, temperature=1.3, max_new=12),
    "standard": preset("standard", max_new=12),
    "all": Sampling(temperature=1.2, top_k=40, top_p=0.7, min_p=0.2, max_new=12),
}
SOURCES = ("current", "trainer", "sampler")


@pytest.fixture(scope="module", params=SAMPLINGS)
def scored(request, tiny, tight, policy, prompts_of):
    """Scores samples with the trainer's forward pass: (samples, the trainer's log-probabilities, layout of the
    rows)."""
    sampling = SAMPLINGS[request.param]
    rollouts = tight.generate(policy, prompts_of([5, 20, 9, 1]), group_size=4, step=3, sampling=sampling)
    if sampling.filtered:
        kept = rollouts.kept_BT[rollouts.mask_BT > 0]
        assert kept.min() > 0 and kept.mean() < 0.9, (
            "the filters must leave out some of the probability, or the test shows nothing"
        )
    position_BT = np.tile(np.arange(rollouts.tokens_BT.shape[1]), (len(rollouts.tokens_BT), 1))
    segment_BT = (position_BT < rollouts.length_B[:, None]).astype(np.int32)
    forward = jax.jit(Forward(config=tiny.model, mesh=tiny.mesh, temperature=sampling.temperature).__call__)
    layout = Layout(jnp.asarray(rollouts.tokens_BT), jnp.asarray(segment_BT), jnp.asarray(position_BT))
    logprob_BT, _ = forward(tiny.params, layout)
    return rollouts, np.asarray(logprob_BT), layout


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_ratios_and_corrections_are_1_on_policy(scored, correction, source):
    rollouts, logprob_BT, layout = scored
    mask_BT, sampler_BT = jnp.asarray(rollouts.mask_BT), jnp.asarray(rollouts.logprob_BT)
    length_BT = jnp.broadcast_to(mask_BT.sum(axis=1, keepdims=True), mask_BT.shape)
    loss = with_old(PolicyLoss(LossSettings(sampler_correction=correction)), source)
    zeros_BT = jnp.zeros_like(sampler_BT)
    rows = PolicyRows(layout, mask_BT, length_BT, zeros_BT + 1, jnp.asarray(logprob_BT), sampler_BT, 1.0)
    _, metrics = loss(jnp.asarray(logprob_BT), zeros_BT, rows)
    old_BT = sampler_BT if source == "sampler" else logprob_BT
    for name in ("actor/ratio", "sampler/weight", "sampler/kept"):
        np.testing.assert_allclose(metrics[name].mean(), 1.0, atol=1e-5, err_msg=name)
    for name in ("sampler/abs_diff", "sampler/kl", "actor/approx_kl", "sampler/chi2_token"):
        if name in metrics:
            np.testing.assert_allclose(metrics[name].mean(), 0.0, atol=1e-5, err_msg=name)
    # Compares each token too, because errors could cancel in a mean.
    old_BT = np.where(mask_BT > 0, old_BT, 0.0)
    np.testing.assert_allclose(np.exp(np.where(mask_BT > 0, logprob_BT, 0.0) - old_BT), 1.0, atol=1e-5)
    low, high, _ = CORRECTIONS[correction]
    where = (mask_BT, length_BT, layout.segment_BT, correction)
    weight_BT = importance_weight(jnp.asarray(old_BT), sampler_BT, *where, low=low, high=high)
    np.testing.assert_allclose(weight_BT, 1.0, atol=1e-5 * (12 if "sequence" in correction else 1))
