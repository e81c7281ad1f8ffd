"""A trained scalar model on its mesh with its optimizer: the critic, or a reward model that learns."""

import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podrl.mappings import Metrics
from podrl.mesh.backlog import Backlog
from podrl.models import scalar
from podrl.models.config import LoraConfig
from podrl.models.pretrained import Decoder
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.critic import ScoreForward, ValueForward, ValueLoss, make_critic_step, make_value_fn
from podrl.trainer.state import abstract_like, fetch, init_train_state, put_batch
from podrl.types import Batch, Layout, TrainState


class Critic:
    """A model with its own optimizer. A critic computes the value before each token, a reward model the score after it.

    Attributes:
      model: configuration of the model's trunk.
      mesh: mesh that the model lives on.
      state: trainable parameters, optimizer state and step.
      frozen: parameters that are not trained (under LoRA the trunk's base, shared with the actor if the critic started
        from the actor on the actor's mesh).
    """

    def __init__(
        self,
        source: str | os.PathLike | Decoder,
        mesh: Mesh,
        training: RLTrainingConfig,
        *,
        lora: LoraConfig | None = None,
        seed: int = 0,
        scores: bool = False,
    ):
        """Puts the critic on its mesh.

        Args:
          source: a Hugging Face directory (a sequence classification model keeps its head), or a decoder, which is
            copied.
          mesh: mesh that the model goes to.
          training: optimizer, dtypes, batch sizes.
          lora: adapters to add if `source` is a directory.
          seed: seed of fresh adapters and of dropout.
          scores: True for a reward model that the job trains, with the actor's optimizer settings and metric names;
            False for a critic.
        """
        self.mesh, self.training_config, self._seed = mesh, training, seed
        dtype = jnp.dtype(training.param_dtype)
        if isinstance(source, str | os.PathLike):
            self.model, params = scalar.load(
                os.fspath(source), mesh, dtype, lora_config=lora, needs_head=False, seed=seed
            )
        else:
            self.model = source.config
            params = scalar.on_trunk(source.params, self.model, mesh, dtype)
        make = training.optimizer if scores else training.critic
        self.optimizer = make()
        self._reads: Any = ScoreForward if scores else ValueForward
        self._prefix = "actor" if scores else "critic"
        trainable, frozen = scalar.split_trainable(params, self.model)
        self.frozen = training.place_frozen(frozen, self.model.lora, mesh)
        self.state = init_train_state(trainable, self.optimizer, mesh)
        self._values = make_value_fn(self.model, mesh, dtype=training.dtype, reads=self._reads)
        self._step: Callable | None = None
        self._backlog = Backlog()

    def prepare(self, loss: ValueLoss) -> None:
        """Builds the train step that minimises `loss`."""
        self._step = make_critic_step(
            self.model,
            loss,
            self.optimizer,
            self.mesh,
            dtype=self.training_config.dtype,
            param_dtype=self.training_config.param_dtype,
            remat=self.training_config.remat,
            seed=self._seed,
            reads=self._reads,
            prefix=self._prefix,
        )

    def values(self, batch: Batch[Layout]) -> np.ndarray:
        """Computes the value or score of every packed token of a host batch: (A, B, T), on the host."""
        params = scalar.join_trainable(self.state.params, self.frozen)
        return fetch(self._values(params, put_batch(batch, self.mesh)), self.mesh)

    def update(self, batch: Batch[Any]) -> Metrics:
        """Makes one optimizer update from a host batch; returns metrics by name, which stay on the device.

        Raises:
          ValueError: `prepare` was not called before.
        """
        if self._step is None:
            raise ValueError("The model needs a loss: call prepare(loss) first; learners do.")
        self.state, metrics = self._step(self.state, self.frozen, put_batch(batch, self.mesh))
        self._backlog.add(metrics)
        return metrics

    def abstract_state(self) -> TrainState:
        """Returns shapes and shardings of `state`, for restoring a checkpoint."""
        return abstract_like(self.state, self.optimizer, self.mesh)
