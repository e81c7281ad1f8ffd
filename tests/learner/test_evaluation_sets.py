"""The sets of eval.sets are opened, sampled, scored and named as configured, in the evaluations where they are due."""

import dataclasses
import json
import types
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_evaluate import Cluster, prompts_with, samples_of

from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig, Sampling
from podrl.job.config import TINY, complete, parse
from podrl.job.evaluation import held_out, make_evaluator
from podrl.launch import find_config, load_config
from podrl.learner.evaluate import EvalConfig, Evaluator, HeldOut, SetConfig, summarised
from podrl.learner.report import SampleReport
from podrl.learner.settings import GRPOConfig
from podrl.types import Experience, LeftOut


class Drawing(Cluster):
    """A cluster that completes every prompt with the next text of `texts`, and records the requests."""

    def __init__(self, texts, tokenizer=None):
        super().__init__([], [])
        self.texts, self.tokenizer, self.prompts = list(texts), tokenizer, []

    def generate(self, prompts, policy, *, mode, group_size, step, sampling):
        self.asked.append((len(prompts.length_P), group_size, sampling.temperature, sampling.max_new))
        self.prompts += prompts.text
        count = len(prompts.length_P) * group_size
        drawn, self.texts = self.texts[:count], self.texts[count:]
        return samples_of(prompts, drawn)


def test_held_out_prompts_are_sampled_by_settings_of_their_own():
    of = {temperature: Drawing([*"1111"]) for temperature in (0.5, 0.0)}
    for temperature, cluster in of.items():
        own = Sampling(temperature=temperature, max_new=5)
        Evaluator(cluster, [prompts_with("1")], EvalConfig(samples=3), scorer=right, sampled=own)("policy", 0)  # pyright: ignore[reportArgumentType]
    assert of[0.5].asked == [(1, 1, 0.0, 5), (1, 3, 0.5, 5)]
    assert of[0.0].asked == [(1, 1, 0.0, 5)]  # at temperature 0 further samples would equal the first


def test_evaluations_stop_where_training_does():
    held = HeldOut([prompts_with("1")], Sampling(stop_strings=("b",)), 1, right, name="hard")

    class Stopping(Drawing):
        config = types.SimpleNamespace(
            rollout=lambda: RolloutConfig(stop_strings=("</answer>", "<eos>")), rollout_engine=object
        )

        def generate(self, prompts, policy, **how):
            stops.append(how["sampling"].stop_strings)
            return super().generate(prompts, policy, **how)

    stops = []
    cluster: Any = Stopping([*"11", *"11"], Tokenizer.load(TINY))
    Evaluator(cluster, [prompts_with("1")], EvalConfig(samples=1), scorer=right, sets=[held])("policy", 0)  # pyright: ignore[reportArgumentType]
    # '<eos>' is left out: it is a special token, not text, and the rollout itself ends samples at special tokens.
    assert stops == [("</answer>",), ("</answer>",), ("b",), ("b",)]


def right(completion, answer):
    return {"answer": float(completion == answer)}


def test_a_set_has_metrics_of_its_own_when_it_is_due():
    held = HeldOut([prompts_with("12")], Sampling(temperature=0.7, max_new=5), 3, right, name="hard", every=2)
    cluster = Drawing([*"1x", *"1x", *"11x22x"])
    nth = {0: 0, 4: 1, 8: 2}.get
    evaluate = Evaluator(
        cluster, [prompts_with("1")], EvalConfig(samples=1, show=1), scorer=right, sets=[held], nth=nth
    )  # pyright: ignore[reportArgumentType]
    metrics, shown = evaluate("policy", 0)  # pyright: ignore[reportArgumentType]
    assert cluster.asked == [(1, 1, 0.0, 9), (1, 1, 1.0, 9), (2, 1, 0.0, 5), (2, 3, 0.7, 5)]
    assert {name: value for name, value in metrics.items() if "error" not in name} == pytest.approx(
        {
            "eval/greedy_answer": 1.0,
            "eval/sampled_answer": 0.0,
            "eval/records": 1.0,
            "eval/hard/greedy_answer": 0.5,
            "eval/hard/sampled_answer": 4 / 6,
            "eval/hard/sampled_pass": 1.0,
            "eval/hard/sampled_majority": 1.0,
            "eval/hard/records": 2.0,
        }
    )
    assert metrics["eval/error/hard/greedy_answer"] == pytest.approx(0.5)
    assert [record.get("set") for record in shown] == [None, "hard"]
    cluster.texts = ["1", "1"]
    again, _ = evaluate("policy", 4)  # pyright: ignore[reportArgumentType]
    assert set(again) == {"eval/greedy_answer", "eval/sampled_answer", "eval/records"}
    cluster.texts = ["1", "1", *"12", *"xxx222"]
    later, _ = evaluate("policy", 8)  # pyright: ignore[reportArgumentType]
    assert later["eval/hard/sampled_majority"] == 0.5 and later["eval/hard/greedy_answer"] == 1.0


