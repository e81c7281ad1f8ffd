"""KTO and the training of reward models: the update of a KTO step, and runs that learn and are resumed."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from podrl import export
from podrl.algorithms.kto import kto
from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.reward_model import RewardModel
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.labels import LabelStream
from podrl.data.pairs import held_out_pairs
from podrl.data.pipeline import DataConfig
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig
from podrl.job import job
from podrl.job.config import TINY, complete
from podrl.launch import find_config, load_config
from podrl.learner.answers.preferences import KTO, KTOConfig
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.mesh.build import make_mesh
from podrl.rundir.metrics import read_metrics
from podrl.runtime.watchdog import EXIT_DONE
from podrl.storage.checkpoint import read_state
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape

pytestmark = pytest.mark.usefixtures("quick_compilation")

ANSWERS, LENGTH, BETA = 4, 112, 0.2


def test_a_step_of_kto_is_a_step_down_its_loss():
    """Moves the policy away from the reference and takes a step. The step's metrics and the fall of the loss must agree
    with the log-ratios of whole answers."""
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    rate = 1e-3
    training = RLTrainingConfig(max_steps=1, eval_every_n_steps=0, actor_optimizer=optax.sgd(rate), remat="none")
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        training_config=training,
        rollout_config=RolloutConfig(temperature=1.0),
    )
    cluster = RLCluster(actor=TINY, cluster_config=config)
    batch = next(LabelStream(DataConfig(), cluster.tokenizer, answers=ANSWERS, max_length=LENGTH))
    shape = pack_shape(training, mesh, sequences=ANSWERS, max_length=LENGTH)
    settings = {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    algorithm = KTO(cluster, KTOConfig(batch_size=ANSWERS, max_length=LENGTH, **settings), shape)
    moved = jax.tree.map(lambda x: 0.95 * x, cluster.state.params)
    cluster.state = cluster.state.replace(params=moved)

    def logratio(tokens_BT, length_B, mask_BT):
        actor = cluster.actor
        scored = (
            actor.sample_logprobs(tokens_BT, length_B, longest=LENGTH, reference=reference)
            for reference in (False, True)
        )
        policy_B, reference_B = ((x_BT * mask_BT).sum(axis=1) for x_BT in scored)
        return jnp.asarray(policy_B - reference_B)

    def found():
        own_B = logratio(batch.tokens_BT, batch.length_B, batch.mask_BT)
        return kto(own_B, logratio(*batch.unrelated()), jnp.asarray(batch.desirable_B), **settings), own_B

    before, own_B = found()
    assert float(before.kl) > 0.1  # the policy has moved away from the reference
    metrics = fetched_means(learn(algorithm, 0, batch))
    assert metrics["kto/loss"] == pytest.approx(float(before.loss_B.mean()), rel=1e-4)
    assert metrics["kto/kl"] == pytest.approx(float(before.kl), rel=1e-3)
    for name, which_B in (("desirable", batch.desirable_B), ("undesirable", ~batch.desirable_B)):
        assert metrics[f"kto/{name}_logratio"] == pytest.approx(float(own_B[which_B].mean()), rel=1e-3, abs=1e-3)
    # A small step down the gradient lowers the loss by rate x norm^2 if the reference point is constant.
    _, after_B = found()
    drop = float((before.weight_B * (after_B - own_B)).mean())
    assert drop == pytest.approx(rate * metrics["actor/grad_norm"] ** 2, rel=0.05)


def configured(name, **changes):
    values = load_config(find_config(f"{name}_tiny.py")).to_dict()
    common = {
        "trainer": {"max_steps": 3, "learning_rate": 1e-3},
        "eval": {"problems": 0},
        "checkpoint": {"every": 1, "keep": 3},
        "log": {"to": ()},
        "roles": {"colocated": False, "trainer": {"mesh": "fsdp=1"}, "rollout": {"mesh": "data=7"}},
    }
    for group, fields in {**common, **changes}.items():
        values[group] = values.get(group, {}) | fields
    return ConfigDict(complete(values)).to_dict()


def run_and_resume(values, workdir):
    """Runs a job, then resumes it from the checkpoint before its last step; returns the first run's step records."""
    steps = []
    for again in (False, True):
        if again:
            shutil.rmtree(workdir / "checkpoints" / "3")
        assert job.run(values, str(workdir), command="again") == EXIT_DONE
        records = [r for r in read_metrics(workdir) if "time/step" in r]
        _, end = read_state(workdir / "checkpoints")
        steps.append(([{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in records], end))
    (first, whole), (second, resumed) = steps
    assert second == first
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    return first


@pytest.mark.nightly("podrl/learner/answers", "podrl/algorithms/kto.py")
@pytest.mark.slow
def test_a_short_run_of_kto_learns_and_resumes_bitwise(tmp_path):
    steps = run_and_resume(configured("kto", kto={"batch_size": 8}), tmp_path / "run")
    assert steps[0]["kto/loss"] == pytest.approx(0.5, abs=1e-6) and steps[0]["kto/kl"] == pytest.approx(0, abs=1e-5)
    assert steps[2]["kto/loss"] < steps[0]["kto/loss"]


@pytest.mark.nightly("podrl/learner/answers", "podrl/cluster/reward_model.py", "podrl/export.py")
@pytest.mark.slow
def test_a_reward_model_learns_resumes_bitwise_and_scores_once_exported(tmp_path):
    values = configured(
        "reward_model",
        reward_model={"batch_size": 8},
        model={"lora": {"rank": 2, "alpha": 4.0}},
        trainer={"max_steps": 3, "learning_rate": 3e-3, "eval_every_n_steps": 3},
        eval={"problems": 12},
    )
    steps = run_and_resume(values, tmp_path / "run")
    assert steps[0]["reward_model/loss"] == pytest.approx(np.log(2), rel=1e-6)  # the head's weights begin at 0
    assert steps[0]["reward_model/accuracy"] == 0.5 and steps[2]["reward_model/loss"] < steps[0]["reward_model/loss"]
    evaluated = [r for r in read_metrics(tmp_path / "run") if "eval/pair_margin" in r]
    assert [(r["step"], r["eval/records"]) for r in evaluated] == [(0, 12), (3, 12)]
    assert evaluated[0]["eval/pair_accuracy"] == 0.5 < evaluated[1]["eval/pair_accuracy"]
    # The exported model, with merged adapters, gives the same scores as the evaluated model.
    out = tmp_path / "scores"
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={out}", "--dtype=float32"])
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Gemma2ForSequenceClassification"]
    model = RewardModel(str(out), make_mesh("data=1", jax.devices()[:1]), Tokenizer(TINY), longest=LENGTH)
    pairs = held_out_pairs(DataConfig(**values["data"]), Tokenizer(TINY), count=12, pairs=8, max_length=LENGTH, key="")
    score_P2 = np.concatenate([model.score(batch.tokens_BT, batch.length_B).reshape(-1, 2) for batch in pairs])
    margin_P = score_P2[:, 0] - score_P2[:, 1]
    assert float(margin_P.mean()) == pytest.approx(evaluated[1]["eval/pair_margin"], rel=1e-4)
    assert float((margin_P > 0).mean()) == evaluated[1]["eval/pair_accuracy"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kto", {"beta": 0.0}, r"kto\.beta=0.0 must be a number in \(0, 1e9\]"),
        ("kto", {"batch_size": 1}, r"kto\.batch_size=1 must be a whole number in \[2, "),
        ("reward_model", {"max_length": 1}, r"reward_model\.max_length=1 must be a whole number in \[2, "),
        ("kto", {"undesirable_weight": -1.0}, r"kto\.undesirable_weight=-1.0 must be"),
    ],
)
def test_settings_that_cannot_be(name, changes, message):
    with pytest.raises(ValueError, match=message):
        job.dry_run(configured(name, **{name: changes}), "runs/x")


def test_a_dry_run_tells_the_formula_of_kto(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert job.dry_run(configured("kto", kto={"desirable_weight": 1.5}), "runs/x") == EXIT_DONE
    text = " ".join(capsys.readouterr().out.split())
    assert "1.5 (1 - sigmoid(0.1 (r - z))) for good ones, 1 (1 - sigmoid(0.1 (z - r))) for bad ones" in text
