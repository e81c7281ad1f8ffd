"""Trains a reward model on pairs of answers (Bradley-Terry), and measures its accuracy on held-out pairs."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np

from podrl.algorithms.bradley_terry import ScoredRows, bradley_terry, weighted_score
from podrl.cluster.scorer import ScorerCluster
from podrl.config import Count, Range, section
from podrl.data.sft import SFTBatch
from podrl.learner.answers.supervised import updated
from podrl.learner.evaluate import summarised
from podrl.mappings import LogRecord, Metrics, SavedState
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape
from podrl.types import Batch, Policy

_SHOWN = 4  # number of answers of an evaluation that samples.jsonl shows


@section("reward_model")
@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """Settings of training a reward model; see podrl.algorithms.bradley_terry.

    Attributes:
      batch_size: number of pairs per step; a step makes one update.
      max_length: largest number of tokens of prompt and answer together; longer pairs are left out, or are an error, as
        data.long_prompts says.
    """

    batch_size: Count = 32
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96


@dataclasses.dataclass(frozen=True)
class PairScores:
    """Scores of chosen and rejected answers, and their tokens' places in packed rows."""

    score_P2: np.ndarray
    placement: packing.Placement


class RewardModelling:
    """Implements podrl.learner.loop.Algorithm for a reward model: raises chosen answers' scores above rejected ones'.

    As in DPO, a pair is scored first, and then the derivative of the pair's loss is the weight of each answer's score.
    So packing may put the two answers into different rows. An answer's score is read at its last token.
    """

    def __init__(self, cluster: ScorerCluster, config: RewardModelConfig, shape: PackShape):
        """Sets the model's loss; `shape` is the shape of a packed batch."""
        self._cluster, self._shape = cluster, shape
        cluster.actor.prepare(weighted_score)

    @staticmethod
    def formula(config: RewardModelConfig) -> str:
        """Writes the formula of the loss, for the dry run."""
        return "mean over pairs of -log sigmoid(score of the chosen answer - score of the rejected one)"

    def score(self, step: int, experience: SFTBatch) -> PairScores:
        """Scores both answers of every pair."""
        placement = packing.place(experience.length_B, self._shape)
        score_ABT = self._cluster.actor.values(placement.batch(placement.layout(experience.tokens_BT)))
        score_BT = placement.unpack(score_ABT, experience.tokens_BT.shape[1])
        score_B = score_BT[np.arange(len(score_BT)), experience.length_B - 1]
        return PairScores(score_B.reshape(-1, 2), placement)

    def rewards(self, experience: SFTBatch, scores: PairScores) -> tuple[None, Metrics]:
        return None, {}

    def advantages(self, experience: SFTBatch, scores: PairScores, rewards: None) -> tuple[np.ndarray, Metrics]:
        """Computes the weight of each answer's score, from the derivative of the loss."""
        inputs: Any = scores.score_P2
        found = jax.device_get(bradley_terry(inputs))
        measured = {
            "reward_model/loss": float(found.loss_P.mean()),
            "reward_model/margin": float(found.margin_P.mean()),
            "reward_model/accuracy": float(_right(found.margin_P).mean()),
        }
        # The loss is a mean over answers, and a pair has two answers.
        return 2.0 * found.weight_P2.ravel(), measured

    def pack(
        self, step: int, experience: SFTBatch, scores: PairScores, advantages: np.ndarray
    ) -> list[Batch[ScoredRows]]:
        """Packs the one update of a step as a host batch, which the model itself puts on its mesh."""
        placement = scores.placement
        last_BT = np.zeros(experience.tokens_BT.shape, np.float32)
        last_BT[np.arange(len(last_BT)), experience.length_B - 1] = 1.0
        mask_BT, _ = placement.loss_tokens(last_BT)
        rows = ScoredRows(
            layout=placement.layout(experience.tokens_BT),
            mask_BT=mask_BT,
            weight_BT=placement.scatter(last_BT * advantages[:, None]),
        )
        return [placement.batch(rows)]

    def update(self, step: int, batches: Sequence[Batch[Any]]) -> Metrics:
        return updated(self._cluster, batches)

    def evaluator(self, batches: Sequence[SFTBatch]) -> "PairEvaluator":
        """Makes the evaluation on held-out pairs."""
        return PairEvaluator(self, batches)

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (
            ("reward_model/loss", "loss"),
            ("reward_model/accuracy", "accuracy"),
            ("reward_model/margin", "margin"),
            ("actor/lr", "lr"),
        )

    def state(self) -> SavedState:
        return {}

    def restore(self, state: SavedState) -> None:
        """Restores nothing: no state adapts between steps."""


class PairEvaluator:
    """Measures a reward model on held-out pairs; every process that trains takes part."""

    def __init__(self, algorithm: RewardModelling, batches: Sequence[SFTBatch]):
        """Stores the model and the held-out pairs."""
        self._algorithm, self._batches = algorithm, batches

    def __call__(self, policy: Policy, step: int) -> tuple[dict[str, float], list[LogRecord]]:
        """Returns (eval/* metrics of the present model, a few answers with their scores)."""
        score_P2 = np.concatenate([self._algorithm.score(step, batch).score_P2 for batch in self._batches])
        margin_P = score_P2[:, 0] - score_P2[:, 1]
        texts = [text for batch in self._batches for text in batch.text]
        shown: list[LogRecord] = [
            {"evaluation": "pairs", "text": text, "score": float(score), "chosen": not i % 2}
            for i, (text, score) in enumerate(zip(texts, score_P2.ravel(), strict=True))
        ]
        scores = {"eval/pair_accuracy": _right(margin_P)[:, None], "eval/pair_margin": margin_P[:, None]}
        return summarised(scores), shown[:_SHOWN]


def _right(margin_P: np.ndarray) -> np.ndarray:
    """Returns, for each pair, 1 if the chosen answer's score is larger, 1/2 if both scores are equal, else 0."""
    return (np.sign(margin_P) + 1.0) / 2.0
