"""The requests, answers and refusals that all dialects share, and how the text and tokens of an answer are written."""

import array
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from podrl.mappings import ChatMessage, JsonObject, ToolSchema

ASIDE = ":aside"  # suffix of a model's name that leaves the answer out of training


class RefusedRequest(Exception):  # noqa: N818 - an answer to the client, not an error of this program
    """The refusal of a request, which the client gets as its response.

    Attributes:
      status: status code of HTTP.
      code: name of the reason, for programs, in the style of OpenAI's interface.
      message: explanation for people, whole sentences.
      param: name of the field at fault; None if no single field is at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param

    def fields(self) -> JsonObject:
        """Returns the constructor's arguments, for a frame."""
        return {"status": self.status, "code": self.code, "message": self.message, "param": self.param}

    def error(self) -> dict[str, object]:
        """Returns the JSON of the response's body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """A request to the model, as the owner of the front gets it; exactly one of `messages`, `text`, `ids` and `reward`
    is set.

    Attributes:
      messages: conversation to answer, its contents as text.
      text: text to continue.
      ids: token ids to continue.
      tools: functions that the model may call, in the form that chat templates take; empty offers none.
      samples: number of answers.
      stop: strings that end an answer, including the strings of the parser of tool calls.
      stop_ids: token ids that end an answer.
      max_new: largest number of sampled tokens of an answer; None is limited by the context only.
      seed: random seed; None lets the owner choose.
      temperature, top_p, top_k, min_p: sampling settings, see podrl.engine.config; None is the owner's setting.
      aside: True if the model's name ended in ':aside'.
      pieces: True if the answer needs the text of every token.
      parts: True if the answer must be sent in parts while it is sampled.
      reward: (id of an earlier answer, its reward) of a request that only reports a reward; else None.
    """

    messages: Sequence[ChatMessage] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    tools: Sequence[ToolSchema] = ()
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
    reward: tuple[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """One sampled answer or its newest part: the text, and the tokens with their log-probabilities.

    Attributes:
      text: text of `tokens` without special tokens; it includes the stop string.
      tokens: sampled token ids; they include the end token.
      logprobs: log-probability of each token under softmax of the model's logits, nats.
      pieces: text of each token; empty unless `ModelRequest.pieces` is set.
      stop: reason of the end: 'eos' for the end of the model's turn, 'length' for a limit of tokens, else the stop
        string that ended the answer; '' for a part.
    """

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str] = ()
    stop: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """All answers to a ModelRequest.

    Attributes:
      id: name of the answer; the ids of its tool calls contain it.
      created: time of the request, seconds since 1970.
      prompt_ids: token ids of the prompt, as the model read them.
      choices: sampled answers, `ModelRequest.samples` of them.
    """

    id: str
    created: int
    prompt_ids: Sequence[int]
    choices: Sequence[Choice]

    def to_frame(self) -> tuple[JsonObject, bytes]:
        """Returns (fields for the header of a frame, token ids and log-probabilities as bytes for its body).

        The header has the numbers of ids and of log-probabilities in place of these values. When the ids of a long
        prompt were written as JSON, they took a quarter of the time of the front, and of its owner.
        """
        fields, numbers = {**vars(self), "prompt_ids": len(self.prompt_ids)}, [array.array("i", self.prompt_ids)]
        fields["choices"] = []
        for choice in self.choices:
            numbers += [array.array("i", choice.tokens), array.array("d", choice.logprobs)]
            counts = {"tokens": len(choice.tokens), "logprobs": len(choice.logprobs)}
            fields["choices"].append({**vars(choice), **counts})
        return fields, b"".join(map(array.array.tobytes, numbers))

    @classmethod
    def from_frame(cls, fields: JsonObject, numbers: bytes) -> "Answer":
        """Makes an answer from the result of `to_frame`."""
        view, offset = memoryview(numbers), 0

        def unpack(kind: Literal["i", "d"], count: int) -> Sequence[Any]:  # copies nothing: most clients get no numbers
            nonlocal offset
            begin, offset = offset, offset + count * array.array(kind).itemsize
            return view[begin:offset].cast(kind)

        prompt_ids, choices = unpack("i", fields["prompt_ids"]), []
        for choice in fields["choices"]:
            lists = {"tokens": unpack("i", choice["tokens"]), "logprobs": unpack("d", choice["logprobs"])}
            choices.append(Choice(**{**choice, **lists}))
        return cls(**{**fields, "prompt_ids": prompt_ids, "choices": choices})


@dataclasses.dataclass(frozen=True)
class AnswerPart:
    """The newest part of one choice of an answer that is still being sampled.

    Attributes:
      id: name of the answer.
      created: time of the request, seconds since 1970.
      index: number of the choice.
      choice: text and tokens since the previous part.
    """

    id: str
    created: int
    index: int
    choice: Choice


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A parsed request: the request to the model, and the form in which the client wants the answer.

    Attributes:
      model_request: request to the model.
      model: model name that the client used.
      stop: the client's own stop strings, which are cut off the text.
      stream: True if the answer is sent as server-sent events.
      usage: True if a stream ends with a chunk of token counts.
      logprobs: True if the answer has log-probabilities.
      return_ids: True if the answer has the token ids of the prompt and the answer.
      ids_as_tokens: True if a token is written as 'token_id:N' instead of its text.
    """

    model_request: ModelRequest
    model: str
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    return_ids: bool = False
    ids_as_tokens: bool = False

    @classmethod
    def from_fields(cls, fields: JsonObject) -> "ParsedRequest":
        """Makes a request from the output of `dataclasses.asdict` that was written as JSON and read back."""
        model_request = ModelRequest(**fields["model_request"])
        return cls(**{**fields, "model_request": model_request, "stop": tuple(fields["stop"])})

    def token_names(self, choice: Choice) -> Sequence[str]:
        """Returns the names that a client reads for the tokens of an answer."""
        return [f"token_id:{token}" for token in choice.tokens] if self.ids_as_tokens else choice.pieces


