"""The names and defaults of the Python API; a field has Tunix's name if Tunix has the same setting."""

import ast
import dataclasses
import inspect
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from waits import PATIENCE_S

import podrl
from podrl.algorithms.kl import canonical_mode
from podrl.algorithms.presets import preset
from podrl.config import as_settings
from podrl.job.config import unset
from podrl.rundir.metrics import UserMetrics

FIELDS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "vectors" / "config_fields.json"
ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms.md"


def different() -> dict[str, tuple[str, str]]:
    """Reads the table of defaults that differ: key -> (Tunix's value, podrl's value)."""
    table = PAGE.read_text().partition("| key | Tunix | podrl | why |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]
    return {row[0].strip("`"): (row[1], row[2]) for row in rows}


def test_the_table_of_defaults_lists_every_one_that_differs():
    if not FIELDS.exists():
        pytest.skip("the field list is not beside the checkout")
    found = {}
    for name, group in (("GRPOConfig", "grpo"), ("PPOConfig", "ppo"), ("RolloutConfig", "rollout")):
        mine = {f.name: f.default for f in dataclasses.fields(getattr(podrl, name))}
        for field, about in json.loads(FIELDS.read_text())[name]["fields"].items():
            if field in mine and repr(mine[field]) != about["default"]:
                found[f"{group}.{field}"] = (about["default"].strip("'"), str(mine[field]))
    assert found == different()


def test_every_public_name_exists():
    assert {name: getattr(podrl, name).__module__ for name in podrl.__all__}
    assert set(podrl.__all__) <= set(dir(podrl))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("GRPOTrainer", r": podrl\.GRPOLearner\(cluster, podrl\.GRPOConfig\(\.\.\.\), reward_fns=f\)\.train\("),
        ("GrpoConfig", r": podrl\.GRPOLearner\(cluster, "),
        ("RayPPOTrainer", r": podrl\.PPOLearner\(cluster, podrl\.PPOConfig\("),
        ("RLOOConfig", r": .*\*\*preset\('rloo'\)\.settings"),
        ("DPOLearner", r": podrl\.run\('dpo_tiny\.py', .* its settings are dpo\.\*"),
        ("DPOTrainingConfig", r": podrl\.run\('dpo_tiny\.py'"),
        ("SFTTrainer", r": podrl\.run\('sft_tiny\.py'"),
        ("RewardTrainer", r": podrl\.run\('reward_model_tiny\.py'"),
        ("Trainer", r": podrl\.GRPOLearner\(\.\.\.\)\.train\(records\)"),
        ("train", r": podrl\.GRPOLearner\(\.\.\.\)\.train\(records\)"),
        ("LoRAConfig", r"\. Did you mean 'LoraConfig'"),
        ("Foo", ": it has TINY, "),
    ],
)
def test_a_name_of_another_library_is_answered_with_podrls_way(name, way):
    with pytest.raises(AttributeError, match=f"^podrl has no {name}{way}"):
        getattr(podrl, name)


def test_the_files_and_presets_of_these_answers_exist():
    for file in podrl._FILES.values():  # pyright: ignore[reportPrivateUsage]
        assert (ROOT / "configs" / file).exists()
    for name in filter(None, podrl._LEARNERS.values()):  # pyright: ignore[reportPrivateUsage]
        assert podrl.GRPOConfig(**preset(name).settings)


def test_importing_podrl_imports_no_jax():
    code = "import podrl, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_files_that_say_that_they_need_only_the_standard_library_do():
    """Files whose docstring names the standard library run where podrl's dependencies are missing: on hosts, in
    sandboxes, in users' environments."""
    texts = {path: ast.get_docstring(ast.parse(path.read_text())) for path in (ROOT / "podrl").rglob("*.py")}
    names = [path for path, text in texts.items() if "standard library" in " ".join((text or "").split())]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in names]
    assert {"podrl.agent", "podrl.mappings", "podrl.runtime.detect", "podrl.rewards.worker"} <= set(modules)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(modules)}"
    alone = [sys.executable, "-I", "-S", "-c", code]  # -S leaves out the installed packages
    done = subprocess.run(alone, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["GRPOConfig", "PPOConfig", "RolloutConfig", "RLTrainingConfig", "ClusterConfig"])
