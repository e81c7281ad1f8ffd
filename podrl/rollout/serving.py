"""Answers requests on the engine in one running batch; a new request joins at the next dispatch."""

import collections
import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence

import numpy as np

from podrl.data.dialogue import Dialogue
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import Sampling
from podrl.engine.keys import sample_keys
from podrl.engine.session import Session, Track
from podrl.environments.config import History
from podrl.environments.wire import chat
from podrl.environments.wire.requests import Answer, AnswerPart, Choice, ParsedRequest, RefusedRequest
from podrl.rollout.histories import Histories
from podrl.rollout.worker import RolloutWorker
from podrl.types import STOP_EOS, STOP_FAILED, STOP_LENGTH, Policy

_COUNTED = 100_000  # number of prompts whose repetitions are counted; the least recent prompts are forgotten
# Number of requests after which a new session begins as soon as no request is open: a session's records grow with its
# requests.
_PER_SESSION = 512


@dataclasses.dataclass(eq=False)
class _RequestState:
    """A request that is being sampled.

    Attributes:
      request: parsed request.
      id: identifier of the answer.
      created: time of the request, seconds since 1970.
      prompt: token ids of the prompt.
      tracks: the engine's records of the samples.
      strings: stop strings of ordinary text.
      stops: stop strings that are one special token, by the id of the token.
      sent: number of tokens that were sent to the client so far, per sample, if the answer is sent in parts.
      begin: index of the first token of the newest part, per sample.
    """

    request: ParsedRequest
    id: str
    created: int
    prompt: np.ndarray
    tracks: list[Track]
    strings: tuple[str, ...]
    stops: Mapping[int, str]
    sent: list[int]
    begin: list[int]


