"""The dry run of every algorithm: formula, numbers, and its batch arithmetic in plain words."""

import dataclasses
import io
import json
import os
import re
import shutil

import jax
import pytest
from endpoints import joined
from ml_collections import ConfigDict

import podrl
from podrl.algorithms.presets import PRESETS
from podrl.job import describe, job, placement
from podrl.job.config import KINDS, complete, parse
from podrl.job.weights import copies, model_of
from podrl.launch import find_config, load_config
from podrl.mesh.build import make_mesh
from podrl.models.sizes import parameter_count
from podrl.rundir.console import make_console
from podrl.runtime.roles import Hosts

TELLS = {
    "opd": ("advantage: 1 (teacher_logprob - old_logprob) (the teacher is model.reference)\n",),
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


def planned(name, critic=None, dry=False, pod=None, **changes):
    """Plans grpo_gemma.py, or the small job of a supervised algorithm, with algorithm `name` and changed settings.

    Returns (job, text that a run prints first).
    """
    offline = name in KINDS and KINDS[name].offline
    values = load_config(find_config(f"{name}_tiny.py" if offline else "grpo_gemma.py")).to_dict() | {"algorithm": name}
    if not offline:
        values["rollout"] |= {"max_prompt_length": 64}
        values["model"] |= {"reference": "teacher" if name == "opd" else ""}
    for group, fields in changes.items():
        values[group] = values.get(group, {}) | fields
    found = parse(ConfigDict(complete(values)).to_dict())  # the launcher parses settings in this way
    trainer, rollout = make_mesh("fsdp=4", jax.devices()[:4]), make_mesh("data=4", jax.devices()[4:8])
    console = describe_console()
    on = placement.Meshes(trainer, rollout, critic or trainer, rollout)
    describe.print_plan(console, found, on, "runs/x", pod, dry=dry)
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


@pytest.mark.parametrize(
    ("settings", "told", "untold"),
    [
        ({}, ("advantage: 1 (teacher_logprob", "policy loss per token:"), ("R - mean", "A = 0")),
        ({"reward_coef": 0.5}, ("R - mean of the group", "A = 0.5 advantage + 1 (teacher_logprob"), ()),
        ({"teacher_kl": "full"}, ("loss: 1 KL(policy || teacher) over the vocabulary",), ("advantage", "policy loss")),
        (
            {"teacher_kl": "full", "entropy_coef": 0.25},
            ("loss: 1 KL(policy || teacher)", "  - 0.25 entropy\n"),
            ("advantage", "policy loss"),
        ),
        ({"teacher_kl": "full", "reward_coef": 1.0}, ("R - mean", "policy loss per", "+ 1 KL(policy ||"), ("A = 1",)),
        ({"teacher_kl": "full", "policy_loss_fn": "dppo"}, ("loss: 1 KL(policy ||", "A is 0, as there is"), ("R - ",)),
    ],
)
def test_a_teachers_formula_has_no_term_of_weight_zero(settings, told, untold):
    text = planned("opd", grpo=settings)[1].partition("Algorithm opd:")[2].partition("Guarantee")[0]
    assert [part for part in told if part not in text] == [] and [part for part in untold if part in text] == []
    assert not re.search(r"(?<![\d.])0 (advantage|KL|\()", text)


NOT_LEARNT = " It is recorded and is not in the loss (grpo.reward_coef=0)."


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_says_whether_its_loss_has_the_reward(name):
    found, text = planned(name)
    assert (NOT_LEARNT in text) == (getattr(found.algo, "reward_coef", 1.0) == 0) == (name == "opd")


@pytest.mark.parametrize("beta", [0.0, 0.25])
def test_observations_alone_are_told_without_an_advantage(beta):
    own = {"reward_coef": 0.0, "observation_coef": 0.5, "beta": beta, "overlong_shaping": True}
    env = {"tools": ("calculator",)}
    text = planned("grpo", grpo=own, env=env, rollout={"max_response_tokens": 80})[1].partition("Algorithm grpo:")[2]
    loss = text.partition("Guarantee")[0]
    assert "loss + 0.5 x (-log p)" in loss and NOT_LEARNT in text
    assert ("+ 0.25 KL: " in loss) == (beta > 0) and "policy loss" not in loss and "dvantage" not in loss
    assert "overlong shaping" not in loss
    assert "grpo.overlong_shaping=True has no effect: grpo.reward_coef=0 keeps rewards out of the loss." in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("steps", "told"), [(1, "step 1 trains the critic only"), (5, "steps 1 to 5 train the critic")]
)
def test_the_steps_of_the_critic_alone_are_counted(steps, told):
    assert told in planned("ppo", ppo={"critic_warmup": steps})[1]


