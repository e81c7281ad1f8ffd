"""Tests agent programs in processes of their own: their requests are trained; a failed program's sample is lost and
counted."""

import asyncio
import dataclasses
import itertools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from waits import PATIENCE_S, is_running, until

from podrl import serve
from podrl.config import merge
from podrl.data.chat import ChatTemplate
from podrl.data.dialogue import Dialogue
from podrl.engine.config import Sampling
from podrl.environments import programs
from podrl.environments.config import EnvironmentConfig
from podrl.environments.finished_episodes import FinishedEpisode
from podrl.environments.journal import Files, Journal
from podrl.environments.programs import ProgramEnvironment
from podrl.environments.workers import Episodes
from podrl.job.config import parse
from podrl.launch import find_config, load_config
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.integrity import faults
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.packing import place_samples
from podrl.trainer.state import put_batch
from podrl.trainer.step import make_logprob_fn
from podrl.types import STOP_DEADLINE, STOP_LENGTH, BatchError, Prompts
from podrl.workers.user_code import Limits

pytest.importorskip("httptools", reason="needs the extra [agents]")
pytestmark = pytest.mark.usefixtures("quick_compilation")
AGENT = """
import concurrent.futures, http.client, json, os, subprocess, sys, time, urllib.error, urllib.parse, urllib.request
import podrl.agent

USER = {"role": "user", "content": "What is 4 + 5?"}
SURE = {"role": "user", "content": "Sure?"}


def ask(messages, path="/v1/chat/completions", headers={}, **settings):
    said = {} if "reward" in path else {"model": "policy"}  # first: a retry has the bytes of the first request
    said |= {"messages": messages} if messages else {}
    said |= {} if "generate" in path or "reward" in path else {"max_tokens": 5}
    body = json.dumps({**said, **settings}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json", **headers}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def says(body):
    return body["choices"][0]["message"]


def forks(task):
    print("a line that is not a result")
    first = ask([USER], return_token_ids=True)
    assert first["usage"]["prompt_tokens"] == len(first["prompt_token_ids"])
    ask([SURE], model="policy:aside")
    ask([{"role": "user", "content": "Other"}], temperature=0.5)
    last = ask([USER, says(first), SURE], return_token_ids=True)
    n = len(first["prompt_token_ids"] + first["choices"][0]["token_ids"])
    assert last["prompt_token_ids"][:n] == first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    return {"reward": 1.0, "metrics": {"pid": os.getpid() > 0}, "text": str(says(last)["content"])}


def random(task):
    with open("ASKED", "a") as file:
        file.write(f"{task['sample']}\\n")
    first = ask([USER])
    more = {"role": "user", "content": os.urandom(4).hex()}
    ask([USER, says(first), more])
    drawn = os.urandom(2)
    return {"reward": drawn[0] / 256, "metrics": {"drawn": drawn[1]}, "text": more["content"]}


def answered(body, task):
    # Notes the ids of an answer, for the test.
    with open("ASKED", "a") as file:
        file.write(json.dumps([task["sample"], body["choices"][0]["token_ids"]]) + "\\n")
    return says(body)


def compacts(task):
    # Replaces its history by a summary, which the model writes as a trained answer, and goes on from the summary.
    history = [USER]
    for more in (SURE, {"role": "user", "content": "Sum up."}):
        history += [answered(ask(history, return_token_ids=True), task), more]
    summary = answered(ask(history, return_token_ids=True), task)
    history = [{"role": "user", "content": "So far: " + str(summary["content"])}]
    history += [answered(ask(history, return_token_ids=True), task), SURE]
    answered(ask(history, return_token_ids=True), task)
    return 1.0


def delegates(task):
    # Two sub-agents work at once, each with a context of its own, and the main agent goes on with both results.
    first = answered(ask([USER], return_token_ids=True), task)

    def sub_agent(name):
        history = [{"role": "user", "content": name}]
        history += [says(ask(history, max_tokens=3)), SURE]
        return says(ask(history, max_tokens=3))["content"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = " ".join(map(str, pool.map(sub_agent, ["Left", "Right"])))
    answered(ask([USER, first, {"role": "user", "content": found}], return_token_ids=True), task)
    return 1.0


def crowds(task):
    # Three agents of a sample ask at once; the test reads what each of them got.
    asked = [[USER], [SURE], [{"role": "user", "content": f"Number {task['sample']}"}]]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        bodies = [*pool.map(lambda said: ask(said, return_token_ids=True, logprobs=True), asked)]
    for body in bodies:
        choice = body["choices"][0]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        with open("ASKED", "a") as file:
            file.write(json.dumps([task["sample"], body["prompt_token_ids"], choice["token_ids"], logprobs]) + "\\n")


def rewards(task):
    first, other = ask([USER]), ask([SURE])
    last = ask([USER, says(first), SURE])
    podrl.agent.reward(first["id"], 0.25)
    podrl.agent.reward(last["id"], 2)
    aside = ask([SURE], model="policy:aside")
    key = os.environ["OPENAI_API_KEY"]
    cases = [(aside["id"], 1.0, key, "unknown_request"), ("chatcmpl-77", 1.0, key, "unknown_request")]
    cases += [(first["id"], value, key, "unsupported_parameter") for value in (None, "1", True, 1e308)]
    cases += [(first["id"], float("nan"), key, "invalid_json"), (first["id"], 1.0, "dead", "invalid_api_key")]
    for request, value, key, code in cases:
        body = ask([], path="/podrl/reward", request=request, reward=value, headers={"Authorization": "Bearer " + key})
        assert body["error"]["code"] == code, (request, value, body)
    podrl.agent.reward(other["id"], -1.0)
    return 8.0


def refused(task):
    many = list(range(5, 14))
    for name, value in [("n", 2), ("logit_bias", {"5": 1}), ("top_logprobs", 2), ("stop_token_ids", many)]:
        assert ask([USER], **{name: value})["error"]["param"] == name, name
    assert "below" in ask([], path="/v1/completions", prompt=[10**6])["error"]["message"]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
    for messages, headers, code in [
        ([image], {}, "unsupported_parameter"),
        ([USER], {"Authorization": "Bearer podrl-dead"}, "invalid_api_key"),
        ([{"role": "user", "content": "x" * (64 << 20)}], {}, "request_too_large"),
    ]:
        assert ask(messages, headers=headers)["error"]["code"] == code
    ask([USER])


def asks_once(task):
    ask([USER])


def by_ids(task):
    # Goes on by token ids and by text, and reads log-probabilities.
    first = ask([USER], return_token_ids=True, logprobs=True)
    ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    given = {"token_ids": ids + [108], "sampling_params": {"logprobs": 1, "max_tokens": 4, "stop_token_ids": [1, 107]}}
    second = ask([], path="/inference/v1/generate", **given)
    third = ask([], path="/v1/completions", prompt=ids[:-1], logprobs=0)
    lists = [body["choices"][0]["logprobs"] for body in (first, second, third)]
    sums = [sum(one["logprob"] for one in found["content"]) for found in lists[:2]] + [sum(lists[2]["token_logprobs"])]
    assert [one["token"] for one in lists[1]["content"]] == [f"token_id:{i}" for i in second["choices"][0]["token_ids"]]
    assert len(lists[0]["content"]) == len(first["choices"][0]["token_ids"])
    assert all(isinstance(one["token"], str) for one in lists[0]["content"])
    return {"reward": 1.0, "metrics": {"logprob": sum(sums), "length": float(len(ids) + 1)}}


def twins(task):
    # Asks the same twice at once, then with other tools, then with another history.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = min(pool.map(ask, [[USER], [USER]]), key=lambda body: says(body)["content"])
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    ask([USER, says(first), SURE])
    ask([USER, says(first), SURE], tools=[tool])
    ask([USER, {"role": "assistant", "content": "changed"}, SURE])


def send(body):
    # Sends a request, and hangs up when the front has read it: the front answers what it reads later on.
    place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    client = http.client.HTTPConnection(place.hostname, place.port)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    client.request("POST", place.path + "/chat/completions", json.dumps(body), headers)
    models = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=headers)
    urllib.request.urlopen(models, timeout=600).close()
    client.close()


def retries(task):
    send({"model": "policy", "messages": [USER], "max_tokens": 5})
    ask([USER], headers={"x-stainless-retry-count": "1"})
    return 1.0


def fails(task):
    ask([USER])
    if task["sample"] == 0:
        print("the reason is here", file=sys.stderr)
        raise RuntimeError("broken")


def leaves(task):
    ask([USER])
    if task["sample"] == 0:
        print("the reason is here", file=sys.stderr)
        os._exit(3)


def wrong(task):
    ask([USER])
    return {"reward": "much"} if task["sample"] == 0 else 1.0


def environment(task):
    ask([USER])
    if task["sample"] == 0:
        raise podrl.agent.Failure("environment", "the sandbox is gone")


def unknown(task):
    ask([USER])
    return {"score": 1.0} if task["sample"] == 0 else 1.0


def hangs(task):
    ask([USER])
    if task["sample"] == 0:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open("PIDS", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(1000)


def hangs_up(task):
    first = ask([USER])
    if task["sample"] == 0:
        send({"model": "policy", "max_tokens": 6, "messages": [USER, says(first), SURE]})
        send({"model": "policy", "max_tokens": 7, "messages": [SURE]})
    ask([{"role": "user", "content": "Other"}])
    return 1.0


def long(task):
    ask([USER])
    body = ask([{"role": "user", "content": "word " * 500}])
    assert body["error"]["code"] == "context_length_exceeded", body
    raise RuntimeError("gives up")


podrl.agent.serve(globals()[sys.argv[1]])
"""
ASKED = "<start_of_turn>user\nWhat is 4 + 5?<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def serving():
    arguments = ["--model=tiny_tools", "--parser=call_tool", "--lanes=8", "--context=160"]
    serving, _ = serve._load(serve._parser().parse_args(arguments), jax.devices()[:1])
    yield serving
    serving.close()


