"""Given answers as tokens: a prompt, and the words that are learned after it, each as a text or as turns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from podrl.data import conversation, shape
from podrl.data.chat import Message
from podrl.data.config import DataConfig
from podrl.data.pipeline import Renderer
from podrl.data.stream import Limit, TooLong
from podrl.data.template import Part, turn
from podrl.data.tokenizer import Tokenizer


class Example(NamedTuple):
    """A text, its tokens, and a mask with 1 on each token that is learned."""

    text: str
    tokens: Sequence[int]
    learned: Sequence[int]


def encode(parts: Sequence[Part], tokenizer: Tokenizer, limit: Limit) -> Example | TooLong:
    """Parts as one example, each encoded behind the one before it; the end of the model's turn is its end mark."""
    tokens, learned = [], []
    for i, part in enumerate(parts):
        ids = tokenizer.encode(part.text, start=not i and not part.rendered, behind=tokens[-1] if tokens else None)
        ids = [*ids, tokenizer.turn_end_id] if part.ends else ids
        tokens += ids
        learned += [int(part.learned)] * len(ids)
    text = "".join(part.text for part in parts)
    if len(tokens) > limit.tokens:
        return limit.exceeded(text, len(tokens))
    return Example(text, tokens, learned)


def encode_chat(parts: Sequence[Part], tokenizer: Tokenizer, limit: Limit) -> Example | TooLong:
    """Parts of a rendered conversation as one example: the text is encoded as a whole.

    A token that holds characters of two parts is learned where one of them is.
    """
    text = "".join(part.text for part in parts)
    tokens, spans = tokenizer.encode_spans(text)
    is_learned = [part.learned for part in parts for _ in part.text]
    learned = [int(any(is_learned[start:end])) for start, end in spans]
    if parts[-1].ends:
        tokens, learned = [*tokens, tokenizer.turn_end_id], [*learned, 1]
    if len(tokens) > limit.tokens:
        return limit.exceeded(text, len(tokens))
    return Example(text, tokens, learned)


def turns(
    messages: Sequence[Message], tokenizer: Tokenizer, limit: Limit, *, tools: Any = None, first: int = 0
) -> Example | TooLong:
    """A conversation as an example: the assistant's turns from message `first` on are learned.

    Raises:
      ValueError: see podrl.data.conversation.parts.
    """
    return encode_chat(
        conversation.parts(tokenizer, messages, tools=shape.tools_of(tools), first=first), tokenizer, limit
    )


def of_record(
    record: Mapping[str, Any], names: Sequence[str], render: Renderer, tokenizer: Tokenizer, limit: Limit
) -> list[Example | TooLong]:
    """Examples of a record's answers, each after the record's prompt; they end where the model's turn ends.

    Args:
      record: has passed `check`.
      names: the fields of the answers.
      render: makes a prompt of a question.
      tokenizer: of the model that learns.
      limit: tokens of an example.

    Raises:
      ValueError: see podrl.data.conversation.parts.
    """
    answers = [record[name] for name in names]
    if not _has_turns(record, names) and (record.get("prompt") is not None or not render.in_turns):
        prompt = Part(record["prompt"]) if record.get("prompt") is not None else render.prompt(record)
        return [encode([prompt, turn(answer)], tokenizer, limit) for answer in answers]
    given = _turns_before(record, answers[0], render)
    whole = [[*given, *_as_turns(answer)] for answer in answers]
    first = len(given) or _shared(whole)
    made = [turns(messages, tokenizer, limit, tools=record.get("tools"), first=first) for messages in whole]
    return [example if isinstance(example, TooLong) else _ended(example) for example in made]


def check(record: Mapping[str, Any], names: Sequence[str], data: DataConfig) -> str:
    """Says what a record lacks for examples of the answers in its fields `names`; '' where it lacks nothing."""
    before = "prompt" if record.get("prompt") is not None else data.question_field
    if not _has_turns(record, names):
        missing = [name for name in (before, *names) if not isinstance(record.get(name), str)]
        return f"{missing[0]!r} is {str(record.get(missing[0]))[:80]!r}" if missing else ""
    for name in names:
        answer = record.get(name)
        if not isinstance(answer, str) and (fault := shape.turns_fault(answer, tools=record.get("tools"))):
            return f"{name!r} must be a text or turns: {fault}"
    prompt, answers = record.get("prompt"), [_as_turns(record[name]) for name in names]
    whole = [answer[0]["role"] != "assistant" for answer in answers]
    if isinstance(prompt, list):
        if fault := shape.turns_fault(prompt):
            return f"'prompt' must be a text or turns: {fault}"
        if any(whole):
            return "the turns after those of 'prompt' must begin with the assistant's"
    elif isinstance(prompt, str) or not isinstance(record.get(before), str):
        if not all(whole) or len(names) < 2:
            return "turns of the assistant need a 'prompt' of turns before them"
        asked = [str(message.get("content")).strip() for message in answers[0][: _shared(answers)]]
        if isinstance(prompt, str) and prompt.strip() not in asked:
            return "'prompt' is none of the turns that the answers share: leave it out, or give turns there, too"
    elif any(whole):
        return f"{before!r} is asked before the answers, which must begin with the assistant's turns"
    elif data.template == "plain":
        return "data.template=plain has no turns, as the answers do"
    first = 0 if not all(whole) else _shared(answers)
    if not all(any(map(shape.is_learned, answer[first:])) for answer in answers):
        return "each answer must have a turn of the assistant to learn" + (" that the other has not" if first else "")
    if all(whole) and any(answer[first]["role"] != "assistant" for answer in answers):
        asks = " and ".join(str(dict(answer[first]))[:80] for answer in answers)
        return f"both must ask the same, and differ in {asks} before any turn of the assistant"
    return ""


def _has_turns(record: Mapping[str, Any], names: Sequence[str]) -> bool:
    return any(isinstance(record.get(name), list) for name in ("prompt", *names))


def _as_turns(answer: Any) -> Sequence[Message]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _turns_before(record: Mapping[str, Any], answer: Any, render: Renderer) -> Sequence[Message]:
    """The turns before a record's answers; none where the answers are whole conversations."""
    if isinstance(record.get("prompt"), list):
        return record["prompt"]
    return [] if _as_turns(answer)[0]["role"] != "assistant" else render.turns(record)


def _shared(conversations: Sequence[Sequence[Message]]) -> int:
    """Number of messages with which all conversations begin; 0 of a single one."""
    if len(conversations) < 2:
        return 0
    shared = 0
    for messages in zip(*conversations, strict=False):
        if any(message != messages[0] for message in messages):
            break
        shared += 1
    return shared


def _ended(example: Example) -> Example:
    """An example without what the template writes behind the end of the model's last turn."""
    end = max((i + 1 for i, learned in enumerate(example.learned) if learned), default=0)
    return example._replace(tokens=example.tokens[:end], learned=example.learned[:end])
