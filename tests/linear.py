"""Checks that a function's time is proportional to the length of its text; compares ratios, not seconds."""

import time
from collections.abc import Callable


def check_that_time_is_linear(
    parse: Callable[[str], object], make: Callable[[int], str], sizes: tuple[int, int] = (4_000, 40_000)
) -> None:
    """Compares the processor times for two texts of which one is ten times as long as the other.

    Args:
      parse: function whose time is measured.
      make: function that writes a text of about the given length.
      sizes: lengths of the two texts.

    Raises:
      AssertionError: the long text takes more than 40 times as long as the short one. A quadratic function takes 100
        times as long.
    """
    short, long = (make(size) for size in sizes)
    parse(short)
    took = [_took(parse, short), _took(parse, long)]
    assert took[1] < 40 * took[0] + 0.05, (long[:60], long[-60:], took)


def _took(parse: Callable[[str], object], text: str) -> float:
    times = []
    for _ in range(2):
        start = time.process_time()
        parse(text)
        times.append(time.process_time() - start)
    return min(times)
