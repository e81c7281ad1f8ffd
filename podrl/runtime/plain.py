"""Turns reference answers in a user's data into text to compare completions with; numbers keep their exact value.

Reward functions run in processes that do not import jax, so this module does not import it either.
"""

import math
from collections.abc import Sequence

_EXACT = 15  # a decimal number of at most this many significant digits is not changed by a float


class LongFloat(float):
    """A number of a JSON file that a float may only approximate.

    Attributes:
      literal: text of the number in the file.
    """

    def __new__(cls, literal: str) -> "LongFloat":
        number = super().__new__(cls, literal)
        number.literal = literal
        return number

    literal: str


def json_float(literal: str) -> float:
    """Parses a JSON number that has a fraction or an exponent; for json.loads(parse_float=...).

    Returns:
      A float, or a LongFloat if the float may differ from the written number.
    """
    value = float(literal)
    return value if len(literal) <= _EXACT and 0 < abs(value) < math.inf else LongFloat(literal)


def text(value: object) -> str:
    """Returns a text unchanged, and a number as decimal digits: 18.0 becomes '18', 0.00001 becomes '0.00001'.

    Raises:
      ValueError: the value is neither text nor a number, is not finite as a float, or rounds to 0 without being 0.
    """
    if isinstance(value, str):
        return value
    # These imports are late, because both need Python's module `numbers`: a user's script numbers.py, beside the user's
    # rewards, would replace it.
    import numbers
    from decimal import Decimal

    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        raise ValueError(f"{value!r} must be text or a number")
    if isinstance(value, numbers.Integral):
        return str(int(value))
    exact = Decimal(value.literal if isinstance(value, LongFloat) else str(value))
    if not math.isfinite(value) or (exact and not float(exact)):
        raise ValueError(
            f"{exact} must be a finite number that a float can hold, without rounding to 0: write it as text"
        )
    digits = format(exact, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return digits if exact else "0"


def references(value: object) -> list[str]:
    """Lists the reference answers of a record as stripped texts; a completion has to match any one of them.

    Args:
      value: reference answer of a record, or a list of them; each is a text or a number.

    Raises:
      ValueError: the list or an answer is empty, or `text` refuses an answer.
    """
    several = value if isinstance(value, list | tuple) else [value]
    texts = [text(one).strip() for one in several]
    if not texts or not all(texts):
        raise ValueError(f"the reference answer {value!r} is {'an empty text' if texts else 'an empty list'}")
    return texts


def reference(value: object) -> "str | Sequence[str]":
    """Returns the list of `references` if the value is a list, and one text if the value is a single answer."""
    texts = references(value)
    return texts if isinstance(value, list | tuple) else texts[0]