def test_groups_of_the_held_out_records_have_metrics_of_their_own():
    batch = prompts_with("123")
    batch = dataclasses.replace(batch, fields=batch.fields | {"group": ["easy", None, "hard"]})
    cluster = Drawing([*"1x3", *"112xx3"])
    config = EvalConfig(samples=2, show=0)
    evaluate = Evaluator(cluster, [batch], config, scorer=right, groups=("easy", "hard", "none"))  # pyright: ignore[reportArgumentType]
    metrics, _ = evaluate("policy", 0)  # pyright: ignore[reportArgumentType]
    told = {name: value for name, value in metrics.items() if "/group_" in name}
    assert told == {
        "eval/group_easy/greedy_answer": 1.0,
        "eval/group_easy/sampled_answer": 1.0,
        "eval/group_easy/sampled_pass": 1.0,
        "eval/group_easy/records": 1.0,
        "eval/group_hard/greedy_answer": 1.0,
        "eval/group_hard/sampled_answer": 0.5,
        "eval/group_hard/sampled_pass": 1.0,
        "eval/group_hard/records": 1.0,
    }
    assert metrics["eval/records"] == 3.0 and metrics["eval/greedy_answer"] == pytest.approx(2 / 3)
    cluster.texts = [*"4", *"4x", *"1x3", *"112xx3"]
    batches = [prompts_with("4"), batch]  # the record of the first batch is in no group
    evaluate = Evaluator(cluster, batches, config, scorer=right, groups=("easy", "hard", "none"))  # pyright: ignore[reportArgumentType]
    metrics, _ = evaluate("policy", 0)  # pyright: ignore[reportArgumentType]
    assert {name: value for name, value in metrics.items() if "/group_" in name} == told


def test_groups_of_a_step_have_rewards_of_their_own():
    batch = prompts_with("1234")
    fields = {"group": ["easy", None, "hard", "hard"], "answer": ["1", None, 0, "4"]}
    batch = dataclasses.replace(batch, fields=fields)
    rollouts = samples_of(batch, ["x"] * 8)
    lost_B = np.repeat([0, 0, 0, LeftOut.FAILED], 2)
    reward_B = np.arange(8.0)
    made = Experience(rollouts, 2 * reward_B[None], reward_B, reward_B, 0.0, {}, lost_B)
    told: dict = {"reward_names": ("length",), "metric_fns": (), "watched": (), "skipped": lambda: 0}
    report = SampleReport(GRPOConfig(num_generations=2), **told, groups=("easy", "hard", "none"))
    found = {name: value for name, value in report.describe(made).items() if name.startswith("group/")}
    assert found == {
        "group/easy/reward": 0.5,
        "group/easy/prompts": 1.0,
        "group/easy/reward/length": 1.0,
        "group/hard/reward": 4.5,
        "group/hard/prompts": 1.0,
        "group/hard/reward/length": 9.0,
    }
    assert [record.get("group") for record in report.samples(made)] == ["easy", None, "hard"]
    assert [record.get("truth", "none") for record in report.samples(made)] == ["1", "none", 0], (
        "the reference 0 is written, too"
    )
    assert report.describe(made)["reward/zero/length"] == 1 / 6, "the mean is over the samples that have a reward"
    plain = SampleReport(GRPOConfig(num_generations=2), **told)
    assert not any(name.startswith("group/") for name in plain.describe(made))


def test_shares_of_a_small_set_are_on_some_hosts_alone():
    scores = {"eval/greedy_answer": np.ones((2, 1)), "eval/few/greedy_reward/length": np.zeros((1, 1))}
    assert summarised(scores)["eval/few/records"] == 1.0 and summarised(scores)["eval/records"] == 2.0


def planned(sets, **changes):
    values = load_config(find_config("grpo_gemma.py")).to_dict()
    values["rollout"] |= {"max_prompt_length": 200}
    values["eval"] = {"problems": 3, "samples": 2, "sets": sets}
    for group, fields in changes.items():
        values[group] = values.get(group, {}) | fields
    return parse(ConfigDict(complete(values)).to_dict())