def test_steps_and_updates_are_both_said_where_they_differ():
    text = " ".join(planned("grpo", grpo={"num_iterations": 2}, trainer={"max_steps": 20})[1].split())
    assert (
        "max_steps and trainer.eval_every_n_steps count updates; all else, the log too, counts steps: 10 steps" in text
    )
    assert "count updates" not in planned("grpo")[1]


def test_the_guarantee_of_a_killed_run_is_told():
    text = planned("grpo")[1]
    assert "(rollout.clock='tokens'): a run that is killed and started again ends bitwise the same." in text
    text = planned("grpo", rollout={"clock": "wall"}, grpo={"max_staleness": 3})[1]
    assert "(rollout.clock='wall')" in text and "no token is more than 3 steps old" in text
    for name in ("remax", "dapo"):
        assert "(rollout.clock='wall')" in planned(name, rollout={"clock": "wall"}, grpo={"max_staleness": 1})[1]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("grpo", {}, "grpo.max_staleness=0"),
        ("ppo", {"ppo": {"max_staleness": 1}, "rollout": {"window_tokens": 8}}, "rollout.window_tokens=8"),
        ("grpo", {"grpo": {"max_staleness": 1}, "env": {"calls_per_window": 1}}, "env.calls_per_window=1"),
    ],
)
def test_what_the_wall_clock_does_not_go_with_is_refused(name, changes, said):
    changes = changes | {"rollout": {"clock": "wall"} | changes.get("rollout", {})}
    with pytest.raises(ValueError, match=rf"rollout.clock='wall' does not go with .*{re.escape(said)}"):
        planned(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("ppo", {"rollout": {"window_tokens": 8}}, "rollout.window_tokens=8 has no effect with ppo.max_staleness=0"),
        (
            "grpo",
            {"grpo": {"max_staleness": 1}, "env": {"calls_per_window": 1}},
            "env.calls_per_window=1 has no effect with grpo.max_staleness=1",
        ),
    ],
)
def test_settings_of_windows_are_refused_where_there_are_no_windows(name, changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        planned(name, **changes)


def test_a_correction_without_effect_is_told():
    _, text = planned("dapo", grpo={"old_logprob": "sampler", "sampler_correction": "tis"})
    assert "times the sampler correction" in text
    assert "Warning: grpo.sampler_correction='tis' does nothing" in " ".join(text.split())
    _, text = planned("dapo", grpo={"old_logprob": "current", "num_iterations": 2})
    assert "Warning: grpo.old_logprob='current' with 2 updates per step" in " ".join(text.split())


def test_the_roles_name_their_processes():
    _, text = planned("grpo")
    assert re.findall(r"(\w+) │ +\S+ │ +4 │ +\S+ │ +(\d+) │", text) == [
        (r, f"{os.getpid()}") for r in ("trainer", "rollout")
    ]
    mesh = make_mesh("fsdp=8")
    with joined(Hosts((0, 1), (2,))) as (leader, *_):
        rows = describe.role_rows(placement.Meshes(mesh, mesh, mesh, mesh), {}, leader)
        leader.ids[1] = (4711, "elsewhere")
        again = describe.role_rows(placement.Meshes(mesh, mesh, mesh, mesh), {}, leader)
    assert [row[4] for row in rows] == [f"host 0: {os.getpid()}, host 1: {os.getpid()}", f"host 2: {os.getpid()}"]
    assert again[0][4] == f"host 0: {os.getpid()}, host 1: 4711 on elsewhere"


def test_rollout_hosts_of_a_split_pod_have_the_configured_mesh_and_not_the_trainers():
    mesh, auxiliary = make_mesh("fsdp=8"), {"reward": "reward model: scores of samples"}
    shown = {}
    for replica, roles in (
        (1, placement.RolesConfig()),
        (2, placement.RolesConfig(rollout=placement.RoleConfig("tensor=4"))),
        (1, placement.RolesConfig(reward=placement.AuxiliaryConfig("fsdp=2"))),
    ):
        with joined(Hosts((0,), (1, 2), replica), disposable=True) as (leader, *_):
            rows = describe.role_rows(placement.Meshes(mesh, mesh, mesh, mesh), auxiliary, leader, roles)
            shown[replica, roles.reward.mesh] = [row[:4] for row in rows]
    trainer, nothing = ["trainer", "fsdp=8", "8", "0-7"], ["", ""]
    assert shown == {
        (1, "rollout"): [trainer, *([r, "data=-1 of every host", *nothing] for r in ("rollout", "reward"))],
        (2, "rollout"): [trainer, *([r, "tensor=4 of every 2 hosts", *nothing] for r in ("rollout", "reward"))],
        (1, "fsdp=2"): [
            trainer,
            ["rollout", "data=-1 of every host", *nothing],
            ["reward", "fsdp=2 of every host", *nothing],
        ],
    }


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
    assert found.algo.loss_agg_mode == "sequence-mean-token-scale"
    assert "sequence-mean-token-scale: mean over sequences of (sum over tokens / 40)" in text
    found, _ = planned("trl_grpo", grpo={"loss_agg_mode": "dr_grpo"})
    assert found.algo.loss_agg_mode == "sequence-mean-token-scale"
    with pytest.raises(ValueError, match=r"grpo.loss_agg_mode='seq-mean-token-sum-norm' has more than one meaning"):
        planned("grpo", grpo={"loss_agg_mode": "seq-mean-token-sum-norm"})


def test_a_dry_run_names_the_words_that_the_chat_template_puts_before_a_question(tmp_path):
    """Tells of a default system prompt, and says that nothing precedes a question only if it knows the template."""
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "q", "answer": "1"}\n')
    shutil.copytree(podrl.TINY, tmp_path / "kind")
    (tmp_path / "kind" / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'system' %}<start_of_turn>system\nYou help.<end_of_turn>\n{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    )
    data = {"path": str(own), "system_prompt": ""}
    said = {
        "": "\nNothing precedes a question (data.system_prompt).\n",
        str(
            tmp_path / "kind"
        ): "\nThe chat template itself writes 'You help.' before a question that has no system turn."
        "\nNothing else precedes a question (data.system_prompt).\n",
        str(tmp_path / "gone"): "\ndata.system_prompt puts nothing before a question.\n",
    }
    found, _ = planned("grpo", data=data)
    for tokenizer, lines in said.items():
        assert lines in "\n".join(describe.data_lines(dataclasses.replace(found, tokenizer=tokenizer))) + "\n"


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_a_job_on_answers_counts_its_records(tmp_path, name):
    pairs, solved = tmp_path / "pairs.jsonl", tmp_path / "solved.jsonl"
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(40)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    solved.write_text(
        "".join(json.dumps(row | {"question": row["prompt"], "answer": "yes"}) + "\n" for row in rows[:12])
    )
    text = planned(name, data={"path": str(pairs), "eval_path": str(solved)}, eval={"problems": 64})[1]
    assert "\nData: 28 records to train on, 12 to evaluate on (data.eval_path).\n" in text and "Reward" not in text
    text = planned(name, data={"path": str(pairs)}, eval={"problems": 64})[1]
    assert "\nData: 40 records to train on, none held out, so there is no evaluation before and after" in text


