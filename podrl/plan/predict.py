"""Predicts a training step from its programs: the least seconds of each side, and the side that waits."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from podrl.plan.compile import CompileResult
from podrl.plan.programs import ROLLOUT, TRAINER


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Lower bounds on the seconds of a training step: every program is assumed to run at its roofline.

    Attributes:
      trainer_s: seconds of log-probabilities and updates.
      rollout_s: seconds of prefill and decoding.
      move_s: seconds of the weight move.
      step_s: seconds of the whole step.
      trainer_idle, rollout_idle: share of the step in which a side's devices have nothing to do, from 0 to 1.
      waits: description of the side that waits, in words.
    """

    trainer_s: float
    rollout_s: float
    move_s: float
    step_s: float
    trainer_idle: float
    rollout_idle: float
    waits: str


@dataclasses.dataclass(frozen=True)
class JobCost:
    """Time and cost of all steps of a job at a stated multiple of the roofline.

    Attributes:
      hours: hours of the whole job.
      chip_hours: sum of the hours of all chips of the job.
      dollars: price of all chip-hours; 0 if the user gave no price.
    """

    hours: float
    chip_hours: float
    dollars: float


def rebalanced(prediction: Prediction, trainer_chips: int, rollout_chips: int) -> tuple[int, int]:
    """Splits the chips anew so that trainer and rollout take equally long, if time is inversely proportional to chips.

    Returns:
      (chips of the trainer, chips of the rollout), at least one each.
    """
    chips = trainer_chips + rollout_chips
    trainer, rollout = prediction.trainer_s * trainer_chips, prediction.rollout_s * rollout_chips
    own = round(chips * trainer / (trainer + rollout)) if trainer + rollout else trainer_chips
    own = min(max(own, 1), chips - 1)
    return own, chips - own


class Step(Protocol):
    """A predicted or simulated training step; only its seconds matter here."""

    @property
    def step_s(self) -> float: ...


def cost(step: Step, *, steps: int, chips: int, factor: float, price: float) -> JobCost:
    """Computes time and cost of a job from one step at its roofline.

    Args:
      step: a training step at its roofline.
      steps: number of steps of the job.
      chips: number of chips of the job; chips that both sides share count once.
      factor: assumed ratio of the real time of a step to its roofline.
      price: price of one chip for one hour, in dollars.
    """
    hours = step.step_s * steps * factor / 3600
    return JobCost(hours, hours * chips, hours * chips * price)


def predict(measured: Sequence[CompileResult], move_s: float, *, max_staleness: int, colocated: bool) -> Prediction:
    """Predicts a step from the measurements of its programs.

    Args:
      measured: measurements of the job's programs.
      move_s: seconds of the weight move.
      max_staleness: number of steps by which a sample may be older than the weights that it trains; from 1 on, sides on
        different devices work at the same time.
      colocated: True if both sides use the same devices.
    """
    trainer, rollout = (sum(m.runs * m.seconds for m in measured if m.side == side) for side in (TRAINER, ROLLOUT))
    apart = max_staleness > 0 and not colocated
    step = (max(trainer, rollout) if apart else trainer + rollout) + move_s
    idle = [1 - (busy + move_s) / step if step else 0.0 for busy in (trainer, rollout)]
    if colocated:
        idle, waits = [0.0, 0.0], "nobody: the sides take turns on the same devices"
    elif apart:
        late, early = ("rollout", "trainer") if rollout > trainer else ("trainer", "rollout")
        waits = f"the {early} waits for the {late}, {max(idle):.0%} of the step"
    else:
        waits = (
            f"the trainer waits {idle[0]:.0%} of the step for samples, the rollout {idle[1]:.0%} for weights; "
            "grpo.max_staleness=1 (with PPO ppo.max_staleness=1) lets them overlap"
        )
    return Prediction(trainer, rollout, move_s, step, idle[0], idle[1], waits)
