"""Evaluations: rewards beside accuracies, the standard error of every mean, and the shares of a pod's hosts."""

import dataclasses
import math
import types
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from endpoints import joined

from podrl.cluster.config import Mode
from podrl.engine.config import RolloutConfig
from podrl.learner.evaluate import EvalConfig, Evaluator, summarised
from podrl.learner.evaluations.hosts import RemoteEvaluations
from podrl.learner.experience import share_of
from podrl.learner.generation import Generator
from podrl.learner.settings import GRPOConfig
from podrl.rewards.compose import RewardConfig, Rewards
from podrl.rundir.console import make_console
from podrl.rundir.summary import print_before_after
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod
from podrl.runtime.roles import Hosts
from podrl.types import NO_EPISODE, STOP_FAILED, BatchError, Policy, Prompts, Rollouts, blank_columns

LIMIT = 9


def samples_of(prompts: Prompts, completions: list[str]) -> Rollouts:
    B = len(completions)
    zeros_BT = np.zeros((B, 4), np.float32)
    return Rollouts(
        prompts=prompts,
        group_B=np.arange(B) // (B // len(prompts.length_P)),
        length_B=np.full(B, 4),
        mask_BT=zeros_BT + 1,
        turn_reward_BT=zeros_BT,
        stop_B=np.array([STOP_FAILED if text == "lost" else 0 for text in completions]),
        completions=completions,
        episodes=[NO_EPISODE] * B,
        seconds=0.0,
        **blank_columns((B, 4), pad_id=0),
    )


class Cluster:
    """A cluster with a foreign engine: `generate` returns the prepared greedy texts for group_size 1, the sampled texts
    for group_size 2."""

    env_client = reward_model = None
    config = types.SimpleNamespace(rollout=lambda: RolloutConfig(max_tokens_to_generate=LIMIT), rollout_engine=object)

    def __init__(self, greedy, sampled):
        self.texts = {1: greedy, 2: sampled}
        self.asked = []

    def generate(self, prompts, policy, *, mode, group_size, step, sampling):
        assert mode is Mode.EVAL
        self.asked.append((policy, group_size, sampling.temperature, sampling.max_new))
        return samples_of(prompts, self.texts[group_size])


def prompts_with(answers) -> Prompts:
    P = len(answers)
    fields = {"answer": list(answers)}
    return Prompts(np.zeros((P, 1), np.int32), np.ones(P, np.int32), np.arange(P), ["p"] * P, fields, b"")


BATCHES = []


def length(prompts, completions, **fields):
    BATCHES.append(len(completions))
    return [float(len(text)) for text in completions]


def test_a_policy_is_scored_greedily_and_sampled_by_the_rewards_of_the_run():
    BATCHES.clear()
    cluster = Cluster(["1", "22", "x"], ["1", "1", "4444", "22", "xxx", "1"])
    right = lambda completion, answer: {"answer": float(completion == answer)}  # noqa: E731
    # A worker process cannot import a lambda, so the reward function runs in this process, where it appends to BATCHES.
    with Rewards(RewardConfig(fns=(lambda *a, **k: length(*a, **k),), weights=(0.5,))) as rewards:
        generator = Generator(cluster, rewards, GRPOConfig(num_generations=2))  # pyright: ignore[reportArgumentType]
        evaluate = Evaluator(cluster, [prompts_with("12x")], EvalConfig(samples=2, show=1), scorer=right)  # pyright: ignore[reportArgumentType]
        evaluate.rewards = lambda rollouts: generator.judged(rollouts, at_once=2)
        metrics, shown = evaluate("policy", 7)  # pyright: ignore[reportArgumentType]
    assert cluster.asked == [("policy", 1, 0.0, LIMIT), ("policy", 2, 1.0, LIMIT)]
    assert BATCHES == [2, 1, 4, 2]  # at most 2 prompts a call: 2 and 1 greedy completions, 4 and 2 sampled ones
    name = rewards.names[0]
    assert metrics["eval/greedy_answer"] == pytest.approx(2 / 3) and metrics["eval/sampled_answer"] == pytest.approx(
        1 / 3
    )
    assert metrics["eval/sampled_pass"] == pytest.approx(1 / 3) and metrics["eval/records"] == 3
    assert metrics[f"eval/greedy_reward/{name}"] == pytest.approx(4 / 3)
    assert metrics["eval/greedy_reward"] == pytest.approx(2 / 3)
    assert metrics[f"eval/sampled_reward/{name}"] == pytest.approx(12 / 6)
    # The mean lengths of the records' two samples are 1, 3 and 2: their standard deviation 1 is divided by sqrt(3).
    assert metrics[f"eval/error/sampled_reward/{name}"] == pytest.approx(1 / math.sqrt(3))
    record = {"evaluation": "greedy", "prompt": "p", "completion": "1", "truth": "1", "answer": 1.0}
    assert shown == [record | {"rewards": {"reward": 0.5, f"reward/{name}": 1.0}}]


def test_a_task_without_answers_has_rewards_and_no_accuracies():
    cluster = Cluster(["a", "bb"], ["a", "lost", "bb", "bb"])
    batch = dataclasses.replace(prompts_with("12"), fields={})
    given = lambda rollouts: {  # noqa: E731
        "reward": np.where(rollouts.stop_B == STOP_FAILED, np.nan, [float(len(text)) for text in rollouts.completions])
    }
    evaluate = Evaluator(cluster, [batch], EvalConfig(samples=2), rewards=given)  # pyright: ignore[reportArgumentType]
    metrics, shown = evaluate("policy", 1)  # pyright: ignore[reportArgumentType]
    assert {name for name in metrics if "error" not in name} == {
        "eval/greedy_reward",
        "eval/sampled_reward",
        "eval/records",
    }
    assert metrics["eval/sampled_reward"] == pytest.approx(5 / 3)  # the sample "lost" failed, so no mean counts it
    assert metrics["eval/error/sampled_reward"] == pytest.approx(0.5)
    assert "truth" not in shown[0]


