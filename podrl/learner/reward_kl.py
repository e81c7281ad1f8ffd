"""The KL penalty in the reward, and the coefficient that may be steered between steps."""

from typing import Any

import numpy as np
from jaxtyping import Float

from podrl.algorithms import kl
from podrl.learner.settings import AlgorithmConfig


class RewardKL:
    """The penalty of a configuration; holds the coefficient, which checkpoints carry.

    Attributes:
      active: whether there is a penalty at all.
      coef: its coefficient now, reward units per nat.
    """

    def __init__(self, config: AlgorithmConfig):
        self.coef, self._mode = config.reward_kl()
        self.active = self.coef > 0
        self._clamp = getattr(config, "kl_clamp_value", None)
        self._control = None
        if config.kl_target is not None:
            self._control = kl.AdaptiveKL(config.kl_target, config.kl_horizon)

    def penalised(
        self,
        reward_BT: Float[np.ndarray, "B T"],
        logprob_BT: Float[np.ndarray, "B T"],
        ref_logprob_BT: Float[np.ndarray, "B T"],
        mask_BT: Float[np.ndarray, "B T"],
    ) -> tuple[Float[np.ndarray, "B T"], dict[str, float]]:
        """Token rewards less the penalty, and reward/{kl, kl_coef}; moves the coefficient for the next step."""
        arrays: Any = (logprob_BT, ref_logprob_BT, mask_BT)
        kl_BT = np.asarray(kl.sampled_kl(*arrays, mode=self._mode, clamp=self._clamp))
        mean = float(kl_BT.sum() / max(float((mask_BT > 0).sum()), 1.0))
        metrics = {"reward/kl": mean, "reward/kl_coef": self.coef}
        penalised_BT = np.where(mask_BT > 0, reward_BT - self.coef * kl_BT, 0.0)
        if self._control is not None:
            self.coef = self._control.update(self.coef, kl=mean, samples=len(reward_BT))
        return penalised_BT, metrics

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Inverse of `state`."""
        self.coef = float(state["coef"])
