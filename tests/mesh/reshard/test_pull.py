"""The pull transport: a trainer that serves, rollouts that come, die and come back; every byte over real sockets."""

import ctypes
import json
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import arrived as assert_arrived
from cases import bits, expected, transfers
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.mesh.reshard.fetch import PullReceiver, VersionGoneError
from podrl.mesh.reshard.ledger import WeightMismatchError
from podrl.mesh.reshard.peer import Peer, TransferTimeoutError
from podrl.mesh.reshard.serve import PullServer

HERE = "127.0.0.1"
SHAPES = {"embed": (24, 12), "layers": (3, 8, 12), "norm": (5,), "scale": (), "step": ()}


def shardings(spec, devices, specs):
    mesh = make_mesh(spec, devices)
    return {k: NamedSharding(mesh, specs.get(k, Spec())) for k in SHAPES}


def trainer(version, spec="fsdp=2,tensor=2", count=4):
    """(values, parameters on the first devices)."""
    rng = np.random.default_rng(version)
    values = {k: np.asarray(rng.standard_normal(shape), np.float32) for k, shape in SHAPES.items()}
    values["step"] = np.int32(version)
    specs = {"embed": Spec("tensor", "fsdp"), "layers": Spec(None, "fsdp", "tensor")}
    return values, jax.device_put(values, shardings(spec, jax.devices()[:count], specs))


def wanted(spec="data=2,tensor=2", count=4):
    """Shapes on the last devices."""
    specs = {"embed": Spec("tensor"), "layers": Spec(None, None, "tensor")}
    places = shardings(spec, jax.devices()[-count:], specs)
    return {
        k: jax.ShapeDtypeStruct(shape, jnp.int32 if k == "step" else jnp.bfloat16, sharding=places[k])
        for k, shape in SHAPES.items()
    }


def asks(server):
    """The channel, with nothing that JSON does not carry."""

    def ask(process, request, *, timeout):
        assert process == 0 and timeout > 0
        return json.loads(json.dumps(server.answer(json.loads(json.dumps(request)))))

    return ask


def arrived(policy, values):
    for name, array in policy.params.items():
        want = np.asarray(values[name]).astype(array.dtype)
        for shard in array.addressable_shards:
            assert (bits(shard.data) == bits(want[shard.index])).all(), name


