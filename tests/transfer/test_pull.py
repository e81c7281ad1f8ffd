"""The pull transport over real sockets: a trainer serves weights; receivers join, die and return."""

import ctypes
import itertools
import logging
import math
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
from podrl.offload import on_host
from podrl.runtime.channel import Channel, ChannelError, LateError
from podrl.runtime.message import Message
from podrl.transfer.pull.fetch import PullReceiver, TransferTimeoutError, VersionGoneError
from podrl.transfer.pull.serve import PullServer
from podrl.transfer.verify import WeightMismatchError

SHAPES = {"embed": (24, 12), "layers": (3, 8, 12), "norm": (5,), "scale": (), "step": ()}


def shardings(spec, devices, specs):
    mesh = make_mesh(spec, devices)
    return {k: NamedSharding(mesh, specs.get(k, Spec())) for k in SHAPES}


def trainer(version, spec="fsdp=2,tensor=2", count=4):
    """Makes weights that depend on `version`; returns them as numpy arrays, and sharded over the first `count`
    devices."""
    rng = np.random.default_rng(version)
    values = {k: np.asarray(rng.standard_normal(shape), np.float32) for k, shape in SHAPES.items()}
    values["step"] = np.int32(version)
    specs = {"embed": Spec("tensor", "fsdp"), "layers": Spec(None, "fsdp", "tensor")}
    return values, jax.device_put(values, shardings(spec, jax.devices()[:count], specs))


def wanted(spec="data=2,tensor=2", count=4):
    """Returns the shapes, dtypes and shardings that a receiver wants, on the last `count` devices."""
    specs = {"embed": Spec("tensor"), "layers": Spec(None, None, "tensor")}
    places = shardings(spec, jax.devices()[-count:], specs)
    return {
        k: jax.ShapeDtypeStruct(shape, jnp.int32 if k == "step" else jnp.bfloat16, sharding=places[k])
        for k, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def asks():
    """Returns a function that takes a server and returns the function by which a receiver sends requests to it.

    The requests go over a channel between two endpoints.
    """
    served, asking = Channel("trainer", secret="s3cret"), Channel("rollout", secret="s3cret", threads=2)
    numbers = itertools.count()

    def over(server):
        name = f"pull {next(numbers)}"
        served.serve(name, server.answer)

        def ask(process, request):
            assert process == 0
            return asking.request(served.address, "call", name, Message(request), lane=next(numbers) % 3)

        return ask

    yield over
    served.close()
    asking.close()


def arrived(policy, values):
    for name, array in policy.params.items():
        want = np.asarray(values[name]).astype(array.dtype)
        for shard in array.addressable_shards:
            assert (bits(shard.data) == bits(want[shard.index])).all(), name


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
def test_arrives_bit_for_bit(asks, source, target, bucket_bytes):
    server = PullServer()
    values, params = trainer(1, *source)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16, bucket_bytes=bucket_bytes)
    receiver = PullReceiver("all", wanted(*target), asks(server))
    tree.offer(params, 1)
    policy = receiver.receive(1)
    assert policy.version == 1
    arrived(policy, values)
    values, params = trainer(2, *source)
    tree.offer(params, 2, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    arrived(receiver.receive(2), values)


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(transfers(disjoint=True))
def test_any_layout_to_any_layout(asks, case):
    leaves, before, after, dtype, bucket_bytes = case
    placed = [jax.device_put(x, s) for x, s in zip(leaves, before, strict=True)]
    target = [
        jax.ShapeDtypeStruct(x.shape, expected(x, dtype).dtype, sharding=s) for x, s in zip(leaves, after, strict=True)
    ]
    server = PullServer()
    server.serve("all", placed, target_dtype=dtype, bucket_bytes=bucket_bytes).offer(placed, 1)
    moved = PullReceiver("all", target, asks(server)).receive(1).params
    assert_arrived(moved, leaves, after, dtype)


def test_weights_in_the_memory_of_the_host_are_pulled_from_there(asks):
    server = PullServer()
    values, params = trainer(1)
    waiting = jax.device_put(params, jax.tree.map(lambda x: on_host(x.sharding), params))
    tree = server.serve("all", waiting, target_dtype=jnp.bfloat16, bucket_bytes=512)
    tree.offer(waiting, 1, lasting=True)
    policy = PullReceiver("all", wanted(), asks(server)).receive(1)
    arrived(policy, values)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(policy.params)} == {"device"}


