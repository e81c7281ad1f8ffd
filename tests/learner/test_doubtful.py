"""A job names the settings that nothing in it reads, and doubtful values; it says nothing about any other setting."""

import json
import pathlib

import pytest
from ml_collections import ConfigDict

from podrl.algorithms.presets import PRESETS
from podrl.job.config import complete, parse
from podrl.job.config_file import find_config, load_config
from podrl.job.doubtful import doubtful

TOOLS = {"rollout": {"max_response_tokens": 80}, "env": {"tools": ("calculator",)}}


def job(algorithm, **sections):
    values = {"algorithm": algorithm, **sections}
    values["rollout"] = {"max_prompt_length": 32, **sections.get("rollout", {})}
    values["trainer"] = {"max_steps": 10, "eval_every_n_steps": 0, **sections.get("trainer", {})}
    return parse(ConfigDict(complete(values)).to_dict())


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        ("grpo", {"env": {"max_tool_calls": 3, "deadline_s": 5.0}}, "env.max_tool_calls=3, env.deadline_s=5.0 have no"),
        ("grpo", {**TOOLS, "env": {"tools": ("calculator",), "server_deadline_s": 5.0}}, "env.server_deadline_s=5.0"),
        ("grpo", {"data": {"curriculum": {"easy_rate": 0.9}}}, "data.curriculum.easy_rate=0.9"),
        (
            "grpo",
            {"data": {"curriculum": {"retire_after": 2, "postpone_steps": 5}}},
            "data.curriculum.postpone_steps=5 has no effect: data.curriculum.postpone_after=0",
        ),
        ("grpo", {"scratch": {"window": 32}}, "scratch.window=32 has no effect: model.path='tiny'"),
        ("grpo", {"model": {"lora": {"alpha": 8.0}}}, "model.lora.alpha=8.0 has no effect: model.lora.rank=0"),
        ("grpo", {"reward": {"model_weight": 2.0}}, "reward.model_weight=2.0 has no effect: reward.model is empty"),
        ("grpo", {"eval": {"problems": 0, "samples": 9}}, "eval.samples=9 has no effect: eval.problems=0"),
        ("grpo", {"eval": {"problems": 0}, "trainer": {"eval_every_n_steps": 5}}, "trainer.eval_every_n_steps=5"),
        ("grpo", {"trainer": {"critic_learning_rate": 0.5}}, "trainer.critic_learning_rate=0.5"),
        ("reward_model", {"trainer": {"balance_coef": 0.5}}, "trainer.balance_coef=0.5 has no effect: a reward model"),
        ("grpo", {"trainer": {"end_fraction": 0.5}}, "trainer.end_fraction=0.5 has no effect: trainer.schedule"),
        ("grpo", {"data": {"eval_fraction": 0.5}}, "data.eval_fraction=0.5"),
        ("grpo", {"log": {"project": "mine"}}, "log.project='mine'"),
        ("grpo", {"log": {"trace": "off", "trace_mb": 5}}, "log.trace_mb=5 has no effect: log.trace='off'"),
        ("grpo", {"grpo": {"overlong_buffer": 5}}, "grpo.overlong_buffer=5 has no effect: grpo.overlong_shaping=False"),
        ("grpo", {"grpo": {"kl_horizon": 5.0}}, "grpo.kl_horizon=5.0 has no effect: grpo.kl_target is None"),
        ("grpo", {"grpo": {"beta": 0.0, "kl_loss_mode": "k2"}}, "grpo.kl_loss_mode='k2' has no effect: grpo.beta=0"),
        ("grpo", {"grpo": {"teacher_rate": 0.5}}, "grpo.teacher_rate=0.5 has no effect: grpo.teacher_coef=0"),
        ("grpo", {"grpo": {"gamma": 0.5}}, "grpo.gamma=0.5 has no effect: the advantage estimator grpo"),
        ("rloo", {"grpo": {"advantage_ddof": 0}}, "grpo.advantage_ddof=0 has no effect: the advantage estimator rloo"),
        ("sft", {"rollout": {"prompts_per_step": 9}}, "rollout.prompts_per_step=9 has no effect: algorithm=sft"),
        (
            "grpo",
            {"roles": {"trainer": {"hosts": "0-1"}}},
            "roles.trainer.hosts='0-1' has no effect: the job has one process",
        ),
        ("grpo", {"trainer": {"learning_rate": 1.0}}, "trainer.learning_rate=1 moves every weight"),
    ],
)
def test_a_setting_that_nothing_reads_is_named(algorithm, changes, words):
    (text,) = doubtful(job(algorithm, **changes))
    assert words in text


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("grpo", {**TOOLS, "env": {"tools": ("calculator",), "max_tool_calls": 3, "retries": 2}}),
        ("grpo", {"data": {"curriculum": {"easy_share": 0.5, "easy_rate": 0.9}}}),
        ("grpo", {"model": {"path": "scratch"}, "scratch": {"window": 32}}),
        ("grpo", {"model": {"lora": {"rank": 4, "alpha": 8.0}}}),
        ("grpo", {"trainer": {"schedule": "cosine", "end_fraction": 0.5}}),
        ("grpo", {"grpo": {"overlong_shaping": True, "overlong_buffer": 5}}),
        ("reinforce_pp", {"grpo": {"gamma": 0.5}}),
        ("ppo", {"trainer": {"critic_learning_rate": 0.05}, "ppo": {"gamma": 0.5, "gae_lambda": 0.5}}),
    ],
)
def test_a_setting_that_is_read_is_not_named(algorithm, changes):
    assert doubtful(job(algorithm, **changes)) == []


