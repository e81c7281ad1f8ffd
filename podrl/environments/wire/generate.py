"""The dialect of /inference/v1/generate: token ids in and token ids out, as vLLM and verifiers speak it."""

from collections.abc import Iterator, Sequence

from podrl.environments.wire.fields import Fields
from podrl.environments.wire.requests import (
    Answer,
    Choice,
    ModelRequest,
    ParsedRequest,
    UnsentText,
    finish_reason,
    token_logprobs,
    usage,
)
from podrl.mappings import JsonObject


def read(body: object, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request; see wire.chat.read for arguments and errors; `parser` is ignored."""
    del parser
    fields = Fields(body)
    model, aside = fields.model(models)
    ids = fields.ids("token_ids")
    if not ids:
        raise fields.refusal("token_ids", ids, "must be a list of at least one token id")
    output = fields.streaming()
    fields.take("cache_salt")  # a label, which changes nothing
    sampling_params = fields.take("sampling_params")
    fields.end()
    params = Fields({} if sampling_params is None else sampling_params, "sampling_params")
    # With 1, vLLM returns the sampled token and the most likely token; its clients read only the sampled token.
    logprobs = params.integer("logprobs", 0, 1) is not None
    for unused in ("skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens", "detokenize"):
        params.flag(unused)  # a setting of the text, which this dialect does not return
    stop, max_new, sampling = params.stop(), params.integer("max_tokens", 1, 2**31 - 1), params.sampling()
    params.end()
    model_request = ModelRequest(ids=ids, stop=stop, max_new=max_new, aside=aside, parts=output["stream"], **sampling)
    return ParsedRequest(model_request, model, stop, logprobs=logprobs, return_ids=True, ids_as_tokens=True, **output)


def write(request: ParsedRequest, answer: Answer, parser: str) -> JsonObject:
    """Writes the body of the response."""
    del parser
    choices = [_choice(request, index, choice) for index, choice in enumerate(answer.choices)]
    return {"request_id": answer.id, "choices": choices, "prompt_logprobs": None, "usage": usage(answer)}


class AnswerStream:
    """Writes a streamed answer as chunks; see wire.chat.AnswerStream for the arguments."""

    def __init__(self, request: ParsedRequest, id: str, created: int, parser: str) -> None:
        del created, parser
        self._request, self._id, self._unsent = request, id, UnsentText(request)

    def part(self, index: int, choice: Choice) -> Iterator[JsonObject]:
        """Yields the chunks of a part of choice `index`."""
        shown = self._unsent.part(index, choice)
        yield {"request_id": self._id, "choices": [_choice(self._request, index, shown)]}

    def end(self, answer: Answer) -> Iterator[JsonObject]:
        """Yields the last chunks, with everything that `part` has not written."""
        for index, unsent in self._unsent.rest(answer):
            yield {"request_id": self._id, "choices": [_choice(self._request, index, unsent)]}
        if self._request.usage:
            yield {"request_id": self._id, "choices": [], "usage": usage(answer)}


def _choice(request: ParsedRequest, index: int, choice: Choice) -> JsonObject:
    return {
        "index": index,
        "token_ids": list(choice.tokens),
        "logprobs": token_logprobs(request, choice),
        "finish_reason": finish_reason(choice),
    }
