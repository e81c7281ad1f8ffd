"""Measures the processor time of the agents' endpoint per request: `python -m benchmarks front`."""

import argparse
import asyncio
import collections
import itertools
import json
import os
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from podrl.environments.front import Front, FrontSettings
from podrl.environments.wire.requests import Answer, Choice, ParsedRequest
from podrl.workers.process import reap
from podrl.workers.user_code import Limits

_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "population of Lisbon", "count": 3}}\n</tool_call>'
_WORDS = ("the", "tower", "of", "this", "town", "was", "built", "by", "masons", "who", "came", "over", "with", "carts")


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Measures the endpoint with clients that send their next request as soon as they have an answer.

    Every client has a key of its own. The model is a stand-in: once --open requests are open, it answers the oldest.

    Returns:
      server_cpu_ms: processor time of the endpoint's process per request, with one connection for all requests of a
        client. The run is cut into parts of --open requests, and this is the median over the parts.
      server_cpu_ms_least: the smallest value of a part, which other work on the machine disturbs least.
      closing_cpu_ms, closing_cpu_ms_least: the same two figures with a new connection for each request.
      request_bytes: length of a request's body.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks front", description=__doc__)
    parser.add_argument("--open", type=int, default=128, help="requests that are open at once, each of its own client")
    parser.add_argument("--requests", type=int, default=16, help="requests of each client, besides its first and last")
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation, each with messages of 1 to 2 kB")
    parser.add_argument("--tokens", type=int, default=128, help="sampled tokens of an answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    body, answer = _request(args.turns), _answer(args.turns, args.tokens)
    figures: dict[str, Any] = {}
    for name in ("server", "closing"):
        found = asyncio.run(_cpu_ms(args.open, args.requests, body, answer, closing=name == "closing"))
        figures |= {f"{name}_cpu_ms": statistics.median(found), f"{name}_cpu_ms_least": min(found)}
    return figures | {"request_bytes": len(body)}


class _Model:
    """Stands for the model behind the endpoint (front): answers the oldest request when enough are open.

    Attributes:
      front: the endpoint, which passes each request to this object (a podrl.environments.front.Handler).
      left: number of requests that are not answered yet.
      process: id of the endpoint's process.
      spent_s: processor time of the endpoint's process after every `most` answers, in seconds.
    """

    def __init__(self, most: int, answer: Answer) -> None:
        self.front = Front(FrontSettings(parser="hermes"), Limits(), self)
        self.left = self.process = 0
        self.spent_s: list[float] = []
        self._most, self._answer = most, answer
        self._open: collections.deque[int] = collections.deque()

    def on_request(self, number: int, episode: str, request: ParsedRequest) -> None:
        del episode, request
        self._open.append(number)
        while self._open and len(self._open) >= min(self._most, self.left):
            self.front.send_answer(self._open.popleft(), self._answer)
            self.left -= 1
            if self.left % self._most == 0:
                self.spent_s.append(_cpu_s(self.process))

    def on_disconnect(self, number: int) -> None:
        raise AssertionError(f"request {number} was dropped")

    def on_delivered(self, number: int) -> None:
        del number

    def on_failure(self, error: Exception) -> None:
        raise error


async def _cpu_ms(most: int, requests: int, body: bytes, answer: Answer, *, closing: bool) -> list[float]:
    """Measures the processor time of the endpoint's process per request.

    Returns:
      Milliseconds per request, one value for each part of `most` requests. Two further parts, the first and the last,
      do not count.
    """
    model = _Model(most, answer)
    await model.front.start()
    model.process = _children()[-1]
    try:
        address = model.front.address.removeprefix("http://").removesuffix("/v1")
        clients = [_Client(address, model.front.open(str(i)), body, closing=closing) for i in range(most)]
        model.left = most * (requests + 2)
        await asyncio.gather(*(client.ask(requests + 2) for client in clients))
        return [1e3 * (end - begin) / most for begin, end in itertools.pairwise(model.spent_s[:-1])]
    finally:
        reap(model.front.leave())


class _Client:
    """An HTTP client that sends one request many times. It uses no library of HTTP, so that it takes little time."""

    def __init__(self, address: str, key: str, body: bytes, *, closing: bool) -> None:
        self._host, _, self._port = address.partition(":")
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            f"Host: {address}",
            "Accept-Encoding: gzip, deflate",
            f"Connection: {'close' if closing else 'keep-alive'}",
            "Accept: application/json",
            "Content-Type: application/json",
            "User-Agent: AsyncOpenAI/Python 2.0.0",
            "X-Stainless-Lang: python",
            "X-Stainless-Package-Version: 2.0.0",
            "X-Stainless-OS: Linux",
            "X-Stainless-Arch: x64",
            "X-Stainless-Runtime: CPython",
            "X-Stainless-Runtime-Version: 3.12.0",
            "X-Stainless-Async: async:asyncio",
            "X-Stainless-Retry-Count: 0",
            "X-Stainless-Read-Timeout: 600",
            f"Authorization: Bearer {key}",
            f"Content-Length: {len(body)}",
        ]
        self._head, self._body, self._closing = "\r\n".join([*lines, "", ""]).encode(), body, closing
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, times: int) -> None:
        """Sends the request and reads its answer, several times."""
        for left in reversed(range(times)):
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, int(self._port), limit=1 << 20)
            reader, writer = self._streams
            writer.write(self._head)  # most clients write the head and the body one after the other
            writer.write(self._body)
            status, _, head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().partition("\r\n")
            length = int(head.partition("content-length:")[2].partition("\r\n")[0])
            content = json.loads(await reader.readexactly(length))
            assert " 200 " in status and content["choices"][0]["finish_reason"] == "tool_calls", content
            if self._closing or not left:
                writer.close()
                await writer.wait_closed()
                self._streams = None