def test_shares_of_a_pod_joined_are_the_whole():
    rng = np.random.default_rng(0)
    scores = {
        "eval/sampled_answer": (rng.random((7, 3)) > 0.5).astype(float),
        "eval/sampled_reward": rng.random((7, 3)),
    }
    cut = [{name: score[rows] for name, score in scores.items()} for rows in (slice(0, 1), slice(1, 7))]
    joined = {name: np.concatenate([part[name] for part in cut]) for name in scores}
    assert summarised(joined) == summarised(scores)
    assert "eval/error/sampled_reward" not in summarised(cut[0])  # a single record has no standard deviation


def test_the_table_shows_intervals(capsys):
    before = {"greedy_answer": 0.25, "greedy_reward": -1.0, "error/greedy_answer": 0.1, "error/greedy_reward": 0.3}
    after = {"greedy_answer": 0.5, "greedy_reward": 1.0, "error/greedy_answer": 0.1, "error/greedy_reward": 0.4}
    print_before_after(make_console(), {"before": before | {"records": 9.0}, "after": after | {"records": 9.0}})
    printed = capsys.readouterr().out
    for text in (
        "9 held-out records",
        "25.0% [11.4, 46.3]",
        "+25.0 points [",
        "-1.000 [-1.588, -0.412]",
        "+2.000 [+1.020, +2.980]",
    ):
        assert text in printed, printed
    assert "error" not in printed


class Echo(Cluster):
    """A cluster that answers every prompt with the prompt's index in the data."""

    config = types.SimpleNamespace(
        rollout=lambda: RolloutConfig(max_tokens_to_generate=LIMIT, lanes=4), rollout_engine=object
    )

    def __init__(self):
        super().__init__([], [])
        self.made = []

    def generate(self, prompts, policy, *, mode, group_size, step, sampling):
        if len(self.made) == self.fails_at:
            raise BatchError("the judge is away")
        self.made.append(len(prompts.index_P) * group_size)
        return samples_of(prompts, [str(index) for index in np.repeat(prompts.index_P, group_size)])

    fails_at = -1


def echoing() -> Evaluator:
    right = lambda completion, answer: {"answer": float(completion == answer)}  # noqa: E731
    config = EvalConfig(samples=2, show=3)
    return Evaluator(Echo(), [prompts_with("0129456")], config, scorer=right)  # pyright: ignore[reportArgumentType]


def test_an_evaluation_in_pieces_of_as_many_samples_as_lanes_is_the_whole_one():
    whole, pieces = echoing(), echoing()
    work = pieces.in_pieces(Policy({}, 3), 3, most=lambda: 7)
    while True:
        try:
            next(work)
        except StopIteration as end:
            scores, shown = end.value
            break
    assert whole(Policy({}, 3), 3) == (summarised(scores), shown)
    assert whole._cluster.made == [7, 14]  # pyright: ignore[reportAttributeAccessIssue]
    assert pieces._cluster.made == [2, 4, 2, 4, 2, 4, 1, 2]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_shares_have_the_order_of_the_records_however_many_they_are(count):
    """Two evaluations are compared record by record. Hosts may have left between them, so the order of the records must
    not depend on the number of shares."""
    batches = [prompts_with("0129"), prompts_with("456"), prompts_with("7")]
    shares = [share_of(batches, index, count) for index in range(count)]
    assert "".join(text for share in shares for prompts in share for text in prompts.fields["answer"]) == "01294567"
    sizes = [sum(len(prompts.length_P) for prompts in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and all(len(prompts.length_P) for share in shares for prompts in share)


def test_the_leader_keeps_every_records_mean_of_the_hosts_scores():
    kept = {}
    with joined(Hosts((0,), (1,))) as (pod, _):
        given: Any = types.SimpleNamespace(open_shares=lambda *_: None, forget=lambda _: None)
        parts = [np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[0.0, np.nan]])]
        messages = [Message({"samples": []}, {"eval/sampled_answer": part}) for part in parts]
        one = RemoteEvaluations(pod, given, 30.0, lambda *_: messages, lambda _: None, keep=kept.__setitem__)
        one.begin(3)
        one.evaluated(wait=True)
        one.close()
    assert kept[3]["eval/sampled_answer"] == [0.5, 1.0, 0.0]


def test_an_evaluation_that_failed_forbids_a_checkpoint_on_all_trainer_hosts():
    """After a failed evaluation no trainer host saves a checkpoint, so a resumed run starts before the evaluation and
    repeats it."""
    with joined(Hosts((0, 1), (2,), eval=(3,))) as pods:
        given: Any = types.SimpleNamespace(open_shares=lambda *_: None, forget=lambda _: None)
        made = Future[list[Message]]()

        def of(pod: Pod) -> RemoteEvaluations:
            return RemoteEvaluations(pod, given if pod.leads else None, 30.0, lambda *_: made.result(), lambda _: None)

        each = [of(pod) for pod in pods[:2]]
        for one in each:
            one.begin(3)
        assert [one.unsaved() for one in each] == [False, False]
        made.set_result([Message({"error": "the judge is away", "away": False})])
        for one in each:
            with pytest.raises(BatchError, match="the judge is away"):
                one.evaluated(wait=True)
        assert [one.unsaved() for one in each] == [True, True]
        for one in each:
            one.close()
