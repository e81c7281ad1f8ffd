"""The dialect of /inference/v1/generate: token ids in and token ids out, as vLLM and verifiers speak it."""

from collections.abc import Iterator, Sequence
from typing import Any

from podrl.environments.wire.asks import Answer, Ask, Choice, Growing, Wanted, finish_reason, token_logprobs, usage
from podrl.environments.wire.fields import Fields


def read(body: Any, models: Sequence[str], parser: str) -> Wanted:
    """Reads the body of a request; `parser` has no meaning here.

    Raises:
      Refused: a field that cannot be honoured; names it.
    """
    del parser
    fields = Fields(body)
    model, aside = fields.model(models)
    ids = fields.ids("token_ids")
    if not ids:
        raise fields.wrong("token_ids", ids, "must be a list of at least one token id")
    stream, include_usage = fields.flag("stream"), fields.usage()
    fields.take("cache_salt")  # a label
    given = fields.take("sampling_params")
    fields.end()
    params = Fields({} if given is None else given, "sampling_params")
    # vLLM's 1 is the sampled token and the most likely one; clients read the sampled token's alone.
    logprobs = params.whole("logprobs", 0, 1) is not None
    for written in ("skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens", "detokenize"):
        params.flag(written)  # they say how text is written, and the answer has none
    stop, most, sampling = params.stop(), params.whole("max_tokens", 1, 2**31 - 1), params.sampling()
    params.end()
    ask = Ask(ids=ids, stop=stop, max_new=most, aside=aside, parts=stream, **sampling)
    return Wanted(ask, model, stop, stream, include_usage, logprobs, return_ids=True, ids_as_tokens=True)


def write(wanted: Wanted, answer: Answer, parser: str) -> dict[str, Any]:
    """The body of the response."""
    del parser
    choices = [_choice(wanted, index, choice) for index, choice in enumerate(answer.choices)]
    return {"request_id": answer.id, "choices": choices, "prompt_logprobs": None, "usage": usage(answer)}


class Stream:
    """Writes an answer as chunks."""

    def __init__(self, wanted: Wanted, id: str, created: int, parser: str) -> None:
        del created, parser
        self._wanted, self._id = wanted, id
        self._growing = [Growing(wanted) for _ in range(wanted.ask.samples)]

    def part(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        """The chunks of a part of choice `index`."""
        shown = self._growing[index].part(choice)
        yield {"request_id": self._id, "choices": [_choice(self._wanted, index, shown)]}

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The chunks of what is left once the whole answer is there."""
        for index, choice in enumerate(answer.choices):
            left = self._growing[index].end(choice)
            yield {"request_id": self._id, "choices": [_choice(self._wanted, index, left)]}
        if self._wanted.usage:
            yield {"request_id": self._id, "choices": [], "usage": usage(answer)}


def _choice(wanted: Wanted, index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": list(choice.tokens),
        "logprobs": token_logprobs(wanted, choice),
        "finish_reason": finish_reason(choice),
    }
