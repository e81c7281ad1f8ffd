"""The training step makes the same update however sequences are packed, split and sharded."""

import dataclasses
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from updates import SAME, assert_same, update

from podrl.algorithms.echo import with_observations
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss, with_old
from podrl.models import LoraConfig, decoder, from_pretrained, parameters
from podrl.trainer import state as state_lib
from podrl.trainer import step as step_lib
from podrl.trainer.objective import CrossEntropy, SupervisedRows
from podrl.trainer.optimizer import Optimizer
from podrl.trainer.step import make_logprob_fn
from podrl.types import Layout

B = 8  # number of sequences in every batch
MODES = ("token-mean", "sequence-mean-token-mean")


@pytest.mark.parametrize("mode", MODES)
def test_packing_and_micro_batches_do_not_change_the_update(tiny, mode):
    loss = PolicyLoss(KLLossSettings(loss_agg_mode=mode))
    padded = update(tiny(), loss, row=20, rows=8)  # one sequence per row, one micro-batch
    assert_same(update(tiny(), loss, row=60, rows=1), padded)
    assert_same(update(tiny(), loss, row=40, rows=2), padded)


@pytest.mark.parametrize("spec", ["fsdp=4", "data=2,fsdp=2,tensor=2"])
def test_mesh_does_not_change_the_update(tiny, spec):
    loss = PolicyLoss(KLLossSettings())
    assert_same(update(tiny(spec), loss), update(tiny(), loss, row=20, rows=8))


@pytest.mark.parametrize("spec", ["fsdp=4", "data=2,fsdp=2"])
def test_devices_exchange_sums_of_a_small_model_once_and_the_update_is_the_same(tiny, spec, monkeypatch):
    loss = PolicyLoss(KLLossSettings())

    def found():
        case = tiny(spec)
        text = case.step(loss).lower(*case.state(), case.batch(rows=4)).compile().as_text()
        exchanges = re.compile("(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?[(]")
        in_loop = [line for line in text.splitlines() if exchanges.search(line) and "/while/body/" in line]
        return len(in_loop), update(tiny(spec), loss, rows=4)

    once, made = found()
    monkeypatch.setattr(step_lib, "_SMALL_BYTES", 0)
    often, expected = found()
    assert once == 0 < often
    assert_same(made, expected)


def test_a_loss_that_ranks_tokens_ranks_those_of_all_devices(tiny):
    loss = with_old(PolicyLoss(KLLossSettings(policy_loss_fn="kl_cov", beta=0.0)), "sampler")
    assert inspect.unwrap(with_observations(loss)) is inspect.unwrap(loss)
    (made, _), (expected, _) = update(tiny("fsdp=4"), loss, rows=4), update(tiny(), loss, rows=4)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_gradient_equals_the_naive_one(tiny):
    """Compares with the loss written out on padded rows with all logits, differentiated by jax."""
    case = tiny()
    length_B, samples = case.samples()
    change, metrics = update(case, CrossEntropy(), kind=SupervisedRows)
    tokens_BT, mask_BT = jnp.asarray(samples["tokens_BT"]), jnp.asarray(samples["mask_BT"])
    place_BT = jnp.tile(jnp.arange(tokens_BT.shape[1]), (B, 1))
    segment_BT = (place_BT < length_B[:, None]).astype(jnp.int32)

    def naive(params):
        hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, place_BT, case.config)
        logp_BTV = jax.nn.log_softmax(decoder.unembed(params, hidden_BTD, case.config))
        picked_BT = jnp.take_along_axis(logp_BTV[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked_BT * mask_BT[:, 1:]) / jnp.sum(mask_BT)

    loss, grads = jax.jit(jax.value_and_grad(naive))(case.params())
    assert metrics["sft/loss"] == pytest.approx(float(loss), rel=1e-5)
    for x, y in zip(jax.tree.leaves(change), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=SAME)


def test_mini_batch_metrics_of_the_first_update_are_on_policy(tiny):
    """The old log-probabilities come from the weights that are updated, so the ratio is 1, nothing is clipped, and the
    KL is 0."""
    case = tiny()
    state, frozen = case.state()
    batch = case.batch()
    logprob_ABT = make_logprob_fn(case.config, case.mesh)(
        parameters.join_trainable(state.params, frozen), batch.layout()
    )
    same = dict.fromkeys(("old_logprob_BT", "ref_logprob_BT", "sampler_logprob_BT"), logprob_ABT)
    batch = batch.replace(rows=batch.rows.replace(**same))
    _, metrics = case.step(PolicyLoss(KLLossSettings(beta=0.1)))(state, frozen, batch)
    assert float(metrics["actor/ratio"]) == pytest.approx(1.0, abs=1e-6)
    for name in ("actor/pg_clipfrac", "actor/approx_kl", "actor/kl", "actor/nonfinite"):
        assert float(metrics[name]) == pytest.approx(0.0, abs=1e-6), name
    assert float(metrics["actor/entropy"]) > 1.0


def test_the_kl_coefficient_is_scaled_without_compiling(tiny):
    case = tiny()
    step = case.step(PolicyLoss(KLLossSettings(beta=0.1, kl_loss_mode="k3")))
    found = []
    for scale in (1.0, 0.5, 0.0, 3.0):
        before = jax.tree.map(np.asarray, case.state()[0].params)
        state, _ = step(*case.state(), case.batch(kl_scale=scale))
        found.append(jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params))
    assert step._cache_size() == 1
    halved, _ = update(tiny(), PolicyLoss(KLLossSettings(beta=0.05, kl_loss_mode="k3")))
    none, _ = update(tiny(), PolicyLoss(KLLossSettings(beta=0.0)))
    for got, expected in ((found[1], halved), (found[2], none)):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=SAME)
    assert max(np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (found[0], found[3])), strict=True)) > 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_fn_scores_every_token_of_filled_micro_batches(tiny, temperature):
    case = tiny("fsdp=2")
    batch = case.batch(Layout, rows=2)
    layout, params = batch.rows, case.params()
    logprob_ABT = np.asarray(make_logprob_fn(case.config, case.mesh, temperature=temperature)(params, batch))
    continues_ABT = (np.asarray(layout.segment_BT) > 0) & (np.asarray(layout.position_BT) > 0)
    assert (logprob_ABT[continues_ABT] < 0).all()
    assert (logprob_ABT[~continues_ABT] == 0).all()


