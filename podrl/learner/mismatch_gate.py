"""Watches how far sampler and trainer disagree about the samples: warns, then stops the run with a diagnosis."""

from collections.abc import Mapping

MEASURE = "sampler/abs_diff"


class MismatchGate:
    """Counts steps above a bound: a run whose sampler and trainer disagree learns from another than it trains."""

    def __init__(self, bound: float, patience: int, *, section: str, stale: bool, filtered: bool):
        """Starts at no step above.

        Args:
          bound: mean |trainer - sampler| per token, nats.
          patience: steps in a row above it that stop the run; 0 only warns.
          section: config section of the two, for messages.
          stale: whether the samples may come from older weights.
          filtered: whether sampling leaves tokens out (top-k, top-p, min-p), which the trainer's distribution keeps.
        """
        self._bound, self._patience, self._section = bound, patience, section
        self._stale, self._filtered = stale, filtered
        self._above = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """A warning about a step's metrics, '' when there is nothing to say.

        Raises:
          ValueError: too many steps in a row above the bound.
        """
        value = metrics.get(MEASURE)
        if value is None or value <= self._bound:
            self._above = 0
            return ""
        self._above += 1
        text = (
            f"Step {step}: sampler and trainer disagree by {value:.3g} nats per token on average "
            f"({self._section}.mismatch_bound={self._bound:g})."
        )
        if self._patience and self._above >= self._patience:
            raise ValueError(f"{text} {self._diagnosis(metrics)}")
        return text

    def _diagnosis(self, metrics: Mapping[str, float]) -> str:
        causes = []
        if self._filtered:
            causes.append(
                "sampling leaves tokens out (rollout.top_k, top_p, min_p), so its probabilities are larger: turn the "
                "filters off, or raise the bound"
            )
        if self._stale:
            causes.append(
                f"samples are up to {self._section}.max_staleness updates old: lower it or trainer.learning_rate, or "
                f"correct for it ({self._section}.sampler_correction='tis' with {self._section}.old_logprob='trainer': "
                "where the ratio starts from the sampler, it corrects already and a correction is 1)"
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
            f"That is step {self._above} in a row, so the run stops before it learns from another policy than the one "
            f"it trains ({numbers}). Likely causes: {'; '.join(causes)}. "
            f"{self._section}.mismatch_bound=inf turns this check off."
        )