@pytest.fixture
def play(serving, tmp_path, monkeypatch):
    """Plays the samples of an agent program."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(serve.__file__).parent.parent))
    (tmp_path / "agent.py").write_text(AGENT.replace("PIDS", f"{tmp_path}/pids").replace("ASKED", f"{tmp_path}/asked"))

    def run(
        name,
        failed_share=0.25,
        processes=2,
        journal=None,
        temperature=1.0,
        response=100,
        windows=(None,),
        group_size=4,
        **settings,
    ):
        tokens_P = np.asarray([serving._tokenizer.encode(ASKED, start=True)], np.int32)
        prompts = Prompts(tokens_P, np.asarray([tokens_P.shape[1]]), np.zeros(1, np.int64), [ASKED], {}, b"")
        worker, policy = serving._worker, serving._policy
        program = f"python {tmp_path}/agent.py {name}"
        config = EnvironmentConfig(environment="program", program=program, processes=processes, **settings)
        with Episodes(config, Limits(), journal=journal, error_files=tmp_path / "said") as host:
            worker.env_client = EnvironmentClient(host, Dialogue(serving._tokenizer), failed_share=failed_share)
            try:
                player = worker.player(
                    prompts, group_size=group_size, step=1, sampling=Sampling(max_new=response, temperature=temperature)
                )
                for quantum in windows:
                    for _ in worker.advance(policy, [(player, quantum)]):
                        pass
                return worker.rows(player, 0.0)
            finally:
                worker.env_client = None

    return run


def metrics_of(rollouts, b):
    return rollouts.episodes[b]["metrics"]


def test_what_a_program_asks_is_a_row_and_the_same_each_time(play):
    rollouts, again = play("forks"), play("forks", workers=2)
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        wanted = {"chat_requests": 4.0, "chat_forks": 1.0, "chat_asides": 1.0, "overridden": 1.0, "pid": 1.0}
        assert metrics_of(rollouts, b).items() >= (wanted | {"failed/agent": 0.0}).items()
        assert rollouts.turn_reward_BT[b].sum() == 1.0 and 1 < rollouts.mask_BT[b].sum() <= 15
    for name in ("tokens_BT", "piece_BT", "mask_BT", "logprob_BT", "turn_reward_BT"):
        np.testing.assert_array_equal(getattr(rollouts, name), getattr(again, name))


ROW = ("tokens_BT", "piece_BT", "mask_BT", "logprob_BT", "turn_reward_BT")


def test_a_killed_run_asks_no_program_again_for_an_episode_that_had_finished(play, tmp_path, caplog):
    """The journal is cut after each episode, as by a kill: the episodes that it still has are unchanged, and the others
    are played again."""

    def run(lines, **how):
        (tmp_path / "asked").write_text("")
        path.write_text("".join(lines))
        files = Files(path.parent)
        rollouts = play("random", journal=Journal(files), **how)
        files.close()
        return rollouts, sorted((tmp_path / "asked").read_text().split())

    path = tmp_path / "outside" / "1.jsonl"
    path.parent.mkdir()
    one, asked = run([])
    assert asked == ["0", "1", "2", "3"]
    lines = path.read_text().splitlines(keepends=True)
    ended = [json.loads(line)["sample"] for line in lines]
    assert sorted(ended) == [0, 1, 2, 3]
    for kept in range(5):
        again, asked = run(lines[:kept])
        assert asked == sorted(map(str, ended[kept:]))
        for b in ended[:kept]:
            for name in ROW:
                np.testing.assert_array_equal(getattr(one, name)[b], getattr(again, name)[b])
            assert metrics_of(one, b) == metrics_of(again, b)
            assert one.completions[b] == again.completions[b]
        assert len(path.read_text().splitlines()) == 4
    assert not caplog.messages
    other, asked = run(lines, temperature=0.1)  # with this temperature the model gives other answers
    assert asked and "the program runs again" in caplog.text
    assert not faults(other, step=1, max_staleness=1) and (other.mask_BT.sum(axis=1) > 0).all()


def test_a_record_of_an_episode_holds_each_message_once():
    turns = [{"role": "user", "content": f"{i} " + "x" * 100} for i in range(100)]
    said = [
        {"stop": [], "chat": {"messages": turns[: i + 1], "tools": [{"name": "t" * 100}], "id": str(i)}}
        for i in range(100)
    ]
    said += [{"stop": ["a"], "chat": None}, said[3], {"chat": {"messages": turns[5:], "tools": [], "id": ""}}]
    episode = FinishedEpisode(said, ["0" * 32] * len(said), {"reward": None})
    record = json.loads(json.dumps(episode.record()))
    assert FinishedEpisode.read(record) == episode
    assert len(json.dumps(record)) < 60_000


def test_token_ids_go_on_with_a_branch_and_log_probabilities_are_those_of_the_row(play):
    rollouts = play("by_ids")
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        found = metrics_of(rollouts, b)
        assert found["chat_requests"] == 3.0 and found["chat_forks"] == found["front/forks/concurrent"] == 1.0
        sampled_T = rollouts.mask_BT[b] > 0
        assert found["logprob"] == pytest.approx(rollouts.raw_logprob_BT[b][sampled_T].sum(), abs=1e-3)
        assert rollouts.tokens_BT[b, int(found["length"]) - 1] == 108


def test_rewards_of_answers_stand_at_their_last_tokens(play):
    rollouts = play("rewards", response=140, failed_share=0.0)
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        turns = [turn for turn in rollouts.episodes[b]["turns"] if turn["by"] == "model"]
        assert [turn["reward"] for turn in turns] == [0.25, 2.0, 7.0]
        ends = np.flatnonzero(rollouts.mask_BT[b])[np.cumsum([turn["tokens"] for turn in turns]) - 1]
        assert rollouts.turn_reward_BT[b][ends].tolist() == [0.25, 2.0, 7.0]
        assert rollouts.turn_reward_BT[b].sum() == rollouts.episodes[b]["reward"] == 9.25


def pieces_of(rollouts, b):
    """Lists the sampled tokens of each piece of a sample."""
    return [
        rollouts.tokens_BT[b][(rollouts.mask_BT[b] > 0) & (rollouts.piece_BT[b] == k)].tolist()
        for k in range(rollouts.piece_BT[b].max() + 1)
    ]


def test_a_summary_that_replaces_a_context_is_trained_and_each_sampled_token_once(play, tmp_path):
    rollouts = play("compacts", response=140, failed_share=0.0)
    assert not faults(rollouts, step=1, max_staleness=1)
    answers = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    for b in range(4):
        said = [ids for sample, ids in answers if sample == b]
        assert len(said) == 5 and metrics_of(rollouts, b)["front/forks/history"] == 1.0
        assert pieces_of(rollouts, b) == [[*itertools.chain(*said[:3])], [*itertools.chain(*said[3:])]]


def test_sub_agents_that_work_at_once_are_pieces_of_one_sample(play, tmp_path):
    rollouts = play("delegates", response=140, failed_share=0.0)
    assert not faults(rollouts, step=1, max_staleness=1)
    answers = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    for b in range(4):
        main, *others = pieces_of(rollouts, b)
        assert main == [token for sample, ids in answers if sample == b for token in ids]
        assert len(others) == 2 and all(2 <= len(sampled) <= 6 for sampled in others)
        metrics = metrics_of(rollouts, b)
        assert (metrics["chat_requests"], metrics["chat_forks"]) == (6.0, 2.0)
        turns = [turn for turn in rollouts.episodes[b]["turns"] if turn["by"] == "model"]
        assert sum(turn["tokens"] for turn in turns) == rollouts.mask_BT[b].sum()
        assert rollouts.turn_reward_BT[b].sum() == 1.0


@pytest.mark.nightly("podrl/rollout", "podrl/trainer/packing.py", "podrl/environments/front_worker.py")
def test_requests_of_256_episodes_that_ask_three_at_once_are_in_the_rows_and_the_trainer_computes_their_numbers(
    play, serving, tmp_path
):
    """Sampler and trainer agree on all tokens' log-probabilities, and only because the trainer separates the pieces."""
    rollouts = play("crowds", response=140, failed_share=0.0, group_size=256, processes=8)
    assert not faults(rollouts, step=1, max_staleness=1)
    answers = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert len(answers) == 3 * 256
    for b in range(256):
        in_row = []
        for k in range(rollouts.piece_BT[b].max() + 1):
            in_T = (rollouts.piece_BT[b] == k) & (np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[b])
            if not rollouts.mask_BT[b][in_T].any():
                continue  # this piece is the data's prompt alone: the first request had another prompt
            given = int(rollouts.mask_BT[b][in_T].argmax())
            assert (rollouts.mask_BT[b][in_T] == (np.arange(in_T.sum()) >= given)).all()
            tokens, logprobs = rollouts.tokens_BT[b][in_T].tolist(), rollouts.raw_logprob_BT[b][in_T].tolist()
            in_row.append([b, tokens[:given], tokens[given:], logprobs[given:]])
        assert sorted(in_row) == sorted(answer for answer in answers if answer[0] == b)

    def differences(rollouts):
        B, T = rollouts.tokens_BT.shape
        shape = PackShape.for_worst_case(B, T, max_tokens_per_row=512, rows_per_micro_batch=8, shards=1)
        placement = place_samples(rollouts, np.arange(B), shape)
        batch = put_batch(placement.batch(placement.replayed(rollouts, np.arange(B))), worker.mesh)
        logprob_BT = placement.unpack(np.asarray(compute(serving._policy.params, batch)), T)
        return np.abs(logprob_BT - rollouts.raw_logprob_BT)[rollouts.mask_BT > 0].mean()

    worker = serving._worker
    compute = make_logprob_fn(worker.model, worker.mesh)
    assert differences(rollouts) < 1e-5
    assert differences(dataclasses.replace(rollouts, piece_BT=np.zeros_like(rollouts.piece_BT))) > 0.1


