"""The shape of a record: the question, as `messages`, a `prompt` or a question's field, and the answer if there is one.

Training, the Python API and podrl.generate find the question and the answer of a record by these functions.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from podrl.config import plural
from podrl.mappings import ChatMessage, Record, TaskFields, ToolSchema
from podrl.runtime import plain

QUESTION, ANSWER = "question", "answer"
PROMPTS_FILE = "prompts.json"  # file of an exported model that says how the run rendered its questions


_SPEAKERS = {"human": "user", "gpt": "assistant"} | {name: name for name in ("user", "assistant", "system", "tool")}
_TEXTS = ("text", "input_text", "output_text")  # types of content parts that hold text in OpenAI's interfaces


def normal(record: Record) -> Record:
    """Writes a record's conversations in the one form that podrl reads: turns with the texts 'role' and 'content'.

    ShareGPT's field `conversations` becomes `messages`, with the text in `system` as its first turn. In every field
    that may hold a conversation, ShareGPT's 'from' and 'value' of a turn become 'role' and 'content', and content in
    parts becomes the joined text of the parts. Other forms stay as they are, and `turns_fault` refuses them.
    """
    result = dict(record)
    if result.get("messages") is None and isinstance(result.get("conversations"), list):
        result["messages"] = result.pop("conversations")
        system = result.get("system")
        if isinstance(system, str) and system.strip():
            result["messages"] = [{"role": "system", "content": system}, *result["messages"]]
            del result["system"]
    for name in ("messages", "prompt", "completion", "chosen", "rejected"):
        if isinstance(result.get(name), list):
            result[name] = normal_turns(result[name])
    return result


def normal_turns(turns: Sequence[object]) -> list[Any]:
    """Writes the turns of a conversation in the form that podrl reads, as `normal` says."""
    return [_normal_turn(turn) if isinstance(turn, Mapping) else turn for turn in turns]


def _normal_turn(turn: ChatMessage) -> ChatMessage:
    speaker = turn.get("from")
    if turn.keys() >= {"from", "value"} and isinstance(speaker, str) and not turn.keys() & {"role", "content"}:
        others = {name: value for name, value in turn.items() if name not in ("from", "value")}
        turn = {"role": _SPEAKERS[speaker], "content": turn["value"], **others} if speaker in _SPEAKERS else turn
    content = turn.get("content")
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        return {**turn, "content": "".join(part["text"] for part in content)}
    return turn


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)


def prompt_field(record: Record, question_field: str = QUESTION) -> str:
    """Returns the name of the field that asks the model: 'messages', else 'prompt', else 'question'; '' if none exists.

    A `question_field` other than 'question' was chosen by the user: it comes before 'messages' and 'prompt'. A field
    with the value None counts only if no other field has a question.
    """
    names = ("messages", "prompt", QUESTION) if question_field == QUESTION else (question_field, "messages", "prompt")
    named = [name for name in names if name in record]
    return next((name for name in named if record[name] is not None), next(iter(named), ""))


def check(
    record: Record, place: str, question_field: str = QUESTION, *, remedy: str = "set data.question_field"
) -> None:
    """Refuses a record that asks nothing.

    Args:
      record: the record.
      place: file and line of the record, for the message.
      question_field: name of the field that holds a question.
      remedy: advice for the message on how to name another field with the question.

    Raises:
      ValueError: no field asks, or the field that asks holds no text and no turns; the message names the place, the
        field and its value.
    """
    name = prompt_field(record, question_field)
    if not name:
        raise ValueError(
            f"{place} has {', '.join(record) or 'no fields'}: it must hold {question_field!r}, 'prompt' or 'messages'. "
            f"If the question is in another field, {remedy}."
        )
    value = record[name]
    if name == "messages" or (name == "prompt" and isinstance(value, list)):
        if fault := turns_fault(value):
            raise ValueError(
                f"{place}: {name!r} must be a list of objects with the texts 'role' and 'content': {fault}."
            )
        if not conversation(record, name):
            raise ValueError(f"{place}: {name!r} holds only the assistant's turn: put a user's turn before it.")
    elif not is_text(value) or (name == "prompt" and not isinstance(value, str)):
        raise ValueError(
            f"{place}: {name!r} is {value!r} but must be text that is not blank, or (not in 'prompt') a number."
        )


def turns_fault(turns: object, *, tools: object = None) -> str:
    """Returns the first fault in the turns of a conversation; '' if there is none.

    Args:
      turns: turns as `normal_turns` returns them: a list of objects with the texts 'role' and 'content'. A turn of the
        assistant may have 'tool_calls', in the form of OpenAI's interface, and then needs no content. It may have its
        thoughts in the text 'reasoning_content', and a 'weight' of 0 if it is not to be learned.
      tools: value of the record's field 'tools', as `tools_of` reads it.
    """
    if not isinstance(turns, list) or not turns:
        return f"{str(turns)[:80]!r} is not a list of turns"
    for i, turn in enumerate(turns):
        where = f"turn {i}"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            known = isinstance(turn, Mapping) and "from" in turn
            speaker = f" (the speakers that podrl knows in 'from' are {', '.join(_SPEAKERS)})" if known else ""
            return f"{where} is {str(turn)[:80]!r}, without the text 'role'{speaker}"
        where = f"{where} ({turn['role']})"
        calls = turn.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            return f"'tool_calls' of {where} is {str(calls)[:80]!r} but calls have 'name' and 'arguments'"
        if calls and turn["role"] != "assistant":
            return f"{where} has 'tool_calls', which only the assistant's turns have"
        content = turn.get("content")
        if isinstance(content, list) and (other := [part for part in content if not _is_text_part(part)]):
            kind = other[0].get("type") if isinstance(other[0], Mapping) else other[0]
            return f"'content' of {where} has a part of type {str(kind)[:80]!r}, and podrl reads only text"
        if not isinstance(content, str) and not (content is None and calls):
            return f"'content' of {where} is {str(content)[:80]!r} and must be text"
        if turn.get("weight", 1) not in (0, 1, None):
            return f"'weight' of {where} is {str(turn['weight'])[:80]!r} and must be 0 or 1"
        for name in ("reasoning_content", "thinking", "reasoning"):
            if not isinstance(turn.get(name, ""), str | None):
                return f"{name!r} of {where} is {str(turn[name])[:80]!r} and must be text"
    try:
        tools_of(tools)
    except ValueError as error:
        return str(error)
    return ""


def is_learned(turn: ChatMessage) -> bool:
    """Returns True for a turn of the assistant, unless the turn's 'weight', a field of OpenAI's form, is 0."""
    return turn["role"] == "assistant" and turn.get("weight") != 0


def tools_of(value: object) -> Sequence[ToolSchema] | None:
    """Reads the schemas in a record's field 'tools': a list, or the JSON text of a list; None if the field is empty.

    Raises:
      ValueError: the field holds no list of schemas.
    """
    if value is None or value == "":
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("function", tool), Mapping) for tool in tools
    ):
        raise ValueError(
            f"'tools' is {str(value)[:80]!r} and must be a list of the functions' schemas, or its JSON text"
        )
    return tools


def schemas(record: Record) -> Sequence[ToolSchema] | None:
    """Returns the schemas in a record's field 'tools'; None if the field is empty or holds something else."""
    try:
        return tools_of(record.get("tools"))
    except ValueError:
        return None


