"""Requests to the model and their answers as every dialect has them, and the refusals that clients are told."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

ASIDE = ":aside"  # behind a model's name: answered as the model itself does, and never trained


class Refused(Exception):  # noqa: N818 - an answer to the client, no fault of ours
    """A request that is not served.

    Attributes:
      status: HTTP's number.
      code: a word for programs, in the manner of OpenAI's interface.
      param: the field at fault; None where no single field is.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param

    def fields(self) -> dict[str, Any]:
        """The arguments that make it again, as JSON."""
        return {"status": self.status, "code": self.code, "message": self.message, "param": self.param}

    def error(self) -> dict[str, Any]:
        """The JSON of the response's body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Ask:
    """What the model is asked; exactly one of `messages`, `text` and `ids` is given. JSON-able.

    Attributes:
      messages: a conversation, its contents as text.
      text: a text that the model goes on from.
      ids: token ids that the model goes on from.
      tools: the functions that the model may call, as chat templates take them; none are offered where it is empty.
      samples: answers wanted.
      stop: strings at which an answer ends, those of the parser of calls included.
      stop_ids: token ids at which an answer ends.
      max_new: most sampled tokens; None for what room there is.
      seed: of what is random; None lets the owner choose.
      temperature, top_p, top_k, min_p: settings of sampling, see podrl.rollout.config; None for the owner's.
      aside: the model's name ended in ':aside'.
      pieces: the text of every token is wanted.
      parts: the answer is wanted in parts while it is sampled.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    samples: int = 1
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    max_new: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    aside: bool = False
    pieces: bool = False
    parts: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """One sampled answer, as the engine recorded it; or, of a stream, what was added to it.

    Attributes:
      text: the text of `tokens`, special tokens left out, the stop string included.
      tokens: the sampled ids, the end token included.
      logprobs: the log-probability of each token under softmax of the model's logits, nats.
      pieces: the text of each token; empty unless it was asked for.
      stop: 'eos' for the end of the model's turn, 'length' for a limit of tokens, else the stop string that was met;
        '' for a part of an answer that goes on.
    """

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str] = ()
    stop: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """All answers to an Ask.

    Attributes:
      id: names the answer; the ids of its tool calls are made of it.
      created: seconds since 1970.
      prompt_ids: the tokens that the model read.
      choices: `Ask.samples` of them.
    """

    id: str
    created: int
    prompt_ids: Sequence[int]
    choices: Sequence[Choice]

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> "Answer":
        """Reads what `dataclasses.asdict` wrote."""
        return cls(**{**frame, "choices": [Choice(**choice) for choice in frame["choices"]]})


@dataclasses.dataclass(frozen=True)
class Part:
    """What was added to an answer that goes on: `id` and `created` as of its Answer, `index` of the choice."""

    id: str
    created: int
    index: int
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request that was read: what the model is asked, and how the client wants the answer written.

    Attributes:
      ask: for the owner of the front.
      model: the name that the client used.
      stop: the client's own stop strings, which are cut off the text.
      stream: as server-sent events.
      usage: a stream ends with a chunk of token counts.
      logprobs: with log-probabilities.
      return_ids: with the token ids of prompt and answer.
      ids_as_tokens: tokens are written as 'token_id:N'.
    """

    ask: Ask
    model: str
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    return_ids: bool = False
    ids_as_tokens: bool = False

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> "Wanted":
        """Reads what `dataclasses.asdict` wrote, through JSON."""
        return cls(**{**frame, "ask": Ask(**frame["ask"]), "stop": tuple(frame["stop"])})

    def said(self, choice: Choice) -> str:
        """The text of an answer without the client's stop string."""
        return choice.text.removesuffix(choice.stop) if choice.stop in self.stop else choice.text


def usage(answer: Answer) -> dict[str, int]:
    """Numbers of tokens of an answer."""
    prompt, sampled = len(answer.prompt_ids), sum(len(choice.tokens) for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_reason(choice: Choice) -> str | None:
    """The word for why an answer ended: 'length' or 'stop'; None for a part."""
    return None if not choice.stop else "length" if choice.stop == "length" else "stop"


def token_logprobs(wanted: Wanted, choice: Choice) -> dict[str, Any] | None:
    """The log-probabilities in the form of chat completions; None where they were not asked for."""
    if not wanted.logprobs:
        return None
    named = [f"token_id:{token}" for token in choice.tokens] if wanted.ids_as_tokens else choice.pieces
    content = [
        {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
        for name, logprob in zip(named, choice.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class Growing:
    """The stream of one choice: what of each part may be told already, and what of the end is left to tell.

    A stop string of the client is never told, so as many characters as may be the beginning of one are kept back.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._kept = max((len(text) for text in wanted.stop), default=1) - 1
        self._text, self._told, self._tokens = "", 0, 0

    def part(self, choice: Choice) -> Choice:
        """What may be told of a part."""
        self._text += choice.text
        self._tokens += len(choice.tokens)
        shown = self._text[self._told : max(len(self._text) - self._kept, self._told)]
        self._told += len(shown)
        return dataclasses.replace(choice, text=shown)

    def end(self, choice: Choice) -> Choice:
        """What the whole answer has beyond the parts that were told."""
        n = self._tokens
        return dataclasses.replace(
            choice,
            text=self._wanted.said(choice)[self._told :],
            tokens=choice.tokens[n:],
            logprobs=choice.logprobs[n:],
            pieces=choice.pieces[n:],
        )
