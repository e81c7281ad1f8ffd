"""What every job starts from: a model directory and devices in roles."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from podrl.mesh.build import make_mesh, split_devices
from podrl.models.config import LoraConfig

TINY = pathlib.Path(__file__).resolve().parent.parent / "assets" / "tiny"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Which weights a job starts from.

    Attributes:
      path: a Hugging Face directory; 'tiny' is the checkpoint shipped with podrl.
      reference: directory of the reference policy; '' for the starting weights.
      lora: adapters; rank 0 trains all parameters.
    """

    path: str = "tiny"
    reference: str = ""
    lora: LoraConfig = LoraConfig()

    @property
    def directory(self) -> pathlib.Path:
        path = TINY if self.path == "tiny" else pathlib.Path(self.path).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"model.path={self.path!r} is not a directory: give a Hugging Face directory (config.json, "
                "safetensors, tokenizer files), or 'tiny' for the checkpoint that comes with podrl."
            )
        return path


@dataclasses.dataclass(frozen=True)
class RoleConfig:
    """Devices of one role. mesh: 'fsdp=4', 'data=2,tensor=2', or 'auto' (trainer fsdp, rollout data)."""

    mesh: str = "auto"


@dataclasses.dataclass(frozen=True)
class RolesConfig:
    """Which devices do what; `colocated` gives both roles all devices."""

    trainer: RoleConfig = RoleConfig()
    rollout: RoleConfig = RoleConfig()
    colocated: bool = False


def meshes(roles: RolesConfig) -> tuple[Mesh, Mesh]:
    """(trainer mesh, rollout mesh) over this process's devices."""
    trainer, rollout = split_devices(jax.devices(), roles.trainer.mesh, roles.rollout.mesh, colocated=roles.colocated)
    return (
        make_mesh(roles.trainer.mesh, trainer, key="roles.trainer.mesh", auto="fsdp=-1"),
        make_mesh(roles.rollout.mesh, rollout, key="roles.rollout.mesh", auto="data=-1"),
    )
