"""Tests episodes whose requests are conversations: branches are pieces of a row, and depend only on the requests."""

import dataclasses
import itertools
import math
import shutil
import types
from typing import Literal

import jax
import numpy as np
import pytest
from test_wall import LAST, P, again, assert_equal, assert_whole, made, mixed
from test_windows import LAST as NEWEST
from test_windows import made as in_windows

from podrl import serve
from podrl.data.chat import ChatTemplate
from podrl.data.dialogue import Dialogue
from podrl.engine.config import Sampling
from podrl.environments.config import EnvironmentConfig
from podrl.environments.journal import Files, Journal
from podrl.environments.workers import EnvironmentFailure, Episodes
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.integrity import faults
from podrl.rollout.partial import of_tracks
from podrl.rollout.token_budget import TokenBudget
from podrl.types import STOP_DEADLINE, STOP_LENGTH, BatchError, Policy, Prompts
from podrl.view.runs import branches
from podrl.workers.user_code import Limits

pytestmark = pytest.mark.usefixtures("quick_compilation")
AGENTS = '''
import asyncio
import os
import podrl

USER = {"role": "user", "content": "What is 4 + 5?"}
SURE = {"role": "user", "content": "Sure?"}


class Forks:
    """Goes on once, asks aside, and begins again with other words."""

    async def run(self, task, model):
        first = await model.chat([USER], max_tokens=6)
        await model.chat([SURE], max_tokens=4, aside=True)
        if task.sample % 2:
            await asyncio.sleep(0.05)
        await model.chat([{"role": "user", "content": "Other " + str(first["content"])[:2]}], max_tokens=5)
        last = await model.chat([USER, first, SURE], max_tokens=6)
        return podrl.Result(1.0, {"last": float(len(last["content"] or ""))})


class Drops:
    """Two of its answers are received by nobody: one that goes on with a branch, and one that opens a branch."""

    async def run(self, task, model):
        first = await model.chat([USER], max_tokens=6)
        for asked in ([USER, first, SURE], [SURE]):
            await model.chat(asked, max_tokens=5)
            model.drop(model.answers - 1)
        await model.chat([USER, first, {"role": "user", "content": "Why?"}], max_tokens=5)
        await model.chat([USER, first, SURE], max_tokens=4)
        if task.sample % 2:
            model.drop(model.answers - 1)
        return podrl.Result(1.0)


class Orders:
    """Has three conversations of two requests each; a file says whose turn is next."""

    async def run(self, task, model):
        said = [[USER], [USER, {"role": "assistant", "content": "No."}, SURE], [SURE]]
        with open("ORDER") as file:
            order = file.read()
        for k in map(int, order):
            said[k] += [await model.chat(list(said[k]), max_tokens=5), {"role": "user", "content": "Why?"}]
            model.reward(str(model.answers - 1), k + 1.0)
        return podrl.Result(0.5)


class Twins:
    """Goes on several times from one answer, and from answers after it; a file has each sample's order of requests.

    The name of a request is the name of the request from which it goes on, and a letter.
    """

    async def run(self, task, model):
        said = {"": [USER, await model.chat([USER], max_tokens=5)]}
        asked = {"a": "Sure?", "b": "Why?", "c": "Why?", "x": "Stop.", "ad": "No.", "ae": "Really?"}
        with open("ORDER") as file:
            order = file.read().splitlines()[task.sample].split()
        for name in order:
            more = [*said[name[:-1]], {"role": "user", "content": asked[name]}]
            stop = ("<end_of_turn>",) if name in "bc" else ()
            said[name] = [*more, await model.chat(more, max_tokens=8, stop=stop)]
            model.reward(str(model.answers - 1), len(asked[name]) / 4)
            if name == "x":
                model.drop(model.answers - 1)
        model.reward("0", 0.5)
        return podrl.Result(0.5)


class Chance:
    """Asks for something else in each run, and notes which samples ran."""

    async def run(self, task, model):
        with open("RAN", "a") as file:
            file.write(f"{task.index}\\n")
        more = {"role": "user", "content": os.urandom(2).hex()}
        first = await model.chat([USER], max_tokens=6)
        await model.chat([USER, first, more], max_tokens=6)
        last = await model.chat([more], max_tokens=6)
        return podrl.Result(float(len(last["content"] or "")), {"drawn": float(os.urandom(1)[0])})


class Waits:
    """Sample 0 waits for a file between its two requests."""

    async def run(self, task, model):
        first = await model.chat([USER], max_tokens=6)
        while task.sample == 0 and not os.path.exists("GO"):
            await asyncio.sleep(0.01)
        await model.chat([SURE], max_tokens=6)
        return podrl.Result(1.0)


class Loops:
    """Calls a tool, and then has a second turn of the user."""

    async def run(self, task, model):
        said = [USER]
        for more in ({"role": "tool", "tool_call_id": "c1", "content": "9"}, SURE):
            said += [await model.chat(said, max_tokens=4), more]
        await model.chat(said, max_tokens=4)


class Repeats:
    async def run(self, task, model):
        for _ in range(2):
            await model.chat([SURE], max_tokens=5)


class Long:
    async def run(self, task, model):
        await model.chat([USER], max_tokens=4)
        await model.chat([{"role": "user", "content": "word " * 500}])
        raise AssertionError("there was room")


class Crashes:
    async def run(self, task, model):
        await model.chat([USER], max_tokens=4)
        raise RuntimeError("broken agent")


class Hangs:
    async def run(self, task, model):
        await model.chat([USER], max_tokens=4)
        if task.sample == 0:
            await asyncio.sleep(1e9)


class Mixes:
    async def run(self, task, model):
        await model.chat([USER], max_tokens=4)
        await model.say("more")


class Nothing:
    async def run(self, task, model):
        await model.chat([USER], max_tokens=4, aside=True)
        return podrl.Result(0.5)
'''
ASKED = "<start_of_turn>user\nWhat is 4 + 5?<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def serving():
    arguments = ["--model=tiny_tools", "--parser=call_tool", "--lanes=8", "--context=160"]
    serving, _ = serve._load(serve._parser().parse_args(arguments), jax.devices()[:1])
    yield serving
    serving.close()


