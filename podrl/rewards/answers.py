"""Finds the answer in a completion and compares it with a reference: one rule for rewards, accuracies and votes."""

from podrl.rewards import numbers

_OPENED, _CLOSED = "<answer>", "</answer>"


def closed_answer(completion: str) -> str | None:
    """Returns the text between the last pair of answer tags; None without a pair."""
    end = completion.rfind(_CLOSED)
    start = completion.rfind(_OPENED, 0, max(end, 0))
    return None if start < 0 else completion[start + len(_OPENED) : completion.find(_CLOSED, start)]


def last_answer(completion: str) -> str | None:
    """Returns the text in the last pair of answer tags, else the text after the last opening tag; None without an
    opening tag."""
    closed = closed_answer(completion)
    _, opened, rest = completion.rpartition(_OPENED)
    return closed if closed is not None or not opened else rest


def number_of(completion: str) -> numbers.Number | None:
    """Returns the number that a completion answers with; None if there is no answer tag, or if the answer is not a
    single number."""
    answer = last_answer(completion)
    return None if answer is None else numbers.read(answer)


def is_right(answer: str | None, truth: str) -> bool:
    """Returns True if an answer gives the number of the reference or, if the reference is not a number, its text."""
    if answer is None:
        return False
    wanted = numbers.of_reference(truth)
    if wanted is None:
        return _words(answer) == _words(truth)
    number = numbers.read(answer)
    return number is not None and number.equals(wanted)


def vote(answer: str) -> str:
    """Normalises an answer for a majority vote: '8', '8.0' and '8.' are the same vote; so are '12%' and '12'."""
    number = numbers.read(answer)
    return _words(answer) if number is None else str(number)


def _words(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
