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

OBJECT = "text_completion"
_MOST = 16  # tokens; OpenAI's default of max_tokens


def read(body: Any, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request; see wire.chat.read for arguments and errors; `parser` is ignored."""
    del parser
    fields = Fields(body)
    model, aside = fields.model(models)
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and are_ids(prompt)):
        raise fields.wrong("prompt", prompt, "must be one text, or one list of token ids")
    logprobs = fields.whole("logprobs", 0, 0) is not None
    written, stop = fields.streaming() | fields.token_ids(), fields.stop()
    most, sampling = fields.whole("max_tokens", 1, 2**31 - 1), fields.sampling()
    fields.end()
    ask = ModelRequest(
        text=prompt if isinstance(prompt, str) else None,
        ids=None if isinstance(prompt, str) else prompt,
        stop=stop,
        max_new=_MOST if most is None else most,
        aside=aside,
        pieces=logprobs and not written["ids_as_tokens"],
        parts=written["stream"],
        **sampling,
    )
    return ParsedRequest(ask, model, stop, logprobs=logprobs, **written)


def write(wanted: ParsedRequest, answer: Answer, parser: str) -> dict[str, Any]:
    """Writes the body of the response."""
    del parser
    choices = []
    for index, choice in enumerate(answer.choices):
        made = _choice(wanted, index, choice, visible_text(choice, wanted.stop))
        choices.append(made | ({"prompt_token_ids": list(answer.prompt_ids)} if wanted.return_ids else {}))
    head = _head(wanted, answer.id, answer.created)
    return head | {"choices": choices, "usage": usage(answer)}


class AnswerStream:
    """Writes a streamed answer as chunks; see wire.chat.AnswerStream for the arguments."""

    def __init__(self, wanted: ParsedRequest, id: str, created: int, parser: str) -> None:
        del parser
        self._wanted, self._head, self._unsent = wanted, _head(wanted, id, created), UnsentText(wanted)

    def part(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a part of choice `index`."""
        shown = self._unsent.part(index, choice)
        yield {**self._head, "choices": [_choice(self._wanted, index, shown, shown.text)]}

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yields the last chunks, with everything that `part` has not written."""
        for index, left in self._unsent.rest(answer):
            yield {**self._head, "choices": [_choice(self._wanted, index, left, left.text)]}
        yield from ending(self._wanted, self._head, answer)


def _choice(wanted: ParsedRequest, index: int, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = None
    if wanted.logprobs:
        tokens = list(wanted.token_names(choice))
        logprobs = {"tokens": tokens, "token_logprobs": list(choice.logprobs), "top_logprobs": None}
    made = {"index": index, "text": text, "finish_reason": finish_reason(choice), "logprobs": logprobs}
    return made | ({"token_ids": list(choice.tokens)} if wanted.return_ids else {})


def _head(wanted: ParsedRequest, id: str, created: int) -> dict[str, Any]:
    return {"id": f"cmpl-{id}", "object": OBJECT, "created": created, "model": wanted.model}
