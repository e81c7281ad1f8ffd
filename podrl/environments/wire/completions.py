"""The dialect of /v1/completions: a text, or token ids, that the model goes on from."""

from collections.abc import Iterator, Sequence
from typing import Any

from podrl.environments.wire.asks import Answer, Ask, Choice, Growing, Wanted, finish_reason, usage
from podrl.environments.wire.chat import ending
from podrl.environments.wire.fields import Fields, are_ids

OBJECT = "text_completion"
_MOST = 16  # tokens, where a client names no number: as of OpenAI's interface


def read(body: Any, models: Sequence[str], parser: str) -> Wanted:
    """Reads the body of a request; `parser` has no meaning here.

    Raises:
      Refused: a field that cannot be honoured; names it.
    """
    del parser
    fields = Fields(body)
    model, aside = fields.model(models)
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and are_ids(prompt)):
        raise fields.wrong("prompt", prompt, "must be one text, or one list of token ids")
    stream = fields.flag("stream")
    logprobs = fields.whole("logprobs", 0, 0) is not None
    as_ids, return_ids = fields.flag("return_tokens_as_token_ids"), fields.flag("return_token_ids")
    fields.neutral("skip_special_tokens", True)
    include_usage, stop = fields.usage(), fields.stop()
    most, sampling = fields.whole("max_tokens", 1, 2**31 - 1), fields.sampling()
    fields.end()
    ask = Ask(
        text=prompt if isinstance(prompt, str) else None,
        ids=None if isinstance(prompt, str) else prompt,
        stop=stop,
        max_new=_MOST if most is None else most,
        aside=aside,
        pieces=logprobs and not as_ids,
        parts=stream,
        **sampling,
    )
    return Wanted(ask, model, stop, stream, include_usage, logprobs, return_ids, as_ids)


def write(wanted: Wanted, answer: Answer, parser: str) -> dict[str, Any]:
    """The body of the response."""
    del parser
    choices = []
    for index, choice in enumerate(answer.choices):
        made = _choice(wanted, index, choice, wanted.said(choice))
        choices.append(made | ({"prompt_token_ids": list(answer.prompt_ids)} if wanted.return_ids else {}))
    head = _head(wanted, answer.id, answer.created)
    return head | {"choices": choices, "usage": usage(answer)}


class Stream:
    """Writes an answer as chunks."""

    def __init__(self, wanted: Wanted, id: str, created: int, parser: str) -> None:
        del parser
        self._wanted, self._head = wanted, _head(wanted, id, created)
        self._growing = [Growing(wanted) for _ in range(wanted.ask.samples)]

    def part(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        """The chunks of a part of choice `index`."""
        shown = self._growing[index].part(choice)
        yield {**self._head, "choices": [_choice(self._wanted, index, shown, shown.text)]}

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The chunks of what is left once the whole answer is there."""
        for index, choice in enumerate(answer.choices):
            left = self._growing[index].end(choice)
            yield {**self._head, "choices": [_choice(self._wanted, index, left, left.text)]}
        yield from ending(self._wanted, self._head, answer)


def _choice(wanted: Wanted, index: int, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = None
    if wanted.logprobs:
        ids = wanted.ids_as_tokens
        tokens = [f"token_id:{token}" for token in choice.tokens] if ids else list(choice.pieces)
        logprobs = {"tokens": tokens, "token_logprobs": list(choice.logprobs), "top_logprobs": None}
    made = {"index": index, "text": text, "finish_reason": finish_reason(choice), "logprobs": logprobs}
    return made | ({"token_ids": list(choice.tokens)} if wanted.return_ids else {})


def _head(wanted: Wanted, id: str, created: int) -> dict[str, Any]:
    return {"id": f"cmpl-{id}", "object": OBJECT, "created": created, "model": wanted.model}
