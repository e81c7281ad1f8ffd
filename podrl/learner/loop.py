"""The training loop of every algorithm in every process: read this first, then podrl/learner/grpo.py.

Three collaborators do the work. `rollouts` makes batches of experience from the newest weights: in this process
(podrl/learner/rollouts.py), or on the rollout hosts of a pod (podrl/learner/pods/). `algorithm` turns a batch into
optimizer updates: GRPO, PPO, SFT, DPO. `recorder` keeps metrics, checkpoints and evaluations, and knows whether the run
must stop (podrl/learner/recorder.py). Every process runs this loop unchanged, except evaluation hosts.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from podrl.mappings import Metrics
from podrl.types import Policy


class InFlight(Protocol):
    """A batch that is being made."""

    def result(self) -> Any:
        """Waits for the batch and returns it, with the rows that this process trains on."""
        ...

    def complete(self) -> Any:
        """Returns everything that a checkpoint must hold of the batch, which may be unfinished."""
        ...


@dataclasses.dataclass(frozen=True)
class Start:
    """The state with which a run begins or resumes.

    Attributes:
      step: number of steps done.
      data_state: position of the data stream after the last batch of `pending`, or after the last step's batch; b'' at
        the start of a run, and on rollout hosts.
      pending: batches of the next steps, in their order, finished or not.
      evaluated: steps whose evaluation is in metrics.jsonl; trainer hosts add later evaluations.
    """

    step: int
    data_state: bytes
    pending: Sequence[Any]
    evaluated: set[int]


class RolloutSource(Protocol):
    """The source of training batches."""

    def resume(self, start: Start) -> Sequence[InFlight]:
        """Returns the batches that were in flight; called once, before anything else."""
        ...

    def publish(self, step: int) -> Policy:
        """Moves the trainer's weights to the rollout mesh as version `step`, if the job's processes agree to continue.

        The weights are verified on arrival. They overwrite the weights published before, so the move waits until
        sampling pauses. If several versions may draw a sample, sampling pauses when the window of the old version ends
        (podrl/rollout/clock.py). Otherwise it pauses when all batches in flight are made. With `topology=split` a
        trainer only offers the version and does not wait for sampling; the rollout hosts pull it.
        """
        ...

    def submit(self, policy: Policy, step: int) -> InFlight:
        """Starts making the batch that step `step` trains on: prompts, samples, rewards."""
        ...


class Algorithm(Protocol):
    """Turns a batch of experience into optimizer updates; each algorithm has its own types of scores and advantages."""

    def score(self, step: int, experience: Any) -> Any:
        """Scores the batch under the weights before the step's first update: log-probabilities, nats (and values)."""
        ...

    def rewards(self, experience: Any, scores: Any) -> tuple[Any, Metrics]:
        """Computes token rewards, less the KL to the reference if it is in the reward; and metrics about rewards."""
        ...

    def advantages(self, experience: Any, scores: Any, rewards: Any) -> tuple[Any, Metrics]:
        """Computes every token's advantage, and metrics about advantages."""
        ...

    def pack(self, step: int, experience: Any, scores: Any, advantages: Any) -> Sequence[Any]:
        """Packs samples into rows: one batch of rows per update, (passes over the samples) x (mini-batches) in all."""
        ...

    def update(self, step: int, batches: Sequence[Any]) -> Metrics:
        """Makes one optimizer update per batch; metrics may stay on the device, and a list has one value per update."""
        ...


