"""The dry run of every algorithm: formula, numbers, and its batch arithmetic in plain words."""

import io

import jax
import pytest
from ml_collections import ConfigDict

from podrl.algorithms.presets import PRESETS
from podrl.job import describe, job, placement
from podrl.job.config import complete, parse
from podrl.launch import find_config, load_config
from podrl.mesh.build import make_mesh
from podrl.rundir.console import make_console

TELLS = {
    "grpo": ("clip(r, 0.8, 1.2)", "0.04 KL: k3"),
    "dr_grpo": ("R - mean of the group\n", "/ 40)"),
    "dapo": ("clip(r, 0.8, 1.28)", "dynamic sampling", "32 tokens, then down to -1 at 40"),
    "gspo": ("clip(s, 0.9997, 1.0004)",),
    "rloo": ("other samples", "- 0.05 KL to the reference (k1)"),
    "reinforce_pp": ("whitened", "- 0.01 KL to the reference (k1)"),
    "remax": ("greedy completion",),
    "ppo": ("lambda 0.95", "- 0.04 KL to the reference (k3)", "critic: max((v - R)^2"),
    "tunix_grpo": ("Warning: grpo.kl_loss_mode='kl' in the loss has zero expected gradient",),
}


def planned(name, critic=None, **changes):
    """Plans the default configuration with another algorithm: (job, everything a run prints first)."""
    values = load_config(find_config("grpo_gemma.py")).to_dict() | {"algorithm": name}
    values["rollout"] |= {"max_prompt_length": 64}
    for group, fields in changes.items():
        values[group] = values.get(group, {}) | fields
    found = parse(ConfigDict(complete(values)).to_dict())  # as the launcher reads it
    trainer, rollout = make_mesh("fsdp=4", jax.devices()[:4]), make_mesh("data=4", jax.devices()[4:8])
    console = describe_console()
    on = placement.Meshes(trainer, rollout, critic or trainer, rollout)
    describe.print_plan(console, found, on, "runs/x")
    return found, console.file.getvalue()


def describe_console():
    console = make_console(200)
    console.file = io.StringIO()
    return console


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_told(name):
    found, text = planned(name)
    assert f"Algorithm {name}:" in text and "advantage:" in text and "policy loss per token:" in text
    assert "Every step samples 8 completions of 16 prompts, 128 in all" in text
    for part in TELLS.get(name, ()):
        assert part in text, part
    assert (found.section == "ppo") == (name == "ppo")
    assert ("Warning" in text) == bool(found.algo.policy_loss(40).warnings())


def test_a_correction_without_effect_is_told():
    _, text = planned("dapo", grpo={"max_staleness": 1, "sampler_correction": "tis"})
    assert "times the sampler correction" in text
    assert "Warning: grpo.sampler_correction='tis' does nothing" in " ".join(text.split())
    _, text = planned("dapo", grpo={"old_logprob": "current", "num_iterations": 2})
    assert "Warning: grpo.old_logprob='current' with 2 updates per step" in " ".join(text.split())


@pytest.mark.parametrize("key", ["data.path", "model.reference", "model.critic", "reward.model"])
def test_every_place_a_job_reads_is_asked_before_it_starts(key):
    values = load_config(find_config("grpo_gemma.py")).to_dict()
    group, _, name = key.partition(".")
    values[group][name] = "s3://bucket/x"
    with pytest.raises(ValueError, match="s3://bucket/x cannot be read"):
        job.check_storage("runs/x", complete(values))


def test_the_models_beside_actor_and_rollout_are_told():
    _, text = planned("grpo")
    assert "critic" not in text and "reward model" not in text
    _, text = planned("ppo", critic=make_mesh("fsdp=2", jax.devices()[2:4]), reward={"model": "DIR"})
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "fsdp=2" in rows["critic"] and "2-3" in rows["critic"] and "values and their updates" in rows["critic"]
    assert "data=4" in rows["reward"] and "4-7" in rows["reward"]
    assert "micro-batches per update, critic" in rows and "micro-batches per update" in rows


