"""Learns from judged answers: DPO and ORPO from pairs of a better and a worse answer, KTO from labelled answers."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax import Array

from podrl.algorithms.dpo import WeightedRows, dpo, weighted_likelihood
from podrl.algorithms.kto import kto
from podrl.algorithms.orpo import orpo
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import Count, Positive, Range, section
from podrl.data.labels import LabelledBatch
from podrl.data.sft import SFTBatch
from podrl.learner.answers.supervised import updated
from podrl.mappings import Metrics, SavedState
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.state import fetch
from podrl.types import Batch, Layout


@section("dpo")
@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """Settings of direct preference optimisation; see podrl.algorithms.dpo.

    Attributes:
      batch_size: number of pairs per step; a step makes one update.
      max_length: largest number of tokens of prompt and answer together; longer pairs are left out or are an error, as
        data.long_prompts says.
      beta: reward of an answer per nat by which its log-probability exceeds the log-probability under the reference.
      label_smoothing: assumed share of pairs whose chosen and rejected answers are swapped.
    """

    batch_size: Count = 32
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96
    beta: Positive = 0.1
    label_smoothing: Annotated[float, Range("[0, 0.5)")] = 0.0


@section("orpo")
@dataclasses.dataclass(frozen=True)
class ORPOConfig:
    """Settings of odds ratio preference optimisation; see podrl.algorithms.orpo.

    Attributes:
      batch_size: number of pairs per step; a step makes one update.
      max_length: largest number of tokens of prompt and answer together; longer pairs are left out or are an error, as
        data.long_prompts says.
      coef: weight of the odds-ratio term, which is added to the negative log-likelihood of the chosen answer.
    """

    batch_size: Count = 32
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96
    coef: Positive = 0.1


@section("kto")
@dataclasses.dataclass(frozen=True)
class KTOConfig:
    """Settings of Kahneman-Tversky optimisation; see podrl.algorithms.kto.

    Attributes:
      batch_size: number of labelled answers per step; a step makes one update, and estimates the reference point on
        these answers.
      max_length: largest number of tokens of prompt and answer together; longer examples are left out, or are an error,
        as data.long_prompts says.
      beta: reward of an answer per nat by which its log-probability exceeds the log-probability under the reference.
      desirable_weight: weight of good answers. This weight times the number of good answers should be 1 to 4/3 of
        `undesirable_weight` times the number of bad answers.
      undesirable_weight: weight of bad answers.
    """

    batch_size: Annotated[int, Range("[2, 2147483647]")] = 32
    max_length: Annotated[int, Range("[2, 2147483647]")] = 96
    beta: Positive = 0.1
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0


@dataclasses.dataclass(frozen=True)
class AnswerScores:
    """Log-probabilities of B whole answers, nats, and the places of their tokens in packed rows."""

    logprob_B: np.ndarray
    placement: packing.Placement


@dataclasses.dataclass(frozen=True)
class ReferencedAnswerScores(AnswerScores):
    """AnswerScores plus `ref_logprob_B`, the log-probabilities of the answers under the reference, nats."""

    ref_logprob_B: np.ndarray


class JudgedAnswers:
    """The algorithm that DPO, ORPO and KTO share: a policy gradient on whole answers, each with a weight of its own.

    The losses compare several sequences, which packing may put into different rows. But the gradient of such a loss is
    the gradient of the sum of -weight x log-probability over the answers, and each weight is a number that follows from
    the log-probabilities of whole answers. So all answers are scored first, and the weights then give the exact
    gradient for any packing, micro-batch split and mesh. Scores are computed without the dropout of adapters.

    A subclass adds `score`, `advantages` and `watched`, and is then a podrl.learner.loop.Algorithm.
    """

    compared = True  # True if answers are also scored under a reference

    def __init__(self, cluster: RLCluster, config: Any, shape: PackShape):
        """Sets the cluster's loss, and keeps a reference if `compared` is True.

        Args:
          cluster: the actor, and its reference if there is one.
          config: settings of the algorithm.
          shape: shape of a packed batch.
        """
        self._cluster, self._config, self._shape = cluster, config, shape
        if self.compared:
            cluster.keep_reference()
        cluster.actor.prepare(weighted_likelihood)

    def rewards(self, experience: Any, scores: Any) -> tuple[None, Metrics]:
        """Returns no rewards: a pair or a label says which answers are better, not how good they are."""
        return None, {}

    def pack(self, step: int, experience: Any, scores: Any, advantages: np.ndarray) -> list[Batch[WeightedRows]]:
        """Packs all answers of a step into one update; `advantages` has the weight of each answer."""
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

    def update(self, step: int, batches: Sequence[Batch[Any]]) -> Metrics:
        return updated(self._cluster, batches)

    def state(self) -> SavedState:
        return {}

    def restore(self, state: SavedState) -> None:
        """Restores nothing: no state adapts between steps."""

    def _alone(self, experience: SFTBatch) -> AnswerScores:
        """Scores every answer under the policy."""
        placement, batch = self._placed(experience.tokens_BT, experience.length_B)
        values = self._cluster.actor.logprobs(batch)
        return AnswerScores(self._sums(placement, experience.mask_BT, values), placement)

    def _compare(self, tokens_BT: np.ndarray, length_B: np.ndarray, mask_BT: np.ndarray) -> ReferencedAnswerScores:
        """Scores answers under the policy and under the reference; `mask_BT` is 1 on their tokens."""
        actor = self._cluster.actor
        placement, batch = self._placed(tokens_BT, length_B)
        logprob_B = self._sums(placement, mask_BT, actor.logprobs(batch))
        return ReferencedAnswerScores(
            logprob_B, placement, self._sums(placement, mask_BT, actor.reference_logprobs(batch))
        )

    def _placed(self, tokens_BT: np.ndarray, length_B: np.ndarray) -> tuple[packing.Placement, Batch[Layout]]:
        placement = packing.place(length_B, self._shape)
        return placement, self._cluster.actor.put(placement.batch(placement.layout(tokens_BT)))

    def _sums(self, placement: packing.Placement, mask_BT: np.ndarray, values_ABT: Array) -> np.ndarray:
        values_BT = placement.unpack(fetch(values_ABT, self._cluster.actor_mesh), mask_BT.shape[1])
        return np.where(mask_BT > 0, values_BT, 0.0).sum(axis=1)


def _of_pairs(found: Any, logprob_P2: np.ndarray, *, prefix: str) -> tuple[np.ndarray, Metrics]:
    """Returns the weights of pairs' answers (2 P,), and metrics whose names begin with `prefix`.

    Args:
      found: result of the loss: `loss_P` and `margin_P` of each pair, and `weight_P2` of the pair's two answers.
      logprob_P2: log-probabilities of the chosen and of the rejected answer, nats.
    """
    found = jax.device_get(found)
    measured = {
        f"{prefix}/loss": float(found.loss_P.mean()),
        f"{prefix}/margin": float(found.margin_P.mean()),
        f"{prefix}/accuracy": float((found.margin_P > 0).mean()),
        f"{prefix}/chosen_logprob": float(logprob_P2[:, 0].mean()),
        f"{prefix}/rejected_logprob": float(logprob_P2[:, 1].mean()),
    }
    # The loss is a mean over answers, and a pair has two answers.
    return 2.0 * found.weight_P2.ravel(), measured


class DPO(JudgedAnswers):
    """Learns from pairs of answers, compared with a reference (DPO)."""

    @staticmethod
    def formula(config: DPOConfig) -> str:
        """Writes the formula of the loss, for the dry run."""
        smoothing = config.label_smoothing
        turned = f" - {smoothing:g} log sigmoid(-m)" if smoothing else ""
        weight = f"{1 - smoothing:g} " if smoothing else ""
        return (
            f"mean over pairs of -{weight}log sigmoid(m){turned}, m = {config.beta:g} (log p / p_ref of the chosen "
            "answer - that of the rejected)"
        )

    def score(self, step: int, experience: SFTBatch) -> ReferencedAnswerScores:
        """Scores both answers of every pair under the policy and under the reference."""
        return self._compare(experience.tokens_BT, experience.length_B, experience.mask_BT)

    def advantages(
        self, experience: SFTBatch, scores: ReferencedAnswerScores, rewards: None
    ) -> tuple[np.ndarray, Metrics]:
        """Computes each answer's weight in the policy gradient, from the derivative of the loss."""
        config, logprob_P2 = self._config, scores.logprob_B.reshape(-1, 2)
        pair: Any = (logprob_P2, scores.ref_logprob_B.reshape(-1, 2))
        found = dpo(*pair, beta=config.beta, label_smoothing=config.label_smoothing)
        return _of_pairs(found, logprob_P2, prefix="dpo")

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (("dpo/loss", "loss"), ("dpo/accuracy", "accuracy"), ("dpo/margin", "margin"), ("actor/lr", "lr"))


