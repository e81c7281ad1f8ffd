"""The branches of an episode: the token sequences of its conversations, which become the pieces of its sample."""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import UInt8

from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import Sampling
from podrl.engine.session import Opening, Session, Track
from podrl.environments.protocol import Turn
from podrl.environments.wire import chat
from podrl.environments.wire.requests import Choice, RefusedRequest, visible_text
from podrl.mappings import ChatMessage, PackedTokens, ToolSchema, TurnRecord
from podrl.rollout.histories import Histories
from podrl.rollout.partial import fill_turn, pack_turn
from podrl.types import DRAWN, STOP_ENV

# The reason why a request opened a branch:
#   history     the request repeats no earlier answer
#   tools       the request repeats an answer to a request with other tools
#   template    the chat template renders an earlier answer differently from how the answer was sampled
#   concurrent  another request has already continued from the same point
Fork = Literal["history", "tools", "template", "concurrent"]


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """An episode's request for an answer of the model; exactly one of `messages`, `text` and `ids` is set.

    Attributes:
      messages: conversation to answer, checked by a dialect of podrl.environments.wire.
      text: text to continue.
      ids: token ids to continue.
      tools: functions that the model may call, in the form of chat templates.
      stop: the caller's stop strings, which are cut off the answer's text.
      stop_ids: token ids that end the answer, besides the end of the model's turn.
      parser: format in which the model writes a call.
      id: prefix of the ids of the answer's calls.
      max_new: largest number of sampled tokens; None for as many as the sample has room for.
      aside: True if the answer must stay out of training.
      logprobs: True if the answer needs the log-probabilities of its tokens.
      pieces: True if the answer needs the text of each token.
    """

    messages: Sequence[ChatMessage] | None
    text: str | None
    ids: Sequence[int] | None
    tools: Sequence[ToolSchema]
    stop: Sequence[str]
    stop_ids: Sequence[int]
    parser: str
    id: str
    max_new: int | None
    aside: bool
    logprobs: bool
    pieces: bool

    def message(self, turn: Turn) -> ChatMessage:
        """Writes the model's turn as the assistant's message."""
        choice = Choice(turn.text, turn.tokens, (), (), turn.stop)
        return chat.assistant_message(choice, stop=self.stop, tools=self.tools, parser=self.parser, id=self.id)


@dataclasses.dataclass(eq=False)
class _Branch:
    """A conversation that requests may continue.

    Attributes:
      track: record of its token sequence in the engine.
      opened: tokens of the request that opened the branch.
      request: number of the branch's newest request.
      before: (number of the track's tokens, number of records in `turns`) before the newest request.
      turns: records of the branch's turns.
      count: number of the track's tokens that stay in the row, if the branch was cut; None for all tokens.
      why: reason why the branch was opened; '' if the episode had no branch before.
    """

    track: Track
    opened: Sequence[int]
    request: int = 0
    before: tuple[int, int] = (0, 0)
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    count: int | None = None
    why: Fork | Literal[""] = ""

    def tokens(self) -> list[int]:
        return [*self.track.prompt.tolist(), *self.track.tokens]

    def in_row(self, values: Sequence[Any]) -> list[Any]:
        """Selects the values of the tokens that stay in the row; `values` has one for each token of the track."""
        return list(values[: self.count])


@dataclasses.dataclass
class _Answer:
    """An answer to a request, in the order of requests.

    Attributes:
      track: record of the branch that the answer belongs to.
      first: index of the answer's first token in the track.
      request: hash of the request (`_digest`).
      end: index after the answer's last token in the track; None while the model samples the answer.
      turn: record of the answer in the branch's `turns`; None while the model samples it, and for an aside.
      paused: reason why the answer ended, as in `Track.paused`; None while the model samples the answer.
    """

    track: Track
    first: int
    request: str
    end: int | None = None
    turn: dict[str, Any] | None = None
    paused: int | None = None