@pytest.fixture
def play(serving, tmp_path):
    """Returns a function that plays four samples of an agent; its argument `asked` is the data's prompt."""
    (tmp_path / "agents.py").write_text(
        AGENTS.replace("RAN", f"{tmp_path}/ran").replace("GO", f"{tmp_path}/go").replace("ORDER", f"{tmp_path}/order")
    )

    def run(
        name,
        asked=ASKED,
        response=100,
        quantum=None,
        clock: Literal["tokens", "wall"] = "tokens",
        history: Literal["template", "append"] = "template",
        **settings,
    ):
        prompts = asked_once(serving, asked)
        worker, policy = serving._worker, serving._policy
        config = EnvironmentConfig(environment=f"{tmp_path}/agents.py:{name}", **settings)
        with Episodes(config, Limits(), journal=None) as host:
            worker.env_client = EnvironmentClient(host, Dialogue(serving._tokenizer), clock=clock, history=history)
            try:
                player = worker.player(prompts, group_size=4, step=1, sampling=Sampling(max_new=response))
                for _ in worker.advance(policy, [(player, quantum)]):
                    pass
                return worker.rows(player, 0.0)
            finally:
                worker.env_client = None

    return run


def asked_once(serving, asked=ASKED):
    tokens_P = np.asarray([serving._tokenizer.encode(asked, start=True)], np.int32)
    return Prompts(tokens_P, np.asarray([tokens_P.shape[1]]), np.zeros(1, np.int64), [asked], {}, b"")


