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

# The reason why a request opened a piece:
#   history     the request repeats no earlier answer
#   tools       the request repeats an answer to a request with other tools
#   template    the chat template renders an earlier answer differently from how the answer was sampled
#   concurrent  another request goes on from the same point
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
class _Answer:
    """An answer to a request; the answers of an episode form trees.

    Attributes:
      track: record of the token sequence in which the model sampled the answer; it may go on after the answer.
      first: index of the answer's first token in the track.
      request: hash of the request (`_digest`).
      parent: answer that the request continues; None if the request begins a tree.
      why: reason why the request begins a tree; '' if it continues an answer, or if nothing was in the row before.
      trained: True if the answer stays in the row: False for an aside, and for an answer that no client received.
      turns: records of the request and of the answer.
      end: index after the answer's last token in the track; None while the model samples the answer.
      paused: reason why the answer ended, as in `Track.paused`; None while the model samples the answer.
    """

    track: Track
    first: int
    request: str
    parent: "_Answer | None"
    why: Fork | Literal[""]
    trained: bool
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    end: int | None = None
    paused: int | None = None

    @property
    def places(self) -> slice:
        """Indices of the answer's tokens in the track."""
        return slice(self.first, len(self.track.tokens) if self.end is None else self.end)

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return self.places.stop - self.first

    @property
    def size(self) -> int:
        """Number of tokens of the request and the answer."""
        return len(self.track.prompt) + self.places.stop

    def asked(self) -> list[int]:
        """Returns the tokens of the request."""
        return self.tokens()[: self.size - self.length]

    def tokens(self) -> list[int]:
        """Returns the tokens of the request and of the answer."""
        return [*self.track.prompt.tolist(), *self.track.tokens[: self.places.stop]]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of the row.

    Attributes:
      number: number of the piece.
      answers: answers that the piece trains, each of which continues the answer before it.
    """

    number: int
    answers: Sequence[_Answer]

    @property
    def track(self) -> Track:
        """Record that begins with all tokens of the piece."""
        return self.answers[-1].track

    @property
    def count(self) -> int:
        """Number of tokens of the piece after the track's prompt."""
        return self.answers[-1].places.stop

    @property
    def context(self) -> int:
        """Number of the track's first tokens whose sampled tokens another piece trains."""
        parent = self.answers[0].parent
        return 0 if parent is None else parent.places.stop

    @property
    def why(self) -> Fork:
        """Reason why the piece was opened, if it is not the first."""
        return (self.answers[0].why or "history") if self.answers[0].parent is None else "concurrent"

    def trained(self, values: Sequence[Any], fill: float) -> list[Any]:
        """Selects the values of the piece's tokens after the prompt, with `fill` for the context."""
        return [*[fill] * self.context, *values[self.context : self.count]]


