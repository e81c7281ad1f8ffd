"""The dialect of /v1/completions: a text, or token ids, that the model continues."""

from collections.abc import Iterator, Sequence
from typing import Any

from podrl.environments.wire.chat import ending
from podrl.environments.wire.fields import Fields, are_ids
from podrl.environments.wire.requests import (
    Answer,
    Choice,
    ModelRequest,
    ParsedRequest,
    UnsentText,
    finish_reason,
    usage,
    visible_text,
)
from podrl.mappings import JsonObject

OBJECT = "text_completion"
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default of max_tokens, in tokens


def read(body: object, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request; see wire.chat.read for arguments and errors; `parser` is ignored."""
    del parser
    fields = Fields(body)
    model, aside = fields.model(models)
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and are_ids(prompt)):
        raise fields.refusal("prompt", prompt, "must be one text, or one list of token ids")
    logprobs = fields.integer("logprobs", 0, 0) is not None
    output, stop = fields.streaming() | fields.token_ids(), fields.stop()
    max_new, sampling = fields.integer("max_tokens", 1, 2**31 - 1), fields.sampling()
    fields.end()
    model_request = ModelRequest(
        text=prompt if isinstance(prompt, str) else None,
        ids=None if isinstance(prompt, str) else prompt,
        stop=stop,
        max_new=_DEFAULT_MAX_TOKENS if max_new is None else max_new,
        aside=aside,
        pieces=logprobs and not output["ids_as_tokens"],
        parts=output["stream"],
        **sampling,
    )
    return ParsedRequest(model_request, model, stop, logprobs=logprobs, **output)


def write(request: ParsedRequest, answer: Answer, parser: str) -> JsonObject:
    """Writes the body of the response."""
    del parser
    choices = []
    for index, choice in enumerate(answer.choices):
        result = _choice(request, index, choice, visible_text(choice, request.stop))
        choices.append(result | ({"prompt_token_ids": list(answer.prompt_ids)} if request.return_ids else {}))
    head = _head(request, answer.id, answer.created)
    return head | {"choices": choices, "usage": usage(answer)}


class AnswerStream:
    """Writes a streamed answer as chunks; see wire.chat.AnswerStream for the arguments."""

    def __init__(self, request: ParsedRequest, id: str, created: int, parser: str) -> None:
        del parser
        self._request, self._head, self._unsent = request, _head(request, id, created), UnsentText(request)

    def part(self, index: int, choice: Choice) -> Iterator[JsonObject]:
        """Yields the chunks of a part of choice `index`."""
        shown = self._unsent.part(index, choice)
        yield {**self._head, "choices": [_choice(self._request, index, shown, shown.text)]}

    def end(self, answer: Answer) -> Iterator[JsonObject]:
        """Yields the last chunks, with everything that `part` has not written."""
        for index, unsent in self._unsent.rest(answer):
            yield {**self._head, "choices": [_choice(self._request, index, unsent, unsent.text)]}
        yield from ending(self._request, self._head, answer)


def _choice(request: ParsedRequest, index: int, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        tokens = list(request.token_names(choice))
        logprobs = {"tokens": tokens, "token_logprobs": list(choice.logprobs), "top_logprobs": None}
    result = {"index": index, "text": text, "finish_reason": finish_reason(choice), "logprobs": logprobs}
    return result | ({"token_ids": list(choice.tokens)} if request.return_ids else {})


def _head(request: ParsedRequest, id: str, created: int) -> dict[str, Any]:
    return {"id": f"cmpl-{id}", "object": OBJECT, "created": created, "model": request.model}
