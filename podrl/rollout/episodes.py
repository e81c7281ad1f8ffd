"""Generates samples with environments: passes turns to the environments, and observations to the samples."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from podrl.data.dialogue import Dialogue
from podrl.data.hint import TEACHER_PROMPT
from podrl.engine.config import Sampling
from podrl.engine.session import Opening, Session, Track
from podrl.engine.state import STOP_IDS
from podrl.environments.calls import SEPARATOR, shortened
from podrl.environments.config import History
from podrl.environments.protocol import FULL, REFUSED, Task, Turn
from podrl.environments.wire.requests import RefusedRequest
from podrl.environments.workers import EpisodeEnd, EpisodeEvent, EpisodeObservation, EpisodeRestart, EpisodeReturn
from podrl.mappings import EpisodeRecord, PackedTokens, SavedState
from podrl.rollout.branches import Branches, ChatRequest, read_record
from podrl.rollout.partial import PartialBatch, fill, pack_routes, pack_turn, unpack_routes
from podrl.rollout.token_budget import TokenBudget
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

# Field of a prompt that an environment's first observation goes on with: the text that the chat template writes after
# the prompt's question, which follows the observation. None for any other prompt.
CLOSING = "prompt_closing"
_STATE = ("strings", "turns", "rewards", "metrics", "stop", "text", "full", "seconds", "piece")
_log = logging.getLogger("podrl.environments")


class EpisodeHost(Protocol):
    """Runs episodes; podrl.environments.workers.Episodes implements this protocol and documents the methods."""

    def start(self, episode: int, task: Task, *, recorded: bool = True) -> None: ...

    def turn(self, episode: int, turn: Turn, drawn: PackedTokens | None = None) -> None: ...

    def record(self, episode: int, routes: Sequence[PackedTokens | None]) -> None: ...

    def rest(self, episode: int) -> None: ...

    def cancel(self, episode: int) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[EpisodeEvent]: ...

    def waiting(self) -> list[str]: ...


@dataclasses.dataclass
class EnvironmentClient:
    """The engine's connection to the environments of all samples.

    Attributes:
      host: runner of the episodes.
      dialogue: encoder of observations as tokens.
      clock: rollout.clock of the job.
      failed_share: env.failed_share of the job, the largest share of a request's environments that may fail.
      history: env.history of the job.
      observes_first: function from the field `env` of a prompt to whether the first observation of the prompt's
        environment is a part of the prompt (`Episodes.observes_first`).
      waits_for: calls of environments that the samples wait for (`Episodes.waiting`); '' while a sample runs.
      started: number of episodes so far, over all requests. Episodes get their numbers from this count, so that a late
        message of a cancelled request is not taken for a message of a later request.
      inboxes: unread messages of each open episode, by the episode's number.
    """

    host: EpisodeHost
    dialogue: Dialogue
    clock: Literal["tokens", "wall"] = "tokens"
    failed_share: float = 1.0
    history: History = "template"
    observes_first: Callable[[object], bool] = lambda env: False
    waits_for: str = ""
    started: int = 0
    inboxes: dict[int, list[EpisodeEvent]] = dataclasses.field(default_factory=dict)

    def opened(self, prompts: Prompts, texts: Sequence[str] | None = None) -> Prompts:
        """Cuts prompts after their questions if observations go on with them; the field `CLOSING` gets what is cut off.

        Prompts of plain text have nothing to cut off. A prompt whose teacher reads tokens of another vocabulary stays
        whole, because these tokens cannot be cut here: its first observation is a turn after an empty turn of the
        model. Prompts that were cut before are returned unchanged.

        Args:
          prompts: P prompts.
          texts: texts of the prompts' tokens; None for `prompts.text`.
        """
        P, fields = len(prompts.length_P), prompts.fields
        envs, texts = fields.get("env", [None] * P), prompts.text if texts is None else texts
        going_on = [] if CLOSING in fields else [p for p in range(P) if self.observes_first(envs[p])]
        if not going_on:
            return prompts
        hints, text = list(fields.get(TEACHER_PROMPT, [None] * P)), list(prompts.text)
        tokens_PT, length_P = prompts.tokens_PT.copy(), prompts.length_P.copy()
        closings: list[str | None] = [None] * P
        for p in going_on:
            tokens = prompts.tokens_PT[p, : prompts.length_P[p]].tolist()
            if (cut := self.dialogue.without_closing(texts[p], tokens)) is None:
                continue
            short, ids = cut
            if (hint := hints[p]) is not None:
                behind = tokens[len(ids) :]
                if tokens[: len(ids)] != ids or not behind or list(hint[-len(behind) :]) != behind:
                    continue
                hints[p] = hint[: -len(behind)]
            text[p], length_P[p], closings[p] = short, len(ids), self.dialogue.closing
            tokens_PT[p] = self.dialogue.tokenizer.pad_id
            tokens_PT[p, : len(ids)] = ids
        if not any(closings):
            return prompts
        more = {CLOSING: closings, **({TEACHER_PROMPT: hints} if TEACHER_PROMPT in fields else {})}
        return dataclasses.replace(
            prompts, tokens_PT=tokens_PT, length_P=length_P, text=text, fields={**fields, **more}
        )

    def poll(self, timeout_s: float) -> int:
        """Sorts the messages of environments into the inboxes; waits at most `timeout_s` seconds for the first one.

        Returns:
          The number of messages.
        """
        messages = self.host.poll(timeout_s)
        for message in messages:
            if (inbox := self.inboxes.get(message.episode)) is not None:
                inbox.append(message)
        return len(messages)


@dataclasses.dataclass(frozen=True)
class RolloutRequest:
    """A call of `RolloutWorker.generate` with all its settings.

    Attributes:
      prompts, group_size, step, sampling: arguments of `RolloutWorker.generate`.
      keys_PG2: random keys of the samples, uint32.
      pieces: number of parts that each group is cut into, so that few prompts fill all shards (`Scheduler.add`).
      response: largest number of tokens of a sample after its prompt, sampled and appended tokens together.
      mode: 'train' or 'eval'.
      of_step: value of `Task.step` for environments: the training step; in an evaluation, the version of the weights.
      expected: expected number of tokens of a sample, by row; rows without a known number are missing.
      route_bytes: number of bytes of a token's routes if routes are recorded, else 0.
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
    expected: Mapping[int, float]
    route_bytes: int = 0

    @property
    def samples(self) -> int:
        """Number of samples, P * G."""
        return len(self.prompts.length_P) * self.group_size

    def tokens(self, p: int) -> np.ndarray:
        """Returns the tokens of prompt `p`, int32."""
        return np.asarray(self.prompts.tokens_PT[p, : self.prompts.length_P[p]], np.int32)


