"""Counts the copies of the policy's weights that a device of the trainer and a device of the rollout hold."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podrl import offload
from podrl.config import named
from podrl.engine.engine import unrolls
from podrl.job.config import SCRATCH, Job
from podrl.models import parameters
from podrl.models.config import LoraConfig, ModelConfig
from podrl.models.hf_config import read_config
from podrl.models.sizes import config_of
from podrl.types import PyTree


@dataclasses.dataclass(frozen=True)
class Copies:
    """The number of copies of the policy's weights, and the bytes of one copy on a device.

    Attributes:
      versions: largest number of versions that a trainer keeps for other hosts under `topology=split`; a version holds
        the weights that move every step.
      version_bytes: bytes of one version on a trainer's device.
      generating: number of copies on a rollout's device while it generates: 1, or 2 if layers are unrolled, because the
        weights are then held layer by layer as well.
      policy_bytes: bytes of one copy on a rollout's device.
    """

    versions: int
    version_bytes: float
    generating: int
    policy_bytes: float

    @property
    def on_trainer(self) -> float:
        """Bytes of all versions on a trainer's device under `topology=split`."""
        return self.versions * self.version_bytes

    @property
    def on_rollout(self) -> float:
        """Bytes of all copies on a rollout's device while it generates."""
        return self.generating * self.policy_bytes

    def of_trainer(self) -> str:
        """Describes the versions on a trainer's device in words."""
        return (
            f"up to {self.versions} versions of the weights, each {_size(self.version_bytes)}, {_size(self.on_trainer)}"
        )

    def of_rollout(self) -> str:
        """Describes the copies on a rollout's device in words."""
        times = {1: "once", 2: "twice"}[self.generating]
        return f"{_size(self.policy_bytes)} {times}, {_size(self.on_rollout)}"


def model_of(job: Job) -> ModelConfig:
    """Reads the configuration of the model that a job trains, from `model.path` or for the published `model.size`.

    Raises:
      ValueError: both keys are empty.
    """
    source = job.model
    if source.path == SCRATCH:
        vocabulary = source.open_tokenizer(job.tokenizer).vocab_size
        config = job.scratch.model(vocabulary)
    elif source.path:
        with named("model.path", source.path):
            config = read_config(source.directory)
    elif source.size:
        with named("model.size", source.size):
            config = config_of(source.size)
    else:
        raise ValueError(
            "There is no model to plan: set --config.model.path=DIR, or --config.model.size to a published size, "
            "such as gemma2-2b."
        )
    return dataclasses.replace(config, lora=source.lora)


def rollout_model(job: Job, model: ModelConfig) -> ModelConfig:
    """Returns the model that the rollout decodes, without adapters if they are merged."""
    return dataclasses.replace(model, lora=LoraConfig()) if job.rollout.merge_adapters else model


def rollout_dtype(job: Job) -> jnp.dtype:
    """Returns the type of the weights on the rollout mesh; the weights also move there in this type."""
    return jnp.dtype(job.rollout.data_type or job.trainer.dtype)


def copies(job: Job, trainer: Mesh, rollout: Mesh) -> Copies:
    """Counts the copies of a job's weights on these meshes, from shapes alone."""
    model, dtype = model_of(job), rollout_dtype(job)
    decoded = rollout_model(job, model)
    moved, _ = parameters.split_trainable(parameters.abstract_params(decoded, trainer, dtype), decoded)
    policy = parameters.abstract_params(decoded, rollout, dtype)
    generating = 2 if unrolls(decoded, rollout, dtype) else 1
    # Trainers keep one more version for evaluation hosts, which may still pull it when rollout hosts need newer ones.
    versions = job.kept_versions + bool(job.roles.eval.hosts)
    return Copies(versions, device_bytes(moved), generating, device_bytes(policy))


def device_bytes(tree: PyTree) -> float:
    """Counts the bytes of a tree of shapes with shardings on one device; arrays in the host's memory do not count."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != offload.HOST]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _size(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
