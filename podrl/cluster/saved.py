"""The models' part of a checkpoint: the actor's state, and the critic's if there is one."""

from podrl.cluster.rl_cluster import RLCluster
from podrl.types import ActorCriticState, TrainState

Saved = TrainState | ActorCriticState


def saved(cluster: RLCluster) -> Saved:
    """Returns the state that a checkpoint must hold; shares the arrays."""
    return _joined(cluster.state, cluster.critic and cluster.critic.state)


def abstract_saved(cluster: RLCluster) -> Saved:
    """Returns shapes and shardings of `saved`, for restoring a checkpoint."""
    return _joined(cluster.actor.abstract_state(), cluster.critic and cluster.critic.abstract_state())


def load_saved(cluster: RLCluster, state: Saved) -> None:
    """Puts a restored state back into the models."""
    cluster.state = TrainState(state.params, state.opt_state, state.step)
    if cluster.critic is not None:
        assert isinstance(state, ActorCriticState)
        cluster.critic.state = state.critic


def _joined(actor: TrainState, critic: TrainState | None) -> Saved:
    if critic is None:
        return actor
    return ActorCriticState(actor.params, actor.opt_state, actor.step, critic)
