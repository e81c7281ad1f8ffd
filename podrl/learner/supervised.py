"""The loop's parts for given answers: supervised fine-tuning, and DPO on pairs of them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podrl.algorithms.dpo import dpo
from podrl.algorithms.policy_loss import PolicyLoss
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.pairs import PairStream
from podrl.data.sft import SFTBatch, SFTStream
from podrl.learner.loop import InFlight, Schedule
from podrl.learner.parts import Evaluator, LearnerParts, Ready
from podrl.learner.run import Run
from podrl.trainer import packing
from podrl.trainer.objective import CrossEntropy, TokenLoss
from podrl.trainer.state import fetch
from podrl.types import Policy, TrainBatch


@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """Direct preference optimisation; see podrl.algorithms.dpo.

    Attributes:
      batch_size: pairs per step, which makes one update.
      max_length: tokens of prompt and answer; pairs with a longer one are left out, or an error, as data.long_prompts
        says.
      beta: how much a nat of difference to the reference is worth.
      label_smoothing: share of the pairs taken to be the wrong way round.
    """

    batch_size: int = 32
    max_length: int = 96
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_length < 2:
            raise ValueError(
                f"dpo.batch_size={self.batch_size} must be at least 1 and dpo.max_length={self.max_length} at least 2."
            )
        if not 0 < self.beta < math.inf or not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"dpo.beta={self.beta} must be a finite number above 0, dpo.label_smoothing={self.label_smoothing} at "
                "least 0 and below 0.5."
            )


@dataclasses.dataclass(frozen=True)
class _PolicyGradient:
    """-weight logprob summed over each answer, the mean over answers; of the metrics the one that means something."""

    loss: TokenLoss = PolicyLoss(policy_loss_fn="reinforce", loss_agg_mode="sequence-mean-token-sum", beta=0.0)

    def __call__(self, *arrays_BT, kl_scale):
        loss, metrics = self.loss(*arrays_BT, kl_scale=kl_scale)
        return loss, {"actor/entropy": metrics["actor/entropy"]}


class SFTParts(LearnerParts):
    """The loop's parts for supervised fine-tuning: a batch is data, weights move only to be evaluated."""

    def __init__(
        self,
        cluster: RLCluster,
        stream: SFTStream | PairStream,
        run: Run,
        schedule: Schedule,
        evaluator: Evaluator | None,
        shape: packing.PackShape,
    ):
        """Nothing runs yet; `shape` is that of a packed batch, the others as in LearnerParts."""
        super().__init__(cluster, stream, run, schedule, evaluator)
        cluster.prepare_actor(CrossEntropy())
        self._shape = shape

    def publish(self, step: int) -> Policy:
        return Policy({}, step)

    def submit(self, policy: Policy, step: int) -> InFlight:
        return Ready(self.next_batch())

    def update(self, step: int, experience: Any) -> Mapping[str, Any]:
        batch: SFTBatch = experience
        with self.run.watchdog.stage("update"):
            metrics = self._learn(batch, packing.place(batch.length_B, self._shape))
            jax.block_until_ready(self.cluster.state.step)
        return metrics

    def _learn(self, batch: SFTBatch, placement: packing.Placement) -> Mapping[str, Any]:
        """The update of a step."""
        return self.cluster.update_actor(self._put(batch, placement, np.zeros(len(batch.length_B), np.float32)))

    def _put(self, batch: SFTBatch, placement: packing.Placement, advantage_B: np.ndarray) -> TrainBatch:
        """The packed batch on the actor's mesh."""
        zeros_BT = np.zeros(batch.tokens_BT.shape, np.float32)
        packed = packing.pack(
            placement,
            tokens_BT=batch.tokens_BT,
            mask_BT=batch.mask_BT,
            advantage_BT=advantage_B,
            old_logprob_BT=zeros_BT,
            ref_logprob_BT=zeros_BT,
            sampler_logprob_BT=zeros_BT,
        )
        return self.cluster.put_batch(packed)

    def evaluate(self, policy: Policy, step: int) -> None:
        if self._evaluator is not None:
            super().evaluate(self.cluster.sync_weights(step), step)

    def step_metrics(self, batch: SFTBatch) -> dict[str, float]:
        return {"tokens/learned": float(batch.mask_BT.sum()), "tokens/all": float(batch.length_B.sum())}

    def samples(self, batch: SFTBatch) -> Sequence[Mapping[str, Any]]:
        return [{"text": text} for text in batch.text]

    def watched(self) -> Sequence[tuple[str, str]]:
        return (("sft/loss", "loss"), ("actor/grad_norm", "grad norm"), ("actor/lr", "lr"))


class DPOParts(SFTParts):
    """The loop's parts for DPO: pairs are scored, weighed, and learned from as a policy gradient.

    A pair's loss joins two sequences, which packing may part. But its gradient is that of -weight logprob with a weight
    per answer that depends on whole log-probabilities only, so scoring first gives the very gradient for any packing,
    micro-batch split and mesh. Scores leave the dropout of adapters out.
    """

    def __init__(self, config: DPOConfig, cluster: RLCluster, *others: Any):
        """Nothing runs yet; the arguments after the configuration are those of SFTParts."""
        super().__init__(cluster, *others)
        self._config = config
        cluster.keep_reference()
        cluster.prepare_actor(_PolicyGradient())

    def _learn(self, batch: SFTBatch, placement: packing.Placement) -> Mapping[str, Any]:
        scored = self._put(batch, placement, np.zeros(len(batch.length_B), np.float32))
        logprob_P2, ref_P2 = (
            self._sums(score(scored), batch, placement)
            for score in (self.cluster.actor_logprobs, self.cluster.reference_logprobs)
        )
        config = self._config
        found: Any = dpo(logprob_P2, ref_P2, beta=config.beta, label_smoothing=config.label_smoothing)
        found = jax.device_get(found)
        # The loss is a mean over answers, of which a pair has two.
        metrics = self.cluster.update_actor(self._put(batch, placement, 2.0 * found.weight_P2.ravel()))
        return {
            **metrics,
            "dpo/loss": float(found.loss_P.mean()),
            "dpo/margin": float(found.margin_P.mean()),
            "dpo/accuracy": float((found.margin_P > 0).mean()),
            "dpo/chosen_logprob": float(logprob_P2[:, 0].mean()),
            "dpo/rejected_logprob": float(logprob_P2[:, 1].mean()),
        }

    def _sums(self, values_ABT: Any, batch: SFTBatch, placement: packing.Placement) -> Any:
        """Log-probabilities of whole answers, chosen and rejected, nats."""
        values_BT = packing.unpack(placement, fetch(values_ABT, self.cluster.actor_mesh), batch.tokens_BT.shape[1])
        return np.where(batch.mask_BT > 0, values_BT, 0.0).sum(axis=1).reshape(-1, 2)

    def watched(self) -> Sequence[tuple[str, str]]:
        return (("dpo/loss", "loss"), ("dpo/accuracy", "accuracy"), ("dpo/margin", "margin"), ("actor/lr", "lr"))
