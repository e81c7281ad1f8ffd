"""Joining a job: heartbeats outlast a compilation on every platform; a missing leader is awaited, a proxy named."""

import contextlib
import inspect
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster
from processes import listening
from test_detect import GKE, LOCAL, MULTISLICE, SPLIT, TPU_VM
from waits import PATIENCE_S, until

from podrl.runtime import detect, joining
from podrl.runtime.channel import ChannelError
from podrl.runtime.local_pod import free_ports

_TRAINER = {**SPLIT, "PODRL_ROLE": "trainer", "PODRL_SLICES": "1", "PODRL_SLICE_INDEX": "0"}
_PLATFORMS = {
    "local, shared": (LOCAL, {}),
    "local, split": ({**LOCAL, "PODRL_ROLE": "", "PODRL_PROCESS_INDEX": "1"}, {"topology": "split"}),
    "tpu_vm": ({}, {"metadata": TPU_VM}),
    "gke": (GKE, {}),
    "multislice": (MULTISLICE, {}),
    "jobset, rollout": (SPLIT, {}),
    "jobset, trainer": ({**_TRAINER, "PODRL_HOSTS_PER_SLICE": "4", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}, {}),
}


@pytest.mark.parametrize("platform", _PLATFORMS)
def test_every_platform_starts_jax_with_heartbeats_longer_than_a_compilation(platform):
    environment, more = _PLATFORMS[platform]
    cluster = detect.detect(environment, **more)
    seat = joining.take_seat(cluster, joining.hosts_of(cluster, "", ""), {"PODRL_SECRET": "s"})
    default = inspect.signature(joining.join).parameters["heartbeat_s"].default
    arguments = joining.distributed_arguments(cluster, seat, heartbeat_s=default)
    assert arguments is not None and arguments["heartbeat_timeout_seconds"] >= 600
    bound = inspect.signature(jax.distributed.initialize).bind(**arguments).arguments
    assert bound["heartbeat_timeout_seconds"] == arguments["heartbeat_timeout_seconds"] == default
    if cluster.kind in ("local", "jobset_split"):
        assert 0 <= arguments["process_id"] < arguments["num_processes"]


def test_where_the_platform_gives_roles_some_of_those_that_generate_may_evaluate():
    cluster = detect.detect(SPLIT)
    everyone = joining.hosts_of(cluster, "", "").rollout
    hosts = joining.hosts_of(cluster, "", "", evaluates=str(everyone[-1]))
    assert hosts.eval == everyone[-1:] and hosts.rollout == everyone[:-1]
    with pytest.raises(ValueError, match=r"roles\.eval\.hosts='0': on this platform hosts 4 to 9 generate"):
        joining.hosts_of(cluster, "", "", evaluates="0")
    with pytest.raises(ValueError, match=r"roles\.eval\.hosts='3' .* --topology=split"):
        joining.hosts_of(detect.detect(LOCAL), "", "", evaluates="3")


def test_jaxs_coordinator_listens_at_its_own_address_alone(tmp_path):
    assert joining.bind_address("127.0.0.1:8482") == joining.bind_address("localhost:8482") == "127.0.0.1:8482"
    assert joining.bind_address("unix:/tmp/x/coordinator") == "unix:/tmp/x/coordinator"
    environment = {**LOCAL, "PODRL_COORDINATOR": "unix:/tmp/x/coordinator", "PODRL_CHANNEL": ""}
    with pytest.raises(ValueError, match="PODRL_CHANNEL='' must be HOST:PORT"):
        detect.detect(environment)
    # If jax finds its coordinator by itself, podrl still has to know the port.
    assert int(cloud_tpu_cluster.coordinator_port) == detect.COORDINATOR_PORT


