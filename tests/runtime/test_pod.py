"""Coming together: what a process is told whose leader goes before everyone is there."""

import threading
import time

import pytest

from podrl.runtime.channel import Channel, ChannelError
from podrl.runtime.local_pod import free_ports
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import Hosts


@pytest.mark.parametrize("answers", [True, False], ids=["before the roster", "before its answer"])
def test_a_leader_that_goes_while_others_join_is_noticed_long_before_the_deadline(answers):
    (port,) = free_ports(1)
    leader = Channel("trainer 0", secret="s", host="127.0.0.1", port=port)
    asked = threading.Event()
    if answers:
        leader.serve("join", lambda _: asked.set() or Message())

    def leave() -> None:
        asked.wait(1.0)
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


def test_a_leader_that_is_not_there_yet_is_waited_for():
    (port,) = free_ports(1)
    hosts = Hosts((0,), (1,))
    member = Pod(Seat(1, hosts, f"127.0.0.1:{port}", "s"), host="127.0.0.1")
    joining = threading.Thread(target=member.join, args=(60, lambda reached, waited_s: ""))
    joining.start()
    time.sleep(4.0)  # longer than the patience with a connection that broke
    leader = Pod(Seat(0, hosts, f"127.0.0.1:{port}", "s"), host="127.0.0.1")
    leader.join(60, lambda reached, waited_s: "too few")
    joining.join(60)
    assert not joining.is_alive() and member.address(1) == leader.address(1) == member.channel.address
    member.channel.close()
    leader.channel.close()
