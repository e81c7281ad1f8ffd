"""The prompt that only a teacher reads: a record's prompt with a hint that is made from the record's fields."""

import re

from podrl.data import shape
from podrl.mappings import Record, TaskFields
from podrl.runtime import plain

TEACHER_PROMPT = "teacher_prompt"  # field of a prompt with the token ids that its teacher reads in place of the prompt
_SLOT = re.compile(r"\{(\w+)\}")
_QUESTION_SLOT = "prompt"  # name of the slot that stands for the text of the question


def with_hint(record: Record, fields: TaskFields, hint: str, question_field: str) -> Record:
    """Returns the record with a hint in its question: in the user's last turn, in the prompt, or in a field of its own.

    Args:
      record: record with a question (podrl.data.shape).
      fields: fields that the hint may name, as reward functions get them.
      hint: text with names of fields in braces. The hint follows the question, after an empty line. A hint with
        `{prompt}` replaces the question instead, and the question takes the place of `{prompt}`.
      question_field: name of the field with the question; shape.prompt_field says which field holds the question.

    Raises:
      ValueError: the record lacks a field that the hint names, the field holds no text, or the conversation has no
        user's turn.
    """
    name = shape.prompt_field(record, question_field)
    messages = record[name]
    if not isinstance(messages, list):
        return {**record, name: _filled(plain.text(messages), fields, hint)}
    last = max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"data.hint has no place in a conversation without a user's turn: {str(messages)[:80]!r}.")
    message = {**messages[last], "content": _filled(messages[last]["content"], fields, hint)}
    return {**record, name: [*messages[:last], message, *messages[last + 1 :]]}


def _filled(question: str, fields: TaskFields, hint: str) -> str:
    def text(slot: re.Match[str]) -> str:
        name = slot[1]
        if name == _QUESTION_SLOT:
            return question
        value = fields.get(name)
        # If several answers are right, the field is a list, and the hint names the first answer.
        value = value[0] if isinstance(value, list | tuple) and value else value
        if not shape.is_text(value):
            named = ", ".join((_QUESTION_SLOT, *fields))
            raise ValueError(
                f"data.hint names {{{name}}}, and it is {value!r} in the record {question[:80]!r}: name a field of "
                f"text that every record has, such as one of {named}."
            )
        return plain.text(value)

    filled = _SLOT.sub(text, hint)
    return filled if f"{{{_QUESTION_SLOT}}}" in hint else f"{question}\n\n{filled}"
