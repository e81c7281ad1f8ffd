"""Detects the cluster from the environment: one function per platform, one record as result.

`detect` is a pure function of a mapping: it imports no jax, opens no file and asks no server. So the launcher can call
it before jax is imported, and tests can pass it recorded environments. A TPU VM's description is not in its environment
but on its metadata server; `tpu_vm_metadata` fetches it, and `detect` takes it as a second mapping.
The module needs only the standard library.

Variables read, by platform (the first that matches decides):
  flags         no variables: the flags --coordinator, --process_id and --num_processes describe the cluster.
  pathways      JAX_PLATFORMS names `proxy`; JAX_BACKEND_TARGET is the proxy's address.
  jobset_split  PODRL_PLATFORM=jobset_split with PODRL_ROLE, PODRL_SLICE_INDEX, PODRL_SLICES, PODRL_HOST_INDEX,
                PODRL_HOSTS_PER_SLICE, PODRL_TRAINER_SLICES, PODRL_TRAINER_HOSTS_PER_SLICE, PODRL_ROLLOUT_SLICES,
                PODRL_ROLLOUT_HOSTS_PER_SLICE, PODRL_COORDINATOR, PODRL_CHANNEL (written by launch/gke.py, filled in
                by the kubelet from the pod's labels).
  local         PODRL_PLATFORM=local with PODRL_PROCESS_INDEX, PODRL_PROCESS_COUNT, PODRL_COORDINATOR, PODRL_CHANNEL,
                PODRL_ROLE.
  multislice    MEGASCALE_NUM_SLICES > 1 with MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS, and gke's variables.
  gke           TPU_WORKER_ID and TPU_WORKER_HOSTNAMES (or TPU_PROCESS_ADDRESSES), injected by GKE.
  tpu_vm        metadata attributes agent-worker-number and worker-network-endpoints.
  single        none of these.
On the last four platforms and on `flags`, all processes may train while rollout hosts join them (--topology=split).
PODRL_CHANNEL is then the address at which process 0 listens for them: by default port 8483 of its host; `single`,
and `flags` with one process, have no default.

Sources: jax/_src/clusters/cloud_tpu_cluster.py (jax 0.10.2) for the variables that jax itself reads and the order of
ranks; https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice for the variables that GKE injects.
"""

import dataclasses
import importlib.util
import pathlib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from podrl.runtime.service import ask
from podrl.storage.mounts import on_network

Kind = Literal["single", "local", "flags", "tpu_vm", "gke", "multislice", "jobset_split", "pathways"]
Topology = Literal["single", "shared", "split", "pathways"]

COORDINATOR_PORT = 8482
UNIX = "unix:"
ROLES = ("trainer", "rollout")
# These flags describe the cluster: either all or none must be set.
CLUSTER_FLAGS = ("coordinator", "process_id", "num_processes")
MEGASCALE = (
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_PORT",
)
_METADATA_KEYS = ("agent-worker-number", "worker-network-endpoints", "accelerator-type")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """This process's place in the cluster.

    Attributes:
      kind: platform of the cluster.
      topology: the topology that runs here; see docs/design.md.
      process_index: rank of this process in its jax.distributed cluster, from 0; with topology split each role's slice
        may be a cluster of its own.
      process_count: number of processes in the jax.distributed cluster.
      role: role of this process, 'trainer' or 'rollout', if the platform decides it; None if the configuration
        decides it.
      slice_index: number of this process's slice among the slices of its role (split) or of the job (multislice).
      slice_count: number of slices of the role (split) or of the job (multislice).
      coordinator: 'host:port' of process 0 of the cluster, 'unix:FILE' in a pod on one machine; for pathways the
        address of the proxy; '' for a single process.
      channel: 'host:port' at which trainer process 0 listens for the other processes; '' if the platform does not say.
      trainers, rollouts: number of processes of each role in the whole job if the platform decides roles; 0 otherwise.
      restart_attempt: number of times that the platform has restarted the job; 0 if it does not say.
      unset: environment variables to remove before jax is imported, because they would join separate clusters.
    """

    kind: Kind
    topology: Topology
    process_index: int = 0
    process_count: int = 1
    role: str | None = None
    slice_index: int = 0
    slice_count: int = 1
    coordinator: str = ""
    channel: str = ""
    trainers: int = 0
    rollouts: int = 0
    restart_attempt: int = 0
    unset: tuple[str, ...] = ()

    @property
    def distributed_arguments(self) -> dict[str, Any] | None:
        """Returns arguments for `jax.distributed.initialize`, or None if it must not be called.

        The arguments are empty where jax's own detection is right (TPU VM, GKE, multislice). They are complete where
        jax's detection would be wrong: for fake hosts on one machine, for a cluster that flags describe, and for a
        JobSet whose roles must not become one cluster.
        """
        if self.kind == "pathways" or self.process_count == 1:
            return None
        if self.kind in ("tpu_vm", "gke", "multislice"):
            return {}
        return {
            "coordinator_address": self.coordinator,
            "num_processes": self.process_count,
            "process_id": self.process_index,
            "cluster_detection_method": "deactivate",
        }


