"""podrl: reinforcement-learning post-training of language models on TPU pods.

The public names are imported when they are first used, so that `import podrl` costs nothing and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrl.cluster.config import ClusterConfig, Mode, Role
    from podrl.cluster.rl_cluster import RLCluster
    from podrl.learner.grpo import GRPOLearner
    from podrl.learner.grpo_config import GRPOConfig
    from podrl.learner.ppo import PPOLearner
    from podrl.learner.ppo_config import PPOConfig
    from podrl.mesh.build import make_mesh
    from podrl.models.pretrained import from_pretrained
    from podrl.rewards.compose import RewardConfig
    from podrl.rollout.config import RolloutConfig, Sampling
    from podrl.trainer.config import RLTrainingConfig

_HOME = {
    "ClusterConfig": "podrl.cluster.config",
    "GRPOConfig": "podrl.learner.grpo_config",
    "GRPOLearner": "podrl.learner.grpo",
    "Mode": "podrl.cluster.config",
    "PPOConfig": "podrl.learner.ppo_config",
    "PPOLearner": "podrl.learner.ppo",
    "RLCluster": "podrl.cluster.rl_cluster",
    "RLTrainingConfig": "podrl.trainer.config",
    "RewardConfig": "podrl.rewards.compose",
    "Role": "podrl.cluster.config",
    "RolloutConfig": "podrl.rollout.config",
    "Sampling": "podrl.rollout.config",
    "from_pretrained": "podrl.models.pretrained",
    "make_mesh": "podrl.mesh.build",
}

__all__ = [
    "ClusterConfig",
    "GRPOConfig",
    "GRPOLearner",
    "Mode",
    "PPOConfig",
    "PPOLearner",
    "RLCluster",
    "RLTrainingConfig",
    "RewardConfig",
    "Role",
    "RolloutConfig",
    "Sampling",
    "from_pretrained",
    "make_mesh",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'podrl' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
