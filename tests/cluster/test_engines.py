"""Engines by name and by class: their abilities, and which engines are refused."""

import dataclasses
from typing import Any

import jax
import pytest

import podrl
from podrl.cluster.engines import ENGINES, able, engine_class
from podrl.cluster.worker import rollout_worker
from podrl.data.tokenizer import Tokenizer
from podrl.job.config import parse, unset
from podrl.rollout.worker import RolloutWorker

# Classes that a user's file may hold: an engine that keeps its arguments, and an engine that lacks most methods.
MINE = """
class Engine:
    def __init__(self, model, mesh, config, **settings):
        self.config, self.settings = config, settings
    def generate(self, policy, prompts, **more): ...
    def warm_up(self, params, progress=None): ...
    def sleep(self): ...
    def wake(self): ...

class Half:
    def generate(self, policy, prompts, **more): ...
    def sleep(self): ...
"""


class Plain:
    """An engine that makes whole batches and declares no abilities."""


class Telling:
    abilities = frozenset({"tells"})


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def configured(engine, rollout: Any = None, **more):
    mesh = podrl.make_mesh("data=1", jax.devices()[:1])
    roles = {podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}
    training = podrl.RLTrainingConfig(max_steps=1, eval_every_n_steps=0)
    rollout = rollout or podrl.RolloutConfig(engine=engine, lanes=3)
    return podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout, **more), mesh


def test_every_engine_that_can_be_named_is_there():
    assert {engine_class(name) for name in ENGINES} == {RolloutWorker}
    assert engine_class(Plain) is Plain


@pytest.mark.parametrize("ability", ["windows", "greedy_members", "tells"])
def test_an_engine_is_able_to_do_what_it_says(ability):
    assert able("vanilla", ability) and able(RolloutWorker, ability)
    assert not able(Plain, ability)
    assert able(Telling, ability) == (ability == "tells")


def test_a_setting_names_an_engine_of_a_users_file(mine):
    config, mesh = configured(f"{mine}:Engine")
    tokenizer = Tokenizer(podrl.TINY)
    model: Any = None
    made: Any = rollout_worker(config, model, mesh, mesh, tokenizer, seed=5)
    assert type(made).__name__ == "Engine" and made.config.lanes == 3
    assert made.settings["seed"] == 5 and made.settings["pad_id"] == tokenizer.pad_id
    assert not able(config.rollout_engine, "windows")
    assert dataclasses.replace(config).rollout_engine == config.rollout_engine
    with pytest.raises(ValueError, match="both name an engine"):
        configured(f"{mine}:Engine", rollout_engine=Plain)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", r"rollout\.engine='vllm' must be 'vanilla', 'podrl', 'file\.py:Class'"),
        ("{}:Engin", r"rollout\.engine=.* no function or class 'Engin'; it has Engine, Half\. Did you mean 'Engine'\?"),
        ("{}:Half", r"rollout\.engine=.* lacks warm_up, wake: an engine is a class"),
        ("nowhere.py:Engine", r"rollout\.engine=.*nowhere\.py does not exist"),
    ],
)
def test_a_job_refuses_an_engine_that_it_cannot_use(mine, name, message):
    values = unset("grpo")
    values["trainer"] |= {"max_steps": 1, "eval_every_n_steps": 0}
    values["rollout"]["engine"] = name.format(mine)
    with pytest.raises(ValueError, match=message):
        parse(values)


@pytest.mark.parametrize(
    ("setting", "group", "changed"),
    [
        ("rollout\\.clock='wall'", "rollout", {"clock": "wall"}),
        ("rollout\\.window_tokens=8", "rollout", {"window_tokens": 8}),
        ("env\\.calls_per_window=1", "env", {"calls_per_window": 1}),
    ],
)
def test_settings_of_windows_need_an_engine_of_windows_before_anything_is_loaded(mine, setting, group, changed):
    values = unset("grpo")
    values["trainer"] |= {"max_steps": 1, "eval_every_n_steps": 0}
    values["rollout"]["engine"] = f"{mine}:Engine"
    values["grpo"]["max_staleness"] = 2
    values[group] |= changed
    message = setting + r" .* rollout\.engine='.*:Engine' does not declare the ability 'windows'"
    with pytest.raises(ValueError, match=message):
        parse(values)
    if group == "rollout":
        with pytest.raises(ValueError, match=message.replace("rollout\\", "RolloutConfig\\")):
            configured("podrl", podrl.RolloutConfig(engine=f"{mine}:Engine", **changed))


def test_each_setting_of_evaluations_is_honoured_or_refused_by_name():
    """Changes every field of rollout_config[Mode.EVAL] in turn."""
    base = podrl.RolloutConfig(top_k=5)
    changed = {field.name: f"another {field.name}" for field in dataclasses.fields(base)}
    changed |= {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens_to_generate": 7}
    honoured = set()
    for name, value in changed.items():
        own = dataclasses.replace(base)
        # Made-up values stand for fields that are added later, too. The checks of the class would refuse them.
        object.__setattr__(own, name, value)
        try:
            config, _ = configured("podrl", rollout={podrl.Mode.TRAIN: base, podrl.Mode.EVAL: own})
        except ValueError as error:
            assert f"rollout_config[Mode.EVAL].{name}={value!r}" in str(error)
        else:
            honoured.add(name)
            if name != "return_logprobs":  # log-probabilities always come
                key = "max_new" if name == "max_tokens_to_generate" else name
                assert getattr(config.eval_sampling(), key) == value
    assert honoured == {"temperature", "top_p", "top_k", "min_p", "max_tokens_to_generate", "return_logprobs"}
    longer = dataclasses.replace(base, max_tokens_to_generate=65)
    with pytest.raises(ValueError, match=r"Mode\.EVAL\]\.max_tokens_to_generate=65 .*Mode\.TRAIN, 64: give at most"):
        configured("podrl", rollout={podrl.Mode.TRAIN: base, podrl.Mode.EVAL: longer})
    with pytest.raises(ValueError, match="rollout_config has the key 'eval'"):
        configured("podrl", rollout={podrl.Mode.TRAIN: base, "eval": base})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rollout_config": None}, "rollout_config=None must be a RolloutConfig, or a mapping"),
        (
            {"rollout_config": {podrl.Mode.TRAIN: {"temperature": 1.0}}},
            r"rollout_config\[Mode\.TRAIN\]=.* must be a RolloutConfig",
        ),
        ({"training_config": None}, "training_config=None must be RLTrainingConfig"),
        ({"role_to_mesh": None}, "role_to_mesh=None must be a mapping of roles to meshes"),
    ],
)
def test_wrong_types_of_a_cluster_are_refused_by_name(changed, words):
    config, _ = configured("podrl")
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config, **changed)
