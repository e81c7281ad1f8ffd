"""The training loop of every algorithm: read this first.

Every process runs these lines unchanged. What a part does is decided by whoever built it: on one process it does the
work, across processes it sends or receives.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from podrl.types import Experience, Policy


class InFlight(Protocol):
    """A batch of rollouts that is being generated and scored."""

    def result(self) -> Experience: ...


class Parts(Protocol):
    """What the loop needs done."""

    def restore(self) -> tuple[int, list[InFlight]]:
        """Puts weights, optimizer and data stream back; the step reached and the batches that were in flight."""
        ...

    def publish(self, step: int) -> Policy:
        """Moves the trainer's weights to the rollout mesh as version `step`, verified on arrival.

        They take the memory of the policy before, which no batch in flight may need any more.
        """
        ...

    def submit(self, policy: Policy, step: int) -> InFlight:
        """Starts generating and scoring the batch that step `step` will train on."""
        ...

    def update(self, step: int, experience: Experience) -> Mapping[str, Any]:
        """Rewards -> advantages -> packed batches -> mu x mini-batch optimizer updates; metrics still on the device.

        Those of several updates come as lists, of which the mean is meant.
        """
        ...

    def record(self, step: int, experience: Experience, metrics: Mapping[str, Any]) -> None:
        """Takes note of a step; numbers are fetched and written one step late, so the device is never waited for."""
        ...

    def save(self, step: int, in_flight: list[InFlight]) -> None:
        """Checkpoints everything step `step` depends on, the batches in flight included."""
        ...

    def evaluate(self, policy: Policy, step: int) -> None:
        """Scores the policy on held-out prompts, unless an earlier life of this run did it after this step."""
        ...

    def stopping(self) -> bool:
        """True once the run was asked to stop (SIGTERM, Ctrl-C)."""
        ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When the loop does what, in steps.

    Attributes:
      max_steps: the last step.
      max_staleness: how many versions older than the trainer a batch's policy may be; 0 is strictly on-policy.
      save_every: 0 saves only at the end and on preemption.
      eval_every: 0 evaluates only before and after.
    """

    max_steps: int
    max_staleness: int = 0
    save_every: int = 0
    eval_every: int = 0

    def __post_init__(self):
        if self.max_steps < 1 or self.max_staleness < 0 or self.save_every < 0 or self.eval_every < 0:
            raise ValueError(
                f"trainer.max_steps={self.max_steps} must be at least 1; grpo.max_staleness={self.max_staleness}, "
                f"checkpoint.every={self.save_every} and trainer.eval_every_n_steps={self.eval_every} at least 0."
            )

    def saves(self, step: int) -> bool:
        return step == self.max_steps or (self.save_every > 0 and step % self.save_every == 0)

    def evaluates(self, step: int) -> bool:
        return step == self.max_steps or (self.eval_every > 0 and step % self.eval_every == 0)


def train(parts: Parts, schedule: Schedule) -> int:
    """Runs from wherever the run stands to its last step, or until it is asked to stop; returns the step reached."""
    step, restored = parts.restore()
    in_flight = collections.deque(restored)
    submitted, saved = step + len(restored), step
    policy = parts.publish(step)
    if step == 0 or schedule.evaluates(step):  # a run killed between saving and evaluating still owes it
        parts.evaluate(policy, step)
    while step < schedule.max_steps and not parts.stopping():
        while submitted < min(step + 1 + schedule.max_staleness, schedule.max_steps):
            in_flight.append(parts.submit(policy, submitted))
            submitted += 1
        experience = in_flight.popleft().result()
        metrics = parts.update(step, experience)
        step += 1
        policy = parts.publish(step)
        parts.record(step, experience, metrics)
        if schedule.saves(step):
            parts.save(step, list(in_flight))
            saved = step
        if schedule.evaluates(step):
            parts.evaluate(policy, step)
    if saved != step:
        parts.save(step, list(in_flight))
    return step
