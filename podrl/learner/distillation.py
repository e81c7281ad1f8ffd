"""On-policy distillation: GRPO's updates with a term that pulls the policy towards a teacher, with or without rewards.

The teachers are the cluster's reference or its `teachers`, of any architecture, or the policy itself after a prompt
with a hint, with its current, its averaged or its first weights. Either a teacher gives every sampled token an
advantage (teacher_kl='sampled'), or the divergence from its distribution, over the whole vocabulary or over the
policy's likeliest ids, is added to the loss. In this file such a divergence in the loss is called exact, because it
does not depend on the id that was sampled.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax import Array
from jax.sharding import Mesh

from podrl.algorithms.distill import Distillation, IdRows, TaughtRows, TopKRows
from podrl.cluster.rl_cluster import RLCluster
from podrl.cluster.teacher import Teacher
from podrl.data.hint import TEACHER_PROMPT
from podrl.learner.grpo import GRPO
from podrl.learner.hinted_batch import HintedBatch
from podrl.learner.mini_batches import Update, here
from podrl.learner.scoring import IdScores, ReferencedScores, Scores, SpanScores, policy_scores
from podrl.learner.settings import GRPOConfig
from podrl.learner.translated_batch import TranslatedBatch
from podrl.mappings import Metrics
from podrl.models.pretrained import check_positions
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.state import fetch
from podrl.types import SOURCE, Batch, Experience, Layout, PyTree, Rollouts, unrouted


def make_grpo(
    cluster: RLCluster, config: GRPOConfig, *, samples: int, log: Callable[[str], None], pieces: bool = False
) -> GRPO:
    """Makes DistilledGRPO if the configuration gives a teacher a weight, else GRPO; arguments as in GRPO."""
    algorithm_class = GRPO if config.distillation is None else DistilledGRPO
    return algorithm_class(cluster, config, samples=samples, log=log, pieces=pieces)


class DistilledGRPO(GRPO):
    """Implements podrl.learner.loop.Algorithm for a policy that also learns from a teacher."""

    def __init__(
        self,
        cluster: RLCluster,
        config: GRPOConfig,
        *,
        samples: int,
        log: Callable[[str], None],
        pieces: bool = False,
    ):
        """Prepares the teacher; arguments as in GRPO.

        Raises:
          ValueError: the cluster lacks the teacher that the settings name, or the teacher does not fit the policy or
            the settings.
        """
        assert config.distillation is not None
        self._teacher = config.distillation
        self._exact = not self._teacher.sampled
        if cluster.teachers and (self._exact or self._teacher.teacher != "reference"):
            raise ValueError(
                f"grpo.teacher_kl={self._teacher.kl!r} with grpo.teacher={self._teacher.teacher!r}: model.teachers "
                "score sampled tokens only. Set grpo.teacher_kl='sampled' and grpo.teacher='reference', or leave "
                "model.teachers out."
            )
        if self._teacher.teacher == "reference" and not (cluster.directories["reference"] or cluster.teachers):
            raise ValueError(
                f"grpo.teacher_coef={self._teacher.coef:g} needs a teacher, and the cluster has none: give "
                "model.reference, or set grpo.teacher_coef=0."
            )
        self._rate, self._hint_tokens = config.teacher_rate, config.teacher_hint_tokens
        if self._teacher.teacher == "ema":
            cluster.actor.keep_average()
        super().__init__(cluster, config, samples=samples, log=log, pieces=pieces, teacher=self._teacher)
        if self._teacher.teacher != "reference":
            self._shape_on(cluster.actor_mesh)  # contradicting settings fail here, not in the first step

    def _shape_on(self, mesh: Mesh) -> PackShape:
        """Computes the packed shape of a mini-batch for a teacher on a mesh, with room for a hint in each prompt.

        Raises:
          ValueError: a prompt with a hint leaves no position for an answer, or a sample with a hint is longer than a
            packed row.
        """
        more, config = self._hint_tokens, self.cluster.config
        if not self.cluster.teachers:
            lower = "lower rollout.max_prompt_length or grpo.teacher_hint_tokens."
            longest = config.rollout().max_prompt_length + more
            check_positions(self.cluster.model, longest, config.longest + more, lower=lower)
        return self.mini_batches.shape_on(mesh, more=more)

    def _reference_use(self) -> tuple[bool, bool]:
        kept = self._teacher.teacher in ("reference", "initial") and not self.cluster.teachers
        return self._reward_kl.active or not self._exact, kept

    def score(self, step: int, experience: Experience) -> Scores:
        """Scores the samples under the policy and its teachers, each teacher with its own prompts and token ids."""
        readings, rollouts = self._readings(step, experience), experience.rollouts
        if not readings:
            return super().score(step, experience)
        if self._teacher.kl == "full":
            raise ValueError(
                f"grpo.teacher_kl='full' compares policy and teacher after the same prompt, but in step {step} the "
                f"teacher has prompts of its own (`{TEACHER_PROMPT}`): set grpo.teacher_kl='top_k' or 'sampled', or "
                "leave data.hint out."
            )
        if self._exact:
            return self._score_ids(step, experience, readings[0].view.rollouts)

        def read(chosen: np.ndarray) -> np.ndarray:
            found_nT = np.zeros((len(chosen), rollouts.tokens_BT.shape[1]), np.float32)
            for reading in readings:
                own_n = reading.of_B[chosen]
                if own_n.any():
                    found_nT[own_n] = self._read(reading, chosen[own_n], rollouts)
            return found_nT

        old = "sampler" if self.old == "sampler" else "trainer"
        updates, shape = self.mini_batches.split(step, 0, len(rollouts.length_B)), self.mini_batches.shape
        scores = policy_scores(self.cluster, rollouts, shape, updates, old=old, reference=read)
        if not self.cluster.teachers:
            return scores
        span_BT = np.full(rollouts.tokens_BT.shape, -1, np.int64)
        for reading in readings:
            alone = np.arange(rollouts.tokens_BT.shape[1])[None]  # each token is compared by itself
            own_BT = reading.view.span_BT if isinstance(reading.view, TranslatedBatch) else alone
            span_BT = np.where(reading.of_B[:, None], own_BT, span_BT)
        return SpanScores(**vars(scores), span_BT=span_BT)

    def _readings(self, step: int, experience: Experience) -> list["_TeacherView"]:
        """Lists the teachers, each with the samples in the form that the teacher reads.

        The list is empty if the reference reads the samples exactly as they were drawn.
        """
        rollouts, actor, of = experience.rollouts, self.cluster.actor, self._teacher.teacher
        if self.cluster.teachers:
            return [
                _TeacherView(self._view(teacher, rollouts, of_B), of_B, teacher.mesh, teacher.logprobs)
                for teacher, of_B in self._taught_by(experience)
            ]
        if TEACHER_PROMPT not in rollouts.prompts.fields:
            if of == "reference":
                return []
            if np.any(self._sources.of("teacher_coef", experience)):  # a mixture's step may have no sample to teach
                raise ValueError(
                    f"grpo.teacher={of!r} teaches by prompts with a hint, and no prompt of step {step} has one: give "
                    "data.hint, or set grpo.teacher='reference'."
                )
        own = {"current": lambda batch: actor.logprobs(unrouted(batch)), "ema": actor.average_logprobs}
        score = own.get(of, actor.reference_logprobs)
        every_B = np.ones(len(rollouts.length_B), bool)
        return [_TeacherView(HintedBatch.of(rollouts), every_B, actor.mesh, lambda batch: score(actor.put(batch)))]

    def _taught_by(self, experience: Experience) -> list[tuple[Teacher, np.ndarray]]:
        """Pairs each of the cluster's teachers with a mask (B,) of the samples that the teacher scores."""
        rollouts, teachers = experience.rollouts, self.cluster.teachers
        names = rollouts.prompts.fields.get(SOURCE, [""] * len(rollouts.prompts.length_P))
        known = {name for teacher in teachers for name in teacher.sources}
        of = [lambda name, t=teacher: name in t.sources if t.sources else name not in known for teacher in teachers]
        return [
            (teacher, np.array([takes(str(name)) for name in names], bool)[rollouts.group_B])
            for teacher, takes in zip(teachers, of, strict=True)
        ]

    def _view(self, teacher: Teacher, rollouts: Rollouts, of_B: np.ndarray) -> "HintedBatch | TranslatedBatch":
        if teacher.tokenizer is None:
            return HintedBatch.of(rollouts)
        if TEACHER_PROMPT not in rollouts.prompts.fields:
            raise ValueError(
                f"The teacher {teacher.name} has another tokenizer than the policy, and prompts lack the field "
                f"`{TEACHER_PROMPT}` with the ids that the teacher reads: name the teacher in model.teachers of a "
                "configuration, which adds the field, or give a teacher with the policy's tokenizer."
            )
        longest = self.cluster.config.longest + self._hint_tokens
        return TranslatedBatch.of(rollouts, self.cluster.tokenizer, teacher.tokenizer, longest=longest, of_B=of_B)

    def _read(self, reading: "_TeacherView", chosen: np.ndarray, rollouts: Rollouts) -> np.ndarray:
        """Scores some samples as a teacher reads them, and moves each score to its token in the policy's samples."""
        read = reading.view.rollouts
        placement = packing.place_samples(read, chosen, self._shape_on(reading.mesh))
        found = fetch(reading.score(placement.batch(placement.layout(read.tokens_BT[chosen]))), reading.mesh)
        return reading.view.back(placement.unpack(found, read.tokens_BT.shape[1]), chosen, rollouts)

    def _score_ids(self, step: int, experience: Experience, read: Rollouts) -> IdScores:
        """Finds the policy's likeliest ids at each sampled token, and scores these ids with the teacher.

        `read` holds the samples as the teacher reads them. The policy's packing and the teacher's packing put a sampled
        token at different places; the token's number among the sampled tokens is the same in both.
        """
        actor, rollouts = self.cluster.actor, experience.rollouts
        number_BT, their_number_BT = _numbered(rollouts.mask_BT), _numbered(read.mask_BT)
        dims = (1 + int(number_BT.max(initial=0)), self._teacher.top_k)
        id_XK, theirs_XK, longer = np.zeros(dims, np.int32), np.zeros(dims, np.float32), self._shape_on(actor.mesh)

        def keep(value_XK: np.ndarray, number_ABT: np.ndarray, found_ABTK: Array) -> None:
            value_XK[number_ABT[number_ABT > 0]] = fetch(found_ABTK, actor.mesh)[number_ABT > 0]

        for chosen in self.mini_batches.split(step, 0, len(rollouts.length_B)):
            own = packing.place_samples(rollouts, chosen, self.mini_batches.shape)
            batch = actor.put(own.batch(own.replayed(rollouts, chosen)))
            keep(id_XK, own.scatter(number_BT[chosen]), actor.likely_ids(batch))
            theirs = packing.place_samples(read, chosen, longer)
            number_ABT = theirs.scatter(their_number_BT[chosen])
            id_ABTK: Any = id_XK[number_ABT]
            rows = actor.put(theirs.batch(IdRows(theirs.layout(read.tokens_BT[chosen]), id_ABTK)))
            keep(theirs_XK, number_ABT, actor.teacher_id_logprobs(self._teacher.teacher, rows))
        return IdScores(rollouts.logprob_BT, number_BT, id_XK, theirs_XK)

    def needed(self, step: int, experience: Experience) -> np.ndarray:
        """Lists the samples whose rows lie on this process's devices, in the packing of the policy or of a teacher."""
        own, teachers = super().needed(step, experience), self.cluster.teachers
        if any(teacher.tokenizer is not None for teacher in teachers):
            # The row of a sample depends on the number of the teacher's tokens of every sample, and these numbers
            # follow only from the policy's tokens of all samples.
            return np.arange(len(experience.rollouts.length_B))
        hinted = TEACHER_PROMPT in experience.rollouts.prompts.fields or self._teacher.teacher != "reference"
        if not (teachers or hinted):
            return own
        read = dataclasses.replace(experience, rollouts=HintedBatch.of(experience.rollouts).rollouts)
        every_B = np.ones(len(experience.rollouts.length_B), bool)
        where = [(teacher.mesh, of_B) for teacher, of_B in self._taught_by(experience)] if teachers else []
        rows = [
            here(read, chosen[of_B[chosen]], self._shape_on(mesh), mesh)
            for mesh, of_B in where or [(self.cluster.actor_mesh, every_B)]
            for chosen in self.mini_batches.split(step, 0, len(every_B))
            if of_B[chosen].any()
        ]
        return np.unique(np.concatenate([own, *rows]))

    def update(self, step: int, batches: Sequence[Batch[Any]], weighed: list[PyTree] | None = None) -> Metrics:
        """Makes the updates of a step; if the teacher is the policy's moving average, then updates the average, too."""
        metrics = super().update(step, batches, weighed)
        if self._teacher.teacher == "ema":
            self.cluster.actor.move_average(self._rate)
        return metrics

    def advantages(self, experience: Experience, scores: Scores, rewards: np.ndarray) -> tuple[np.ndarray, Metrics]:
        """Computes every sampled token's advantage from rewards, and from the teacher if teacher_kl='sampled'."""
        mask_BT, teacher = experience.rollouts.mask_BT, self._of(experience)
        by_reward_BT = np.zeros_like(mask_BT)
        if np.any(teacher.reward_coef):
            by_reward_BT = self._sources.advantages(experience, rewards)
        own_BT = teacher.rewards(by_reward_BT, mask_BT)
        of_sources = self._sources.metrics(experience, self._teachable(experience))
        if self._exact:
            return own_BT, {**of_sources, **self._hint_metrics(experience)}
        taught_BT = mask_BT * (np.asarray(teacher.coef) > 0)
        theirs_BT, metrics = teacher.advantages(*_compared(scores), taught_BT, _spans(scores))
        return own_BT + theirs_BT, {**of_sources, **metrics}

    def _of(self, experience: Experience) -> Distillation:
        """Returns the teacher's settings with the weights of each sample, which depend on its source."""
        coef, reward_coef = (self._sources.of(name, experience) for name in ("teacher_coef", "reward_coef"))
        return dataclasses.replace(self._teacher, coef=coef, reward_coef=reward_coef)

    def _of_update(self, advantage_BT: np.ndarray, update: Update) -> tuple[np.ndarray, Any]:
        """Returns an update's advantages, and the weight of each sample's token losses.

        They make the teacher's part of the loss a mean over tokens, whatever `loss_agg_mode` is.
        """
        own_BT, weight = super()._of_update(advantage_BT, update)
        if self._exact:
            return own_BT, weight
        (policy_BT, their_BT), chosen, mask_BT = _compared(update.scores), update.chosen, update.mask_BT
        coef = self._sources.of("teacher_coef", update.experience, chosen)
        taught_BT = mask_BT * (np.asarray(coef) > 0)
        teacher, spans = dataclasses.replace(self._teacher, coef=coef), _spans(update.scores, chosen)
        theirs_BT, _ = teacher.advantages(policy_BT[chosen], their_BT[chosen], taught_BT, spans)
        share_B1 = self._loss.as_token_mean(mask_BT, taught_BT)
        _, factor = self._sources.of_rewards(update, self._loss)
        return own_BT + (share_B1 - factor) * theirs_BT, np.where(np.asarray(weight) > 0, weight, share_B1 * coef)

    def _placed(self, rows: Any, update: Update) -> Batch[Any]:
        """Puts rows on the mesh; adds the weights of an exact divergence and, for 'top_k', the teacher's scores."""
        batch = super()._placed(self._taught(rows, update) if self._exact else rows, update)
        if self._teacher.kl != "top_k":
            return batch
        scores, placement = update.scores, update.placement
        if isinstance(scores, IdScores):
            number_ABT = placement.scatter(scores.number_BT[update.chosen])
            columns: Any = scores.id_XK[number_ABT], scores.teacher_logprob_XK[number_ABT]
            columns = self.cluster.actor.put(placement.batch(columns)).rows
        else:
            columns = self.cluster.actor.teaching(batch.layout())
        rows = TopKRows(**vars(batch.rows), id_BTK=columns[0], teacher_logprob_BTK=columns[1])
        return Batch(rows, batch.micro_batches)

    def _taught(self, rows: Any, update: Update) -> TaughtRows:
        """Adds each token's weight, the `teacher_coef` of its source, and a scale that makes the divergence a mean."""
        coef, teachable_BT = self._sources.of("teacher_coef", update.experience), self._teachable(update.experience)
        weight_BT = (coef * teachable_BT)[update.chosen]
        scale = self._loss.divisor(update.mask_BT) / max(float((weight_BT > 0).sum()), 1.0)
        return TaughtRows(rows, update.placement.scatter(weight_BT), scale)

    def _teachable(self, experience: Experience) -> np.ndarray:
        """Marks the tokens that a teacher may teach, without samples that an exact divergence cannot teach.

        If the policy teaches itself by an exact divergence, it cannot teach samples without a hint: teacher and policy
        read the same prompt there, so the divergence would only slow the policy down.
        """
        counted_BT, prompts = super()._teachable(experience), experience.rollouts.prompts
        if not self._exact or self._teacher.teacher == "reference":
            return counted_BT
        hints = prompts.fields.get(TEACHER_PROMPT, [None] * len(prompts.length_P))
        hinted_P = np.array([hint is not None for hint in hints], bool)
        return np.where(hinted_P[experience.rollouts.group_B][:, None], counted_BT, np.float32(0))

    def _hint_metrics(self, experience: Experience) -> Mapping[str, float]:
        """Returns opd/compared: what share of the loss tokens with teacher_coef above 0 lies in samples with a hint.

        Returns no metric if the teacher is the reference, which needs no hint.
        """
        if self._teacher.teacher == "reference":
            return {}
        has_weight = np.asarray(self._sources.of("teacher_coef", experience)) > 0
        wanted = float((has_weight * (self._config.counted(experience) > 0)).sum())
        return {"opd/compared": float((has_weight * (self._teachable(experience) > 0)).sum()) / max(wanted, 1.0)}

    def watched(self) -> list[tuple[str, str]]:
        reward, *others = (pair for pair in super().watched() if pair[1] != "kl")
        return [reward, ("opd/reverse_kl", "kl"), *others]


def _compared(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probabilities under the policy before the step, and under the teacher, nats."""
    return scores.old_logprob_BT, cast(ReferencedScores, scores).ref_logprob_BT


def _spans(scores: Scores, chosen: np.ndarray | slice = slice(None)) -> np.ndarray | None:
    """Returns the number of each token's span, (b, T); None if each token is compared by itself."""
    return scores.span_BT[chosen] if isinstance(scores, SpanScores) else None


def _numbered(mask_BT: np.ndarray) -> np.ndarray:
    """Numbers the sampled tokens of a batch from 1 on, sample after sample; other tokens get 0."""
    return np.where(mask_BT > 0, np.cumsum(mask_BT > 0).reshape(mask_BT.shape), 0)


@dataclasses.dataclass(frozen=True)
class _TeacherView:
    """A teacher, and the samples in the form that the teacher reads.

    Attributes:
      view: the samples as the teacher reads them.
      of_B: True for the samples that the teacher scores.
      mesh: mesh of the teacher's weights.
      score: function that scores a packed host batch on `mesh`.
    """

    view: HintedBatch | TranslatedBatch
    of_B: np.ndarray
    mesh: Mesh
    score: Callable[[Batch[Layout]], Array]
