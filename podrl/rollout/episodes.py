"""The pump: samples whose environments answer them. One thread steps the engine and passes the words both ways."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from podrl.data.dialogue import Dialogue
from podrl.environments.calls import SEPARATOR, shortened
from podrl.environments.protocol import FULL, Task, Turn
from podrl.environments.workers import Done, Say
from podrl.rollout.config import Sampling
from podrl.rollout.session import Opening, Session, Track
from podrl.rollout.state import STOP_IDS
from podrl.types import (
    STOP_CALLS,
    STOP_DEADLINE,
    STOP_ENV,
    STOP_EOS,
    STOP_FAILED,
    STOP_LENGTH,
    STOP_STRING,
    BatchError,
    Mode,
    Prompts,
)

_POLL_S = 1.0  # the longest silence before it is looked who is waited for
_BUNCH_S = 0.002  # answers less than this apart go on together, where no sample runs


class Host(Protocol):
    """Runs episodes; podrl.environments.workers.Episodes implements it, and documents the methods."""

    def start(self, episode: int, task: Task) -> None: ...

    def turn(self, episode: int, turn: Turn) -> None: ...

    def cancel(self, episode: int) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[Say | Done]: ...

    def waiting(self) -> list[str]: ...


@dataclasses.dataclass
class Partner:
    """The other side of every sample.

    Attributes:
      host: of its episodes.
      dialogue: makes tokens of its observations.
      waits_for: whom the samples wait for while none of them runs; '' while one does.
      started: episodes so far, all requests together: a message may be of a request that was given up.
    """

    host: Host
    dialogue: Dialogue
    waits_for: str = ""
    started: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of `generate`, all settings filled in: prompts, samples of each, and limits.

    Attributes:
      prompts, group_size, step, sampling: as of RolloutWorker.generate, all settings filled in.
      keys_PG2: the samples' random keys.
      pieces: see Scheduler.add.
      response: sampled and given tokens of a sample, at most.
      mode: 'train' or 'eval'.
      of_step: the training step that environments are told: `step` is another while evaluating.
    """

    prompts: Prompts
    group_size: int
    step: int
    sampling: Sampling
    keys_PG2: np.ndarray
    pieces: int
    response: int
    mode: Mode
    of_step: int


@dataclasses.dataclass
class Episode:
    """A sample and what passed between it and its environment.

    Attributes:
      track: None while it is not in the engine.
      opening: how it begins, once its environment has said so.
      stops: strings that are one token, by its id, at which the present turn ends.
      strings: the others.
      turns: a record of each turn and observation, see podrl.types.Rollouts.
      rewards: (place in the completion, reward) of turns.
      stop: why it ended.
      text: of the completion; the environment may give another than what the tokens say.
      full: there was no room for what its environment had to say.
    """

    track: Track | None = None
    opening: Opening | None = None
    stops: dict[int, str] = dataclasses.field(default_factory=dict)
    strings: tuple[str, ...] = ()
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rewards: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    stop: int | None = None
    text: str = ""
    full: bool = False
    started: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """Returns the episode's entry of `Rollouts.episodes`."""
        return {"turns": self.turns, "metrics": self.metrics, "seconds": self.seconds}