@dataclasses.dataclass
class Episode:
    """A sample together with the messages between it and its environment.

    Attributes:
      track: record of the sample; None before its environment has opened it.
      opening: tokens and limits that the sample begins with; None before its environment has sent them.
      stops: stop strings of the present turn that are a single special token, by the token's id.
      strings: stop strings of the present turn that are not a single special token.
      turns: a record of each turn and observation, as in podrl.types.Rollouts.
      rewards: (index of the token in the completion, reward) of each reward.
      reward: sum of the environment's rewards; None until the environment has ended, or if it gave no reward.
      metrics: metrics that the environment gave, by name.
      stop: reason why the sample ended, one of the STOP_* codes of `podrl.types`; None while it goes on.
      text: text of the completion, which may be the environment's own instead of the text of the tokens.
      own_text: True if `text` is the environment's own.
      full: True if the sample had no room for the environment's last message.
      sent_turns: turns that were sent to the environment. Another process can send them again to a new environment.
      received: number of messages from the environment.
      repeated: number of earlier messages that the environment has sent again since it began again; None if it did not
        begin again, or has sent all of them.
      calls: number of turns that the sample has ended in the present session.
      branches: branches of the conversation, if the environment calls Model.chat. `track` is then the record of the
        newest request's branch, and after the end a record that joins all branches.
      entered: value of `Branches.drawn` when the sample entered the present session.
      answers: recorded answers of a checkpoint (podrl.rollout.branches.read_record) to the first requests of an
        environment that began again; the model answers the later requests.
      piece: number of the piece of each token of the completion; empty if there is one piece.
      started: time of the start, seconds of `time.monotonic`.
      seconds: seconds from the start to the end of the episode.
    """

    track: Track | None = None
    opening: Opening | None = None
    stops: dict[int, str] = dataclasses.field(default_factory=dict)
    strings: tuple[str, ...] = ()
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rewards: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    stop: int | None = None
    text: str = ""
    own_text: bool = False
    full: bool = False
    sent_turns: list[Turn] = dataclasses.field(default_factory=list)
    received: int = 0
    repeated: int | None = None
    calls: int = 0
    branches: Branches | None = None
    entered: int = 0
    answers: list[PackedTokens] = dataclasses.field(default_factory=list)
    piece: list[int] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    def state(self) -> SavedState:
        """Returns the episode's part of a checkpoint as values for JSON, without the track."""
        state = {name: getattr(self, name) for name in _STATE}
        sent_turns = [[turn.text, turn.stop, list(turn.tokens)] for turn in self.sent_turns]
        state |= {"heard": self.received, "answered": self.own_text, "reward": self.reward}
        return state | {"stops": list(self.stops.items()), "told": sent_turns}

    def restore(self, state: SavedState) -> None:
        """Restores the values that `state` returned in another process; the environment will begin again."""
        for name in _STATE:
            setattr(self, name, state.get(name, getattr(self, name)))  # older checkpoints lack some of the values
        self.received = state["heard"]
        self.own_text, self.reward = state.get("answered", False), state.get("reward")  # older checkpoints lack both
        self.strings, self.rewards = tuple(self.strings), [(place, reward) for place, reward in self.rewards]
        self.stops = {int(id_): text for id_, text in state["stops"]}
        self.sent_turns = [Turn(text, stop, tuple(tokens)) for text, stop, tokens in state["told"]]
        self.repeated = 0 if self.received else None

    def record(self) -> EpisodeRecord:
        """Returns the episode's entry of `Rollouts.episodes`."""
        optional = {"text": self.text} if self.own_text else {}
        optional |= {} if self.reward is None else {"reward": self.reward}
        return {"turns": self.turns, "metrics": self.metrics, "seconds": self.seconds, **optional}


