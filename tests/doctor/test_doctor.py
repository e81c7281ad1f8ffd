"""The doctor finds the faults planted in recorded runs, and finds nothing in healthy runs."""

import io
import json
import pathlib
import re

import pytest
import recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl import doctor
from podrl.rundir.checks import CHECKS
from podrl.rundir.findings import Examination

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEALTHY = ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "lora", "pod", "ppo", "rloo", "stale", "tools"]


def steps(run, first=1, last=99):
    return [record for record in run["metrics"] if "time/step" in record and first <= record["step"] <= last]


def put(run, name, value, first, last=99):
    """Changes one metric of the steps from `first` to `last`; `value` is the new number, or a function of the old
    number."""
    for record in steps(run, first, last):
        record[name] = value(record.get(name)) if callable(value) else value


def evaluations(run):
    return [record for record in run["metrics"] if "eval/records" in record]


def repeat_text(run):
    for record in run["samples"]:
        if record["step"] >= 8 and "evaluation" not in record:
            record["completion"] = "<reasoning>" + "8*3=24. " * 12


def same_evaluation(run):
    first, second, _ = evaluations(run)
    second.update({**first, "step": second["step"]})


def learned_by_heart(run):
    first, *others = evaluations(run)
    for record in others:
        record.update({**first, "step": record["step"]})


def no_signal_for_adapters(run):
    put(run, "actor/grad_norm", 0.0, 3)


def nothing_trained(run):
    for name, value in {"samples": 0.0, "left_out/no_tokens": 3.0, "left_out/equal_rewards": 64.0}.items():
        put(run, f"loss/{name}", value, 5, 5)


def router_collapses(run):
    put(run, "moe/evenness", 0.9, 1, 9)
    put(run, "moe/evenness", 0.2, 10)


def unpaid(run):
    put(run, "reward/zero/number", 0.5, 1, 4)
    put(run, "reward/zero/number", 0.97, 5)
    for sample in run["samples"]:
        sample |= {"number": 0.0, "truth": "42"} if sample["step"] == 1 else {"number": 1.5}


def exploited(run):
    put(run, "reward/number", 5.0, 1, 9)
    put(run, "reward/number", 1.0, 10)
    put(run, "reward/zero/number", 0.5, 1)
    put(run, "reward/mean", 1.0, 1, 9)
    put(run, "reward/mean", 9.0, 10)
    put(run, "reward/std", 4.0, 1)


def departs(run):
    put(run, "opd/reverse_kl", 0.3, 1, 9)
    put(run, "opd/reverse_kl", 0.9, 10)


def falls(group):
    def change(run):
        put(run, f"{group}/chosen_logprob", -40.0, 1, 9)
        put(run, f"{group}/chosen_logprob", -80.0, 10)

    return change


def forgets(run):
    first, *others = evaluations(run)
    for record in others:
        record["eval/sampled_reward"] = first["eval/sampled_reward"] - 4 * 1.42 * first["eval/error/sampled_reward"]
        record["eval/error/sampled_reward"] = first["eval/error/sampled_reward"]


def uneven(run):
    """Plants a fault: the updates wait for samples, and from step 10 on the longest sample has four times the mean
    length."""
    put(run, "perf/waits_samples", 0.6, 1)
    put(run, "completion/length_mean", 8.0, 1)
    put(run, "completion/length_max", 16.0, 1, 9)
    put(run, "completion/length_max", 32.0, 10)


