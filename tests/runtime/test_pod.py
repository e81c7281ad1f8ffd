"""A job's processes join, wait and fail with the right messages, and one of them prints the reason in full."""

import contextlib
import re
import threading
import time

import pytest
from endpoints import joined
from waits import PATIENCE_S, until

from podrl import launch
from podrl.runtime import channel
from podrl.runtime.channel import Channel, ChannelError, LateError
from podrl.runtime.local_pod import free_ports
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import Hosts
from podrl.transfer.pull.fetch import TransferTimeoutError, VersionGoneError


@pytest.mark.parametrize("answers", [True, False], ids=["before the roster", "before its answer"])
def test_a_leader_that_goes_while_others_join_is_noticed_long_before_the_deadline(answers):
    (port,) = free_ports(1)
    leader = Channel("trainer 0", secret="s", host="127.0.0.1", port=port)
    asked = threading.Event()
    if answers:
        leader.serve("join", lambda _: asked.set() or Message())

    def leave() -> None:
        asked.wait(PATIENCE_S if answers else 1.0)
        time.sleep(0.5)
        leader.close()

    threading.Thread(target=leave).start()
    pod = Pod(Seat(1, Hosts((0,), (1,)), f"127.0.0.1:{port}", "s"), host="127.0.0.1")
    try:
        with pytest.raises(
            ChannelError, match=r"did not get into the job .*the connection broke and did not come back"
        ):
            pod.join(600, lambda reached, waited_s: "")
    finally:
        pod.channel.close()


def test_a_leader_that_is_not_there_yet_is_waited_for(monkeypatch):
    """A process waits for its leader even longer than a broken connection is tolerated.

    It still waits after the channel has checked the connection four times.
    """
    looks, check = [], channel._Link.check
    (port,) = free_ports(1)
    hosts = Hosts((0,), (1,))
    member = Pod(Seat(1, hosts, f"127.0.0.1:{port}", "s"), host="127.0.0.1")
    joining = threading.Thread(target=member.join, args=(PATIENCE_S, lambda reached, waited_s: ""))
    with monkeypatch.context() as patch:
        patch.setattr(channel._Link, "_PATIENCE_S", 0.01)
        patch.setattr(channel._Link, "check", lambda link: (looks.append(link), check(link)))
        joining.start()
        until(lambda: len(looks) > 3, "four looks at the connection")
    assert joining.is_alive()
    leader = Pod(Seat(0, hosts, f"127.0.0.1:{port}", "s"), host="127.0.0.1")
    leader.join(PATIENCE_S, lambda reached, waited_s: "too few")
    joining.join(PATIENCE_S)
    assert not joining.is_alive() and member.address(1) == leader.address(1) == member.channel.address
    member.channel.close()
    leader.channel.close()


@pytest.mark.parametrize(
    ("hosts", "split", "said"),
    [
        (Hosts((0, 1), (2,)), False, "roles.trainer.hosts is 0,1 there, and 0 here; roles.rollout.hosts is 2 there"),
        (Hosts((0,), (2,), eval=(1,)), False, "roles.eval.hosts is 1 there, and none here"),
        (Hosts((0,), (1, 2), replica=2), False, "(roles.rollout.mesh) is 2 there, and 1 here"),
        (Hosts((0,), (1, 2)), True, "--topology is split there, and shared here"),
    ],
)
def test_a_process_of_another_job_is_refused_by_name_and_ends_the_job(hosts, split, said, monkeypatch):
    """A process with other roles or another topology is refused: it and the job would wait for each other for ever."""
    (port,) = free_ports(1)
    leader = Pod(Seat(0, Hosts((0,), (1, 2)), f"127.0.0.1:{port}", "s"), host="127.0.0.1")
    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(leader, "_end", lambda code, text, **_: ended.append((code, text)))

    def join() -> None:
        with contextlib.suppress(ChannelError):  # host 1 never joins
            leader.join(PATIENCE_S, lambda reached, waited_s: "too few")

    threading.Thread(target=join, daemon=True).start()
    other = Pod(Seat(2, hosts, f"127.0.0.1:{port}", "s", split), host="127.0.0.1")
    with pytest.raises(ValueError, match=re.escape(said)):
        other.join(PATIENCE_S, lambda reached, waited_s: "")
    until(lambda: ended)
    assert ended[0][0] == 1 and said in ended[0][1] and "(host 2, " in ended[0][1]
    leader.channel.close()


@pytest.fixture
def three():
    """Joins a job of two trainers and a rollout host, as three endpoints of this process."""
    with joined(Hosts((0, 1), (2,))) as pods:
        yield pods


def test_who_is_waited_for_is_known_while_it_lasts(three):
    leader, _, rollout = three
    assert leader.describe_waits() == ""
    waiting = threading.Thread(target=leader.get, args=(2, "header/7", 60))
    waiting.start()
    while not leader.describe_waits():
        time.sleep(0.01)
    assert re.fullmatch(r"header/7 of rollout 0 \(host 2\), for \d+ s", leader.describe_waits())
    rollout.channel.put("header/7", Message())
    waiting.join(PATIENCE_S)
    assert leader.describe_waits() == ""


