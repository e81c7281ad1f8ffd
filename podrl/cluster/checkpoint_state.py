"""The models' part of a checkpoint: the actor's state, with the critic's state or the policy's average if any."""

from typing import Any

import jax
import jax.numpy as jnp

from podrl.cluster.rl_cluster import RLCluster
from podrl.types import ActorCriticState, AveragedState, PyTree, TrainState

CheckpointState = TrainState | ActorCriticState | AveragedState


def checkpoint_state(cluster: RLCluster) -> CheckpointState:
    """Returns the state that a checkpoint must hold; it shares the models' arrays."""
    return _combined_state(cluster.state, cluster.critic and cluster.critic.state, _average(cluster))


def abstract_checkpoint_state(cluster: RLCluster) -> CheckpointState:
    """Returns shapes and shardings of the result of `checkpoint_state`, for restoring a checkpoint."""
    actor, average = cluster.actor.abstract_state(), _average(cluster)
    if average is not None:
        average = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), actor.params)
    return _combined_state(actor, cluster.critic and cluster.critic.abstract_state(), average)


def load_checkpoint_state(cluster: RLCluster, state: CheckpointState) -> None:
    """Puts a restored state back into the models."""
    cluster.state = TrainState(state.params, state.opt_state, state.step)
    if cluster.critic is not None:
        assert isinstance(state, ActorCriticState)
        cluster.critic.state = state.critic
    if isinstance(state, AveragedState):
        cluster.actor.average = state.average


def _average(cluster: Any) -> PyTree | None:
    """Returns the moving average of the policy; None if none is kept."""
    return getattr(cluster.actor, "average", None)  # a reward model's cluster has a critic in the actor's place


def _combined_state(actor: TrainState, critic: TrainState | None, average: PyTree | None) -> CheckpointState:
    if critic is not None:
        return ActorCriticState(actor.params, actor.opt_state, actor.step, critic)
    if average is not None:
        return AveragedState(actor.params, actor.opt_state, actor.step, average)
    return actor