def test_a_dry_run_counts_records_and_names_the_fields_of_reward_functions(tmp_path):
    found, text = planned("grpo")
    assert "Data: 1,000,000 records to train on, 256 to evaluate on (held out from training)." in text
    assert "receive prompts, completions, and these fields of the records: " in text and "question, answer" in text
    assert "Reward of a sample: exact_format + approximate_format + answer + number." in text
    made = {"fns": ("mine.py:f", "answer"), "weights": (0.5, 1.0), "model": "tiny", "model_weight": 2.0}
    assert "sample: 0.5 x mine.py:f + answer + 2 x score of reward.model=tiny." in planned("grpo", reward=made)[1]
    assert "preceded by" not in text and "too few" not in text
    assert found.has_accuracies
    own = tmp_path / "own.jsonl"
    own.write_text("".join(f'{{"question": "q{i}", "answer": "{i}", "topic": "x"}}\n' for i in range(3)))
    found, text = planned("grpo", data={"path": str(own), "system_prompt": ""}, reward={"fns": ("r1_format",)})
    assert "Data: 3 records to train on, none held out, so there is no evaluation" in text
    assert "topic" in text
    assert "No accuracies: data.system_prompt does not ask for an answer between <answer> and </answer>, and" in text
    assert "No accuracies: eval.problems=0." in planned("grpo", eval={"problems": 0})[1]
    assert "No accuracies" not in planned("grpo")[1]
    assert not found.has_accuracies  # no prompt asks for an answer between tags
    # The default reward functions read the field `answer`.
    assert planned("grpo", data={"path": str(own), "system_prompt": ""})[0].has_accuracies
    own.write_text('{"question": "q", "label": 4}\n')
    text = planned("grpo", data={"path": str(own), "answer_field": "label", "system_prompt": ""})[1]
    assert "of the records: label, question.\npodrl adds: solution, answer. `answer` is a text" in text
    own.write_text("".join(f'{{"question": "q{i}", "answer": "{i}"}}\n' for i in range(40)))
    text = planned("grpo", data={"path": str(own), "eval_fraction": 0.1})[1]
    assert (
        "too few records to tell an improvement from noise. Raise data.eval_fraction=0.1, or give data.eval_path."
        in text
    )
    text = planned("grpo", data={"path": str(own), "eval_fraction": 0.1}, eval={"problems": 0})[1]
    assert re.search(r"\(eval\.problems=0\)\. Held out by data\.eval_fraction, but not used: \d records?\.", text)
    assert "Nothing precedes a question (data.system_prompt)." in text
    text = planned("grpo", data={"path": str(own), "eval_fraction": 0.1, "system_prompt": "Be kind."})[1]
    assert "Questions are preceded by 'Be kind.' (data.system_prompt)." in text
    text = planned("grpo", data={"path": str(own), "eval_fraction": 0.5, "system_prompt": "[b]Spell[/b] it."})[1]
    assert "too few" not in text and "Questions are preceded by '[b]Spell[/b] it.' (data.system_prompt)." in text
    assert "is not put before" not in text
    turns = '{"messages": [{"role": "user", "content": "q"}], "answer": "1"}\n'
    for row in ('{"prompt": "q", "answer": "1"}\n', turns):
        own.write_text(row)
        text = planned("grpo", data={"path": str(own), "system_prompt": "Be kind."})[1]
        assert f"Warning: data.system_prompt is not put before the records of {own} that are conversations" in text
        assert "Nothing precedes a question" in text and "preceded by" not in text
    own.write_text('{"prompt": "q"}\n')
    text = planned("grpo", data={"path": str(own)})[1]
    assert f"No accuracies: {own} line 1 lacks 'answer' (it has prompt)." in text
    assert "is not here; the run itself needs it" in planned("grpo", data={"path": str(tmp_path / "gone.jsonl")})[1]


