"""On-policy distillation: a teacher's log-probabilities of what the policy sampled, as advantages of single tokens.

After "On-policy distillation of language models" (arXiv 2306.13649) with the reverse KL, estimated on the sampled token
alone as in Thinking Machines' report of October 2025: of a token t after s, its gradient with the policy's own samples
is that of -E[log pi(t|s) - log teacher(t|s)], an advantage of log teacher - log pi per token, undiscounted.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

from podrl.algorithms import kl


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Joins the teacher's advantage with that of the rewards.

    Attributes:
      coef: weight of the teacher's, advantage per nat.
      reward_coef: weight of the rewards'; 0 for none.
    """

    coef: float
    reward_coef: float

    def __call__(
        self,
        advantage_BT: Float[np.ndarray, "B T"],
        logprob_BT: Float[np.ndarray, "B T"],
        teacher_logprob_BT: Float[np.ndarray, "B T"],
        mask_BT: Float[np.ndarray, "B T"],
    ) -> tuple[Float[np.ndarray, "B T"], dict[str, float]]:
        """Returns advantages, 0 on tokens that were not sampled, and opd/reverse_kl, nats per sampled token.

        Args:
          advantage_BT: of the rewards.
          logprob_BT: under the policy before the update, nats.
          teacher_logprob_BT: of the same tokens under the teacher, nats.
          mask_BT: 1 on sampled tokens.
        """
        arrays: tuple = (logprob_BT, teacher_logprob_BT, mask_BT)
        kl_BT: np.ndarray = kl.sampled_kl(*arrays, mode="k1")  # pyright: ignore[reportAssignmentType]
        metrics = {"opd/reverse_kl": float(kl_BT.sum() / max(float((mask_BT > 0).sum()), 1.0))}
        own_BT = self.reward_coef * np.where(mask_BT > 0, advantage_BT, 0.0)
        return own_BT - self.coef * kl_BT, metrics

    def formula(self) -> str:
        """Writes the advantage for the dry run."""
        own = f"{self.reward_coef:g} advantage + " if self.reward_coef else ""
        return f"with a teacher, model.reference, it becomes {own}{self.coef:g} (teacher_logprob - old_logprob)"
