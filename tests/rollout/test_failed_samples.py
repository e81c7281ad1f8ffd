"""Samples with NaN logits end as failed, no other sample is affected, and too many failures end the call."""

import dataclasses

import jax
import numpy as np
import pytest

from podrl.engine.config import Sampling
from podrl.rollout.integrity import faults
from podrl.rollout.worker import FailedSamplesError
from podrl.types import STOP_FAILED, Policy

FIELDS = ("tokens_BT", "length_B", "mask_BT", "logprob_BT", "kept_BT", "raw_logprob_BT", "version_BT", "stop_B")
SAMPLING = Sampling(top_k=250, max_new=12)
G = 4


@pytest.fixture(scope="module")
def untied(tiny_on, tight_config):
    """Makes a model whose embeddings are not its output matrix, and a worker whose small pool must reuse pages."""
    tiny = tiny_on("data=1", 1, dataclasses.replace(tiny_on("data=1", 1).model, tie_embeddings=False))
    return tiny, tiny.worker(tight_config)


@pytest.fixture(scope="module")
def clean(untied, prompts_of):
    """Samples the undamaged model, from prompts that share no tokens."""
    tiny, worker = untied
    prompts = prompts_of([9, 20, 3, 17, 1, 12, 8, 5, 20, 11, 2, 16])
    return prompts, worker.generate(Policy(tiny.params, 4), prompts, group_size=G, step=1, sampling=SAMPLING)


def with_nan(params, token):
    """Returns parameters in which `token` has an embedding of NaN, so that the logits after the token are NaN."""
    return {**params, "embed": params["embed"].at[token].set(np.nan)}


def met_by(rollouts, token):
    """Returns where each sample first feeds the token to the model; the last token of a sample is never fed."""
    read_BT = (rollouts.tokens_BT == token) & (np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[:, None] - 1)
    return {int(b): int(row.argmax()) for b, row in enumerate(read_BT) if row.any()}


def unharmed(found, clean, failed):
    rest = np.setdiff1d(np.arange(len(clean.stop_B)), failed)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name)[rest], getattr(clean, name)[rest], err_msg=name)
    assert [found.completions[b] for b in rest] == [clean.completions[b] for b in rest]


def test_a_sample_that_fails_ends_where_it_failed(untied, clean, caplog):
    (tiny, worker), (prompts, whole) = untied, clean
    given = set(prompts.tokens_PT.ravel().tolist())
    sampled = [t for t in range(6, 300) if t not in given and 1 <= len(met_by(whole, t)) <= 4]
    token = max(sampled, key=lambda t: len(met_by(whole, t)))
    met = met_by(whole, token)
    params = with_nan(tiny.params, token)
    found = worker.generate(Policy(params, 4), prompts, group_size=G, step=1, sampling=SAMPLING)
    assert np.flatnonzero(found.stop_B == STOP_FAILED).tolist() == sorted(met)
    assert worker.stats.failed == len(met)
    assert f"{len(met)} of 48 samples ended as failed" in caplog.text and "version 4" in caplog.text
    for b, place in met.items():  # a failed sample ends with `token`, because the logits after it are NaN
        assert found.length_B[b] == place + 1
        np.testing.assert_array_equal(found.tokens_BT[b, : place + 1], whole.tokens_BT[b, : place + 1])
        assert np.isfinite(found.logprob_BT[b]).all() and (found.version_BT[b, place] == 4)
    unharmed(found, whole, sorted(met))
    assert faults(found, step=4, max_staleness=0) == {}
    again = worker.generate(Policy(tiny.params, 4), prompts, group_size=G, step=1, sampling=SAMPLING)
    unharmed(again, whole, [])
    assert worker.stats.failed == 0


def test_a_prompt_that_cannot_be_read_fails_alone(untied, clean):
    (tiny, worker), (prompts, whole) = untied, clean
    token = next(int(t) for t in prompts.tokens_PT[1] if list(met_by(whole, int(t))) == [4, 5, 6, 7])
    found = worker.generate(Policy(with_nan(tiny.params, token), 4), prompts, group_size=G, step=1, sampling=SAMPLING)
    np.testing.assert_array_equal(np.flatnonzero(found.stop_B == STOP_FAILED), [4, 5, 6, 7])
    assert (found.mask_BT[4:8] == 0).all() and found.completions[4:8] == [""] * 4
    unharmed(found, whole, [4, 5, 6, 7])


def test_too_many_end_the_call_and_name_the_weights(untied, clean):
    (tiny, worker), (prompts, whole) = untied, clean
    broken = jax.tree.map(lambda x: x * np.nan, tiny.params)
    with pytest.raises(FailedSamplesError, match=r"of 48 samples .* version 9: at most 10% may.*float32"):
        worker.generate(Policy(broken, 9), prompts, group_size=G, step=1, sampling=SAMPLING)
    again = worker.generate(Policy(tiny.params, 4), prompts, group_size=G, step=1, sampling=SAMPLING)
    unharmed(again, whole, [])


# An array, the changed place (sample 5 has a prompt of 20 tokens, sample 8 a short row), the new value, and the metric
# that counts the fault.
CHANGED = [
    ("mask_BT", (5, 19), 1.0, "rollout/faulty_tokens"),
    ("mask_BT", (5, 21), 0.0, "rollout/faulty_tokens"),
    ("mask_BT", (8, -1), 1.0, "rollout/faulty_tokens"),
    ("tokens_BT", (5, 2), 299, "rollout/faulty_tokens"),
    ("piece_BT", (5, slice(21, None)), 1, "rollout/faulty_tokens"),  # a piece's first token cannot be sampled
    ("piece_BT", (5, slice(2, None)), 1, "rollout/faulty_tokens"),  # a piece begins within the prompt
    ("logprob_BT", (5, 20), np.nan, "rollout/faulty_tokens"),
    ("logprob_BT", (5, 20), 0.5, "rollout/faulty_tokens"),
    ("version_BT", (5, 20), -1, "rollout/faulty_tokens"),
    ("version_BT", (5, 20), 5, "rollout/unknown_version"),
    ("version_BT", (5, 20), 3, "rollout/stale_tokens"),
]


@pytest.mark.parametrize(("name", "place", "value", "counted"), CHANGED)
def test_an_array_that_does_not_fit_the_others_is_counted(clean, name, place, value, counted):
    _, whole = clean
    assert whole.prompts.length_P[1] == 20 and whole.length_B[5] > 22
    assert faults(whole, step=4, max_staleness=0) == {} == faults(whole, step=5, max_staleness=1)
    array = getattr(whole, name).copy()
    array[place] = value
    assert faults(dataclasses.replace(whole, **{name: array}), step=4, max_staleness=0) == {counted: 1.0}
