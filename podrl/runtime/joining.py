"""Joins a job: determines this process's role and rank, and connects it to the other processes."""

import dataclasses
import functools
import os
import secrets
import socket
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any

from podrl.runtime.channel import Channel, ChannelError
from podrl.runtime.detect import UNIX, Cluster, too_few_workers
from podrl.runtime.environment import cache_own_programs, meet_before_first_runs
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import (
    ROLLOUT,
    Hosts,
    assign,
    check_evaluation_hosts,
    check_own_copies,
    hosts_per_replica,
    parse_hosts,
)
from podrl.runtime.sockets import interface_towards
from podrl.storage.regular import regular
from podrl.storage.storage import first_line, locate
from podrl.workers.user_code import forget

JOIN_S = 300.0
_ALONE = Cluster("single", "split")
# Default for the seconds of silence after which jax counts a process as dead. It is long, because compiling a large
# model may keep a process silent for minutes. The channel notices a dead process much sooner: its connections break.
HEARTBEAT_S = 600.0
_CHANNEL_PORT_AFTER_COORDINATOR = 1
_AGAIN_S = 0.5
_COMPLETE = "is complete, and ends"  # the answer to a process that replaces a member of a running replica


def hosts_of(cluster: Cluster, trainer: str, rollout: str, mesh: str = "auto", evaluates: str = "") -> Hosts:
    """Assigns the processes of a job to trainer, rollout and evaluation.

    Args:
      cluster: place of this process.
      trainer: key roles.trainer.hosts of the configuration.
      rollout: key roles.rollout.hosts of the configuration.
      mesh: key roles.rollout.mesh of the configuration.
      evaluates: key roles.eval.hosts of the configuration; if the platform assigns the roles, the key must name some of
        the rollout hosts.

    Raises:
      ValueError: the hosts do not fit the job, or contradict the roles that the platform has assigned.
    """
    check_evaluation_hosts(evaluates, split=cluster.topology == "split")
    if cluster.trainers:
        if trainer or rollout:
            raise ValueError(
                f"roles.trainer.hosts={trainer!r} and roles.rollout.hosts={rollout!r}: this platform has given every "
                "host its role; leave both empty."
            )
        everyone = range(cluster.trainers, cluster.trainers + cluster.rollouts)
        tests = parse_hosts(evaluates, "roles.eval.hosts")
        if tests and not set(tests) < set(everyone):
            hosts_text = f"hosts {everyone.start} to {everyone.stop - 1} generate" if everyone else "no host generates"
            raise ValueError(
                f"roles.eval.hosts={evaluates!r}: on this platform {hosts_text}; name some of the hosts that generate, "
                "not all."
            )
        generate = tuple(host for host in everyone if host not in tests)
        replica = hosts_per_replica(mesh, len(generate))
        slice_hosts = cluster.process_count if cluster.role == ROLLOUT else replica
        if slice_hosts % replica:
            raise ValueError(
                f"roles.rollout.mesh={mesh!r} spreads a copy of the weights over {replica} hosts, and a slice of the "
                f"rollouts has {slice_hosts}: a copy must lie within a slice, so raise data."
            )
        return check_own_copies(evaluates, Hosts(tuple(range(cluster.trainers)), generate, replica, tests), mesh)
    return assign(trainer, rollout, cluster.process_count, mesh, evaluates)


def take_seat(cluster: Cluster, hosts: Hosts, environment: Mapping[str, str]) -> Seat:
    """Determines this process's seat: its role and place in the job.

    Raises:
      ValueError: the job's secret is missing.
    """
    secret = _secret(environment)
    leader = cluster.channel
    if not leader:
        host, _, port = cluster.coordinator.rpartition(":")
        leader = f"{host}:{int(port) + _CHANNEL_PORT_AFTER_COORDINATOR}"
    process = cluster.process_index
    if cluster.trainers and cluster.role == ROLLOUT:  # every rollout slice counts its own hosts from 0
        process += cluster.trainers + cluster.slice_index * cluster.process_count
    return Seat(process, hosts, leader, secret, disposable=cluster.topology == "split")


