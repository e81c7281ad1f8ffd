"""The reference prompt: which words and tags surround a question, and where a GSM8K solution keeps its answer."""

from typing import Literal

from podrl.data.tokenizer import Tokenizer

REASONING_START, REASONING_END = "<reasoning>", "</reasoning>"
ANSWER_START, ANSWER_END = "<answer>", "</answer>"

SYSTEM_PROMPT = (
    "You are given a problem. Think it through step by step and write your reasoning between "
    f"{REASONING_START} and {REASONING_END}. Then write the final answer, a single number, between "
    f"{ANSWER_START} and {ANSWER_END}."
)

Form = Literal["chat", "plain"]


def wrap(tokenizer: Tokenizer, question: str, *, system: str = "", form: Form = "chat") -> str:
    """The text of a prompt, start token included where the model has one.

    Args:
      tokenizer: its chat template forms the turns.
      question: the task.
      system: instructions before the question, in the user's turn as Gemma has no system turn; '' for none.
      form: 'chat' for the model's turns, 'plain' for instructions and question alone (models without turns).
    """
    content = user_turn(question, system)
    if form == "chat":
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return f"{tokenizer.bos_token}{content}\n"


def user_turn(question: str, system: str = "") -> str:
    """What the user says: the instructions, where there are any, and the question."""
    return f"{system}\n\n{question}" if system else question


def completion(reasoning: str, answer: str) -> str:
    """The completion that earns every reference reward."""
    return f"{REASONING_START}{reasoning}{REASONING_END}{ANSWER_START}{answer}{ANSWER_END}"


def gsm8k_answer(solution: str) -> str:
    """The number after `####` in a GSM8K solution, without thousands separators: '1,200' becomes '1200'.

    Raises:
      ValueError: the solution has no `####`.
    """
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"Solution {solution[-60:]!r} has no '####' before its answer.")
    return answer.strip().replace(",", "")
