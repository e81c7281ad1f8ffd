"""The KL to the reference, in the reward or in the loss, and the coefficient that may be steered between steps."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from podrl.algorithms import kl
from podrl.learner.settings import AlgorithmConfig


class _Coefficient:
    """A coefficient, fixed or steered to `kl_target`; one of 0 is no KL at all and stays 0.

    Attributes:
      active: whether there is such a KL.
      steered: whether its coefficient moves.
      coef: the coefficient of the next step, which checkpoints carry.
    """

    def __init__(self, config: AlgorithmConfig, start: float):
        self.active, self.coef = start > 0, start
        self._control = None
        if self.active and config.kl_target is not None:
            self._control = kl.AdaptiveKL(config.kl_target, config.kl_horizon)
        self.steered = self._control is not None

    def _observe(self, mean: float, samples: int) -> None:
        """Moves the coefficient after a step of `samples` samples on which the mean KL was `mean`."""
        if self._control is not None:
            self.coef = self._control.update(self.coef, kl=mean, samples=samples)

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Inverse of `state`."""
        self.coef = float(state["coef"])


class RewardKL(_Coefficient):
    """The KL penalty in the reward; its coefficient is reward units per nat."""

    def __init__(self, config: AlgorithmConfig):
        coef, self._mode = config.reward_kl()
        self._clamp = getattr(config, "kl_clamp_value", None)
        super().__init__(config, coef)

    def penalised(
        self,
        reward_BT: Float[np.ndarray, "B T"],
        logprob_BT: Float[np.ndarray, "B T"],
        ref_logprob_BT: Float[np.ndarray, "B T"],
        mask_BT: Float[np.ndarray, "B T"],
    ) -> tuple[Float[np.ndarray, "B T"], dict[str, float]]:
        """Token rewards less the penalty, and reward/{kl, kl_coef}; moves the coefficient for the next step."""
        arrays: Any = (logprob_BT, ref_logprob_BT, mask_BT)
        kl_BT: Any = kl.sampled_kl(*arrays, mode=self._mode, clamp=self._clamp)
        mean = float(kl_BT.sum() / max(float((mask_BT > 0).sum()), 1.0))
        metrics = {"reward/kl": mean, "reward/kl_coef": self.coef}
        rewards: Any = reward_BT
        penalised_BT: Any = kl.penalized_reward(rewards, kl_BT, arrays[2], coef=self.coef)
        self._observe(mean, len(reward_BT))
        return penalised_BT, metrics


class LossKL(_Coefficient):
    """The coefficient of the KL in the loss.

    A step is trained with one coefficient. The next step's follows from the KL that the updates of this one measured,
    so it is known, and the same on all trainer hosts, before a checkpoint of this step is written.
    """

    def __init__(self, config: AlgorithmConfig, beta: float):
        self._beta = beta
        super().__init__(config, beta)

    @property
    def scale(self) -> float:
        """The coefficient over that of the loss: TrainBatch.kl_scale."""
        return self.coef / self._beta if self.active else 1.0

    def trained(self, kl_U: Sequence[Any], samples: int) -> dict[str, float]:
        """actor/kl_coef of the step that was trained; moves the coefficient for the next.

        Args:
          kl_U: the mean KL per token that each update of the step measured, replicated on the device.
          samples: samples of the step.
        """
        metrics = {"actor/kl_coef": self.coef}
        if self.steered:
            self._observe(float(np.mean(jax.device_get(kl_U), dtype=np.float64)), samples)
        return metrics