class Pump:
    """Plays the episodes of one request on a session."""

    def __init__(self, session: Session, partner: Partner, request: Request):
        """Nothing starts yet."""
        self._session, self._partner, self._request = session, partner, request
        self._host, self._dialogue = partner.host, partner.dialogue
        self._episodes: dict[int, Episode] = {}
        self._by_track: dict[int, int] = {}
        self._unasked: dict[int, set[int]] = {}  # by prompt: samples whose environments have not begun
        self._ended: list[int] = []
        self._owed: set[int] = set()  # samples whose environments have the word
        self._first = partner.started
        partner.started += len(request.prompts.length_P) * request.group_size

    def run(self, between: Callable[[], None]) -> Iterator[tuple[int, Episode]]:
        """(b, episode) of every sample as it ends; `between` is called before each step of the engine."""
        G, request = self._request.group_size, self._request
        try:
            for p in range(len(request.prompts.length_P)):
                self._unasked[p] = set(range(p * G, p * G + G))
                for g in range(G):
                    self._episodes[p * G + g] = Episode()
                    self._owed.add(p * G + g)
                    self._host.start(self._first + p * G + g, self._task(p, g))
            while self._episodes:
                between()
                self._listen()
                for track in self._session.step() if self._session.busy else ():
                    self._on_event(self._by_track[track.handle], track)
                ended, self._ended = self._ended, []
                for b in ended:
                    yield b, self._episodes.pop(b)
        finally:
            self._partner.waits_for = ""
            for b in self._episodes:
                self._host.cancel(self._first + b)

    def _task(self, p: int, g: int) -> Task:
        prompts = self._request.prompts
        fields = {name: _plain(values[p]) for name, values in prompts.fields.items()}
        return Task(
            prompt=prompts.text[p],
            fields=fields,
            seed=int(self._request.keys_PG2[p, g, 0]),
            index=int(prompts.index_P[p]),
            sample=g if self._request.sampling.temperature else -1,  # a greedy one, beside those of the group
            step=self._request.of_step,
            mode=self._request.mode,
        )

    # What environments say.

    def _listen(self) -> None:
        """Takes what environments say: while the device has work, or until the first of them and those right behind."""
        session, idle = self._session, not self._session.busy
        messages = self._host.poll(_POLL_S if idle else 0.0)
        self._partner.waits_for = ", ".join(self._host.waiting()[:3]) if idle and not messages else ""
        self._take(messages)
        while self._owed and (messages or not idle) and (wait := _BUNCH_S if idle else session.slack_s) > 0:
            messages = self._host.poll(wait)
            self._take(messages)

    def _take(self, messages: Sequence[Say | Done]) -> None:
        for message in messages:
            b = message.episode - self._first
            if b not in self._episodes or self._episodes[b].stop is not None:
                continue
            self._owed.discard(b)
            if isinstance(message, Say):
                self._on_say(b, message)
            else:
                self._on_done(b, message)
        for p in [p for p, unasked in self._unasked.items() if not unasked]:
            del self._unasked[p]
            self._begin(p)

    def _on_say(self, b: int, say: Say) -> None:
        episode = self._episodes[b]
        self._reward(b, say.reward)
        tokens, texts = self._read(b, say)
        used = 0 if episode.track is None else len(episode.track.tokens)
        left = self._request.response - used
        if len(tokens) > left:
            tokens = tokens[:left]
        left -= len(tokens)
        self._record_given(episode, say, len(tokens))
        opening = Opening(tokens, texts, tuple(episode.stops), left if say.max_new is None else min(left, say.max_new))
        if episode.track is None:
            episode.opening = opening
            self._unasked[b // self._request.group_size].discard(b)
            return
        if episode.track.stop is None:
            self._session.extend(episode.track, opening)
        if episode.track.stop is not None:
            self._fill(b)

    def _read(self, b: int, say: Say) -> tuple[list[int], tuple[str, ...]]:
        """The tokens of an observation, and the stop strings of the turn that follows, as far as they are text."""
        episode, dialogue = self._episodes[b], self._dialogue
        last = episode.track.tokens[-1] if episode.track and episode.track.tokens else None
        try:
            text, tokens = say.observation, []
            if say.cuts:
                text = shortened(text, say.cuts, say.cut_tokens, dialogue.encode, dialogue.decode)
            if text or say.role != "raw":
                texts = text.split(SEPARATOR) if say.role == "tool" else text
                tokens = dialogue.encode(texts, say.role, last=last)
            texts, ids = dialogue.stops((*self._request.sampling.stop_strings, *say.stop))
        except ValueError as error:
            raise BatchError(f"{self._name(b)}: {error}") from error
        if (most := self._session.spare_stop_ids(self._request.sampling)) < len(ids):
            raise BatchError(
                f"{self._name(b)}: {len(ids)} stop strings are special tokens ({', '.join(ids.values())}), "
                f"and at most {most} may be: {STOP_IDS} ids end a turn, the tokenizer's own included."
            )
        episode.stops, episode.strings = dict(ids), texts
        return tokens, texts

    def _on_done(self, b: int, done: Done) -> None:
        episode = self._episodes[b]
        self._reward(b, 0.0 if done.reward is None else done.reward)
        episode.metrics = dict(done.metrics)
        self._unasked.get(b // self._request.group_size, set()).discard(b)
        track = episode.track
        stop = STOP_DEADLINE if done.reason == "deadline" else self._why(episode, done)
        if track is not None and track.stop is None:
            self._session.end(track, stop)
        self._end(b, stop, done.text)

    def _why(self, episode: Episode, done: Done) -> int:
        """Returns the stop reason of a sample whose environment has returned."""
        track = episode.track
        if track is None:
            return STOP_LENGTH if episode.full else STOP_ENV
        if track.stop is not None or episode.full:
            return STOP_LENGTH
        spent = track.sampled >= (self._request.sampling.max_new or 0) or len(track.tokens) >= self._request.response
        if track.paused == STOP_LENGTH and spent:
            return STOP_LENGTH
        if done.reason == "calls":
            return STOP_CALLS
        own = track.paused == STOP_EOS and not episode.stops.get(track.tokens[-1]) and done.reason != "turns"
        return STOP_EOS if own else STOP_ENV

    def _begin(self, p: int) -> None:
        """Submits the samples of a prompt, all of whose environments have begun or ended."""
        G, request = self._request.group_size, self._request
        chosen = [b for b in range(p * G, p * G + G) if b in self._episodes and self._episodes[b].stop is None]
        ready = []
        for b in chosen:
            opening = self._episodes[b].opening
            assert opening is not None, b
            if opening.max_new:
                ready.append((b, opening))
            else:
                self._fill(b)
        if not ready:
            return
        prompt = np.asarray(request.prompts.tokens_PT[p, : request.prompts.length_P[p]], np.int32)
        keys_G2 = request.keys_PG2[p, [b % G for b, _ in ready]]
        openings = [opening for _, opening in ready]
        tracks = self._session.add(prompt, keys_G2, request.sampling, pieces=request.pieces, openings=openings)
        for (b, _), track in zip(ready, tracks, strict=True):
            self._episodes[b].track = track
            self._by_track[track.handle] = b

    # What the model says.

    def _on_event(self, b: int, track: Track) -> None:
        episode = self._episodes[b]
        tokens = track.tokens[track.first :]
        if track.stop is not None:
            assert track.stop == STOP_FAILED, track.stop
            self._host.cancel(self._first + b)
            self._end(b, STOP_FAILED, None)
            return
        text, stop = track.text, "length"
        if track.paused == STOP_EOS:
            stop = episode.stops.get(tokens[-1], "eos")
            text += episode.stops.get(tokens[-1], "")
        elif track.paused == STOP_STRING:
            stop = next(s for s in episode.strings if text.endswith(s))
        versions = [track.versions[track.first], track.versions[-1]] if tokens else []
        episode.turns.append(
            {"by": "model", "text": text, "tokens": len(tokens), "versions": versions, "stop": stop, "reward": 0.0}
        )
        self._tell(b, Turn(text, stop, tuple(tokens)))

    # Records.

    def _fill(self, b: int) -> None:
        """Tells the environment that its sample is full, so that it returns."""
        self._episodes[b].full = True
        self._tell(b, Turn("", FULL))

    def _tell(self, b: int, turn: Turn) -> None:
        """Gives the environment of a sample the word."""
        self._owed.add(b)
        self._host.turn(self._first + b, turn)

    def _reward(self, b: int, reward: float) -> None:
        """Puts a reward on the last sampled token."""
        episode = self._episodes[b]
        said = [turn for turn in episode.turns if turn["by"] == "model" and turn["tokens"]]
        if not reward:
            return
        if episode.track is None or not said:
            raise BatchError(
                f"{self._name(b)} gave the reward {reward:g} before the model had said anything: say(reward=...) is of "
                "the turn before, Result(reward) of the whole sample."
            )
        said[-1]["reward"] += reward
        place = max(i for i, version in enumerate(episode.track.versions) if version >= 0)
        episode.rewards.append((place, reward))

    def _record_given(self, episode: Episode, say: Say, tokens: int) -> None:
        """Records of an observation; the first has all of its tokens, which are encoded together."""
        made = [dict(record) for record in say.records]
        if not made and tokens:
            made = [{"by": "environment", "text": say.observation}]
        for i, record in enumerate(made):
            episode.turns.append(record | {"tokens": tokens if i == 0 else 0})

    def _end(self, b: int, stop: int, text: str | None) -> None:
        episode = self._episodes[b]
        self._owed.discard(b)
        episode.stop, episode.seconds = stop, time.monotonic() - episode.started
        whole = "" if episode.track is None else episode.track.text
        episode.text = whole if text is None else text
        self._ended.append(b)

    def _name(self, b: int) -> str:
        p, g = divmod(b, self._request.group_size)
        return f"The environment of sample {g} of prompt {int(self._request.prompts.index_P[p])}"


def _plain(value: Any) -> Any:
    """A field as JSON holds it."""
    return value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value