def _request(turns: int) -> bytes:
    """Writes the request of an agent that has three tools and called one of them in each earlier turn."""
    rng = random.Random(0)
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(rng)}]
    for turn in range(turns):
        messages.append({"role": "user", "content": _text(rng)})
        if turn < turns - 1:
            function = {"name": "search", "arguments": json.dumps({"query": _text(rng)[:60], "count": 3})}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": _text(rng)})
            messages.append({"role": "assistant", "content": _text(rng)})
    properties = {
        "query": {"type": "string", "description": "The words to look for."},
        "count": {"type": "integer", "description": "The number of results."},
    }
    schema = {"type": "object", "properties": properties, "required": ["query"], "additionalProperties": False}
    functions = [
        {"name": name, "description": f"The tool to {name} documents.", "parameters": schema}
        for name in ("search", "browse", "count")
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 512, "temperature": 1.0}
    return json.dumps(body).encode()


def _text(rng: random.Random) -> str:
    """Returns a text of 1,000 to 2,000 characters."""
    length = rng.randrange(1000, 2000)
    return " ".join(rng.choices(_WORDS, k=length // 3))[:length]


def _answer(turns: int, tokens: int) -> Answer:
    """Makes an answer that calls a tool; its prompt has about as many tokens as the prompt of `_request`."""
    rng = random.Random(0)
    prompt = [rng.randrange(150_000) for _ in range(1500 * turns)]
    sampled, logprobs = prompt[:tokens], [-rng.random() for _ in range(tokens)]
    text = f"The town is Lisbon, so its population has to be looked up.\n{_CALL}"
    return Answer("0123456789abcdef01234567", 1_700_000_000, prompt, [Choice(text, sampled, logprobs, (), "eos")])


def _children() -> list[int]:
    """Lists the processes that this process started, the newest last."""
    children = pathlib.Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return sorted(int(pid) for file in children for pid in file.read_text().split())


def _cpu_s(process: int) -> float:
    """Returns the processor time that a process has used, in seconds."""
    return time.clock_gettime((~process << 3) | 2)  # the kernel's number of the clock of a process
