"""The files that a run leaves in its directory, and its console output."""

import json
import pathlib

import pytest
from processes import Job, run

from podrl.rundir.trace import traced_steps

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Job:
    args = ("--config.trainer.eval_every_n_steps=3", "--config.log.to=tensorboard", "--config.log.samples_every=2")
    args += ("--config.eval.samples=2", "--config.rollout.max_prompt_length=0")
    sets = "--config.eval.sets=({'name': 'hard', 'path': 'sums', 'problems': 4, 'samples': 3, 'every': 2},)"
    return run(tmp_path_factory.mktemp("outputs") / "run", *args, sets)


def read_jsonl(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_directory_holds_what_is_promised_and_nothing_else(done):
    names = {path.name for path in done.workdir.iterdir()}
    promised = {
        "config.json",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "checkpoints",
        "tensorboard",
        "spans.jsonl",
        "trace",
        "about.json",
        "defaults.json",
        "report.html",
        "starts.jsonl",
        "files.json",
        "evaluations",
    }
    assert names == promised
    assert {p.name for p in (done.workdir / "checkpoints").iterdir()} == {"4", "6"}
    assert traced_steps(done.workdir) == [1, 2, 4, 6]


def test_spans_tell_what_every_step_did(done):
    spans = read_jsonl(done.workdir / "spans.jsonl")
    names = {"rollout", "reward", "score", "update", "publish", "checkpoint", "evaluation", "metrics", "restoring"}
    assert names | {"start-up"} <= {span["name"] for span in spans} and all(span["s"] >= 0 for span in spans)
    for name in ("update", "reward"):
        assert [span["step"] for span in spans if span["name"] == name] == [1, 2, 3, 4, 5, 6]


def test_config_json_is_the_whole_configuration(done):
    config = json.loads((done.workdir / "config.json").read_text())
    assert config["grpo"]["num_generations"] == 4 and config["trainer"]["max_steps"] == 6
    assert config["rollout"]["max_prompt_length"] > 0, "config.json must have the length found in the data, not 0"
    assert {"model", "data", "reward", "roles", "eval", "checkpoint", "log", "seed"} <= set(config)


def test_metrics_have_every_step_and_every_evaluation_once(done):
    records = read_jsonl(done.workdir / "metrics.jsonl")
    steps = [r for r in records if "time/step" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if any(name.startswith("eval/") for name in r)] == [0, 3, 6]
    names = {"reward/mean", "reward/answer", "reward/exact_format", "accuracy/answer", "actor/kl", "actor/pg_loss"}
    names |= {
        "actor/grad_norm",
        "actor/entropy",
        "actor/pg_clipfrac",
        "actor/approx_kl",
        "tokens/completion",
        "completion/length_mean",
        "completion/truncated",
    }
    names |= {"time/rollout", "time/reward", "time/update", "time/publish", "rollout/tokens_per_s"}
    for record in steps:
        assert names <= set(record), names - set(record)
        assert all("/" in name for name in record if name != "step")
        assert None not in record.values(), record
        assert record["actor/kl"] > -1e-6 and record["time/step"] > 0
    for record in records:
        shares = {k: v for k, v in record.items() if k.startswith(("eval/", "accuracy/")) and "reward" not in k}
        assert all(0 <= value <= 1 for name, value in shares.items() if not name.endswith("/records"))
    evaluation = {f"eval/{how}_{what}" for how in ("greedy", "sampled") for what in ("answer", "partial", "format")}
    evaluation |= {f"eval/{how}_reward{of}" for how in ("greedy", "sampled") for of in ("", "/answer", "/number")}
    assert evaluation <= set(records[0]) and records[0]["step"] == 0 and records[0]["eval/records"] == 16
    of_sets = [r for r in records if "eval/records" in r]
    assert [r.get("eval/hard/records") for r in of_sets] == [4, None, 4]  # written in every second evaluation
    assert {"eval/hard/sampled_majority", "eval/hard/sampled_pass", "eval/hard/greedy_reward"} <= set(of_sets[0])


def test_samples_hold_prompts_completions_and_rewards_by_function(done):
    samples = read_jsonl(done.workdir / "samples.jsonl")
    training = [s for s in samples if "reward" in s]
    assert {s["step"] for s in training} == {1, 2, 4, 6}
    for sample in training:
        assert sample["prompt"] and isinstance(sample["completion"], str)
        by_function = [sample[name] for name in ("exact_format", "approximate_format", "answer", "number")]
        assert sample["reward"] == pytest.approx(sum(by_function))
    evaluated = [s for s in samples if "evaluation" in s]
    assert {s["step"] for s in evaluated} == {0, 3, 6} and all(s["truth"] for s in evaluated)


def test_the_summary_compares_before_and_after(done):
    summary = json.loads((done.workdir / "summary.json").read_text())
    records = read_jsonl(done.workdir / "metrics.jsonl")
    assert summary["steps"] == 6 and summary["evaluated_at"] == [0, 3, 6] and summary["seed"] == 0
    for when, record in (("before", records[0]), ("after", records[-1])):
        assert summary[when] == {k.removeprefix("eval/"): v for k, v in record.items() if k.startswith("eval/")}
    timed = [r for r in records if "time/rollout" in r]
    timed = [r for r in timed if "perf/compile" not in r] or timed
    rollout = sum(r["tokens/completion"] for r in timed) / sum(r["time/rollout"] for r in timed)
    assert summary["throughput"]["rollout_tokens_per_s"] == pytest.approx(rollout, rel=1e-3)
    stages = {"rollout", "reward", "update", "publish", "step", "checkpoint", "evaluation", "start-up", "other"}
    assert stages <= set(summary["seconds"])
    assert 0 < summary["seconds"]["step"] < summary["wall_s"]


def test_the_seconds_of_a_step_add_up(done):
    for record in read_jsonl(done.workdir / "metrics.jsonl"):
        if "time/step" in record:
            stages = {k: v for k, v in record.items() if k.startswith("time/")}
            # These stages are no part of the sum: they lie within other stages, or, as generation does, begin before
            # the step waits for its batch.
            within = {f"time/{part}" for part in ("step", "rollout", "prefill", "decode", "planning", "reward")}
            known = [v for k, v in stages.items() if k not in within]
            assert stages["time/prefill"] + stages["time/decode"] < stages["time/rollout"]
            assert all(
                record[f"perf/{name}"] > 0 for name in ("decode_steps", "dispatches", "prefill_calls", "prefill_tokens")
            )
            assert sum(known) == pytest.approx(record["time/step"], rel=1e-6), stages
            assert "time/other" in stages and "time/start-up" not in stages
        else:
            assert record["time/evaluation"] > 0
            assert ("time/start-up" in record) == (record["step"] == 0)


def test_tensorboard_events_hold_the_metrics(done):
    (events,) = (done.workdir / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    for name in (b"reward/mean", b"actor/kl", b"eval/greedy_answer"):
        assert name in content


def test_the_console_shows_roles_arithmetic_progress_and_the_table(done):
    for text in ("fsdp=4", "data=4", "4 x 4", "Evaluation after step 0", "step 1/6", "step 6/6", "reward", "kl"):
        assert text in done.stdout, text
    for text in (
        "accuracy",
        "tok/s",
        "left",
        "before",
        "after",
        "greedy_answer",
        "16 held-out",
        "greedy_reward/number",
        "intervals]",
        str(done.workdir),
        "summary.json",
    ):
        assert text in done.stdout, text
    for text in (
        "Data: 1,000,000 records",
        "16 to evaluate on",
        "16 held-out records",
        "greedy_reward/number",
        "intervals]",
    ):
        assert text in done.stdout, text
    assert done.stderr == ""