# This template writes the tools before the conversation; the tokenizer's own template leaves them out.
NAMES_TOOLS = """{{ bos_token }}{% if tools %}{{ tools[0].function.name }}
{% endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@pytest.mark.parametrize("reason", ["tools", "concurrent"])
def test_requests_that_open_a_branch_are_counted_by_their_reason_and_twins_draw_the_same_in_every_run(
    play, serving, monkeypatch, reason
):
    """If the template leaves tools out, a request with other tools goes on from the same tokens as one without."""
    parser = "call_tool"
    if reason == "tools":
        monkeypatch.setitem(serving._tokenizer._templates, "default", ChatTemplate(NAMES_TOOLS, "test"))
        parser = "hermes"
    one, two = (play("twins", response=140, parser=parser, workers=workers) for workers in (1, 2))
    for b in range(4):
        forks = {name: value for name, value in metrics_of(one, b).items() if name.startswith("front/forks/")}
        wanted = {"history": 1.0, "tools": 0.0, "template": 0.0, "concurrent": 1.0}
        wanted[reason] += 1.0
        assert forks == {f"front/forks/{name}": count for name, count in wanted.items()}
        drawn = [sorted(run.tokens_BT[b][run.mask_BT[b] > 0].tolist()) for run in (one, two)]
        assert drawn[0] == drawn[1]


def test_windows_refuse_a_second_open_request_by_name(play):
    with pytest.raises(BatchError, match=r"while an earlier one was open.*rollout\.clock='wall', or grpo\.max_stale"):
        play("twins", response=140, windows=(8,))


def test_a_program_whose_sample_waits_for_the_next_window_keeps_no_other_from_starting(play):
    rollouts = play("forks", processes=1, windows=(4, 4, None))
    assert not faults(rollouts, step=1, max_staleness=1)
    assert all(metrics_of(rollouts, b)["chat_requests"] == 4.0 for b in range(4))


def test_no_more_processes_wait_for_episodes_than_may_run(tmp_path):
    """Episodes that rest between windows keep their processes, so more processes than env.processes may become idle."""

    class Runner:
        killed = False

        async def kill(self):
            self.killed = True

    runners = [Runner() for _ in range(3)]

    async def keep():
        environment = ProgramEnvironment(EnvironmentConfig(program="python -c pass", processes=2), str(tmp_path))
        for runner in runners:
            await environment._keep_process(runner)

    asyncio.run(keep())
    assert [runner.killed for runner in runners] == [False, False, True]


def test_an_answer_that_nobody_received_leaves_the_row(play):
    rollouts = play("hangs_up", processes=4)
    assert not faults(rollouts, step=1, max_staleness=1)
    assert not any(metrics_of(rollouts, b)["failed/agent"] for b in range(4))
    for b in range(4):
        # An answer that came before the client hung up was received.
        received = metrics_of(rollouts, b)["chat_requests"] - metrics_of(rollouts, b)["front/dropped"]
        answers = [turn for turn in rollouts.episodes[b]["turns"] if turn["by"] == "model"]
        assert 2 <= len(answers) == received and sum(turn["tokens"] for turn in answers) == rollouts.mask_BT[b].sum()
        assert rollouts.turn_reward_BT[b].sum() == 1.0


def test_a_retry_joins_the_request_that_is_open_or_answered(play):
    rollouts = play("retries", processes=4)
    for b in range(4):
        wanted = {"chat_requests": 1.0, "front/dropped": 0.0, "failed/agent": 0.0}
        assert metrics_of(rollouts, b).items() >= wanted.items()


def test_what_training_cannot_honour_is_refused_by_name_and_changes_no_row(play):
    refused, plain = play("refused"), play("asks_once")
    for b in range(4):
        assert metrics_of(refused, b)["failed/agent"] == metrics_of(refused, b)["chat_forks"] == 0.0
    for name in ROW:
        np.testing.assert_array_equal(getattr(refused, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fails", "agent"),
        ("leaves", "agent"),
        ("wrong", "grading"),
        ("unknown", "grading"),
        ("environment", "environment"),
    ],
)
def test_a_program_that_fails_is_a_lost_sample_of_its_kind(play, name, kind):
    rollouts = play(name)
    assert (rollouts.stop_B == STOP_DEADLINE).tolist() == [True, False, False, False]
    for other in ("agent", "environment", "infrastructure", "grading"):
        lost = [float(other == kind), 0.0, 0.0, 0.0]
        assert [metrics_of(rollouts, b)[f"failed/{other}"] for b in range(4)] == lost


@pytest.mark.parametrize(
    ("name", "why"), [("fails", "RuntimeError: broken"), ("leaves", "exit code 3.*the reason is here")]
)
def test_too_many_failures_end_the_job_with_what_the_program_wrote(play, tmp_path, name, why):
    with pytest.raises(BatchError, match=rf"(?s)env\.failed_share=0\.2.*{why}"):
        play(name, failed_share=0.2)
    (file,) = (tmp_path / "said").iterdir()
    assert "the reason is here" in file.read_text()


def test_a_program_that_hangs_is_ended_and_those_that_wait_for_its_process_have_their_whole_time(play, tmp_path):
    rollouts = play("hangs", deadline_s=15.0, processes=1)
    assert (rollouts.stop_B == STOP_DEADLINE).tolist() == [True, False, False, False]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        until(lambda pid=pid: not is_running(pid), f"the end of process {pid}")


@pytest.mark.parametrize("slow", [False, True])
def test_the_end_of_a_program_ends_its_descendants_in_sessions_of_their_own(tmp_path, monkeypatch, slow):
    """One descendant has the program's environment variables; the other has none, as after `env -i`.

    If the worker that kills is slow, the program has ended, and its children have another parent, before the second
    signal is sent.
    """

    def send_and_wait(process, number):
        send(process, number)
        select.select([process], [], [])  # a process that has ended is readable

    send = signal.pidfd_send_signal
    if slow:
        monkeypatch.setattr(signal, "pidfd_send_signal", send_and_wait)
    code = """
