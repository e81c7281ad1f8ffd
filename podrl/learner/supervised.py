"""Trains on given answers: supervised fine-tuning, and DPO on pairs of answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from podrl.algorithms.dpo import WeightedRows, dpo, weighted_likelihood
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Count, Positive, Range, section
from podrl.data.sft import SFTBatch, SFTConfig
from podrl.trainer import packing
from podrl.trainer.objective import CrossEntropy, SupervisedRows
from podrl.trainer.state import fetch
from podrl.types import Batch


@section("dpo")
@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """Settings of direct preference optimisation; see podrl.algorithms.dpo.

    Attributes:
      batch_size: pairs per step, which makes one update.
      max_length: tokens of prompt and answer; pairs with a longer one are left out, or an error, as data.long_prompts
        says.
      beta: how much a nat of difference to the reference is worth.
      label_smoothing: share of the pairs taken to be the wrong way round.
    """

    batch_size: Count = 32
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96
    beta: Positive = 0.1
    label_smoothing: Annotated[float, Range("[0, 0.5)")] = 0.0


class SFT:
    """Implements podrl.learner.loop.Algorithm for SFT: raises the likelihood of every answer; needs no scores."""

    def __init__(self, cluster: RLCluster, config: SFTConfig, shape: packing.PackShape):
        """Sets the cluster's loss; `shape` is that of a packed batch."""
        self._cluster, self._shape = cluster, shape
        cluster.actor.prepare(CrossEntropy())

    @staticmethod
    def formula(config: SFTConfig) -> str:
        """Writes the loss, for the dry run."""
        return "mean of -log p over the learned tokens"

    def score(self, step: int, experience: SFTBatch) -> None:
        return None

    def rewards(self, experience: SFTBatch, scores: None) -> tuple[None, Mapping[str, Any]]:
        return None, {}

    def advantages(self, experience: SFTBatch, scores: None, rewards: None) -> tuple[None, Mapping[str, Any]]:
        return None, {}

    def pack(self, step: int, experience: SFTBatch, scores: None, advantages: None) -> list[Batch[SupervisedRows]]:
        placement = packing.place(experience.length_B, self._shape)
        mask_BT, _ = placement.loss_tokens(experience.mask_BT)
        rows = SupervisedRows(layout=placement.layout(experience.tokens_BT), mask_BT=mask_BT)
        return [self._cluster.actor.put(placement.batch(rows))]

    def update(self, step: int, batches: Sequence[Batch[Any]]) -> Mapping[str, Any]:
        return _updated(self._cluster, batches)

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (("sft/loss", "loss"), ("actor/grad_norm", "grad norm"), ("actor/lr", "lr"))

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores nothing: no state adapts between steps."""


@dataclasses.dataclass(frozen=True)
class PairScores:
    """Log-probabilities of whole answers, chosen and rejected, nats; and their tokens' places in packed rows."""

    logprob_P2: np.ndarray
    ref_logprob_P2: np.ndarray
    placement: packing.Placement


