"""The doctor finds single tokens that are planted in the trace of a recorded run, and names them."""

import numpy as np
import pytest
import recorded

from podrl import doctor
from podrl.rundir import trace
from podrl.rundir.checks import CHECKS
from podrl.types import NO_EPISODE, Experience, Prompts, Rollouts, blank_columns

STEP, STALENESS = 10, 1
ACTED = {"turns": [{"by": "model"}, {"by": "tool"}, {"by": "model"}], "metrics": {}, "seconds": 0.1}


def healthy():
    """Makes two samples of each of two prompts; returns the batch and the columns of its trace. The last sample used a
    tool."""
    length_P, length_B = np.array([2, 3], np.int32), np.array([6, 5, 7, 8], np.int32)
    place_BT, prompt_B = np.arange(8)[None], np.repeat(length_P, 2)
    mask_BT = ((place_BT >= prompt_B[:, None]) & (place_BT < length_B[:, None])).astype(np.float32)
    mask_BT[3, 5] = 0  # the tool's output
    logprob_BT = np.where(mask_BT > 0, -0.5 - place_BT / 10, 0.0).astype(np.float32)
    version_BT = np.where(mask_BT > 0, STEP - 1, -1).astype(np.int32)
    version_BT[2, 3] = STEP - 1 - STALENESS
    texts = {"text": ["a", "b"], "fields": {}, "data_state": b"{}"}
    prompts = Prompts(tokens_PT=np.ones((2, 3), np.int32), length_P=length_P, index_P=np.arange(2), **texts)
    rollouts = Rollouts(
        prompts=prompts,
        group_B=np.array([0, 0, 1, 1], np.int32),
        length_B=length_B,
        mask_BT=mask_BT,
        turn_reward_BT=np.zeros_like(mask_BT),
        stop_B=np.zeros(4, np.int32),
        completions=list("wxyz"),
        episodes=[NO_EPISODE, NO_EPISODE, NO_EPISODE, ACTED],
        seconds=0.1,
        **blank_columns(mask_BT.shape, pad_id=0)
        | {"tokens_BT": (place_BT + 10 * np.arange(4)[:, None]).astype(np.int32)}
        | {"logprob_BT": logprob_BT, "raw_logprob_BT": logprob_BT, "version_BT": version_BT},
    )
    columns = {"advantage": np.ones_like(mask_BT), "trained": mask_BT.copy(), "trainer_logprob": logprob_BT + 1e-6}
    return Experience(
        rollouts, np.ones((1, 4)), np.array([1.0, 0.5, 0.0, 1.0]), np.zeros(4), 0.1, {}, np.zeros(4, np.int32)
    ), columns


def diagnosed(folder, plant=lambda rollouts, columns: None, damage=False):
    """Writes a recorded run whose trace is `healthy()` as `plant` changes it; returns the doctor's findings."""
    experience, columns = healthy()
    plant(experience.rollouts, columns)
    trainer_BT = columns.pop("trainer_logprob")
    extras = trace.TraceExtras(["answer"], columns, lambda: {"trainer_logprob": trainer_BT})
    run = recorded.run("stale")
    assert run["config"]["grpo"]["max_staleness"] == STALENESS
    directory = recorded.write(run, folder / "run")
    (folder / "run" / trace.FOLDER).mkdir()
    packed = trace.content(STEP, experience, extras, lambda token: f"w{token}")
    (folder / "run" / trace.FOLDER / trace.file_name(STEP)).write_bytes(packed[: len(packed) // (2 if damage else 1)])
    return doctor.examine(directory)


def put(name, sample, token, value):
    """Returns a function that sets the value of the column `name` at one token of one sample."""

    def plant(rollouts, columns):
        array = columns[name] if name in columns else getattr(rollouts, f"{name}_BT")
        array[sample, token] = value

    return plant


SAMPLED, WEIGHTS = "a token that was not sampled counts as sampled", "a token of other weights"
APART, ADVANTAGE = "a token that the trainer does not reproduce", "an advantage that is not a number"
PLANTED = [
    (SAMPLED, put("mask", 2, 1, 1.0), ("prompt 1, sample 0, token 1 ('w21')", "of the prompt")),
    (SAMPLED, put("version", 3, 5, 9), ("prompt 1, sample 1, token 5", "does not fit the version")),
    (SAMPLED, put("trained", 3, 5, 1.0), ("prompt 1, sample 1, token 5", "counts in the loss")),
    (SAMPLED, put("logprob", 0, 4, np.nan), ("prompt 0, sample 0, token 4", "not finite")),
    (WEIGHTS, put("version", 1, 3, STEP), ("prompt 0, sample 1, token 3", "version 10, not 8 to 9")),
    (WEIGHTS, put("version", 1, 3, STEP - 2 - STALENESS), ("version 7, not 8 to 9", "(1 such tokens)")),
    (APART, put("trainer_logprob", 1, 4, -1.3), ("prompt 0, sample 1, token 4", "-1.3 for the trainer and -0.9")),
    (ADVANTAGE, put("advantage", 2, 4, np.inf), ("prompt 1, sample 0, token 4", "reward of its sample is 0")),
]


def test_a_healthy_trace_is_without_a_finding(tmp_path):
    assert diagnosed(tmp_path) == []


@pytest.mark.parametrize(("name", "plant", "words"), PLANTED)
def test_a_token_that_is_planted_is_named(name, plant, words, tmp_path):
    (found,) = diagnosed(tmp_path, plant)
    assert (found.name, found.step, found.sample) == (name, STEP, "trace/step_00000010.npz")
    assert all(word in found.text for word in words), found.text
    assert "SECTION" not in found.key


def test_a_token_of_older_weights_is_not_compared_with_the_trainers(tmp_path):
    assert diagnosed(tmp_path, put("trainer_logprob", 2, 3, -9.0)) == []


def test_an_answer_without_tools_is_sampled_from_its_prompt_on(tmp_path):
    def forgotten(rollouts, columns):
        rollouts.mask_BT[0, 3], rollouts.version_BT[0, 3], columns["trained"][0, 3] = 0, -1, 0

    (found,) = diagnosed(tmp_path, forgotten)
    assert "prompt 0, sample 0, token 3 ('w3'): it is of an answer without tools" in found.text


def test_a_damaged_trace_is_said_and_the_rest_is_read(tmp_path):
    (found,) = diagnosed(tmp_path, damage=True)
    assert (found.name, found.step) == ("a trace that cannot be read", STEP) and "cannot be read" in found.text


def test_every_check_of_tokens_has_a_trace_it_is_planted_in():
    names = {row.name for row in CHECKS if row.kind == "trace"}
    assert names == {name for name, *_ in PLANTED} | {"a trace that cannot be read"}