import os, subprocess, time
for environment in (None, {}):
    child = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, env=environment)
    with open("PIDS", "a") as file:
        file.write(f"{child.pid} ")
with open("PIDS", "a") as file:
    file.write("all")
time.sleep(1000)
""".replace("PIDS", f"{tmp_path}/pids")

    for pid in kill_when_ready(code, tmp_path):
        until(lambda pid=pid: not is_running(pid), f"the end of process {pid}")


def test_a_descendant_that_hides_from_its_program_does_not_hold_up_its_end(tmp_path):
    """A process without the program's environment variables, whose parent has ended, is not found, although it still
    holds the program's pipes."""
    code = """
import subprocess, time
subprocess.run(["/bin/sh", "-c", "/bin/sleep 1000 & echo $! >>PIDS; echo all >>PIDS"], env={}, start_new_session=True)
time.sleep(1000)
""".replace("PIDS", f"{tmp_path}/pids")
    (hidden,) = kill_when_ready(code, tmp_path)
    assert is_running(hidden)
    os.kill(hidden, signal.SIGKILL)


def test_a_process_that_got_the_number_of_a_program_that_has_ended_is_not_killed(tmp_path, monkeypatch):
    async def start_and_kill(number):
        runner = await programs._Runner.start([sys.executable, "-c", ""], "", programs._Log(str(tmp_path)))
        await asyncio.wait_for(runner._process.wait(), PATIENCE_S)
        monkeypatch.setattr(runner, "_process", types.SimpleNamespace(pid=number, returncode=0))
        runner.kill_now()

    with subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True) as other:
        asyncio.run(start_and_kill(other.pid))
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        other.kill()


