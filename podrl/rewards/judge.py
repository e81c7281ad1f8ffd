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

from podrl.config import Count, Finite, Natural, Positive, Workers, plural, section
from podrl.mappings import JsonObject
from podrl.runtime.service import ServiceError, ask, is_away

_TEMPLATE = (
    "You grade an answer. Question:\n{prompt}\n\nReference answer (may be empty): {answer}\n\nAnswer to grade:\n"
    "{completion}\n\nThink briefly, then end with one line 'SCORE: n', n from 0 (wrong) to {max_score} (perfect)."
)
_CRITERION = (
    "You grade an answer by one criterion and nothing else. Question:\n{prompt}\n\nReference answer (may be empty): "
    "{answer}\n\nAnswer to grade:\n{completion}\n\nCriterion: {criterion}\n\nThink briefly, then end with one line "
    "'SCORE: n', n from 0 (not met) to {max_score} (fully met)."
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
      model: name of the model at the endpoint.
      template: the question to the judge, with {prompt}, {completion}, {answer} and {max_score}, which podrl replaces.
        The reply must hold 'SCORE: n'.
      criterion_template: the question that the reward function 'rubric' asks about each criterion; it also has
        {criterion}.
      criteria: criteria of the reward function 'rubric' for records without criteria of their own.
      criteria_weights: weight of each of `criteria`; empty for 1 each. A criterion with a negative weight is a fault.
      rubric: name of the record's field with the criteria, a list of texts or of {"criterion": text, "weight": number}.
      max_score: the best score. The reward is the judge's score divided by this number.
      max_tokens: longest reply, in tokens.
      timeout_s: longest time of one request, in seconds.
      retries: number of further requests after a reply that was not understood. A judge that is busy or cannot be
        reached gets the request again, at growing intervals, until reward.deadline_s is over.
      concurrency: largest number of requests under way at once.
      key_variable: environment variable with the bearer token; '' sends no token. Reward functions do not see the
        variable.
    """

    url: str = ""
    model: str = ""
    template: str = _TEMPLATE
    criterion_template: str = _CRITERION
    criteria: tuple[str, ...] = ()
    criteria_weights: tuple[Finite, ...] = ()
    rubric: str = "rubric"
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
        if not {"{completion}", "{criterion}"} <= set(re.findall(r"\{\w+\}", self.criterion_template)):
            raise ValueError("reward.judge.criterion_template must hold {completion} and {criterion}.")
        if not self.rubric:
            raise ValueError("reward.judge.rubric='' must name a field, which records may lack.")
        if len(self.criteria_weights) not in (0, len(self.criteria)):
            raise ValueError(
                f"reward.judge.criteria_weights has {plural(len(self.criteria_weights), 'value')} for "
                f"{len(self.criteria)} in reward.judge.criteria: give one each, or none for 1 each."
            )

    def default_rubric(self) -> list[tuple[str, float]]:
        """Returns the criteria for records that have none of their own, with their weights."""
        return list(zip(self.criteria, self.criteria_weights or [1.0] * len(self.criteria), strict=True))


class JudgeError(RuntimeError):
    """The judge gave no score; the message has the last reply or error."""


def judge(
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[object],
    *,
    config: JudgeConfig,
    deadline_s: float,
) -> list[float]:
    """Asks the judge for a score of every completion, from 0 to 1.

    The calling process sends the requests itself, because the processes that run users' code do not have the judge's
    token.

    Args:
      prompts: prompt of each sample, shown to the judge.
      completions: completion of each sample, to be judged.
      answers: reference answer of each sample, shown to the judge; '' for none.
      config: settings of the judge.
      deadline_s: seconds for all completions together.

    Returns:
      One score per completion, divided by `config.max_score`.

    Raises:
      JudgeError: a completion has no score after all retries, or the endpoint refuses a request, such as for a wrong
        token or model. The error never becomes a reward of 0.
      ServiceError: a completion has no score at the deadline, mostly because the judge was busy or could not be
        reached.
    """
    shown = [
        {"prompt": prompt, "completion": completion, "answer": answer}
        for prompt, completion, answer in zip(prompts, completions, answers, strict=True)
    ]
    return _scores(config, config.template, shown, deadline_s)


def judge_by_rubric(
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[object],
    rubrics: Sequence[object],
    *,
    config: JudgeConfig,
    deadline_s: float,
) -> list[float]:
    """Asks the judge about each criterion of each completion by itself, as DR-Tulu does (arXiv 2511.19399).

    Args:
      prompts, completions, answers, config, deadline_s: arguments of `judge`.
      rubrics: criteria of each sample, in the form of `JudgeConfig.rubric`; None or an empty list takes
        `JudgeConfig.criteria`.

    Returns:
      For each completion, the weighted sum of its scores (0 to 1 each), divided by the sum of the positive weights. The
      result is at most 1; it is below 0 if faults outweigh the rest.

    Raises:
      ValueError: a record has no criterion of positive weight, or a rubric of another form.
      JudgeError, ServiceError: in the same cases as in `judge`.
    """
    criteria = [_criteria(rubric, config) for rubric in rubrics]
    shown = [
        {"prompt": prompt, "completion": completion, "answer": answer, "criterion": criterion}
        for prompt, completion, answer, own in zip(prompts, completions, answers, criteria, strict=True)
        for criterion, _ in own
    ]
    scores = iter(_scores(config, config.criterion_template, shown, deadline_s))
    return [
        sum(weight * next(scores) for _, weight in own) / sum(max(weight, 0.0) for _, weight in own) for own in criteria
    ]


def _criteria(rubric: Any, config: JudgeConfig) -> list[tuple[str, float]]:
    """Reads a record's criteria and their weights; the default rubric for a record without criteria."""
    found = []
    for one in rubric or []:
        known = {"criterion": one} if isinstance(one, str) else one if isinstance(one, Mapping) else {}
        weight = known.get("weight", 1.0)
        if not isinstance(known.get("criterion"), str) or not isinstance(weight, int | float) or not abs(weight) < 1e9:
            raise ValueError(
                f"the rubric {str(rubric)[:_SHOWN]!r} (field reward.judge.rubric={config.rubric!r}) must be a list of "
                'texts, or of {"criterion": text, "weight": number between -1e9 and 1e9}'
            )
        found.append((known["criterion"], float(weight)))
    found = found or config.default_rubric()
    if not any(weight > 0 for _, weight in found):
        raise ValueError(
            f"a record has no criterion of positive weight, neither in its field {config.rubric!r} "
            "(reward.judge.rubric) nor in reward.judge.criteria"
        )
    return found


def _scores(config: JudgeConfig, template: str, shown: Sequence[JsonObject], deadline_s: float) -> list[float]:
    end = time.monotonic() + deadline_s

    def score(one: JsonObject) -> float:
        return _score_of(config, _filled(template, {**one, "max_score": f"{config.max_score:g}"}), end)

    with ThreadPoolExecutor(config.concurrency) as threads:
        return list(threads.map(score, shown))


def _score_of(config: JudgeConfig, question: str, end: float) -> float:
    problem, requests, misunderstood = "there was no time for one", 0, 0
    while (left := end - time.monotonic()) > 0:
        requests += 1
        try:
            reply = _post(config, question, min(config.timeout_s, left))
            return _score(reply, config.max_score)
        except urllib.error.HTTPError as error:
            body = error.read().decode(errors="replace")[:_SHOWN]
            problem = f"the last one failed: HTTP {error.code} ({error.msg}): {body!r}"
            final = not is_away(error)
        except (
            OSError,
            ValueError,
            http.client.HTTPException,
        ) as error:  # the judge sent no reply, or a reply without a score
            problem = f"the last one failed: {type(error).__name__}: {error}"
            misunderstood += not is_away(error)
            final = misunderstood > config.retries
        if final:
            raise JudgeError(
                f"the judge at {config.url} (reward.judge.url) gave no score in {plural(requests, 'request')}; "
                f"{problem}"
            )
        time.sleep(
            max(min(0.25 * 2.0**requests * random.uniform(0.5, 1.0), _LONGEST_PAUSE_S, end - time.monotonic()), 0)
        )
    raise ServiceError(
        f"the judge at {config.url} (reward.judge.url) gave no score in {plural(requests, 'request')}; {problem}"
    )


def _filled(template: str, shown: JsonObject) -> str:
    """Replaces the template's names in one pass, so that braces in the judged text stay as they are."""
    return re.sub(
        r"\{(prompt|completion|answer|criterion|max_score)\}",
        lambda match: str(shown.get(match[1], match[0])),
        template,
    )


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
