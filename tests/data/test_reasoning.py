"""Problems of reasoning-gym (extra [reasoning]) depend on the seed alone, are trained or held out, and are scored."""

import importlib.util
import itertools
import json
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from podrl.config import merge
from podrl.data.config import DataConfig
from podrl.data.mixture import reasoning_gym, split
from podrl.data.pipeline import PromptStream, held_out_prompts, set_prompts
from podrl.data.tokenizer import Tokenizer
from podrl.evaluate import Scoring
from podrl.job.config import TINY, complete, parse, with_prompt_length
from podrl.launch import find_config, load_config
from podrl.rewards.compose import RewardConfig, Rewards

MISSING = importlib.util.find_spec("reasoning_gym") is None
needs = pytest.mark.skipif(MISSING, reason="extra [reasoning] is not installed")
FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUMS = DataConfig("reasoning_gym:chain_sum", arguments={"max_terms": 3}, size=200, seed=3)


def parsed(config, **changed):
    values = merge(load_config(find_config(config)).to_dict(), changed)
    return parse(with_prompt_length(ConfigDict(complete(values)).to_dict()))


@needs
def test_a_question_is_trained_or_held_out_and_depends_on_the_seed_alone():
    (part,) = split(SUMS).parts
    train = [part.train[i] for i in range(200)]
    held = [part.held_out[i] for i in range(40)]
    assert not {one["question"] for one in train} & {one["question"] for one in held}
    assert len({one["question"] for one in train}) > 190
    assert [part.train[i] for i in (7, 3)] == [train[7], train[3]]
    assert all(one["question"].count("+") + one["question"].count("-") <= 2 for one in train)
    other = DataConfig(SUMS.path, arguments=SUMS.arguments, size=200, seed=4)
    assert split(other).parts[0].train[0] != train[0]
    assert "reasoning_gym" not in sys.modules  # another process writes the problems


@needs
def test_a_stream_goes_on_where_it_was():
    tokenizer = Tokenizer(TINY)
    given = {"prompts_per_step": 4, "max_prompt_length": 256}
    stream = PromptStream.from_config(SUMS, tokenizer, **given)
    first, second = next(stream), next(stream)
    again = PromptStream.from_config(SUMS, tokenizer, **given)
    again.restore(first.data_state)
    assert next(again).text == second.text
    (held,) = held_out_prompts(SUMS, tokenizer, count=8, max_prompt_length=256)
    assert len(set(held.text)) == 8
    (of_set,) = set_prompts(SUMS, tokenizer, count=8, max_prompt_length=256)
    assert of_set.text == held.text


# Some of these datasets have problems with tuples (rearc), with keys or values that JSON lacks, or scorers that raise
# errors.
@needs
@pytest.mark.parametrize("name", ["chain_sum", "knights_knaves", "prime_factorization", "rearc", "letter_counting"])
def test_the_right_answer_scores_1_and_nonsense_0(name):
    (part,) = split(DataConfig(f"reasoning_gym:{name}", size=20)).parts
    records = [dict(part.train[i]) for i in range(3)]
    for record in records:
        said = [record["answer"], "nonsense"]
        record["completions"] = [{"text": f"<answer>{one}</answer>"} for one in said] + [{"text": record["answer"]}]
    config = RewardConfig(fns=("reasoning_gym",), workers=1)
    with Rewards(config) as rewards:
        found = Scoring(rewards, config, 1.0, 3)(records)["reasoning_gym"]
    assert (found[:, 0] == 1).all() and (found[:, 1] < 0.2).all() and (found[:, 2] == 0).all()


@needs
def test_answers_that_a_scorer_cannot_read_are_told_once(capfd):
    (part,) = split(DataConfig("reasoning_gym:prime_factorization", size=20)).parts
    record = dict(part.train[0])
    with Rewards(RewardConfig(fns=("reasoning_gym",), workers=1)) as rewards:
        for _ in range(2):
            found = rewards.score(["q"], ["<answer>nonsense</answer>"], {"entry": [record["entry"]]})
            assert found.tolist() == [[0.0]]
    assert capfd.readouterr().err.count("The scorer of reasoning_gym:prime_factorization raised") == 1


@needs
def test_a_dataset_with_too_few_questions_is_told(caplog):
    few = DataConfig("reasoning_gym:chain_sum", arguments=FEW, size=1_000_000)
    assert 0 < len(list(reasoning_gym(few).distinct(20))) < 20
    assert "fewer than the 20 of the evaluation" in caplog.text


@needs
def test_what_the_package_refuses_is_named():
    for config, said in (
        (DataConfig("reasoning_gym:chain_sums"), r"no dataset 'chain_sums'; .*'chain_sum'"),
        (DataConfig("reasoning_gym:chain_sum", arguments={"terms": 3}), r"data.arguments=.*'terms'"),
        (DataConfig("reasoning_gym:chain_sum", arguments={"min_terms": 9}), r"data.arguments=.*max_terms"),
        (
            DataConfig("reasoning_gym:chain_sum", arguments=FEW, size=1, seed=0),
            "none of 1000 problems .* too few questions",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            opened = split(config)
            list(itertools.islice(opened.parts[0].held_out, 1))


def test_settings_that_contradict_are_refused():
    with pytest.raises(ValueError, match="only reasoning_gym:NAME does"):
        DataConfig("sums", arguments={"a": 1})
    with pytest.raises(ValueError, match=r"set data_shuffle_seed and DataConfig\.size instead"):
        DataConfig(SUMS.path, arguments={"seed": 1})


def test_without_the_package_the_extra_is_named(tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('not here')")
    code = "from podrl.data.mixture import split; from podrl.data.config import DataConfig\n"
    code += "split(DataConfig('reasoning_gym:chain_sum'))"
    path = f"{tmp_path}:{':'.join(sys.path)}"
    given = {"env": {"PYTHONPATH": path}, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", code], **given)
    assert run.returncode and "[reasoning]'" in run.stderr


def test_the_scorer_of_the_dataset_is_the_default():
    mixed = {"sources": ({"path": "reasoning_gym:chain_sum"}, {"path": "problems"})}
    given = {"data": mixed, "rollout": {"max_prompt_length": 64}}
    job = parsed("grpo_gemma.py", **given)
    assert [source.reward for source in job.data.sources] == [("reasoning_gym",), ()]
    assert "<answer>" in job.data.sources[0].system_prompt
    named = parsed("grpo_gemma.py", **given, reward={"fns": ("reasoning_gym", "number"), "weights": ()})
    assert [source.reward for source in named.data.sources] == [(), ()]
    assert parsed("grpo_reasoning.py").reward.fns == ("reasoning_gym",)


@needs
@pytest.mark.e2e
def test_the_config_trains(tmp_path):
    command = [sys.executable, "-m", "podrl.launch", "--config=grpo_reasoning.py", f"--workdir={tmp_path}/run"]
    command += ["--config.trainer.max_steps=1", "--config.eval.problems=8", "--config.rollout.prompts_per_step=4"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("reward/reasoning_gym" in row for row in rows)
    assert any("eval/greedy_reward/reasoning_gym" in row for row in rows)
