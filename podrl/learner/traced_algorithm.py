"""Wraps an algorithm to feed the trace and the curriculum, and to count the samples that are left out of the loss.

The content of a step's trace is described in podrl/rundir/trace.py.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from podrl.data.pools import Curriculum
from podrl.learner.left_out import counted, left_out
from podrl.learner.mini_batches import here
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.mappings import Metrics
from podrl.rundir import trace
from podrl.rundir.run import Run
from podrl.trainer import packing
from podrl.types import Experience, PyTree


class TracedAlgorithm:
    """Wraps an algorithm as a podrl.learner.loop.Algorithm that also feeds the trace and the curriculum.

    It also counts the samples that are left out of the loss.
    """

    def __init__(
        self,
        algorithm: Any,
        run: Run,
        reward_names: Sequence[str],
        config: GRPOConfig | PPOConfig,
        curriculum: Curriculum | None = None,
    ):
        """Stores the collaborators.

        Args:
          algorithm: GRPO, or PPO, which holds a GRPO that updates its policy.
          run: the run, whose trace may be opened later.
          reward_names: names of the reward functions.
          config: the algorithm's settings.
          curriculum: curriculum that chooses prompts by their rewards; None without one.
        """
        self._config, self._counted = config, {}
        self._algorithm, self._policy = algorithm, algorithm.policy
        self._run, self._curriculum = run, curriculum
        self._names, self._warm = reward_names, False
        self._extras: tuple[Experience, trace.TraceExtras] | None = None
        self.rewards, self.advantages = algorithm.rewards, algorithm.advantages
        self.state, self.restore = algorithm.state, algorithm.restore

    def needed(self, step: int, experience: Experience) -> np.ndarray:
        """Lists the samples whose rows this process needs, including samples that are scored for the trace."""
        needed, traced = self._policy.needed(step, experience), self._run.traced
        if traced is None or not traced.wants(step + 1):
            return needed
        chosen = self._scored(experience, traced.share)
        return np.union1d(needed, here(experience, chosen, *self._policy.mini_batches.layouts[0]))

    def score(self, step: int, experience: Experience) -> Any:
        if self._curriculum is not None:
            self._curriculum.see(step, experience)
        with self._run.spans.span("score", lane="trainer"):
            return self._algorithm.score(step, experience)

    def pack(self, step: int, experience: Experience, scores: Any, advantages: Any) -> Any:
        columns = self._algorithm.columns(advantages)
        self._counted = counted(left_out(self._config, step, experience, columns["advantage"]))
        tracing, traced, done = self._run.tracing, self._run.traced, step + 1
        if traced is not None and traced.wants(done):
            # All trainer hosts run the program; one of them writes the scores.
            scores_of = self._token_scores(experience, traced.share)
            if tracing is not None:
                trained = {"trained": self._config.loss_mask(experience)}
                extras = trace.TraceExtras(self._names, columns | trained, scores_of)
                tracing.note(done, extras)
                self._extras = (experience, extras)
        elif traced is not None and traced.ever and not self._warm:
            self._token_scores(experience, 0.0)  # the program is compiled in the first step after a start, not later
        self._warm = True
        with self._run.spans.span("score", lane="trainer"):
            return self._algorithm.pack(step, experience, scores, advantages)

    def update(self, step: int, batches: Any) -> Metrics:
        tracing, traced, extras = self._run.tracing, self._run.traced, self._extras
        self._extras = None
        if traced is None or not traced.weighs(step + 1):
            return {**self._algorithm.update(step, batches), **self._counted}
        weighed: list[PyTree] = []
        metrics = self._algorithm.update(step, batches, weighed)
        if weighed and tracing is not None and extras is not None:
            columns = {**extras[1].columns, **self._weights(step, extras[0], weighed)}
            tracing.note(step + 1, dataclasses.replace(extras[1], columns=columns))
        return {**metrics, **self._counted}

    def _scored(self, experience: Experience, share: float) -> np.ndarray:
        """Lists the samples that `_token_scores` scores: the first groups, a `share` of all groups, at least one group.

        The list has at most a mini-batch of samples.
        """
        group_size = self._config.num_generations
        groups = max(1, int(share * len(experience.rollouts.length_B)) // group_size)
        most = self._policy.mini_batches.size // group_size
        return np.flatnonzero(experience.rollouts.group_B < min(groups, most))

    def _token_scores(self, experience: Experience, share: float) -> Callable[[], Mapping[str, np.ndarray]]:
        """Starts to score the samples of `_scored` under the present weights, on all trainer hosts together.

        The samples, however few they are, are packed into the shape of a mini-batch: one program serves all batches.

        Returns:
          A function that waits for the scores and returns them by name, (B, T) each.
        """
        rollouts, chosen = experience.rollouts, self._scored(experience, share)
        placement = packing.place_samples(rollouts, chosen, self._policy.mini_batches.shape)
        actor = self._policy.cluster.actor
        scores = actor.token_scores(actor.put(placement.batch(placement.replayed(rollouts, chosen))))

        def fetched() -> dict[str, np.ndarray]:
            longest, names = rollouts.tokens_BT.shape[1], trace.SCORES
            return {n: placement.unpack(np.asarray(x_ABT), longest) for n, x_ABT in zip(names, scores, strict=True)}

        return fetched

    def _weights(self, step: int, experience: Experience, weighed: Sequence[PyTree]) -> dict[str, np.ndarray]:
        """Returns every token's weight in the update, and whether it was clipped, (B, T) each; means over passes."""
        rollouts = experience.rollouts
        found = {name: np.zeros(rollouts.tokens_BT.shape, np.float32) for name in trace.WEIGHTS}
        passes, samples = self._config.num_iterations, len(rollouts.length_B)
        chosen = (x for i in range(passes) for x in self._policy.mini_batches.split(step, i, samples))
        for sample_B, arrays in zip(chosen, weighed, strict=True):
            placement = packing.place_samples(rollouts, sample_B, self._policy.mini_batches.shape)
            for name, x_ABT in zip(trace.WEIGHTS, arrays, strict=True):
                found[name][sample_B] += placement.unpack(np.asarray(x_ABT), rollouts.tokens_BT.shape[1]) / passes
        return found
