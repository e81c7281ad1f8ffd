"""podrl: reinforcement-learning post-training of language models on TPU pods.

The public names are imported when they are first used, so that `import podrl` is fast and touches no device.
"""

import difflib
import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrl.cluster.config import ClusterConfig, Mode, Role
    from podrl.cluster.rl_cluster import RLCluster
    from podrl.engine.config import RolloutConfig, Sampling
    from podrl.environments.config import EnvironmentConfig, MCPServer
    from podrl.environments.protocol import Ended, Environment, Model, OutsideError, Result, Task, Turn
    from podrl.environments.stepped import SteppedEnvironment
    from podrl.environments.tools import ToolEnvironment
    from podrl.job.config import TINY
    from podrl.job.from_python import run
    from podrl.learner.learner import GRPOLearner, PPOLearner
    from podrl.learner.settings import GRPOConfig, PPOConfig
    from podrl.mesh.build import make_mesh
    from podrl.models.config import LoraConfig
    from podrl.models.pretrained import from_pretrained
    from podrl.rewards.compose import RewardConfig
    from podrl.storage.checkpoint import CheckpointConfig
    from podrl.trainer.config import RLTrainingConfig

_HOME = {
    "CheckpointConfig": "podrl.storage.checkpoint",
    "ClusterConfig": "podrl.cluster.config",
    "Ended": "podrl.environments.protocol",
    "Environment": "podrl.environments.protocol",
    "EnvironmentConfig": "podrl.environments.config",
    "GRPOConfig": "podrl.learner.settings",
    "GRPOLearner": "podrl.learner.learner",
    "LoraConfig": "podrl.models.config",
    "MCPServer": "podrl.environments.config",
    "Mode": "podrl.cluster.config",
    "Model": "podrl.environments.protocol",
    "OutsideError": "podrl.environments.protocol",
    "PPOConfig": "podrl.learner.settings",
    "PPOLearner": "podrl.learner.learner",
    "RLCluster": "podrl.cluster.rl_cluster",
    "RLTrainingConfig": "podrl.trainer.config",
    "Result": "podrl.environments.protocol",
    "RewardConfig": "podrl.rewards.compose",
    "Role": "podrl.cluster.config",
    "RolloutConfig": "podrl.engine.config",
    "Sampling": "podrl.engine.config",
    "SteppedEnvironment": "podrl.environments.stepped",
    "TINY": "podrl.job.config",
    "Task": "podrl.environments.protocol",
    "ToolEnvironment": "podrl.environments.tools",
    "Turn": "podrl.environments.protocol",
    "from_pretrained": "podrl.models.pretrained",
    "make_mesh": "podrl.mesh.build",
    "run": "podrl.job.from_python",
}

__all__ = [
    "TINY",
    "CheckpointConfig",
    "ClusterConfig",
    "Ended",
    "Environment",
    "EnvironmentConfig",
    "GRPOConfig",
    "GRPOLearner",
    "LoraConfig",
    "MCPServer",
    "Mode",
    "Model",
    "OutsideError",
    "PPOConfig",
    "PPOLearner",
    "RLCluster",
    "RLTrainingConfig",
    "Result",
    "RewardConfig",
    "Role",
    "RolloutConfig",
    "Sampling",
    "SteppedEnvironment",
    "Task",
    "ToolEnvironment",
    "Turn",
    "from_pretrained",
    "make_mesh",
    "run",
]


# _KIND: parts of class names of other libraries that do not name the method. _LEARNERS: methods that a learner trains,
# with the name of the preset. _FILES: methods that podrl.run trains, with the configuration file.
_KIND = re.compile(r"^Ray(?=\w+Trainer)|(Trainer|Learner|(Training)?(Config|Arguments))$")
_LEARNERS = {"GRPO": "", "PPO": "", "RLOO": "rloo", "DAPO": "dapo", "GSPO": "gspo"}
_FILES = {"SFT": "sft_tiny.py", "DPO": "dpo_tiny.py", "ORPO": "orpo_tiny.py", "KTO": "kto_tiny.py"}
_FILES |= {"REWARD": "reward_model_tiny.py", "PEFT": "sft_tiny.py"}


def _instead(name: str) -> str:
    """Returns the end of the error about a name that podrl lacks, such as TRL's GRPOTrainer: what to use instead."""
    method = _KIND.sub("", name).upper()
    if method in _FILES:
        file, section = _FILES[method], _FILES[method].removesuffix("_tiny.py")
        keys = "{'model.path': DIR, 'data.path': FILE}"
        return f": podrl.run({file!r}, {keys}) trains so; its settings are {section}.*."
    if method in _LEARNERS:
        own, preset = ("PPO" if method == "PPO" else "GRPO"), _LEARNERS[method]
        settings = f"**preset({preset!r}).settings" if preset else "..."
        learner = f"podrl.{own}Learner(cluster, podrl.{own}Config({settings}), reward_fns=f)"
        of = " (preset is of podrl.algorithms.presets)" if preset else ""
        return f": {learner}.train(records) trains so{of}."
    if method in ("", "TRAIN", "FIT"):
        return ": podrl.GRPOLearner(...).train(records) trains on records, and podrl.run(FILE) as a file says."
    # An import of a submodule by name asks here first, so this function can import nothing of podrl.
    near = difflib.get_close_matches(name, __all__, n=1, cutoff=0.7)
    return f". Did you mean {near[0]!r}?" if near else f": it has {', '.join(__all__)}."


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"podrl has no {name}{_instead(name)}", name=name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
