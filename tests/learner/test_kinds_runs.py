"""Models with two kinds of attention layers are trained by every method, and exported."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from podrl import export
from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.labels import LabelStream
from podrl.data.pairs import PairStream
from podrl.data.pipeline import DataConfig
from podrl.data.sft import SFTConfig, SFTStream
from podrl.engine.config import RolloutConfig
from podrl.job import job
from podrl.job.config import TINY, ModelSource, complete
from podrl.launch import find_config, load_config
from podrl.learner.answers.preferences import DPO, KTO, ORPO, DPOConfig, KTOConfig, ORPOConfig
from podrl.learner.answers.supervised import SFT
from podrl.learner.grpo import GRPO
from podrl.learner.loop import learn
from podrl.learner.recorder import fetched_means
from podrl.learner.settings import GRPOConfig
from podrl.mesh.build import make_mesh
from podrl.models import Decoder, from_pretrained, parameters
from podrl.models.hf_config import config_from_hf
from podrl.rundir.metrics import read_metrics
from podrl.runtime.watchdog import EXIT_DONE
from podrl.storage.checkpoint import Checkpoints
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import pack_shape

pytestmark = pytest.mark.usefixtures("quick_compilation")
# Each run compiles for half a minute; methods, the loop and the data are tested on every change with cheaper models.
FAMILIES = pytest.mark.nightly("podrl/models", "podrl/engine", "podrl/trainer", "podrl/cluster", "podrl/export.py")

PAIRS, LENGTH = 3, 112
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
}


def saved(tmp_path, mesh, raw=GEMMA4):
    """Writes a random model to a directory, with the tokenizer that comes with podrl."""
    config = config_from_hf(raw)
    params = parameters.init_params(config, jax.random.key(0))
    for stack in params["layers"].values():
        if config.layer_scalar:
            stack["layer_scalar"] = stack["layer_scalar"] * 0.8
    Decoder(config, params, mesh).save(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(TINY) / name, tmp_path / "base" / name)
    return config, params


def cluster_of(tmp_path, mesh):
    training = RLTrainingConfig(
        max_steps=2,
        eval_every_n_steps=0,
        actor_optimizer=optax.sgd(0.1),
        max_tokens_per_row=LENGTH,
        train_micro_batch_size=2,
    )
    cluster = RLCluster(
        actor=tmp_path / "base",
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
            training_config=training,
            rollout_config=RolloutConfig(temperature=1.0),
        ),
    )
    return cluster, pack_shape(training, mesh, sequences=2 * PAIRS, max_length=LENGTH)


def supervised(cluster, shape):
    config = SFTConfig(batch_size=2 * PAIRS, max_length=LENGTH)
    return SFT(cluster, config, shape), SFTStream(DataConfig(), config, cluster.tokenizer)


def odds(cluster, shape):
    stream = PairStream(DataConfig(), cluster.tokenizer, pairs=PAIRS, max_length=LENGTH)
    return ORPO(cluster, ORPOConfig(batch_size=PAIRS, max_length=LENGTH), shape), stream


def labelled(cluster, shape):
    config = KTOConfig(batch_size=2 * PAIRS, max_length=LENGTH)
    return KTO(cluster, config, shape), LabelStream(
        DataConfig(), cluster.tokenizer, answers=2 * PAIRS, max_length=LENGTH
    )


@FAMILIES
@pytest.mark.parametrize(
    "name, made, mesh, raw",
    [
        ("sft", supervised, "data=2", GEMMA4),
        ("orpo", odds, "fsdp=2,seq=2", GEMMA4),
        ("kto", labelled, "tensor=2", GEMMA4),
        ("orpo", odds, "fsdp=2", QWEN3_5),
    ],
)
def test_a_method_goes_down_its_loss(tmp_path, name, made, mesh, raw):
    mesh = make_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])
    saved(tmp_path, mesh, raw)
    cluster, shape = cluster_of(tmp_path, mesh)
    algorithm, stream = made(cluster, shape)
    batch, before = next(stream), jax.device_get(cluster.actor.params())
    losses = [fetched_means(learn(algorithm, step, batch))[f"{name}/loss"] for step in range(2)]
    assert losses[1] < losses[0]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, jax.device_get(cluster.actor.params()))
    assert all(leaf != (key == "layer_scalar") for kind in moved["layers"].values() for key, leaf in kind.items())


@FAMILIES
def test_preferences_train_against_the_model_as_it_was_and_its_checkpoint_is_exported(tmp_path):
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    config, params = saved(tmp_path, mesh)
    cluster, shape = cluster_of(tmp_path, mesh)
    stream = PairStream(DataConfig(), cluster.tokenizer, pairs=PAIRS, max_length=LENGTH)
    algorithm = DPO(cluster, DPOConfig(batch_size=PAIRS, max_length=LENGTH), shape)
    first, second = (fetched_means(learn(algorithm, step, next(stream))) for step in range(2))
    # At first the policy equals its reference, the layers' scalars included: the margin is 0, and the loss is log 2.
    assert first["dpo/loss"] == pytest.approx(np.log(2), abs=1e-6) and second["dpo/loss"] != first["dpo/loss"]

    run = tmp_path / "run"
    run.mkdir()
    settings = {
        "model": ModelSource(path=str(tmp_path / "base")),
        "trainer": RLTrainingConfig(eval_every_n_steps=0, max_steps=2),
    }
    (run / "config.json").write_text(json.dumps({k: dataclasses.asdict(v) for k, v in settings.items()}))
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(2, cluster.state, {"step": 2}, {})
    checkpoints.close()
    export.main([f"--workdir={run}", f"--out={tmp_path / 'out'}", "--dtype=float32"])
    exported = from_pretrained(tmp_path / "out")
    assert exported.config == config
    jax.tree.map(np.testing.assert_array_equal, exported.params, jax.device_get(cluster.actor.params()))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), exported.params, params)
    assert moved["layers"]["full"]["k"] and not moved["layers"]["full"]["layer_scalar"]
    assert exported.params["layers"]["full"]["layer_scalar"].dtype == jnp.float32


@FAMILIES
@pytest.mark.parametrize(
    ("lora", "raw"),
    [({}, GEMMA4), ({"rank": 2, "alpha": 4.0}, GEMMA4), ({}, QWEN3_5 | {"rms_norm_eps": 1e-2})],
    ids=["full", "merged", "linear"],
)
def test_grpo_trains_on_its_samples(tmp_path, lora, raw):
    """Sampler and trainer agree on probabilities before and after an update, so every leaf of the weights has reached
    the engine."""
    saved(tmp_path, make_mesh("fsdp=1", jax.devices()[:1]), raw)
    rewards = tmp_path / "mine.py"
    rewards.write_text("def varied(completions, **_):\n    return [float(i) for i in range(len(completions))]\n")
    values = load_config(find_config("grpo_gemma.py")).to_dict()
    changes = {
        "model": {"path": str(tmp_path / "base"), "lora": lora},
        "roles": {"colocated": False, "trainer": {"mesh": "fsdp=4"}, "rollout": {"mesh": "fsdp=4"}},
        "trainer": {"max_steps": 2, "schedule": "constant", "learning_rate": 1e-2, "eval_every_n_steps": 0},
        "grpo": {"num_generations": 4},
        "reward": {"fns": (f"{rewards}:varied",)},
        "rollout": {"prompts_per_step": 2, "max_tokens_to_generate": 8, "members_per_read": 4},
        "eval": {"problems": 0},
        "log": {"to": ()},
    }
    changes["rollout"] |= {"merge_adapters": True} if lora else {}
    for group, fields in changes.items():
        values[group] = values.get(group, {}) | fields
    values["fake_devices"] = 8
    run = tmp_path / "run"
    assert job.run(ConfigDict(complete(values)).to_dict(), str(run), command="again") == EXIT_DONE
    records = [record for record in read_metrics(run) if "time/step" in record]
    assert len(records) == 2
    assert all(np.isfinite(r["actor/grad_norm"]) and r["sampler/abs_diff"] < 1e-4 for r in records)


@pytest.mark.parametrize("raw", [GEMMA4, QWEN3_5])
def test_pieces_share_prompts_only_if_a_reference_has_linear_attention(tmp_path, raw):
    mesh = make_mesh("fsdp=2", jax.devices()[:2])
    saved(tmp_path, mesh, raw)
    cluster = RLCluster(
        actor=TINY,
        reference=tmp_path / "base",
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
            training_config=RLTrainingConfig(eval_every_n_steps=0),
            rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8),
        ),
    )
    for beta, tree in ((0.0, True), (0.1, raw is GEMMA4)):
        config = GRPOConfig(num_generations=2, beta=beta, old_logprob="trainer")
        shape = GRPO(cluster, config, samples=4, log=print, pieces=True).mini_batches.shape
        assert shape.shared and shape.tree == tree
