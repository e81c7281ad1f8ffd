"""The answer that a user wrote, as the text that completions are compared with: numbers keep their value.

Reward functions run where jax is not imported, so nothing here does.
"""

import math
from collections.abc import Sequence
from typing import Any

_EXACT = 15  # significant digits that every float holds


class LongFloat(float):
    """A number of a JSON file that a float only rounds.

    Attributes:
      written: digits of the number, as they stand in the file.
    """

    def __new__(cls, written: str) -> "LongFloat":
        made = super().__new__(cls, written)
        made.written = written
        return made

    written: str


def json_float(written: str) -> float:
    """Reads a number of a JSON file with a fraction or an exponent; for json.loads(parse_float=...)."""
    value = float(written)
    return value if len(written) <= _EXACT and 0 < abs(value) < math.inf else LongFloat(written)


def text(value: Any) -> str:
    """Writes a text or a number as text: 18.0 is '18', 0.00001 is '0.00001'.

    Raises:
      ValueError: neither text nor a number, or a number that is not finite.
    """
    if isinstance(value, str):
        return value
    # Here, because both import the module `numbers`, a name that a user's script beside its rewards may have.
    import numbers
    from decimal import Decimal

    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        raise ValueError(f"{value!r} must be text or a number")
    if isinstance(value, numbers.Integral):
        return str(int(value))
    exact = Decimal(value.written if isinstance(value, LongFloat) else str(value))
    if not math.isfinite(value) or (exact and not float(exact)):
        raise ValueError(
            f"{exact} must be a number that is finite and, unless it is 0, not smaller than every float: write it as "
            "text"
        )
    digits = format(exact, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return digits if exact else "0"


def references(value: Any) -> list[str]:
    """Lists the texts of a record's reference, each without space around it: of a list any one will do.

    Raises:
      ValueError: there is none, or one that is neither a text nor a number.
    """
    several = value if isinstance(value, list | tuple) else [value]
    found = [text(one).strip() for one in several]
    if not found or not all(found):
        raise ValueError(f"the reference answer {value!r} is {'an empty text' if found else 'an empty list'}")
    return found


def reference(value: Any) -> "str | Sequence[str]":
    """`references`, one alone as a text."""
    found = references(value)
    return found if isinstance(value, list | tuple) else found[0]