class DPO:
    """Implements podrl.learner.loop.Algorithm for pairs: scores them, weighs them, learns by policy gradient.

    A pair's loss joins two sequences, which packing may part. But its gradient is that of -weight logprob with a weight
    per answer that depends on whole log-probabilities only, so scoring first gives the very gradient for any packing,
    micro-batch split and mesh. Scores leave the dropout of adapters out.
    """

    def __init__(self, cluster: RLCluster, config: DPOConfig, shape: packing.PackShape):
        """Keeps a reference and sets the cluster's loss; `shape` is that of a packed batch."""
        self._cluster, self._config, self._shape = cluster, config, shape
        cluster.keep_reference()
        cluster.actor.prepare(weighted_likelihood)

    @staticmethod
    def formula(config: DPOConfig) -> str:
        """Writes the loss, for the dry run."""
        smoothing = config.label_smoothing
        turned = f" - {smoothing:g} log sigmoid(-m)" if smoothing else ""
        weight = f"{1 - smoothing:g} " if smoothing else ""
        return (
            f"mean over pairs of -{weight}log sigmoid(m){turned}, m = {config.beta:g} (log p / p_ref of the chosen "
            "answer - that of the rejected)"
        )

    def score(self, step: int, experience: SFTBatch) -> PairScores:
        """Scores both answers of every pair under the policy and under the reference."""
        placement = packing.place(experience.length_B, self._shape)
        batch = self._cluster.actor.put(placement.batch(placement.layout(experience.tokens_BT)))

        def sums(values_ABT: Any) -> np.ndarray:
            host_ABT = fetch(values_ABT, self._cluster.actor_mesh)
            values_BT = placement.unpack(host_ABT, experience.tokens_BT.shape[1])
            return np.where(experience.mask_BT > 0, values_BT, 0.0).sum(axis=1).reshape(-1, 2)

        logprob_P2 = sums(self._cluster.actor.logprobs(batch))
        return PairScores(logprob_P2, sums(self._cluster.actor.reference_logprobs(batch)), placement)

    def rewards(self, experience: SFTBatch, scores: PairScores) -> tuple[None, Mapping[str, Any]]:
        """Returns no rewards: a pair says which answer is better, not how good it is."""
        return None, {}

    def advantages(
        self, experience: SFTBatch, scores: PairScores, rewards: None
    ) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Computes each answer's weight in the policy gradient, from the derivative of the loss."""
        config = self._config
        pair: Any = (scores.logprob_P2, scores.ref_logprob_P2)
        found = jax.device_get(dpo(*pair, beta=config.beta, label_smoothing=config.label_smoothing))
        measured = {
            "dpo/loss": float(found.loss_P.mean()),
            "dpo/margin": float(found.margin_P.mean()),
            "dpo/accuracy": float((found.margin_P > 0).mean()),
            "dpo/chosen_logprob": float(scores.logprob_P2[:, 0].mean()),
            "dpo/rejected_logprob": float(scores.logprob_P2[:, 1].mean()),
        }
        # The loss is a mean over answers, of which a pair has two.
        return 2.0 * found.weight_P2.ravel(), measured

    def pack(
        self, step: int, experience: SFTBatch, scores: PairScores, advantages: np.ndarray
    ) -> list[Batch[WeightedRows]]:
        placement = scores.placement
        mask_BT, length_BT = placement.loss_tokens(experience.mask_BT)
        weight_BT = np.broadcast_to(advantages[:, None], experience.tokens_BT.shape)
        rows = WeightedRows(
            layout=placement.layout(experience.tokens_BT),
            mask_BT=mask_BT,
            length_BT=length_BT,
            weight_BT=placement.scatter(weight_BT, where_BT=experience.mask_BT),
        )
        return [self._cluster.actor.put(placement.batch(rows))]

    def update(self, step: int, batches: Sequence[Batch[Any]]) -> Mapping[str, Any]:
        return _updated(self._cluster, batches)

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (("dpo/loss", "loss"), ("dpo/accuracy", "accuracy"), ("dpo/margin", "margin"), ("actor/lr", "lr"))

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores nothing: no state adapts between steps."""


class AnswerReport:
    """Implements podrl.learner.recorder.Report for batches from data."""

    def __init__(self, watched: Sequence[tuple[str, str]]):
        """Takes the metrics of the progress line, `watched`."""
        self._watched = watched

    def describe(self, experience: SFTBatch) -> dict[str, float]:
        return {"tokens/learned": float(experience.mask_BT.sum()), "tokens/all": float(experience.length_B.sum())}

    def finished(self, values: dict[str, float]) -> dict[str, float]:
        return values

    def samples(self, experience: SFTBatch) -> Sequence[Mapping[str, Any]]:
        return [{"text": text} for text in experience.text]

    def watched(self) -> Sequence[tuple[str, str]]:
        return self._watched

    def warning(self, step: int, values: Mapping[str, float]) -> str:
        return ""


def _updated(cluster: RLCluster, batches: Sequence[Batch[Any]]) -> Mapping[str, Any]:
    """Makes the one update of a batch of given answers and returns its metrics."""
    (batch,) = batches
    metrics = cluster.update_actor(batch)
    jax.block_until_ready(cluster.state.step)
    return metrics
