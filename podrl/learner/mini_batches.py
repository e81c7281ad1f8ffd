"""The samples of each update, and the shape of the rows in which they are packed."""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.scoring import Scores
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape, pack_shape
from podrl.trainer.state import local_rows
from podrl.types import Experience


@dataclasses.dataclass(frozen=True)
class Update:
    """The samples of one update, and the rows in which they lie.

    Attributes:
      experience: all samples of the step.
      scores: scores of all samples.
      chosen: numbers of the samples of this update.
      mask_BT: 1 on the tokens of these samples that count in the loss.
      placement: places of the tokens of these samples in the packed rows.
    """

    experience: Experience
    scores: Scores
    chosen: np.ndarray
    mask_BT: np.ndarray
    placement: packing.Placement


class MiniBatches:
    """Divides the samples of a step among its updates.

    Attributes:
      size: number of samples per update.
      layouts: (packed shape, mesh) of every model that is updated, the actor first.
    """

    def __init__(self, cluster: RLCluster, config: GRPOConfig | PPOConfig, samples: int):
        """Computes the size; `samples` is the number of samples of a step."""
        self._cluster, self._config, self._samples = cluster, config, samples
        self.size = (cluster.training_config.mini_batch_size or 0) * config.num_generations or samples
        self.layouts: list[tuple[PackShape, Mesh]] = []

    @property
    def updates(self) -> int:
        """Number of updates of a step, over all passes."""
        return len(packing.mini_batches(np.arange(self._samples), self.size)) * self._config.num_iterations

    def place(self, *, pieces: bool, by_sample: bool) -> None:
        """Computes the packed shape on the actor's mesh, when the models that read the rows are known.

        Args:
          pieces: True if a sample may have several pieces, each a token sequence with a context of its own.
          by_sample: True if the loss has terms of whole samples.
        """
        self._pieces, self._by_sample = pieces, by_sample
        self.layouts.append((self.shape_on(self._cluster.actor_mesh), self._cluster.actor_mesh))

    @property
    def shape(self) -> PackShape:
        """Packed shape of a mini-batch on the actor's mesh."""
        return self.layouts[0][0]

    def shape_on(self, mesh: Mesh, more: int = 0) -> PackShape:
        """Computes the packed shape of a mini-batch on a mesh; `more` tokens are added to the longest prompt."""
        cluster = self._cluster
        shape = pack_shape(
            cluster.training_config,
            mesh,
            sequences=self.size,
            max_length=cluster.config.longest + more,
            group_size=self._config.num_generations,
            max_prompt_length=cluster.config.rollout().max_prompt_length + more,
            pieces=self._pieces,
            by_sample=self._by_sample,
        )
        shape = dataclasses.replace(shape, routes=cluster.config.rollout().router_replay)
        models = [other.model for other in (cluster.critic, *cluster.teachers) if other is not None]
        return shape.read_by([cluster.model, cluster.actor.reference_model, *models])

    def split(self, step: int, iteration: int, samples: int) -> list[np.ndarray]:
        """Splits a pass into the samples of each update, in an order drawn from (seed, step, iteration)."""
        order_B = np.arange(samples)
        if self.size < samples:
            order_B = np.random.default_rng((self._cluster.seed, step, iteration)).permutation(order_B)
        return packing.mini_batches(order_B, self.size)

    def needed(self, step: int, experience: Experience) -> np.ndarray:
        """Lists the samples whose packed rows lie on this process's devices, in any pass of the step.

        If samples have pieces, the batch must have the tokens of all samples, because the tokens decide which pieces
        lie in one row.
        """
        passes, samples = range(self._config.num_iterations), len(experience.rollouts.length_B)
        updates = [chosen for i in passes for chosen in self.split(step, i, samples)]
        return np.unique(np.concatenate([here(experience, x, *of) for of in self.layouts for x in updates]))


def here(experience: Experience, chosen: np.ndarray, shape: PackShape, mesh: Mesh) -> np.ndarray:
    """Selects, from samples that are packed together, the samples whose rows lie on this process's devices."""
    placement = packing.place_samples(experience.rollouts, chosen, shape)
    here_B = np.isin(placement.row_B, local_rows(shape, mesh))
    return chosen[np.unique(placement.pieces.sample_B[here_B])]
