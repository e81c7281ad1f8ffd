"""A language model as judge: asks an OpenAI-compatible endpoint for a score of every completion."""

import dataclasses
import http.client
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

from podrl.config import Count, Natural, Positive, Workers, section
from podrl.runtime.service import ServiceError, ask, is_away

_ASK = (
    "You grade an answer. Question:\n{prompt}\n\nReference answer (may be empty): {answer}\n\nAnswer to grade:\n"
    "{completion}\n\nThink briefly, then end with one line 'SCORE: n', n from 0 (wrong) to {max_score} (perfect)."
)
_SCORE = re.compile(r"SCORE:\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_SHOWN = 200
_LONGEST_PAUSE_S = 5.0


@section("reward.judge")
@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Settings of the judge: address, model, prompt and deadlines.

    Attributes:
      url: base of the endpoint, such as 'http://host:8000/v1'; requests go to url + '/chat/completions'.
      model: name of the model there.
      template: the question, with {prompt}, {completion}, {answer} and {max_score}; the reply must hold 'SCORE: n'.
      max_score: the best score; rewards are the score divided by it.
      max_tokens: of the reply.
      timeout_s: seconds for one request.
      retries: further requests after a reply that was not understood. A judge that is away or busy is asked again, more
        and more seldom, until reward.deadline_s is over.
      concurrency: requests under way at once.
      key_variable: environment variable with the bearer token; '' sends none. Reward functions do not see it.
    """

    url: str = ""
    model: str = ""
    template: str = _ASK
    max_score: Positive = 10.0
    max_tokens: Count = 512
    timeout_s: Positive = 20.0
    retries: Natural = 3
    concurrency: Workers = 8
    key_variable: str = ""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"reward.judge.url={self.url!r} must start with http:// or https://.")
        if "{completion}" not in self.template:
            raise ValueError("reward.judge.template must hold {completion}, the text to be graded.")


class JudgeError(RuntimeError):
    """The judge gave no score; the message quotes its reply."""


def judge(
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[Any],
    *,
    config: JudgeConfig,
    deadline_s: float,
) -> list[float]:
    """Asks the judge for a score of every completion, from 0 to 1.

    It runs in the process that trains, which alone holds the judge's token, and never in one with code of users.

    Args:
      prompts, completions: what is judged.
      answers: reference answers, shown to the judge.
      config: the judge.
      deadline_s: seconds for all of them.

    Raises:
      JudgeError: no score for one of them after all retries. It never becomes a reward of 0.
      ServiceError: the judge was away for as long as there was time.
    """
    end = time.monotonic() + deadline_s

    def score(prompt: str, completion: str, answer: Any) -> float:
        return _score_of(config, prompt, completion, answer, end)

    with ThreadPoolExecutor(config.concurrency) as threads:
        return list(threads.map(score, prompts, completions, answers))


def _score_of(config: JudgeConfig, prompt: str, completion: str, answer: Any, end: float) -> float:
    shown = {"prompt": prompt, "completion": completion, "answer": answer, "max_score": f"{config.max_score:g}"}
    problem, asked, misunderstood = "there was no time to ask", 0, 0
    while (left := end - time.monotonic()) > 0:
        asked += 1
        try:
            reply = _post(config, _filled(config.template, shown), min(config.timeout_s, left))
            return _score(reply, config.max_score)
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code} ({error.msg}): {error.read().decode(errors='replace')[:_SHOWN]!r}"
            final = not is_away(error)
        except (
            OSError,
            ValueError,
            http.client.HTTPException,
        ) as error:  # no reply, or not understood
            problem = f"{type(error).__name__}: {error}"
            misunderstood += not is_away(error)
            final = misunderstood > config.retries
        if final:
            raise JudgeError(
                f"the judge at {config.url} (reward.judge.url) gave no score after {asked} requests, last {problem}"
            )
        time.sleep(max(min(0.25 * 2.0**asked * random.uniform(0.5, 1.0), _LONGEST_PAUSE_S, end - time.monotonic()), 0))
    raise ServiceError(f"the judge at {config.url} (reward.judge.url), asked {asked} times, last {problem}")


def _filled(template: str, shown: Mapping[str, Any]) -> str:
    """Fills the template's names once; braces in the judged text stay as they are."""
    return re.sub(r"\{(prompt|completion|answer|max_score)\}", lambda match: str(shown[match[1]]), template)


def _post(config: JudgeConfig, question: str, timeout_s: float) -> str:
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
    reply = json.loads(ask(request, timeout_s=timeout_s))
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