def test_sets_are_opened_as_sources_are(tmp_path):
    records = [{"ask": f"{n} + 1", "truth": str(n + 1)} for n in range(6)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    own = {"question_field": "ask", "answer_field": "truth", "template": "plain", "system_prompt": "Be short."}
    mine = {"name": "mine", "path": f"{tmp_path}/mine.jsonl", "problems": 4, "samples": 0, "every": 2, **own}
    sums = {"name": "sums", "path": "sums", "temperature": 0.5, "max_tokens_to_generate": 7, "reward": ("length",)}
    job = planned((mine, sums), trainer={"max_steps": 8, "eval_every_n_steps": 2})
    assert job.reward.named == ("length",)
    assert planned((sums,), reward={"named": ("number",)}).reward.named == ("length", "number"), (
        "functions named by the set and by reward.named are both kept"
    )
    cluster = Drawing(["x"] * 99, Tokenizer(TINY))
    evaluate = make_evaluator(cluster, job)  # pyright: ignore[reportArgumentType]
    assert evaluate is not None
    metrics, _ = evaluate("policy", 0)  # pyright: ignore[reportArgumentType]
    assert cluster.asked == [(3, 1, 0.0, 9), (3, 2, 1.0, 9), (4, 1, 0.0, 40), (3, 1, 0.0, 7), (3, 2, 0.5, 7)]
    assert metrics["eval/mine/records"] == 4 and "eval/mine/sampled_answer" not in metrics
    assert "Be short." in cluster.prompts[6] and "0 + 1" in cluster.prompts[6]
    cluster.asked.clear()
    evaluate("policy", 2)  # pyright: ignore[reportArgumentType]
    assert [asked[0] for asked in cluster.asked] == [3, 3, 3, 3]  # `mine` is due in every other evaluation
    cluster.asked.clear()
    evaluate("policy", 8)  # pyright: ignore[reportArgumentType]
    assert len(cluster.asked) == 5  # the last evaluation has all sets
    cluster.asked.clear()
    for i in range(4):
        evaluate.scores("policy", 0, (i, 4))  # pyright: ignore[reportArgumentType]
    assert sum(asked[0] for asked in cluster.asked if asked[1] == 1) == 10


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([{"name": "greedy_x", "path": "sums"}], r"name='greedy_x' must be"),
        ([{"name": "a/b", "path": "sums"}], r"name='a/b' must be"),
        ([{"name": "a", "path": "sums"}, {"name": "a", "path": "problems"}], r"'a' is the name of two sets"),
        ([{"name": "a", "path": "sums", "max_tokens_to_generate": 9999}], r"max_tokens_to_generate=9999.*at most"),
        ([{"name": "a", "path": "sums", "sample": 3}], r"sample"),
    ],
)
def test_sets_that_cannot_be_are_refused(sets, words):
    with pytest.raises(ValueError, match=words):
        planned(tuple(sets))
    with pytest.raises(ValueError, match=r"a lacks problems, and eval\.problems=0"):
        planned(({"name": "a", "path": "sums"},), eval={"problems": 0})


def test_records_have_an_environment_that_the_job_has():
    a_set = {"name": "a", "path": "sums"}
    with pytest.raises(ValueError, match=r"a has env='none', and the job's environments are \(nothing\)"):
        planned((a_set | {"env": "none"},))
    acts = {"tools": ("calculator",), "others": ("none",), "max_tool_calls": 1}
    more = {"env": acts, "rollout": {"max_response_tokens": 96}}
    planned((a_set | {"env": "none"},), **more, data={"sources": ({"path": "sums", "env": "tools"},)})
    with pytest.raises(ValueError, match=r"sums has env='non', and the job's environments are tools, none: name it"):
        planned((a_set,), **more, data={"sources": ({"path": "sums", "env": "non"},)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"roles": {"eval": {"mesh": "data=1"}}},
            r"config\.roles\.eval has no key 'mesh': evaluations run on the rollout mesh",
        ),
        ({"eval": {"beside": True}}, r"config\.eval has no key 'beside': training stops for evaluations"),
    ],
)
def test_places_that_evaluations_had_are_refused_with_those_there_are(changes, words):
    with pytest.raises(ValueError, match=words + r".* --topology=split, roles\.eval\.hosts names hosts"):
        planned((), **changes)


def test_the_data_of_a_set_are_its_own():
    job = planned(())
    data = SetConfig(name="a", path="sums", reward=("length",), env="none").data(job.data)
    assert data.sources[0].fields == {"reward_fns": ["length"], "env": "none"} and data.eval_path == ""
    sums = dataclasses.replace(job.data, path="reasoning_gym:chain_sum", arguments={"min_terms": 2})
    for path, arguments in ((sums.path, sums.arguments), ("reasoning_gym:letter_counting", {})):
        (single,) = SetConfig(name="a", path=path).data(sums).singles()
        assert single.arguments == arguments


def test_a_file_with_one_question_says_why_nothing_is_held_out(tmp_path, caplog):
    """All records of a question are trained on, or all are held out. The question here is short, so its length is not
    why nothing is held out."""
    (tmp_path / "one.jsonl").write_text('{"question": "q", "answer": "5"}\n' * 9)
    job = planned((), data={"path": str(tmp_path / "one.jsonl")})
    assert held_out(job, Tokenizer(TINY)) == []
    assert "a question's hash decides whether its records are held out" in caplog.text
