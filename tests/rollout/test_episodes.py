"""The pump (`EpisodePlayer`) with scripted environments: the content of rows does not depend on when they answer."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.engine.config import Sampling
from podrl.environments.protocol import FULL
from podrl.environments.workers import EpisodeEnd, EpisodeObservation
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.players import Pace
from podrl.types import STOP_CALLS, STOP_DEADLINE, STOP_ENV, STOP_EOS, STOP_LENGTH, BatchError

STOPS = ("aba", "bcb", "ca")


class Words:
    """Stands in for Dialogue: each word of an observation is a token id; a stop string <|N|> is the special token N."""

    def encode(self, text: str, role: str = "raw", *, last: int | None = None) -> list[int]:
        return [*([] if role == "raw" else [299]), *(int(word) for word in text.split())]

    def stops(self, strings):
        special = {int(s[2:-2]): s for s in strings if s.startswith("<|")}
        return tuple(s for s in strings if not s.startswith("<|")), special


class Scripted:
    """Implements podrl.rollout.episodes.EpisodeHost: the generator `script(task)` yields observations and gets turns.

    With a seed, messages of the environments come in random order, some of them late.
    """

    def __init__(self, script, seed: int | None = None):
        self.first = None
        self.script, self.random = script, None if seed is None else random.Random(seed)
        self.running, self.ready, self.turns, self.cancelled = {}, [], {}, set()

    def start(self, episode, task, *, recorded=True):
        self.first = episode if self.first is None else self.first
        self.turns[episode] = []
        self.running[episode] = self.script(task)
        self._advance(episode, None)

    def turn(self, episode, turn, drawn=None):
        self.turns[episode].append(turn)
        self._advance(episode, turn)

    def _advance(self, episode, turn):
        try:
            said = self.running[episode].send(turn)
            message = (
                EpisodeObservation(episode, *said)
                if isinstance(said, tuple)
                else dataclasses.replace(said, episode=episode)
            )
        except StopIteration as ended:
            message = EpisodeEnd(episode, *(ended.value or (None, {}, None)), "ended")
        self.ready.append(message)

    def rest(self, episode):
        pass

    def cancel(self, episode):
        self.cancelled.add(episode)

    def poll(self, timeout_s):
        if self.random is None:
            now, self.ready = self.ready, []
            return now
        self.random.shuffle(self.ready)
        count = len(self.ready) if timeout_s else self.random.randint(0, len(self.ready))
        now, self.ready = self.ready[:count], self.ready[count:]
        return now

    def waiting(self):
        return [f"sample {episode}" for episode in self.running]


def say(observation="", role="raw", stop=STOPS, max_new=None, reward=0.0, records=()):
    return observation, role, tuple(stop), max_new, reward, tuple(records)


def dialogue_of(task):
    """Makes a script with an observation of random length before every turn, also the first. The script ends after
    seven turns, or when no room is left."""
    rng = random.Random(task.seed)
    for number in itertools.count():
        words = [rng.randint(6, 298) for _ in range(rng.choice([0, 0, 3, 9]))]
        turn = yield say(" ".join(map(str, words)), role=rng.choice(["raw", "user"]), max_new=rng.choice([None, 5]))
        if turn.stop == FULL:
            return None
        if number > 5:
            return 1.0, {"turns": float(number)}, None


@pytest.fixture(scope="session")
def play(tight, policy, prompts_of):
    """Returns a function that plays a script on the shared worker: (samples, the host that played it)."""

    def run(script, lengths=(20, 3, 11), *, group_size=3, seed=None, sampling=None, host=Scripted):
        host = host(script, seed)
        tight.env_client = EnvironmentClient(host, Words())
        try:
            sampling = sampling or Sampling(max_new=12)
            return tight.generate(policy, prompts_of(lengths), group_size=group_size, step=1, sampling=sampling), host
        finally:
            tight.env_client = None

    return run


@settings(max_examples=8, derandomize=True)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), group_size=st.integers(1, 4))
def test_rows_hold_what_was_sampled_and_given(tiny, tight, play, lengths, group_size):
    """A row has prompt, sampled ids and encoded observations in order; masks, versions and log-probabilities fit it."""
    rollouts, host = play(dialogue_of, lengths, group_size=group_size)
    assert tight.stats.compiles == 0
    np.testing.assert_array_equal(rollouts.mask_BT > 0, rollouts.version_BT >= 0)
    reference_BTV = tiny.logprobs(rollouts.tokens_BT, rollouts.length_B)
    for b, episode in enumerate(rollouts.episodes):
        n = rollouts.prompts.length_P[b // group_size]
        row, mask = (x[b, n : rollouts.length_B[b]] for x in (rollouts.tokens_BT, rollouts.mask_BT > 0))
        sampled = iter(token for turn in host.turns[host.first + b] for token in turn.tokens)
        at = 0
        for turn in episode["turns"]:
            part = row[at : at + turn["tokens"]].tolist()
            if turn["by"] == "model":
                assert part == list(itertools.islice(sampled, turn["tokens"]))
                assert mask[at : at + turn["tokens"]].all() and turn["versions"] == [7, 7]
            else:
                words = [int(word) for word in turn["text"].split()]
                assert part in (words[: len(part)], [299, *words][: len(part)])
                assert not mask[at : at + turn["tokens"]].any()
            at += turn["tokens"]
        assert at == len(row) and next(sampled, None) is None
        places = np.flatnonzero(mask) + n
        chosen = reference_BTV[b, places, rollouts.tokens_BT[b, places]]
        np.testing.assert_allclose(rollouts.logprob_BT[b, places], chosen, atol=1e-4)
    given_BT = (rollouts.mask_BT == 0) & (np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[:, None])
    assert not rollouts.logprob_BT[given_BT].any() and (rollouts.version_BT[given_BT] == -1).all()


def test_samples_do_not_depend_on_when_answers_come(play):
    first, _ = play(dialogue_of, group_size=4)
    for seed in range(3):
        other, _ = play(dialogue_of, group_size=4, seed=seed)
        for name in ("tokens_BT", "length_B", "mask_BT", "logprob_BT", "raw_logprob_BT", "version_BT", "stop_B"):
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
        assert [e["turns"] for e in first.episodes] == [e["turns"] for e in other.episodes]


def test_answers_before_the_next_dispatch_save_steps_and_change_no_sample(play, tight, monkeypatch):
    """Turns end at a stop string, which is found only when the output of a dispatch is read."""

    def stopping(task):
        for _ in range(4):
            if (yield say("7 8 9", stop=("a",))).stop == FULL:
                return

    made = []
    for first in (False, True):
        monkeypatch.setattr(Pace, "read_first", lambda pace, first=first: first and pace._session.flying > 0)
        made.append((play(stopping, (9, 4), group_size=4)[0], tight.stats.decode_steps))
    (ahead, more), (after, fewer) = made
    for name in ("tokens_BT", "length_B", "mask_BT", "logprob_BT", "raw_logprob_BT", "version_BT", "stop_B"):
        np.testing.assert_array_equal(getattr(ahead, name), getattr(after, name))
    assert fewer < 0.75 * more, (fewer, more)


def test_an_environment_that_only_listens_changes_nothing(tight, policy, prompts_of, play):
    def listen(task):
        yield say(stop=())

    played, _ = play(listen)
    plain = tight.generate(policy, prompts_of((20, 3, 11)), group_size=3, step=1, sampling=Sampling(max_new=12))
    for field in dataclasses.fields(plain):
        if isinstance(getattr(plain, field.name), np.ndarray):
            np.testing.assert_array_equal(getattr(played, field.name), getattr(plain, field.name))
    assert played.completions == plain.completions


def test_rewards_lie_on_the_last_sampled_token_of_their_turn(play):
    def rewarded(task):
        yield say(max_new=2, stop=())
        yield say("7 8 9", max_new=3, stop=(), reward=-0.25)
        return 2.0, {"won": 1.0}, "as told"

    rollouts, _ = play(rewarded, sampling=Sampling(max_new=12, stop_ids=()))
    for b, episode in enumerate(rollouts.episodes):
        n = rollouts.prompts.length_P[b // 3]
        turns = [turn for turn in episode["turns"] if turn["by"] == "model"]
        first, last = turns[0]["tokens"], rollouts.length_B[b] - n
        expected = np.zeros(rollouts.tokens_BT.shape[1])
        expected[n + first - 1], expected[n + last - 1] = -0.25, 2.0
        np.testing.assert_array_equal(rollouts.turn_reward_BT[b], expected)
        assert [turn["reward"] for turn in turns] == [-0.25, 2.0]
        assert rollouts.completions[b] == "as told" and episode["metrics"] == {"won": 1.0}
        assert rollouts.stop_B[b] in (STOP_ENV, STOP_EOS)


def test_an_observation_without_room_is_cut_and_ends_the_sample(play):
    def talkative(task):
        turn = yield say(max_new=3, stop=())
        turn = yield say(" ".join(["9"] * 50), stop=())
        assert turn.stop == FULL
        return 0.5, {}, None

    rollouts, _ = play(talkative)
    assert (rollouts.stop_B == STOP_LENGTH).all()
    np.testing.assert_array_equal(rollouts.length_B, np.repeat(rollouts.prompts.length_P, 3) + 12)
    assert (rollouts.turn_reward_BT.sum(axis=1) == 0.5).all()


@pytest.mark.parametrize("reason", ["deadline", "failed"])
def test_a_lost_episode_ends_where_it_stands_without_the_rewards_of_its_turns(play, reason):
    class Lost(Scripted):
        def turn(self, episode, turn, drawn=None):
            if episode % 2 and self.turns[episode]:
                self.ready.append(EpisodeEnd(episode, None, {}, None, reason))
            else:
                super().turn(episode, turn)

    def earning(task):
        yield say(max_new=3, stop=())
        yield say("7", max_new=3, stop=(), reward=0.25)

    rollouts, _ = play(earning, host=Lost)
    lost_B = rollouts.stop_B == STOP_DEADLINE
    assert lost_B[1::2].all() and not lost_B[::2].any() and (rollouts.mask_BT.sum(axis=1) == 6).all()
    assert (rollouts.turn_reward_BT.sum(axis=1) == np.where(lost_B, 0.0, 0.25)).all()
    assert [episode.get("reward") for episode in rollouts.episodes[:2]] == [0.25, None]


@pytest.mark.parametrize(("reason", "stop"), [("turns", STOP_ENV), ("calls", STOP_CALLS)])
def test_the_end_of_the_last_turn_there_may_be_is_not_the_models_end(play, reason, stop):
    class Bounded(Scripted):
        def turn(self, episode, turn, drawn=None):
            self.turns[episode].append(turn)
            self.ready.append(EpisodeEnd(episode, None, {}, None, reason))

    def asks(task):
        yield say(stop=())

    rollouts, _ = play(asks, group_size=12, sampling=Sampling(max_new=44, temperature=3.0))
    bounded, _ = play(asks, group_size=12, sampling=Sampling(max_new=44, temperature=3.0), host=Bounded)
    ended = rollouts.stop_B == STOP_EOS
    assert ended.any() and (bounded.stop_B[ended] == stop).all()
    np.testing.assert_array_equal(bounded.stop_B[~ended], rollouts.stop_B[~ended])


def test_a_stop_string_that_is_one_token_is_met(play):
    token = 250

    def at_token(task):
        turn = yield say(stop=(f"<|{token}|>",))
        if turn.stop.startswith("<|"):
            assert turn.tokens[-1] == token and turn.text.endswith(turn.stop)
            return 1.0, {}, None
        return 0.0, {}, None

    rollouts, _ = play(at_token, group_size=12, sampling=Sampling(max_new=44, temperature=3.0))
    met = rollouts.turn_reward_BT.sum(axis=1) > 0
    assert met.any() and (rollouts.stop_B[met] == STOP_ENV).all()


def test_a_sample_that_says_nothing_keeps_its_reward(play):
    """The reward lies on the last token of the prompt, which no loss reads."""

    def mute(task):
        yield from ()
        return 1.5, {}, None

    rollouts, _ = play(mute)
    place_B = np.repeat(rollouts.prompts.length_P, len(rollouts.stop_B) // len(rollouts.prompts.length_P)) - 1
    assert not rollouts.mask_BT.any() and (rollouts.stop_B == STOP_ENV).all()
    np.testing.assert_array_equal(np.argwhere(rollouts.turn_reward_BT)[:, 1], place_B)
    np.testing.assert_array_equal(rollouts.turn_reward_BT.sum(axis=1), 1.5)


def test_a_reward_before_any_turn_is_refused(tight, play):
    def hasty(task):
        yield say(reward=1.0)

    with pytest.raises(BatchError, match=r"sample 0 of prompt 0 gave the reward 1 before the model's first turn"):
        play(hasty)
    assert tight.env_client is None
