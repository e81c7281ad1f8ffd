"""Places the models of a job on devices: reads the configuration of the roles, and builds their meshes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from podrl.config import section
from podrl.mesh.build import check_decodes, make_mesh, set_aside, share_of_mesh, split_devices
from podrl.runtime.roles import ROLLOUT, TRAINER, Hosts
from podrl.types import JaxDevice

_AUTO = {TRAINER: "fsdp=-1", ROLLOUT: "data=-1"}


@section("roles")
@dataclasses.dataclass(frozen=True)
class RoleConfig:
    """Settings of one role: its devices and mesh.

    Attributes:
      mesh: axes of the mesh and their sizes, such as 'fsdp=4' or 'data=2,tensor=2'. 'expert=4,fsdp=2' spreads experts
        over 4 devices. 'fsdp=4,seq=4' cuts rows along time, for the trainer only. 'auto' is one axis over all devices:
        fsdp for the trainer, data for the rollout.
      hosts: numbers of the role's hosts, such as '0-1' or '0,2-3', in a job of several hosts. '' takes the hosts that
        no other role names; if neither trainer nor rollout names hosts, the first half of them trains.
    """

    mesh: str = "auto"
    hosts: str = ""


@section(
    "roles",
    {
        "hosts": "a critic and teachers are on the trainer hosts, and a reward model is on the rollout hosts: set "
        "roles.trainer.hosts and roles.rollout.hosts.",
    },
)
@dataclasses.dataclass(frozen=True)
class AuxiliaryConfig:
    """Settings of an auxiliary model: its devices and mesh.

    Attributes:
      mesh: role whose mesh the model shares: 'trainer' for a critic or teachers, 'rollout' for a reward model. Or a
        separate mesh such as 'fsdp=2', whose devices are taken from this role, equally many on each of the role's
        hosts.
    """

    mesh: str


@section(
    "roles.eval",
    former={
        "mesh": "evaluations run on the rollout mesh, and training waits for them; with --topology=split, "
        "roles.eval.hosts names hosts that evaluate while training continues, with the mesh of a rollout host."
    },
)
@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Settings of the evaluation hosts, whose evaluations run while training continues.

    Attributes:
      hosts: numbers of hosts that evaluate and do nothing else, such as '3' or '6-7', in topology=split; '' for none.
        An evaluation host has the mesh of a rollout host.
    """

    hosts: str = ""