@pytest.mark.parametrize("spec", ["fsdp=1", "fsdp=2,tensor=2"])
def test_lora_trains_adapters_only(tiny, spec):
    case = tiny(spec, lora=2, learning_rate=1e-2)
    state, frozen = case.state()
    base = jax.tree.map(np.asarray, frozen)
    before = jax.tree.map(np.asarray, state.params)
    assert all(name.endswith(("_lora_a", "_lora_b")) for name in state.params["layers"])
    state, metrics = case.step(PolicyLoss(KLLossSettings()))(state, frozen, case.batch())
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert np.abs(old - np.asarray(new)).max() > 1e-4
    jax.tree.map(np.testing.assert_array_equal, base, jax.tree.map(np.asarray, frozen))
    assert len(jax.tree.leaves(state.opt_state.mu)) == len(jax.tree.leaves(state.params))
    assert float(metrics["actor/grad_norm"]) > 0


def test_state_is_donated_and_nothing_is_compiled_twice(tiny):
    case = tiny("fsdp=2", learning_rate=1e-3)
    state, frozen = case.state()
    step = case.step(PolicyLoss(KLLossSettings()))
    filled = []
    for seed, lengths in enumerate((None, [20] * B, [4] * B, [20] * 4 + [4] * 4)):
        batch = case.batch(rows=2, seed=seed, lengths=lengths)
        filled.append(int(batch.micro_batches))
        old = jax.tree.leaves((state.params, state.opt_state))
        state, _ = step(state, frozen, batch)
        assert all(x.is_deleted() for x in old)
    assert step._cache_size() == 1
    assert len(set(filled)) > 1
    assert int(state.step) == 4