def _place(count: int) -> dict[str, str]:
    coordinator, channel = free_ports(2)
    return {
        **{key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
        "PODRL_PLATFORM": "local",
        "PODRL_PROCESS_COUNT": str(count),
        "PODRL_COORDINATOR": f"127.0.0.1:{coordinator}",
        "PODRL_CHANNEL": f"127.0.0.1:{channel}",
        "PODRL_SECRET": "s",
        "JAX_PLATFORMS": "cpu",
    }


def test_the_heartbeat_is_a_flag(tmp_path):
    command = [sys.executable, "-m", "podrl.launch", "--config=grpo_gemma.py", f"--workdir={tmp_path / 'run'}"]
    place = _place(2) | {"PODRL_PROCESS_INDEX": "1"}
    command.append("--heartbeat_s=0.5")
    done = subprocess.run(command, env=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "--heartbeat_s=0.5 must be a number of seconds, at least 1" in done.stderr, (
        done.stderr
    )


# Joins as the launcher does. The second process then keeps the interpreter's lock for `held_s`, as a compilation might;
# all processes end when their input ends.
_MEMBER = """
import ctypes, os, sys
from podrl.runtime import detect, joining
from podrl.runtime.channel import ChannelError
cluster = detect.detect(os.environ)
seat = joining.take_seat(cluster, joining.hosts_of(cluster, "", ""), os.environ)
held_s, settings = int(sys.argv[1]), {"heartbeat_s": float(sys.argv[2])} if len(sys.argv) > 2 else {}
pod = joining.join(cluster, seat, deadline_s=60, **settings)
print("joined", flush=True)
if cluster.process_index == 1:
    ctypes.PyDLL(None).sleep(held_s)
print("free", flush=True)
sys.stdin.readline()
import jax
print(jax.device_count(), flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextlib.contextmanager
def _members(tmp_path: pathlib.Path, *args: str):
    place, members = _place(2), []
    try:
        for index in range(2):
            with (tmp_path / f"said{index}").open("w") as said:
                members.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _MEMBER, *args],
                        env=place | {"PODRL_PROCESS_INDEX": str(index)},
                        stdin=subprocess.PIPE,
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield members
    finally:
        for member in members:
            member.kill()
            member.wait()
            member.stdin.close()


def _wait_until_said(word: str, tmp_path: pathlib.Path, members: list[subprocess.Popen]) -> None:
    def said() -> bool:
        texts = [(tmp_path / f"said{index}").read_text() for index in range(2)]
        assert all(member.poll() is None for member in members), texts
        return all(word in text for text in texts)

    until(said, f"{word!r} in both outputs", every_s=0.05)


@pytest.mark.e2e
def test_a_compilation_is_not_taken_for_a_death_and_a_stopped_process_is(tmp_path):
    with _members(tmp_path, "9", "3") as members:
        _wait_until_said("free", tmp_path, members)  # process 1's C call, as long as three heartbeats, is over
        os.kill(members[1].pid, signal.SIGSTOP)
        assert members[0].wait(PATIENCE_S) != 0
    assert "stopped sending heartbeats" in (tmp_path / "said0").read_text()


@pytest.mark.e2e
def test_with_the_default_heartbeat_a_pause_is_survived(tmp_path):
    with _members(tmp_path, "0") as members:
        _wait_until_said("free", tmp_path, members)
        hosts = [host.removeprefix("::ffff:") for host, _ in listening([member.pid for member in members])]
        assert len(hosts) >= 3 and set(hosts) == {"127.0.0.1"}  # two channels and jax's coordinator
        os.kill(members[1].pid, signal.SIGSTOP)
        time.sleep(12.0)
        os.kill(members[1].pid, signal.SIGCONT)
        for member in members:
            member.stdin.write(b"\n")
            member.stdin.flush()
        _wait_until_said("2", tmp_path, members)
        for member in reversed(members):  # process 0 has jax's coordinator, without which the other aborts
            member.stdin.close()
            assert member.wait(PATIENCE_S) == 0, (tmp_path / "said0").read_text()
    assert all((tmp_path / f"said{index}").read_text().split()[-1] == "2" for index in range(2))


def test_a_pathways_proxy_that_cannot_be_reached_is_told_in_one_line_and_worth_a_restart(tmp_path):
    pytest.importorskip("pathwaysutils", reason="pip install 'podrl[pathways]'")
    environment = os.environ | {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": "grpc://127.0.0.1:9",
        "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": "1",
    }
    command = [sys.executable, "-m", "podrl.launch", "--config=grpo_gemma.py", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 42, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podrl: error: ")]
    assert "The Pathways proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:9 cannot be reached: " in line
    assert "ifrt_proxy" in line and "kubectl get pods" in line
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_a_leader_whose_name_is_not_known_yet_is_waited_for(monkeypatch):
    asked = []

    def interface(host):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "127.0.0.1"

    monkeypatch.setattr(joining, "interface_towards", interface)
    monkeypatch.setattr(joining, "_AGAIN_S", 0.0)
    assert joining._interface("run-trainer-0-0.run", 60.0) == "127.0.0.1" and len(asked) == 3
    asked.clear()
    with pytest.raises(ChannelError, match=r"host, run-trainer-0-0\.run, had no address for 0 s \(Name or service not"):
        joining._interface("run-trainer-0-0.run", 0.0)
