"""Runs of a model with experts, started as the launcher starts them; they train all parameters, or adapters."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl import export
from podrl.job import describe, job, placement
from podrl.job.config import TINY, ScratchModel, complete, parse
from podrl.launch import find_config, load_config
from podrl.mesh.build import make_mesh
from podrl.models import hf_save, parameters
from podrl.models.hf_config import config_from_hf, read_config
from podrl.rundir.metrics import read_metrics
from podrl.runtime.watchdog import EXIT_DONE
from podrl.storage.checkpoint import read_state
from podrl.storage.hub import EMBEDDED

pytestmark = pytest.mark.usefixtures("quick_compilation")
# Each run compiles for half a minute, so only the run of supervised training is made on every change.
FAMILIES = pytest.mark.nightly("podrl/models", "podrl/engine", "podrl/trainer", "podrl/cluster", "podrl/export.py")

RAW = {
    "model_type": "qwen3_moe",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "experts", chosen=2)


def write_model(target, *, chosen):
    """Writes a random model with the embedded model's tokenizer; `chosen` of its experts compute each token."""
    config = config_from_hf(RAW | {"num_experts_per_tok": chosen})
    fields = json.loads((TINY / "config.json").read_text())
    ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    hf_save.save(target, config, parameters.init_params(config, jax.random.key(0)), fields=ids)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, target / name)
    return target


def run(directory, place, config, **changes):
    values = load_config(find_config(config)).to_dict()
    common = {
        "model": {"path": str(directory)},
        "roles": {"colocated": False, "trainer": {"mesh": "fsdp=4"}, "rollout": {"mesh": "data=4"}},
        "trainer": {"max_steps": 2, "schedule": "constant", "learning_rate": 1e-2, "eval_every_n_steps": 2},
        "eval": {"problems": 0},
        "checkpoint": {"every": 1, "keep": 2},
        "log": {"to": ()},
    }
    for group, fields in (*common.items(), *changes.items()):
        values[group] = values.get(group, {}) | fields
    values["fake_devices"] = 8
    assert job.run(ConfigDict(complete(values)).to_dict(), str(place), command="again") == EXIT_DONE
    return [record for record in read_metrics(place) if "time/step" in record]


def changed(place):
    first, last = (read_state(place / "checkpoints", step)[1]["params"] for step in (1, 2))
    pairs = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(last), strict=True)
    return {path[-1].key for (path, a), b in pairs if not np.array_equal(a, b)}


ADAPTERS = {"rank": 2, "alpha": 4.0}
INTEGERS = {"base_dtype": "int8", "pattern": "v|expert_in|expert_out"}


@FAMILIES
@pytest.mark.parametrize("lora", [{}, ADAPTERS, ADAPTERS | INTEGERS], ids=["full", "lora", "experts"])
def test_grpo_learns_on_the_probabilities_of_the_sampler(lora, directory, tmp_path, capfd):
    rewards = tmp_path / "mine.py"
    rewards.write_text("def varied(completions, **_):\n    return [float(i) for i in range(len(completions))]\n")
    fields = {
        "model": {"path": str(directory), "lora": lora},
        "grpo": {"num_generations": 4},
        "reward": {"fns": (f"{rewards}:varied",)},
        "rollout": {"prompts_per_step": 2, "max_tokens_to_generate": 8, "members_per_read": 4},
    }
    records = run(directory, tmp_path / "run", "grpo_gemma.py", **fields)
    assert len(records) == 2
    assert all(np.isfinite(r["actor/grad_norm"]) and r["sampler/abs_diff"] < 1e-4 for r in records)
    # Routes are recorded for all tokens but each sample's last. In float32 the trainer would choose the same experts.
    assert all(0.7 < r["moe/replayed"] < 1 and r["moe/route_differs"] < 0.01 for r in records)
    # Two of the four experts compute each token.
    assert all(0.5 <= r["moe/load_max"] <= 1 and 0.2 < r["moe/evenness"] < 1 for r in records)
    leaves = changed(tmp_path / "run")
    assert leaves and all(parameters.is_adapter(name) == bool(lora) for name in leaves)
    assert lora or {"router", "expert_in", "expert_out", "q"} <= leaves
    if "base_dtype" in lora:  # a resumed run ends with the same bits
        assert {f"{n}_lora_{side}" for n in ("expert_in", "expert_out") for side in "ab"} <= leaves
        ended = read_state(tmp_path / "run" / "checkpoints", 2)[1]["params"]
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
        run(directory, tmp_path / "run", "grpo_gemma.py", **fields)
        again = read_state(tmp_path / "run" / "checkpoints", 2)[1]["params"]
        jax.tree.map(np.testing.assert_array_equal, again, ended)
    assert "rollout.router_replay is off" not in " ".join(capfd.readouterr().out.split())


