"""On-policy distillation: the policy learns to match a teacher's distribution on the tokens that the policy samples.

The method is that of "On-policy distillation of language models" (arXiv 2306.13649), with the reverse KL,
KL(policy || teacher). At each sampled token the KL compares the distribution from which the policy drew the token with
the teacher's distribution. There are two ways to compute the KL:

- An estimate on the sampled token alone, as in the report of Thinking Machines of October 2025. Its gradient is a
  policy gradient: the advantage of a token is log teacher - log policy of this token, without those of later tokens.
- An exact sum over the vocabulary (podrl/trainer/divergence.py), or over the policy's likeliest ids with all other ids
  counted as one (`top_k_kl`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from podrl.algorithms import kl
from podrl.algorithms.policy_rows import ExtraTermRows
from podrl.algorithms.spans import over_spans
from podrl.types import Layout

TeacherKL = Literal["sampled", "top_k", "full"]
# The teacher: the model of model.reference, the policy before the first step, the current policy, or the moving average
# of the policy.
Teacher = Literal["reference", "initial", "current", "ema"]
_IN_WORDS: Mapping[Teacher, str] = {
    "reference": "the teacher is model.reference",
    "initial": "the teacher is the policy as it was before the first step",
    "current": "the teacher is the policy itself",
    "ema": "the teacher is a moving average of the policy",
}
_LEAST = 1e-6  # a smaller remainder 1 - sum of probabilities is a rounding error of float32


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Weights of the teacher's part and of the rewards' part of an update, and the form of the teacher's KL.

    Attributes:
      coef: weight of the reverse KL: advantage per nat if `kl` is "sampled", else loss per nat. One number, or an array
        (B, 1) with one number per sample.
      reward_coef: weight of the advantage from rewards, a number or an array (B, 1); 0 for no rewards.
      kl: ids that a token's KL is computed over: "sampled" is the sampled id alone, "top_k" the policy's likeliest ids,
        "full" the whole vocabulary.
      top_k: number of likeliest ids, if `kl` is "top_k".
      teacher: name of the model that teaches, see `Teacher`.
    """

    coef: float | Float[np.ndarray, "B 1"]
    reward_coef: float | Float[np.ndarray, "B 1"]
    kl: TeacherKL = "sampled"
    top_k: int = 64
    teacher: Teacher = "reference"

    @property
    def sampled(self) -> bool:
        """True if the teacher's part is an advantage of the sampled token, False if it is a term of the loss."""
        return self.kl == "sampled"

    def rewards(
        self, advantage_BT: Float[np.ndarray, "B T"], mask_BT: Float[np.ndarray, "B T"]
    ) -> Float[np.ndarray, "B T"]:
        """Returns the advantages from rewards times `reward_coef`; 0 on tokens that were not sampled."""
        return self.reward_coef * np.where(mask_BT > 0, advantage_BT, 0.0)

    def advantages(
        self,
        logprob_BT: Float[np.ndarray, "B T"],
        teacher_logprob_BT: Float[np.ndarray, "B T"],
        mask_BT: Float[np.ndarray, "B T"],
        span_BT: Int[np.ndarray, "B T"] | None = None,
    ) -> tuple[Float[np.ndarray, "B T"], dict[str, float]]:
        """Returns the teacher's advantages, coef (log teacher - log policy), and metrics of the comparison.

        A policy and a teacher that split text into different tokens are compared by spans of text. Every token of a
        span has the advantage of the whole span, because the gradient of log p(span) is the sum of its tokens'
        gradients.

        Args:
          logprob_BT: log-probabilities under the policy before the update, nats.
          teacher_logprob_BT: log-probabilities of the same text under the teacher, nats; in a span only the sum over
            its tokens matters.
          mask_BT: 1 on sampled tokens.
          span_BT: number of each token's span within its row, -1 for a token outside all spans, whose advantage is 0;
            None to compare each token alone.

        Returns:
          Advantages, 0 on tokens that were not sampled; and opd/reverse_kl, in nats per compared token. With spans also
          opd/compared, the share of the sampled tokens that lie in a span.
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
        """Writes advantage and loss with the teacher's part in plain text, for the dry run; omits terms of weight 0.

        Args:
          rewards: line that describes the advantage made from rewards.
          policy: lines that describe the policy loss; for an exact KL without rewards, only the terms without an
            advantage.
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
class IdRows:
    """Packed rows that a teacher with its own prompt reads, with the ids to compute log-probabilities of.

    Attributes:
      layout: the packed tokens as the teacher reads them, after its own prompt.
      id_BTK: K ids at each token's position.
    """

    layout: Layout
    id_BTK: Int[Array, "B T K"]


@flax.struct.dataclass
class TaughtRows(ExtraTermRows):
    """Packed rows of an update with a term for the teacher's exact KL; `weight_BT` is in loss per nat."""


@flax.struct.dataclass
class TopKRows(TaughtRows):
    """Packed rows of an update with the teacher's KL over the K likeliest ids.

    Attributes:
      id_BTK: the K likeliest ids at each token's position, under the policy before the update.
      teacher_logprob_BTK: log-probabilities of these ids under the teacher, nats.
    """

    id_BTK: Int[Array, "B T K"]
    teacher_logprob_BTK: Float[Array, "B T K"]


def top_k_kl(logprob_BTK: Float[Array, "B T K"], teacher_logprob_BTK: Float[Array, "B T K"]) -> Float[Array, "B T"]:
    """Computes KL(policy || teacher) per token over K ids and one more event, "any other id", in nats.

    The value is the sum of p log(p / q) over these K + 1 events. Merging ids into one event makes a divergence smaller
    and never negative, so the value is a lower bound of the exact KL. It equals the exact KL if p / q is the same for
    all merged ids, or if no ids are merged.

    Args:
      logprob_BTK: log-probabilities of the K ids under the policy, nats; differentiated.
      teacher_logprob_BTK: log-probabilities of the same ids under the teacher, nats; constants.
    """
    teacher_logprob_BTK = jnp.asarray(teacher_logprob_BTK)
    p_BTK = jnp.exp(logprob_BTK)
    rest_BT, teacher_rest_BT = (
        jnp.maximum(1.0 - x_BTK.sum(axis=-1), _LEAST) for x_BTK in (p_BTK, jnp.exp(teacher_logprob_BTK))
    )
    head_BT = jnp.sum(p_BTK * (logprob_BTK - teacher_logprob_BTK), axis=-1)
    return head_BT + rest_BT * (jnp.log(rest_BT) - jnp.log(teacher_rest_BT))
