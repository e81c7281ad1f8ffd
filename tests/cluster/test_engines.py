"""Engines by name and by class: their abilities, and which engines are refused."""

import pytest

from podrl.cluster.engines import ENGINES, able, engine_class
from podrl.rollout.worker import RolloutWorker


class Plain:
    """An engine that makes whole batches and declares no abilities."""


class Telling:
    abilities = frozenset({"tells"})


def test_every_engine_that_can_be_named_is_there():
    assert {engine_class(name) for name in ENGINES} == {RolloutWorker}
    assert engine_class(Plain) is Plain


@pytest.mark.parametrize("ability", ["windows", "greedy_members", "tells"])
def test_an_engine_is_able_to_do_what_it_says(ability):
    assert able("vanilla", ability) and able(RolloutWorker, ability)
    assert not able(Plain, ability)
    assert able(Telling, ability) == (ability == "tells")