def visible_text(choice: Choice, stop: Sequence[str]) -> str:
    """Returns the text of an answer, without the stop string at its end if the client set that string."""
    return choice.text.removesuffix(choice.stop) if choice.stop in stop else choice.text


def usage(answer: Answer) -> dict[str, int]:
    """Counts the tokens of an answer."""
    prompt, sampled = len(answer.prompt_ids), sum(len(choice.tokens) for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_reason(choice: Choice) -> str | None:
    """Returns OpenAI's word for the reason of the end: 'length' or 'stop'; None for a part."""
    return None if not choice.stop else "length" if choice.stop == "length" else "stop"


def token_logprobs(request: ParsedRequest, choice: Choice) -> JsonObject | None:
    """Writes log-probabilities in the form of chat completions; None if the client wants none."""
    if not request.logprobs:
        return None
    content = [
        {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
        for name, logprob in zip(request.token_names(choice), choice.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class UnsentText:
    """Tracks how much of one streamed answer was sent to the client, for each of its choices.

    The client never gets its own stop string, so the last characters, which may begin a stop string, are held back.
    """

    def __init__(self, request: ParsedRequest) -> None:
        self._stop = request.stop
        self._held_back = max((len(text) for text in request.stop), default=1) - 1  # largest number of characters
        self._tails = [""] * request.model_request.samples  # text of each choice that was held back
        self._characters = [0] * request.model_request.samples  # number of characters sent
        self._tokens = [0] * request.model_request.samples  # number of tokens sent

    def part(self, index: int, choice: Choice) -> Choice:
        """Takes a part of choice `index`; returns the part with the text that can be sent now."""
        text = self._tails[index] + choice.text
        cut = max(len(text) - self._held_back, 0)
        shown, self._tails[index] = text[:cut], text[cut:]
        self._characters[index] += cut
        self._tokens[index] += len(choice.tokens)
        return dataclasses.replace(choice, text=shown)

    def rest(self, answer: Answer) -> Iterator[tuple[int, Choice]]:
        """Yields (number, the text and tokens that were not sent yet) for each choice of the whole answer."""
        for index, choice in enumerate(answer.choices):
            sent = self._tokens[index]
            unsent = dataclasses.replace(
                choice,
                text=visible_text(choice, self._stop)[self._characters[index] :],
                tokens=choice.tokens[sent:],
                logprobs=choice.logprobs[sent:],
                pieces=choice.pieces[sent:],
            )
            yield index, unsent