def test_nothing_compiles_after_the_first_version_and_every_weight_is_read_once(asks, monkeypatch, caplog):
    server = PullServer()
    values, params = trainer(1)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16, bucket_bytes=512)
    receiver = PullReceiver("all", wanted(), asks(server))
    tree.offer(params, 1)
    receiver.receive(1)
    reads, kind = [], type(params["norm"])
    original = kind.__array__
    monkeypatch.setattr(kind, "__array__", lambda self, *a, **k: (reads.append(self.shape), original(self, *a, **k))[1])
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        tree.offer(params, 2)
        policy = receiver.receive(2)
    monkeypatch.undo()
    assert not [r.message for r in caplog.records if "ompil" in r.message]
    # Sender and receiver each read the checksums of their four devices. The sender reads every box once, because bytes
    # for another cluster go through the host.
    sums = (4, len(SHAPES))
    assert reads.count(sums) == 2
    assert sum(math.prod(shape) for shape in reads if shape != sums) == sum(map(math.prod, SHAPES.values()))
    arrived(policy, values)


def test_versions_are_waited_for_kept_and_gone(asks):
    server = PullServer()
    values, params = trainer(1)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16, keep=2)
    receiver = PullReceiver("all", wanted(), asks(server))
    hasty = PullReceiver("all", wanted(), asks(server), timeout=1.0)
    with pytest.raises(
        TransferTimeoutError, match=r"did not offer version 0 or later of 'all' within 1 s; it holds none"
    ):
        hasty.receive(1)
    for version in (1, 2, 3):
        tree.offer(params, version)
    assert tree.versions == [2, 3]
    arrived(receiver.receive(2), values)
    assert receiver.receive(None).version == 3
    with pytest.raises(VersionGoneError, match="holds versions 2, 3 of 'all', not 1"):
        receiver.receive(1)
    for version in (1, 3):  # version 3 ends the wait for 1, too
        receiver.await_version(version)
    for late in (hasty.receive, hasty.await_version):
        with pytest.raises(TransferTimeoutError, match=r"did not offer version 4 of 'all' .* it holds 2, 3"):
            late(4)


def test_a_trainer_that_has_nothing_yet_and_answers_late_is_told_by_what_it_said(asks):
    """The receiver's last request before the deadline gets no answer; the error quotes the answer to the first
    request."""
    server, questions = PullServer(), []
    server.serve("all", trainer(1)[1], target_dtype=jnp.bfloat16)
    ask = asks(server)

    class Never:
        def wait(self, deadline_s, what):
            raise LateError(f"No answer within {deadline_s:g} s from {what}.")

    def once(process, request):
        questions.append(request["op"])
        return ask(process, request) if len(questions) == 1 else Never()

    with pytest.raises(TransferTimeoutError, match=r"did not offer version 0 or later of 'all' .* it holds none"):
        PullReceiver("all", wanted(), once).receive(1)
    assert questions == ["join", "join"]


def test_a_version_that_is_held_stays_beside_the_newest_until_another_is(asks):
    server = PullServer()
    values, params = trainer(1)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16, keep=2)
    tree.offer(params, 1)
    tree.hold(1)
    for version in (2, 3, 4):
        tree.offer(trainer(version)[1], version)
    assert tree.versions == [1, 3, 4]
    arrived(PullReceiver("all", wanted(), asks(server)).receive(1), values)
    tree.hold(4)
    for version in (5, 6, 7):
        tree.offer(params, version)
    assert tree.versions == [4, 6, 7]
    with pytest.raises(ValueError, match=r"Version 5 cannot be held: there are \[4, 6, 7\]"):
        tree.hold(5)


def test_no_more_versions_are_held_while_one_is_copied_than_afterwards(monkeypatch):
    tree = PullServer().serve("all", trainer(1)[1], target_dtype=jnp.bfloat16, keep=2)
    copy, beside = tree._copy, []
    monkeypatch.setattr(tree, "_copy", lambda leaves: beside.append(list(tree.versions)) or copy(leaves))
    for version in (1, 2, 3, 3, 4):
        tree.offer(trainer(version)[1], version)
    assert beside == [[], [1], [2], [2, 3], [3]] and tree.versions == [3, 4]


def test_a_version_somebody_is_pulling_stays(asks):
    server = PullServer()
    values, params = trainer(1)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16, bucket_bytes=64)
    tree.offer(params, 1)
    ask, asked = asks(server), []

    def ask_and_offer(process, request):
        if asked.append(request["op"]) or asked.count("bucket") == 6:
            tree.offer(trainer(2)[1], 2)  # one bucket has arrived, four are in flight
        return ask(process, request)

    receiver = PullReceiver("all", wanted(), ask_and_offer)
    arrived(receiver.receive(1), values)
    assert tree.versions == [2]


