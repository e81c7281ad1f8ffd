"""The built-in tool `calculator`: whole numbers joined by + - *, worked out exactly."""

import re

LONGEST = 100  # largest number of characters of an expression; this also bounds the size of its value
_NUMBER, _OPERATOR = re.compile(r"\s*(-?[0-9]+)"), re.compile(r"\s*([-+*])")


# The model reads this docstring as the description of the tool, so a change of it changes prompts.
def calculator(query: str) -> str:
    """The value of whole numbers joined by + - *, such as 4821*7703.

    Args:
      query: the expression.

    Raises:
      ValueError: anything else, or an expression of more than `LONGEST` characters; in few words, as each costs a
        sample of its tokens.
    """
    if len(query) > LONGEST:
        raise ValueError(f"{len(query)} characters, at most {LONGEST}")
    text, place = query.rstrip(), 0
    terms: list[int] = []
    operator = "+"
    while number := _NUMBER.match(text, place):
        value = int(number[1])
        if operator == "*":
            terms[-1] *= value
        else:
            terms.append(-value if operator == "-" else value)
        if number.end() == len(text):
            return str(sum(terms))
        if (found := _OPERATOR.match(text, number.end())) is None:
            break
        operator, place = found[1], found.end()
    raise ValueError("not whole numbers joined by + - *")
