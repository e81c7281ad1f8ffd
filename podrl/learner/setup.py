"""What every job starts from: a model directory and devices in roles."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from podrl.mesh.build import make_mesh, share_of_mesh, split_devices
from podrl.models.config import LoraConfig
from podrl.runtime.roles import Hosts
from podrl.runtime.storage import Place, locate

TINY = pathlib.Path(__file__).resolve().parent.parent / "assets" / "tiny"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Which weights a job starts from.

    Attributes:
      path: a Hugging Face directory, local or gs://; 'tiny' is the checkpoint shipped with podrl.
      size: the published size (podrl/models/sizes.py) that podrl.plan takes where `path` is empty.
      reference: directory of the reference policy; '' for the starting weights.
      critic: directory of the critic's starting weights; '' for a copy of the policy with a value head.
      lora: adapters; rank 0 trains all parameters.
    """

    path: str = "tiny"
    size: str = ""
    reference: str = ""
    critic: str = ""
    lora: LoraConfig = LoraConfig()

    @property
    def directory(self) -> Place:
        path = TINY if self.path == "tiny" else locate(self.path)
        if not path.is_dir():
            raise ValueError(
                f"model.path={self.path!r} is not a directory: give a Hugging Face directory (config.json, "
                "safetensors, tokenizer files), or 'tiny' for the checkpoint that comes with podrl."
            )
        return path


@dataclasses.dataclass(frozen=True)
class RoleConfig:
    """Devices of one role.

    Attributes:
      mesh: 'fsdp=4', 'data=2,tensor=2', or 'auto' (trainer fsdp, rollout data).
      hosts: numbers of the hosts, '0-1' or '0,2-3', where the job has several; '' is what the other role leaves, and
        half each if neither says.
    """

    mesh: str = "auto"
    hosts: str = ""


@dataclasses.dataclass(frozen=True)
class RolesConfig:
    """Which devices do what; `colocated` gives both roles all devices."""

    trainer: RoleConfig = RoleConfig()
    rollout: RoleConfig = RoleConfig()
    colocated: bool = False


def meshes(
    roles: RolesConfig, hosts: Hosts | None = None, *, split: bool = False, trains: bool = True
) -> tuple[Mesh, Mesh]:
    """(trainer mesh, rollout mesh) over all devices of this process's cluster.

    Args:
      roles: the configuration.
      hosts: who does what, where there are several processes; None splits the devices of one process.
      split: each role is a cluster of its own: both meshes are then that of this process's role.
      trains: this process's role, under split.
    """
    if hosts is not None and split:
        name, role = ("trainer", roles.trainer) if trains else ("rollout", roles.rollout)
        if trains:
            mesh = make_mesh(role.mesh, jax.devices(), key=f"roles.{name}.mesh", auto="fsdp=-1")
        else:
            mesh = share_of_mesh(role.mesh, jax.local_devices(), len(hosts.rollout), key=f"roles.{name}.mesh")
        return mesh, mesh
    if hosts is not None:
        devices = jax.devices()
        trainer, rollout = (
            make_mesh(
                role.mesh, [d for d in devices if d.process_index in numbers], key=f"roles.{name}.mesh", auto=auto
            )
            for role, numbers, name, auto in (
                (roles.trainer, hosts.trainer, "trainer", "fsdp=-1"),
                (roles.rollout, hosts.rollout, "rollout", "data=-1"),
            )
        )
        return trainer, rollout
    trainer, rollout = split_devices(jax.devices(), roles.trainer.mesh, roles.rollout.mesh, colocated=roles.colocated)
    return (
        make_mesh(roles.trainer.mesh, trainer, key="roles.trainer.mesh", auto="fsdp=-1"),
        make_mesh(roles.rollout.mesh, rollout, key="roles.rollout.mesh", auto="data=-1"),
    )
