"""Assignment of hosts to trainer and rollout: worked examples, and refusals with their numbers."""

import pytest

from podrl.runtime.roles import Hosts, assign, check_evaluation_hosts, hosts_per_replica, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("", ()), ("0", (0,)), ("0-1", (0, 1)), ("3,0-1", (0, 1, 3)), (" 0 - 1 , 4 ", (0, 1, 4)), ("0,2-3,", (0, 2, 3))],
)
def test_host_lists(text, hosts):
    assert parse_hosts(text, "roles.trainer.hosts") == hosts


@pytest.mark.parametrize(
    ("trainer", "rollout", "processes", "expected"),
    [
        ("", "", 1, Hosts((0,), (0,))),
        ("", "", 4, Hosts((0, 1), (2, 3))),
        ("", "", 5, Hosts((0, 1, 2), (3, 4))),
        ("0-1", "2-3", 4, Hosts((0, 1), (2, 3))),
        ("0,3", "", 4, Hosts((0, 3), (1, 2))),
        ("", "1-3", 4, Hosts((0,), (1, 2, 3))),
    ],
)
def test_assignments(trainer, rollout, processes, expected):
    hosts = assign(trainer, rollout, processes)
    assert hosts == expected and hosts.count == processes


def test_names_and_ranks_are_within_the_role():
    hosts = assign("0,3", "", 4)
    assert [hosts.name(process) for process in range(4)] == ["trainer 0", "rollout 0", "rollout 1", "trainer 1"]
    assert Hosts((0,), (0,)).name(0) == "trainer 0"


def test_hosts_that_evaluate_are_taken_from_the_others():
    hosts = assign("", "", 5, evaluates="4")
    assert (hosts.trainer, hosts.rollout, hosts.eval, hosts.count) == ((0, 1), (2, 3), (4,), 5)
    assert hosts.role(4) == "eval" and hosts.name(4) == "eval 0" and hosts.heads == (2, 3) and not hosts.follows(4)
    assert hosts.role(5) == "rollout" and hosts.name(5) == "rollout 2"  # a host that joins generates
    assert assign("0", "", 6, evaluates="1,5") == Hosts((0,), (2, 3, 4), eval=(1, 5))
    for given, says in (
        (("0-1", "2-3", 4, "auto", "3"), r"roles\.eval\.hosts='3', 4 hosts .*hosts \[3\] have two roles"),
        (("", "", 2, "auto", "1"), "no host generates"),
        (("", "", 3, "auto", "0"), "host 0 must be a trainer"),
        (("", "", 1, "auto", "1"), r"hosts \[1\] are not in this job"),
        (("0", "", 4, "data=1,tensor=2", "3"), r"roles\.eval\.hosts='3': with .* 2 hosts hold each copy"),
    ):
        with pytest.raises(ValueError, match=says):
            assign(*given)
    with pytest.raises(ValueError, match=r"roles\.eval\.hosts='3' .* --topology=split"):
        check_evaluation_hosts("3", split=False)
    check_evaluation_hosts("", split=False)


@pytest.mark.parametrize(
    ("trainer", "rollout", "processes", "says"),
    [
        ("0-1", "1-3", 4, r"4 hosts \(0-3\): hosts \[1\] have two roles"),
        ("0", "2-3", 4, r"hosts \[1\] have no role; every host must be named once"),
        ("0-1", "2-5", 4, r"hosts \[4, 5\] are not in this job; name hosts from 0 to 3"),
        ("1-3", "0", 4, "host 0 must be a trainer"),
        ("1", "", 2, "host 0 must be a trainer"),
        ("0-3", "", 4, "no host generates; each role needs one"),
        ("", "0-3", 4, "no host trains; each role needs one"),
        ("0", "", 1, "no host generates"),
        ("0,0-1", "", 4, "roles.trainer.hosts='0,0-1' names a host twice"),
        ("0-", "", 4, "roles.trainer.hosts='0-' holds '0-': write host numbers and ranges"),
        ("3-1", "", 4, "roles.trainer.hosts='3-1' holds '3-1', which ends before it begins: write 1-3"),
        ("", "all", 4, "roles.rollout.hosts='all' holds 'all'"),
    ],
)
def test_refusals(trainer, rollout, processes, says):
    with pytest.raises(ValueError, match=says):
        assign(trainer, rollout, processes)


@pytest.mark.parametrize(
    ("mesh", "hosts", "together"),
    [
        ("auto", 4, 1),
        ("data=-1,tensor=8", 4, 1),
        ("data=4,tensor=4", 4, 1),
        ("data=8,tensor=2", 4, 1),
        ("data=2,tensor=16", 8, 4),
        ("dp=2,tp=4", 4, 2),
        ("tensor=16", 4, 4),
        ("fsdp=4", 1, 1),
    ],
)
def test_fewer_copies_than_hosts_lie_on_several_each(mesh, hosts, together):
    assert hosts_per_replica(mesh, hosts) == together


def test_copies_that_hosts_cannot_share_equally_are_refused():
    with pytest.raises(ValueError, match=r"'data=3,tensor=2' spreads 3 copies of the weights over 4 hosts"):
        hosts_per_replica("data=3,tensor=2", 4)
    with pytest.raises(ValueError, match=r"spreads 2 copies of the weights over 3 hosts"):
        assign("0", "1-3", 4, "data=2,tensor=3")


def test_the_hosts_of_a_replica_have_a_head():
    hosts = assign("0-1", "2-5", 6, "data=2,tensor=4")
    assert hosts.replica == 2 and hosts.heads == (2, 4)
    assert [hosts.replica_of(p) for p in (2, 3, 4, 5)] == [(2, 3), (2, 3), (4, 5), (4, 5)]
    assert [hosts.follows(p) for p in range(6)] == [False, False, False, True, False, True]
    names = ["trainer 0", "trainer 1", "rollout 0", "rollout 0.1", "rollout 1", "rollout 1.1"]
    assert [hosts.name(p) for p in range(6)] == names
    each = assign("0-1", "2-5", 6)
    assert each.heads == each.rollout and not any(each.follows(p) for p in range(6))
    assert each.replica_of(5) == (5,) and each.name(5) == "rollout 3"