@pytest.mark.parametrize(("batch", "warned"), [(4, True), (3, False)])
def test_a_batch_larger_than_the_data_is_named(tmp_path, batch, warned):
    pairs = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": "no"} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = doubtful(job("dpo", data={"path": f"{tmp_path}/p.jsonl"}, dpo={"batch_size": batch}))
    assert [f"dpo.batch_size={batch} is more than the 3 records" in text for text in found] == [True] * warned


CONFIGS = sorted(path.name for path in pathlib.Path(find_config("grpo_gemma.py")).parent.glob("[a-z]*.py"))
CONFIGS.remove("grpo_reasoning.py")  # its data need a package that is not installed everywhere
VARIANTS = {"grpo_qwen.py": ":qwen3_06b_v6e8", "grpo_real.py": ":qwen3_06b_v6e8"}


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [*((name, "") for name in CONFIGS), *(("grpo_gemma.py", one) for one in PRESETS)],
)
def test_the_configurations_of_podrl_have_no_such_setting(name, algorithm):
    values = load_config(find_config(name + VARIANTS.get(name, "")))
    values.algorithm = algorithm or values.get("algorithm", "grpo")
    whole = ConfigDict(complete(values.to_dict())).to_dict()
    whole["rollout"]["max_prompt_length"] = whole["rollout"]["max_prompt_length"] or 64
    if algorithm == "opd":
        whole["model"]["reference"] = "tiny"
    assert doubtful(parse(whole)) == []


def test_colocated_roles_cannot_overlap():
    """Checks that max_staleness beside colocated roles is named, except in a pod, whose hosts have one role each."""
    colocated = {"roles": {"colocated": True}}
    assert doubtful(job("grpo", **colocated)) == []
    async_ = job("grpo", grpo={"max_staleness": 1}, **colocated)
    (found,) = doubtful(async_)
    assert found.startswith("grpo.max_staleness=1 lets") and found.endswith("set roles.colocated=False.")
    assert doubtful(async_, pod=True) == doubtful(job("grpo", grpo={"max_staleness": 1})) == []


def test_one_record_is_too_few_but_for_a_game(tmp_path):
    (tmp_path / "games.jsonl").write_text('{"question": "Guess.", "answer": ""}\n')
    few = {"eval": {"problems": 0}, "data": {"path": f"{tmp_path}/games.jsonl"}}
    with_turns = {**few, "rollout": {"max_response_tokens": 64}}
    for found in (
        doubtful(job("grpo", **few)),
        doubtful(job("grpo", **with_turns, env={"tools": ("calculator",)})),
    ):
        assert "rollout.prompts_per_step=8 is more than the 1 record" in found[0]
    assert doubtful(job("grpo", **with_turns, env={"environment": "guess.py:GuessNumber"})) == []


def test_more_problems_than_held_out_records_are_named(tmp_path):
    for name in ("train", "held"):
        records = [{"question": f"{name} {i}", "answer": f"{i}"} for i in range(9)]
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    paths = {"path": f"{tmp_path}/train.jsonl", "eval_path": f"{tmp_path}/held.jsonl"}
    found = doubtful(job("grpo", eval={"problems": 50}, data=paths))
    assert "eval.problems=50 is more than the 9 held-out records: set it to at most 9." in found