@pytest.mark.parametrize(
    ("prompts", "mini", "group", "updates", "sequences"),
    [
        # Tunix (tunix/rl/rl_learner.py) makes full batch // mini_batch_size updates, and each update takes
        # mini_batch_size x num_generations sequences.
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
    counted = (
        f"{updates} updates: 1 pass over {updates} mini-batches"
        if updates > 1
        else "1 update: 1 pass over 1 mini-batch"
    )
    assert f"makes {counted} of {sequences} sequences" in " ".join(text.split())


def test_prompts_that_do_not_split_into_mini_batches_are_refused():
    with pytest.raises(ValueError, match=r"4 prompts do not split into mini-batches of 3: .*prompts_per_step must"):
        planned("grpo", trainer={"mini_batch_size": 3}, rollout={"prompts_per_step": 4})


def test_the_copies_of_the_weights_are_counted():
    trainer, rollout = make_mesh("fsdp=4", jax.devices()[:4]), make_mesh("data=4", jax.devices()[4:8])
    hosts = Hosts((0, 1), (2, 3))
    shared, split = (placement.PlannedPod(hosts, 2, split=is_split) for is_split in (False, True))
    assert all("trainer device keeps" not in planned("grpo", dry=True, pod=pod)[1] for pod in (None, shared))
    found, text = planned("grpo", dry=True, pod=split, grpo={"max_staleness": 2})
    held, one = copies(found, trainer, rollout), 4 * parameter_count(model_of(found))
    assert (held.versions, held.generating, held.policy_bytes) == (4, 2, one), (
        "the engine unrolls few layers, so a rollout device holds a second copy of the weights"
    )
    assert one / 4 <= held.version_bytes < 0.27 * one, (
        "a version is sharded over the trainer's four devices, except for the norms"
    )
    twice = f"{one / 2**20:.1f} MiB twice, {2 * one / 2**20:.1f} MiB in all."
    assert f"Weights of a rollout device while it generates: {twice}" in text
    assert "A trainer device keeps for other hosts up to 4 versions of" in " ".join(text.split())
    found, text = planned("grpo", dry=True, roles={"eval": {"hosts": "3"}})
    assert copies(found, trainer, rollout).versions == 3, (
        "evaluation hosts need one more version, which they pull later"
    )
    assert re.search(r"eval +│ +as a rollout host .* hosts 3 │ +evaluation and nothing else", text)
    assert re.search(r"rollout: batched decoding +│", text)
    with pytest.raises(ValueError, match=r"roles\.eval\.hosts='3' .* eval\.problems=0"):
        planned("grpo", roles={"eval": {"hosts": "3"}}, eval={"problems": 0})
    # Under LoRA only adapters move. A model of 26 layers is scanned, so a rollout device holds its weights once.
    lora = {"path": "", "size": "gemma2-2b", "lora": {"rank": 4, "pattern": "q"}}
    large, _ = planned("grpo", model=lora, rollout={"data_type": "bfloat16"}, trainer={"max_steps": 1})
    held = copies(large, trainer, rollout)
    assert held.generating == 1 and held.version_bytes < 0.001 * held.policy_bytes and held.versions == 2
    merged, _ = planned("grpo", model=lora, rollout={"data_type": "bfloat16", "merge_adapters": True})
    assert 0.2 * held.policy_bytes < copies(merged, trainer, rollout).version_bytes < 0.3 * held.policy_bytes
