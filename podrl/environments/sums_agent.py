"""The agent program of grpo_agents.py, `python -m podrl.environments.sums_agent`: it has a calculator of its own.

The program sends its requests with the standard library alone. With an SDK, one call of the SDK's client would replace
`_complete`.
"""

import json
import os
import urllib.request

from podrl import agent
from podrl.environments.calculator import calculator
from podrl.mappings import ChatMessage, JsonObject

_CALLS = 2  # largest number of answers that may call the calculator, for one sum
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of whole numbers joined by + - *, such as 4821*7703.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def solve(task: JsonObject) -> JsonObject:
    """Answers one sum. It returns no reward: the job's reward functions read and score the last answer."""
    messages: list[ChatMessage] = [{"role": "user", "content": task["fields"]["question"]}]
    calls_made = 0
    while True:
        reply = _complete(messages)
        calls = reply.get("tool_calls", ())
        if not calls or calls_made == _CALLS:
            return {"metrics": {"calls": calls_made}}
        calls_made += 1
        messages.append(reply)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": _called(call)} for call in calls]


def _called(call: JsonObject) -> str:
    try:
        return calculator(json.loads(call["function"]["arguments"])["query"])
    except ValueError as error:
        return f"Error: {error}"


def _complete(messages: list[ChatMessage]) -> JsonObject:
    body = json.dumps({"model": "policy", "messages": messages, "tools": [_TOOL]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ[agent.API_KEY]}"}
    request = urllib.request.Request(f"{os.environ[agent.BASE_URL]}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


if __name__ == "__main__":
    agent.serve(solve)
