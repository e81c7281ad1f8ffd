"""Samples the answers to requests as they come, in one running batch: a request joins at the engine's next dispatch."""

import collections
import dataclasses
import hashlib
import time
from collections.abc import Sequence

import numpy as np

from podrl.data.dialogue import Dialogue
from podrl.data.tokenizer import Tokenizer
from podrl.environments.wire import chat
from podrl.environments.wire.asks import Answer, Choice, Part, Refused, Wanted
from podrl.rollout.config import Sampling
from podrl.rollout.histories import Histories
from podrl.rollout.keys import sample_keys
from podrl.rollout.rollout import RolloutWorker
from podrl.rollout.session import Session, Track
from podrl.types import STOP_EOS, STOP_FAILED, STOP_LENGTH, Policy

_COUNTED = 100_000  # prompts whose repetitions are counted
_PER_SESSION = 512  # requests after which the engine gets a new session, once nothing is open


@dataclasses.dataclass(eq=False)
class _Request:
    """A request that is being sampled.

    Attributes:
      number: as of its frames.
      wanted: what the client asked.
      id, created: of its answer.
      prompt: the tokens that the model reads.
      tracks: its samples.
      strings: its stop strings that are text.
      stops: its stop strings that are one token, by the token's id.
      told: of each sample, how many tokens were told in parts.
      begin: of each sample, the first token of the last part.
    """

    number: int
    wanted: Wanted
    id: str
    created: int
    prompt: np.ndarray
    tracks: list[Track]
    strings: tuple[str, ...]
    stops: dict[int, str]
    told: list[int]
    begin: list[int]


