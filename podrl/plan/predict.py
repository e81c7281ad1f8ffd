"""Predicts a training step from its programs: least seconds of each side, and which side waits."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from podrl.plan.compile import Measured
from podrl.plan.programs import ROLLOUT, TRAINER


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Least seconds of a training step, every program at its roofline.

    Attributes:
      trainer_s, rollout_s, move_s: of log-probabilities and updates, of prefill and decoding, of the weight move.
      step_s: of the whole step.
      trainer_idle, rollout_idle: share of the step in which a side's devices have nothing to do.
      waits: in words, which side waits.
    """

    trainer_s: float
    rollout_s: float
    move_s: float
    step_s: float
    trainer_idle: float
    rollout_idle: float
    waits: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time and cost of all steps of a job at a stated multiple of the roofline.

    Attributes:
      hours: of the whole job.
      chip_hours: over all chips of both topologies.
      dollars: 0 where no price was given.
    """

    hours: float
    chip_hours: float
    dollars: float


def rebalanced(prediction: Prediction, trainer_chips: int, rollout_chips: int) -> tuple[int, int]:
    """Splits the same chips so that both sides would be busy equally long, if each takes time as one over its chips.

    Returns:
      (chips of the trainer, chips of the rollout), at least one each.
    """
    chips = trainer_chips + rollout_chips
    trainer, rollout = prediction.trainer_s * trainer_chips, prediction.rollout_s * rollout_chips
    own = round(chips * trainer / (trainer + rollout)) if trainer + rollout else trainer_chips
    own = min(max(own, 1), chips - 1)
    return own, chips - own


class Step(Protocol):
    """A training step of so many seconds."""

    @property
    def step_s(self) -> float: ...


def cost(step: Step, *, steps: int, chips: int, factor: float, price: float) -> Cost:
    """Multiplies a step at its roofline by the steps, by `factor`, and by `price` per chip and hour."""
    hours = step.step_s * steps * factor / 3600
    return Cost(hours, hours * chips, hours * chips * price)


def predict(measured: Sequence[Measured], move_s: float, *, max_staleness: int, colocated: bool) -> Prediction:
    """Predicts a step from the measurements of its programs.

    Args:
      move_s: seconds of the weight move.
      max_staleness: training steps a sample may be older than the weights it is trained with; from 1 on the sides
        work at the same time.
      colocated: both sides use the same devices.
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
            "grpo.max_staleness=1 lets them overlap"
        )
    return Prediction(trainer, rollout, move_s, step, idle[0], idle[1], waits)
