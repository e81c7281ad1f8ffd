"""DPO and ORPO as jobs: their updates against the losses written out, a dry run, a run that learns and is resumed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pairs import PairStream
from podrl.data.pipeline import DataConfig
from podrl.engine.config import RolloutConfig
from podrl.job import job
from podrl.job.config import TINY, complete
from podrl.launch import find_config, load_config
from podrl.learner.answers.preferences import DPO, ORPO, DPOConfig, ORPOConfig
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.mesh.build import make_mesh
from podrl.models import decoder
from podrl.rundir.metrics import read_metrics
from podrl.runtime.watchdog import EXIT_DONE
from podrl.storage.checkpoint import read_state
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAIRS, LENGTH, BETA, SMOOTHING = 3, 112, 0.3, 0.1


SETTINGS = {
    DPO: DPOConfig(batch_size=PAIRS, max_length=LENGTH, beta=BETA, label_smoothing=SMOOTHING),
    ORPO: ORPOConfig(batch_size=PAIRS, max_length=LENGTH, coef=0.4),
}


def trained(spec, devices, of=DPO, **packing):
    """Trains two steps of plain gradient descent: (model, parameters before, parameters after, metrics of each step,
    batch of each step)."""
    mesh = make_mesh(spec, jax.devices()[:devices])
    training = RLTrainingConfig(
        max_steps=2, eval_every_n_steps=0, actor_optimizer=optax.sgd(0.1), remat="none", **packing
    )
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        training_config=training,
        rollout_config=RolloutConfig(temperature=1.0),
    )
    cluster = RLCluster(actor=TINY, cluster_config=config)
    stream = PairStream(DataConfig(), cluster.tokenizer, pairs=PAIRS, max_length=LENGTH)
    shape = pack_shape(training, mesh, sequences=2 * PAIRS, max_length=LENGTH)
    before = jax.tree.map(np.array, cluster.state.params)
    algorithm = of(cluster, SETTINGS[of], shape)
    batches = [next(stream), next(stream)]
    metrics = [fetched_means(learn(algorithm, step, batch)) for step, batch in enumerate(batches)]
    return cluster.model, before, jax.device_get(cluster.state.params), metrics, batches


@pytest.fixture(scope="module")
def once():
    return trained("fsdp=1", 1, max_tokens_per_row=LENGTH, train_micro_batch_size=1)


def whole_answers(model, params, tokens_BT, mask_BT, length_B):
    """Computes the log-probability of each answer from all logits of padded rows; returns shape (pairs, 2)."""
    place_BT = jnp.tile(jnp.arange(LENGTH), (2 * PAIRS, 1))
    segment_BT = (place_BT < length_B[:, None]).astype(jnp.int32)
    hidden_BTD = decoder.hidden(params, tokens_BT, segment_BT, place_BT, model)
    logp_BTV = jax.nn.log_softmax(decoder.unembed(params, hidden_BTD, model))
    picked_BT = jnp.take_along_axis(logp_BTV[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]
    return (picked_BT * mask_BT[:, 1:]).sum(axis=1).reshape(PAIRS, 2)


def test_the_update_of_orpo_is_the_gradient_of_its_loss():
    """The expected loss is eq. 6 of the ORPO paper on padded rows with all logits; jax differentiates it. The update
    itself packs several answers into a row."""
    model, before, after, metrics, batches = trained("fsdp=1", 1, of=ORPO, max_tokens_per_row=2 * LENGTH)

    def loss(params, tokens_BT, mask_BT, length_B):
        mean_P2 = whole_answers(model, params, tokens_BT, mask_BT, length_B) / mask_BT.sum(axis=1).reshape(PAIRS, 2)
        odds_P2 = jnp.exp(mean_P2) / (1 - jnp.exp(mean_P2))
        return (-mean_P2[:, 0] - 0.4 * jnp.log(jax.nn.sigmoid(jnp.log(odds_P2[:, 0] / odds_P2[:, 1])))).mean()

    step, params = jax.jit(jax.value_and_grad(loss)), jax.tree.map(jnp.asarray, before)
    for batch, said in zip(batches, metrics, strict=True):
        value, grads = step(params, batch.tokens_BT, batch.mask_BT, batch.length_B)
        assert said["orpo/loss"] == pytest.approx(float(value), rel=1e-4)
        assert said["actor/grad_norm"] == pytest.approx(float(optax.tree_utils.tree_norm(grads)), rel=1e-3)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    far = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (after, before)), strict=True))
    for found, expected in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3 * far)


def test_the_update_is_the_gradient_of_the_loss(once):
    """The expected loss is eq. 7 of the DPO paper, with smoothed labels, on padded rows with all logits; jax
    differentiates it. Training starts from the reference's weights."""
    model, before, after, metrics, batches = once

    def sums(params, *batch):
        return whole_answers(model, params, *batch)

    def loss(params, *batch):
        reward_P2 = BETA * (sums(params, *batch) - sums(start, *batch))
        p_P = jax.nn.sigmoid(reward_P2[:, 0] - reward_P2[:, 1])
        return -((1 - SMOOTHING) * jnp.log(p_P) + SMOOTHING * jnp.log(1 - p_P)).mean()

    step = jax.jit(jax.value_and_grad(loss))
    start = params = jax.tree.map(jnp.asarray, before)
    for batch, said in zip(batches, metrics, strict=True):
        value, grads = step(params, batch.tokens_BT, batch.mask_BT, batch.length_B)
        assert said["dpo/loss"] == pytest.approx(float(value), rel=1e-4)
        assert said["actor/grad_norm"] == pytest.approx(float(optax.tree_utils.tree_norm(grads)), rel=1e-3)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert metrics[0]["dpo/loss"] == pytest.approx(np.log(2), rel=1e-5) and metrics[0]["dpo/margin"] == 0.0
    far = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (after, before)), strict=True))
    for found, expected in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3 * far)


