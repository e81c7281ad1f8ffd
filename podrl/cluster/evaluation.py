"""Devices for evaluations alone: a copy of the policy there, and the decoding engine that draws from it."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from podrl.cluster.config import Mode
from podrl.cluster.rl_cluster import RLCluster
from podrl.cluster.weights import WeightSync
from podrl.cluster.worker import rollout_worker
from podrl.rollout.config import Sampling
from podrl.types import Policy, Prompts, Rollouts


class EvaluationDevices:
    """Draws samples of a policy on a mesh that does nothing else, in a job of one process.

    A shard of it has as many lanes as one of the rollout mesh: the same programs, which draw the same bits.

    Attributes:
      config: the cluster's, with these lanes.
      rollout: the engine's worker.
    """

    def __init__(self, cluster: RLCluster, mesh: Mesh):
        """Compiles the programs, with weights of zero.

        Args:
          cluster: whose actor is evaluated.
          mesh: of devices that no other role has.
        """
        config, other = cluster.config.rollout(), cluster.rollout_mesh
        shards, of_rollout = (m.shape["data"] * m.shape["fsdp"] for m in (mesh, other))
        config = dataclasses.replace(config, lanes=-(-config.lanes // of_rollout) * shards)
        self.config = dataclasses.replace(cluster.config, rollout_config=config)
        self._weights = WeightSync(cluster.actor, mesh, mesh, config, generates=True)
        self.rollout: Any = rollout_worker(
            self.config, self._weights.model, mesh, mesh, cluster.tokenizer, seed=cluster.seed
        )
        self.rollout.warm_up(self._weights.blank().params)

    def move(self, version: int) -> Policy:
        """Moves the actor's weights, in the place of those moved before."""
        return self._weights.move(version, in_place=True)

    def generate(
        self, prompts: Prompts, policy: Policy, *, mode: Mode, group_size: int, step: int, sampling: Sampling
    ) -> Rollouts:
        """Samples as RLCluster.generate does."""
        more: Any = {"group_size": group_size, "step": step, "sampling": sampling}
        more |= {"mode": mode.value} if isinstance(self.config.rollout_engine, str) else {}
        return self.rollout.generate(policy, prompts, **more)

    def close(self) -> None:
        """Frees the engine's memory."""
        self._weights.release()
        self.rollout.sleep()