class ORPO(JudgedAnswers):
    """Learns from pairs of answers without a reference (ORPO)."""

    compared = False

    @staticmethod
    def formula(config: ORPOConfig) -> str:
        """Writes the formula of the loss, for the dry run."""
        return (
            f"mean over pairs of -l of the chosen answer - {config.coef:g} log sigmoid(log odds of the chosen - log "
            "odds of the rejected), l = mean log-probability of an answer's tokens, odds = exp(l) / (1 - exp(l))"
        )

    def score(self, step: int, experience: SFTBatch) -> AnswerScores:
        """Scores both answers of every pair under the policy."""
        return self._alone(experience)

    def advantages(self, experience: SFTBatch, scores: AnswerScores, rewards: None) -> tuple[np.ndarray, Metrics]:
        """Computes each answer's weight in the policy gradient, from the derivative of the loss."""
        logprob_P2 = scores.logprob_B.reshape(-1, 2)
        length_P2: Any = np.maximum((experience.mask_BT > 0).sum(axis=1), 1).reshape(-1, 2).astype(np.float32)
        inputs: Any = logprob_P2
        return _of_pairs(orpo(inputs, length_P2, coef=self._config.coef), logprob_P2, prefix="orpo")

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (("orpo/loss", "loss"), ("orpo/accuracy", "accuracy"), ("orpo/margin", "margin"), ("actor/lr", "lr"))


