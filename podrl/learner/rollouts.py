"""Sources of the loop's batches: samples of this process, or answers from data; podrl/learner/pods/ is for pods."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

import jax

from podrl.cluster.rl_cluster import RLCluster
from podrl.learner.loop import InFlight, Start
from podrl.learner.recorder import Evaluate, ResumableStream
from podrl.mappings import LogRecord
from podrl.rollout.batches import BatchMaker, ready
from podrl.rollout.clock import ONE_WINDOW, TokenClock, WallClock
from podrl.rundir.run import Run
from podrl.types import Experience, Policy, Prompts

Generate = Callable[[Prompts, Policy, int], Experience]


class GeneratingSource(Protocol):
    """A source that generates, in this process or in a pod; OfflineBatches wraps such a source.

    The method `publish` of a source calls `agree`, then `move`.
    """

    def resume(self, start: Start) -> Sequence[InFlight]: ...

    def agree(self, step: int) -> None:
        """Makes every process of the job continue or stop at this step, as the leader decides."""
        ...

    def move(self, step: int, *, in_place: bool) -> Policy:
        """Moves the trainer's weights as version `step`; `in_place` as in RLCluster.sync_weights."""
        ...

    def next_batch(self) -> Any:
        """Reads the next batch from this process's data."""
        ...

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[LogRecord]] | None: ...

    def close(self) -> None: ...


class LocalRollouts:
    """Generates training batches in this process, on a thread beside the training loop's."""

    def __init__(
        self,
        cluster: RLCluster,
        stream: ResumableStream,
        run: Run,
        *,
        generate: Any,
        evaluator: Evaluate | None,
        clock: TokenClock | WallClock = ONE_WINDOW,
        prompts: int = 0,
    ):
        """Stores the collaborators.

        Args:
          cluster: the cluster with both meshes.
          stream: the data.
          run: the watchdog and the profiler.
          generate: a Generate, or a podrl.learner.generation.Generator; None if nothing is generated.
          evaluator: scores the policy on held-out prompts; None disables evaluation.
          clock: decides when weights change inside samples, and which groups make a batch.
          prompts: number of prompts per generated batch.
        """
        self._cluster, self._stream, self._run = cluster, stream, run
        self._generate, self._evaluator, self._clock = generate, evaluator, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="podrl-rollout")
        self._batches = BatchMaker(generate, self._thread, run, clock, prompts)

    def resume(self, start: Start) -> Sequence[InFlight]:
        return self._batches.resume(start.step, start.pending)

    def agree(self, step: int) -> None:
        """Decides which of the next steps are profiled; a single process has no other process to agree with."""
        self._run.profiler.decide(step)

    def publish(self, step: int) -> Policy:
        self.agree(step)
        if self._clock.mode == "wall":  # samples go on until the new weights are computed
            with self._run.watchdog.stage("update"):
                jax.block_until_ready(self._cluster.state.params)
        self._batches.end_window()
        if wait([idle := self._thread.submit(lambda: None)], timeout=0.1).not_done:
            with self._run.watchdog.stage("rollout"):  # this time is spent on samples, not on moving weights
                idle.result()
        policy = self.move(step, in_place=True)
        self._batches.publish(policy)
        return policy

    def move(self, step: int, *, in_place: bool) -> Policy:
        # Runs on the rollout thread, after the work that waits there, so that one thread at a time launches programs.
        with self._run.watchdog.stage("publish"):
            return self._thread.submit(self._cluster.sync_weights, step, in_place=in_place).result()

    def submit(self, policy: Policy, step: int) -> InFlight:
        assert self._generate is not None, "a job on answers from data generates no batches"
        return self._batches.submit(self.next_batch(), step)

    def next_batch(self) -> Any:
        with self._run.watchdog.stage("data"):
            return next(self._stream)

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[LogRecord]] | None:
        assert self._evaluator is not None
        return self._evaluator(policy, step)

    def close(self) -> None:
        self._batches.closing()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._batches.close()


class OfflineBatches:
    """Reads batches from data (SFT, DPO), the same on every trainer host; weights move only for evaluations."""

    def __init__(self, source: GeneratingSource):
        """Wraps `source`, which could also generate; here it only reads the data, moves weights and evaluates."""
        self._source = source

    def resume(self, start: Start) -> Sequence[InFlight]:
        return self._source.resume(start)

    def publish(self, step: int) -> Policy:
        self._source.agree(step)
        return Policy({}, step)

    def submit(self, policy: Policy, step: int) -> InFlight:
        return ready(self._source.next_batch())

    def evaluate(self, policy: Policy, step: int) -> tuple[dict[str, float], list[LogRecord]] | None:
        """Moves the weights, which `publish` does not do here, and evaluates them."""
        del policy
        return self._source.evaluate(self._source.move(step, in_place=False), step)

    def close(self) -> None:
        self._source.close()
