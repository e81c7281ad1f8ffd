"""The side of an agent program: takes tasks from podrl, and gives their results. It needs the standard library alone.

    import openai
    import podrl.agent

    def solve(task):
        client = openai.OpenAI(timeout=None, max_retries=0)  # OPENAI_BASE_URL and OPENAI_API_KEY are set for this task
        ask = {"role": "user", "content": task["prompt"]}
        answer = client.chat.completions.create(model="policy", messages=[ask])
        return float(task["fields"]["answer"] in answer.choices[0].message.content)

    podrl.agent.serve(solve)

Train it with --config.env.program='python agent.py'; docs/agents.md has the rest.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_OTHERS = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")  # the same endpoint; Anthropic's clients add /v1 themselves


def serve(solve: Callable[[dict[str, Any]], Any]) -> None:
    """Solves one task after the other until podrl closes the standard input.

    What `solve` prints goes to standard error. What it raises is sent to podrl: its sample is lost, and the next task
    comes.

    Args:
      solve: gets a task, {"prompt", "fields", "seed", "index", "sample", "step", "mode"}, and returns the reward, or
        {"reward", "metrics", "text"} with any of them left out, or None for reward functions alone. While it runs,
        OPENAI_BASE_URL and OPENAI_API_KEY in the environment are those of the task, and so are ANTHROPIC_BASE_URL and
        ANTHROPIC_API_KEY.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        given = json.loads(line)
        os.environ[BASE_URL], os.environ[API_KEY] = given["base_url"], given["api_key"]
        os.environ.update(zip(_OTHERS, (given["base_url"].removesuffix("/v1"), given["api_key"]), strict=True))
        try:
            result = _fields(solve(given["task"]))
            written = json.dumps({**result, "id": given["id"]})
        except Exception:  # noqa: BLE001 - podrl counts it
            written = json.dumps({"id": given["id"], "error": traceback.format_exc()[-4000:]})
        results.write(written + "\n")
        results.flush()


def _fields(result: Any) -> dict[str, Any]:
    if result is None:
        return {}
    if isinstance(result, Mapping):
        if unknown := set(result) - {"reward", "metrics", "text"}:
            raise ValueError(f"the result has {sorted(unknown)}, and may have reward, metrics and text")
        return dict(result)
    return {"reward": float(result)}