def pieces_of(rollouts, b):
    """Lists the pieces of a sample: (tokens, mask)."""
    n = rollouts.length_B[b]
    piece_X = rollouts.piece_BT[b, :n]
    return [
        (rollouts.tokens_BT[b, :n][piece_X == k].tolist(), rollouts.mask_BT[b, :n][piece_X == k])
        for k in range(piece_X.max() + 1)
    ]


def test_what_continues_extends_a_piece_and_what_does_not_opens_one(play, serving):
    rollouts = play("Forks")
    assert not faults(rollouts, step=1, max_staleness=1)
    prompt = serving._tokenizer.encode(ASKED, start=True)
    for b in range(4):
        (first, mask_first), (second, mask_second) = pieces_of(rollouts, b)
        assert first[: len(prompt)] == prompt and 1 < mask_first.sum() <= 12
        assert mask_first[len(prompt)] and 0 in mask_first[len(prompt) + 1 :]  # an answer, a user's turn, an answer
        assert "Sure?" in serving._tokenizer.decode(first)
        assert "Other" in serving._tokenizer.decode(second) and 1 <= mask_second.sum() <= 5
        metrics = rollouts.episodes[b]["metrics"]
        assert metrics.items() >= {"chat_requests": 4.0, "chat_forks": 1.0, "chat_asides": 1.0}.items()
        assert rollouts.turn_reward_BT[b].sum() == 1.0
        turns = [turn for turn in rollouts.episodes[b]["turns"] if turn["by"] == "model"]
        assert sum(turn["tokens"] for turn in turns) == rollouts.mask_BT[b].sum()
        (trunk,) = branches(rollouts.episodes[b]["turns"])
        (fork,) = trunk["branches"]
        alike = int((np.asarray(first[: len(prompt)]) == second[: len(prompt)]).argmin())
        assert (fork["piece"], fork["why"], fork["of"], fork["shared"]) == (1, "history", 0, alike) and alike > 0
        assert [turn["by"] for turn in trunk["turns"]] == ["model", "environment", "model"]
        assert [turn.get("reward") for turn in fork["turns"]] == [None, 1.0]
    assert len({str(pieces_of(rollouts, b)[0][0]) for b in range(4)}) > 1


def test_answers_that_nobody_received_leave_the_row(play, serving):
    rollouts = play("Drops")
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        dropped, metrics = 2 + b % 2, rollouts.episodes[b]["metrics"]
        assert metrics["chat_requests"] == 5.0 and metrics["front/dropped"] == dropped
        answers = [turn for turn in rollouts.episodes[b]["turns"] if turn["by"] == "model"]
        assert len(answers) == 5 - dropped and sum(t["tokens"] for t in answers) == rollouts.mask_BT[b].sum()
        texts = [serving._tokenizer.decode(tokens) for tokens, _ in pieces_of(rollouts, b)]
        assert len(texts) == 2 - b % 2 and all("4 + 5" in text for text in texts)
        assert [sum(word in text for text in texts) for word in ("Why?", "Sure?")] == [1, 1 - b % 2]
        assert rollouts.turn_reward_BT[b].sum() == 1.0


