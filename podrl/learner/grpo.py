"""GRPO and its family, whole: implements each line of the loop (podrl/learner/loop.py) for groups of samples.

Rewards of a prompt's samples are compared with each other, which gives each sample's advantage; the policy is updated
on packed mini-batches of samples, in one or several passes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from podrl.algorithms.distill import TaughtRows, TopKRows
from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.policy_loss import starting_from, with_old
from podrl.algorithms.policy_rows import AgedRows, PolicyRows
from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.control import LossKL, RewardKL
from podrl.learner.scoring import ReferencedScores, Scores, policy_scores
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.rundir import trace
from podrl.trainer import packing
from podrl.trainer.pack_shape import PackShape, pack_shape
from podrl.trainer.state import local_rows
from podrl.types import Batch, Experience, Layout


class GRPO:
    """Implements podrl.learner.loop.Algorithm for GRPO and every other estimator that needs no critic.

    PPO updates its policy by the same lines, on advantages of its own.

    Attributes:
      mini_batch_size: samples of an update.
      old: what the ratio starts from: 'current', 'trainer' or 'sampler'.
      layouts: packed shapes that samples are brought into, and the meshes these lie on.
    """

    def __init__(self, cluster: RLCluster, config: GRPOConfig | PPOConfig, *, samples: int, say: Callable[[str], None]):
        """Sets the cluster's loss, and keeps a reference if one is needed; compiles nothing yet.

        Args:
          cluster: the actor and its reference.
          config: the settings.
          samples: of a step.
          say: told of settings that are probably not meant.
        """
        self._cluster, self._config, self._samples = cluster, config, samples
        self.mini_batch_size = (cluster.training_config.mini_batch_size or 0) * config.num_generations or samples
        updates = len(packing.mini_batches(np.arange(samples), self.mini_batch_size)) * config.num_iterations
        self.old = config.old_source(updates)
        self._estimator: Any = config.estimator()  # its functions take numpy as well as jax arrays, and answer in kind
        loss = config.policy_loss(cluster.config.rollout().max_tokens_to_generate)
        self._reward_kl, self._loss_kl = RewardKL(config), LossKL(config)
        self._loss, self._distillation = loss, config.distillation
        self._exact = self._distillation is not None and not self._distillation.sampled
        self._scored_first = self._reward_kl.active or (self._distillation is not None and not self._exact)
        self._needs_reference = loss.needs_reference() or self._scored_first or self._exact
        for warning in config.warnings(updates):
            say(f"Warning: {warning}")
        if self._distillation is not None and not cluster.directories["reference"]:
            raise ValueError(
                f"grpo.teacher_coef={self._distillation.coef:g} needs a teacher, and the cluster has none: give "
                "model.reference (reference=, of RLCluster), or set grpo.teacher_coef=0."
            )
        if self._needs_reference:
            cluster.keep_reference()

        def weigh(logprob_BT: Any, rows: Any) -> Any:
            policy = rows.policy if self._exact else rows
            return loss.token_weights(logprob_BT, starting_from(self.old, logprob_BT, policy))

        cluster.actor.prepare(with_old(loss, self.old), weigh, self._distillation)
        self._shape = self.pack_shape(cluster.actor_mesh)
        self.layouts: list[tuple[PackShape, Mesh]] = [(self._shape, cluster.actor_mesh)]

    # The loop's lines.

    def score(self, step: int, experience: Experience) -> Scores:
        """Scores old and reference log-probabilities, if rewards or advantages need them before `pack` does."""
        rollouts = experience.rollouts
        if not self._scored_first:
            return Scores(rollouts.logprob_BT)
        mini_batches = self.mini_batches(step, 0, len(rollouts.length_B))
        old = "sampler" if self.old == "sampler" else "trainer"
        return policy_scores(self._cluster, rollouts, self._shape, mini_batches, old=old)

    def rewards(self, experience: Experience, scores: Scores) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Rewards of turns where they lie, the rest on the last token, less the KL to the reference on every token."""
        turn_reward_BT = experience.rollouts.turn_reward_BT
        reward_B: Any = experience.reward_B - turn_reward_BT.sum(axis=1, dtype=np.float64)
        mask_BT: Any = experience.rollouts.mask_BT
        reward_BT: Any = outcome_reward(reward_B, mask_BT) + turn_reward_BT
        if not self._reward_kl.active:
            return reward_BT, {}
        ref_BT = cast(ReferencedScores, scores).ref_logprob_BT
        return self._reward_kl.penalised(reward_BT, scores.old_logprob_BT, ref_BT, mask_BT)

    def advantages(
        self, experience: Experience, scores: Scores, rewards: np.ndarray
    ) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Computes every sampled token's advantage over the other samples of its prompt, and by its teacher."""
        mask_BT, group_B = experience.rollouts.mask_BT, experience.rollouts.group_B
        teacher = self._distillation
        if teacher is None or teacher.reward_coef:
            advantage_BT = self._estimator(rewards, experience.greedy_reward_B, mask_BT, group_B=group_B)
        else:
            advantage_BT = np.zeros_like(mask_BT)
        if teacher is None:
            return advantage_BT, {}
        own_BT = teacher.rewards(advantage_BT, mask_BT)
        if self._exact:
            return own_BT, {}
        theirs_BT, metrics = teacher.advantages(*self._compared(scores), mask_BT)
        return own_BT + theirs_BT, metrics

    def pack(
        self, step: int, experience: Experience, scores: Scores, advantages: np.ndarray
    ) -> list[Batch[PolicyRows]]:
        """Packs the batches of all passes.

        Old and reference log-probabilities are those before the first update of the step: all passes are prepared
        before any is trained on.
        """
        advantage_BT = advantages.astype(np.float32)
        passes = range(self._config.num_iterations)
        return [batch for i in passes for batch in self.pack_pass(step, i, experience, scores, advantage_BT)]

    def pack_pass(
        self, step: int, iteration: int, experience: Experience, scores: Scores, advantage_BT: np.ndarray
    ) -> list[Batch[PolicyRows]]:
        """Packs the mini-batches of one pass, in an order drawn from (seed, step, iteration)."""
        rollouts = experience.rollouts
        loss_mask_BT = self._config.loss_mask(experience)
        batches = []
        for chosen in self.mini_batches(step, iteration, len(advantage_BT)):
            placement = packing.place_samples(rollouts, chosen, self._shape)
            mask_BT, length_BT = placement.loss_tokens(loss_mask_BT[chosen])
            put = functools.partial(placement.scatter, where_BT=loss_mask_BT[chosen])
            rows = PolicyRows(
                layout=placement.layout(rollouts.tokens_BT[chosen]),
                mask_BT=mask_BT,
                length_BT=length_BT,
                advantage_BT=put(self._of_update(advantage_BT, scores, loss_mask_BT, chosen)),
                old_logprob_BT=put(scores.old_logprob_BT[chosen]),
                sampler_logprob_BT=put(rollouts.logprob_BT[chosen]),
                kl_scale=self._loss_kl.scale,
            )
            if self._loss.by_age:
                age_BT = (step - rollouts.version_BT[chosen]).astype(np.float32)
                rows = AgedRows(**vars(rows), age_BT=put(age_BT))
            if self._exact:
                share = self._loss.token_share(loss_mask_BT[chosen])
                batches.append(self._taught(placement.batch(TaughtRows(rows, share))))
                continue
            batch = self._cluster.actor.put(placement.batch(rows))
            rows = self._with_old(batch.rows, batch.layout())
            if self._loss.needs_reference():
                rows = rows.with_reference(self._cluster.actor.reference_logprobs(batch.layout()))
            batches.append(Batch(rows, batch.micro_batches))
        return batches

    def _with_old(self, rows: PolicyRows, layout: Batch[Layout]) -> PolicyRows:
        if self.old != "trainer" or self._scored_first:
            return rows
        return dataclasses.replace(rows, old_logprob_BT=self._cluster.actor.logprobs(layout))

    # The part of a teacher.

    def _compared(self, scores: Scores) -> tuple[np.ndarray, np.ndarray]:
        return scores.old_logprob_BT, cast(ReferencedScores, scores).ref_logprob_BT

    def _of_update(
        self, advantage_BT: np.ndarray, scores: Scores, loss_mask_BT: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Selects the advantages of an update; a teacher's part in them is divided by tokens, whatever the loss is."""
        if self._distillation is None or self._exact:
            return advantage_BT[chosen]
        own_BT, their_BT = self._compared(scores)
        theirs_BT, _ = self._distillation.advantages(own_BT[chosen], their_BT[chosen], loss_mask_BT[chosen])
        return advantage_BT[chosen] + (self._loss.as_token_mean(loss_mask_BT[chosen]) - 1.0) * theirs_BT

    def _taught(self, host: Batch[TaughtRows]) -> Batch[Any]:
        """Puts rows on the mesh, with what the update reads of the teacher beside its weights."""
        actor, batch = self._cluster.actor, self._cluster.actor.put(host)
        rows = dataclasses.replace(batch.rows, policy=self._with_old(batch.rows.policy, batch.layout()))
        if self._distillation is not None and self._distillation.kl == "top_k":
            id_ABTK, theirs_ABTK = actor.teaching(batch.layout())
            rows = TopKRows(**vars(rows), id_BTK=id_ABTK, teacher_logprob_BTK=theirs_ABTK)
        return Batch(rows, batch.micro_batches)

    def update(
        self, step: int, batches: Sequence[Batch[PolicyRows]], weighed: list[Any] | None = None
    ) -> Mapping[str, Any]:
        """Makes one optimizer update per batch; adapts the coefficient of the KL in the loss after all.

        For the trace, `weighed` is given what each update makes of its tokens (`Actor.token_weights`).
        """
        found = []
        for batch in batches:
            if weighed is not None:
                weighed.append(self._cluster.actor.token_weights(batch))
            found.append(self._cluster.update_actor(batch))
        metrics: dict[str, Any] = gathered(found)
        jax.block_until_ready(self._cluster.state.step)
        if self._loss_kl.active:
            metrics |= self._loss_kl.trained(metrics["actor/kl"], self._samples)
        return metrics

    # What the trace of a step tells of its tokens (podrl/rundir/trace.py).

    def columns(self, experience: Experience, advantages: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of every token beside those of the samples."""
        return {"advantage": advantages, "trained": self._config.loss_mask(experience)}

    def scored(self, experience: Experience, share: float) -> np.ndarray:
        """Lists the samples of the first groups, a share of all, that `token_scores` scores: at least one group."""
        group_size = self._config.num_generations
        groups = max(1, int(share * len(experience.rollouts.length_B)) // group_size)
        return np.flatnonzero(experience.rollouts.group_B < min(groups, self.mini_batch_size // group_size))

    def token_scores(self, experience: Experience, share: float) -> Callable[[], Mapping[str, np.ndarray]]:
        """Starts scoring the samples that `scored` lists under the present weights, on all trainer hosts together.

        They are packed into the shape of a mini-batch, however many they are: one program scores them.
        """
        rollouts, chosen = experience.rollouts, self.scored(experience, share)
        placement = packing.place_samples(rollouts, chosen, self._shape)
        batch = self._cluster.actor.put(placement.batch(placement.layout(rollouts.tokens_BT[chosen])))
        scores = self._cluster.actor.token_scores(batch)

        def fetched() -> dict[str, np.ndarray]:
            longest, names = rollouts.tokens_BT.shape[1], trace.SCORES
            return {n: placement.unpack(np.asarray(x_ABT), longest) for n, x_ABT in zip(names, scores, strict=True)}

        return fetched

    def weights(self, step: int, experience: Experience, weighed: Sequence[Any]) -> dict[str, np.ndarray]:
        """Numbers of every token that `update` noted: its weight, and whether it was clipped; means over the passes."""
        rollouts = experience.rollouts
        found = {name: np.zeros(rollouts.tokens_BT.shape, np.float32) for name in trace.WEIGHTS}
        passes = self._config.num_iterations
        chosen = (x for i in range(passes) for x in self.mini_batches(step, i, len(rollouts.length_B)))
        for sample_B, arrays in zip(chosen, weighed, strict=True):
            placement = packing.place_samples(rollouts, sample_B, self._shape)
            for name, x_ABT in zip(trace.WEIGHTS, arrays, strict=True):
                found[name][sample_B] += placement.unpack(np.asarray(x_ABT), rollouts.tokens_BT.shape[1]) / passes
        return found

    # Shapes and splits for the methods above.

    def pack_shape(self, mesh: Mesh) -> PackShape:
        """Computes the shape of a packed mini-batch on a mesh."""
        return pack_shape(
            self._cluster.training_config,
            mesh,
            sequences=self.mini_batch_size,
            max_length=self._cluster.config.longest,
            group_size=self._config.num_generations,
            max_prompt_length=self._cluster.config.rollout().max_prompt_length,
        )

    def mini_batches(self, step: int, iteration: int, samples: int) -> list[np.ndarray]:
        """Splits a pass into the samples of each update."""
        order_B = np.arange(samples)
        if self.mini_batch_size < samples:
            order_B = np.random.default_rng((self._cluster.seed, step, iteration)).permutation(order_B)
        return packing.mini_batches(order_B, self.mini_batch_size)

    def needed(self, step: int, experience: Experience, share: float = 0.0) -> np.ndarray:
        """Lists the samples whose packed rows lie on this process's devices, in any pass of the step.

        Those too that are scored for the trace, where that is of a `share` of all.
        """
        rollouts = experience.rollouts
        needed = [
            chosen[np.isin(packing.place_samples(rollouts, chosen, shape).row_B, local_rows(shape, mesh))]
            for shape, mesh in self.layouts
            for i in range(self._config.num_iterations)
            for chosen in self.mini_batches(step, i, len(rollouts.length_B))
        ]
        if share:
            shape, mesh = self.layouts[0]
            chosen = self.scored(experience, share)
            placement = packing.place_samples(rollouts, chosen, shape)
            needed.append(chosen[np.isin(placement.row_B, local_rows(shape, mesh))])
        return np.unique(np.concatenate(needed))

    def watched(self) -> list[tuple[str, str]]:
        """Lists (metric, label) pairs of the progress line."""
        kl = "reward/kl" if self._reward_kl.active else "actor/kl" if self._needs_reference else "actor/approx_kl"
        return [
            ("reward/mean", "reward"),
            ("opd/reverse_kl" if self._distillation else kl, "kl"),
            ("accuracy/answer", "accuracy"),
            ("rollout/tokens_per_s", "tok/s"),
        ]

    def state(self) -> dict[str, Any]:
        """Returns the adaptive coefficients, for a checkpoint."""
        return {name: control.state() for name, control in self._kl_controls()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the adaptive coefficients of a checkpoint."""
        for name, control in self._kl_controls():
            if name in state:  # a run may be steered from its resumption on
                control.restore(state[name])

    def _kl_controls(self) -> list[tuple[str, RewardKL | LossKL]]:
        reward: list[tuple[str, RewardKL | LossKL]] = [("reward_kl", self._reward_kl)] * self._reward_kl.active
        return reward + [("loss_kl", self._loss_kl)] * self._loss_kl.steered


def gathered(collected: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Collects metrics of several updates by name, still on the device: a mean there would be a program per metric."""
    return {name: [metrics[name] for metrics in collected] for name in collected[0]}
