"""TokenBudget: how many tokens the samples of a request may draw in one session of the engine."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class TokenBudget:
    """The number of tokens that each sample of a request may draw in a session before it leaves the session.

    A sample that leaves before its end continues in a later session.

    Attributes:
      quantum: number of tokens that each sample may draw in the session; None for all its remaining tokens.
      recorded: number of sampled tokens at which a sample left the session in the run that is repeated, by row. Samples
        without an entry leave after `quantum` tokens.
      late: number of tokens, appended tokens included, that a sample had when its environment ran out of time in the
        run that is repeated, by row. The environment runs out of time at the same token again.
      urgent: True if the samples get lanes before samples that are not urgent.
      repeated: True if the batch of the samples is repeated from a journal (podrl/rollout/journal.py), so that finished
        episodes are played from their records.
    """

    quantum: int | None = None
    recorded: Mapping[int, int] = dataclasses.field(default_factory=dict)
    late: Mapping[int, int] = dataclasses.field(default_factory=dict)
    urgent: bool = True
    repeated: bool = False

    def limit(self, b: int, sampled: int) -> int | None:
        """Returns the number of sampled tokens at which sample `b` leaves the session; None for never.

        Args:
          b: row of the sample.
          sampled: number of tokens that the sample has sampled so far.
        """
        return self.recorded.get(b, None if self.quantum is None else sampled + self.quantum)


def as_budget(quantum: "int | TokenBudget | None") -> TokenBudget:
    """Makes a budget from a plain quantum; samples without a quantum (None) are urgent. Returns a budget unchanged."""
    return TokenBudget(quantum, urgent=quantum is None) if quantum is None or isinstance(quantum, int) else quantum
