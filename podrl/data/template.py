"""The reference prompt: words and tags around a question; and the answer in a GSM8K solution."""

import re
from typing import Literal, NamedTuple

from podrl.data.tokenizer import Tokenizer

REASONING_START, REASONING_END = "<reasoning>", "</reasoning>"
ANSWER_START, ANSWER_END = "<answer>", "</answer>"
TAGS = (REASONING_START, REASONING_END, ANSWER_START, ANSWER_END)
# A call of the calculator and its output, as a model and its environment write them (podrl/environments).
CALL_START, CALL_END = '<call_tool name="calculator">', "</call_tool>"
OUTPUT_START, OUTPUT_END = "<tool_output>", "</tool_output>"

SYSTEM_PROMPT = (
    "You are given a problem. Think it through step by step and write your reasoning between "
    f"{REASONING_START} and {REASONING_END}. Then write the final answer, a single number, between "
    f"{ANSWER_START} and {ANSWER_END}."
)

Form = Literal["chat", "plain"]


class Part(NamedTuple):
    """A stretch of an example that is learned from; the first is a prompt, which may stand alone.

    Attributes:
      text: as the model reads or writes it.
      learned: the model is to write it; else it is given.
      ends: the model is to end its turn behind it.
      rendered: the chat template wrote it, so its start token, if it has one, is in the text; else it is plain text.
    """

    text: str
    learned: bool = False
    ends: bool = False
    rendered: bool = False


def turn(text: str) -> Part:
    """A whole turn of the model, or the end of one, to be learned."""
    return Part(text, learned=True, ends=True)


def answered(answer: str) -> Part:
    """The answer alone between its tags, which ends the turn."""
    return turn(f"{ANSWER_START}{answer}{ANSWER_END}")


def wrap(tokenizer: Tokenizer, question: str, *, system: str = "", form: Form = "chat") -> str:
    """Wraps a turn into the text of a prompt.

    Args:
      tokenizer: its chat template forms the turns.
      question: the task.
      system: instructions before the question, in the user's turn as Gemma has no system turn; '' for none.
      form: 'chat' for the model's turns, 'plain' for instructions and question alone (models without turns).
    """
    content = user_turn(question, system)
    if form == "chat":
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return f"{content}\n"


def user_turn(question: str, system: str = "") -> str:
    """Builds the user's turn: the instructions, if any, and the question."""
    return f"{system}\n\n{question}" if system else question


def completion(reasoning: str, answer: str) -> str:
    """Builds the completion that earns every reference reward."""
    return f"{REASONING_START}{reasoning}{REASONING_END}{ANSWER_START}{answer}{ANSWER_END}"


def gsm8k_answer(solution: str) -> str:
    """Extracts what follows `####` in a GSM8K solution, a number without thousands separators: '1,200' becomes '1200'.

    Raises:
      ValueError: the solution has no `####`.
    """
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"Solution {solution[-60:]!r} has no '####' before its answer.")
    answer = answer.strip()
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer


_GROUPED = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d*)?\D*")  # 3,4 or (1,200) are no such number