def test_fields_have_tunix_defaults_or_are_refused_with_advice(name):
    if not FIELDS.exists():
        pytest.skip("the field list is not beside the checkout")
    cls = getattr(podrl, name)
    mine = {f.name: f for f in dataclasses.fields(cls)}
    spec = json.loads(FIELDS.read_text())[name]
    for field, about in spec["fields"].items():
        if field in mine:
            default = mine[field].default
            if about["default"] is not None and f"{cls.__section__}.{field}" not in different():
                assert repr(default) == about["default"], field
        else:
            with pytest.raises(ValueError, match=r"has no field \w+: \w+"):
                cls(**{field: "asked for"})
    for field in spec["documented_only"]:
        if field not in mine:
            with pytest.raises(ValueError, match=r"has no field \w+: \w+"):
                cls(**{field: "asked for"})


def test_weights_of_a_learners_own_functions():
    assert podrl.RewardConfig(weights=(1.0, 0.5)).weights == (1.0, 0.5)  # weights of a learner's reward_fns
    with pytest.raises(ValueError, match="2 values for 4 functions"):
        podrl.RewardConfig(weights=(1.0, 0.5)).require(environment=False)
    with pytest.raises(ValueError, match="2 values for 1 function "):
        podrl.RewardConfig(fns=(len,), weights=(1.0, 0.5))


def test_an_argument_that_is_not_one_says_what_is():
    with pytest.raises(TypeError, match=r"^run has no argument 'reward_fn'\. Did you mean 'reward_fns'\?$"):
        podrl.run("grpo_gemma.py", reward_fn=len)
    with pytest.raises(TypeError, match=r"GRPOLearner has no argument 'steps'"):
        podrl.GRPOLearner(None, podrl.GRPOConfig(), steps=3)
    with pytest.raises(TypeError, match=r"RLCluster has no argument 'mesh'\..*cluster_config"):
        podrl.RLCluster(actor="", mesh=None)
    with pytest.raises(TypeError, match=r"RLCluster has no argument 'model': give actor="):
        podrl.RLCluster(model="tiny")