def test_the_leader_stays_until_the_others_have_closed_their_connections(three):
    """The leader leaves last: jax's service of the trainers' cluster ends with it, and its end would end every process
    that is still in the cluster."""
    leader, trainer, rollout = three
    leaving = threading.Thread(target=leader.leave, daemon=True)
    leaving.start()
    for other in (trainer, rollout):
        other._tell_leader(0, "")
    rollout.channel.close()
    leaving.join(1.0)
    assert leaving.is_alive()
    trainer.channel.close()
    leaving.join(20.0)
    assert not leaving.is_alive()


def test_what_a_process_says_that_is_lost_already_ends_no_job(three, monkeypatch):
    """An error of a process that counts as lost does not end the job. Such a process may have been frozen, and wakes up
    after other hosts have taken over its work."""
    leader, _, rollout = three
    ended: list[int] = []
    monkeypatch.setattr(leader, "_end", lambda code, text, **_: ended.append(code))
    leader._lost_processes.add(2)
    rollout._tell_leader(1, "a version is gone")
    assert not ended
    leader._lost_processes.clear()
    rollout._tell_leader(1, "an error")
    assert ended == [1]


@pytest.mark.parametrize("process", [1, 2], ids=["its own", "another's"])
def test_a_process_at_the_address_of_a_dead_one_is_not_taken_for_it(process):
    """A process that joins from the address of a dead one is refused and told to start at another port. From another
    port, a process takes the place of the dead one."""
    with joined(Hosts((0,), (1, 2)), disposable=True) as (leader, first, _):
        port = int(first.channel.address.rpartition(":")[2])
        me = {"process": 1, "address": first.channel.address, "host": "h", "pid": 7, "job": first.seat.describe()}
        again = {**me, "endpoint": first.channel.number}
        assert first.channel.call(leader.channel.address, "join", Message(again), deadline_s=PATIENCE_S).value is None
        first.channel.close()
        other = Channel(f"rollout {process - 1}", secret="s", host="127.0.0.1", port=port)
        try:
            assert other.address == first.channel.address
            with pytest.raises(
                ChannelError, match=r"\(host 1\) used this address before.*start this process again, at another port"
            ):
                said = {**me, "process": process, "endpoint": other.number}
                other.call(leader.channel.address, "join", Message(said), deadline_s=PATIENCE_S)
        finally:
            other.close()
        successor = Channel(f"rollout {process - 1}", secret="s", host="127.0.0.1")
        try:
            said = {**me, "process": 1, "address": successor.address, "endpoint": successor.number}
            assert successor.call(leader.channel.address, "join", Message(said), deadline_s=PATIENCE_S).value is None
            assert leader.is_at(1, successor.address) and leader._changes == 1
        finally:
            successor.close()


def test_a_process_of_another_job_is_told_so_each_time_it_asks(three):
    """The first refusal may be lost on the way, so a repeated request is refused again."""
    leader, trainer, _ = three
    other = Seat(1, Hosts((0,), (1, 2)), leader.channel.address, "s")
    said = {"process": 1, "address": trainer.channel.address, "endpoint": trainer.channel.number, "host": "h", "pid": 7}
    for _ in range(2):
        answer = trainer.channel.call(
            leader.channel.address, "join", Message({**said, "job": other.describe()}), deadline_s=PATIENCE_S
        )
        assert "was started for another job" in answer.value


def test_one_process_of_a_job_says_in_full_why_it_fails(three):
    leader, trainer, rollout = three
    assert [pod.first_to_fail() for pod in (trainer, leader, rollout, trainer)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("error", "alone", "several"),
    [
        (RuntimeError("UNAVAILABLE: Socket closed"), 1, 42),
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"), 1, 42),
        (VersionGoneError("Trainer process 0 holds versions 3, 4 of 'trainable', not 0"), 42, 42),
        (TransferTimeoutError("Trainer process 0 did not offer version 1"), 42, 42),
        (RuntimeError("INTERNAL: Mosaic failed to compile"), 1, 1),
        (RuntimeError("a reward said UNAVAILABLE: later"), 1, 1),
        (ValueError("trainer.b2 is 2: it must be below 1"), 1, 1),
    ],
)
def test_a_job_whose_network_failed_asks_for_a_restart(three, monkeypatch, capsys, error, alone, several):
    monkeypatch.setattr(launch, "_PEER_LOSS_S", 0.1)
    assert launch._report(error, [])[0] == alone
    capsys.readouterr()
    assert launch._report(error, three[1:2])[0] == several
    in_full = several == 1 and isinstance(error, RuntimeError)
    assert capsys.readouterr().err.startswith("RuntimeError:" if in_full else "podrl: error:")
    # A process that lost a connection leaves it to other processes to print their error in full.
    assert three[0].first_to_fail() == (several == 42)


def test_a_wait_ends_with_the_name_of_who_is_late_and_of_what(three):
    leader, trainer, rollout = three
    with pytest.raises(LateError, match=r"trainer 1 waited 1 s for header/7 from rollout 0 \(host 2\): .*log\.stall_s"):
        trainer.get(2, "header/7", 1.0)
    with pytest.raises(LateError, match=r"rollout 0 waited 1 s for rows from trainer 0 \(host 0\)"):
        rollout.call(0, "rows", Message(), 1.0)
    rollout.channel.put("header/7", Message("here"))
    assert trainer.get(2, "header/7", 30.0).value == leader.get(2, "header/7", 30.0).value == "here"
