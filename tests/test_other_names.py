"""Names of TRL's settings are answered with podrl's, wherever a user may write them."""

import re

import pytest
from absl import flags
from ml_collections import ConfigDict

import podrl
from podrl.config import COMMON_ADVICE, COMMON_NAMES, merge
from podrl.job.config import unset
from podrl.launch import _check_overrides, _unknown_flag  # pyright: ignore[reportPrivateUsage]
from podrl.python_names import in_python

# For each setting of TRL, a word of podrl's answer.
ANSWERS = {
    "report_to": "log.to",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "per_device_eval_batch_size": "rollout.prompts_per_step",
    "num_train_epochs": "trainer.max_steps",
    "output_dir": "--workdir=DIR",
    "warmup_steps": "trainer.warmup_fraction",
    "warmup_ratio": "warmup_fraction",
    "logging_steps": "log.console_every",
    "save_steps": "every",
    "eval_steps": "eval_every_n_steps",
    "bf16": "trainer.dtype",
    "fp16": "trainer.dtype",
    "use_vllm": "own engine",
    "vllm_mode": "own engine",
    "seed": "--config.seed=N",
    "remove_unused_columns": "all fields of a record",
    "gradient_checkpointing": "trainer.remat",
    "lr_scheduler_type": "schedule",
    "num_iterations": "grpo.num_iterations",
    "steps_per_generation": "trainer.mini_batch_size",
    "scale_rewards": "grpo.advantage_scale",
    "mask_truncated_completions": "grpo.overlong_filter",
    "reward_weights": "reward.weights",
    "resume_from_checkpoint": "resumes",
}


CONFIG = merge(unset("grpo"), {"trainer": {"eval_every_n_steps": 0}})  # a key without a default


def _override(group):
    def write(name):
        _check_overrides([f"--config.{group}{name}=1"], ConfigDict(CONFIG))

    return write


def _flag(name):
    raise ValueError(_unknown_flag(flags.UnrecognizedFlagError(name, f"--{name}=1"), CONFIG))


PLACES = {
    "--config.trainer.X": _override("trainer."),
    "--config.rollout.X": _override("rollout."),
    "--config.grpo.X": _override("grpo."),
    "--config.X": _override(""),
    "--X": _flag,
    "RLTrainingConfig": lambda name: podrl.RLTrainingConfig(eval_every_n_steps=0, **{name: 1}),
    "RolloutConfig": lambda name: podrl.RolloutConfig(**{name: 1}),
    "GRPOConfig": lambda name: podrl.GRPOConfig(**{name: 1}),
    "PPOConfig": lambda name: podrl.PPOConfig(**{name: 1}),
    "RewardConfig": lambda name: podrl.RewardConfig(**{name: 1}),
    "CheckpointConfig": lambda name: podrl.CheckpointConfig(**{name: 1}),
    "LoraConfig": lambda name: podrl.LoraConfig(**{name: 1}),
    "ClusterConfig": lambda name: podrl.ClusterConfig(**{name: 1}),
    "RLCluster": lambda name: podrl.RLCluster(**{name: 1}),
    "GRPOLearner": lambda name: podrl.GRPOLearner(None, None, **{name: 1}),  # pyright: ignore[reportArgumentType]
    "PPOLearner": lambda name: podrl.PPOLearner(None, None, **{name: 1}),  # pyright: ignore[reportArgumentType]
    "learner.train": lambda name: podrl.GRPOLearner.train(object.__new__(podrl.GRPOLearner), [], **{name: 1}),
    "podrl.run": lambda name: podrl.run("grpo_gemma.py", **{name: 1}),
    "podrl.run, overrides": lambda name: podrl.run("grpo_gemma.py", {name: 1}, workdir="never"),
    "podrl.run, overrides of trainer": lambda name: podrl.run("grpo_gemma.py", {f"trainer.{name}": 1}, workdir="never"),
}
# (name, place) pairs for which podrl has a setting with TRL's name, so that nothing is refused.
OWN = {
    ("seed", "--config.rollout.X"),
    ("seed", "--config.X"),
    ("seed", "RolloutConfig"),
    ("seed", "RLCluster"),
    ("seed", "podrl.run, overrides"),
    ("num_iterations", "--config.grpo.X"),
    ("num_iterations", "GRPOConfig"),
    ("num_iterations", "PPOConfig"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ANSWERS)
def test_a_setting_of_trl_is_answered_wherever_it_is_written(name, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if (name, place) in OWN:
        pytest.skip("podrl has a setting of this name here")
    with pytest.raises((ValueError, TypeError)) as caught:
        PLACES[place](name)
    said = str(caught.value)
    answer = ANSWERS[name] if place.startswith(("--", "podrl.run")) else in_python(ANSWERS[name]).partition(". ")[0]
    assert name in said and answer in said, said
    assert "Known:" not in said and said.endswith((".", "?")), said


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("model", "RLCluster(actor=...)"),
        ("args", "RLTrainingConfig"),
        ("train_dataset", "learner.train(records)"),
        ("eval_dataset", "learner.train(records, eval_records)"),
        ("processing_class", "tokenizer=DIR"),
        ("peft_config", "podrl.LoraConfig"),
        ("reward_funcs", "'reward_fns'"),
        ("reward_weights", "podrl.RewardConfig(weights="),
        ("callbacks", "metric_fns are called every step"),
    ],
)
@pytest.mark.parametrize("learner", [podrl.GRPOLearner, podrl.PPOLearner])
def test_an_argument_of_trls_trainer_is_answered_by_the_learner(learner, name, answer):
    with pytest.raises(TypeError, match=rf"^{learner.__name__} has no argument '{name}'.*{re.escape(answer)}"):
        learner(None, None, **{name: 1})


def test_an_argument_of_train_is_refused_under_the_name_of_the_learner():
    with pytest.raises(TypeError, match=r"^GRPOLearner\.train has no argument 'report_to': .*log\.to"):
        podrl.GRPOLearner.train(object.__new__(podrl.GRPOLearner), [], report_to="wandb")  # pyright: ignore[reportCallIssue]


def test_a_name_has_one_answer_and_every_answer_is_a_sentence():
    assert not COMMON_NAMES.keys() & COMMON_ADVICE.keys()
    assert [name for name, text in COMMON_ADVICE.items() if not text.endswith(".")] == []


def test_false_passes_where_it_asks_for_nothing():
    assert podrl.GRPOConfig(use_vllm=False, bf16=False, report_to=None) == podrl.GRPOConfig()  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"GRPOConfig has no field scale_rewards: .*'none'"):
        podrl.GRPOConfig(scale_rewards=False)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("flag", "answer"),
    [("dta.seed", "has no key 'dta'.*'data'"), ("confg.seed", "'config'"), ("traner.bf16", "'traner'.*'trainer'")],
)
def test_a_misspelt_group_is_named_before_a_name_of_another_system(flag, answer):
    with pytest.raises(ValueError, match=answer):
        _check_overrides([f"--config.{flag}=1"], ConfigDict(CONFIG))
