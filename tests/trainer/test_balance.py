"""The balance loss of experts: its gradient, its normalisation over micro-batches and meshes, and its refusal."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from updates import SAME, assert_same, update

from podrl.models import decoder, moe
from podrl.models.hf_config import config_from_hf
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.objective import CrossEntropy, SupervisedRows
from podrl.trainer.step import make_train_step

HERE = pathlib.Path(__file__).parent
COEF = 0.7
RAW = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}


def with_experts(case, score="softmax"):
    config = config_from_hf(RAW)
    return dataclasses.replace(
        case, config=dataclasses.replace(config, experts=dataclasses.replace(config.experts, score=score))
    )


def balance(params, batch, config, monkeypatch):
    """Computes the balance loss in numpy, layer by layer, from the inputs of the routers and the experts they chose."""
    seen, route = [], moe.route

    def watched(x_XD, layer, experts, *rest):
        found = route(x_XD, layer, experts, *rest)
        seen.append((np.asarray(x_XD @ layer["router"]), np.asarray(found[0])))
        return found

    total = tokens = 0.0
    layout = batch.rows.layout
    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(moe, "route", watched)
        for m in range(int(batch.micro_batches)):
            part = jax.tree.map(lambda x: x[m], layout)  # noqa: B023
            seen.clear()
            decoder.hidden(
                params, part.tokens_BT, part.segment_BT, part.position_BT, config, dtype=np.dtype(np.float32)
            )
            real_X = np.asarray(part.segment_BT).reshape(-1) > 0
            assert len(seen) == config.num_layers
            for logit_XE, expert_Xk in seen:
                e_XE = 1 / (1 + np.exp(-logit_XE)) if config.experts.score == "sigmoid" else np.exp(logit_XE)
                P_E = (e_XE / e_XE.sum(1, keepdims=True))[real_X].mean(0)
                f_E = np.bincount(expert_Xk[real_X].reshape(-1), minlength=len(P_E)) / expert_Xk[real_X].size
                total += real_X.sum() * len(P_E) * (f_E @ P_E) / config.num_layers
            tokens += real_X.sum()
    return total / tokens


@pytest.mark.skipif(np.dtype(np.float32).itemsize == 4, reason="run in float64 by the test below")
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "chosen"])
def test_the_gradient_is_that_of_finite_differences(tiny, monkeypatch, score):
    case = with_experts(tiny(), score)
    kind = {"kind": SupervisedRows, "row": 40, "rows": 1}
    batch = case.batch(SupervisedRows, row=40, rows=1)
    assert int(batch.micro_batches) > 1
    plain, _ = update(case, CrossEntropy(), **kind)
    with_loss, _ = update(case, CrossEntropy(), **kind, balance_coef=COEF)
    added = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / COEF, with_loss, plain)
    params = case.params()
    for name in ("router", "q", "expert_in"):
        rng = np.random.default_rng(0)
        draw = rng.normal(size=params["layers"][name].shape)
        values = []
        for sign in (1, -1):
            moved = params | {"layers": params["layers"] | {name: params["layers"][name] + sign * 1e-6 * draw}}
            values.append(balance(moved, batch, case.config, monkeypatch))
        want = (values[0] - values[1]) / 2e-6
        assert abs(want) > 1e-6, name
        np.testing.assert_allclose(np.sum(added["layers"][name] * draw), want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("spec", ["expert=2,fsdp=2", "data=2,expert=2,tensor=2"])
def test_a_mesh_changes_no_gradient(tiny, spec):
    # The shares of experts are taken over a micro-batch, so both updates have one micro-batch with all rows.
    of = {"kind": SupervisedRows, "row": 20, "rows": 8}
    one = update(with_experts(tiny()), CrossEntropy(), **of, balance_coef=COEF)
    assert_same(update(with_experts(tiny(spec)), CrossEntropy(), **of, balance_coef=COEF), one)
    plain, _ = update(with_experts(tiny()), CrossEntropy(), **of)
    assert np.abs(np.asarray(one[0]["layers"]["router"]) - plain["layers"]["router"]).max() > 100 * SAME


@pytest.mark.nightly("podrl/trainer", "podrl/models")
@pytest.mark.slow
def test_in_float64():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "in_float64",
        "-p",
        "no:cacheprovider",
        "-rA",
        str(HERE / "test_balance.py"),
    ]
    done = subprocess.run(
        [*command, "-k", "finite_differences or a_mesh"], env=environment, capture_output=True, text=True, timeout=3600
    )
    assert "5 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_coefficient_of_0_compiles_the_step_without_it(tiny):
    case = with_experts(tiny())
    state, frozen = case.state()
    batch = case.batch(SupervisedRows)
    text = lambda **of: case.step(CrossEntropy(), **of).lower(state, frozen, batch).as_text()  # noqa: E731
    assert text(balance_coef=0.0) == text() != text(balance_coef=COEF)
    assert RLTrainingConfig(eval_every_n_steps=0).balance_coef == 0


def test_a_model_without_experts_refuses_it(tiny):
    case = tiny()
    with pytest.raises(ValueError, match=r"trainer\.balance_coef=0\.7 needs experts, and a gemma2 model has none"):
        make_train_step(case.config, CrossEntropy(), case.optimizer, case.mesh, balance_coef=COEF)