class KTO(JudgedAnswers):
    """Learns from single answers that are labelled good or bad (KTO).

    Compares each answer's log-ratio of policy to reference with the policy's mean drift from the reference.
    """

    @staticmethod
    def formula(config: KTOConfig) -> str:
        """Writes the formula of the loss, for the dry run."""
        return (
            f"mean over answers of {config.desirable_weight:g} (1 - sigmoid({config.beta:g} (r - z))) for good ones, "
            f"{config.undesirable_weight:g} (1 - sigmoid({config.beta:g} (z - r))) for bad ones, r = log p / p_ref of "
            "the answer, z = max(0, mean of r over prompts with answers of others)"
        )

    def score(self, step: int, experience: LabelledBatch) -> tuple[ReferencedAnswerScores, ReferencedAnswerScores]:
        """Scores every answer after its own prompt, and, to measure the drift, after the prompt of another example."""
        own = self._compare(experience.tokens_BT, experience.length_B, experience.mask_BT)
        return own, self._compare(*experience.unrelated())

    def advantages(
        self, experience: LabelledBatch, scores: tuple[ReferencedAnswerScores, ReferencedAnswerScores], rewards: None
    ) -> tuple[np.ndarray, Metrics]:
        """Computes each answer's weight in the policy gradient, from the derivative of the loss."""
        config, good_B = self._config, experience.desirable_B
        own_B, other_B = (x.logprob_B - x.ref_logprob_B for x in scores)
        weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        inputs: Any = (own_B, other_B, good_B)
        found = jax.device_get(kto(*inputs, beta=config.beta, **weights))
        right_B = (own_B > found.kl) == good_B
        measured = {
            "kto/loss": float(found.loss_B.mean()),
            "kto/kl": float(found.kl),
            "kto/accuracy": float(right_B.mean()),
        }
        if good_B.any():
            measured["kto/desirable_logratio"] = float(own_B[good_B].mean())
        if not good_B.all():
            measured["kto/undesirable_logratio"] = float(own_B[~good_B].mean())
        return found.weight_B, measured

    def pack(self, step: int, experience: Any, scores: Any, advantages: np.ndarray) -> list[Batch[WeightedRows]]:
        return super().pack(step, experience, scores[0], advantages)

    def watched(self) -> Sequence[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        return (("kto/loss", "loss"), ("kto/accuracy", "accuracy"), ("kto/kl", "kl"), ("actor/lr", "lr"))