class Branches:
    """The branches of one episode.

    A request continues the longest branch whose tokens are a prefix of the request's tokens. If there is none, the
    request opens a branch. `Histories` puts the sampled tokens of earlier answers into the request, so that the text
    of these answers is not encoded again. The random key of a branch is derived from the sample's key, the tokens that
    opened the branch, and the number of earlier branches that the same tokens opened.

    Attributes:
      current: branch of the newest request.
      forks: number of branches opened for each reason, without the first branch and without asides.
      dropped: number of answers that no client received.
      rewards: (number of the request, reward) of each reward of an answer.
      text: text of the newest answer that is trained.
      read: token ids of the newest request.
      repeated: True if the answer to the newest request, or its beginning, comes from a record.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        key_2: np.ndarray,
        prompt: np.ndarray,
        sampling: Sampling,
        response: int,
        head: int,
        recording: bool,
        append: bool,
    ) -> None:
        """Keeps the arguments.

        Args:
          tokenizer: tokenizer of the model.
          key_2: random key of the sample.
          prompt: tokens of the data's prompt, with which the sample's row begins.
          sampling: settings of the sample; `max_new` bounds the sampled tokens of all branches together.
          response: largest number of tokens of the row after the prompt, in all branches together.
          head: largest number of tokens of a branch that the engine takes as the branch's prompt; further tokens of the
            first request are appended (`Opening.tokens`).
          recording: True to record the experts that tokens take (`Track`).
          append: True if a branch continues even where the chat template now renders earlier turns differently
            (`Histories`).
        """
        self._tokenizer, self._key_2, self._prompt, self._sampling = tokenizer, key_2, prompt, sampling
        self._response, self._head, self._recording = response, head, recording
        self._histories: dict[str, Histories] = {}
        self._append = append
        self._branches: list[_Branch] = []
        self._tracks: list[Track] = []  # tracks of all branches, including asides and branches without answers
        self._answers: list[_Answer] = []
        self._asides = 0
        self._opened: collections.Counter[bytes] = collections.Counter()
        self._newest: ChatRequest | None = None
        self._requests = 0
        self._toolsets: list[Sequence[ToolSchema]] = []  # the different tools of answered requests
        self.forks: collections.Counter[Fork] = collections.Counter()
        self.dropped = 0
        self.rewards: list[tuple[int, float]] = []
        self.current: _Branch | None = None
        self.text = ""
        self.read: Sequence[int] = ()
        self.repeated = False

    @property
    def drawn(self) -> int:
        """Number of tokens that the model has drawn in all branches, including asides and answers that were dropped."""
        return sum(track.sampled for track in self._tracks)

    def add_request(
        self,
        session: Session,
        request: ChatRequest,
        strings: tuple[str, ...],
        ids: Sequence[int],
        *,
        urgent: bool,
        leaves: int | None = None,
        drawn: PackedTokens | None = None,
    ) -> list[int] | None:
        """Continues a branch, or opens one.

        Args:
          session: engine's session.
          request: the request.
          strings: stop strings of ordinary text.
          ids: token ids that end the answer, besides the end of the model's turn.
          urgent: True if a new branch gets a lane before samples that are not urgent.
          leaves: value of `Branches.drawn` at which the episode leaves the session; None for never.
          drawn: recorded answer (podrl.rollout.partial.pack_turn) that the branch takes over; if the answer has not
            ended, the engine samples its remaining tokens. An answer with a hash of its request (`read_record`) is
            taken over only if it answers this request. If the request opens a branch, `routes` has the branch's routes,
            if they were recorded. None samples the whole answer.

        Returns:
          The request's tokens that the branch did not have, without the data's prompt at the beginning of a new branch;
          None if there is no room for them and an answer.

        Raises:
          RefusedRequest: the conversation cannot be rendered.
        """
        tokens = self._encode(request)
        branch = None if request.aside else self._find_continued(tokens)
        begins = tokens[: len(self._prompt)] == self._prompt.tolist()
        # The first `known` tokens need no room in the response: the branch has them, or they are the prompt, which the
        # row has once.
        free = request.aside or (begins and not any(map(self._begins, self._branches)))
        known = len(branch.tokens()) if branch else len(self._prompt) if free else 0
        new_tokens = tokens[len(self._prompt) if branch is None and begins else known :]
        room = self._response - (0 if request.aside else self._used()) - (len(tokens) - known)
        sampled = sum(version >= 0 for one in self._branches for version in one.in_row(one.track.versions))
        assert self._sampling.max_new is not None
        most = [room, self._sampling.max_new - (0 if request.aside else sampled)]
        if request.max_new is not None:
            most.append(request.max_new)
        if branch is not None:
            most.append(session.room(branch.track) - (len(tokens) - known))
        if min(most) <= 0:
            return None
        opening = Opening(tokens[known:], strings, tuple(ids), min(most))
        digest = _digest(tokens, [request.aside, min(most), strings, list(ids)])
        if drawn is not None and drawn.get("request", digest) != digest:
            drawn = None
        if branch is not None:
            branch.request, branch.before = self._requests, (len(branch.track.tokens), len(branch.turns))
            # If the answer is recorded, the branch leaves the session until `fill_turn` has added the answer's tokens.
            hold = self._hold(branch.track, leaves) if drawn is None else branch.track.sampled
            branch.track.leave_at(hold, recorded=False)
            session.extend(branch.track, opening)
        else:
            head = self._prompt if begins else np.asarray(tokens[: self._head], np.int32)
            opening = dataclasses.replace(opening, tokens=tokens[len(head) :])
            recording = self._recording and not request.aside
            key_2 = self._key(tokens, request.aside)
            track = session.track(head, key_2, self._sampling, opening, recording=recording)
            if not track.limit:
                return None
            self._tracks.append(track)
            if drawn is None:
                self._seat(session, track, leaves, urgent=urgent)
            else:
                track.routes = drawn.get("routes")
            branch = _Branch(track, tokens, self._requests)
            if request.aside:
                self._asides += 1
            else:
                if self._branches:
                    branch.why = self._reason(request, tokens)
                    self.forks[branch.why] += 1
                self._branches.append(branch)
        self.current, self._newest, self.read = branch, request, tokens
        self._requests += 1
        self._answers.append(_Answer(branch.track, branch.track.first, digest))
        self.repeated = drawn is not None
        if drawn is None:
            return new_tokens
        if (paused := fill_turn(branch.track, drawn)) is None:
            self._seat(session, branch.track, leaves, urgent=urgent)
        else:
            session.pause(branch.track, paused)
        return new_tokens

    def enter(self, session: Session, leaves: int | None, *, urgent: bool) -> None:
        """Continues the newest answer in a session, if the answer is not complete; see `add_request` for arguments."""
        if self.current is not None and self.current.track.paused is None and self.current.track.stop is None:
            self._seat(session, self.current.track, leaves, urgent=urgent)

    def leave(self, session: Session) -> None:
        """Takes all branches out of the session, so that another session can continue them."""
        for track in self._tracks:
            if track.stop is None:
                session.hold(track)

    def _seat(self, session: Session, track: Track, leaves: int | None, *, urgent: bool) -> None:
        track.leave_at(self._hold(track, leaves), recorded=False)
        if track.sampled < track.until:
            session.seat([track], urgent=urgent, shared=True)

    def _hold(self, track: Track, leaves: int | None) -> int | None:
        """Returns the number of sampled tokens of a branch at which it leaves the session; None for never."""
        return None if leaves is None else track.sampled + leaves - self.drawn

    def take_answer(self, session: Session, turn: Turn) -> None:
        """Completes the record of the newest answer from the turn that the model has just ended."""
        assert self.current is not None and self._newest is not None
        request, track, answer = self._newest, self.current.track, self._answers[-1]
        answer.end, answer.paused = len(track.tokens), track.paused
        if request.aside:
            session.end(track, STOP_ENV)
            return
        answer.turn = self.current.turns[-1]
        choice = Choice(turn.text, turn.tokens, (), (), turn.stop)
        if request.messages is None:
            self.text = visible_text(choice, request.stop)
            return
        if request.tools not in self._toolsets:
            self._toolsets.append(request.tools)
        message = chat.assistant_message(
            choice, stop=request.stop, tools=request.tools, parser=request.parser, id=request.id
        )
        self._of(request.parser).remember(request.messages, request.tools, [(message, self.current.tokens())])
        self.text = str(message["content"] or "")

    def drop(self, session: Session, request: int) -> None:
        """Removes a request's answer from the row, because no client received it; the branch ends before the request.

        An answer that a later request continues counts as received.
        """
        branch = next((one for one in self._branches if one.request == request and one.count is None), None)
        if branch is None:
            return
        self.dropped += 1
        if branch.track.stop is None:
            session.end(branch.track, STOP_ENV)
        branch.count, records = branch.before
        del branch.turns[records:]
        if not branch.count:
            self._branches.remove(branch)

    @property
    def newest(self) -> ChatRequest:
        """The newest request."""
        assert self._newest is not None
        return self._newest

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of requests, of asides, of forks by reason, and of answers that no client received."""
        forks = max(len(self._branches) - 1, 0)
        counts = {"chat_requests": self._requests, "chat_forks": forks, "chat_asides": self._asides}
        counts |= {f"front/forks/{reason}": self.forks[reason] for reason in get_args(Fork)}
        return {name: float(count) for name, count in {**counts, "front/dropped": self.dropped}.items()}

    def place_rewards(self) -> list[tuple[int, float]]:
        """Adds the rewards of answers to the records of their turns; call it once, before `joined`.

        Returns:
          (index of the answer's last token in the completion that `joined` makes, reward) of each reward, without the
          rewards of answers that left the row.
        """
        begin, begins = 0, {}
        for number, branch in self._pieces():
            begin += len(branch.track.prompt) if number else 0
            begins[branch.track] = begin, len(branch.in_row(branch.track.tokens))
            begin += begins[branch.track][1]
        placed = []
        for number, reward in self.rewards:
            answer = self._answers[number]
            begin, count = begins.get(answer.track, (0, 0))
            if answer.end is not None and answer.turn is not None and answer.end <= count:
                answer.turn["reward"] += reward
                placed.append((begin + answer.end - 1, reward))
        return placed

    def joined(self, session: Session) -> tuple[Track | None, list[int], list[dict[str, Any]]]:
        """Ends all branches, and joins the trained branches, one after the other, into one completion.

        Returns:
          (record of the sample, number of each token's piece, records of the turns in the order of the row). The order
          is that of `_pieces`, which does not depend on when requests arrive. Piece 0 is a branch that began with the
          data's prompt, or the prompt alone if no branch did. The record is None if no branch is trained. If there are
          several branches, the first turn of each has the field `branch`: the number of its piece, the reason why it
          was opened (`Fork`; '' for the first piece), the earlier piece that shares the most first tokens with it (None
          if no piece shares any), and the number of these tokens.
        """
        for track in self._tracks:
            if track.stop is None:
                paused = track.paused
                session.end(track, STOP_ENV)
                track.paused = paused  # `end` clears this field, but the sample's reason for ending depends on it
        if not self._branches:
            return None, [], []
        whole = session.track(self._prompt, self._key_2, self._sampling, Opening())
        piece_X: list[int] = []
        pieces = self._pieces()
        for number, branch in pieces:
            track = branch.track
            prompt, versions = track.prompt.tolist() if number else [], branch.in_row(track.versions)
            whole.tokens += [*prompt, *branch.in_row(track.tokens)]
            whole.versions += [*[-1] * len(prompt), *versions]
            for name, values in whole.drawn.items():
                values += [*[DRAWN[name].fill] * len(prompt), *branch.in_row(track.drawn[name])]
            whole.sampled += sum(version >= 0 for version in versions)
            piece_X += [number] * (len(prompt) + len(versions))
        for i, (number, branch) in enumerate(pieces if len(pieces) > 1 else ()):
            of, shared = _closest(branch.opened, pieces[:i])
            why = branch.why or "history" if i else ""
            origin = {"piece": number, "why": why, "of": of, "shared": shared}
            branch.turns[0] = {**branch.turns[0], "branch": origin}
        whole.paused = pieces[-1][1].track.paused  # of the branch that ends the row
        self._join_routes(session, whole)
        return whole, piece_X, [turn for _, branch in pieces for turn in branch.turns]

    def record(self, session: Session) -> tuple[list[list[Any]], Track]:
        """Records the answers so far, for a checkpoint of the open episode (`read_record`).

        Returns:
          ([hash of the request, number of tokens, reason of the end or None, number of tokens with routes] of each
          answer, record with the tokens of all answers, one after the other). An answer to a request that opened a
          branch has the branch's routes; an answer to a request that continued a branch has no routes.
        """
        whole = session.track(self._prompt, self._key_2, self._sampling, Opening())
        rows, routes = [], []
        for answer, opened in zip(self._answers, self.routes(), strict=True):
            track = answer.track
            places = slice(answer.first, len(track.tokens) if answer.end is None else answer.end)
            whole.tokens += track.tokens[places]
            whole.versions += track.versions[places]
            for name, values in whole.drawn.items():
                values += track.drawn[name][places]
            new = [] if opened is None else [opened]
            routes += new
            rows.append([answer.request, len(track.tokens[places]), answer.paused, sum(map(len, new))])
        whole.sampled = len(whole.tokens)
        whole.routes = np.concatenate(routes) if routes else None
        return rows, whole

    def has_routes(self, session: Session) -> bool:
        """Returns True if the routes of all branches, which have left the session, have arrived on the host."""
        return all(session.has_routes(track) for track in self._tracks)

    def routes(self) -> list[UInt8[np.ndarray, "T X"] | None]:
        """Lists the routes of the branch that each answer's request opened; None if the request continued a branch."""
        first = {answer.track: i for i, answer in reversed(list(enumerate(self._answers)))}
        return [answer.track.routes if first[answer.track] == i else None for i, answer in enumerate(self._answers)]

    def _join_routes(self, session: Session, whole: Track) -> None:
        """Gives the sample the routes of its branches, which may still be on their way from the device to the host."""
        pieces = self._pieces()
        tracks = [branch.track for _, branch in pieces]
        known = [track.routes for track in tracks if track.routes is not None]
        if not known:
            return
        whole.routes = np.zeros((len(whole.prompt) + len(whole.tokens), known[0].shape[1]), np.uint8)
        end = len(whole.prompt) if pieces[0][0] else 0
        if any(branch.count is not None for branch in self._branches):
            session.finish_routes()  # a cut branch's routes are copied below, so they must have arrived
        for (_, branch), track in zip(pieces, tracks, strict=True):
            start, end = end, end + len(track.prompt) + len(branch.in_row(track.tokens))
            if track.routes is not None and branch.count is not None:
                whole.routes[start:end] = track.routes[: end - start]
            elif track.routes is not None:
                part = whole.routes[start:end]
                # `track.routes` can come from a recorded answer and then covers all recorded answers of the branch. If
                # the environment requests fewer answers when it is replayed, the row is shorter: copy only what fits.
                part[:] = track.routes[: len(part)]
                track.routes = part  # routes that arrive later are written into the row

    def _encode(self, request: ChatRequest) -> list[int]:
        """Encodes a request.

        Raises:
          RefusedRequest: the conversation cannot be rendered, or the request has no tokens, or it has a token that the
            model lacks.
        """
        if request.messages is not None:
            return self._of(request.parser).encode(request.messages, request.tools)
        tokens = list(request.ids or ())
        if request.text is not None:
            try:
                tokens = self._tokenizer.encode(request.text, start=True)
            except ValueError as error:
                raise RefusedRequest(400, "invalid_prompt", str(error), "prompt") from None
        if not tokens or max(tokens) >= self._tokenizer.vocab_size:
            size = self._tokenizer.vocab_size
            why = f"The prompt has {len(tokens)} tokens; it must have at least one, with ids below {size}."
            raise RefusedRequest(400, "invalid_prompt", why)
        return tokens

    def _reason(self, request: ChatRequest, tokens: list[int]) -> "Fork":
        """Finds the reason why a request continues no branch."""
        if request.messages is not None:
            histories = self._of(request.parser)
            if histories.forked:
                return "template"
            if histories.continued:
                return "concurrent"
            if any(histories.knows(request.messages, tools) for tools in self._toolsets):
                return "tools"
        # A request that is the beginning of a branch's opening request has no answer in common with the branch.
        alike = [one for one in self._branches if one.tokens()[: len(tokens)] == tokens]
        return "concurrent" if any(len(one.opened) <= len(tokens) for one in alike) else "history"

    def _of(self, parser: str) -> Histories:
        if parser not in self._histories:
            self._histories[parser] = Histories(self._tokenizer, parser, append=self._append)
        return self._histories[parser]

    def _find_continued(self, tokens: list[int]) -> _Branch | None:
        """Returns the longest open branch whose tokens are a proper prefix of `tokens`; None if there is none."""
        open_ = [branch for branch in self._branches if branch.count is None]
        fits = [(known, branch) for branch in open_ if tokens[: len(known := branch.tokens())] == known]
        fits = [(len(known), branch) for known, branch in fits if len(known) < len(tokens)]
        return max(fits, key=lambda fit: fit[0])[1] if fits else None

    def _used(self) -> int:
        """Counts the tokens of the row after the data's prompt, which a branch may begin with."""
        tokens = sum(len(branch.track.prompt) + len(branch.in_row(branch.track.tokens)) for branch in self._branches)
        return tokens - len(self._prompt) * any(map(self._begins, self._branches))

    def _begins(self, branch: _Branch) -> bool:
        """Returns True if a branch begins with the data's prompt: its track then has the prompt's own array."""
        return branch.track.prompt is self._prompt

    def _pieces(self) -> list[tuple[int, _Branch]]:
        """Lists (number of the piece, branch) in the order of the row.

        A branch that begins with the data's prompt comes first, and shorter opening requests come before longer ones.
        The order depends on the tokens of these requests alone; equal requests keep their order of arrival.
        """

        def place(branch: _Branch) -> tuple[bool, int, Sequence[int]]:
            return not self._begins(branch), len(branch.opened), branch.opened

        ordered = sorted(self._branches, key=place)
        return list(enumerate(ordered, int(not self._begins(ordered[0])) if ordered else 0))

    def _key(self, tokens: Sequence[int], aside: bool) -> np.ndarray:
        digest = hashlib.blake2b(self._key_2.tobytes() + bytes([aside]), digest_size=8)
        digest.update(np.asarray(tokens, np.int32).tobytes())
        count, self._opened[digest.digest()] = self._opened[digest.digest()], self._opened[digest.digest()] + 1
        digest.update(count.to_bytes(4, "little"))
        return np.frombuffer(digest.digest(), np.uint32)