def test_podrl_run_refuses_what_the_command_refuses(tmp_path):
    for overrides, message in (
        ({"trainer.max_stepz": 3}, "max_stepz.*'max_steps'"),
        ({"trainer": {"max_stepz": 3}}, "max_stepz.*'max_steps'"),
        ({"trainers.max_steps": 3}, "trainers.*'trainer'"),
        ({"max_steps": 3}, "has no key 'max_steps'. Did you mean 'trainer.max_steps'"),
        ({"algorithm": "grop"}, "grop"),
        ({"fake_devices": -1}, "fake_devices=-1 must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            podrl.run("grpo_gemma.py", overrides, workdir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"no such file.*'grpo_gemma\.py'"):
        podrl.run("grpo_gema.py")
    assert not (tmp_path / "run").exists()


def test_all_refused_fields_are_told_at_once_and_what_asks_for_nothing_is_passed_over():
    asking = {"metrics_prefix": "a", "max_stepz": 1, "rollout_micro_batch_size": 4}
    with pytest.raises(ValueError, match=r"(?s)field metrics_prefix: .*field max_stepz\. Did.*rollout_micro_batch"):
        podrl.RLTrainingConfig(eval_every_n_steps=0, **asking)
    plain = podrl.RLTrainingConfig(eval_every_n_steps=0)
    assert podrl.RLTrainingConfig(eval_every_n_steps=0, profiler_options=None, checkpointing_options=None) == plain
    with pytest.raises(ValueError, match="max_stepz"):
        podrl.RLTrainingConfig(eval_every_n_steps=0, max_stepz=None)


def test_a_mesh_with_the_axes_of_a_tunix_script_is_taken_and_another_is_one_sentence():
    training, devices = podrl.RLTrainingConfig(eval_every_n_steps=0), np.array(jax.devices())

    def config(mesh):
        roles = {podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}
        return podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=podrl.RolloutConfig())

    for shape, names in (((4, 2), ("fsdp", "tp")), ((2, 4), ("model", "fsdp"))):
        theirs = jax.sharding.Mesh(devices.reshape(shape), names)
        mine = config(theirs).role_to_mesh[podrl.Role.ACTOR]
        assert mine.shape == {"data": 1, "fsdp": 4, "tensor": 2}
        assert mine.devices[0, 3, 1] == (theirs.devices[3, 1] if names[0] == "fsdp" else theirs.devices[1, 3])
    with pytest.raises(ValueError, match=r"Role\.ACTOR a mesh with the axes \('fsdp', 'stage'\).*'tp' and 'model' are"):
        config(jax.sharding.Mesh(devices.reshape(4, 2), ("fsdp", "stage")))


@pytest.mark.parametrize(("name", "cls"), [("grpo", podrl.GRPOConfig), ("ppo", podrl.PPOConfig)])
def test_an_algorithm_has_the_same_defaults_from_python_and_from_the_command(name, cls):
    mine, commanded = cls(), cls(**unset(name)[name])
    names = {"policy_loss_fn", "kl_method"}  # left out: one value of these fields has several spellings
    fields = {field.name for field in dataclasses.fields(cls)} - names
    assert {f: getattr(mine, f) for f in fields} == {f: getattr(commanded, f) for f in fields}
    assert mine.policy_loss(64).formula() == commanded.policy_loss(64).formula()
    assert canonical_mode(mine.reward_kl.mode) == canonical_mode(commanded.reward_kl.mode)
    assert mine.warnings(1) == commanded.warnings(1) == []


def test_roles_are_those_of_the_field_and_a_teacher():
    assert {r.name: r.value for r in podrl.Role} == {
        "ACTOR": "actor",
        "CRITIC": "critic",
        "REFERENCE": "reference",
        "REWARD": "reward",
        "ROLLOUT": "rollout",
        "TEACHER": "teacher",
    }


def trl_settings():
    """Lists TRL's settings in the table of docs/from-trl.md, except settings that have the same name in podrl."""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "from-trl.md").read_text()
    rows = [line.split(" | ")[0] for line in page.split("## What is called what")[1].split("\n## ")[0].splitlines()]
    names = {name for row in rows[4:] if "(reward_funcs" not in row for name in re.findall(r"`(\w+?)_?[*=`\"]", row)}
    fields = {field.name for cls in (podrl.GRPOConfig, podrl.RolloutConfig) for field in dataclasses.fields(cls)}
    of_the_trainer = {"model", "train_dataset", "eval_dataset", "tools", "environment_factory", "token", "sequence"}
    return sorted(names - fields - of_the_trainer)


@pytest.mark.parametrize("name", trl_settings())
def test_a_setting_of_trl_is_answered_with_the_setting_of_podrl(name):
    name = "vllm_mode" if name == "vllm" else name
    with pytest.raises(ValueError, match=rf"GRPOConfig has no field {name}: \w"):
        podrl.GRPOConfig(**{name: "asked for"})


# By class of podrl: public methods and properties of Tunix's class (rl_cluster.py, rl_learner.py), and methods of
# transformers and TRL that users may try.
SURFACE = {
    podrl.RLCluster: (
        "actor_trainer buffer_metrics buffer_metrics_async close cluster_config critic_trainer generate "
        "get_actor_per_token_logps get_old_per_token_logps get_ref_per_token_logps get_rewards get_rollout_config "
        "get_values global_steps inference_worker perf perf_v2 r2m rollout sync_weights update_actor update_critic "
        "with_external_metrics_logger save_pretrained save_model save_checkpoint push_to_hub"
    ),
    podrl.GRPOLearner: "algo_config can_enable_async_rollout rl_cluster should_sync_weights train "
    "save_pretrained save_model save_checkpoint push_to_hub evaluate",
}


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in SURFACE.items() for name in names.split()])
def test_methods_and_properties_of_others_are_there_or_say_the_way_of_podrl(cls, name):
    if not hasattr(cls, name):
        with pytest.raises(AttributeError, match=rf"{name} does not exist in podrl: .+\.$"):
            getattr(cls, name)