@pytest.mark.parametrize(("spec", "devices", "rows"), [("fsdp=1", 1, 6), ("fsdp=2,tensor=2", 4, 1)])
def test_packing_micro_batches_and_meshes_change_nothing(once, spec, devices, rows):
    before, after, metrics = once[1:4]
    _, _, other, said, _ = trained(spec, devices, max_tokens_per_row=2 * LENGTH, train_micro_batch_size=rows)
    for name in metrics[1]:
        assert said[1][name] == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-5), name
    for found, expected, start in zip(*map(jax.tree.leaves, (other, after, before)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3 * float(np.abs(expected - start).max()))


def configured(**changes):
    values = load_config(find_config("dpo_tiny.py")).to_dict()
    for group, fields in changes.items():
        values[group] = values.get(group, {}) | fields
    return ConfigDict(complete(values)).to_dict()


def test_a_dry_run_tells_the_formula_and_the_arithmetic(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert job.dry_run(configured(dpo={"label_smoothing": 0.1}), "runs/x") == EXIT_DONE
    text = " ".join(capsys.readouterr().out.split())
    for part in ("pairs per step", "dpo.batch_size", "1,280", "-0.9 log sigmoid(m) - 0.1 log sigmoid(-m), m = 0.1"):
        assert part in text, part
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, r"dpo\.beta=0.0 must be a number in \(0, 1e9\]"),
        ({"label_smoothing": 0.5}, r"dpo\.label_smoothing=0.5 must be a number in \[0, 0.5\)"),
        ({"batch_size": 0}, r"dpo\.batch_size=0 must be a whole number in \[1, "),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        job.dry_run(configured(dpo=changes), "runs/x")


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "lora"])
def test_a_short_run_learns_to_tell_the_answers_apart(rank, tmp_path):
    values = configured(
        model={"lora": {"rank": rank, "alpha": 4.0}},
        roles={"colocated": False, "trainer": {"mesh": "fsdp=1"}, "rollout": {"mesh": "data=7"}},
        dpo={"batch_size": 4},
        trainer={"max_steps": 3, "learning_rate": 1e-2 if rank else 1e-3},
        eval={"problems": 0},
        checkpoint={"every": 1, "keep": 3},
        log={"to": ()},
    )
    assert job.run(values, str(tmp_path / "run"), command="again") == EXIT_DONE
    records = [r for r in read_metrics(tmp_path / "run") if "time/step" in r]
    assert records[0]["dpo/loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert records[2]["dpo/loss"] < 0.9 * records[0]["dpo/loss"] and records[2]["dpo/margin"] > 0
    assert records[2]["dpo/accuracy"] > 0.5
    _, end = read_state(tmp_path / "run" / "checkpoints")
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(end["params"])}
    assert all(("lora" in name) == bool(rank) for name in names), names
    # The job starts again as if it had been killed after its second step. Its reference must be the initial policy, not
    # the resumed policy.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
    assert job.run(values, str(tmp_path / "run"), command="again") == EXIT_DONE
    again = [r for r in read_metrics(tmp_path / "run") if "time/step" in r]
    assert [r["dpo/loss"] for r in again] == [r["dpo/loss"] for r in records]
    jax.tree.map(
        np.testing.assert_array_equal, read_state(tmp_path / "run" / "checkpoints")[1]["params"], end["params"]
    )