# Name of the finding, run that is changed, change, step of the finding, words of its message.
PLANTED = [
    (
        "prompts trained twice or lost",
        "grpo",
        lambda r: put(r, "data/first_prompt", lambda v: v - 8, 9, 9),
        9,
        "prompt 56",
    ),
    (
        "prompts trained twice or lost",
        "pod",
        lambda r: put(r, "data/first_prompt", lambda v: v + 3, 9, 9),
        9,
        "64 to 66",
    ),
    ("tokens of unknown weights", "pod", lambda r: put(r, "rollout/unknown_version", 31.0, 5, 5), 5, "31"),
    ("stale beyond the bound", "stale", lambda r: put(r, "rollout/stale_tokens", 7.0, 6), 6, "grpo.max_staleness=1"),
    ("mask against sampled ids", "tools", lambda r: put(r, "rollout/faulty_tokens", 2.0, 4), 4, "2 tokens"),
    ("the trainer does not reproduce the sampler", "lora", lambda r: put(r, "sampler/abs_diff", 0.01, 11), 11, "0.01"),
    ("the trainer does not reproduce the sampler", "stale", lambda r: put(r, "sampler/abs_diff", 0.3, 11), 11, "0.2"),
    ("ratio away from 1 on-policy", "dr_grpo", lambda r: put(r, "actor/ratio", 1.07, 3), 3, "1.07"),
    ("truncated support", "grpo", lambda r: put(r, "rollout/kept_mass", 0.8, 2), 2, "0.800"),
    ("reward not a number", "ppo", lambda r: put(r, "reward/answer", None, 6, 6), 6, "reward/answer"),
    ("reward constant", "ppo", lambda r: put(r, "reward/std", 0.0, 6), 10, "last 5 steps"),
    ("reward function without effect", "gspo", lambda r: put(r, "reward/number", 0.0, 1), 10, "reward/number is 0"),
    (
        "a reward function pays nothing",
        "gspo",
        unpaid,
        9,
        "reward function number gave the reward 0 to 97% of the samples of 5 steps\na sample of step 1: prompt",
    ),
    ("reward saturated", "grpo", lambda r: put(r, "reward/std", 0.1, 12), 16, "0.1 over 5"),
    ("a reward at the cost of another", "gspo", exploited, 11, "reward/number fell by 1.6"),
    ("groups without signal", "rloo", lambda r: put(r, "reward/groups_without_signal", 0.9, 7), 11, "0.9"),
    ("nothing trained", "rloo", nothing_trained, 5, "64 equal_rewards, 3 no_tokens"),
    ("answers get longer", "cispo", lambda r: put(r, "completion/length_mean", 48.0, 9), 12, "times"),
    ("answers cut off", "dapo", lambda r: put(r, "completion/truncated", 0.4, 6), 9, "0.32"),
    ("repetition", "grpo", repeat_text, 8, "'8*3=24. ' 12 times"),
    ("gradient not finite", "tools", lambda r: put(r, "actor/nonfinite", 1.0, 8, 8), 8, "100%"),
    ("no gradient", "grpo", lambda r: put(r, "actor/grad_norm", 0.0, 5), 9, "actor/grad_norm is 0 in 5 steps"),
    ("gradient spikes", "ppo", lambda r: put(r, "actor/grad_norm", lambda v: 30 * v, 18, 18), 18, "10 times"),
    ("router collapse", "grpo", router_collapses, 13, "0.34"),
    ("entropy collapse", "grpo", lambda r: put(r, "actor/entropy", 0.004, 10), 14, "0.004"),
    ("KL drift", "grpo", lambda r: put(r, "actor/kl", 2.5, 10), 11, "1.03"),
    ("KL drift", "rloo", lambda r: put(r, "reward/kl", 2.5, 10), 11, "reward/kl"),
    ("a teacher that teaches nothing", "grpo", lambda r: put(r, "opd/reverse_kl", 0.002, 1), 6, "0.002 nats"),
    ("a teacher that teaches nothing", "grpo", lambda r: put(r, "opd/compared", 0.25, 7), 11, "0.25 over 5"),
    ("a teacher that disagrees more and more", "grpo", departs, 12, "opd/reverse_kl is 0.66"),
    ("observations that are not learned", "tools", lambda r: put(r, "echo/nll", 7.0, 1), 20, "echo/nll is 7"),
    ("chosen answers become unlikely", "grpo", falls("dpo"), 12, "dpo/chosen_logprob is -64"),
    ("chosen answers become unlikely", "grpo", falls("orpo"), 12, "orpo/chosen_logprob is -64"),
    ("adapters without effect", "lora", no_signal_for_adapters, 7, "actor/grad_norm is 0"),
    ("adapters not served", "lora", same_evaluation, 12, "after step 0"),
    ("tools that fail", "tools", lambda r: put(r, "tools/calculator/failures", lambda v: v + 40, 15), 17, "calculator"),
    ("tools that fail", "tools", lambda r: put(r, "tools/unknown/calls", 4000.0, 15), 15, "a tool that does not exist"),
    ("evaluation off the training distribution", "grpo", learned_by_heart, 12, "eval/sampled_reward by 0"),
    ("evaluation gets worse", "grpo", forgets, 12, "eval/sampled_reward was"),
    ("the trainer waits for samples", "stale", lambda r: put(r, "perf/waits_samples", 0.7, 6), 15, "0.70 over 10"),
    ("the trainer waits for samples", "grpo", uneven, 14, "3 times the mean"),
    ("a stage is the bottleneck", "grpo", lambda r: put(r, "time/reward", lambda v: v + 3.0, 12), 12, "time/reward"),
    ("a stage is the bottleneck", "grpo", lambda r: put(r, "time/data", lambda v: v + 3.0, 12), 12, "time/data"),
    ("a stage is the bottleneck", "grpo", lambda r: put(r, "time/checkpoint", 3.0, 14), 14, "time/checkpoint"),
]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_without_a_finding(name, tmp_path, capsys):
    assert doctor.main([recorded.write(recorded.run(name), tmp_path / name)]) == 0
    said = capsys.readouterr().out
    assert f"Nothing found: {len(CHECKS)} checks over 24 steps" in said and "Many checks" not in said


