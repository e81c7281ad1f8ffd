"""The page of podrl.serve: the newest requests and answers as trees of branches, with the reason for each branch."""

import array
import collections
import dataclasses
import html
import itertools
import json
from collections.abc import Mapping, Sequence

from podrl.environments.wire import chat
from podrl.environments.wire.requests import Answer, ParsedRequest, visible_text
from podrl.mappings import ChatMessage

_KEPT = 256  # largest number of requests on the page; older requests are forgotten
_SHOWN = 4000  # largest number of characters of a message; the middle of a longer message is left out
_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:1em;max-width:75em}pre{white-space:pre-wrap;margin:.2em 0}"
    "details{margin:.3em 0 .3em 1em;padding-left:.6em;border-left:2px solid #8888}small{opacity:.7}"
)


@dataclasses.dataclass(frozen=True)
class _Node:
    """An answered request.

    Attributes:
      number: number of the request, from 1.
      request: the parsed request.
      answers: the answers as messages of the assistant.
      ends: for each answer, the tokens of the prompt and the answer, 4 bytes per token.
      parent: number of the earlier request whose answer this request continues; 0 if it continues none.
      reason: reason why the request began a branch; '' if the request continues a branch.
      tokens: three numbers of tokens: in the prompt, in the part of the prompt after the continued answer, and in the
        answers.
    """

    number: int
    request: ParsedRequest
    answers: Sequence[ChatMessage]
    ends: Sequence[bytes]
    parent: int
    reason: str
    tokens: tuple[int, int, int]


class FrontPage:
    """The newest answered requests of one key."""

    def __init__(self, parser: str) -> None:
        """Begins without requests; `parser` is the format in which the model writes a tool call (env.parser)."""
        self._parser = parser
        self._nodes: collections.deque[_Node] = collections.deque(maxlen=_KEPT)
        self._numbers = itertools.count(1)

    def add(self, request: ParsedRequest, answer: Answer) -> None:
        """Adds an answered request."""
        prompt = _packed(answer.prompt_ids)
        known = [(len(end), node) for node in self._nodes for end in node.ends if prompt.startswith(end)]
        shared, before = max(known, key=lambda each: each[0], default=(0, None))
        if request.model_request.messages is None:
            answers = [{"content": visible_text(choice, request.stop)} for choice in answer.choices]
        else:
            answers = [chat.choice_message(request, answer, i, self._parser) for i in range(len(answer.choices))]
        ends = [prompt + _packed(choice.tokens) for choice in answer.choices]
        sampled = sum(len(choice.tokens) for choice in answer.choices)
        tokens = (len(answer.prompt_ids), len(answer.prompt_ids) - shared // 4, sampled)
        parent, reason = (before.number, "") if before else (0, self._branch_reason(request))
        if parent and any(node.parent == parent for node in self._nodes):
            reason = "concurrent: another request has gone on from the same answer"
        self._nodes.append(_Node(next(self._numbers), request, answers, ends, parent, reason, tokens))

    def _branch_reason(self, request: ParsedRequest) -> str:
        messages = request.model_request.messages
        if messages is None:
            return "its tokens do not continue an answer"
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        if last < 0:
            return "a new conversation"
        fingerprints = [*map(_fingerprint, messages[: last + 1])]
        for node in reversed(self._nodes):
            earlier = [*map(_fingerprint, node.request.model_request.messages or ())]
            if earlier == fingerprints[:-1] and fingerprints[-1] in map(_fingerprint, node.answers):
                if node.request.model_request.tools != request.model_request.tools:
                    return "tools: it repeats an answer to a request with other tools"
                return "template: the chat template renders an earlier answer differently from how it was sampled"
        return "history: it repeats no answer of this server"

    def html(self) -> bytes:
        """Writes the page; texts of requests and answers are shown as text."""
        children: dict[int, list[_Node]] = {}
        numbers = {node.number for node in self._nodes}
        for node in self._nodes:
            children.setdefault(node.parent if node.parent in numbers else 0, []).append(node)
        nodes = {node.number: node for node in self._nodes}
        trees = "".join(_branch_html(node, nodes, children) for node in reversed(children.get(0, [])))
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>podrl.serve</title><style>{_STYLE}</style>'
        text = f"<h1>podrl.serve</h1><p>The newest {_KEPT} answered requests, the newest branch first. "
        text += "A request stands below the answer that it goes on from. Reload the page for newer ones.</p>"
        return f"{head}{text}{trees or '<p>No request has been answered yet.</p>'}</html>".encode()


def _branch_html(node: _Node, nodes: Mapping[int, _Node], children: Mapping[int, Sequence[_Node]]) -> str:
    """Writes a branch: a request, the chain of requests that continue it, and the branches that begin at its end."""
    parts = ["<details open><summary>"]
    current: _Node | None = node
    while current is not None:
        prompt, new, sampled = current.tokens
        aside = ", aside" if current.request.model_request.aside else ""
        parts.append(f"request {current.number}{aside} <b>{html.escape(current.reason)}</b>")
        parts.append(f" <small>{prompt} tokens read, {new} of them new; {sampled} sampled</small>")
        parts.append("</summary>" if current is node else "")
        parts += [_message(*each) for each in _new(current, nodes.get(current.parent))]
        parts += [_message("assistant", message) for message in current.answers]
        after = children.get(current.number, ())
        parts += [_branch_html(other, nodes, children) for other in after if len(after) > 1]
        current = after[0] if len(after) == 1 else None
    return "".join([*parts, "</details>"])


def _new(node: _Node, before: _Node | None) -> list[tuple[str, ChatMessage]]:
    """Lists the (role, message) pairs that a request adds to the request before it."""
    request = node.request.model_request
    if request.messages is None:
        text = request.text if request.text is not None else f"{node.tokens[1]} new token ids"
        return [("prompt", {"content": text})]
    earlier = None if before is None else before.request.model_request.messages
    shown = 0 if earlier is None else len(earlier) + 1
    return [(str(message["role"]), message) for message in request.messages[shown:]]


def _message(role: str, message: ChatMessage) -> str:
    texts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        texts.append(f"calls {call['function']['name']}({call['function']['arguments']})")
    return "".join(f"<pre><b>{html.escape(role)}</b> {html.escape(_cut(text))}</pre>" for text in texts if text)


def _cut(text: str) -> str:
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} [...] {text[-half:]}"


def _fingerprint(message: ChatMessage) -> str:
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("role", "assistant"), message.get("content") or "", calls])


def _packed(tokens: Sequence[int]) -> bytes:
    return array.array("i", tokens).tobytes()