@FAMILIES
@pytest.mark.slow
def test_experts_on_several_devices_train_and_resume(directory, tmp_path):
    """Trainer and rollout shard the experts differently; a run that stops after one step and is resumed ends with the
    same bits."""
    rewards = tmp_path / "mine.py"
    rewards.write_text("def varied(completions, **_):\n    return [float(i) for i in range(len(completions))]\n")
    fields = {
        "grpo": {"num_generations": 4},
        "reward": {"fns": (f"{rewards}:varied",)},
        "rollout": {"prompts_per_step": 2, "max_tokens_to_generate": 8, "members_per_read": 4},
    }
    spread = {"colocated": False, "trainer": {"mesh": "expert=2,fsdp=2"}, "rollout": {"mesh": "expert=4"}}
    steps = lambda n: {"max_steps": n, "schedule": "constant", "learning_rate": 1e-2, "eval_every_n_steps": n}  # noqa: E731
    whole = run(directory, tmp_path / "whole", "grpo_gemma.py", **fields)
    records = run(directory, tmp_path / "run", "grpo_gemma.py", roles=spread, **fields)
    for one, other in zip(whole, records, strict=True):
        for name in ("actor/kl", "actor/grad_norm", "sampler/abs_diff", "reward/mean", "moe/replayed"):
            assert np.isclose(one[name], other[name], rtol=1e-3, atol=1e-4), name
    assert all(r["sampler/abs_diff"] < 1e-4 and r["moe/route_differs"] < 0.01 for r in records)
    run(directory, tmp_path / "again", "grpo_gemma.py", roles=spread, trainer=steps(1), **fields)
    run(directory, tmp_path / "again", "grpo_gemma.py", roles=spread, trainer=steps(2), **fields)
    once, twice = (read_state(tmp_path / name / "checkpoints", 2)[1]["params"] for name in ("run", "again"))
    jax.tree.map(np.testing.assert_array_equal, once, twice)


def test_meshes_that_do_not_fit_the_experts_are_refused_by_name(directory, tmp_path):
    of = lambda mesh: {"roles": {"colocated": False, "trainer": {"mesh": "fsdp=4"}, "rollout": {"mesh": mesh}}}  # noqa: E731
    with pytest.raises(ValueError, match=r"roles.rollout.mesh='expert=3' .* 4 experts of a qwen3_moe .* divide by 3"):
        run(directory, tmp_path, "grpo_gemma.py", **of("expert=3"))
    with pytest.raises(ValueError, match=r"roles.rollout.mesh='expert=4' .* a gemma2 model has none"):
        run("tiny", tmp_path, "grpo_gemma.py", **of("expert=4"))


@FAMILIES
def test_weights_that_are_behind_route_otherwise_and_a_reference_by_itself(directory, tmp_path, capfd):
    """Samples are drawn by weights one step older than the trained weights; checkpoints keep the samples' routes."""
    rewards = tmp_path / "mine.py"
    rewards.write_text("def varied(completions, **_):\n    return [float(i) for i in range(len(completions))]\n")
    fields = {
        "trainer": {"max_steps": 4, "schedule": "constant", "learning_rate": 3e-2, "eval_every_n_steps": 4},
        "grpo": {"num_generations": 4, "beta": 0.04, "max_staleness": 1},
        "reward": {"fns": (f"{rewards}:varied",)},
        "rollout": {"prompts_per_step": 2, "max_tokens_to_generate": 8, "members_per_read": 4},
    }
    records = run(directory, tmp_path / "run", "grpo_gemma.py", **fields)
    assert len(records) == 4 and all(0.7 < r["moe/replayed"] < 1 for r in records)
    assert records[0]["moe/route_differs"] < 0.01 < records[-1]["moe/route_differs"]
    assert all(np.isfinite(r["actor/grad_norm"]) and np.isfinite(r["actor/kl"]) for r in records)
    fields["rollout"] |= {"router_replay": False}
    fields["trainer"] |= {"max_steps": 1, "eval_every_n_steps": 1}
    records = run(directory, tmp_path / "off", "grpo_gemma.py", **fields)
    assert not [name for name in records[0] if name.startswith("moe/")]
    said = " ".join(capfd.readouterr().out.split())
    own, replayed = re.search(r"differ by (\S+) nats on average, .* they would differ by (\S+)\.", said).groups()
    assert 0 < float(replayed) <= float(own) == pytest.approx(records[0]["sampler/abs_diff"], rel=0.1)