class Serving:
    """Answers requests on an engine; for one thread.

    Attributes:
      histories: encodes the conversations.
    """

    def __init__(
        self, worker: RolloutWorker, policy: Policy, tokenizer: Tokenizer, *, sampling: Sampling, parser: str, seed: int
    ) -> None:
        """Takes the engine, its weights and what requests leave open.

        Args:
          worker: of a configuration whose kv_cache_size is the longest prompt with its answer.
          policy: the weights.
          tokenizer: of the model.
          sampling: for requests that name no temperature, top_p, top_k or min_p.
          parser: how the model writes a call (env.parser).
          seed: of requests that name none.
        """
        self._worker, self._policy, self._tokenizer = worker, policy, tokenizer
        self._sampling, self._parser, self._seed = sampling, parser, seed
        self._dialogue, self.histories = Dialogue(tokenizer), Histories(tokenizer, parser)
        self._context, self._vocab = worker.config.kv_cache_size, worker.model.vocab_size
        self._session: Session | None = None
        self._asked = 0  # requests of the session
        self._requests: dict[int, _Request] = {}
        self._repeated: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    @property
    def busy(self) -> bool:
        """True while `step` has anything to do."""
        return bool(self._requests)

    def ask(self, number: int, wanted: Wanted) -> None:
        """Takes a request; `step` returns its answer.

        Raises:
          Refused: it cannot be served.
        """
        ask = wanted.ask
        prompt = np.asarray(self._prompt(wanted), np.int32)
        if not len(prompt):
            raise Refused(400, "invalid_prompt", "The prompt is empty: give at least one token.")
        if len(prompt) >= self._context:
            raise Refused(
                400,
                "context_length_exceeded",
                f"The maximum context length is {self._context} tokens, prompt and answer together, and the prompt has "
                f"{len(prompt)}: shorten it.",
            )
        if (largest := int(prompt.max())) >= self._vocab:
            raise Refused(400, "invalid_prompt", f"The model has no token {largest}: ids are below {self._vocab}.")
        room = self._context - len(prompt)
        sampling, stops = self._limits(wanted, room if ask.max_new is None else min(ask.max_new, room))
        session = self._open()
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
        seed, repeated = (ask.seed, 0) if ask.seed is not None else (self._seed, self._count(digest))
        index = int.from_bytes(digest, "big") >> 1
        keys_G2 = sample_keys(seed, repeated, np.asarray(index), np.arange(ask.samples))
        tracks = session.add(prompt, keys_G2, sampling)
        self._asked += 1
        named = hashlib.blake2b(digest + keys_G2.tobytes(), digest_size=12).hexdigest()
        zeros = [0] * len(tracks)
        made = (named, int(time.time()), prompt, tracks, sampling.stop_strings, dict(stops), zeros, list(zeros))
        self._requests[number] = _Request(number, wanted, *made)

    def drop(self, number: int) -> None:
        """Gives up a request that nobody waits for any more."""
        request = self._requests.pop(number, None)
        for track in request.tracks if request is not None else ():
            if track.stop is None and self._session is not None:
                self._session.end(track, STOP_LENGTH)  # nobody reads why

    def step(self) -> list[tuple[int, Part | Answer | Refused]]:
        """Runs the engine once; returns what requests, by their numbers, are to be told."""
        session = self._session
        if session is None:
            return []
        session.step()
        told: list[tuple[int, Part | Answer | Refused]] = []
        for number, request in list(self._requests.items()):
            if any(track.stop == STOP_FAILED for track in request.tracks):
                self.drop(number)
                why = "The model's logits are NaN or infinite: look for NaN in its weights, or give another --dtype."
                told.append((number, Refused(500, "model_failed", why)))
            elif all(track.stop is not None for track in request.tracks):
                told.append((number, self._answer(request)))
                self.drop(number)
            elif request.wanted.ask.parts:
                told += [(number, part) for i in range(len(request.tracks)) if (part := self._part(request, i))]
        if not self._requests and not session.busy and self._asked >= _PER_SESSION:
            self.close()
        return told

    def close(self) -> None:
        """Gives up what is open, and the engine back."""
        for number in list(self._requests):
            self.drop(number)
        if self._session is not None:
            session, self._session, self._asked = self._session, None, 0
            self._worker.close(session)
            if session.open or session.busy or session.stats.failed:
                self._worker.sleep()  # lanes may be live, caches of failed samples not finite

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._worker.session(self._policy)
        return self._session

    def _prompt(self, wanted: Wanted) -> Sequence[int]:
        ask = wanted.ask
        if ask.messages is not None:
            return self.histories.encode(ask.messages, ask.tools)
        if ask.text is not None:
            try:
                return self._tokenizer.encode(ask.text, start=True)
            except ValueError as error:
                raise Refused(400, "invalid_prompt", str(error), "prompt") from None
        return ask.ids or ()

    def _limits(self, wanted: Wanted, most: int) -> tuple[Sampling, dict[int, str]]:
        """The settings of a request's samples, and stop strings that are one token, by its id."""
        ask = wanted.ask
        try:
            strings, ids = self._dialogue.stops(ask.stop)
        except ValueError as error:
            raise Refused(400, "unsupported_parameter", str(error), "stop") from None
        ends = self._tokenizer.eos_ids  # end every answer anyway
        stop_ids = tuple(dict.fromkeys(token for token in (*ask.stop_ids, *ids) if token not in ends))
        spare = self._open().spare_stop_ids(self._sampling)
        if len(stop_ids) > spare or any(token >= self._vocab for token in stop_ids):
            why = f"stop_token_ids has {len(stop_ids)} ids: at most {spare}, below {self._vocab}, may end an answer."
            raise Refused(400, "unsupported_parameter", why, "stop_token_ids")
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: value for name in names if (value := getattr(ask, name)) is not None}
        limits = {"max_new": most, "stop_strings": strings, "stop_ids": stop_ids}
        return dataclasses.replace(self._sampling, **given, **limits), dict(ids)

    def _count(self, digest: bytes) -> int:
        """How often this prompt was asked before without a seed."""
        count = self._repeated.pop(digest, 0)
        self._repeated[digest] = count + 1
        if len(self._repeated) > _COUNTED:
            self._repeated.popitem(last=False)
        return count

    # Answers.

    def _answer(self, request: _Request) -> Answer:
        choices = [self._choice(request, track) for track in request.tracks]
        answer = Answer(request.id, request.created, request.prompt.tolist(), choices)
        ask = request.wanted.ask
        if ask.messages is not None:
            how = {"stop": request.wanted.stop, "tools": ask.tools, "parser": self._parser}
            for index, (choice, track) in enumerate(zip(choices, request.tracks, strict=True)):
                message = chat.message(choice, id=chat.call_ids(answer, index), **how)
                self.histories.remember(ask.messages, message, ask.tools, [*request.prompt.tolist(), *track.tokens])
        return answer

    def _choice(self, request: _Request, track: Track) -> Choice:
        last = track.tokens[-1] if track.tokens else -1
        if track.stop == STOP_LENGTH:
            stop = "length"
        elif track.stop == STOP_EOS:
            stop = request.stops.get(last, "eos")
        else:
            stop = max((text for text in request.strings if track.text.endswith(text)), key=len, default="eos")
        return self._said(request, track, 0, track.text, stop)

    def _said(self, request: _Request, track: Track, begin: int, text: str, stop: str) -> Choice:
        tokens = track.tokens[begin:]
        pieces = [self._piece(token) for token in tokens] if request.wanted.ask.pieces else []
        return Choice(text, tokens, track.drawn["raw_logprob"][begin:], pieces, stop)

    def _piece(self, token: int) -> str:
        return self._tokenizer.decode([token]) or self._tokenizer.token_text(token)

    def _part(self, request: _Request, i: int) -> Part | None:
        """What sample i has beyond the parts that were told; None where it is no whole character."""
        track, told, begin = request.tracks[i], request.told[i], request.begin[i]
        if len(track.tokens) == told or track.stop is not None:
            return None
        # Only the tail is decoded, from the beginning of the part before: where a character begins is known there.
        before, text = self._tokenizer.decode(track.tokens[begin:told]), self._tokenizer.decode(track.tokens[begin:])
        if text.endswith("\ufffd") or not text.startswith(before):
            return None
        request.begin[i], request.told[i] = told, len(track.tokens)
        return Part(request.id, request.created, i, self._said(request, track, told, text[len(before) :], ""))