def test_the_arithmetic_in_words():
    _, text = planned("dapo", trainer={"mini_batch_size": 4}, grpo={"num_iterations": 2})
    words = " ".join(text.split())
    assert "(from up to 48 prompts, until 16 groups have a signal), and makes 8 updates" in words
    assert "2 passes over 4 mini-batches of 32 sequences" in words


def test_a_configuration_keeps_its_batch_sizes_under_an_algorithm_of_the_other_kind():
    values = load_config(find_config("ppo_gemma.py")).to_dict() | {"algorithm": "rloo"}
    values["ppo"] |= {"num_generations": 4, "max_staleness": 1}
    made = complete(values)
    assert "ppo" not in made
    assert made["grpo"]["num_generations"] == 4 and made["grpo"]["max_staleness"] == 1
    assert made["grpo"]["kl_in_reward"] == 0.05
    back = complete(load_config(find_config("grpo_gemma.py")).to_dict() | {"algorithm": "ppo"})
    assert "grpo" not in back and back["ppo"]["num_generations"] == 8 and back["ppo"]["kl_method"] == "k3"
    with pytest.raises(ValueError, match="algorithm='pppo' is not known"):
        complete({"algorithm": "pppo"})


def test_an_aggregation_under_a_frameworks_name():
    found, text = planned("verl_grpo", grpo={"loss_agg_mode": "seq-mean-token-sum-norm"})
    assert found.algo.loss_agg_mode == "token-sum-scale" and "token-sum-scale: sum over tokens / 40" in text
    found, _ = planned("trl_grpo", grpo={"loss_agg_mode": "dr_grpo"})
    assert found.algo.loss_agg_mode == "sequence-mean-token-scale"
    with pytest.raises(ValueError, match=r"grpo.loss_agg_mode='seq-mean-token-sum-norm' has more than one meaning"):
        planned("grpo", grpo={"loss_agg_mode": "seq-mean-token-sum-norm"})


def test_a_dry_run_counts_records_and_names_the_fields_of_reward_functions(tmp_path):
    found, text = planned("grpo")
    assert "Data: 1,000,000 records to train on, 256 to evaluate on (held out from training)." in text
    assert "prompts, completions, and of every record: " in text and "question, answer" in text
    assert found.has_accuracies
    own = tmp_path / "own.jsonl"
    own.write_text("".join(f'{{"question": "q{i}", "answer": "{i}", "topic": "x"}}\n' for i in range(3)))
    found, text = planned("grpo", data={"path": str(own), "system_prompt": ""}, reward={"fns": ("r1_format",)})
    assert "Data: 3 records to train on, none held out, so there is no evaluation" in text
    assert "is too small for data.eval_fraction=0.05" in text and "topic" in text
    assert not found.has_accuracies  # nothing asks for an answer between tags
    assert planned("grpo", data={"path": str(own), "system_prompt": ""})[0].has_accuracies  # a reward reads it
    assert "is not here; the run itself needs it" in planned("grpo", data={"path": str(tmp_path / "gone.jsonl")})[1]


@pytest.mark.parametrize(
    ("prompts", "mini", "group", "updates", "sequences"),
    [
        # Tunix (tunix/rl/rl_learner.py): full batch // mini_batch_size updates, of mini_batch_size x num_generations
        # sequences each.
        (4, 4, 4, 1, 16),
        (4, 2, 4, 2, 8),
        (16, 4, 8, 4, 32),
        (4, None, 4, 1, 16),
    ],
)
def test_a_mini_batch_counts_prompts_as_in_tunix(prompts, mini, group, updates, sequences):
    sizes = {"rollout": {"prompts_per_step": prompts}, "grpo": {"num_generations": group}}
    found, text = planned("grpo", trainer={"mini_batch_size": mini}, **sizes)
    assert (found.updates_per_step, found.mini_batch_size) == (updates, sequences)
    assert f"makes {updates} updates: 1 pass over {updates} mini-batches of {sequences} sequences" in " ".join(
        text.split()
    )


def test_prompts_that_do_not_split_into_mini_batches_are_refused():
    with pytest.raises(ValueError, match=r"4 prompts do not split into mini-batches of 3: .*prompts_per_step must"):
        planned("grpo", trainer={"mini_batch_size": 3}, rollout={"prompts_per_step": 4})