def test_a_dry_run_states_what_recorded_routes_take(directory):
    values = load_config(find_config("grpo_gemma.py")).to_dict()
    values["model"] |= {"path": str(directory)}
    values["rollout"] |= {"max_prompt_length": 64}
    found = parse(ConfigDict(complete(values)).to_dict())
    mesh = make_mesh("data=1", jax.devices()[:1])
    said = describe.about_job(found, placement.Meshes(mesh, mesh, mesh, mesh)).lines
    assert any(line.startswith("Router replay (rollout.router_replay): 4 bytes a token") for line in said)


@pytest.mark.parametrize("variant", ["moe", "hybrid"])
def test_the_embedded_models_are_those_of_the_shipped_configs(variant):
    values = load_config(f"{find_config('grpo_gemma.py')}:{variant}").to_dict()
    directory = EMBEDDED[values["model"]["path"]]
    read = read_config(directory)
    scratch = load_config(f"{find_config('sft_tiny.py')}:{variant}").to_dict()["scratch"]
    made = ScratchModel(**scratch).model(read.vocab_size)
    assert (read.experts is None) == (variant == "hybrid") and (read.kinds == ()) == (variant == "moe")
    assert read == made
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 1.5e6


def test_a_scratch_model_with_linear_attention_has_a_layer_of_full_attention():
    with pytest.raises(ValueError, match=r"scratch\.linear=3 with scratch\.num_layers=3: at least one layer must"):
        ScratchModel(linear=3).model(300)
    both = ScratchModel(num_layers=2, linear=1, experts=4, ffn_dim=16).model(300)
    assert [both.kinds[k].name for k in both.kind_L] == ["linear", "full"] and both.experts is not None


@FAMILIES
def test_a_model_with_experts_is_made_exported_and_trained_on(tmp_path):
    scratch = {"num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "experts": 4}
    run("scratch", tmp_path / "run", "sft_tiny.py", scratch=scratch, sft={"batch_size": 8})
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'mine'}"])
    read = read_config(tmp_path / "mine")
    assert read.family == "qwen3_moe" and read.experts == ScratchModel(**scratch).model(read.vocab_size).experts
    with pytest.raises(ValueError, match=r"scratch\.chosen=5 with scratch\.experts=4"):
        ScratchModel(experts=4, chosen=5).model(300)


def test_supervised_training_moves_router_and_experts(directory, tmp_path):
    records = run(directory, tmp_path, "sft_tiny.py", sft={"batch_size": 8, "tagged_share": 1.0, "full_steps": 0})
    assert all(np.isfinite(r["sft/loss"]) and r["actor/grad_norm"] > 0 for r in records)
    assert {"router", "expert_in", "expert_out", "q"} <= changed(tmp_path)


def test_a_balance_loss_without_experts_is_refused_before_the_models_load(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.balance_coef=0\.5 needs experts, and a gemma2 model has none"):
        run("tiny", tmp_path, "grpo_gemma.py", trainer={"max_steps": 1, "balance_coef": 0.5})


@FAMILIES
@pytest.mark.slow
def test_replayed_routes_leave_the_mismatch_of_a_model_that_chooses_all_experts(directory, tmp_path):
    """A sampler in bfloat16 and a trainer in float32 choose different experts for some tokens, unless the trainer
    replays the sampler's routes."""
    fields = {
        "trainer": {"max_steps": 2, "schedule": "constant", "learning_rate": 0.0, "eval_every_n_steps": 0},
        "grpo": {"num_generations": 8},
        "checkpoint": {"every": 0},
    }
    sampling = {"prompts_per_step": 8, "max_tokens_to_generate": 24, "members_per_read": 8, "data_type": "bfloat16"}

    def differences(model, name, **rollout):
        records = run(model, tmp_path / name, "grpo_gemma.py", rollout=sampling | rollout, **fields)
        return [np.mean([r[f"sampler/{kind}"] for r in records]) for kind in ("abs_diff", "kl")], records

    (replayed, kl), records = differences(directory, "replayed")
    assert all(r["moe/route_differs"] > 0 for r in records)  # the trainer would choose other experts for some tokens
    (everything, _), _ = differences(write_model(tmp_path / "all", chosen=4), "all experts")
    (alone, own_kl), _ = differences(directory, "not replayed", router_replay=False)
    assert 0 < replayed < 1.3 * everything
    assert replayed < alone and kl < own_kl
