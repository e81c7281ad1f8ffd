"""Supervised fine-tuning on the same trainer, loop and checkpoints; makes the embedded checkpoint."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podrl.cluster.rl_cluster import RLCluster
from podrl.config import build
from podrl.data.pipeline import DataConfig
from podrl.data.sft import SFTConfig, SFTStream
from podrl.learner import describe, job
from podrl.learner.evaluate import EvalConfig
from podrl.learner.loop import InFlight, Schedule, train
from podrl.learner.parts import LearnerParts, Ready
from podrl.learner.run import Run
from podrl.learner.setup import ModelSource, RolesConfig, meshes
from podrl.models.config import gemma2_config
from podrl.models.pretrained import Decoder, init_decoder
from podrl.rollout.config import RolloutConfig
from podrl.runtime.checkpoint import CheckpointConfig
from podrl.runtime.metrics import LogConfig
from podrl.trainer import packing
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.objective import CrossEntropy
from podrl.types import Policy


@dataclasses.dataclass(frozen=True)
class ScratchModel:
    """A Gemma 2 decoder with random weights; see podrl.models.config.gemma2_config."""

    num_layers: int = 3
    model_dim: int = 128
    ffn_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 64
    max_length: int = 1024


@dataclasses.dataclass(frozen=True)
class SFTJob:
    """Everything `--config` says about a supervised job. `scratch` is used where model.path is 'scratch'."""

    trainer: RLTrainingConfig
    algorithm: str = "sft"
    seed: int = 0
    fake_devices: int = 0
    tokenizer: str = ""
    model: ModelSource = ModelSource()
    scratch: ScratchModel = ScratchModel()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    rollout: RolloutConfig = RolloutConfig()
    roles: RolesConfig = RolesConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    export: str = ""
