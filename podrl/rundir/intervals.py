"""95 % intervals of means over records and of changes of means; Wilson's intervals for shares.

Shares have Wilson's interval, because with the normal interval a share of 7 in 7 records would look certain.
"""

import math
from collections.abc import Sequence

Z = 1.959964  # 95 % of a normal distribution lie within this number of standard errors of the mean
_ROUNDING = 1e-9  # the standard error of equal values may reach this, because floats round values such as 2/3
_SHARES = ("answer", "partial", "format", "pass", "majority", "pair_accuracy")


def is_share(name: str) -> bool:
    """Returns True if a metric is a share of the records, from 0 to 1; other metrics have a reward function's unit."""
    return name.endswith(_SHARES) and "_reward" not in name


def share(mean: float, error: float | None, records: float) -> tuple[float, float]:
    """Returns Wilson's score interval (1927) of a share, (low, high) within [0, 1].

    If records have several samples each, the interval is computed for the number of independent records that would give
    the same standard error. If all records have the same value, or there is only one record, the error says nothing
    about this number, and each record counts as independent.

    Args:
      mean: mean of the records' values, from 0 to 1.
      error: standard error of the mean over records; None or NaN if not known.
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
    """Returns the normal interval of a mean; None if the error is not known, or if
    all records have the same value, which shows no spread."""
    varies = error is not None and error > _ROUNDING * abs(mean)
    return (mean - Z * error, mean + Z * error) if error and varies else None


def share_difference(value_P: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a share's change between two evaluations of the same records: (low, high)
    within [-1, 1].

    Agresti and Min (2005): computed as if there were two more records, one without a change, and one that counts half
    as a change of +1 and half as a change of -1.

    Args:
      value_P: change of each record's value, from -1 to 1.
    """
    n = len(value_P) + 2
    middle = sum(value_P) / n
    half = Z * math.sqrt(max((sum(one * one for one in value_P) + 1) / n - middle**2, 0.0) / n)
    return max(middle - half, -1.0), min(middle + half, 1.0)


def format_interval(low_high: tuple[float, float] | None, *, percent: bool, signed: bool = False) -> str:
    """Writes an interval after the number that it belongs to, such as ' [64.6, 100.0]'; '' if there is none."""
    if low_high is None:
        return ""
    scale, digits, sign = (100, 1, "+" if signed else "") if percent else (1, 3, "+" if signed else "")
    return " [" + ", ".join(f"{scale * end:{sign}.{digits}f}" for end in low_high) + "]"
