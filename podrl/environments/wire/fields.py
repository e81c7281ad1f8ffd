"""Reads the fields of a client's JSON: a field that could change the answer is honoured, or refused by its name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from podrl.environments.wire.requests import ASIDE, RefusedRequest

_MAX_SAMPLES, _MAX_STOPS, _SEEDS = 128, 16, 2**63
# Labels of the client, which change nothing about the answer.
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Fields that are not served, with the values that change nothing; every other value is refused.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "priority": (0,),
}


class Fields:
    """Reads the fields of one JSON object; a field that is null counts as absent."""

    def __init__(self, body: object, within: str = "") -> None:
        """Keeps the object.

        Args:
          body: JSON object to read.
          within: name of the field that holds the object; '' for the body of the request.

        Raises:
          RefusedRequest: `body` is not an object.
        """
        self._within = f"{within}." if within else ""
        if not isinstance(body, (dict, Mapping)):  # a test for Mapping alone takes ten times as long
            raise RefusedRequest(400, "invalid_type", f"{within or 'The body'} must be an object.", within or None)
        self._unread = dict(body)

    def take(self, name: str) -> Any:
        """Reads a field of any type; None if it is absent."""
        return self._unread.pop(name, None)

    def flag(self, name: str) -> bool:
        """Reads a boolean; False if it is absent."""
        value = self._unread.pop(name, None)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refusal(name, value, "must be true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Reads a whole number from `low` to `high`; None if it is absent."""
        value = self._unread.pop(name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(name, value, f"must be a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float = math.inf, *, above: bool = False) -> float | None:
        """Reads a finite number from `low` to `high`; `above` excludes `low` itself. None if it is absent."""
        value = self._unread.pop(name, None)
        if value is None:
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low <= value <= high or (above and value == low):
            limits = f"{'above' if above else 'of at least'} {low:g}"
            if math.isfinite(high):
                limits = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise self.refusal(name, value, f"must be a number {limits}")
        return float(value)

    def text(self, name: str) -> str | None:
        """Reads a text; None if it is absent."""
        value = self._unread.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise self.refusal(name, value, "must be a text")
        return value

    def array(self, name: str) -> list[Any] | None:
        """Reads a list; None if it is absent."""
        value = self._unread.pop(name, None)
        if value is not None and not isinstance(value, list):
            raise self.refusal(name, value, "must be a list")
        return value

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Reads a list of token ids; None if it is absent."""
        value = self.array(name)
        if value is not None and not are_ids(value):
            raise self.refusal(name, value, "must be a list of token ids")
        return None if value is None else tuple(value)

    def model(self, models: Sequence[str]) -> tuple[str, bool]:
        """Reads the model's name; absent means the first of `models`.

        Returns:
          (name, True if it ends in ':aside').

        Raises:
          RefusedRequest: the name, without ':aside', is not in `models`.
        """
        name = self.text("model") or models[0]
        if (base := name.removesuffix(ASIDE)) not in models:
            why = f"There is no model {name[:80]!r}: ask for {' or '.join(models)}."
            raise RefusedRequest(404, "model_not_found", why, "model")
        return name, base != name

    def sampling(self) -> dict[str, Any]:
        """Reads the sampling settings that all dialects share; returns arguments of ModelRequest."""
        top_k = self.integer("top_k", -1, 2**31 - 1)  # vLLM's clients send -1 for off
        return {
            "samples": self.integer("n", 1, _MAX_SAMPLES) or 1,
            "seed": self.integer("seed", 0, _SEEDS - 1),
            "temperature": self.number("temperature", 0.0),
            "top_p": self.number("top_p", 0.0, 1.0, above=True),
            "top_k": None if top_k is None else max(top_k, 0),
            "min_p": self.number("min_p", 0.0, 1.0),
            "stop_ids": self.ids("stop_token_ids") or (),
        }

    def stop(self, name: str = "stop") -> tuple[str, ...]:
        """Reads the stop strings, one text or a list of texts."""
        value = self.take(name)
        texts = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise self.refusal(name, value, "must be a text or a list of texts, none of which is empty")
        if len(texts) > _MAX_STOPS:
            raise self.refusal(name, value, f"has {len(texts)} texts, and at most {_MAX_STOPS} are served")
        return tuple(texts)

    def streaming(self) -> dict[str, bool]:
        """Reads `stream` and `stream_options`; returns arguments of ParsedRequest."""
        stream, usage = self.flag("stream"), False
        if (value := self.take("stream_options")) is not None:
            options = Fields(value, "stream_options")
            usage = options.flag("include_usage")
            options.neutral("include_obfuscation", False)
            options.end()
        return {"stream": stream, "usage": usage}

    def token_ids(self) -> dict[str, bool]:
        """Reads the fields that put token ids into an answer of text; returns arguments of ParsedRequest."""
        self.neutral("skip_special_tokens", True)
        names = {"return_ids": "return_token_ids", "ids_as_tokens": "return_tokens_as_token_ids"}
        return {argument: self.flag(name) for argument, name in names.items()}

    def neutral(self, name: str, *values: object) -> None:
        """Reads a field that is not served, and refuses every value except `values`, which change nothing."""
        value = self._unread.pop(name, None)
        if value is not None and not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
        ):
            only = f": only {' or '.join(map(repr, values))} is served" if values else ""
            raise self.refusal(name, value, f"cannot be honoured{only}")

    def end(self) -> None:
        """Refuses the first field that was not read, unless it is a label or has a neutral value."""
        for name, value in [*self._unread.items()] if self._unread else ():
            if value is None:
                continue
            if name in NEUTRAL:
                self.neutral(name, *NEUTRAL[name])
            elif name not in LABELS:
                raise self.refusal(name, value, "is not a field of this endpoint: leave it out")

    def refusal(self, name: str, value: object, why: str) -> RefusedRequest:
        """Makes the refusal of a field's value; `why` follows 'name=value ' in the message."""
        name, shown = self._within + name, repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        return RefusedRequest(400, "unsupported_parameter", f"{name}={shown} {why}.", name)


def are_ids(value: Sequence[object]) -> bool:
    """Returns True if all values are whole numbers from 0 to 2**31 - 1."""
    return all(type(token) is int and 0 <= token < 2**31 for token in value)
