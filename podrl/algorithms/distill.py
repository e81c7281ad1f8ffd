"""On-policy distillation: a frozen teacher draws the policy to it, on what the policy samples.

After "On-policy distillation of language models" (arXiv 2306.13649) with the reverse KL, KL(policy || teacher), of the
distribution that each sampled token was drawn from. It is estimated on the sampled token alone, as in the report of
Thinking Machines of October 2025: its gradient is then that of an advantage of log teacher - log policy per token,
undiscounted. Or it is exact, a sum over the vocabulary (podrl/trainer/divergence.py) or over the policy's likeliest ids
and all others as one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from podrl.algorithms import kl
from podrl.algorithms.policy_rows import Wrapped
from podrl.algorithms.spans import over_spans

TeacherKL = Literal["sampled", "top_k", "full"]
# Which model teaches: that of model.reference, or the policy as it was at first, as it is, or its moving average.
Teacher = Literal["reference", "initial", "current", "ema"]
_IN_WORDS: Mapping[Teacher, str] = {
    "reference": "the teacher is model.reference",
    "initial": "the teacher is the policy as it was before the first step",
    "current": "the teacher is the policy itself",
    "ema": "the teacher is a moving average of the policy",
}
_LEAST = 1e-6  # smaller sums of probabilities are roundings


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Joins the teacher's part of an update with that of the rewards.

    Attributes:
      coef: weight of the reverse KL: advantage per nat, or loss per nat; a number, or one for each sample (B, 1).
      reward_coef: weight of the rewards' advantage, in the same form; 0 for none.
      kl: what the KL of a token is taken over: the sampled id, the policy's likeliest ids, or the vocabulary.
      top_k: number of likeliest ids.
      teacher: which model teaches.
    """

    coef: float | Float[np.ndarray, "B 1"]
    reward_coef: float | Float[np.ndarray, "B 1"]
    kl: TeacherKL = "sampled"
    top_k: int = 64
    teacher: Teacher = "reference"

    @property
    def sampled(self) -> bool:
        """True where the teacher's part is an advantage of the sampled token, not a term of the loss."""
        return self.kl == "sampled"

    def rewards(
        self, advantage_BT: Float[np.ndarray, "B T"], mask_BT: Float[np.ndarray, "B T"]
    ) -> Float[np.ndarray, "B T"]:
        """Weighs the rewards' advantages; 0 on tokens that were not sampled."""
        return self.reward_coef * np.where(mask_BT > 0, advantage_BT, 0.0)

    def advantages(
        self,
        logprob_BT: Float[np.ndarray, "B T"],
        teacher_logprob_BT: Float[np.ndarray, "B T"],
        mask_BT: Float[np.ndarray, "B T"],
        span_BT: Int[np.ndarray, "B T"] | None = None,
    ) -> tuple[Float[np.ndarray, "B T"], dict[str, float]]:
        """Returns the teacher's advantages, 0 on tokens that were not sampled, and opd/reverse_kl, nats per token.

        With spans also opd/compared, the share of the sampled tokens that have one.

        Args:
          logprob_BT: under the policy before the update, nats.
          teacher_logprob_BT: log-probabilities of the same tokens under the teacher, nats.
          mask_BT: 1 on sampled tokens.
          span_BT: number of the span of text that a token is compared in, -1 for none; the sum of a span's tokens is
            what counts, and is the advantage of each of them: log p(span) has the gradient of all. None: each alone.
        """
        sampled = max(float((mask_BT > 0).sum()), 1.0)
        if span_BT is not None:
            mask_BT = np.where(span_BT >= 0, mask_BT, np.float32(0))
        arrays: tuple = (logprob_BT, teacher_logprob_BT, mask_BT)
        kl_BT: np.ndarray = kl.sampled_kl(*arrays, mode="k1")  # pyright: ignore[reportAssignmentType]
        mean = {"opd/reverse_kl": float(kl_BT.sum() / max(float((mask_BT > 0).sum()), 1.0))}
        of_spans_BT = kl_BT if span_BT is None else over_spans(kl_BT, span_BT)
        if span_BT is not None:
            mean["opd/compared"] = float((mask_BT > 0).sum() / sampled)
        return -self.coef * of_spans_BT, mean

    def formula(self, rewards: str, policy: str) -> str:
        """Writes advantage and loss with the teacher's part for the dry run, without terms of weight 0.

        Args:
          rewards: the line of the advantage that rewards give.
          policy: the lines of the policy loss; of an exact KL alone, without a reward, those that have no advantage.
        """
        teacher = f"({_IN_WORDS[self.teacher]})"
        if self.sampled:
            own = f"{self.coef:g} (teacher_logprob - old_logprob) {teacher}"
            if not self.reward_coef:
                return f"advantage: {own}\n{policy}"
            return f"{rewards}\nA = {self.reward_coef:g} advantage + {own}\n{policy}"
        over = "the vocabulary" if self.kl == "full" else f"the policy's {self.top_k} likeliest ids, the others as one"
        term = f"{self.coef:g} KL(policy || teacher) over {over}, mean over tokens {teacher}"
        if not self.reward_coef:
            return f"loss: {term}" + (f"\n{policy}" if policy else "")
        scaled = "" if self.reward_coef == 1 else f"A = {self.reward_coef:g} advantage\n"
        return f"{rewards}\n{scaled}{policy}\n+ {term}"


@flax.struct.dataclass
class TaughtRows(Wrapped):
    """Packed rows of an update with a teacher's exact divergence, whose weights are loss per nat."""


@flax.struct.dataclass
class TopKRows(TaughtRows):
    """Packed rows of an update with a teacher's divergence over K ids, the policy's likeliest before it.

    Attributes:
      id_BTK: in place of each token.
      teacher_logprob_BTK: log-probabilities of these ids under the teacher, nats.
    """

    id_BTK: Int[Array, "B T K"]
    teacher_logprob_BTK: Float[Array, "B T K"]


def top_k_kl(logprob_BTK: Float[Array, "B T K"], teacher_logprob_BTK: Float[Array, "B T K"]) -> Float[Array, "B T"]:
    """Sums p log(p / q) over K ids and, as one more, over all others together; q has no gradient.

    Taking ids together makes a divergence smaller, never negative: a bound from below on the exact one, which it equals
    where all others are in the same ratio (or there are none).
    """
    teacher_logprob_BTK = jnp.asarray(teacher_logprob_BTK)
    p_BTK = jnp.exp(logprob_BTK)
    rest_BT, teacher_rest_BT = (
        jnp.maximum(1.0 - x_BTK.sum(axis=-1), _LEAST) for x_BTK in (p_BTK, jnp.exp(teacher_logprob_BTK))
    )
    head_BT = jnp.sum(p_BTK * (logprob_BTK - teacher_logprob_BTK), axis=-1)
    return head_BT + rest_BT * (jnp.log(rest_BT) - jnp.log(teacher_rest_BT))