def test_a_short_run_is_not_called_healthy(tmp_path, capsys):
    run = recorded.run("grpo")
    run["metrics"] = [record for record in run["metrics"] if record["step"] <= 3]
    assert doctor.main([recorded.write(run, tmp_path / "short")]) == 0
    assert "checks over 3 steps" in (said := capsys.readouterr().out)
    assert "Many checks compare steps: they need 5 to 10 steps to find anything." in said


@pytest.mark.parametrize(("name", "where", "change", "step", "words"), PLANTED)
def test_what_is_planted_is_found_where_it_begins(name, where, change, step, words, tmp_path, capsys):
    run = recorded.run(where)
    change(run)
    directory = recorded.write(run, tmp_path / where)
    found = [finding for finding in doctor.examine(directory) if finding.name == name]
    assert len(found) == 1 and found[0].step == step and words in found[0].text, found
    assert doctor.main([directory]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"step {step}" in said and found[0].meaning in said and f"Turn: {' '.join(found[0].key.split())}" in said
    longest = max(found[0].report().splitlines(), key=lambda line: len(line.split()))
    assert len(longest.split()) <= 45 and len(longest) <= 360, longest
    assert "SECTION" not in said


@pytest.mark.parametrize(
    ("estimator", "found"),
    [("grpo", True), ("reinforce_plus_plus", False), ("reinforce_plus_plus_baseline", False), ("remax", False)],
)
def test_equal_rewards_of_groups_are_a_fault_if_advantages_compare_a_group(estimator, found, tmp_path):
    run = recorded.run("rloo")
    put(run, "reward/groups_without_signal", 0.9, 1)
    run["config"]["grpo"]["advantage_estimator"] = estimator
    names = [finding.name for finding in doctor.examine(recorded.write(run, tmp_path / "run"))]
    assert ("groups without signal" in names) == found


def test_every_check_has_a_run_it_is_planted_in():
    of_records = {row.name for row in CHECKS if row.kind != "trace"}  # test_token_checks.py plants findings of a trace
    assert of_records == {name for name, *_ in PLANTED}


def test_the_page_has_every_row_of_the_table():
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [line.split(" | ") for line in page.split("\n") if line.startswith("| ") and line.count(" | ") == 3]
    listed = [(name, meaning, key.removesuffix(" |")) for _, name, meaning, key in rows[1:]]
    assert listed == [(row.name, row.meaning, re.sub(r"\n *", "<br>", row.key)) for row in CHECKS]


def test_findings_name_the_settings_of_the_table_of_algorithms():
    """docs/algorithms.md begins with a table of tasks; each setting in the table is the advice of a finding."""
    table = (ROOT / "docs" / "algorithms.md").read_text().split("\n\n")[1]
    keys = " ".join(row.key for row in CHECKS)
    settings = {re.sub("^grpo[.]", "SECTION.", key) for key in re.findall(r"--config\.((?:[a-z]+[.])[a-z_]+)", table)}
    presets = re.findall(r"algorithm=[a-z_]+", table)
    presets += [f"algorithm={name}" for name in re.findall(r"--config=([a-z]+)_tiny", table)]
    missing = {said for said in [*settings, *presets, "--topology=split"] if said not in keys}
    assert len(settings) > 8 and len(presets) > 6 and not missing, missing


def test_the_environment_of_tools_is_not_expected_to_pay(tmp_path):
    run = recorded.run("tools")
    put(run, "reward/zero/environment", 1.0, 1)
    put(run, "reward/environment", 0.0, 1)
    assert not [f for f in doctor.examine(recorded.write(run, tmp_path / "tools")) if "pays nothing" in f.name]
    run["config"]["env"]["environment"] = "mine.py:Game"
    assert [f for f in doctor.examine(recorded.write(run, tmp_path / "game")) if "pays nothing" in f.name]


def test_equal_rewards_are_not_called_saturated_where_a_function_pays_nothing(tmp_path):
    run = recorded.run("grpo")
    put(run, "reward/std", 0.0, 12)
    put(run, "reward/zero/answer", 1.0, 12)
    names = {finding.name for finding in doctor.examine(recorded.write(run, tmp_path / "run"))}
    assert "a reward function pays nothing" in names and "reward saturated" not in names


def test_a_penalty_is_not_told_to_pay_nothing_and_the_sample_has_its_reference(tmp_path):
    run = recorded.run("gspo")
    unpaid(run)
    text = next(f.text for f in doctor.examine(recorded.write(run, tmp_path / "paid")) if "pays nothing" in f.name)
    assert text.endswith(", reference '42'") and "answer '" in text
    put(run, "reward/number", -0.1, 1)
    assert not [f for f in doctor.examine(recorded.write(run, tmp_path / "penalty")) if "pays nothing" in f.name]


def test_functions_that_give_0_to_every_sample_are_one_finding(tmp_path):
    run = recorded.run("gspo")
    names = {name for record in steps(run, 1) for name in record if re.fullmatch("reward/(?!mean|std)[a-z]+", name)}
    for name in names:
        put(run, name, 0.0, 1)
        put(run, name.replace("/", "/zero/"), 1.0, 1)
    put(run, "reward/std", 0.0, 1)
    found = [f.name for f in doctor.examine(recorded.write(run, tmp_path / "run"))]
    assert found.count("a reward function pays nothing") == 1 and "reward constant" not in found


def test_the_first_broken_comes_first_and_a_sample_is_named(tmp_path, capsys):
    run = recorded.run("grpo")
    repeat_text(run)
    put(run, "actor/nonfinite", 1.0, 3, 3)
    put(run, "sampler/abs_diff", 0.5, 3)
    directory = recorded.write(run, tmp_path / "run")
    assert doctor.main([directory, "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["name"]) for line in lines] == [
        (3, "the trainer does not reproduce the sampler"),
        (3, "gradient not finite"),
        (8, "repetition"),
    ]
    number = int(lines[2]["sample"].split()[1])
    assert "8*3=24." in run["samples"][number - 1]["completion"]


def test_a_run_that_grows_is_watched_to_its_end(tmp_path):
    run = recorded.run("grpo")
    put(run, "actor/nonfinite", 1.0, 5, 5)
    put(run, "sampler/abs_diff", 0.5, 20)
    whole, later = run["metrics"], io.StringIO()
    run["metrics"] = [record for record in whole if record["step"] < 10]
    directory = pathlib.Path(recorded.write(run, tmp_path / "run"))

    def wait():
        later.write("w")
        if len(later.getvalue()) == 1:
            text = "".join(json.dumps(record) + "\n" for record in whole)
            (directory / "metrics.jsonl").write_text(text + '{"step": 25, "rewa')  # a torn line
        else:
            (directory / "summary.json").write_text("{}")

    watched = doctor.watch(str(directory), wait)
    assert next(watched).step == 5 and not later.getvalue()
    assert [(finding.step, finding.name) for finding in watched] == [(20, "the trainer does not reproduce the sampler")]
    assert later.getvalue() == "ww"


def test_a_step_without_a_token_is_told_as_that_alone(tmp_path):
    """The ratio of a step without a token is 0, which tells nothing about the sampler."""
    run = recorded.run("dr_grpo")
    for name, value in {"actor/ratio": 0.0, "loss/samples": 0.0, "loss/left_out/no_tokens": 64.0}.items():
        put(run, name, value, 3, 3)
    found = [finding.name for finding in doctor.examine(recorded.write(run, tmp_path / "run"))]
    assert found == ["nothing trained"]


def test_what_is_no_run_is_said(tmp_path, capsys):
    assert doctor.main([str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"algor')
    assert doctor.main([str(tmp_path)]) == 1
    assert "is damaged" in capsys.readouterr().err


NAMES = sorted({name for name in HEALTHY for record in recorded.run(name)["metrics"] for name in record} - {"step"})
VALUES = st.none() | st.floats() | st.sampled_from([0.0, 1.0, "text", [], True])
RECORDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12)


@settings(max_examples=60)
@given(
    config=st.dictionaries(
        st.sampled_from(["algorithm", "grpo", "rollout", "trainer", "model"]), st.none() | st.just({})
    ),
    records=st.lists(RECORDS, max_size=30),
)
def test_no_record_breaks_a_check(config, records):
    """The recorder calls these checks every step, so no metrics may end a run."""
    examination = Examination(config)
    for step, record in enumerate(records, 1):
        for finding in examination.see({"step": step, "time/step": 1.0, **record}):
            assert finding.step == step and finding.text
