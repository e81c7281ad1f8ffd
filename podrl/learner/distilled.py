"""On-policy distillation: GRPO's updates, drawn to a teacher, with or without rewards.

The teacher is the cluster's reference, of any architecture, or the policy itself behind a prompt with a hint. It gives
every sampled token an advantage, or the exact divergence from its distribution is added to the loss.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from podrl.algorithms.distill import TaughtRows, TopKRows
from podrl.algorithms.policy_loss import starting_from
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.hint import TEACHER_PROMPT
from podrl.learner.grpo import GRPO
from podrl.learner.hinted import Hinted
from podrl.learner.scoring import ReferencedScores, Scores, policy_scores
from podrl.learner.settings import GRPOConfig
from podrl.models.pretrained import check_positions
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.state import fetch
from podrl.types import Batch, Experience, unrouted


def make_grpo(cluster: RLCluster, config: GRPOConfig, *, samples: int, say: Callable[[str], None]) -> GRPO:
    """Makes the algorithm of a configuration: with a teacher where `teacher_coef` is set; arguments as of GRPO."""
    return (GRPO if config.distillation is None else Distilled)(cluster, config, samples=samples, say=say)


class Distilled(GRPO):
    """Implements podrl.learner.loop.Algorithm for a policy that learns from a teacher as well."""

    def __init__(self, cluster: RLCluster, config: GRPOConfig, *, samples: int, say: Callable[[str], None]):
        """Keeps the teacher; arguments as of GRPO.

        Raises:
          ValueError: the cluster has no reference, or one that cannot teach this policy.
        """
        assert config.distillation is not None
        self._teacher = config.distillation
        self._exact = not self._teacher.sampled
        if self._teacher.teacher == "reference" and not cluster.directories["reference"]:
            raise ValueError(
                f"grpo.teacher_coef={self._teacher.coef:g} needs a teacher, and the cluster has none: give "
                "model.reference (reference=, of RLCluster), or set grpo.teacher_coef=0."
            )
        self._rate, self._hint_tokens = config.teacher_rate, config.teacher_hint_tokens
        if self._teacher.teacher == "ema":
            cluster.actor.keep_average()
        super().__init__(cluster, config, samples=samples, say=say)
        if self._teacher.teacher != "reference":
            assert self._hinted_shape  # settings that do not fit together fail here, not in the first step

    @functools.cached_property
    def _hinted_shape(self) -> PackShape:
        """The packed shape of a mini-batch as the teacher reads it.

        Raises:
          ValueError: the policy has no positions for a hint, or rows no room.
        """
        more, config = self._hint_tokens, self.cluster.config
        check_positions(self.cluster.model, config.rollout().max_prompt_length + more, config.longest + more)
        return self.pack_shape(self.cluster.actor_mesh, more=more)

    def _reference_use(self) -> tuple[bool, bool]:
        return self._reward_kl.active or not self._exact, self._teacher.teacher in ("reference", "initial")

    def _prepare(self) -> None:
        def weigh(logprob_BT: Any, rows: Any) -> Any:
            policy = rows.policy if self._exact or self._config.observed_weight else rows
            return self._loss.token_weights(logprob_BT, starting_from(self.old, logprob_BT, policy))

        self.cluster.actor.prepare(self._token_loss(), weigh, self._teacher)

    def score(self, step: int, experience: Experience) -> Scores:
        """Scores the policy and its teacher, which reads the prompts' hints where they have some."""
        rollouts = experience.rollouts
        if TEACHER_PROMPT not in rollouts.prompts.fields:
            if self._teacher.teacher != "reference":
                raise ValueError(
                    f"grpo.teacher={self._teacher.teacher!r} teaches by prompts with a hint, and no prompt of step "
                    f"{step} has one: give data.hint, or set grpo.teacher='reference'."
                )
            return super().score(step, experience)
        actor = self.cluster.actor
        teacher = {"current": lambda batch: actor.logprobs(unrouted(batch)), "ema": actor.average_logprobs}
        score = teacher.get(self._teacher.teacher, actor.reference_logprobs)
        hinted = Hinted.of(rollouts)

        def read(chosen: np.ndarray) -> np.ndarray:
            placement = packing.place_samples(hinted.rollouts, chosen, self._hinted_shape)
            layout = placement.layout(hinted.rollouts.tokens_BT[chosen])
            found = fetch(score(actor.put(placement.batch(layout))), self.cluster.actor_mesh)
            return hinted.back(placement.unpack(found, hinted.rollouts.tokens_BT.shape[1]), chosen, rollouts)

        old = "sampler" if self.old == "sampler" else "trainer"
        mini_batches = self.mini_batches(step, 0, len(rollouts.length_B))
        return policy_scores(self.cluster, rollouts, self.shape, mini_batches, old=old, reference=read)

    def needed(self, step: int, experience: Experience) -> np.ndarray:
        """Lists the samples whose rows lie on this process's devices as they were drawn, or as the teacher reads."""
        own = super().needed(step, experience)
        if TEACHER_PROMPT not in experience.rollouts.prompts.fields:
            return own
        read = dataclasses.replace(experience, rollouts=Hinted.of(experience.rollouts).rollouts)
        updates = self.mini_batches(step, 0, len(experience.rollouts.length_B))
        where = (self._hinted_shape, self.cluster.actor_mesh)
        return np.unique(np.concatenate([own, *(self.held(read, chosen, *where) for chosen in updates)]))

    def update(self, step: int, batches: Sequence[Batch[Any]], weighed: list[Any] | None = None) -> Mapping[str, Any]:
        """Makes the updates of a step; a teacher that is the policy's moving average follows it then."""
        metrics = super().update(step, batches, weighed)
        if self._teacher.teacher == "ema":
            self.cluster.actor.move_average(self._rate)
        return metrics

    def advantages(
        self, experience: Experience, scores: Scores, rewards: np.ndarray
    ) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Computes every sampled token's advantage by its teacher, and by rewards where these have weight."""
        mask_BT = experience.rollouts.mask_BT
        by_reward_BT = np.zeros_like(mask_BT)
        if self._teacher.reward_coef:
            by_reward_BT, _ = super().advantages(experience, scores, rewards)
        own_BT = self._teacher.rewards(by_reward_BT, mask_BT)
        if self._exact:
            return own_BT, {}
        theirs_BT, metrics = self._teacher.advantages(*_compared(scores), mask_BT)
        return own_BT + theirs_BT, metrics

    def _of_update(
        self, advantage_BT: np.ndarray, scores: Scores, loss_mask_BT: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Selects the advantages of an update; a teacher's part in them is divided by tokens, whatever the loss is."""
        if self._exact:
            return advantage_BT[chosen]
        own_BT, their_BT = _compared(scores)
        theirs_BT, _ = self._teacher.advantages(own_BT[chosen], their_BT[chosen], loss_mask_BT[chosen])
        return advantage_BT[chosen] + (self._loss.as_token_mean(loss_mask_BT[chosen]) - 1.0) * theirs_BT

    def _placed(self, placement: packing.Placement, rows: Any, loss_mask_BT: np.ndarray) -> Batch[Any]:
        """Puts rows on the mesh, with what the update reads of the teacher beside its weights."""
        if not self._exact:
            return super()._placed(placement, rows, loss_mask_BT)
        actor = self.cluster.actor
        batch = actor.put(placement.batch(TaughtRows(rows, self._loss.token_share(loss_mask_BT))))
        taught = dataclasses.replace(batch.rows, policy=self._with_old(batch.rows.policy, batch.layout()))
        if self._teacher.kl == "top_k":
            id_ABTK, theirs_ABTK = actor.teaching(batch.layout())
            taught = TopKRows(**vars(taught), id_BTK=id_ABTK, teacher_logprob_BTK=theirs_ABTK)
        return Batch(taught, batch.micro_batches)

    def watched(self) -> list[tuple[str, str]]:
        reward, _, *others = super().watched()
        return [reward, ("opd/reverse_kl", "kl"), *others]


def _compared(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """The policy's log-probabilities before the step, and the teacher's."""
    return scores.old_logprob_BT, cast(ReferencedScores, scores).ref_logprob_BT