def kill_when_ready(code: str, directory: pathlib.Path) -> list[int]:
    """Runs a program until it has written process ids and then "all" to `pids`; kills it and returns the ids."""
    pids = directory / "pids"

    async def start_and_kill():
        runner = await programs._Runner.start([sys.executable, "-c", code], "", programs._Log(str(directory)))
        while not pids.exists() or not pids.read_text().strip().endswith("all"):
            await asyncio.sleep(0.01)
        await asyncio.wait_for(runner.kill(), PATIENCE_S)

    asyncio.run(start_and_kill())
    return [int(word) for word in pids.read_text().split() if word != "all"]


def test_a_program_that_gives_up_for_lack_of_room_has_not_failed(play):
    rollouts = play("long", failed_share=0.0)
    assert (rollouts.stop_B == STOP_LENGTH).all() and rollouts.mask_BT.any()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"program": "python 'agent"}, "is not a valid command"),
        ({"program": " "}, "is empty"),
        ({"environment": "program"}, "names no program"),
        ({"program": "python agent.py", "tools": ("calculator",)}, "brings its own tools"),
        ({"program": "python agent.py", "environment": "a.py:B"}, "brings its own tools"),
    ],
)
def test_settings_that_contradict_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        EnvironmentConfig(**settings)


def test_a_command_that_does_not_exist_is_named():
    config = EnvironmentConfig(environment="program", program="no-such-command-here agent.py")
    with pytest.raises(ValueError, match="there is no command 'no-such-command-here'"):
        Episodes(config, Limits(), journal=None)


MIXED = ({"path": "sums", "name": "by_heart", "env": "none"}, {"path": "sums"})


@pytest.mark.parametrize(
    "more",
    [
        {"model": {"lora": {"rank": 4}}},
        {"algorithm": "ppo"},
        {"roles": {"colocated": False}, "grpo": {"max_staleness": 1}},
        {"rollout": {"clock": "wall"}, "grpo": {"max_staleness": 2}},
        {"rollout": {"clock": "tokens"}, "grpo": {"max_staleness": 2}},
        {"env": {"others": ("none",)}, "data": {"path": "", "sources": MIXED}},
        {"env": {"others": ("none",)}, "eval": {"sets": ({"name": "by_heart", "path": "sums", "env": "none"},)}},
    ],
)
def test_what_goes_with_programs_is_accepted(more):
    given = load_config(find_config("grpo_agents.py")).to_dict()
    if "algorithm" in more:
        del given["grpo"]
    assert parse(merge(given, more)).env.choices[0] == "program"
