"""The record of a finished episode: its requests, the model's answers or hashes of them, and its result.

A run that is started again plays the record instead of running the episode's program again. A program may behave
differently the second time, so only the record leads to the same sample. In a run with `rollout.clock='wall'`, the
model would also sample the answers under other versions of its weights. The record of such a run therefore holds the
sampled tokens and, if the run records experts, the experts of each token, which are known only once the episode has
left the engine.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from podrl.mappings import JsonObject, PackedTokens

NUMBER = -1  # number of the record in the journal; a sample's outside answers have the numbers from 0, so -1 is free
EpisodeRequest = JsonObject  # a request, as the fields of a podrl.environments.workers.EpisodeObservation


@dataclasses.dataclass(frozen=True)
class FinishedEpisode:
    """An episode from its first request to its result.

    Attributes:
      requests: the requests in their order.
      turns: `digest` of the model's turn after each request.
      result: reward, metrics, text and reason, as in a podrl.environments.workers.EpisodeEnd.
      drawn: packed token columns of the answer to each request (podrl.environments.workers.EpisodeObservation.drawn);
        empty if the model samples the same answers again.
    """

    requests: Sequence[EpisodeRequest]
    turns: Sequence[str]
    result: JsonObject
    drawn: Sequence[PackedTokens | None] = ()

    def record(self) -> JsonObject:
        """Returns the episode as JSON; messages that repeat the beginning of an earlier conversation are left out."""
        requests = [_shortened(request, self.requests[:i]) for i, request in enumerate(self.requests)]
        optional = {"drawn": list(self.drawn)} if self.drawn else {}
        return {"said": requests, "turns": list(self.turns), "result": dict(self.result), **optional}

    @classmethod
    def read(cls, record: JsonObject) -> "FinishedEpisode":
        """Reads an episode that `record` wrote."""
        requests: list[EpisodeRequest] = []
        for request in record["said"]:
            requests.append(_lengthened(request, requests))
        return cls(requests, record["turns"], record["result"], record.get("drawn", ()))


def digest(turn: JsonObject) -> str:
    """Hashes a turn of the model: its text, its tokens and the reason of its end."""
    text = json.dumps([turn["text"], turn["stop"], list(turn["tokens"])])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shortened(request: EpisodeRequest, before: Sequence[EpisodeRequest]) -> EpisodeRequest:
    """Cuts off the first messages of a request, if an earlier request begins with the same messages.

    The fields `keep` (number of these messages) and `of` (number of the earlier request) are added to restore them.
    """
    if not (chat := request.get("chat")):
        return request
    shared = [
        _shared(chat["messages"], earlier["chat"]["messages"]) if earlier.get("chat") else 0 for earlier in before
    ]
    if not any(shared):
        return request
    keep = max(shared)
    of = shared.index(keep)
    short = {**chat, "messages": chat["messages"][keep:], "of": of, "keep": keep}
    if chat["tools"] == before[of]["chat"]["tools"]:
        del short["tools"]
    return {**request, "chat": short}


def _lengthened(request: EpisodeRequest, before: Sequence[EpisodeRequest]) -> EpisodeRequest:
    if "of" not in (request.get("chat") or {}):
        return request
    chat = dict(request["chat"])
    earlier = before[chat.pop("of")]["chat"]
    messages = [*earlier["messages"][: chat.pop("keep")], *chat["messages"]]
    return {**request, "chat": {"tools": earlier["tools"], **chat, "messages": messages}}


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Counts the first messages that two conversations have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