def late_seat(leader: str, environment: Mapping[str, str], deadline_s: float, cluster: Cluster = _ALONE) -> Seat:
    """Asks the leader of a running job for the seat of one more rollout host.

    Args:
      leader: 'host:port' of the leader's endpoint.
      environment: environment variables; PODRL_SECRET or PODRL_SECRET_FILE holds the job's secret.
      deadline_s: the longest wait, in seconds.
      cluster: place of this process among the hosts that join together. If several hosts hold a copy of the weights
        together, the hosts of one cluster get neighbouring seats, in the cluster's order.

    Raises:
      ValueError: the job's secret is missing, or `leader` is not an address.
      ChannelError: the leader did not answer within the deadline, or the job does not admit this process.
    """
    secret = _secret(environment)
    host, _, port = leader.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--join={leader} must be HOST:PORT, which trainer 0 of the running job prints.")
    channel = Channel("a host that joins", secret=secret, host=_interface(host, deadline_s))
    try:
        me = {"cluster": cluster.coordinator, "index": cluster.process_index, "count": cluster.process_count}
        me["once"] = secrets.token_hex(8)
        answer = channel.call(leader, "number", Message(me), deadline_s=deadline_s).value
    except ChannelError as error:
        raise ChannelError(
            f"--join={leader}: {error} Is trainer 0 of a --topology=split job running there, is PODRL_SECRET that "
            "job's, and is the port open between the hosts?"
        ) from None
    finally:
        channel.close()
    hosts = Hosts(tuple(answer["trainer"]), tuple(answer["rollout"]), int(answer["replica"]), tuple(answer["eval"]))
    return Seat(int(answer["process"]), hosts, leader, secret, disposable=True)


def _interface(leader: str, deadline_s: float) -> str:
    """Finds the address of this host's interface towards the leader; waits until the leader's name can be resolved.

    Raises:
      ChannelError: the name had no address within the deadline.
    """
    end = time.monotonic() + deadline_s
    while True:
        try:
            return interface_towards(leader)
        except socket.gaierror as error:
            if time.monotonic() >= end:
                raise ChannelError(
                    f"The name of trainer 0's host, {leader}, had no address for {deadline_s:.0f} s "
                    f"({error.strerror}): is it running, and is its name known here?"
                ) from None
        time.sleep(_AGAIN_S)


def _secret(environment: Mapping[str, str]) -> str:
    secret = environment.get("PODRL_SECRET", "")
    if not secret and (file := environment.get("PODRL_SECRET_FILE")):
        try:
            secret = regular(locate(file)).read_text().strip()
        except FileNotFoundError:
            raise ValueError(
                f"PODRL_SECRET_FILE={file}: there is no such file; it must hold the secret that all hosts of the job "
                "share."
            ) from None
    if not secret:
        raise ValueError(
            "PODRL_SECRET is not set, and no file named by PODRL_SECRET_FILE has a text: the processes of a job "
            "encrypt their messages to each other with this secret. Set PODRL_SECRET to the same random text on all "
            "hosts (launch/ does), such as what `openssl rand -hex 16` prints."
        )
    return secret


def distributed_arguments(cluster: Cluster, seat: Seat, *, heartbeat_s: float) -> dict[str, Any] | None:
    """Returns arguments of `jax.distributed.initialize` for this process, or None if it must not be called.

    Args:
      cluster: place of this process in its jax cluster.
      seat: place of this process in the job.
      heartbeat_s: seconds without a sign of life after which jax declares a process dead; rounded down.

    Raises:
      ValueError: `heartbeat_s` is below 1, the least that jax can count.
    """
    if heartbeat_s < 1:
        raise ValueError(f"--heartbeat_s={heartbeat_s:g} must be at least 1 second, and longer than any compilation.")
    arguments = cluster.distributed_arguments
    if cluster.kind == "local" and seat.disposable:  # all trainers form a cluster, each rollout replica another
        trains = seat.process in seat.hosts.trainer
        members = seat.hosts.trainer if trains else seat.hosts.replica_of(seat.process)
        if len(members) == 1:
            return None
        own = {"num_processes": len(members), "process_id": members.index(seat.process)}
        arguments = {**(arguments or {}), **own}
    return None if arguments is None else {**arguments, "heartbeat_timeout_seconds": int(heartbeat_s)}


def bind_address(coordinator: str) -> str:
    """Returns the address at which jax's coordinator listens, on one interface; by default jax listens on all.

    The coordinator authenticates no one, so anyone who reaches it could end the job.
    """
    if coordinator.startswith(UNIX):
        return coordinator
    host, _, port = coordinator.rpartition(":")
    return f"{interface_towards(host)}:{port}"