def test_rows_do_not_depend_on_when_agents_ask(play):
    one, two = play("Forks"), play("Forks", workers=2)
    for name in ("tokens_BT", "piece_BT", "mask_BT", "logprob_BT", "turn_reward_BT"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_rows_do_not_depend_on_the_order_of_independent_conversations(play, tmp_path):
    """Checks every order of the first requests of three conversations, two of which begin with the data's prompt."""
    found = []
    for order in ("001122", "010212", "021012", "102021", "120120", "201210", "210012", "221100"):
        (tmp_path / "order").write_text(order)
        found.append(play("Orders", response=140))
        assert not faults(found[-1], step=1, max_staleness=1)
    one = found[0]
    assert one.piece_BT.max() == 2 and (one.mask_BT.sum(axis=1) > 15).all()
    for two in found[1:]:
        assert_alike(one, two)


@pytest.fixture
def roomy(serving, monkeypatch):
    """Gives rows room for more tokens than a branch may have."""
    config = dataclasses.replace(serving._worker.config, kv_cache_size=600, max_response_tokens=400)
    monkeypatch.setattr(serving._worker, "config", config)


# Orders of the requests of `Twins`: each answer comes before the requests that repeat it.
TWINS = [
    " ".join(order)
    for order in itertools.permutations(("a", "b", "c", "x", "ad", "ae"))
    if order.index("a") < min(order.index("ad"), order.index("ae"))
]
ARRAYS = ("tokens_BT", "piece_BT", "mask_BT", "logprob_BT", "raw_logprob_BT", "version_BT", "turn_reward_BT", "stop_B")


def assert_alike(one, two):
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    for x, y in zip(one.episodes, two.episodes, strict=True):
        assert (x["turns"], x["metrics"]) == (y["turns"], y["metrics"])


def test_rows_do_not_depend_on_which_request_goes_on_first_from_an_answer(play, serving, roomy, tmp_path):
    """Four requests go on from one answer, and two from the answer to one of them. Two of the four are equal, and the
    answer to another one leaves the row. The four samples have different orders at the same time."""
    found = []
    for i in range(0, len(TWINS), 30):
        (tmp_path / "order").write_text("\n".join(TWINS[i + 7 * k] for k in range(3)) + "\n" + TWINS[-1 - i])
        found.append(play("Twins", response=140))
        assert not faults(found[-1], step=1, max_staleness=1)
    one = found[0]
    for two in found[1:]:
        assert_alike(one, two)
    for b, episode in enumerate(one.episodes):
        answers = [turn for turn in episode["turns"] if turn["by"] == "model"]
        assert sum(turn["tokens"] for turn in answers) == one.mask_BT[b].sum() and len(answers) == 6
        assert sum(turn["tokens"] for turn in episode["turns"]) == one.length_B[b] - 4 * one.prompts.length_P[0]
        counts = {"chat_requests": 7.0, "chat_forks": 3.0, "front/forks/concurrent": 3.0, "front/dropped": 1.0}
        assert episode["metrics"].items() >= counts.items()
        assert one.turn_reward_BT[b].sum() == 0.5 + 0.5 + sum(map(len, ("Sure?", "Why?", "Why?", "No.", "Really?"))) / 4
        (trunk,) = branches(episode["turns"])
        assert {turn["by"] for turn in trunk["turns"][::2]} == {"model"}
        asked = [serving._tokenizer.decode(tokens) for tokens, _ in pieces_of(one, b)]
        assert [sum(word in text for text in asked) for word in ("4 + 5", "Sure?", "Why?", "Stop.")] == [4, 2, 2, 0]


def test_a_first_request_with_another_prompt_is_a_piece_behind_the_datas_prompt(play, serving):
    rollouts = play("Forks", asked="Else")
    for b in range(4):
        prompt, first, second = pieces_of(rollouts, b)
        assert prompt[0] == serving._tokenizer.encode("Else", start=True) and not prompt[1].any()
        assert first[1].any() and second[1].any()
    assert not faults(rollouts, step=1, max_staleness=1)


# This template leaves out thoughts of turns before the user's last turn, as Qwen3's template does.
FORGETS = """{{ bos_token }}{% set last = namespace(user=0) %}{% for m in messages if m.role == 'user' %}
{%- set last.user = m.content %}{% endfor %}{% set seen = namespace(last=false) %}{% for m in messages %}
{%- if m.content == last.user %}{% set seen.last = true %}{% endif %}<start_of_turn>{{ m.role }}
{% if m.role == 'assistant' and seen.last %}<think>
{% endif %}{{ m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant
<think>
{% endif %}"""


@pytest.mark.parametrize(("history", "pieces"), [("template", [2, 1]), ("append", [3])])
def test_a_template_that_drops_thoughts_opens_a_piece_at_the_second_turn_of_the_user(
    play, serving, monkeypatch, history, pieces
):
    """The tool loop before the user's second turn stays one piece. With env.history='append' the whole episode is one
    piece."""
    monkeypatch.setitem(serving._tokenizer._templates, "default", ChatTemplate(FORGETS, "test"))
    rollouts = play("Loops", history=history, parser="hermes", asked="Else", response=150)
    assert not faults(rollouts, step=1, max_staleness=1)
    for b in range(4):
        trained = [mask for _, mask in pieces_of(rollouts, b)[1:]]  # piece 0 is the data's prompt
        assert [(np.diff(mask, prepend=0) > 0).sum() for mask in trained] == pieces
        assert rollouts.episodes[b]["metrics"]["front/forks/template"] == len(pieces) - 1


def test_equal_requests_of_an_episode_draw_different_answers(play):
    rollouts = play("Repeats", asked="Else")
    drawn = [[tuple(np.asarray(t)[m > 0]) for t, m in pieces_of(rollouts, b)[1:]] for b in range(4)]
    assert any(first != second for first, second in drawn)


def test_a_request_longer_than_the_room_ends_the_sample_and_leaves_no_token(play):
    rollouts = play("Long")
    assert (rollouts.stop_B == STOP_LENGTH).all() and not rollouts.piece_BT.any()
    assert ((rollouts.mask_BT.sum(axis=1) > 0) & (rollouts.mask_BT.sum(axis=1) <= 4)).all()


def test_an_agent_that_hangs_is_left_out_and_the_others_go_on(play):
    rollouts = play("Hangs", deadline_s=1.0)
    assert (rollouts.stop_B == STOP_DEADLINE).tolist() == [True, False, False, False]


def test_an_agent_that_only_asks_aside_has_no_token_to_train(play):
    rollouts = play("Nothing")
    assert not rollouts.mask_BT.any() and (rollouts.turn_reward_BT.sum(axis=1) == 0.5).all()


def test_a_crash_names_the_agent(play):
    with pytest.raises(EnvironmentFailure, match="broken agent"):
        play("Crashes")


def test_what_cannot_be_played_is_refused(play):
    with pytest.raises(BatchError, match=r"model\.chat and model\.say"):
        play("Mixes")


def of_versions(serving, count):
    """Makes policies; a policy with an odd version draws all tokens with the same probability."""
    params = [serving._policy.params, jax.tree.map(lambda x: 0 * x, serving._policy.params)]
    return [Policy(params[version % 2], version) for version in range(count)]


@pytest.mark.parametrize(("agent", "calls"), [("Forks", None), ("Forks", 1), ("Twins", None), ("Twins", 1)])
def test_windows_of_conversations_are_the_same_in_a_run_that_is_killed_at_every_step(
    play, serving, roomy, tmp_path, agent, calls
):
    """A window of an episode ends after a fixed number of the episode's tokens. Tokens of asides count, and all tokens
    count in the order of the requests."""
    S, K = 3, 4
    (tmp_path / "order").write_text("\n".join(TWINS[70:73]))
    batches = [dataclasses.replace(asked_once(serving), index_P=np.asarray([b])) for b in range(NEWEST + 1)]
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:{agent}"), Limits(), journal=None) as host:
        env_client = EnvironmentClient(host, Dialogue(serving._tokenizer))
        run = (serving._worker, of_versions(serving, NEWEST + 1), batches, Sampling(max_new=100))
        how = {"S": S, "quantum": K, "calls": calls, "env_client": lambda: env_client}
        whole, killed = in_windows(*run, **how), in_windows(*run, **how, restarts=range(1, NEWEST + 1))
    for b, (mine, theirs) in enumerate(zip(whole, killed, strict=True)):
        assert_alike(mine, theirs)
        assert not faults(mine, step=b, max_staleness=S)
        assert agent == "Forks" or (mine.piece_BT.max(axis=1) == 3).all()
        for row, episode in enumerate(mine.episodes):
            if agent == "Twins" or calls is not None:
                continue
            counts = [turn["tokens"] for turn in episode["turns"] if turn["by"] == "model"]
            drawn = np.split(mine.version_BT[row][mine.mask_BT[row] > 0], np.cumsum(counts)[:-1])
            first, last, other = (part.tolist() for part in drawn)
            expected = [min(max(b - S, 0) + i // K, max(b - 1, 0)) for i in range(sum(counts) + 4)]
            n, rest = len(first), len(other) + len(last)
            aside = range(1, 5)  # the row does not show how many tokens the aside has
            assert first == expected[:n] and other + last in [expected[n + a : n + a + rest] for a in aside]
    assert mixed({b: types.SimpleNamespace(rollouts=rollouts) for b, rollouts in enumerate(whole)})


def test_an_agent_that_asks_otherwise_after_a_kill_is_named_and_goes_on_from_its_first_difference(
    play, serving, tmp_path, caplog
):
    worker, prompts = serving._worker, asked_once(serving)
    how = {"group_size": 4, "step": 3, "sampling": Sampling(max_new=100)}
    policies = of_versions(serving, 3)
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:Chance"), Limits(), journal=None) as host:
        worker.env_client = EnvironmentClient(host, Dialogue(serving._tokenizer))
        try:
            before = worker.player(prompts, **how)
            for _ in worker.advance(policies[1], [(before, 8)]):
                pass
            part = again(of_tracks(prompts, before.state(), prompt_count=1, step=3, quantum=8))
            before.abandon()
            after = worker.player(prompts, **how, partial=part)
            for _ in worker.advance(policies[2], [(after, None)]):
                pass
            rollouts = worker.rows(after, 0.0)
        finally:
            worker.env_client = None
    assert "sends other requests than before (after request 1)" in caplog.text
    assert not faults(rollouts, step=3, max_staleness=2)
    assert part.rows["count_B"].tolist() == [8] * 4 and (part.rows["version_X"] == 1).all()
    for b, tokens in enumerate(part.rows["tokens_X"].reshape(4, 8)):
        _, count, *_ = part.samples[b]["answers"][0]
        drawn_T = rollouts.mask_BT[b] > 0
        assert rollouts.tokens_BT[b][drawn_T][:count].tolist() == tokens[:count].tolist()
        assert rollouts.version_BT[b][drawn_T].tolist() == [1] * count + [2] * (int(drawn_T.sum()) - count)


def test_an_agent_that_is_lost_by_the_wall_clock_has_no_tokens(play):
    rollouts = play("Hangs", clock="wall", deadline_s=1.0)
    assert (rollouts.stop_B == STOP_DEADLINE).tolist() == [True, False, False, False]
    assert rollouts.mask_BT.any(axis=1).tolist() == [False, True, True, True]
    repeated = play("Hangs", clock="wall", quantum=TokenBudget(late={0: 0}, repeated=True), deadline_s=1.0)
    assert (repeated.stop_B == rollouts.stop_B).all()
    for lost in (rollouts.episodes[0], repeated.episodes[0]):
        assert {**lost, "seconds": 0.0} == {"turns": [], "metrics": {}, "seconds": 0.0}


def test_by_the_wall_clock_a_killed_run_trains_each_prompt_once_and_asks_no_agent_again_for_a_batch(
    play, serving, tmp_path
):
    """Agents draw random numbers, so a batch gets the same samples again only from the recorded answers. Odd versions
    draw all tokens with the same probability, so the log-probability of a token shows which version drew the token."""
    vocab, policies = serving._worker.model.vocab_size, of_versions(serving, LAST + 1)
    tokens = serving._tokenizer.encode(ASKED, start=True)
    rows = {"tokens_PT": np.asarray([tokens] * P, np.int32), "length_P": np.full(P, len(tokens)), "text": [ASKED] * P}
    batches = [
        Prompts(**rows, index_P=np.arange(P) + P * b, fields={}, data_state=str(b).encode()) for b in range(LAST + 1)
    ]

    def run(directory, **more):
        """Returns the batches, the checkpoints and the prompts whose agents ran."""
        (tmp_path / "ran").write_text("")
        files = Files(directory / "outside")
        config = EnvironmentConfig(environment=f"{tmp_path}/agents.py:Chance")
        with Episodes(config, Limits(), journal=Journal(files, exact=False)) as host:
            env_client = EnvironmentClient(host, Dialogue(serving._tokenizer), clock="wall")
            given = {"S": 2, "env_client": lambda: env_client, **more}
            found, saved = made(serving._worker, policies, batches, Sampling(max_new=100), directory, **given)
        files.close()
        for step, batch in found.items():
            rollouts = batch.rollouts
            assert not faults(rollouts, step=step, max_staleness=2) and (rollouts.piece_BT.max(axis=1) == 1).all()
            drawn_BT = rollouts.mask_BT > 0
            alike_X = np.abs(rollouts.raw_logprob_BT[drawn_BT] + math.log(vocab)) < 1e-4
            np.testing.assert_array_equal(alike_X, rollouts.version_BT[drawn_BT] % 2 == 1)
        return found, saved, set(map(int, (tmp_path / "ran").read_text().split()))

    def assert_same(one, two):
        assert_equal(one, two)
        for step, batch in one.items():
            for name in ("piece_BT", "turn_reward_BT", "mask_BT"):
                np.testing.assert_array_equal(getattr(batch.rollouts, name), getattr(two[step].rollouts, name))
            drawn = [[each["metrics"] for each in run[step].rollouts.episodes] for run in (one, two)]
            assert drawn[0] == drawn[1]

    lived, saved, _ = run(tmp_path / "one", clock=3, until=4)
    found, _, ran = run(tmp_path / "one", clock=50, begin=(2, saved[2]))
    assert_same({step: found[step] for step in (2, 3, 4)}, {step: lived[step] for step in (2, 3, 4)})
    assert ran and not ran & {int(i) for step in (2, 3, 4) for i in lived[step].rollouts.prompts.index_P}
    both = lived | found
    assert_whole(both, 2)
    assert mixed(both)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    repeated, _, ran = run(tmp_path / "two", clock=77)
    assert_same(both, repeated)
    assert not ran
    shutil.rmtree(tmp_path / "two" / "outside")
    with pytest.raises(ValueError, match=r"The samples of prompt \d+ in step \d+ differ"):
        run(tmp_path / "two", clock=77)


def test_finished_conversations_are_whole_in_a_checkpoint_and_open_ones_begin_again(play, serving, tmp_path):
    worker, policy, prompts = serving._worker, serving._policy, asked_once(serving)
    how = {"group_size": 4, "step": 1, "sampling": Sampling(max_new=100)}
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:Waits"), Limits(), journal=None) as host:
        worker.env_client = EnvironmentClient(host, Dialogue(serving._tokenizer), clock="wall")
        try:
            before = worker.player(prompts, **how)
            for _ in worker.advance(policy, [(before, None)], halt=lambda: len(before.done) == 3):
                pass
            part = again(of_tracks(prompts, before.state(), prompt_count=1, step=1, quantum=0))
            before.abandon()
            (tmp_path / "go").touch()
            after = worker.player(prompts, **how, partial=part)
            for _ in worker.advance(policy, [(after, None)]):
                pass
            rollouts = worker.rows(after, 0.0)
        finally:
            worker.env_client = None
    assert [sample["track"] is None for sample in part.samples] == [True, False, False, False]
    assert not faults(rollouts, step=1, max_staleness=1) and (rollouts.piece_BT.max(axis=1) == 1).all()
    for b, episode in before.done.items():
        n, end = prompts.length_P[0], rollouts.length_B[b]
        assert rollouts.tokens_BT[b, n:end].tolist() == episode.track.tokens
        assert rollouts.piece_BT[b, n:end].tolist() == episode.piece