def test_a_receiver_that_dies_leaves_nothing_behind(asks, monkeypatch):
    """A receiver stops after its first bucket: the version it pulled is freed at the deadline, and another receiver is
    served."""
    server = PullServer(lease_s=600)
    values, params = trainer(1)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16, bucket_bytes=64)
    tree.offer(params, 1)
    ask = asks(server)

    def dies(process, request):
        reply = ask(process, request)
        if request["op"] == "bucket":
            reply.wait(60, "the first bucket")
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        PullReceiver("all", wanted(), dies).receive(1)
    tree.offer(params, 2)
    assert tree.versions == [1, 2]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
    tree.offer(params, 3)
    assert tree.versions == [3]
    monkeypatch.undo()
    arrived(PullReceiver("all", wanted(), ask).receive(3), values)


def test_a_trainer_that_comes_back(asks):
    """The receiver joins the new session by itself, and lost messages are sent again."""
    servers, lost = [PullServer()], []
    values, params = trainer(1)
    servers[0].serve("all", params, target_dtype=jnp.bfloat16).offer(params, 1)

    def ask(process, request):
        if request["op"] == "bucket" and len(lost) < 2:
            lost.append(request)
            raise TimeoutError("no reply")
        return asks(servers[-1])(process, request)

    receiver = PullReceiver("all", wanted(), ask)
    arrived(receiver.receive(1), values)
    assert len(lost) == 2
    values, params = trainer(2)
    servers.append(PullServer())
    servers[1].serve("all", params, target_dtype=jnp.bfloat16).offer(params, 2)
    arrived(receiver.receive(2), values)


def test_a_trainer_that_does_not_answer(asks):
    """The wait ends if nobody listens at the address, and if the trainer does not accept the receiver's secret."""
    nobody = Channel("nobody", secret="s3cret")
    nobody.close()
    stranger = Channel("stranger", secret="another")
    trainers = Channel("trainer", secret="s3cret")
    trainers.serve("pull", PullServer().answer)
    for address in (nobody.address, trainers.address):
        receiver = PullReceiver(
            "all",
            wanted(),
            lambda process, request, at=address: stranger.request(at, "call", "pull", Message(request), lane=1),
            timeout=0.3,
        )
        with pytest.raises(ChannelError, match=r"No answer within .* from trainer process 0: join of 'all'"):
            receiver.receive(1)
    stranger.close()
    trainers.close()


@pytest.mark.parametrize("lasting", [False, True])
def test_a_frozen_base_is_served_where_it_is(asks, lasting):
    server = PullServer()
    values, params = trainer(1)
    tree = server.serve("base", params, target_dtype=jnp.bfloat16)
    tree.offer(params, 1, lasting=lasting)
    arrived(PullReceiver("base", wanted(), asks(server)).receive(None), values)


def test_weights_changed_in_flight_are_refused(asks):
    """One bit is flipped in the sender's memory after its checksums were taken."""
    server = PullServer()
    _, params = trainer(1)
    tree = server.serve("all", params, target_dtype=jnp.bfloat16)
    tree.offer(params, 1, lasting=True)
    (shard, *_) = params["layers"].addressable_shards
    ctypes.c_uint8.from_address(shard.data.unsafe_buffer_pointer() + 3).value ^= 1 << 6
    receiver = PullReceiver("all", wanted(), asks(server))
    with pytest.raises(WeightMismatchError, match=r"Version 1 arrived changed .*differ for \['layers'\]\."):
        receiver.receive(1)


def test_another_model_is_refused(asks):
    server = PullServer()
    _, params = trainer(1)
    server.serve("all", params).offer(params, 1)  # sent as float32
    with pytest.raises(ValueError, match=r"\['embed'\] is float32\[24, 12\] on the trainer and bfloat16\[24, 12\]"):
        PullReceiver("all", wanted(), asks(server)).receive(1)
    ask = asks(server)
    said = {"op": "join", "tree": "all"}, {"op": "bucket", "tree": "all", "session": "older"}, {"tree": 3}
    answers = [ask(0, request).wait(60, "an answer").value for request in said]
    assert answers == [{"error": "KeyError: 'target'"}, {"rejoin": True}, {"wait": []}]


def test_empty_tree(asks):
    server = PullServer()
    server.serve("none", {}).offer({}, 3)
    assert PullReceiver("none", {}, asks(server)).receive(3).params == {}
