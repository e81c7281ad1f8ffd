"""Assignment of hosts to trainer and rollout: worked examples, and refusals with their numbers."""

import pytest

from podrl.runtime.roles import Hosts, assign, parse_hosts


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


@pytest.mark.parametrize(
    ("trainer", "rollout", "processes", "says"),
    [
        ("0-1", "1-3", 4, r"4 hosts \(0-3\): hosts \[1\] are in both roles"),
        ("0", "2-3", 4, r"hosts \[1\] have no role; every host must be named once"),
        ("0-1", "2-5", 4, r"hosts \[4, 5\] are not in this job; name hosts from 0 to 3"),
        ("1-3", "0", 4, "host 0 must be a trainer"),
        ("1", "", 2, "host 0 must be a trainer"),
        ("0-3", "", 4, "no host generates; each role needs one"),
        ("", "0-3", 4, "no host trains; each role needs one"),
        ("0", "", 1, "no host generates"),
        ("0,0-1", "", 4, "roles.trainer.hosts='0,0-1' names a host twice"),
        ("0-", "", 4, "roles.trainer.hosts='0-' holds '0-': write host numbers and ranges"),
        ("", "all", 4, "roles.rollout.hosts='all' holds 'all'"),
    ],
)
def test_refusals(trainer, rollout, processes, says):
    with pytest.raises(ValueError, match=says):
        assign(trainer, rollout, processes)
