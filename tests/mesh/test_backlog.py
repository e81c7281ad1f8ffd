"""Backlog bounds the number of device programs in flight."""

import jax

from podrl.mesh.backlog import Backlog


class Result:
    """Stands in for the arrays of a program in flight; it records that somebody waits for them."""

    def __init__(self, number: int, waited: list[int]):
        self._number, self._waited = number, waited

    def block_until_ready(self) -> "Result":
        self._waited.append(self._number)
        return self


def test_a_caller_waits_for_the_oldest_when_too_many_are_under_way():
    waited: list[int] = []
    backlog = Backlog(limit=2)
    for number in range(5):
        backlog.add({"metric": Result(number, waited)})
        assert waited == list(range(number - 1))


def test_it_takes_arrays():
    backlog = Backlog(limit=1)
    total = jax.numpy.zeros(4)
    for _ in range(3):
        total = total + 1
        backlog.add(total)
    assert total.tolist() == [3.0] * 4
