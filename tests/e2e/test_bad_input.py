"""A run skips prompts that are too long; a run directory with another configuration is refused and left unchanged."""

import json
import pathlib

import pytest
from processes import TWO_DEVICES, Job, run

pytestmark = pytest.mark.e2e
QUESTIONS = [{"question": f"Tom has {n} apples and buys 2. How many?", "answer": str(n + 2)} for n in range(40)]


def refused(done: Job, *texts: str) -> None:
    """Asserts that the output fits on one screen, has no traceback and contains each of `texts`."""
    assert "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 24, done.stderr
    assert "podrl: error: " in done.stderr
    for text in texts:
        assert text in done.stderr, f"{text!r} is not in:\n{done.stderr}"


def write_jsonl(path: pathlib.Path, records) -> pathlib.Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_a_few_records_some_of_them_too_long_train_without_them_and_without_an_evaluation(tmp_path):
    """No question is held out, because eval_fraction is 0. Five questions are trained on; the sixth is too long, and
    each skip of it is counted."""
    long = {"question": "Tom counts his apples. " * 30 + "How many?", "answer": "3"}
    data = write_jsonl(tmp_path / "data.jsonl", [*QUESTIONS[:3], long, *QUESTIONS[3:5]])
    args = [f"--config.data.path={data}", "--config.data.system_prompt=", "--config.rollout.max_prompt_length=64"]
    args += ["--config.data.eval_fraction=0.0", "--config.eval.samples=2", "--config.trainer.max_steps=3", TWO_DEVICES]
    done = run(tmp_path / "run", *args)
    assert "no evaluation" in done.stderr and "data.eval_fraction" in done.stderr and "Traceback" not in done.stderr
    assert "Skipped so far" in done.stderr and "longer than 64 tokens" in done.stderr
    skipped = [record["data/skipped_prompts"] for record in done.records()]
    assert len(skipped) == 3 and skipped == sorted(skipped) and skipped[-1] >= 2, (
        "12 prompts take at least two passes over 6 records, one of which is too long"
    )


@pytest.mark.nightly("podrl/job/alike.py")
def test_a_workdir_of_another_configuration_says_what_differs_and_is_left_alone(tmp_path):
    workdir, short = tmp_path / "run", ("--config.trainer.max_steps=1", "--config.eval.problems=0", TWO_DEVICES)
    run(workdir, *short)
    before = (workdir / "config.json").read_text()
    done = run(workdir, *short, "--config.grpo.beta=0.5", "--config.seed=3", code=1)
    refused(done, str(workdir), "grpo.beta was 0.04, now 0.5", "seed was 0, now 3", "--workdir")
    assert (workdir / "config.json").read_text() == before
    (workdir / "config.json").write_text("{")
    resumed = run(workdir, *short)  # every checkpoint holds a copy of config.json
    assert f"{workdir / 'config.json'} is damaged" in resumed.stderr
    assert (workdir / "config.json").read_text() == before