def check_topology(topology: str) -> str:
    """Checks the value of --topology, and returns it.

    Raises:
      ValueError: there is no such topology.
    """
    if topology != "auto" and topology not in get_args(Topology):
        raise ValueError(f"--topology={topology} is unknown: use auto, {', '.join(get_args(Topology))}.")
    return topology


def detect(
    environment: Mapping[str, str],
    *,
    topology: str = "auto",
    metadata: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Cluster:
    """Detects this process's place in its cluster from flags if they are set, else from the environment.

    Args:
      environment: environment variables, usually os.environ.
      topology: value of the flag --topology: 'auto', 'single', 'shared', 'split' or 'pathways'.
      metadata: instance attributes of a TPU VM, from `tpu_vm_metadata`; None or empty elsewhere.
      flags: values of CLUSTER_FLAGS by name, '' for a flag that is not set; None or all '' to use the environment.

    Raises:
      ValueError: variables or flags are missing, malformed or contradictory, or the platform cannot run the topology;
        the message names the variable or flag to change.
    """
    check_topology(topology)
    flags = {name: text for name, text in (flags or {}).items() if text}
    cluster = _from_flags(flags, environment) if flags else _platform(environment, metadata or {})
    if topology in ("auto", cluster.topology):
        return cluster
    if topology == "split" and cluster.kind == "local" and cluster.process_count > 1:
        return dataclasses.replace(cluster, topology="split")
    if topology == "split" and cluster.kind in ("single", "flags", "tpu_vm", "gke", "multislice"):
        return _trainers(cluster, environment, metadata or {})
    raise ValueError(f"--topology={topology} {_topology_needs(topology, cluster)} Use --topology=auto.")


def _trainers(cluster: Cluster, environment: Mapping[str, str], metadata: Mapping[str, str]) -> Cluster:
    """Makes every process of a cluster a trainer; all rollout hosts of the job join later."""
    if environment.get("PODRL_CHANNEL"):
        channel = _address(environment, "PODRL_CHANNEL")
    else:
        names = [cluster.coordinator] if cluster.coordinator else _hostnames(environment) or _workers(metadata)
        if not names:
            raise ValueError(
                "--topology=split of one process makes it train, and rollout hosts join it: set PODRL_CHANNEL to the "
                "HOST:PORT at which it listens for them."
            )
        channel = f"{names[0].split(':')[0]}:{COORDINATOR_PORT + 1}"
    count = cluster.process_count
    return dataclasses.replace(cluster, topology="split", role="trainer", channel=channel, trainers=count)


def _from_flags(flags: Mapping[str, str], environment: Mapping[str, str]) -> Cluster:
    if missing := [f"--{name}" for name in CLUSTER_FLAGS if name not in flags]:
        raise ValueError(
            f"{' and '.join(missing)} must be given too. A host of a cluster needs three flags: "
            "--coordinator=HOST:PORT, the address of process 0; --process_id, the number of this host, from 0 on; and "
            "--num_processes, the number of hosts."
        )
    if platform := environment.get("PODRL_PLATFORM"):
        raise ValueError(
            f"--process_id={flags['process_id']} says which process this is, and so does PODRL_PLATFORM={platform}, "
            "which a launcher has set: leave --coordinator, --process_id and --num_processes out."
        )
    named = {f"--{name}": text for name, text in flags.items()}
    count = _integer(named, "--num_processes", low=1)
    index = _integer(named, "--process_id", below=count, total="--num_processes")
    if ":" not in flags["coordinator"]:
        named["--coordinator"] += f":{COORDINATOR_PORT}"
    coordinator = _address(named, "--coordinator")
    topology: Topology = "shared" if count > 1 else "single"
    return Cluster("flags", topology, index, count, coordinator=coordinator if count > 1 else "")


def _platform(environment: Mapping[str, str], metadata: Mapping[str, str]) -> Cluster:
    declared = environment.get("PODRL_PLATFORM", "")
    if "proxy" in environment.get("JAX_PLATFORMS", "").split(","):
        return _pathways(environment)
    if declared == "jobset_split":
        return _jobset_split(environment)
    if declared == "local":
        return _local(environment)
    if declared:
        raise ValueError(f"PODRL_PLATFORM={declared} is unknown: use local or jobset_split, or unset it.")
    if "TPU_WORKER_ID" in environment or _hostnames(environment):
        return _gke(environment)
    if metadata.get("agent-worker-number", ""):
        return _tpu_vm(metadata)
    return Cluster("single", "single")


def _topology_needs(topology: str, cluster: Cluster) -> str:
    here = f"but this is {cluster.kind} with {cluster.process_count} process{'es' * (cluster.process_count > 1)}."
    needs = {
        "single": "needs exactly 1 process, without Pathways and without roles from the platform",
        "shared": "needs at least 2 processes in one jax.distributed cluster, without roles from the platform",
        "split": "needs several processes, or one cluster per role, or trainers that rollout hosts join",
        "pathways": "needs JAX_PLATFORMS=proxy and JAX_BACKEND_TARGET=grpc://HOST:29000",
    }
    return f"{needs[topology]}, {here}"


def _pathways(environment: Mapping[str, str]) -> Cluster:
    target = environment.get("JAX_BACKEND_TARGET", "")
    if "://" not in target:
        raise ValueError(
            f"JAX_PLATFORMS={environment['JAX_PLATFORMS']} but JAX_BACKEND_TARGET={target!r}: it must be the address "
            "of the Pathways proxy, as grpc://HOST:29000."
        )
    return Cluster("pathways", "pathways", coordinator=target)


def _jobset_split(environment: Mapping[str, str]) -> Cluster:
    role = environment.get("PODRL_ROLE", "")
    if role not in ROLES:
        raise ValueError(f"PODRL_ROLE={role!r} must be trainer or rollout: it comes from the replicated job's name.")
    slices = _integer(environment, "PODRL_SLICES", low=1)
    hosts = _integer(environment, "PODRL_HOSTS_PER_SLICE", low=1)
    slice_index = _integer(environment, "PODRL_SLICE_INDEX", below=slices, total="PODRL_SLICES")
    host_index = _integer(environment, "PODRL_HOST_INDEX", below=hosts, total="PODRL_HOSTS_PER_SLICE")
    names = _hostnames(environment)
    if names and len(names) != hosts:
        raise ValueError(
            f"PODRL_HOSTS_PER_SLICE={hosts} but TPU_WORKER_HOSTNAMES (or TPU_PROCESS_ADDRESSES) names "
            f"{len(names)} hosts: the slice that was scheduled is not the one asked for; check the topology in "
            "--trainer and --rollout of launch/gke.py."
        )
    joined = role == "trainer" and slices > 1
    return Cluster(
        "jobset_split",
        "split",
        process_index=slice_index * hosts + host_index if joined else host_index,
        process_count=slices * hosts if joined else hosts,
        role=role,
        slice_index=slice_index,
        slice_count=slices,
        coordinator=_address(environment, "PODRL_COORDINATOR"),
        channel=_address(environment, "PODRL_CHANNEL"),
        trainers=_processes(environment, "TRAINER"),
        rollouts=_processes(environment, "ROLLOUT"),
        restart_attempt=_restart_attempt(environment),
        # GKE gives every replica of a replicated job the MEGASCALE variables of one multislice job. Rollout slices, and
        # a trainer of one slice, are clusters of their own.
        unset=() if joined else MEGASCALE,
    )


def _processes(environment: Mapping[str, str], role: str) -> int:
    slices = _integer(environment, f"PODRL_{role}_SLICES", low=1)
    return slices * _integer(environment, f"PODRL_{role}_HOSTS_PER_SLICE", low=1)


def _local(environment: Mapping[str, str]) -> Cluster:
    count = _integer(environment, "PODRL_PROCESS_COUNT", low=1)
    index = _integer(environment, "PODRL_PROCESS_INDEX", below=count, total="PODRL_PROCESS_COUNT")
    role = environment.get("PODRL_ROLE") or None
    if role is not None and role not in ROLES:
        raise ValueError(f"PODRL_ROLE={role!r} must be trainer or rollout, or be left unset.")
    coordinator = environment.get("PODRL_COORDINATOR", "") if count > 1 else ""
    if count > 1 and not coordinator.startswith(UNIX):
        coordinator = _address(environment, "PODRL_COORDINATOR")
    topology: Topology = "shared" if count > 1 else "single"
    # A Unix socket has no port from which the channel's address could be derived.
    needed = environment.get("PODRL_CHANNEL") or coordinator.startswith(UNIX)
    channel = _address(environment, "PODRL_CHANNEL") if needed else ""
    return Cluster("local", topology, index, count, role=role, coordinator=coordinator, channel=channel)


def _gke(environment: Mapping[str, str]) -> Cluster:
    names = _hostnames(environment)
    if not names:
        raise ValueError(
            f"TPU_WORKER_ID={environment['TPU_WORKER_ID']} but TPU_WORKER_HOSTNAMES is empty: GKE sets both for an "
            "indexed Job with a headless service (JobSet: network.enableDNSHostnames)."
        )
    host = _integer(environment, "TPU_WORKER_ID", below=len(names), total="hosts in TPU_WORKER_HOSTNAMES")
    slices = _integer(environment, "MEGASCALE_NUM_SLICES", low=1) if environment.get("MEGASCALE_NUM_SLICES") else 1
    restarts = _restart_attempt(environment)
    if slices == 1:
        topology: Topology = "shared" if len(names) > 1 else "single"
        coordinator = _with_port(names[0]) if len(names) > 1 else ""
        return Cluster("gke", topology, host, len(names), coordinator=coordinator, restart_attempt=restarts)
    slice_index = _integer(environment, "MEGASCALE_SLICE_ID", below=slices, total="MEGASCALE_NUM_SLICES")
    leader = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    if not leader:
        raise ValueError(f"MEGASCALE_NUM_SLICES={slices} but MEGASCALE_COORDINATOR_ADDRESS is empty: set both or none.")
    return Cluster(
        "multislice",
        "shared",
        process_index=slice_index * len(names) + host,
        process_count=slices * len(names),
        slice_index=slice_index,
        slice_count=slices,
        coordinator=_with_port(leader),
        restart_attempt=restarts,
    )


def _tpu_vm(metadata: Mapping[str, str]) -> Cluster:
    workers = _workers(metadata)
    if not workers:
        raise ValueError(
            "TPU VM metadata has agent-worker-number but no worker-network-endpoints: the TPU is not READY."
        )
    index = _integer(metadata, "agent-worker-number", below=len(workers), total="worker-network-endpoints")
    topology: Topology = "shared" if len(workers) > 1 else "single"
    coordinator = _with_port(workers[0]) if len(workers) > 1 else ""
    return Cluster("tpu_vm", topology, index, len(workers), coordinator=coordinator)


def _workers(metadata: Mapping[str, str]) -> list[str]:
    workers = []
    for worker in filter(None, metadata.get("worker-network-endpoints", "").split(",")):
        parts = worker.strip().split(":")  # 'host', or 'name:id:ip' on older runtimes
        workers.append(parts[2] if len(parts) == 3 else parts[0])
    return workers


def _hostnames(environment: Mapping[str, str]) -> list[str]:
    text = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    return [name.strip() for name in text.split(",") if name.strip()]


def _with_port(host: str) -> str:
    return f"{host.split(':')[0]}:{COORDINATOR_PORT}"


def _address(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{name}={value!r} must be HOST:PORT.")
    return value


def _restart_attempt(environment: Mapping[str, str]) -> int:
    return _integer(environment, "PODRL_RESTART_ATTEMPT") if environment.get("PODRL_RESTART_ATTEMPT") else 0


def _integer(values: Mapping[str, str], name: str, *, low: int = 0, below: int | None = None, total: str = "") -> int:
    text = values.get(name, "")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be an integer: whoever starts the process must set it.") from None
    if number < low:
        raise ValueError(f"{name}={number} must be at least {low}.")
    if below is not None and number >= below:
        raise ValueError(f"{name}={number} must be below {below} ({total}): numbers begin at 0.")
    return number


def tpu_vm_metadata(
    environment: Mapping[str, str], *, devices: pathlib.Path = pathlib.Path("/dev"), timeout_s: float = 5.0
) -> dict[str, str]:
    """Reads instance attributes of the TPU VM that this process runs on; empty on any other machine.

    Asks the metadata server (GCE_METADATA_IP or metadata.google.internal) only if TPU device files exist, so that a
    laptop never waits for a name that does not resolve.

    Args:
      environment: environment variables, usually os.environ; if they have GKE's host names, TPU_SKIP_MDS_QUERY or
        PODRL_PLATFORM, the server is not asked.
      devices: directory of device files.
      timeout_s: longest wait for each attribute, in seconds.
    """
    if _hostnames(environment) or environment.get("TPU_SKIP_MDS_QUERY") or environment.get("PODRL_PLATFORM"):
        return {}
    if not (any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*"))):
        return {}
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    found = {}
    for key in _METADATA_KEYS:
        request = urllib.request.Request(
            f"http://{server}/computeMetadata/v1/instance/attributes/{key}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            found[key] = ask(request, timeout_s=timeout_s).decode().strip()
        except urllib.error.HTTPError as error:
            error.close()  # this machine does not have the attribute
        except OSError:
            return {}
    return found


def check_fresh_jax(modules: Mapping[str, object]) -> None:
    """Refuses to continue if a jax backend exists already: flags and environment variables could no longer affect it.

    Args:
      modules: loaded modules by name, usually sys.modules.

    Raises:
      ValueError: a backend exists.
    """
    bridge = modules.get("jax._src.xla_bridge")
    backends = sorted(getattr(bridge, "_backends", None) or ())
    if backends:
        raise ValueError(
            f"jax was initialised before podrl.launch (backends {', '.join(backends)}): platform, device count and "
            "jax.distributed can no longer be set. Import nothing that calls jax.devices() or makes an array first, "
            "such as the configuration file or sitecustomize."
        )


def check_pathways(cluster: Cluster, find_spec: Callable[[str], Any] = importlib.util.find_spec) -> None:
    """Refuses Pathways without its client library.

    Raises:
      ValueError: the cluster is a Pathways cluster and `pathwaysutils` cannot be imported.
    """
    if cluster.kind == "pathways" and find_spec("pathwaysutils") is None:
        raise ValueError(
            "JAX_PLATFORMS=proxy but pathwaysutils is missing: pip install pathwaysutils in this image, or unset "
            "JAX_PLATFORMS and JAX_BACKEND_TARGET to run without Pathways."
        )


def check_shared_directory(path: str, cluster: Cluster, mounts: str, *, flag: str = "--workdir") -> None:
    """Refuses a checkpoint directory that only one of several hosts could read back.

    Args:
      path: the directory, a local path or a URL such as gs://bucket/run.
      cluster: place of this process. Fake hosts on one machine share its file system, so `local` passes.
      mounts: text of /proc/mounts; '' if there is none, and then only URLs are accepted.
      flag: name of the flag that the path came from, for the message.

    Raises:
      ValueError: the cluster has several hosts, and the path is not on a known network file system.
    """
    # In a split JobSet other slices may have the same role even if this cluster has one process.
    if cluster.process_count == 1 and cluster.kind != "jobset_split":
        return
    if cluster.kind in ("single", "local", "pathways") or "://" in path:
        return
    if on_network(path, mounts):
        return
    hosts = "hosts of the other role, too" if cluster.process_count == 1 else f"{cluster.process_count} hosts"
    if cluster.process_count > 1 and cluster.topology == "split":
        hosts += " in this role alone"
    raise ValueError(
        f"checkpoint directory is host-local and this run has {hosts}: {flag}={path} names a different directory on "
        f"each. Use {flag}=gs://BUCKET/RUN or a directory on a mounted network file system, or give --shared_workdir "
        "if it is one."
    )


def too_few_workers(cluster: Cluster, reached: int, waited_s: float) -> str:
    """Returns the message of the error for processes that did not reach the coordinator in time.

    Args:
      cluster: place of the process that waited.
      reached: number of processes that came, the waiting process included.
      waited_s: seconds waited.
    """
    workers = {"local": "local processes", "jobset_split": f"{cluster.role} pods"}.get(cluster.kind, "TPU workers")
    remedy = {
        "local": "Read the log of the missing ranks above.",
        "tpu_vm": "Start the program on every host: run with --worker=all, as launch/tpu_vm.sh does.",
        "flags": "Start the program on every host, with the same --coordinator and --num_processes, and --process_id "
        "from 0 on; and let the port of the coordinator through between them.",
    }.get(cluster.kind, "See which pods are not Running: kubectl get pods -o wide.")
    return (
        f"Only {reached} of {cluster.process_count} {workers} reached the coordinator {cluster.coordinator} within "
        f"{waited_s:.0f} s. {remedy}"
    )