def _is_call(call: object) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", {}), Mapping | str | None)
    )


def from_batches(items: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """Splits batches `{'prompts': [...], 'field': [...]}` into records: (records, number of prompts in a batch).

    If `items` are not such batches, the result is (`items`, 0).

    Raises:
      ValueError: the batches differ in size, or a field has more or fewer values than there are prompts.
    """
    if not items or not all(isinstance(item, Mapping) and "prompts" in item for item in items):
        return items, 0
    records: list[Record] = []
    for i, batch in enumerate(items):
        columns = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in batch.items()}
        size = len(columns["prompts"])
        if i and size != len(items[0]["prompts"]):
            raise ValueError(
                f"Batch {i} of the dataset has {plural(size, 'prompt')} and batch 0 has {len(items[0]['prompts'])}: a "
                "step trains on one batch, so give all batches the same size, or give a plain list of prompts."
            )
        for name, values in columns.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != size:
                raise ValueError(
                    f"Batch {i} of the dataset: {name!r} must be a list of {plural(size, 'value')}, one per prompt."
                )
        others = [name for name in columns if name != "prompts"]
        records += [
            {"prompt": prompt} | {name: columns[name][row] for name in others}
            for row, prompt in enumerate(columns["prompts"])
        ]
    return records, len(items[0]["prompts"])


