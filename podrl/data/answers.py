"""Turns the answers of records into examples: tokens of a prompt and of the answer that is learned after it."""

from collections.abc import Sequence
from typing import NamedTuple

from podrl.data import conversation, shape
from podrl.data.config import DataConfig
from podrl.data.pipeline import Renderer
from podrl.data.stream import Limit, TooLong
from podrl.data.template import TextPart, turn
from podrl.data.tokenizer import Tokenizer
from podrl.mappings import ChatMessage, Record


class Example(NamedTuple):
    """A text, its token ids, and a mask with 1 on each token that is learned and 0 on the other tokens."""

    text: str
    tokens: Sequence[int]
    learned: Sequence[int]


def encode(parts: Sequence[TextPart], tokenizer: Tokenizer, limit: Limit) -> Example | TooLong:
    """Encodes parts as one example; each part is encoded on its own, as text that follows the part before it.

    After a part that ends the model's turn, the tokenizer's `turn_end_id` is added.

    Raises:
      ValueError: the example is longer than `limit`, and `limit` makes this an error.
    """
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


def encode_chat(parts: Sequence[TextPart], tokenizer: Tokenizer, limit: Limit) -> Example | TooLong:
    """Encodes the parts of a rendered conversation as one example: their text is encoded as a whole.

    A token with characters of two parts is learned if one of the two parts is learned.

    Raises:
      ValueError: the example is longer than `limit`, and `limit` makes this an error.
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
    messages: Sequence[ChatMessage], tokenizer: Tokenizer, limit: Limit, *, tools: object = None, first: int = 0
) -> Example | TooLong:
    """Encodes a conversation as an example in which the assistant's turns from message `first` on are learned.

    A turn whose 'weight' is 0 is not learned.

    Args:
      messages: the conversation, in a form that podrl.data.shape.turns_fault has accepted.
      tokenizer: tokenizer of the model that learns, with its chat template.
      limit: largest number of tokens of the example.
      tools: value of the record's field 'tools': schemas of functions, their JSON text, or None.
      first: index of the first message that may be learned.

    Raises:
      ValueError: the chat template cannot write the conversation (see podrl.data.conversation.parts), or the example
        is longer than `limit` and `limit` makes this an error.
    """
    return encode_chat(
        conversation.parts(tokenizer, messages, tools=shape.tools_of(tools), first=first), tokenizer, limit
    )


def of_record(
    record: Record, names: Sequence[str], render: Renderer, tokenizer: Tokenizer, limit: Limit
) -> list[Example | TooLong]:
    """Makes one example of each answer in a record: the record's prompt, then the answer.

    An example ends with the model's last turn.

    Args:
      record: record that has passed `check`.
      names: names of the fields that hold the answers.
      render: function that writes a question as a prompt.
      tokenizer: tokenizer of the model that learns.
      limit: largest number of tokens of an example.

    Raises:
      ValueError: the chat template cannot write a conversation (see podrl.data.conversation.parts), or an example is
        longer than `limit` and `limit` makes this an error.
    """
    answers = [record[name] for name in names]
    if not _has_turns(record, names) and (record.get("prompt") is not None or not render.in_turns):
        prompt = TextPart(record["prompt"]) if record.get("prompt") is not None else render.prompt(record)
        return [encode([prompt, turn(answer)], tokenizer, limit) for answer in answers]
    before = _turns_before(record, answers[0], render)
    whole = [[*before, *_as_turns(answer)] for answer in answers]
    first = len(before) or _shared(whole)
    examples = [turns(messages, tokenizer, limit, tools=record.get("tools"), first=first) for messages in whole]
    return [example if isinstance(example, TooLong) else _ended(example) for example in examples]


def check(record: Record, names: Sequence[str], data: DataConfig) -> str:
    """Returns the reason why no examples can be made of the answers in a record's fields `names`; '' for no reason."""
    before = "prompt" if record.get("prompt") is not None else data.question_field
    if not _has_turns(record, names):
        wrong = [name for name in (*names, before) if not isinstance(record.get(name), str)]
        return lacks(record, wrong[0], data) if wrong else ""
    for name in names:
        if record.get(name) is None:
            return lacks(record, name, data)
        answer = record.get(name)
        if not isinstance(answer, str) and (fault := shape.turns_fault(answer, tools=record.get("tools"))):
            return f"{name!r} must be a text or turns: {fault}"
    prompt, answers = record.get("prompt"), [_as_turns(record[name]) for name in names]
    whole = [answer[0]["role"] != "assistant" for answer in answers]
    if isinstance(prompt, list):
        if fault := shape.turns_fault(prompt):
            return f"'prompt' must be a text or turns: {fault}"
        if any(whole):
            return "the answer must begin with the assistant's turn, because 'prompt' holds the turns before it"
    elif isinstance(prompt, str) or not isinstance(record.get(before), str):
        if not all(whole) or len(names) < 2:
            return "an answer that is turns needs a 'prompt' that is turns"
        turns = [str(message.get("content")).strip() for message in answers[0][: _shared(answers)]]
        if isinstance(prompt, str) and prompt.strip() not in turns:
            return "'prompt' is none of the turns that the answers share: leave it out, or give turns there, too"
    elif any(whole):
        return f"{before!r} is asked before the answers, which must begin with the assistant's turns"
    elif data.template == "plain":
        return "the answers are turns, but data.template=plain writes none"
    first = 0 if not all(whole) else _shared(answers)
    if not all(any(map(shape.is_learned, answer[first:])) for answer in answers):
        return "each answer must have a turn of the assistant to learn" + (" that the other has not" if first else "")
    if all(whole) and any(answer[first]["role"] != "assistant" for answer in answers):
        beginnings = " and ".join(str(dict(answer[first]))[:80] for answer in answers)
        both = " and ".join(map(repr, names))
        return f"{both} must ask the same question; they differ in {beginnings} before the assistant's first turn"
    return ""