@section("roles")
@dataclasses.dataclass(frozen=True)
class RolesConfig:
    """Settings of the devices that each role uses.

    Attributes:
      trainer: devices of the actor and the reference.
      rollout: devices of the engine that decodes.
      critic: devices of PPO's critic. Critic and actor learn in turn, so a separate mesh saves memory but no time.
      teacher: devices of `model.teachers`. Teachers score before the actor learns, so a separate mesh saves memory but
        no time.
      reward: devices of the model of `reward.model`.
      eval: hosts whose evaluations run while training continues.
      colocated: True if, in a job of one process, all roles share all devices; in a pod each host has its own role.
    """

    trainer: RoleConfig = RoleConfig()
    rollout: RoleConfig = RoleConfig()
    critic: AuxiliaryConfig = AuxiliaryConfig(TRAINER)
    teacher: AuxiliaryConfig = AuxiliaryConfig(TRAINER)
    reward: AuxiliaryConfig = AuxiliaryConfig(ROLLOUT)
    eval: EvaluationConfig = EvaluationConfig()
    colocated: bool = False

    def __post_init__(self):
        check_decodes(self.rollout.mesh, key="roles.rollout.mesh")
        for name, mesh, host, other in (
            ("critic", self.critic.mesh, TRAINER, ROLLOUT),
            ("teacher", self.teacher.mesh, TRAINER, ROLLOUT),
            ("reward", self.reward.mesh, ROLLOUT, TRAINER),
        ):
            if mesh == other:
                raise ValueError(
                    f"roles.{name}.mesh={mesh!r} must be {host!r}, whose hosts it is on, or a mesh such as 'fsdp=2'."
                )
        if self.colocated and self.reward.mesh != ROLLOUT:
            raise ValueError(
                f"roles.reward.mesh={self.reward.mesh!r} must be 'rollout' with roles.colocated=True: colocated "
                "roles leave no devices for a mesh of the reward model."
            )


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The mesh of every role, over the devices of this process's cluster.

    With topology=split, trainers and rollouts are separate clusters. The meshes of roles on the other cluster are then
    placeholders.

    Attributes:
      trainer: mesh of the actor and the reference.
      rollout: mesh of the engine.
      critic: mesh of the critic; the trainer mesh unless roles.critic.mesh describes another.
      reward: mesh of the reward model; the rollout mesh unless roles.reward.mesh describes another.
      own_teacher: mesh of the teachers if roles.teacher.mesh describes one; None if they share the trainer mesh.
    """

    trainer: Mesh
    rollout: Mesh
    critic: Mesh
    reward: Mesh
    own_teacher: Mesh | None = None

    @property
    def teacher(self) -> Mesh:
        """Mesh of the teachers: `own_teacher`, or else the trainer mesh."""
        return self.own_teacher or self.trainer


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """A device of a pod that is planned and not started, with the fields that meshes read.

    Attributes:
      id: number of the device in the pod.
      process_index: number of its process in the pod.
      device_kind: kind of the device.
      platform: jax's name of the backend.
    """

    id: int
    process_index: int
    device_kind: str = "cpu"
    platform: str = "cpu"


@dataclasses.dataclass(frozen=True)
class PlannedPod:
    """The processes of a pod that is planned and not started.

    Attributes:
      hosts: role of every process.
      share: number of devices of each process.
      split: True if trainers and rollouts are separate clusters (topology=split).
    """

    hosts: Hosts
    share: int
    split: bool

    def meshes(self, roles: RolesConfig) -> "Meshes":
        """Builds the meshes of all roles; under topology=split the rollout's mesh is the mesh of one replica.

        Raises:
          ValueError: a mesh does not fit its devices.
        """

        def of(processes: Sequence[int]) -> Any:
            return [PlannedDevice(self.share * p + i, p) for p in processes for i in range(self.share)]

        hosts = self.hosts
        if not self.split:
            return _of_clusters(roles, of(hosts.trainer), of(hosts.rollout))
        on = _of_trainers(roles, of(hosts.trainer))
        theirs = _of_a_rollout_cluster(roles, hosts, of(hosts.replica_of(hosts.rollout[0])))
        return dataclasses.replace(on, rollout=theirs.rollout, reward=theirs.reward)


def meshes(roles: RolesConfig, hosts: Hosts | None = None, *, split: bool = False, role: str = TRAINER) -> Meshes:
    """Builds the meshes of all roles.

    Args:
      roles: the configured meshes.
      hosts: role of every process, if there are several; None divides the devices of one process between the roles.
      split: True if trainers and rollouts are separate clusters (topology=split).
      role: role of this process; read only if `split`.

    Raises:
      ValueError: a mesh does not fit its devices.
    """
    devices = jax.devices()
    if hosts is not None and split and role != TRAINER:
        own = jax.process_index() // hosts.replica
        return _of_a_rollout_cluster(roles, hosts, [d for d in devices if d.process_index // hosts.replica == own])
    if hosts is not None and split:
        return _of_trainers(roles, devices)
    if hosts is not None:
        mine, theirs = ([d for d in devices if d.process_index in which] for which in (hosts.trainer, hosts.rollout))
        return _of_clusters(roles, mine, theirs)
    if roles.colocated or len(devices) == 1:
        try:
            return _of_devices(roles, devices, devices, scores=devices, values=devices, teaches=devices)
        except ValueError as error:
            if not roles.colocated:
                raise
            shared = "With roles.colocated=True every role has all devices; roles.colocated=False divides them."
            raise ValueError(f"{error} {shared}") from None
    left, scores = _cut(devices, roles.reward, "reward", ROLLOUT)
    left, values = _cut(left, roles.critic, "critic", TRAINER)
    left, teaches = _cut(left, roles.teacher, "teacher", TRAINER)
    mine, theirs = split_devices(left, roles.trainer.mesh, roles.rollout.mesh)
    return _of_devices(roles, mine, theirs, scores=scores, values=values, teaches=teaches)


def _of_trainers(roles: RolesConfig, devices: Sequence[JaxDevice]) -> Meshes:
    """Builds the meshes of the trainers' cluster; the meshes of the other roles are placeholders."""
    mine, values = _cut(devices, roles.critic, "critic", TRAINER)
    mine, teaches = _cut(mine, roles.teacher, "teacher", TRAINER)
    trainer = _whole(roles.trainer, mine, TRAINER)
    critic = _own(roles.critic, values, "critic", trainer)
    return Meshes(trainer, trainer, critic, trainer, _own(roles.teacher, teaches, "teacher", trainer))


