"""Coefficients of the KL to the reference, which may adapt after each step, and the gate on sampler mismatch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from podrl.algorithms import kl
from podrl.learner.settings import AlgorithmConfig

MEASURE = "sampler/abs_diff"  # metric that the gate compares with its bound


class _Coefficient:
    """A KL coefficient, fixed or adapted to `kl_target`. A coefficient of 0 means no KL, and is never adapted.

    Attributes:
      active: True if the run has this KL.
      steered: True if the coefficient adapts.
      coef: coefficient for the next step; checkpoints hold this number.
    """

    def __init__(self, config: AlgorithmConfig, start: float):
        self.active, self.coef = start > 0, start
        self._control = None
        if self.active and config.kl_target is not None:
            self._control = kl.AdaptiveKL(config.kl_target, config.kl_horizon)
        self.steered = self._control is not None

    def _observe(self, mean: float, samples: int) -> None:
        """Adapts the coefficient after a step of `samples` samples with mean KL `mean`."""
        if self._control is not None:
            self.coef = self._control.update(self.coef, kl=mean, samples=samples)

    def state(self) -> dict[str, float]:
        """Returns the coefficient, for a checkpoint."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Restores the coefficient from a checkpoint."""
        self.coef = float(state["coef"])


class RewardKL(_Coefficient):
    """The KL penalty in the reward; the coefficient is in reward units per nat."""

    def __init__(self, config: AlgorithmConfig):
        coef, self._mode, self._clamp = config.reward_kl
        super().__init__(config, coef)

    def penalised(
        self,
        reward_BT: Float[np.ndarray, "B T"],
        logprob_BT: Float[np.ndarray, "B T"],
        ref_logprob_BT: Float[np.ndarray, "B T"],
        mask_BT: Float[np.ndarray, "B T"],
    ) -> tuple[Float[np.ndarray, "B T"], dict[str, float]]:
        """Returns token rewards less the penalty, and metrics reward/{kl, kl_coef}.

        With `kl_target`, the coefficient is then adapted for the next step.
        """
        arrays: Any = (logprob_BT, ref_logprob_BT, mask_BT)
        kl_BT: Any = kl.sampled_kl(*arrays, mode=self._mode, clamp=self._clamp)
        mean = float(kl_BT.sum() / max(float((mask_BT > 0).sum()), 1.0))
        metrics = {"reward/kl": mean, "reward/kl_coef": self.coef}
        rewards: Any = reward_BT
        penalised_BT: Any = kl.penalized_reward(rewards, kl_BT, arrays[2], coef=self.coef)
        self._observe(mean, len(reward_BT))
        return penalised_BT, metrics


class LossKL(_Coefficient):
    """The coefficient of the KL in the loss, fixed or adaptive.

    A step is trained with one coefficient. An adaptive coefficient for the next step follows from the KL that this
    step's updates measured, so all trainer hosts know the same value before this step's checkpoint is written.
    """

    def __init__(self, config: AlgorithmConfig):
        self._beta = config.loss_kl.coef
        super().__init__(config, self._beta)

    @property
    def scale(self) -> float:
        """Ratio of the adapted coefficient to the coefficient that the loss was built with, for PolicyRows.kl_scale."""
        return self.coef / self._beta if self.active else 1.0

    def trained(self, kl_U: Sequence[Array], samples: int) -> dict[str, float]:
        """Returns actor/kl_coef of the step that has just been trained, and adapts the coefficient for the next step.

        Args:
          kl_U: one scalar array per update of the step: the mean KL per token in nats, replicated over the trainer
            mesh.
          samples: number of samples of the step.
        """
        metrics = {"actor/kl_coef": self.coef}
        if self.steered:
            self._observe(float(np.mean(jax.device_get(kl_U), dtype=np.float64)), samples)
        return metrics


class MismatchGate:
    """Stops a run whose sampler and trainer disagree by more than a bound in several steps in a row."""

    def __init__(self, bound: float, patience: int, *, section: str, stale: bool):
        """Stores the settings of the gate.

        Args:
          bound: largest accepted mean of |trainer's log-probability - sampler's log-probability| per token, nats.
          patience: number of steps in a row above the bound after which the run stops; 0 never stops it.
          section: configuration section of `bound` and `patience`, for messages.
          stale: True if the samples may come from older weights than the trainer's; changes only the error's advice.
        """
        self._bound, self._patience, self._section = bound, patience, section
        self._stale, self._above = stale, 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts how many steps in a row were above the bound.

        Raises:
          ValueError: the last `patience` steps were all above the bound.
        """
        value = metrics.get(MEASURE)
        if value is None or value <= self._bound:
            self._above = 0
            return
        self._above += 1
        if self._patience and self._above >= self._patience:
            raise ValueError(
                f"Step {step}: sampler and trainer disagree by {value:.3g} nats per token on average "
                f"({self._section}.mismatch_bound={self._bound:g}). {self._diagnosis(metrics)}"
            )

    def _diagnosis(self, metrics: Mapping[str, float]) -> str:
        causes = []
        if self._stale:
            causes.append(
                f"samples are up to {self._section}.max_staleness steps old: lower max_staleness or "
                "trainer.learning_rate, or leave out the tokens that are furthest off "
                f"({self._section}.sampler_correction='icepop')"
            )
        causes.append(
            "the engine computes in another precision: set rollout.data_type to trainer.dtype, or float32 for both"
        )
        numbers = ", ".join(
            f"{name.removeprefix('sampler/')} {metrics[name]:.3g}"
            for name in ("sampler/exp_diff", "sampler/kl", "sampler/kl_reverse", "sampler/pearson")
            if name in metrics
        )
        return (
            f"That is step {self._above} in a row, so the run stops: the samples come from another policy than the one "
            f"that is trained ({numbers}). Likely causes: {'; '.join(causes)}. "
            f"{self._section}.mismatch_bound=1000 turns this check off."
        )
