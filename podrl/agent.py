"""Takes tasks from podrl and returns their results, in agent programs. It needs only the standard library.

    import openai
    import podrl.agent

    def solve(task):
        client = openai.OpenAI(timeout=None, max_retries=0)  # OPENAI_BASE_URL and OPENAI_API_KEY are set for this task
        ask = {"role": "user", "content": task["prompt"]}
        answer = client.chat.completions.create(model="policy", messages=[ask])
        return float(task["fields"]["answer"] in answer.choices[0].message.content)

    podrl.agent.serve(solve)

To train with this program, set --config.env.program='python agent.py'; docs/agents.md describes the rest.
"""

import json
import os
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_OTHERS = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")  # the same endpoint, without /v1: Anthropic's clients append it


class Failure(Exception):  # noqa: N818 - a lost sample, not an error of this program
    """Raised by `solve` if a sample is lost without a mistake of `solve`. podrl counts the lost sample under `kind`."""

    def __init__(self, kind: str, why: str) -> None:
        """Keeps the arguments.

        Args:
          kind: 'environment' if something that the agent acts on, such as a sandbox, failed; 'grading' if no reward can
            be computed; 'infrastructure' if a machine or a service failed; else 'agent'.
          why: explanation.
        """
        super().__init__(why)
        self.kind = kind


def serve(solve: Callable[[dict[str, Any]], Any]) -> None:
    """Solves one task after the other until podrl closes the standard input.

    Output that `solve` prints goes to standard error. An error that `solve` raises is sent to podrl: the sample of this
    task is lost, and the next task follows.

    Args:
      solve: function that takes a task, a dictionary with the fields of podrl.Task ("prompt", "fields", "seed",
        "index", "sample", "step", "mode"). It returns the reward as a number; or a dictionary with any of "reward",
        "metrics" and "text"; or None, so that only reward functions score the sample. While it runs, the environment
        variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY hold the address and the key
        of this task's endpoint.
    """
    # Standard output carries the results, one line each. Descriptor 1 becomes a copy of standard error, so that output
    # of `solve` and of its subprocesses cannot mix with the results.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        os.environ[BASE_URL], os.environ[API_KEY] = request["base_url"], request["api_key"]
        os.environ.update(zip(_OTHERS, (request["base_url"].removesuffix("/v1"), request["api_key"]), strict=True))
        try:
            result = _fields(solve(request["task"]))
            written = json.dumps({**result, "id": request["id"]})
        except Exception as error:  # noqa: BLE001 - podrl receives the error and counts the lost sample
            kind = error.kind if isinstance(error, Failure) else "agent"
            written = json.dumps({"id": request["id"], "error": traceback.format_exc()[-4000:], "kind": kind})
        results.write(written + "\n")
        results.flush()


def reward(request: str, reward: float) -> None:
    """Rewards one answer of the model. podrl adds the rewards of a task's answers and the reward that `solve` returns.

    Args:
      request: `id` of the answer, as in `answer.id` of openai's clients.
      reward: reward of the answer, a finite number; rewards of the same answer are added up.

    Raises:
      ValueError: podrl refused the reward; for example, the answer is not trained.
    """
    address = os.environ[BASE_URL].removesuffix("/v1") + "/podrl/reward"
    headers = {"Authorization": f"Bearer {os.environ[API_KEY]}", "Content-Type": "application/json"}
    body = json.dumps({"request": request, "reward": reward}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(address, body, headers)).close()
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["message"]) from None


def _fields(result: Any) -> dict[str, object]:
    if result is None:
        return {}
    if isinstance(result, Mapping):
        if unknown := set(result) - {"reward", "metrics", "text"}:
            raise Failure("grading", f"the result has {sorted(unknown)}, but may have only reward, metrics, text")
        return dict(result)
    return {"reward": float(result)}
