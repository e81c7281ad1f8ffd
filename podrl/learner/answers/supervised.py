"""Supervised fine-tuning, and the parts shared by all algorithms that learn from answers in data."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from podrl.cluster.rl_cluster import RLCluster
from podrl.cluster.scorer import ScorerCluster
from podrl.data.sft import SFTBatch, SFTConfig
from podrl.mappings import LogRecord, Metrics, SavedState
from podrl.trainer import packing
from podrl.trainer.objective import CrossEntropy, SupervisedRows
from podrl.trainer.pack_shape import PackShape
from podrl.types import Batch


class SFT:
    """Implements podrl.learner.loop.Algorithm for SFT: raises the likelihood of every answer; needs no scores."""

    def __init__(self, cluster: RLCluster, config: SFTConfig, shape: PackShape):
        """Sets the cluster's loss; `shape` is the shape of a packed batch."""
        self._cluster, self._shape = cluster, shape
        cluster.actor.prepare(CrossEntropy())

    @staticmethod
    def formula(config: SFTConfig) -> str:
        """Writes the formula of the loss, for the dry run."""
        return "mean of -log p over the learned tokens"

    def score(self, step: int, experience: SFTBatch) -> None:
        return None

    def rewards(self, experience: SFTBatch, scores: None) -> tuple[None, Metrics]:
        return None, {}

    def advantages(self, experience: SFTBatch, scores: None, rewards: None) -> tuple[None, Metrics]:
        return None, {}

    def pack(self, step: int, experience: SFTBatch, scores: None, advantages: None) -> list[Batch[SupervisedRows]]:
        placement = packing.place(experience.length_B, self._shape)
        mask_BT, _ = placement.loss_tokens(experience.mask_BT)
        rows = SupervisedRows(layout=placement.layout(experience.tokens_BT), mask_BT=mask_BT)
        return [self._cluster.actor.put(placement.batch(rows))]

    def update(self, step: int, batches: Sequence[Batch[Any]]) -> Metrics:
        return updated(self._cluster, batches)

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (("sft/loss", "loss"), ("actor/grad_norm", "grad norm"), ("actor/lr", "lr"))

    def state(self) -> SavedState:
        return {}

    def restore(self, state: SavedState) -> None:
        """Restores nothing: no state adapts between steps."""


class AnswerReport:
    """Implements podrl.learner.recorder.StepReport for batches from data."""

    def __init__(self, watched: Sequence[tuple[str, str]]):
        """Stores the metrics of the progress line, `watched`."""
        self._watched = watched

    def describe(self, experience: SFTBatch) -> dict[str, float]:
        return {"tokens/learned": float(experience.mask_BT.sum()), "tokens/all": float(experience.length_B.sum())}

    def finished(self, values: dict[str, float]) -> dict[str, float]:
        return values

    def samples(self, experience: SFTBatch) -> Sequence[LogRecord]:
        return [{"text": text} for text in experience.text]

    def watched(self) -> Sequence[tuple[str, str]]:
        return self._watched

    def check(self, step: int, values: Mapping[str, float]) -> None:
        return None


def updated(cluster: RLCluster | ScorerCluster, batches: Sequence[Batch[Any]]) -> Metrics:
    """Makes the one update of a step on answers from data, and returns its metrics."""
    (batch,) = batches
    metrics = cluster.update_actor(batch)
    jax.block_until_ready(cluster.state.step)
    return metrics
