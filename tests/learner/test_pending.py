"""Batches in flight survive a checkpoint exactly."""

import dataclasses
import json

import numpy as np

from podrl.learner import pending
from podrl.types import Experience, Prompts, Rollouts


def _experience(seed: int) -> Experience:
    rng = np.random.default_rng(seed)
    prompts = Prompts(
        tokens_PT=rng.integers(0, 9, (2, 5)).astype(np.int32),
        length_P=np.array([3, 5], np.int32),
        index_P=np.array([4, 5], np.int64),
        text=["a é", "b"],
        fields={"answer": ["1", "2"], "level": [1, 2]},
        data_state=b'{"next": 6}',
    )
    rollouts = Rollouts(
        prompts=prompts,
        tokens_BT=rng.integers(0, 9, (4, 8)).astype(np.int32),
        length_B=np.array([8, 7, 6, 8], np.int32),
        mask_BT=rng.integers(0, 2, (4, 8)).astype(np.float32),
        logprob_BT=rng.normal(size=(4, 8)).astype(np.float32),
        raw_logprob_BT=rng.normal(size=(4, 8)).astype(np.float32),
        version_BT=np.full((4, 8), 3, np.int32),
        stop_B=np.array([0, 1, 0, 2], np.int32),
        completions=["x", "y", "z", ""],
        seconds=0.25,
    )
    return Experience(rollouts, rng.normal(size=(3, 4)), rng.normal(size=4), np.zeros(4), 0.5, {"x": 1.0})


def _same(a, b):
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def test_round_trip_through_json_and_arrays():
    batches = [_experience(0), _experience(1)]
    host, arrays = pending.dump(batches)
    loaded = pending.load(json.loads(json.dumps(host)), arrays)
    assert len(loaded) == 2 and all(_same(a, b) for a, b in zip(batches, loaded, strict=True))


def test_nothing_in_flight():
    host, arrays = pending.dump([])
    assert pending.load(host, arrays) == []
