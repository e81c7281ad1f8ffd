"""The dialect of /podrl/reward: the reward of an earlier answer of the episode."""

from collections.abc import Sequence

from podrl.environments.wire.fields import Fields
from podrl.environments.wire.requests import Answer, ModelRequest, ParsedRequest
from podrl.mappings import JsonObject

PATH = "/podrl/reward"
_LARGEST = 1e300  # rewards of an episode are added up, and the sum must be finite


def read(body: object, models: Sequence[str], parser: str) -> ParsedRequest:
    """Parses the body of a request; see wire.chat.read for arguments and errors; `parser` is ignored."""
    del parser
    fields = Fields(body)
    answer = fields.text("request")
    if not answer:
        raise fields.refusal("request", answer, "must be the id of an answer")
    reward = fields.take("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < _LARGEST:
        raise fields.refusal("reward", reward, "must be a finite number")
    fields.end()
    return ParsedRequest(ModelRequest(reward=(answer, float(reward))), models[0])


def write(request: ParsedRequest, answer: Answer, parser: str) -> JsonObject:
    """Writes the body of the response."""
    del parser, answer
    assert request.model_request.reward is not None
    return dict(zip(("request", "reward"), request.model_request.reward, strict=True))