class Recorder(Protocol):
    """Keeps a run's files: metrics, checkpoints, evaluations."""

    def restore(self) -> Start:
        """Restores weights, optimizer and data stream from the newest checkpoint, if there is one.

        Raises:
          ValueError: the checkpoint has more steps than the schedule.
        """
        ...

    def stage(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Names a stage of the step for the watchdog, and times the stage as metric time/`name`."""
        ...

    def record(self, step: int, experience: Any, metrics: Metrics) -> None:
        """Records a step; its metrics are fetched and written later, at the latest when the next step is recorded."""
        ...

    def save(self, step: int, in_flight: Sequence[InFlight]) -> None:
        """Checkpoints everything that the steps after step `step` depend on, the batches in flight included."""
        ...

    def evaluate(self, policy: Policy, step: int) -> None:
        """Scores the policy on held-out data, unless this step was evaluated before or the run stops before its end."""
        ...

    def stopping(self) -> bool:
        """True once the run was asked to stop (SIGTERM, Ctrl-C), in all processes from the same step on."""
        ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps at which the loop stops, saves and evaluates, and the staleness it allows.

    Attributes:
      max_steps: number of steps of the run (`RLTrainingConfig.steps`).
      max_staleness: number of versions a batch's policy may be behind the trainer; 0 is strictly on-policy.
      save_every: number of steps between checkpoints; 0 saves only at the end and on preemption.
      eval_every: number of updates between evaluations; 0 evaluates only before and after training.
      updates_per_step: number of optimizer updates per step, mini-batches x passes over them.
      section: configuration section of the algorithm, for messages.
    """

    max_steps: int
    max_staleness: int = 0
    save_every: int = 0
    eval_every: int = 0
    updates_per_step: int = 1
    section: str = "grpo"

    def __post_init__(self):
        settings = {
            "trainer.max_steps": (self.max_steps, 1),
            f"{self.section}.max_staleness": (self.max_staleness, 0),
            "checkpoint.every": (self.save_every, 0),
            "trainer.eval_every_n_steps": (self.eval_every, 0),
        }
        for key, (value, least) in settings.items():
            if value < least:
                raise ValueError(f"{key}={value} must be at least {least}.")

    @property
    def updates(self) -> int:
        """The number of optimizer updates of the whole run."""
        return self.max_steps * self.updates_per_step

    def begun(self, step: int) -> range:
        """Returns the steps whose batches may be under way when `step` steps are done."""
        return range(step, min(step + 1 + self.max_staleness, self.max_steps))

    def saves(self, step: int) -> bool:
        return step == self.max_steps or (self.save_every > 0 and step % self.save_every == 0)

    def evaluates(self, step: int) -> bool:
        """Returns True at the end, and if the step's updates reach the next multiple of eval_every."""
        due = self.eval_every > 0 and step * self.updates_per_step % self.eval_every < self.updates_per_step
        return due or step == self.max_steps


def train(rollouts: RolloutSource, algorithm: Algorithm, recorder: Recorder, schedule: Schedule) -> int:
    """Trains from the restored step to the last step, or until the run is asked to stop; returns the step reached."""
    start = recorder.restore()
    step, in_flight = start.step, collections.deque(rollouts.resume(start))
    submitted, saved = step + len(in_flight), step
    policy = rollouts.publish(step)
    if step == 0 or schedule.evaluates(step):  # a run that was killed between saving and evaluating must still evaluate
        recorder.evaluate(policy, step)
    while step < schedule.max_steps and not recorder.stopping():
        while submitted < schedule.begun(step).stop:
            in_flight.append(rollouts.submit(policy, submitted))
            submitted += 1
        experience = in_flight.popleft().result()  # prompts, samples and their rewards
        with recorder.stage("update"):
            metrics = learn(algorithm, step, experience)
        step += 1
        policy = rollouts.publish(step)
        recorder.record(step, experience, metrics)
        if schedule.saves(step):
            recorder.save(step, in_flight)
            saved = step
        if schedule.evaluates(step):
            recorder.evaluate(policy, step)
    if saved != step:
        recorder.save(step, in_flight)
    return step


def learn(algorithm: Algorithm, step: int, experience: Any) -> Metrics:
    """Trains one step: scores -> rewards -> advantages -> packed batches -> updates; metrics may stay on the device."""
    scores = algorithm.score(step, experience)
    rewards, of_rewards = algorithm.rewards(experience, scores)
    advantages, of_advantages = algorithm.advantages(experience, scores, rewards)
    batches = algorithm.pack(step, experience, scores, advantages)
    return {**of_rewards, **of_advantages, **algorithm.update(step, batches)}