@pytest.mark.parametrize(
    ("call", "name", "way"),
    [
        (podrl.RLCluster.generate, "micro_batch_size", "RolloutConfig"),
        (podrl.RLCluster.generate, "trace_tags", "spans.jsonl"),
        (podrl.GRPOLearner.train, "skip_jit", "JAX_DISABLE_JIT"),
    ],
)
def test_arguments_of_tunix_are_refused_with_the_way_of_podrl(call, name, way):
    with pytest.raises(TypeError, match=rf"has no argument '{name}': .*{way}"):
        call(None, [], **{name: 4})
    with pytest.raises(AttributeError, match="NoneType"):  # None counts as an omitted argument
        call(None, [], **{name: None})


@pytest.mark.parametrize(
    ("call", "name", "way"),
    [
        (podrl.RLCluster.update_actor, "skip_jit", "JAX_DISABLE_JIT"),
        (podrl.RLCluster.update_critic, "eval_ds", "learner.train"),
        (podrl.RLCluster.get_ref_per_token_logps, "prompt_tokens", "tokens_BT"),
        (podrl.RLCluster.get_old_per_token_logps, "micro_batch_size", "train_micro_batch_size"),
        (podrl.RLCluster.get_actor_per_token_logps, "temperature", "RolloutConfig"),
        (podrl.RLCluster.buffer_metrics_async, "step", "written next"),
    ],
)
@pytest.mark.parametrize("value", [np.ones((2, 3)), 4], ids=["array", "number"])
def test_arguments_of_methods_of_tunix_are_refused_whatever_their_value(call, name, way, value):
    with pytest.raises(TypeError, match=rf"has no argument '{name}': .*{way}"):
        call(None, **{name: value})


def test_adapters_are_asked_for_as_in_podrl():
    with pytest.raises(TypeError, match=r"RLCluster has no argument 'peft_config': give lora=podrl\.LoraConfig"):
        podrl.RLCluster(peft_config=object())


def test_the_name_of_a_file_is_no_list_of_prompts():
    learner = types.SimpleNamespace(cluster=types.SimpleNamespace(training_config=None), _trained_to=0)
    with pytest.raises((TypeError, ValueError), match=r"train_ds='pens\.jsonl' .*list of records"):
        podrl.GRPOLearner.train(learner, "pens.jsonl")


def test_metrics_may_say_how_several_values_become_one():
    metrics = UserMetrics()
    for value in (1.0, 5.0):
        metrics.add({"plain": value, "most": (value, max), "unsaid": (value, None)})
    assert metrics.take() == {"plain": 3.0, "most": 5.0, "unsaid": 3.0} and metrics.take() == {}


@pytest.mark.parametrize("cls", [podrl.LoraConfig, podrl.CheckpointConfig, podrl.RewardConfig])
def test_settings_may_be_a_dict_of_their_fields(cls):
    field = dataclasses.fields(cls)[0]
    value = {podrl.LoraConfig: 4, podrl.CheckpointConfig: 7, podrl.RewardConfig: ("number",)}[cls]
    assert as_settings(cls, {field.name: value}, "it") == as_settings(cls, cls(**{field.name: value}), "it")
    with pytest.raises(ValueError, match=r"has no .*nothing"):
        as_settings(cls, {"nothing": 1}, "it")
    with pytest.raises(ValueError, match=f"it=7 must be a {cls.__name__}, or a dict of its fields"):
        as_settings(cls, 7, "it")


@pytest.mark.parametrize("name", ["GRPO", "PPO"])
def test_the_seed_that_shuffles_prompts_is_sent_to_the_learner(name):
    with pytest.raises(ValueError, match=rf"data_shuffle_seed: it is an argument of {name}Learner"):
        getattr(podrl, f"{name}Config")(data_shuffle_seed=3)
    assert "data_shuffle_seed" in inspect.signature(getattr(podrl, f"{name}Learner")).parameters
