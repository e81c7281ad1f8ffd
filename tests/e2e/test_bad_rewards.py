"""A failing reward function ends the run with an error that names the function and the sample.

A traceback is printed only for an exception in the function. Once the function is repaired, the run resumes.
"""

import json

import pytest
from processes import TWO_DEVICES, await_end, job, run, trained_steps

from podrl.storage.checkpoint import read_state

pytestmark = pytest.mark.e2e
# The function works for three steps (48 samples), then fails as the file `way` says.
REWARD = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent


def fickle(prompts, completions, **fields):
    with (HERE / "calls").open("a") as calls:  # a worker that was killed is replaced: memory would forget
        calls.write("." * len(completions))
    way = (HERE / "way").read_text()
    print("reward functions may print")
    if len((HERE / "calls").read_text()) <= 48 or way == "good":
        return [float(len(text)) for text in completions]
    if way == "raises":
        raise RuntimeError("no such unit")
    if way == "nan":
        return [float("nan") if i == 2 else 1.0 for i in range(len(completions))]
    if way == "length":
        return [1.0] * (len(completions) - 1)
    if way == "away":
        raise ConnectionRefusedError("nobody listens")
    if way == "exits":

        os._exit(3)
    while True:
        time.sleep(1)
"""
EXPECTED = {
    "raises": ["RuntimeError: no such unit", " of 16 (prompt ", "completion "],
    "nan": ["nan", "not a finite number", " of 16 (prompt "],
    "length": ["values for", " completions", " of 16 (prompt "],
    "exits": ["exit code 3", " of 16 (prompt "],
    "away": [
        "a service that has been away for",
        "nobody listens",
        "same command resumes the run",
        "reward.deadline_s=2 ",
    ],
    "hangs": ["did not answer in time", "nor for an empty completion", " of 16 (prompt ", "reward.deadline_s=2."],
}


# The other failures differ from an exception only in the code that calls rewards, so their cases run only if that code
# changes. The case of an exception runs at every change.
CALLS = pytest.mark.nightly("podrl/rewards", "podrl/workers")


@pytest.mark.parametrize("way", ["raises", *(pytest.param(w, marks=CALLS) for w in EXPECTED if w != "raises")])
def test_a_reward_function_that_fails(way, tmp_path):
    (tmp_path / "fickle.py").write_text(REWARD)
    (tmp_path / "way").write_text(way)
    args = ["--config.reward.fns=('fickle.py:fickle',)", "--config.eval.problems=0", "--config.reward.deadline_s=2.0"]
    args.append(TWO_DEVICES)
    with job(tmp_path / "run", *args) as failed:
        failed.wait_for_step(1)
        workers = failed.children()
        failed.finish(42 if way == "away" else 1)
    await_end(workers)
    assert "Traceback (most recent call last)" not in failed.stderr or way == "raises"
    message = failed.stderr[failed.stderr.index("podrl: error: ") :]
    assert len(message.splitlines()) <= 24
    for text in ["Reward function fickle", *EXPECTED[way]]:
        assert text in message, failed.stderr
    # The three good steps are recorded and saved, and the failed batch is tried again.
    assert trained_steps(tmp_path / "run") == [1, 2, 3]
    assert read_state(tmp_path / "run" / "checkpoints")[0] == 3
    if way == "nan":
        (tmp_path / "way").write_text("good")
        run(tmp_path / "run", *args)
        assert trained_steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
        samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
        assert all(sample["reward"] == sample["fickle"] == len(sample["completion"]) for sample in samples)
