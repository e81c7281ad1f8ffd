"""A language model as judge: asks an OpenAI-compatible endpoint for a score of every completion."""

import dataclasses
import functools
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_ASK = (
    "You grade an answer. Question:\n{prompt}\n\nReference answer (may be empty): {answer}\n\nAnswer to grade:\n"
    "{completion}\n\nThink briefly, then end with one line 'SCORE: n', n from 0 (wrong) to {max_score} (perfect)."
)
_SCORE = re.compile(r"SCORE:\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_AGAIN = (408, 409, 425, 429)  # and every 5xx: worth another try
_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Who judges, and how it is asked.

    Attributes:
      url: base of the endpoint, such as 'http://host:8000/v1'; requests go to url + '/chat/completions'.
      model: name of the model there.
      template: the question, with {prompt}, {completion}, {answer} and {max_score}; the reply must hold 'SCORE: n'.
      max_score: the best score; rewards are the score divided by it.
      max_tokens: of the reply.
      timeout_s: seconds for one request.
      retries: further requests after one that failed or was not understood.
      concurrency: requests under way at once.
      key_variable: environment variable with the bearer token; '' sends none.
    """

    url: str = ""
    model: str = ""
    template: str = _ASK
    max_score: float = 10.0
    max_tokens: int = 512
    timeout_s: float = 20.0
    retries: int = 3
    concurrency: int = 8
    key_variable: str = ""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"reward.judge.url={self.url!r} must start with http:// or https://.")
        if "{completion}" not in self.template:
            raise ValueError("reward.judge.template must hold {completion}, the text to be graded.")
        if not (self.max_score > 0 and self.timeout_s > 0) or self.retries < 0 or self.concurrency < 1:
            raise ValueError(
                f"reward.judge.max_score={self.max_score} and timeout_s={self.timeout_s} must be above 0, "
                f"retries={self.retries} at least 0, concurrency={self.concurrency} at least 1."
            )


class JudgeError(RuntimeError):
    """The judge gave no score; the message says what it gave."""


def judge(prompts: Sequence[str], completions: Sequence[str], *, judge_settings: str, **fields: Any) -> list[float]:
    """The judge's score of every completion, from 0 to 1.

    Args:
      prompts, completions: what is judged.
      judge_settings: a JudgeConfig as JSON.
      fields: `answer`, where there is one, is shown to the judge.

    Raises:
      JudgeError: no score for one of them after all retries. It never becomes a reward of 0.
    """
    config = JudgeConfig(**json.loads(judge_settings))
    answers = fields.get("answer") or [""] * len(prompts)
    ask = functools.partial(_ask, config)
    with ThreadPoolExecutor(config.concurrency) as threads:
        return list(threads.map(ask, prompts, completions, answers))


def _ask(config: JudgeConfig, prompt: str, completion: str, answer: Any) -> float:
    shown = {"prompt": prompt, "completion": completion, "answer": answer, "max_score": f"{config.max_score:g}"}
    problem = ""
    for attempt in range(config.retries + 1):
        if attempt:
            time.sleep(min(0.25 * 2.0**attempt, 5.0) * random.uniform(0.5, 1.0))
        try:
            reply = _post(config, _filled(config.template, shown))
            return _score(reply, config.max_score)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            problem = f"HTTP {error.code}: {text[:_SHOWN]!r}"
            if error.code not in _AGAIN and error.code < 500:
                break
        except (OSError, ValueError) as error:  # no connection, no reply in time, or one that is not understood
            problem = f"{type(error).__name__}: {error}"
    raise JudgeError(
        f"the judge at {config.url} (reward.judge.url) gave no score after {attempt + 1} requests, last {problem}"
    )


def _filled(template: str, shown: Mapping[str, Any]) -> str:
    """The template with its names replaced once; braces in what is judged stay as they are."""
    return re.sub(r"\{(prompt|completion|answer|max_score)\}", lambda match: str(shown[match[1]]), template)


def _post(config: JudgeConfig, question: str) -> str:
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.0,
        "max_tokens": config.max_tokens,
    }
    headers = {"Content-Type": "application/json"}
    if config.key_variable:
        headers["Authorization"] = f"Bearer {os.environ.get(config.key_variable, '')}"
    url = config.url.rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=config.timeout_s) as response:
        reply = json.loads(response.read())
    try:
        return str(reply["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the reply {str(reply)[:_SHOWN]!r} has no choices[0].message.content") from error


def _score(reply: str, max_score: float) -> float:
    found = _SCORE.findall(reply)
    if not found:
        raise ValueError(f"the reply {reply[-_SHOWN:]!r} has no line 'SCORE: n'")
    score = float(found[-1])
    if not 0 <= score <= max_score:
        raise ValueError(f"the score {score:g} is not between 0 and {max_score:g}")
    return score / max_score
