"""The reference prompt: instructions and tags around a question; and the reader of the answer in a GSM8K solution."""

import itertools
import re
from typing import Literal, NamedTuple

from podrl.data.tokenizer import Tokenizer

REASONING_START, REASONING_END = "<reasoning>", "</reasoning>"
ANSWER_START, ANSWER_END = "<answer>", "</answer>"
TAGS = (REASONING_START, REASONING_END, ANSWER_START, ANSWER_END)
# A call of the calculator and its output, as a model and its environment write them (podrl/environments).
CALL_START, CALL_END = '<call_tool name="calculator">', "</call_tool>"
OUTPUT_START, OUTPUT_END = "<tool_output>", "</tool_output>"
# A call of the search, a document in the search's output, and a citation of the document.
SEARCH_START = '<call_tool name="snippet_search">'
SNIPPET_START, SNIPPET_END = "<snippet id=", "</snippet>"
CITE_START, CITE_END = '<cite id="', "</cite>"

SYSTEM_PROMPT = (
    "You are given a problem. Think it through step by step and write your reasoning between "
    f"{REASONING_START} and {REASONING_END}. Then write the final answer, a single number, between "
    f"{ANSWER_START} and {ANSWER_END}."
)

Form = Literal["chat", "plain"]


class TextPart(NamedTuple):
    """A stretch of text of an example. The first part of an example is its prompt; a prompt may also stand alone.

    Attributes:
      text: text as the model reads or writes it.
      learned: True if the model learns to write the text; if False, the model reads it.
      ends: True if the model learns to end its turn after the text.
      rendered: True if the chat template wrote the text, and also the start token if the template has one; if False,
        the text is plain and has no start token.
    """

    text: str
    learned: bool = False
    ends: bool = False
    rendered: bool = False


def turn(text: str) -> TextPart:
    """Makes the learned part for a whole turn of the model, or for the end of a turn."""
    return TextPart(text, learned=True, ends=True)


def answered(answer: str) -> TextPart:
    """Makes the part that ends the turn with the answer between its tags, without reasoning."""
    return turn(f"{ANSWER_START}{answer}{ANSWER_END}")


def wrap(tokenizer: Tokenizer, question: str, *, system: str = "", form: Form = "chat") -> str:
    """Wraps a question into the text of a prompt.

    Args:
      tokenizer: tokenizer whose chat template writes the turns.
      question: text of the question.
      system: instructions before the question, '' for none. They are in the user's turn, because Gemma has no system
        turn.
      form: form of the prompt: 'chat' for turns of the chat template, 'plain' for instructions and question alone, for
        models without turns.

    Raises:
      ValueError: the form is 'chat' and the tokenizer has no chat template, or the template refuses the turn.
    """
    content = user_turn(question, system)
    if form == "chat":
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return f"{content}\n"


def own_words(tokenizer: Tokenizer) -> str:
    """Returns the words that the chat template writes before a question by itself; '' for none, or without a template.

    Such words are a default system prompt, or the date. Special tokens and the marks of turns do not count: what stands
    before the second question of a conversation is the mark of a turn.
    """
    if not tokenizer.has_chat_template:
        return ""
    first, second = ({"role": "user", "content": f"Probe{i}"} for i in (1, 2))
    try:
        before = tokenizer.apply_chat_template([first], tools=()).partition("Probe1")[0]
    except ValueError:  # the template refuses a question without a system turn
        return ""
    try:
        answer = {"role": "assistant", "content": "Answer~"}  # unlike an end of words of a template
        marks = tokenizer.apply_chat_template([first, answer, second], tools=()).partition("Probe2")[0]
    except ValueError:  # the template refuses several turns
        marks = ""
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(before), reversed(marks), strict=False))
    own = before[: len(before) - len(list(shared))]
    for start, end in reversed(list(tokenizer.special_spans(own))):
        own = own[:start] + own[end:]
    return re.sub(r"^(system|developer|user)\b\s*", "", own.strip())


def user_turn(question: str, system: str = "") -> str:
    """Builds the user's turn: the instructions, if any, and the question."""
    return f"{system}\n\n{question}" if system else question


def completion(reasoning: str, answer: str) -> str:
    """Builds the completion that earns every reference reward: reasoning and answer, each in its tags."""
    return f"{REASONING_START}{reasoning}{REASONING_END}{ANSWER_START}{answer}{ANSWER_END}"


def gsm8k_answer(solution: str) -> str:
    """Extracts the text after the last `####` of a GSM8K solution; a number loses its commas: '1,200' becomes '1200'.

    Raises:
      ValueError: the solution has no `####`.
    """
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"Solution {solution[-60:]!r} has no '####' before its answer.")
    answer = answer.strip()
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer


_GROUPED = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d*)?\D*")  # thousands with commas, but not 3,4 or (1,200)