def _closest(tokens: Sequence[int], pieces: Sequence[tuple[int, _Branch]]) -> tuple[int | None, int]:
    """Finds the piece that shares the most first tokens with `tokens`: (its number, number of shared tokens), or
    (None, 0)."""
    found: tuple[int | None, int] = None, 0
    for number, branch in pieces:
        size = min(len(known := branch.tokens()), len(tokens))
        differs_X = np.append(np.asarray(known[:size]) != np.asarray(tokens[:size]), True)
        if (alike := int(differs_X.argmax())) > found[1]:
            found = number, alike
    return found


def read_record(rows: Sequence[Sequence[Any]], record: Track) -> list[TurnRecord]:
    """Reads the answers that `Branches.record` recorded.

    Returns:
      Each answer in the form of the argument `drawn` of `Branches.add_request`: the result of
      podrl.rollout.partial.pack_turn, with `request` (hash of the request) and `routes` (routes of the branch that the
      request opened, or None) added.
    """
    answers, first, known = [], 0, 0
    for request, count, paused, routed in rows:
        routes = None if record.routes is None or not routed else record.routes[known : known + routed]
        turn = pack_turn(record, slice(first, first + count), paused)
        answers.append({**turn, "request": request, "routes": routes})
        first, known = first + count, known + routed
    return answers


def _digest(tokens: Sequence[int], more: Sequence[object]) -> str:
    """Hashes a request: its tokens and its limits."""
    digest = hashlib.blake2b(json.dumps(more).encode(), digest_size=16)
    digest.update(np.asarray(tokens, np.int32).tobytes())
    return digest.hexdigest()
