"""The models of a job that trains a reward model: a scalar model in the actor's place, and no rollouts."""

from typing import Any

import jax

from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.critic import Critic
from podrl.data.tokenizer import Tokenizer
from podrl.mappings import Metrics
from podrl.models.config import LoraConfig, ModelConfig
from podrl.models.pretrained import check_vocab
from podrl.rundir.metrics import UserMetrics
from podrl.types import Batch, TrainState


class ScorerCluster:
    """Holds a reward model that learns. It has the methods of RLCluster that training on recorded answers needs.

    Attributes:
      actor: the model; None on a process without devices of its mesh.
      actor_mesh: mesh that the model lies on.
      rollout_mesh: mesh of the rollout, whose devices are idle.
      trains, generates: True if this process has devices of the actor's mesh, and of the rollout mesh.
      config: meshes and training configuration.
      training_config: training configuration of `config`.
      tokenizer: tokenizer of the model.
      metrics: values and loggers that users add to the run's records.
    """

    critic = reward_model = env_client = None

    def __init__(
        self,
        source: Any,
        tokenizer: Tokenizer,
        config: ClusterConfig,
        *,
        lora: LoraConfig,
        seed: int,
        trains: bool | None = None,
    ):
        """Puts the model on the actor's mesh.

        Args:
          source: a Hugging Face directory, or a decoder. If the directory lacks `score.weight`, every score starts at
            0.
          tokenizer: tokenizer of the model.
          config: meshes and training configuration.
          lora: adapters to add if `source` is a directory.
          seed: seed of fresh adapters and of dropout.
          trains: True if this process is a trainer and False if it is a rollout, for separate clusters of trainers and
            rollouts; None for one cluster.
        """
        self.config, self.training_config = config, config.training_config
        self.tokenizer, self.seed = tokenizer, seed
        self.actor_mesh, self.rollout_mesh = (config.role_to_mesh[role] for role in (Role.ACTOR, Role.ROLLOUT))
        self.trains, self.generates = config.roles_of(jax.process_index())
        if trains is not None:
            self.trains, self.generates = trains, not trains
        self.metrics = UserMetrics()
        self.actor: Any = None
        if self.trains:
            self.actor = Critic(source, self.actor_mesh, self.training_config, lora=lora, seed=seed, scores=True)
            check_vocab(self.actor.model, tokenizer.vocab_size)

    @property
    def model(self) -> ModelConfig:
        """Returns the configuration of the model's trunk."""
        return self.actor.model

    @property
    def state(self) -> TrainState:
        """Returns the trainable parameters, optimizer state and step."""
        return self.actor.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.actor.state = state

    def update_actor(self, batch: Batch[Any]) -> Metrics:
        """Makes one optimizer update from a packed host batch; metrics stay on the device."""
        return self.actor.update(batch)