def answers(record: Record, place: str, answer_field: str = ANSWER) -> bool:
    """True if a record holds an answer; None, an empty text and an empty list are not answers.

    Raises:
      ValueError: the answer is neither a text nor a finite number nor a list of these, or nothing follows its '####'.
    """
    value = record.get(answer_field)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return False
    try:
        if not all(final_answer(one) for one in plain.references(value)):
            raise ValueError("nothing follows '####'")
    except ValueError as error:
        raise ValueError(
            f"{place}: {answer_field!r} is {repr(value)[:80]}: {error}. An answer is a text or a number, or a list of "
            "answers of which each is right."
        ) from None
    return True


def without_answer(record: Record, place: str, answer_field: str = ANSWER) -> str:
    """Describes a record without an answer: its place, and the names of the fields that it has."""
    empty = f", and an empty {answer_field!r}" if answer_field in record else ""
    others = ", ".join(name for name in record if name != answer_field)
    return f"{place} lacks {answer_field!r} (it has {others}{empty})"


def conversation(record: Record, name: str) -> Sequence[ChatMessage]:
    """Returns a conversation's turns without a last turn of the assistant, because the model will write that turn."""
    turns = record[name]
    return turns[:-1] if turns[-1]["role"] == "assistant" else turns


def question(record: Record, question_field: str = QUESTION) -> str:
    """Returns the text of the question; in a conversation, the text of the last turn before the model's answer."""
    name = prompt_field(record, question_field) or "chosen"
    value = record[name]
    if isinstance(value, list):
        value = (conversation(record, name) or value)[-1].get("content", "")
    return plain.text("" if value is None else value).strip()


def same_question(record: Record, question_field: str = QUESTION) -> str:
    """Returns a text that is equal for records with the same question, in any letter case and with any white space.

    The question of a conversation is the text of all its user's turns; the instructions of a system turn do not count.
    The field may hold a value of any type: a record of answers may ask in another field.
    """
    value = record.get(prompt_field(record, question_field) or "chosen")
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, Mapping) and turn.get("role") == "user"]
        value = " ".join(str(turn.get("content")) for turn in turns) or value
    text = plain.text(value) if is_text(value) else json.dumps(value, default=str)
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def fields(record: Record, question_field: str = QUESTION, answer_field: str = ANSWER) -> TaskFields:
    """Returns the fields of a record for reward functions and environments.

    `question` is the text of the question. If the record has an answer, `solution` is the text of the answer, and
    `answer` is the part of it after '####', or all of it without '####'. If the record lists several right answers,
    `solution` and `answer` are lists. A record's own field `solution` is kept. All other fields keep their names and
    values. So do the fields of the question and the answer, unless these fields are called 'messages',
    'prompt', 'question' or 'answer'.

    Raises:
      ValueError: the answer is neither a text nor a finite number nor a list of these.
    """
    name = prompt_field(record, question_field)
    names = {"messages", "prompt", QUESTION, ANSWER}
    others = {key: value for key, value in record.items() if key not in names & {question_field, answer_field, name}}
    own = {QUESTION: question(record, question_field)}
    if not answers(record, "A record", answer_field):
        return {**others, **own}
    solution = plain.reference(record[answer_field])
    if others.get("solution") is None:
        others.pop("solution", None)
    final = final_answer(solution) if isinstance(solution, str) else [final_answer(one) for one in solution]
    return {"solution": solution, **others, **own, ANSWER: final}


def final_answer(solution: str) -> str:
    """Reads the answer of a solution: the line after the last '####', as in GSM8K, or else the whole text.

    If more than one line follows '####', it is a heading of Markdown and marks no answer.
    """
    from podrl.data import template

    _, mark, rest = solution.rpartition("####")
    return template.gsm8k_answer(solution) if mark and "\n" not in rest.strip() else solution


def is_text(value: object) -> bool:
    """True if `value` is a text that is not blank, or a finite number."""
    try:
        return bool(plain.text(value).strip())
    except ValueError:
        return False
