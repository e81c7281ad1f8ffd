"""A host that repeats the calls of another host's session gets the same state of the device, bit for bit."""

import jax
import numpy as np
import pytest

from podrl.engine.config import Sampling
from podrl.engine.device import CALLS, Device
from podrl.engine.session import Opening, Session
from podrl.runtime.message import Message, decode, encode
from podrl.types import Policy


def sent(name, args):
    """Returns the name and the arguments of a call as another process receives them."""
    arrays = {str(i): arg for i, arg in enumerate(args) if isinstance(arg, np.ndarray)}
    plain = [None if isinstance(arg, np.ndarray) else arg for arg in args]
    arrived = decode(encode(Message({"call": name, "args": plain}, arrays)))
    return arrived.value["call"], [arrived.arrays.get(str(i), arg) for i, arg in enumerate(arrived.value["args"])]


def played(session, rng):
    """Plays more samples than the pool holds; some pause at stop tokens, are forked and get further tokens, as from a
    tool. Returns the tokens of every sample."""
    tracks, openings = [], [Opening(stop_ids=(7, 8, 9, 10), max_new=12)] * 4
    for i in range(12):
        prompt = rng.integers(6, 300, rng.integers(1, 21)).astype(np.int32)
        keys_G2 = rng.integers(0, 1 << 32, (4, 2), dtype=np.uint32)
        tracks += session.add(prompt, keys_G2, Sampling(max_new=40), openings=openings if i % 2 else ())
    paused = []
    while session.open:
        for track in session.step():
            if track.paused is not None:
                paused.append(track)
        if not session.busy or len(paused) > 10:
            for track in paused:
                tokens = rng.integers(6, 300, 9).tolist()[: session.room(track)]
                if len(tracks) < 64 and not track.stop and session.room(track):
                    tracks.append(session.fork(track, len(track.tokens)))
                    session.extend(tracks[-1], Opening(tokens[:1], stop_ids=(7, 8, 9, 10), max_new=9))
                session.extend(track, Opening(tokens, stop_ids=(7, 8, 9, 10), max_new=9))
            paused.clear()
    return [track.tokens for track in tracks]


def test_a_host_that_makes_the_told_calls_has_the_same_state(tiny, tight):
    engine, told = tight._get_engine(tiny.params), []
    params = engine.prepare(tiny.params)

    def session(broadcast):
        device = Device(engine, engine.init_state(), params, broadcast)
        return Session(device, 7, decode=str, eos_ids=(), cache_tokens=64)

    deciding = session(lambda name, args: told.append(sent(name, args)))
    tokens = played(deciding, np.random.default_rng(3))
    assert {name for name, _ in told} >= {"insert", "prefill", "generate", "spill", "restore", "share"} and set(
        CALLS
    ) >= {name for name, _ in told}
    other, emitted = Device(engine, engine.init_state(), params), []
    for name, args in told:
        result = CALLS[name](other, *args)
        emitted += [] if result is None else [jax.device_get(result)]
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(deciding.device.state), jax.tree.leaves(other.state), strict=True
    ):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes(), path
    assert sum(int(out.count_R.sum()) for out in emitted) >= deciding.stats.tokens > 0
    assert other.spilled.keys() == deciding.device.spilled.keys() == set()
    assert tokens == played(session(lambda name, args: None), np.random.default_rng(3))


def test_a_mesh_of_several_processes_needs_somebody_told(tiny, tight, monkeypatch):
    monkeypatch.setattr(tight, "several_hosts", True)
    with pytest.raises(
        ValueError, match=r"devices of other processes, and this process cannot send them its calls.*podrl.launch"
    ):
        tight.session(Policy(tiny.params, 1))