class EpisodePlayer:
    """Plays the samples of one request with their environments; a podrl.rollout.players.Player."""

    def __init__(self, env_client: EnvironmentClient, request: RolloutRequest, partial: PartialBatch | None = None):
        """Stores the request, and restores the samples of `partial`.

        Args:
          env_client: the environments of all samples.
          request: the request.
          partial: state of the samples in another process, which this process continues; None for new samples.
        """
        self.request, self.rows, self.done = request, {}, {}
        self._env_client, self._host, self._dialogue = env_client, env_client.host, env_client.dialogue
        self._partial = partial
        self._session: Any = None
        self._episodes = {b: Episode() for b in range(len(request.prompts.length_P) * request.group_size)}
        self._unopened: dict[int, set[int]] = {}  # samples that no environment has opened yet, by prompt
        self._ended: list[int] = []
        self._waiting: set[int] = set()  # samples that wait for a message of their environments
        self._returned: set[int] = set()  # samples whose environments wait for routes (`EpisodeReturn`)
        self._inboxes: dict[int, list[EpisodeEvent]] = {}  # inboxes of this player's episodes, by row
        self._budget = TokenBudget()
        self._calls: int | None = None
        self._failed = 0
        self._windows = partial is not None and not self._by_wall  # True if windows of tokens cut the samples
        self._warned = False
        self._first = env_client.started
        env_client.started += len(self._episodes)

    def enter(self, session: Session, budget: TokenBudget, calls: int | None = None) -> None:
        if self._session is None:
            # With `rollout.clock='wall'` the tokens of recorded answers come from old versions of the weights, so only
            # a batch that is repeated from the journal may use them.
            self._begin_all(session, recorded=budget.repeated or not self._by_wall)
        self._session, self._budget = session, budget
        self._windows |= budget.quantum is not None
        self._calls = None if budget.quantum is None else calls
        for b, drawn in budget.late.items():
            if not drawn and b in self._episodes and self._episodes[b].stop is None:
                self._run_out(b)
        groups: dict[int, list[Track]] = {}
        for b, episode in self._episodes.items():
            episode.calls = 0
            if episode.branches is not None:
                episode.entered = episode.branches.drawn
                episode.branches.enter(session, self._leaves(episode), urgent=budget.urgent)
            elif (track := episode.track) is not None and track.stop is None:
                track.leave_at(budget.limit(b, track.sampled), recorded=b in budget.recorded)
                if track.paused is None and track.sampled < track.until:
                    groups.setdefault(b // self.request.group_size, []).append(track)
        for tracks in groups.values():
            session.seat(tracks, pieces=self.request.pieces, urgent=budget.urgent)

    def _begin_all(self, session: Session, *, recorded: bool) -> None:
        G = self.request.group_size
        for b, episode in self._episodes.items():
            if self._partial is not None:
                self._restore(session, b, episode, self._partial)
            if episode.stop is not None:
                self._ended.append(b)
                continue
            if episode.track is None:
                self._unopened.setdefault(b // G, set()).add(b)
            if episode.received == len(episode.sent_turns):  # the next message comes from the environment
                self._waiting.add(b)
            self._env_client.inboxes[self._first + b] = self._inboxes[b] = []
            self._host.start(self._first + b, self._task(*divmod(b, G)), recorded=recorded)

    def _track(self, session: Session, p: int, g: int, opening: Opening) -> Track:
        request = self.request
        recording = request.route_bytes > 0
        return session.track(
            request.tokens(p), request.keys_PG2[p, g], request.sampling.of(g), opening, recording=recording
        )

    def _restore(self, session: Session, b: int, episode: Episode, partial: PartialBatch) -> None:
        state = partial.samples[b]
        episode.restore(state["episode"])
        p, g = divmod(b, self.request.group_size)
        if "answers" in state:
            record = self._track(session, p, g, Opening())
            fill(record, partial, b)
            episode.entered, episode.answers = len(record.tokens), read_record(state["answers"], record)
        elif state["track"] is not None:
            opening = Opening((), episode.strings, tuple(episode.stops))
            track = self._track(session, p, g, opening)
            fill(track, partial, b)
            episode.track, self.rows[track] = track, b

    def state(self) -> list[tuple[SavedState, Track | None]]:
        every = [self.done[b] if b in self.done else self._episodes[b] for b in range(self.request.samples)]
        return [self._state(episode) for episode in every]

    def _state(self, episode: Episode) -> tuple[SavedState, Track | None]:
        if episode.stop is not None or (episode.track is not None and episode.branches is None):
            return {"episode": episode.state()}, episode.track
        # The environment will begin again. If it sends the same requests, it gets the recorded answers. With
        # `rollout.clock='wall'` the answers depend on time, so they are not recorded and may be sampled anew.
        begun = {"episode": Episode().state()}
        if episode.branches is None or self._by_wall:
            return begun, None
        answers, record = episode.branches.record(self._session)
        return {**begun, "answers": answers}, record

    def resting(self) -> bool:
        return all(self._rests(b, episode) for b, episode in self._episodes.items())

    def _rests(self, b: int, episode: Episode) -> bool:
        """Returns True if a sample has left the session, within a turn or before the environment's next message."""
        if episode.track is None or not episode.track.held:
            return False
        return self._parked(episode) if b in self._waiting else episode.track.stop is None

    def _parked(self, episode: Episode) -> bool:
        """Returns True if messages of the sample's environment must wait for the next session."""
        return self._calls is not None and episode.calls >= self._calls

    def count_waiting(self) -> int:
        return sum(not self._parked(self._episodes[b]) for b in self._waiting - self._returned)

    def take(self) -> list[tuple[int, Any]]:
        self._record_returned()
        ended, self._ended = self._ended, []
        self.done.update((b, self._episodes.pop(b)) for b in ended)
        return [(b, self.done[b]) for b in ended]

    def abandon(self) -> None:
        for b in self._episodes:
            self._env_client.inboxes.pop(self._first + b, None)
            self._host.cancel(self._first + b)

    def _task(self, p: int, g: int) -> Task:
        prompts, sampling = self.request.prompts, self.request.sampling
        fields = {name: _plain(values[p]) for name, values in prompts.fields.items() if name != CLOSING}
        return Task(
            prompt=prompts.text[p],
            fields=fields,
            seed=int(self.request.keys_PG2[p, g, 0]),
            index=int(prompts.index_P[p]),
            sample=g - sampling.greedy if sampling.of(g).temperature else -1,  # -1 stands for the greedy sample
            step=self.request.of_step,
            mode=self.request.mode,
        )

    # Messages of environments.

    def handle_messages(self) -> None:
        """Acts on the messages of environments."""
        for b, inbox in list(self._inboxes.items()):
            while inbox and b in self._episodes and not self._parked(self._episodes[b]):
                message = inbox.pop(0)
                if isinstance(message, EpisodeRestart):
                    self._begin_anew(b)
                    continue
                if isinstance(message, EpisodeReturn):
                    self._on_return(b)
                    continue
                if self._episodes[b].stop is None and not self._repeats(b, message):
                    self._waiting.discard(b)
                    if isinstance(message, EpisodeObservation):
                        self._on_observation(b, message)
                    else:
                        self._on_done(b, message)
        for p in [p for p, unopened in self._unopened.items() if not unopened]:
            del self._unopened[p]
            self._begin(p)

    def _repeats(self, b: int, message: EpisodeObservation | EpisodeEnd) -> bool:
        """Sends the earlier answer again, if the environment began again and its message repeats an earlier message.

        Returns:
          True if the message repeats an earlier message, False if it is new.
        """
        episode = self._episodes[b]
        if episode.repeated is None:
            episode.received += 1
            return False
        if isinstance(message, EpisodeEnd):
            raise BatchError(
                f"{self._name(b)} ended earlier than in the run that is repeated. An environment must repeat its "
                "messages: take random numbers from Task.seed, and outside answers through Model.outside."
            )
        if episode.repeated < len(episode.sent_turns):
            self._host.turn(self._first + b, episode.sent_turns[episode.repeated])
        episode.repeated += 1
        if episode.repeated == episode.received:
            episode.repeated = None
        return True

    def _begin_anew(self, b: int) -> None:
        """Removes all tokens of a sample, because its environment begins again."""
        if (branches := self._episodes[b].branches) is not None:
            branches.joined(self._session)  # ends the branches in the engine; the joined record is not used
        self._episodes[b] = Episode(started=self._episodes[b].started)
        self._waiting.add(b)

    def _on_observation(self, b: int, message: EpisodeObservation) -> None:
        episode = self._episodes[b]
        if message.chat is not None:
            self._on_chat(b, message, ChatRequest(**message.chat))
            return
        if episode.branches is not None:
            raise BatchError(f"{self._name(b)} calls model.chat and model.say: an episode may use only one of them.")
        self._reward(b, message.reward)
        tokens, texts = self._encode_observation(b, message)
        used = 0 if episode.track is None else len(episode.track.tokens)
        left = self.request.response - used
        if len(tokens) > left:
            tokens = tokens[:left]
        left -= len(tokens)
        self._record_observation(episode, message, len(tokens))
        opening = Opening(
            tokens, texts, tuple(episode.stops), left if message.max_new is None else min(left, message.max_new)
        )
        if episode.track is None:
            episode.opening = opening
            self._unopened[b // self.request.group_size].discard(b)
            return
        if episode.track.stop is None:
            self._session.extend(episode.track, opening)
        if episode.track.stop is not None:
            self._fill(b)

    def _encode_observation(self, b: int, message: EpisodeObservation) -> tuple[list[int], tuple[str, ...]]:
        """Encodes an observation.

        Returns:
          The observation's tokens, and the stop strings of the next turn that are not a single special token.
        """
        episode, dialogue = self._episodes[b], self._dialogue
        last = episode.track.tokens[-1] if episode.track and episode.track.tokens else None
        try:
            text, tokens = message.observation, []
            if message.cuts:
                text = shortened(text, message.cuts, message.cut_tokens, dialogue.encode, dialogue.decode)
            if (closing := self._closing(b)) is not None:
                p = b // self.request.group_size
                before = self.request.prompts.text[p]
                tokens = dialogue.opening(text, prompt=before, closing=closing, last=int(self.request.tokens(p)[-1]))
            elif text or message.role != "raw":
                texts = text.split(SEPARATOR) if message.role == "tool" else text
                tokens = dialogue.encode(texts, message.role, last=last)
        except ValueError as error:
            raise BatchError(f"{self._name(b)}: {error}") from error
        return tokens, self._stops(b, message)

    def _closing(self, b: int) -> str | None:
        """Returns the text that follows the next observation of a sample if the observation is a part of the prompt.

        Returns:
          '' for a prompt of plain text; None for any other observation, which is no part of the prompt.
        """
        prompts, p = self.request.prompts, b // self.request.group_size
        env = prompts.fields["env"][p] if "env" in prompts.fields else None
        if self._episodes[b].track is not None or not self._env_client.observes_first(env):
            return None
        if CLOSING in prompts.fields and (closing := prompts.fields[CLOSING][p]) is not None:
            return closing
        whole = self._dialogue.closing  # `EnvironmentClient.opened` leaves some prompts of the chat template whole
        return None if whole and prompts.text[p].endswith(whole) else ""

    def _stops(self, b: int, message: EpisodeObservation) -> tuple[str, ...]:
        """Sets the stop strings of the next turn; returns the strings that are not a single special token."""
        try:
            texts, ids = self._dialogue.stops((*self.request.sampling.stop_strings, *message.stop))
        except ValueError as error:
            raise BatchError(f"{self._name(b)}: {error}") from error
        if (most := self._session.spare_stop_ids(self.request.sampling)) < len(ids):
            raise BatchError(
                f"{self._name(b)}: {len(ids)} stop strings are special tokens ({', '.join(ids.values())}), "
                f"and at most {most} may be, because at most {STOP_IDS} token ids end a turn, the "
                "tokenizer's own included."
            )
        self._episodes[b].stops, self._episodes[b].strings = dict(ids), texts
        return texts

    def _on_chat(self, b: int, message: EpisodeObservation, chat: ChatRequest) -> None:
        """Handles a request of Model.chat, which continues a branch of the conversation or opens one."""
        episode, request, session = self._episodes[b], self.request, self._session
        p, g = divmod(b, request.group_size)
        if message.overlaps and self._windows:
            raise BatchError(
                f"{self._name(b)} opened a request while an earlier one was open. Its samples are cut into windows of "
                "tokens, so its requests must come one after another: await each answer before the next request, or "
                "set rollout.clock='wall', or grpo.max_staleness to 0 or 1."
            )
        if request.prompts.fields.get(CLOSING, [None] * (p + 1))[p] is not None:
            raise BatchError(
                f"{self._name(b)} has observes_first=True and calls model.chat: only the first observation of "
                "model.say can be a part of the prompt, so remove the attribute."
            )
        self._unopened.get(p, set()).discard(b)
        if episode.branches is None:
            if episode.track is not None or episode.opening is not None:
                raise BatchError(
                    f"{self._name(b)} calls model.say and model.chat: an episode may use only one of them."
                )
            episode.branches = Branches(
                self._dialogue.tokenizer,
                key_2=request.keys_PG2[p, g],
                prompt=request.tokens(p),
                sampling=request.sampling.of(g),
                response=request.response,
                head=int(np.max(request.prompts.length_P)),
                recording=request.route_bytes > 0,
                append=self._env_client.history == "append",
            )
        for number in message.dropped:
            episode.branches.drop(session, number)
        episode.branches.rewards += message.rewards
        texts = self._stops(b, message)
        ids = tuple(dict.fromkeys((*episode.stops, *chat.stop_ids)))
        try:
            if (most := session.spare_stop_ids(request.sampling)) < len(ids):
                why = (
                    f"The request has {len(ids)} stop ids, including stop strings that are special tokens, and at most "
                    f"{most} are possible: give fewer."
                )
                raise RefusedRequest(400, "unsupported_parameter", why, "stop_token_ids")
            drawn = _unpack_drawn(message.drawn) if self._by_wall else next(iter(episode.answers), None)
            leaves, urgent = self._leaves(episode), self._budget.urgent
            new_tokens = episode.branches.add_request(
                session, chat, texts, ids, urgent=urgent, leaves=leaves, drawn=drawn
            )
        except RefusedRequest as error:
            self._send_turn(b, Turn(json.dumps(error.fields()), REFUSED))
            return
        if new_tokens is None:
            self._fill(b)
            return
        assert episode.branches.current is not None
        branch = episode.branches.current
        episode.track, episode.turns, self.rows[branch.track] = branch.track, branch.turns, b
        self._record_observation(
            episode, dataclasses.replace(message, observation=self._dialogue.decode(new_tokens)), len(new_tokens)
        )
        if episode.answers:
            del episode.answers[0]
            if not episode.branches.repeated:
                self._drop_recorded_answers(b)
        if branch.track.paused is not None:
            self._take_turn(b, branch.track)
        elif branch.track.held:
            self._leave(b, episode.branches)

    def _leave(self, b: int, branches: Branches) -> None:
        branches.leave(self._session)
        self._host.rest(self._first + b)

    def _leaves(self, episode: Episode) -> int | None:
        """Returns the value of `Branches.drawn` at which an episode leaves the session; None for never."""
        return None if self._budget.quantum is None else episode.entered + self._budget.quantum

    def _drop_recorded_answers(self, b: int) -> None:
        """Drops the remaining recorded answers, because the environment now sends other requests than before."""
        if not self._warned:
            _log.warning(
                "%s was open when the run was saved. It began again, and it sends other requests than before (after "
                "request %d), so it gets new answers, and the run will differ from the earlier one. A run repeats "
                "itself only if its agents are functions of their tasks and of the answers.",
                *(self._name(b), len(self._episodes[b].sent_turns)),
            )
        self._warned, self._episodes[b].answers = True, []

    @property
    def _by_wall(self) -> bool:
        """True if time decides which version draws a token, so that samples cannot be drawn a second time."""
        return self._env_client.clock == "wall" and self.request.mode == "train"

    def _join(self, episode: Episode) -> None:
        """Joins all branches of an episode into one completion."""
        if episode.branches is not None:
            # Rewards are placed before `joined` is called, because `joined` may copy the records of turns.
            episode.rewards = episode.branches.place_rewards()
            episode.track, episode.piece, episode.turns = episode.branches.joined(self._session)

    def _on_return(self, b: int) -> None:
        """Takes a conversation out of the session: its environment has returned, and the episode will be recorded."""
        episode = self._episodes[b]
        if episode.stop is None and episode.branches is not None:
            episode.branches.leave(self._session)
            self._returned.add(b)

    def _record_returned(self) -> None:
        """Adds the routes of returned episodes to the episodes' records, as soon as the routes are on the host.

        The device copies routes before its next dispatch, so this method waits for them only if no sample is running.
        """
        if self._returned and not self._session.busy:
            self._session.finish_routes()
        for b in sorted(self._returned):
            branches = self._episodes[b].branches
            assert branches is not None, b
            if branches.has_routes(self._session):
                self._returned.remove(b)
                packed = [None if routes is None else pack_routes(routes) for routes in branches.routes()]
                self._host.record(self._first + b, packed)

    def _on_done(self, b: int, end: EpisodeEnd) -> None:
        episode = self._episodes[b]
        if end.reason == "failed":
            self._failed += 1
            if self._failed > (share := self._env_client.failed_share) * self.request.samples:
                raise BatchError(
                    f"The programs of {self._failed} of {self.request.samples} samples failed; env.failed_share="
                    f"{share:g} allows at most {int(share * self.request.samples)}. The last one was {self._name(b)}: "
                    f"{end.why}"
                )
        if episode.branches is not None:
            for number in end.dropped:
                episode.branches.drop(self._session, number)
            episode.branches.rewards += end.rewards
        self._join(episode)
        failed = end.reason in ("deadline", "failed")
        if episode.answers and not failed:
            self._drop_recorded_answers(b)
        if failed and episode.branches is not None and self._by_wall:
            # The tokens of a failed conversation are not in the loss. The journal has no record of the conversation, so
            # a repeated run cannot sample it again. This run drops it, too, so that both runs have the same sample.
            episode.track, episode.branches, episode.piece, episode.turns = None, None, [], []
        if failed:
            episode.rewards = []  # otherwise rewards of turns before the failure would look like the whole reward
        self._reward(b, 0.0 if end.reward is None else end.reward, whole=True)
        if end.reward is not None or episode.rewards:
            episode.reward = sum((reward for _, reward in episode.rewards), 0.0)
        counted = {} if episode.branches is None else episode.branches.metrics()
        episode.metrics = {**counted, **end.metrics}
        self._unopened.get(b // self.request.group_size, set()).discard(b)
        track = episode.track
        stop = STOP_DEADLINE if failed else self._why(episode, end)
        if track is not None and track.stop is None:
            self._session.end(track, stop)
        self._end(b, stop, end.text)

    def _run_out(self, b: int) -> None:
        """Ends a sample at the token at which its environment ran out of time in the run that is repeated."""
        self._host.cancel(self._first + b)
        self._waiting.discard(b)
        self._on_done(b, EpisodeEnd(self._first + b, None, {}, None, "deadline"))

    def _why(self, episode: Episode, end: EpisodeEnd) -> int:
        """Returns the stop reason of a sample whose environment has returned."""
        track = episode.track
        if track is None:
            return STOP_LENGTH if episode.full else STOP_ENV
        if track.stop is not None or episode.full:
            return STOP_LENGTH
        spent = track.sampled >= (self.request.sampling.max_new or 0) or len(track.tokens) >= self.request.response
        if track.paused == STOP_LENGTH and spent:
            return STOP_LENGTH
        if end.reason == "calls":
            return STOP_CALLS
        # The model ended the sample itself if the last turn ends with the model's own end token and not with a stop
        # string of the environment.
        stops = [turn["stop"] for turn in episode.turns if "versions" in turn]  # a tool, too, may be called "model"
        own = track.paused == STOP_EOS and stops[-1] == "eos" and end.reason != "turns"
        return STOP_EOS if own else STOP_ENV

    def _begin(self, p: int) -> None:
        """Submits the samples of a prompt, after each of their environments has opened its sample or ended."""
        G, request = self.request.group_size, self.request
        chosen = [b for b in range(p * G, p * G + G) if b in self._episodes and self._episodes[b].stop is None]
        # Episodes that call Model.chat submit their branches in `_on_chat`.
        chosen = [b for b in chosen if self._episodes[b].branches is None]
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
        session = self._session
        tracks = []
        for b, opening in ready:
            track = self._track(session, p, b % G, opening)
            track.leave_at(self._budget.limit(b, 0), recorded=b in self._budget.recorded)
            self._episodes[b].track, self.rows[track] = track, b
            if track.until:
                tracks.append(track)
        if tracks:
            session.seat(tracks, pieces=request.pieces, urgent=self._budget.urgent)

    # Turns of the model.

    def event(self, track: Track) -> None:
        b = self.rows[track]
        episode = self._episodes[b]
        if track.paused is None and track.stop is None:  # the sample left the session within a turn
            if episode.branches is not None:
                self._leave(b, episode.branches)
            return
        if track.stop is not None:
            assert track.stop == STOP_FAILED, track.stop
            self._host.cancel(self._first + b)
            self._join(episode)
            if episode.track is not None:
                episode.track.stop = STOP_FAILED
            self._end(b, STOP_FAILED, None)
            return
        episode.calls += 1
        if self._parked(episode) and episode.branches is not None:
            self._leave(b, episode.branches)
        elif self._parked(episode):
            self._session.hold(track)
        self._take_turn(b, track)

    def _take_turn(self, b: int, track: Track) -> None:
        """Sends a turn of the model to the environment; the turn was sampled by the engine or comes from a record."""
        episode = self._episodes[b]
        tokens = track.tokens[track.first :]
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
        turn, drawn = Turn(text, stop, tuple(tokens)), None
        if episode.branches is not None:
            drawn = pack_turn(track, slice(track.first, None), track.paused) if self._by_wall else None
            episode.branches.take_answer(self._session, turn)
            turn = dataclasses.replace(
                turn, prompt=episode.branches.read, **self._answer_details(episode.branches.newest, track)
            )
        self._send_turn(b, turn, drawn)

    def _answer_details(self, request: ChatRequest, track: Track) -> dict[str, Sequence[Any]]:
        """Returns the log-probabilities and texts of the newest turn's tokens, if the request has asked for them."""
        logprobs = track.drawn["raw_logprob"][track.first :] if request.logprobs else ()
        tokenizer, tokens = self._dialogue.tokenizer, track.tokens[track.first :] if request.pieces else ()
        pieces = [tokenizer.decode([token]) or tokenizer.token_text(token) for token in tokens]
        return {"logprobs": tuple(logprobs), "pieces": tuple(pieces)}

    # Records.

    def _fill(self, b: int) -> None:
        """Sends the turn FULL to the environment: the sample has no more room, so the environment must return."""
        self._episodes[b].full = True
        self._send_turn(b, Turn("", FULL))

    def _send_turn(self, b: int, turn: Turn, drawn: PackedTokens | None = None) -> None:
        """Sends a turn to the environment of a sample, which then waits for the environment's next message.

        Args:
          b: row of the sample.
          turn: turn to send.
          drawn: packed token columns (ids, log-probabilities, versions) of the turn for the record of the episode
            (podrl.rollout.partial.pack_turn); None for a turn that is not recorded.
        """
        track = self._episodes[b].track
        if track is not None and self._budget.late.get(b) == len(track.tokens):
            self._run_out(b)
            return
        self._waiting.add(b)
        self._episodes[b].sent_turns.append(turn)
        if self._episodes[b].repeated is None:
            self._host.turn(self._first + b, turn, drawn)

    def _reward(self, b: int, reward: float, *, whole: bool = False) -> None:
        """Adds a reward to the last sampled token, or to the prompt's last token if nothing was sampled.

        Args:
          b: row of the sample.
          reward: value of the reward.
          whole: True if it is the reward of the whole sample; only such a reward may be given before the first turn.

        Raises:
          BatchError: the reward is for a turn, and the model has had no turn yet.
        """
        episode = self._episodes[b]
        model_turns = [turn for turn in episode.turns if turn["by"] == "model" and turn["tokens"]]
        if not reward:
            return
        if (episode.track is None or not model_turns) and whole:
            episode.rewards.append((-1, reward))  # index -1 of the completion: the prompt's last token
            return
        if episode.track is None or not model_turns:
            raise BatchError(
                f"{self._name(b)} gave the reward {reward:g} before the model's first turn. say(reward=...) rewards "
                "the turn before it; use Result(reward) for the whole sample."
            )
        model_turns[-1]["reward"] += reward
        place = max(i for i, version in enumerate(episode.track.versions) if version >= 0)
        episode.rewards.append((place, reward))

    def _record_observation(self, episode: Episode, message: EpisodeObservation, tokens: int) -> None:
        """Adds the records of an observation; the first record counts the tokens of all, which are encoded together."""
        records = [dict(record) for record in message.records]
        if not records and tokens:
            records = [{"by": "environment", "text": message.observation}]
        for i, record in enumerate(records):
            episode.turns.append(record | {"tokens": tokens if i == 0 else 0})

    def _end(self, b: int, stop: int, text: str | None) -> None:
        episode = self._episodes[b]
        self._waiting.discard(b)
        self._returned.discard(b)
        self._env_client.inboxes.pop(self._first + b, None)
        self._inboxes.pop(b, None)
        episode.stop, episode.seconds = stop, time.monotonic() - episode.started
        whole = "" if episode.track is None else episode.track.text
        if text is None and episode.branches is not None:
            text = episode.branches.text
        episode.text, episode.own_text = (whole, False) if text is None else (text, True)
        self._ended.append(b)

    def _name(self, b: int) -> str:
        p, g = divmod(b, self.request.group_size)
        return f"The environment of sample {g} of prompt {int(self.request.prompts.index_P[p])}"


def _unpack_drawn(drawn: PackedTokens | None) -> PackedTokens | None:
    """Unpacks the routes of a recorded answer, if it has any; its other columns stay packed."""
    if drawn is None or "routes" not in drawn:
        return drawn
    return {**drawn, "routes": unpack_routes(drawn["routes"])}


def _plain(value: object) -> object:
    """Converts numpy values to values for JSON."""
    return value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value