@pytest.fixture(scope="module")
def peer():
    return Peer(HERE)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("fsdp=2,tensor=2", 4), ("data=2,tensor=2", 4)),
        (("fsdp=4", 4), ("tensor=3", 3)),
        (("data=2,fsdp=2", 4), ("", 1)),
        (("", 1), ("data=4", 4)),
    ],
)
def test_arrives_bit_for_bit(peer, source, target, bucket_bytes):
    server = PullServer(HERE)
    values, params = trainer(1, *source)
    publisher = server.publisher("all", params, target_dtype=jnp.bfloat16, bucket_bytes=bucket_bytes)
    receiver = PullReceiver("all", wanted(*target), peer, asks(server))
    assert publisher.publish(params, 1).params == {}
    policy = receiver.publish(None, 1)
    assert policy.version == 1
    arrived(policy, values)
    assert server.peer.offers == 0
    values, params = trainer(2, *source)
    publisher.publish(params, 2, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    arrived(receiver.publish(None, 2), values)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(transfers(disjoint=True))
def test_any_layout_to_any_layout(peer, case):
    leaves, before, after, dtype, bucket_bytes = case
    placed = [jax.device_put(x, s) for x, s in zip(leaves, before, strict=True)]
    target = [
        jax.ShapeDtypeStruct(x.shape, expected(x, dtype).dtype, sharding=s) for x, s in zip(leaves, after, strict=True)
    ]
    server = PullServer(HERE)
    server.publisher("all", placed, target_dtype=dtype, bucket_bytes=bucket_bytes).publish(placed, 1)
    moved = PullReceiver("all", target, peer, asks(server)).publish(None, 1).params
    assert_arrived(moved, leaves, after, dtype)


def test_nothing_compiles_and_no_weight_is_read_after_the_first_version(peer, monkeypatch, caplog):
    server = PullServer(HERE)
    values, params = trainer(1)
    publisher = server.publisher("all", params, target_dtype=jnp.bfloat16, bucket_bytes=512)
    receiver = PullReceiver("all", wanted(), peer, asks(server))
    publisher.publish(params, 1)
    receiver.publish(None, 1)
    reads, kind = [], type(params["norm"])
    original = kind.__array__
    monkeypatch.setattr(kind, "__array__", lambda self, *a, **k: (reads.append(self.shape), original(self, *a, **k))[1])
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        publisher.publish(params, 2)
        policy = receiver.publish(None, 2)
    monkeypatch.undo()
    assert not [r.message for r in caplog.records if "ompil" in r.message]
    assert set(reads) == {(4, len(SHAPES))}  # the checksums of four devices
    arrived(policy, values)


def test_versions_are_waited_for_kept_and_gone(peer):
    server = PullServer(HERE)
    values, params = trainer(1)
    publisher = server.publisher("all", params, target_dtype=jnp.bfloat16, keep=2)
    receiver = PullReceiver("all", wanted(), peer, asks(server))
    hasty = PullReceiver("all", wanted(), peer, asks(server), timeout=0.3)
    with pytest.raises(TransferTimeoutError, match=r"process 0 published nothing of 'all' within 0\.3 s"):
        hasty.publish(None, 1)
    for version in (1, 2, 3):
        publisher.publish(params, version)
    assert publisher.versions == [2, 3]
    arrived(receiver.publish(None, 2), values)
    assert receiver.publish(None, None).version == 3
    with pytest.raises(VersionGoneError, match="holds versions 2, 3 of 'all', not 1"):
        receiver.publish(None, 1)
    with pytest.raises(TransferTimeoutError, match=r"did not publish version 4 of 'all' .* it holds 2, 3"):
        hasty.publish(None, 4)


def test_a_version_somebody_is_pulling_stays(peer):
    server = PullServer(HERE)
    values, params = trainer(1)
    publisher = server.publisher("all", params, target_dtype=jnp.bfloat16, bucket_bytes=64)
    publisher.publish(params, 1)
    ask, asked = asks(server), []

    def ask_and_publish(process, request, *, timeout):
        if asked.append(request["op"]) or asked.count("offer") == 3:
            publisher.publish(trainer(2)[1], 2)
        return ask(process, request, timeout=timeout)

    receiver = PullReceiver("all", wanted(), peer, ask_and_publish)
    arrived(receiver.publish(None, 1), values)
    assert publisher.versions == [2]


def test_a_receiver_that_dies_leaves_nothing_behind(peer, monkeypatch):
    """It asked, never pulled, never came back: the offer ends, the version goes, and another receiver is served."""
    server = PullServer(HERE, lease_s=600)
    values, params = trainer(1)
    publisher = server.publisher("all", params, target_dtype=jnp.bfloat16, bucket_bytes=64)
    publisher.publish(params, 1)
    ask = asks(server)

    def dies(process, request, *, timeout):
        reply = ask(process, request, timeout=timeout)
        if request["op"] == "offer":
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        PullReceiver("all", wanted(), peer, dies).publish(None, 1)
    publisher.publish(params, 2)
    assert (server.peer.offers, publisher.versions) == (1, [1, 2])
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
    publisher.publish(params, 3)
    assert (server.peer.offers, publisher.versions) == (0, [3])
    arrived(PullReceiver("all", wanted(), peer, ask).publish(None, 3), values)


def test_a_trainer_that_comes_back(peer):
    """Another session: the receiver joins again by itself, and lost messages are sent again."""
    servers, lost = [PullServer(HERE)], []
    values, params = trainer(1)
    servers[0].publisher("all", params, target_dtype=jnp.bfloat16).publish(params, 1)

    def ask(process, request, *, timeout):
        if request["op"] == "offer" and len(lost) < 2:
            lost.append(request)
            raise TimeoutError("no reply")
        return asks(servers[-1])(process, request, timeout=timeout)

    receiver = PullReceiver("all", wanted(), peer, ask)
    arrived(receiver.publish(None, 1), values)
    assert len(lost) == 2
    values, params = trainer(2)
    servers.append(PullServer(HERE))
    servers[1].publisher("all", params, target_dtype=jnp.bfloat16).publish(params, 2)
    arrived(receiver.publish(None, 2), values)


def test_a_peer_that_does_not_serve(peer):
    """An unknown number, and an address where nobody listens: both hang in the library, both end here."""
    server = PullServer(HERE)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    arrays = peer.pull(server.peer.address, 12345, [shape])
    with pytest.raises(TransferTimeoutError, match="stage of peer: no data in time"):
        peer.wait(arrays, time.monotonic() + 0.1, "stage of peer")
    with pytest.raises(ValueError, match="not served on every interface"):
        Peer("0.0.0.0")


@pytest.mark.parametrize("lasting", [False, True])
def test_a_frozen_base_is_served_where_it_is(peer, lasting):
    server = PullServer(HERE)
    values, params = trainer(1)
    publisher = server.publisher("base", params, target_dtype=jnp.bfloat16)
    publisher.publish(params, 1, lasting=lasting)
    arrived(PullReceiver("base", wanted(), peer, asks(server)).publish(None, None), values)


def test_weights_changed_in_flight_are_refused(peer):
    """One bit flipped in the sender's memory after its checksums were taken."""
    server = PullServer(HERE)
    _, params = trainer(1)
    publisher = server.publisher("all", params, target_dtype=jnp.bfloat16)
    publisher.publish(params, 1, lasting=True)
    (shard, *_) = params["layers"].addressable_shards
    ctypes.c_uint8.from_address(shard.data.unsafe_buffer_pointer() + 3).value ^= 1 << 6
    receiver = PullReceiver("all", wanted(), peer, asks(server))
    with pytest.raises(WeightMismatchError, match=r"Version 1 arrived changed .*differ for \['layers'\]\."):
        receiver.publish(None, 1)


def test_another_model_is_refused(peer):
    server = PullServer(HERE)
    _, params = trainer(1)
    server.publisher("all", params).publish(params, 1)  # float32 on the wire
    with pytest.raises(ValueError, match=r"\['embed'\] is float32\[24, 12\] on the trainer and bfloat16\[24, 12\]"):
        PullReceiver("all", wanted(), peer, asks(server)).publish(None, 1)
    ask = asks(server)
    assert ask(0, {"op": "join", "tree": "all"}, timeout=1) == {"error": "KeyError: 'target'"}
    assert ask(0, {"op": "offer", "tree": "all", "session": "older"}, timeout=1) == {"rejoin": True}
    assert ask(0, {"tree": 3}, timeout=1) == {"wait": []}


def test_empty_tree(peer):
    server = PullServer(HERE)
    assert server.publisher("none", {}).publish({}, 3).version == 3
    assert PullReceiver("none", {}, peer, asks(server)).publish(None, 3).params == {}
