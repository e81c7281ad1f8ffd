"""Arguments of the Python API that are None or of another kind are refused in a sentence that names the argument."""

import dataclasses
from typing import Any

import jax
import pytest

import podrl
from podrl.engine.config import RolloutConfig
from podrl.learner.grpo import GRPO

TRAINING = podrl.RLTrainingConfig(max_steps=1, eval_every_n_steps=0)


@pytest.fixture(scope="module")
def cluster_config():
    mesh = podrl.make_mesh("fsdp=1", jax.devices()[:1])
    meshes = dict.fromkeys((podrl.Role.ACTOR, podrl.Role.ROLLOUT), mesh)
    return podrl.ClusterConfig(role_to_mesh=meshes, training_config=TRAINING, rollout_config=RolloutConfig())


@pytest.fixture(scope="module")
def cluster(cluster_config):
    return podrl.RLCluster(actor="tiny", cluster_config=cluster_config)


@pytest.mark.parametrize("value", [None, {}, "config"])
def test_a_cluster_needs_a_configuration(value):
    with pytest.raises(ValueError, match=r"cluster_config=.* must be a podrl\.ClusterConfig"):
        podrl.RLCluster(actor="tiny", cluster_config=value)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("actor", {"actor": None}), ("actor", {"actor": 3}), ("tokenizer", {"actor": "tiny", "tokenizer": 3})],
)
def test_a_cluster_needs_models(cluster_config, name, arguments):
    with pytest.raises(ValueError, match=f"RLCluster: {name}=.* must be "):
        podrl.RLCluster(cluster_config=cluster_config, **arguments)


@pytest.mark.parametrize("value", [None, "cluster"])
def test_a_learner_needs_a_cluster(value):
    learners: tuple[tuple[Any, Any], ...] = (
        (podrl.GRPOLearner, podrl.GRPOConfig()),
        (podrl.PPOLearner, podrl.PPOConfig()),
    )
    for learner, config in learners:
        with pytest.raises(ValueError, match=r"rl_cluster=.* must be a podrl\.RLCluster"):
            learner(value, config)


def test_a_learner_needs_its_own_settings_and_functions(cluster):
    wrong: tuple[Any, ...] = (None, {}, podrl.PPOConfig())
    for value in wrong:
        with pytest.raises(ValueError, match=r"must be a podrl\.GRPOConfig"):
            podrl.GRPOLearner(cluster, value)
    wrong = (None, 3)
    for value in wrong:
        with pytest.raises(ValueError, match=f"reward_fns={value} must be a function, a name"):
            podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_fns=value)


@pytest.mark.parametrize("value", [None, 3])
def test_records_and_prompts_are_lists(cluster, value):
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_fns="number")
    with pytest.raises(ValueError, match=f"train_ds={value} must be a list of records"):
        learner.train(value)
    with pytest.raises(ValueError, match=f"prompts={value} must be a list of texts"):
        cluster.generate(value)


def test_no_records_are_refused_under_the_name_of_the_argument(cluster):
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_fns="number")
    with pytest.raises(ValueError, match=r"^train_ds=\[\] is empty: it must have at least one prompt or record\.$"):
        learner.train([])


@pytest.mark.parametrize("more", [{"checkpoint": {"every": 1}}, {"save_every": 1}])
def test_checkpoints_without_a_place_are_refused(cluster, more):
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(num_generations=2), reward_fns="number")
    with pytest.raises(ValueError, match=r"no place for checkpoints: set RLTrainingConfig\(checkpoint_root_directory"):
        learner.train(["1 + 1 ="] * 2, prompts_per_step=2, **more)


@pytest.mark.parametrize(("name", "why"), [("nope", "is not a built-in reward"), ("no.py:f", "does not exist")])
def test_a_reward_function_that_is_nowhere_is_refused_when_the_learner_is_made(cluster, name, why):
    with pytest.raises(ValueError, match=rf"^reward_fns='{name}'.*{why}"):
        podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_fns=name)
    with pytest.raises(ValueError, match=rf"^RewardConfig\.fns='{name}'.*{why}"):
        podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_config=podrl.RewardConfig(fns=(name,)))


def test_the_error_about_missing_evaluations_says_what_0_means():
    with pytest.raises(
        TypeError, match=r"RLTrainingConfig: .*'eval_every_n_steps'\. 0 evaluates only before and after"
    ):
        podrl.RLTrainingConfig(max_steps=1)  # pyright: ignore[reportCallIssue]


def test_fewer_micro_batches_than_wished_are_said_once_when_training_begins(cluster):
    said: list[str] = []
    few = dataclasses.replace(TRAINING, gradient_accumulation_steps=1000)
    cluster = podrl.RLCluster(actor="tiny", cluster_config=dataclasses.replace(cluster.config, training_config=few))
    GRPO(cluster, podrl.GRPOConfig(), samples=16, log=said.append)
    (text,) = [text for text in said if "gradient_accumulation_steps" in text]
    assert text.startswith("Warning: trainer.gradient_accumulation_steps=1000 is more than an update can have here")


def needs_target(prompts, completions, target, **fields):
    return [0.0] * len(completions)


def needs_target_by_name(prompts, completions, *, target):
    return [0.0] * len(completions)


def takes_nothing():
    return []


def takes_one_place(texts, /):
    return [0.0] * len(texts)


def takes_three_places(prompts, completions, target, /):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (needs_target, r"^Prompt 0 has no field 'target' \(it has question, goal\), which needs_target of reward_fns"),
        (needs_target_by_name, r"^Prompt 0 has no field 'target' \(it has question, goal\)"),
        (lambda prompts, completions, target: [], r"^Prompt 0 has no field 'target' \(it has question, goal\)"),
        (takes_nothing, r"^reward_fns: reward function takes_nothing has no argument for the prompts"),
        (takes_one_place, r"^reward_fns: .* is defined with \(texts/, \.\.\.\), .* and it takes fewer"),
        (takes_three_places, r"target/, \.\.\.\), .* and the others come by name, which '/' forbids"),
    ],
)
def test_a_function_with_other_arguments_is_refused_before_anything_is_sampled(cluster, function, reason):
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_fns=function)
    with pytest.raises(ValueError, match=reason):
        learner.train([{"prompt": "1 + 1 =", "goal": 2}] * 2, prompts_per_step=2)
    assert "rollout" not in vars(cluster), "the engine was made"


def test_held_out_records_have_the_fields_of_functions_too(cluster):
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(), reward_fns=needs_target)
    with pytest.raises(ValueError, match=r"^Held-out prompt 0 has no field 'target' \(it has question\)"):
        learner.train([{"prompt": "1 + 1 =", "target": 2}] * 2, ["1 + 2 ="], prompts_per_step=2)


def test_roles_are_answered_with_the_meshes_of_the_cluster(cluster_config):
    for call in (
        lambda: podrl.RLCluster(actor="tiny", cluster_config=cluster_config, roles={}),  # pyright: ignore[reportCallIssue]
        lambda: podrl.GRPOLearner(None, None, roles={}),  # pyright: ignore[reportCallIssue, reportArgumentType]
        lambda: podrl.ClusterConfig(roles={}),  # pyright: ignore[reportCallIssue]
    ):
        with pytest.raises((TypeError, ValueError), match=r"roles'?: .*role_to_mesh=\{podrl\.Role\.ACTOR: mesh"):
            call()