def join(cluster: Cluster, seat: Seat, *, deadline_s: float, heartbeat_s: float = HEARTBEAT_S) -> Pod:
    """Waits for the other processes of the job, so that all are alive, and then starts jax's cluster.

    Args:
      cluster: place of this process in its jax cluster.
      seat: place of this process in the job.
      deadline_s: seconds within which all processes must have joined.
      heartbeat_s: seconds without a sign of life after which jax declares a process dead, at least 1.

    Raises:
      ChannelError: some processes did not join within the deadline.
      ValueError: `heartbeat_s` is below 1, the processes were started for different jobs, jax does not find the TPU
        hosts that the platform names, or numbers this host differently from --process_id.
    """
    import jax

    arguments = distributed_arguments(cluster, seat, heartbeat_s=heartbeat_s)
    host = seat.leader.rpartition(":")[0]
    pod = Pod(seat, host=_interface(host, deadline_s)).join(
        deadline_s, functools.partial(too_few_workers, dataclasses.replace(cluster, process_count=seat.hosts.count))
    )
    if arguments is not None:
        coordinator = cluster.coordinator
        if cluster.kind == "local" and seat.disposable and seat.process not in seat.hosts.trainer:
            coordinator = arguments["coordinator_address"] = gather_replica(pod, cluster.coordinator, deadline_s)
        if arguments.get("process_id", cluster.process_index) == 0:
            arguments["coordinator_bind_address"] = bind_address(coordinator)
        try:
            jax.distributed.initialize(**arguments)
        except ValueError as error:
            if cluster.distributed_arguments:
                raise
            raise ValueError(
                f"jax does not see the TPU hosts that this process's platform ({cluster.kind}, {cluster.process_count} "
                f"processes) names: {error} Are there chips on this host (ls /dev/accel* /dev/vfio; on GKE the limit "
                "google.com/tpu), and is libtpu installed (requirements-tpu.lock)?"
            ) from None
        # libtpu gives each TPU host a number of its own, whatever --process_id says.
        if cluster.kind == "flags" and (own := jax.process_index()) != cluster.process_index:
            raise ValueError(
                f"--process_id={cluster.process_index} on the host that the TPU's topology numbers {own}: start this "
                f"host with --process_id={own}, and name host 0 by --coordinator."
            )
        cache_own_programs()
        meet_before_first_runs()
    # Reward functions and other child processes must not see these variables.
    for name in ("PODRL_SECRET", "PODRL_SECRET_FILE"):
        forget(os.environ, name)
    return pod


def gather_replica(pod: Pod, jobs: str, deadline_s: float) -> str:
    """Waits for all processes of this process's replica; returns the address for their jax cluster's coordinator.

    The head (the first process) of the replica chooses the address once, after all processes of the replica have asked
    for it. A process that asks later replaces a lost member of a jax cluster that still runs. The loss will end this
    cluster. The new process keeps asking until it reaches the head of the next cluster.

    Args:
      pod: this process's view of the job.
      jobs: address of the job's own coordinator. If it is a Unix socket, the replica's coordinator gets a socket beside
        it; otherwise a free port of the head's host.
      deadline_s: the longest wait, in seconds.

    Raises:
      ChannelError: some processes of the replica did not come within the deadline.
    """
    seat, end = pod.seat, time.monotonic() + deadline_s
    head, *others = seat.hosts.replica_of(seat.process)
    if seat.process != head:
        pod.address(head, deadline_s)
        while True:
            try:
                return str(pod.call(head, "replica", Message(seat.process), max(end - time.monotonic(), 1.0)).value)
            except ChannelError as error:
                if _COMPLETE not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(_AGAIN_S)
    arrived: set[int] = set()
    coordinator: futures.Future[Message] = futures.Future()

    def on_arrival(message: Message) -> "futures.Future[Message]":
        arrived.add(int(message.value))
        if arrived == set(others) and not coordinator.done():
            coordinator.set_result(Message(f"{jobs}-{secrets.token_hex(4)}" if jobs.startswith(UNIX) else free_port()))
        return coordinator

    def free_port() -> str:
        host = pod.channel.address.rpartition(":")[0]
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def on_late(message: Message) -> Message:
        raise ValueError(f"the replica of {pod.name} {_COMPLETE}")

    pod.channel.serve("replica", on_arrival)
    try:
        chosen = coordinator.result(deadline_s)
    except futures.TimeoutError:
        missing = ", ".join(f"{seat.hosts.name(p)} (host {p})" for p in others if p not in arrived)
        raise ChannelError(f"{pod.name} waited {deadline_s:.0f} s for {missing} of its replica.") from None
    pod.channel.serve("replica", on_late)
    return str(chosen.value)


def start_pathways(target: str) -> None:
    """Connects jax to the Pathways service; this process then controls every device, and no other process joins.

    Args:
      target: address of the proxy, for the error's message; jax itself reads JAX_BACKEND_TARGET.

    Raises:
      ChannelError: the proxy does not answer; PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS bounds the wait if it is set.
    """
    import jax
    import pathwaysutils

    pathwaysutils.initialize()
    try:
        jax.devices()
    except RuntimeError as error:
        raise ChannelError(
            f"The Pathways proxy JAX_BACKEND_TARGET={target} cannot be reached: {first_line(error)} Is its pod Running "
            "(kubectl get pods | grep pathways-head) and, where podrl runs elsewhere, is the port forwarded?"
        ) from None