class Serving:
    """Answers requests on one engine; all calls must come from the same thread.

    Attributes:
      histories: encoder of conversations, which remembers earlier answers.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        sampling: Sampling,
        parser: str,
        history: History,
        seed: int,
    ) -> None:
        """Keeps the arguments; the first request opens a session of the engine.

        Args:
          worker: engine; its kv_cache_size is the largest number of tokens of a prompt and its answer.
          policy: weights of the model.
          tokenizer: tokenizer of the model.
          sampling: default temperature, top_p, top_k and min_p of a request.
          parser: format in which the model writes a tool call (env.parser).
          history: env.history, which decides whether a request continues an earlier answer.
          seed: default random seed of a request.
        """
        self._worker, self._policy, self._tokenizer = worker, policy, tokenizer
        self._sampling, self._parser, self._seed = sampling, parser, seed
        self._dialogue, self.histories = Dialogue(tokenizer), Histories(tokenizer, parser, append=history == "append")
        self._context, self._vocab = worker.config.kv_cache_size, worker.model.vocab_size
        self._session: Session | None = None
        self._request_count = 0  # number of requests of the present session
        self._states: dict[int, _RequestState] = {}
        self._repeated: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    @property
    def busy(self) -> bool:
        """Returns True while a request is open."""
        return bool(self._states)

    def add(self, number: int, request: ParsedRequest) -> None:
        """Adds a request to the batch; `step` returns its answer.

        Args:
          number: number of the request, chosen by the caller.
          request: parsed request.

        Raises:
          RefusedRequest: the prompt is empty or too long, or the engine cannot honour a field.
        """
        model_request = request.model_request
        if model_request.reward is not None:
            raise RefusedRequest(404, "not_found", "This endpoint serves a checkpoint and takes no rewards.")
        prompt = np.asarray(self._prompt(request), np.int32)
        if not len(prompt):
            raise RefusedRequest(400, "invalid_prompt", "The prompt is empty: give at least one token.")
        if len(prompt) >= self._context:
            raise RefusedRequest(
                400,
                "context_length_exceeded",
                f"The maximum context length is {self._context} tokens, prompt and answer together, and the prompt has "
                f"{len(prompt)}: shorten it.",
            )
        if (largest := int(prompt.max())) >= self._vocab:
            raise RefusedRequest(
                400, "invalid_prompt", f"The model has no token {largest}: ids are below {self._vocab}."
            )
        room = self._context - len(prompt)
        max_new = room if model_request.max_new is None else min(model_request.max_new, room)
        sampling, stops = self._limits(request, max_new)
        session = self._open()
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
        seed, repeated = model_request.seed, 0
        if seed is None:
            seed, repeated = self._seed, self._count(digest)
        index = int.from_bytes(digest, "big") >> 1
        keys_G2 = sample_keys(seed, repeated, np.asarray(index), np.arange(model_request.samples))
        tracks = session.add(prompt, keys_G2, sampling)
        self._request_count += 1
        answer_id = hashlib.blake2b(digest + keys_G2.tobytes(), digest_size=12).hexdigest()
        self._states[number] = _RequestState(
            request,
            answer_id,
            int(time.time()),
            prompt,
            tracks,
            sampling.stop_strings,
            stops,
            sent=[0] * len(tracks),
            begin=[0] * len(tracks),
        )

    def cancel(self, number: int) -> None:
        """Cancels a request, if it is open."""
        state = self._states.pop(number, None)
        for track in state.tracks if state is not None else ():
            if track.stop is None and self._session is not None:
                self._session.end(track, STOP_LENGTH)  # the reason is never read

    def step(self) -> list[tuple[int, AnswerPart | Answer | RefusedRequest]]:
        """Runs one step of the engine.

        Returns:
          (number of the request, output) for each output to a client: a part of an answer, an answer, or a refusal.
        """
        session = self._session
        if session is None:
            return []
        session.step()
        outputs: list[tuple[int, AnswerPart | Answer | RefusedRequest]] = []
        for number, state in list(self._states.items()):
            if any(track.stop == STOP_FAILED for track in state.tracks):
                self.cancel(number)
                why = "The model's logits are NaN or infinite: look for NaN in its weights, or give another --dtype."
                outputs.append((number, RefusedRequest(500, "model_failed", why)))
            elif all(track.stop is not None for track in state.tracks):
                outputs.append((number, self._answer(state)))
                self.cancel(number)
            elif state.request.model_request.parts:
                outputs += [(number, part) for i in range(len(state.tracks)) if (part := self._part(state, i))]
        if not self._states and not session.busy and self._request_count >= _PER_SESSION:
            self.close()
        return outputs

    def close(self) -> None:
        """Cancels every open request and ends the session of the engine."""
        for number in list(self._states):
            self.cancel(number)
        if self._session is not None:
            session, self._session, self._request_count = self._session, None, 0
            self._worker.close(session)
            if session.open or session.busy or session.stats.failed:
                self._worker.sleep()  # a lane may still decode, and the cache of a failed sample may hold NaN

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._worker.session(self._policy)
        return self._session

    def _prompt(self, request: ParsedRequest) -> Sequence[int]:
        model_request = request.model_request
        if model_request.messages is not None:
            return self.histories.encode(model_request.messages, model_request.tools)
        if model_request.text is not None:
            try:
                return self._tokenizer.encode(model_request.text, start=True)
            except ValueError as error:
                raise RefusedRequest(400, "invalid_prompt", str(error), "prompt") from None
        return model_request.ids or ()

    def _limits(self, request: ParsedRequest, max_new: int) -> tuple[Sampling, Mapping[int, str]]:
        """Makes the sampling settings of a request.

        Args:
          request: parsed request.
          max_new: largest number of sampled tokens of an answer.

        Returns:
          (settings, stop strings that are one special token, by the id of the token).

        Raises:
          RefusedRequest: a stop string or a stop id cannot be honoured.
        """
        model_request = request.model_request
        try:
            strings, ids = self._dialogue.stops(model_request.stop)
        except ValueError as error:
            raise RefusedRequest(400, "unsupported_parameter", str(error), "stop") from None
        eos_ids = self._tokenizer.eos_ids  # the engine ends every answer at these ids
        stop_ids = tuple(dict.fromkeys(token for token in (*model_request.stop_ids, *ids) if token not in eos_ids))
        spare = self._open().spare_stop_ids(self._sampling)
        if len(stop_ids) > spare or any(token >= self._vocab for token in stop_ids):
            why = (
                f"stop_token_ids and the stop strings that are special tokens have {len(stop_ids)} ids, the largest "
                f"{max(stop_ids)}: give at most {spare} ids, each below {self._vocab}."
            )
            raise RefusedRequest(400, "unsupported_parameter", why, "stop_token_ids")
        names = ("temperature", "top_p", "top_k", "min_p")
        values = {name: value for name in names if (value := getattr(model_request, name)) is not None}
        limits = {"max_new": max_new, "stop_strings": strings, "stop_ids": stop_ids}
        return dataclasses.replace(self._sampling, **values, **limits), ids

    def _count(self, digest: bytes) -> int:
        """Counts a request without a seed; returns how many such requests had the same prompt before."""
        count = self._repeated.pop(digest, 0)
        self._repeated[digest] = count + 1
        if len(self._repeated) > _COUNTED:
            self._repeated.popitem(last=False)
        return count

    # Answers.

    def _answer(self, state: _RequestState) -> Answer:
        """Writes the answer to a request, and remembers its tokens if the prompt was a conversation."""
        choices = [self._choice(state, track) for track in state.tracks]
        prompt = state.prompt.tolist()
        answer = Answer(state.id, state.created, prompt, choices)
        model_request = state.request.model_request
        if model_request.messages is not None:
            arguments = {"stop": state.request.stop, "tools": model_request.tools, "parser": self._parser}
            messages = (
                chat.assistant_message(c, id=chat.call_ids(answer, i), **arguments) for i, c in enumerate(choices)
            )
            ids = ([*prompt, *track.tokens] for track in state.tracks)
            self.histories.remember(model_request.messages, model_request.tools, zip(messages, ids, strict=True))
        return answer

    def _choice(self, state: _RequestState, track: Track) -> Choice:
        """Writes a finished sample as one of the choices in the answer to a request."""
        last = track.tokens[-1] if track.tokens else -1
        if track.stop == STOP_LENGTH:
            stop = "length"
        elif track.stop == STOP_EOS:
            stop = state.stops.get(last, "eos")
        else:
            stop = max((text for text in state.strings if track.text.endswith(text)), key=len, default="eos")
        return self._record(state, track, 0, track.text, stop)

    def _record(self, state: _RequestState, track: Track, begin: int, text: str, stop: str) -> Choice:
        """Makes a choice from a sample's tokens from index `begin` on."""
        tokens = track.tokens[begin:]
        pieces = [self._piece(token) for token in tokens] if state.request.model_request.pieces else []
        return Choice(text, tokens, track.drawn["raw_logprob"][begin:], pieces, stop)

    def _piece(self, token: int) -> str:
        return self._tokenizer.decode([token]) or self._tokenizer.token_text(token)

    def _part(self, state: _RequestState, i: int) -> AnswerPart | None:
        """Writes the unsent tokens of sample i, if it has not ended.

        Returns None if the sample has ended, if it has no unsent tokens, or if later tokens may change the text of
        these tokens, as within a character.
        """
        track, sent, begin = state.tracks[i], state.sent[i], state.begin[i]
        if len(track.tokens) == sent or track.stop is not None:
            return None
        # Decoding begins at the previous part, because the text of the first token may depend on the token before it.
        before, text = self._tokenizer.decode(track.tokens[begin:sent]), self._tokenizer.decode(track.tokens[begin:])
        if text.endswith("\ufffd") or not text.startswith(before):
            return None
        state.begin[i], state.sent[i] = sent, len(track.tokens)
        return AnswerPart(state.id, state.created, i, self._record(state, track, sent, text[len(before) :], ""))