def lacks(record: Record, name: str, data: DataConfig) -> str:
    """Writes the part of an error about a record without text in field `name`, and how to name another field."""
    if record.get(name) is not None:
        return f"{name!r} is {str(record[name])[:80]!r} ({type(record[name]).__name__}), which is not text"
    keys = {data.question_field: "question_field", data.answer_field: "answer_field"}
    way = (
        f"If another field holds it, name that field in data.{keys[name]}"
        if name in keys
        else f"If another field holds it, rename it in data.sources: transforms=({{'rename': {{'FIELD': {name!r}}}}},)"
    )
    return f"{name!r} is {'null' if name in record else 'missing'}. {way}"


def _has_turns(record: Record, names: Sequence[str]) -> bool:
    return any(isinstance(record.get(name), list) for name in ("prompt", *names))


def _as_turns(answer: str | Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _turns_before(record: Record, answer: str | Sequence[ChatMessage], render: Renderer) -> Sequence[ChatMessage]:
    """Returns the turns before a record's answers; no turns if the answers are whole conversations."""
    if isinstance(record.get("prompt"), list):
        return record["prompt"]
    return [] if _as_turns(answer)[0]["role"] != "assistant" else render.turns(record)


def _shared(conversations: Sequence[Sequence[ChatMessage]]) -> int:
    """Counts the messages that all conversations have in common at their beginning; 0 for a single conversation."""
    if len(conversations) < 2:
        return 0
    shared = 0
    for messages in zip(*conversations, strict=False):
        if any(message != messages[0] for message in messages):
            break
        shared += 1
    return shared


def _ended(example: Example) -> Example:
    """Cuts an example after its last learned token, because a template may write text after the model's last turn."""
    end = max((i + 1 for i, learned in enumerate(example.learned) if learned), default=0)
    return example._replace(tokens=example.tokens[:end], learned=example.learned[:end])