class Branches:
    """The branches of one episode.

    A request continues the longest earlier answer whose tokens, with those of its own request, are a proper prefix of
    the request's tokens. If there is none, the request begins a new token sequence. `Histories` puts the sampled tokens
    of earlier answers into the request, so that the text of these answers is not encoded again.

    The order in which independent requests arrive changes nothing in the row:
    - An answer's random key is derived from the sample's key, the tokens of the request, and the number of earlier
      requests with the same tokens.
    - The first request that continues an answer goes on with the track of the answer. Each later one gets a track with
      a copy of the answer's tokens and of their keys and values (`Session.fork`).
    - Of the requests that continue an answer, the one that comes first in the order of `_pieces` goes on with the
      answer's piece. Each of the others opens a piece, which has the tokens up to the answer as context.

    Attributes:
      current: answer to the newest request.
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
          response: largest number of tokens of the row after the prompt, in all pieces together.
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
        self._tracks: list[Track] = []  # tracks of all answers, including asides and dropped answers
        self._answers: list[_Answer] = []
        self._asides = 0
        self._opened: collections.Counter[bytes] = collections.Counter()
        self._newest: ChatRequest | None = None
        self._toolsets: list[Sequence[ToolSchema]] = []  # the different tools of answered requests
        self.dropped = 0
        self.rewards: list[tuple[int, float]] = []
        self.current: _Answer | None = None
        self.text = ""
        self.read: Sequence[int] = ()
        self.repeated = False

    @property
    def drawn(self) -> int:
        """Number of tokens that the model has drawn, including asides and answers that were dropped."""
        return sum(answer.length for answer in self._answers)

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
        """Continues an answer, or begins a new token sequence.

        Args:
          session: engine's session.
          request: the request.
          strings: stop strings of ordinary text.
          ids: token ids that end the answer, besides the end of the model's turn.
          urgent: True if a new token sequence gets a lane before samples that are not urgent.
          leaves: value of `Branches.drawn` at which the episode leaves the session; None for never.
          drawn: recorded answer (podrl.rollout.partial.pack_turn) that is taken over; if the answer has not ended, the
            engine samples its remaining tokens. An answer with a hash of its request (`read_record`) is taken over only
            if it answers this request. If the request gets a new track, `routes` has the track's routes, if they were
            recorded. None samples the whole answer.

        Returns:
          The request's tokens after the answer that it continues; if there is none, its tokens after the data's prompt,
          if it begins with that. None if there is no room for them and an answer.

        Raises:
          RefusedRequest: the conversation cannot be rendered.
        """
        tokens = self._encode(request)
        parent = None if request.aside else self._find_continued(tokens)
        begins, ends = tokens[: len(self._prompt)] == self._prompt.tolist(), self._ends()
        begun = any(map(self._begins, ends))
        # The first `known` tokens need no room in the response: a piece goes on with them, or they are the prompt,
        # which the row has once.
        known = len(self._prompt) if request.aside or (begins and not begun) else 0
        new_tokens = tokens[len(self._prompt) if begins else known :]
        if parent is not None:
            known, new_tokens = parent.size if parent in ends else 0, tokens[parent.size :]
        used = sum(answer.size for answer in ends) - len(self._prompt) * begun
        room = self._response - (0 if request.aside else used) - (len(tokens) - known)
        sampled = sum(answer.length for answer in self._answers if answer.trained)
        assert self._sampling.max_new is not None
        most = [room, self._sampling.max_new - (0 if request.aside else sampled)]
        if request.max_new is not None:
            most.append(request.max_new)
        if parent is not None:
            most.append(session.room(parent.track) + len(parent.track.tokens) - parent.places.stop - len(new_tokens))
        if min(most) <= 0:
            return None
        opening = Opening(new_tokens, strings, tuple(ids), min(most))
        digest = _digest(tokens, [request.aside, min(most), strings, list(ids)])
        if drawn is not None and drawn.get("request", digest) != digest:
            drawn = None
        key_2, why = self._key(tokens, request.aside), ""
        if parent is not None:
            track = parent.track
            if len(track.tokens) > parent.places.stop:  # another request has continued the answer
                track = session.fork(track, parent.places.stop, held=drawn is not None)
                track.routes = None if drawn is None else drawn.get("routes")
                self._tracks.append(track)
            # If the answer is recorded, the track leaves the session until `fill_turn` has added the answer's tokens.
            hold = self._hold(track, leaves) if drawn is None else track.sampled
            track.leave_at(hold, recorded=False)
            track.key = key_2
            session.extend(track, opening)
        else:
            head = self._prompt if begins else np.asarray(tokens[: self._head], np.int32)
            opening = dataclasses.replace(opening, tokens=tokens[len(head) :])
            recording = self._recording and not request.aside
            track = session.track(head, key_2, self._sampling, opening, recording=recording)
            if not track.limit:
                return None
            if drawn is None:
                self._seat(session, track, leaves, urgent=urgent)
            else:
                track.routes = drawn.get("routes")
            if request.aside:
                self._asides += 1
            elif ends:
                why = self._reason(request, tokens)
            self._tracks.append(track)
        self.current = _Answer(track, track.first, digest, parent, why, trained=not request.aside)
        self._answers.append(self.current)
        self._newest, self.read, self.repeated = request, tokens, drawn is not None
        if drawn is None:
            return new_tokens
        if (paused := fill_turn(track, drawn)) is None:
            self._seat(session, track, leaves, urgent=urgent)
        else:
            session.pause(track, paused)
        return new_tokens

    def enter(self, session: Session, leaves: int | None, *, urgent: bool) -> None:
        """Continues the newest answer in a session, if the answer is not complete; see `add_request` for arguments."""
        if self.current is not None and self.current.track.paused is None and self.current.track.stop is None:
            self._seat(session, self.current.track, leaves, urgent=urgent)

    def leave(self, session: Session) -> None:
        """Takes all tracks out of the session, so that another session can continue them."""
        for track in self._tracks:
            if track.stop is None:
                session.hold(track)

    def _seat(self, session: Session, track: Track, leaves: int | None, *, urgent: bool) -> None:
        track.leave_at(self._hold(track, leaves), recorded=False)
        if track.sampled < track.until:
            session.seat([track], urgent=urgent, shared=True)

    def _hold(self, track: Track, leaves: int | None) -> int | None:
        """Returns the number of sampled tokens of a track at which it leaves the session; None for never."""
        return None if leaves is None else track.sampled + leaves - self.drawn

    def take_answer(self, session: Session, turn: Turn) -> None:
        """Completes the record of the newest answer from the turn that the model has just ended."""
        assert self.current is not None and self._newest is not None
        request, track, answer = self._newest, self.current.track, self.current
        answer.end, answer.paused = len(track.tokens), track.paused
        if request.aside:
            session.end(track, STOP_ENV)
            return
        choice = Choice(turn.text, turn.tokens, (), (), turn.stop)
        if request.messages is None:
            self.text = visible_text(choice, request.stop)
            return
        if request.tools not in self._toolsets:
            self._toolsets.append(request.tools)
        message = chat.assistant_message(
            choice, stop=request.stop, tools=request.tools, parser=request.parser, id=request.id
        )
        tokens = [*track.prompt.tolist(), *track.tokens]
        self._of(request.parser).remember(request.messages, request.tools, [(message, tokens)])
        self.text = str(message["content"] or "")

    def drop(self, session: Session, request: int) -> None:
        """Removes a request's answer from the row, because no client received it.

        An answer that a later request continues counts as received.
        """
        answer = dict(enumerate(self._answers)).get(request)
        if answer is None or not answer.trained or any(one.parent is answer for one in self._answers):
            return
        self.dropped += 1
        answer.trained = False
        # Requests may still continue an earlier answer of the track.
        if answer.track.stop is None and not any(one.trained and one.track is answer.track for one in self._answers):
            session.end(answer.track, STOP_ENV)

    @property
    def newest(self) -> ChatRequest:
        """The newest request."""
        assert self._newest is not None
        return self._newest

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of requests, of asides, of forks by reason, and of answers that no client received."""
        forks = collections.Counter(piece.why for piece in self._pieces()[1:])
        counts = {"chat_requests": len(self._answers), "chat_forks": forks.total(), "chat_asides": self._asides}
        counts |= {f"front/forks/{reason}": forks[reason] for reason in get_args(Fork)}
        return {name: float(count) for name, count in {**counts, "front/dropped": self.dropped}.items()}

    def place_rewards(self) -> list[tuple[int, float]]:
        """Adds the rewards of answers to the records of their turns; call it once, before `joined`.

        Returns:
          (index of the answer's last token in the completion that `joined` makes, reward) of each reward, without the
          rewards of answers that left the row.
        """
        begin, begins = 0, {}
        for piece in self._pieces():
            begin += len(piece.track.prompt) if piece.number else 0
            begins |= dict.fromkeys(piece.answers, begin)
            begin += piece.count
        placed = []
        for number, reward in self.rewards:
            answer = self._answers[number]
            if answer.end is not None and answer.trained:
                answer.turns[-1]["reward"] += reward
                placed.append((begins[answer] + answer.end - 1, reward))
        return placed

    def joined(self, session: Session) -> tuple[Track | None, list[int], list[dict[str, Any]]]:
        """Ends all tracks, and joins the pieces, one after the other, into one completion.

        Returns:
          (record of the sample, number of each token's piece, records of the turns in the order of the row). The order
          is that of `_pieces`, which does not depend on when requests arrive. Piece 0 begins with the data's prompt, or
          is the prompt alone if no request began with it. The record is None if no answer is trained. If there are
          several pieces, the first turn of each has the field `branch`: the number of its piece, the reason why it
          was opened (`Fork`; '' for the first piece), the earlier piece that shares the most first tokens with it (None
          if no piece shares any), and the number of these tokens.
        """
        for track in self._tracks:
            if track.stop is None:
                session.end(track, STOP_ENV)
        pieces = self._pieces()
        if not pieces:
            return None, [], []
        whole = session.track(self._prompt, self._key_2, self._sampling, Opening())
        piece_X: list[int] = []
        for piece in pieces:
            track, prompt = piece.track, piece.track.prompt.tolist() if piece.number else []
            versions = [*[-1] * len(prompt), *piece.trained(track.versions, -1)]
            whole.tokens += [*prompt, *track.tokens[: piece.count]]
            whole.versions += versions
            for name, values in whole.drawn.items():
                fill = DRAWN[name].fill
                values += [*[fill] * len(prompt), *piece.trained(track.drawn[name], fill)]
            whole.sampled += sum(version >= 0 for version in versions)
            piece_X += [piece.number] * len(versions)
        for i, piece in enumerate(pieces if len(pieces) > 1 else ()):
            first = piece.answers[0]
            of, shared = _closest(first.asked(), pieces[:i])
            origin = {"piece": piece.number, "why": piece.why if i else "", "of": of, "shared": shared}
            # A piece's first turn counts the tokens of the whole request, without the data's prompt at its beginning.
            context = 0 if first.parent is None else first.parent.size - len(self._prompt) * self._begins(first)
            for turn in first.turns[:1]:  # none if the episode ended before the answer to the data's prompt alone
                first.turns[0] = {**turn, "tokens": turn["tokens"] + context, "branch": origin}
        whole.paused = pieces[-1].answers[-1].paused
        self._join_routes(session, whole)
        return whole, piece_X, [turn for piece in pieces for answer in piece.answers for turn in answer.turns]

    def record(self, session: Session) -> tuple[list[list[Any]], Track]:
        """Records the answers so far, for a checkpoint of the open episode (`read_record`).

        Returns:
          ([hash of the request, number of tokens, reason of the end or None, number of tokens with routes] of each
          answer, record with the tokens of all answers, one after the other). The first answer of a track has the
          track's routes; its other answers have no routes.
        """
        whole = session.track(self._prompt, self._key_2, self._sampling, Opening())
        rows, routes = [], []
        for answer, opened in zip(self._answers, self.routes(), strict=True):
            track, places = answer.track, answer.places
            whole.tokens += track.tokens[places]
            whole.versions += track.versions[places]
            for name, values in whole.drawn.items():
                values += track.drawn[name][places]
            new = [] if opened is None else [opened]
            routes += new
            rows.append([answer.request, answer.length, answer.paused, sum(map(len, new))])
        whole.sampled = len(whole.tokens)
        whole.routes = np.concatenate(routes) if routes else None
        return rows, whole

    def has_routes(self, session: Session) -> bool:
        """Returns True if the routes of all tracks, which have left the session, have arrived on the host."""
        return all(session.has_routes(track) for track in self._tracks)

    def routes(self) -> list[UInt8[np.ndarray, "T X"] | None]:
        """Lists, for each answer, the routes of its track; None if the track has an earlier answer."""
        first = {answer.track: i for i, answer in reversed(list(enumerate(self._answers)))}
        return [answer.track.routes if first[answer.track] == i else None for i, answer in enumerate(self._answers)]

    def _join_routes(self, session: Session, whole: Track) -> None:
        """Gives the sample the routes of its pieces, which may still be on their way from the device to the host."""
        pieces = self._pieces()
        known = [piece.track.routes for piece in pieces if piece.track.routes is not None]
        if not known:
            return
        whole.routes = np.zeros((len(whole.prompt) + len(whole.tokens), known[0].shape[1]), np.uint8)
        end = len(whole.prompt) if pieces[0].number else 0
        if any(piece.count < len(piece.track.tokens) for piece in pieces):
            session.finish_routes()  # the routes of these pieces are copied below, so they must have arrived
        for piece in pieces:
            track = piece.track
            start, end = end, end + len(track.prompt) + piece.count
            if track.routes is not None and piece.count < len(track.tokens):
                whole.routes[start:end] = track.routes[: end - start]
            elif track.routes is not None:
                part = whole.routes[start:end]
                # `track.routes` can come from a recorded answer and then covers all recorded answers of the track. If
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
        """Finds the reason why a request continues no answer."""
        if request.messages is not None:
            histories = self._of(request.parser)
            if histories.forked:
                return "template"
            if histories.continued:
                return "concurrent"
            if any(histories.knows(request.messages, tools) for tools in self._toolsets):
                return "tools"
        # A request that is the beginning of a piece's first request has no answer in common with the piece.
        alike = [piece for piece in self._pieces() if piece.answers[-1].tokens()[: len(tokens)] == tokens]
        return "concurrent" if any(len(piece.answers[0].asked()) <= len(tokens) for piece in alike) else "history"

    def _of(self, parser: str) -> Histories:
        if parser not in self._histories:
            self._histories[parser] = Histories(self._tokenizer, parser, append=self._append)
        return self._histories[parser]

    def _find_continued(self, tokens: list[int]) -> _Answer | None:
        """Finds the longest answer that, with its request, is a proper prefix of `tokens`; None if there is none.

        Of several answers after which the tokens are the same, the longest is found, and then the earliest.
        """
        shorter = [answer for answer in self._answers if answer.trained and answer.size < len(tokens)]
        ordered = sorted(shorter, key=lambda answer: (-answer.size, -answer.length))
        return next((answer for answer in ordered if tokens[: answer.size] == answer.tokens()), None)

    def _ends(self) -> list[_Answer]:
        """Lists the last answer of each piece, in the order of the requests."""
        continued = {answer.parent for answer in self._answers if answer.trained}
        return [answer for answer in self._answers if answer.trained and answer not in continued]

    def _begins(self, answer: _Answer) -> bool:
        """Returns True if an answer's request begins with the data's prompt: its track has the prompt's own array."""
        return answer.track.prompt is self._prompt

    def _pieces(self) -> list[_Piece]:
        """Lists the pieces in the order of the row.

        Pieces that begin with the data's prompt come first. A shorter first request comes before a longer one. Of the
        requests that continue an answer, the shortest goes on with the answer's piece, and the others open pieces. If
        requests are equally long, their tokens decide; equal requests keep their order of arrival.
        """

        def place(answer: _Answer) -> tuple[bool, int, Sequence[int]]:
            return not self._begins(answer), len(asked := answer.asked()), asked

        children: dict[_Answer | None, list[_Answer]] = {}
        for answer in self._answers:
            if answer.trained:
                children.setdefault(answer.parent, []).append(answer)
        first = children.pop(None, [])
        heirs: dict[_Answer | None, _Answer] = {}
        for parent, answers in children.items():
            heirs[parent], *others = sorted(answers, key=place) if len(answers) > 1 else answers
            first += others
        pieces = []
        for answer in sorted(first, key=place):
            answers = [answer]
            while (heir := heirs.get(answers[-1])) is not None:
                answers.append(heir)
            pieces.append(answers)
        number = int(not self._begins(pieces[0][0])) if pieces else 0
        return [_Piece(i, answers) for i, answers in enumerate(pieces, number)]

    def _key(self, tokens: Sequence[int], aside: bool) -> np.ndarray:
        digest = hashlib.blake2b(self._key_2.tobytes() + bytes([aside]), digest_size=8)
        digest.update(np.asarray(tokens, np.int32).tobytes())
        count, self._opened[digest.digest()] = self._opened[digest.digest()], self._opened[digest.digest()] + 1
        digest.update(count.to_bytes(4, "little"))
        return np.frombuffer(digest.digest(), np.uint32)


def _closest(tokens: Sequence[int], pieces: Sequence[_Piece]) -> tuple[int | None, int]:
    """Finds the piece that shares the most first tokens with `tokens`: (its number, number of shared tokens), or
    (None, 0)."""
    found: tuple[int | None, int] = None, 0
    for piece in pieces:
        size = min(len(known := piece.answers[-1].tokens()), len(tokens))
        differs_X = np.append(np.asarray(known[:size]) != np.asarray(tokens[:size]), True)
        if (alike := int(differs_X.argmax())) > found[1]:
            found = piece.number, alike
    return found


def read_record(rows: Sequence[Sequence[Any]], record: Track) -> list[TurnRecord]:
    """Reads the answers that `Branches.record` recorded.

    Returns:
      Each answer in the form of the argument `drawn` of `Branches.add_request`: the result of
      podrl.rollout.partial.pack_turn, with `request` (hash of the request) and `routes` (routes of the answer's track,
      or None) added.
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