def _of_clusters(roles: RolesConfig, mine: Sequence[JaxDevice], theirs: Sequence[JaxDevice]) -> Meshes:
    """Builds the meshes of all roles over the devices of the trainers' hosts and of the rollouts' hosts."""
    mine, values = _cut(mine, roles.critic, "critic", TRAINER)
    mine, teaches = _cut(mine, roles.teacher, "teacher", TRAINER)
    theirs, scores = _cut(theirs, roles.reward, "reward", ROLLOUT)
    return _of_devices(roles, mine, theirs, scores=scores, values=values, teaches=teaches)


def _of_devices(
    roles: RolesConfig,
    mine: Sequence[JaxDevice],
    theirs: Sequence[JaxDevice],
    *,
    scores: Sequence[JaxDevice],
    values: Sequence[JaxDevice],
    teaches: Sequence[JaxDevice],
) -> Meshes:
    """Builds the meshes over the devices of trainer and rollout, and of reward model, critic and teachers."""
    trainer, rollout = _whole(roles.trainer, mine, TRAINER), _whole(roles.rollout, theirs, ROLLOUT)
    reward = _own(roles.reward, scores, "reward", rollout)
    teacher = _own(roles.teacher, teaches, "teacher", trainer)
    return Meshes(trainer, rollout, _own(roles.critic, values, "critic", trainer), reward, teacher)


def _of_a_rollout_cluster(roles: RolesConfig, hosts: Hosts, devices: Sequence[JaxDevice]) -> Meshes:
    """Builds the meshes of one rollout replica (mostly one host) or of an evaluation host, over its own devices
    only."""
    count = max(len(hosts.heads), 1)
    mine, scores = _cut(devices, roles.reward, "reward", ROLLOUT, hosts=max(len(hosts.rollout), 1))
    rollout = reward = share_of_mesh(roles.rollout.mesh, mine, count, key="roles.rollout.mesh")
    if roles.reward.mesh != ROLLOUT:
        reward = share_of_mesh(roles.reward.mesh, scores, count, key="roles.reward.mesh")
    return Meshes(rollout, rollout, rollout, reward)


def _cut(
    devices: Sequence[JaxDevice], model: AuxiliaryConfig, name: str, host: str, *, hosts: int = 0
) -> tuple[Sequence[JaxDevice], Sequence[JaxDevice]]:
    """Sets devices aside for an auxiliary model with its own mesh: (remaining devices, devices of the model)."""
    if model.mesh == host:
        return devices, ()
    return set_aside(devices, model.mesh, key=f"roles.{name}.mesh", shared=host, hosts=hosts)


def _own(model: AuxiliaryConfig, devices: Sequence[JaxDevice], name: str, shared: Mesh) -> Mesh:
    own = model.mesh not in (TRAINER, ROLLOUT)
    return make_mesh(model.mesh, devices, key=f"roles.{name}.mesh") if own else shared


def _whole(role: RoleConfig, devices: Sequence[JaxDevice], name: str) -> Mesh:
    return make_mesh(role.mesh, devices, key=f"roles.{name}.mesh", auto=_AUTO[name])
