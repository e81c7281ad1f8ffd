"""95 % intervals of means over records: Wilson's for shares, so that 7 of 7 is not certain, and of changes."""

import math
from collections.abc import Sequence

Z = 1.959964  # standard errors on either side of the mean that hold 95 % of a normal distribution
_ROUNDING = 1e-9  # a standard error that equal values may have, as 2/3 is no number of a computer
_SHARES = ("answer", "partial", "format", "pass", "majority", "pair_accuracy")


def is_share(name: str) -> bool:
    """True for the metrics of accuracies, in which 1 is every record; other units are those of reward functions."""
    return name.endswith(_SHARES) and "_reward" not in name


def share(mean: float, error: float | None, records: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share.

    Records with several samples count as many independent ones as give the same standard error; where all records have
    the same value, or there is one, the error says nothing, and each record counts once.

    Args:
      mean: mean of the records' values, from 0 to 1.
      error: standard error of the mean over records; None or NaN where it is not known.
      records: number of records, at least 1.
    """
    n, spread = float(records), mean * (1 - mean)
    if error and error > _ROUNDING and spread > 0:
        n = spread / (error**2 * (records - 1) / records)
    scale = 1 + Z**2 / n
    middle = (mean + Z**2 / (2 * n)) / scale
    half = Z / scale * math.sqrt(spread / n + Z**2 / (4 * n**2))
    return (0.0 if mean <= 0 else max(middle - half, 0.0)), (1.0 if mean >= 1 else min(middle + half, 1.0))


def mean(mean: float, error: float | None) -> tuple[float, float] | None:
    """The normal interval of a mean; None where all records have the same value, which says nothing of others."""
    known = error is not None and error > _ROUNDING * abs(mean)
    return (mean - Z * error, mean + Z * error) if error and known else None


def share_difference(value_P: Sequence[float]) -> tuple[float, float]:
    """The interval of a change of a share on the same records, from each record's change, -1 to 1.

    Agresti and Min (2005): as if two more records had been seen, one that changed either way by a half of the time.
    """
    n = len(value_P) + 2
    middle = sum(value_P) / n
    half = Z * math.sqrt(max((sum(one * one for one in value_P) + 1) / n - middle**2, 0.0) / n)
    return max(middle - half, -1.0), min(middle + half, 1.0)


def written(low_high: tuple[float, float] | None, *, percent: bool, signed: bool = False) -> str:
    """An interval in brackets, such as '[64.6, 100.0]'; '[?]' where it is not known."""
    if low_high is None:
        return "[?]"
    scale, digits, sign = (100, 1, "+" if signed else "") if percent else (1, 3, "+" if signed else "")
    return "[" + ", ".join(f"{scale * end:{sign}.{digits}f}" for end in low_high) + "]"