def test_masked_nan_has_no_influence(tiny):
    """NaN is put into the device batch where the mask is 0; the packer would remove it."""
    case = tiny()
    loss = PolicyLoss(KLLossSettings(beta=0.1))
    clean = update(case, loss)
    state, frozen = case.state()
    before = jax.tree.map(np.asarray, state.params)
    batch = case.batch()
    poison = {
        name: jnp.where(batch.rows.mask_BT > 0, getattr(batch.rows, name), jnp.nan)
        for name in ("advantage_BT", "old_logprob_BT", "ref_logprob_BT", "sampler_logprob_BT")
    }
    state, metrics = case.step(loss)(state, frozen, batch.replace(rows=batch.rows.replace(**poison)))
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    assert_same((change, {k: float(v) for k, v in metrics.items()}), clean, atol=0)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tiny):
    case = tiny(learning_rate=1e-2)
    state, frozen = case.state()
    step = case.step(PolicyLoss(KLLossSettings()))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    batch = case.batch()
    rows = batch.rows
    broken = batch.replace(rows=rows.replace(advantage_BT=jnp.where(rows.mask_BT > 0, jnp.nan, 0.0)))
    state, metrics = step(state, frozen, broken)
    assert float(metrics["actor/nonfinite"]) == 1.0
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, (state.params, state.opt_state)))
    assert int(state.step) == 1
    state, metrics = step(state, frozen, batch)
    assert float(metrics["actor/nonfinite"]) == 0.0
    assert int(state.opt_state.count) == 1


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_rematerialisation_does_not_change_the_update(tiny, remat):
    case = tiny()
    expected = update(case, CrossEntropy(), kind=SupervisedRows)
    before = jax.tree.map(np.asarray, case.state()[0].params)
    state, frozen = case.state()
    state, metrics = case.step(CrossEntropy(), remat=remat)(state, frozen, case.batch(SupervisedRows))
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    assert_same((change, {k: float(v) for k, v in metrics.items()}), expected)


@pytest.mark.parametrize(("dtype", "param_dtype"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "bfloat16")])
def test_supervised_training_lowers_the_loss(tiny, dtype, param_dtype):
    case = dataclasses.replace(tiny("fsdp=2", learning_rate=3e-2), param_dtype=param_dtype)
    state, frozen = case.state()
    step, batch = case.step(CrossEntropy(), dtype=dtype), case.batch(SupervisedRows)
    losses = []
    for _ in range(12):
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["sft/loss"]))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("base_dtype", ["", "int8", "int4"])
def test_adapters_on_stored_integers_lower_the_loss(tiny, base_dtype):
    """QLoRA: the rounded base of a checkpoint stays as it is while its adapters learn."""
    case = tiny("fsdp=2", learning_rate=3e-2)
    fixture = pathlib.Path(__file__).parents[1] / "models" / "fixtures" / "gemma2"
    model = from_pretrained(fixture, case.mesh, lora=LoraConfig(rank=4, base_dtype=base_dtype))
    case = dataclasses.replace(case, config=model.config)
    state, frozen = state_lib.init_state(model.params, model.config, case.optimizer, case.mesh)
    assert frozen["layers"]["gate"].dtype == jnp.dtype(base_dtype or "float32")
    base = jax.tree.map(np.asarray, frozen)
    _, samples = case.samples()
    batch = case.batch(SupervisedRows, tokens_BT=samples["tokens_BT"] % model.config.vocab_size)
    step = case.step(CrossEntropy())
    losses = []
    for _ in range(12):
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["sft/loss"]))
    assert losses[-1] < 0.95 * losses[0], losses
    jax.tree.map(np.testing.assert_array_equal, base, jax.tree.map(np.asarray, frozen))


def test_any_optax_transformation_trains(tiny):
    case = tiny()
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    case = type(case)(case.config, case.mesh, Optimizer(transform))
    abstract, _ = state_lib.abstract_state(case.config, case.optimizer, case.mesh)
    state, frozen = case.state()
    jax.tree.map(lambda a, x: (a.shape, a.dtype) == (x.shape, x.dtype) or pytest.fail(f"{a} {x}"), abstract, state)
    _, metrics = case.step(CrossEntropy())(state, frozen, case.batch(SupervisedRows))
    assert "actor/lr" not in metrics and float(metrics["actor/grad_norm"]) > 0


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_abstract_state_is_the_state(tiny, param_dtype):
    case = dataclasses.replace(tiny("fsdp=2,tensor=2", lora=2, learning_rate=1e-3), param_dtype=param_dtype)
    abstract, abstract_frozen = state_lib.abstract_state(case.config, case.optimizer, case.mesh, param_dtype)
    real = case.state()
    described = jax.tree.map(lambda x: (x.shape, x.dtype), (abstract, abstract_frozen))
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), real)
    for a, x in zip(jax.tree.leaves((abstract, abstract_frozen)), jax.tree.leaves(real), strict=True):
        assert a.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert abstract.opt_state.mu["layers"]["q_lora_a"].sharding == abstract.params["layers"]["q_lora_a"].sharding
    assert bool(abstract.opt_state.master) == (param_dtype == "bfloat16")
