"""Change points: how many tokens the samples of a request may draw in a session before they leave it."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Points:
    """The tokens at which the samples of a request leave a session, to go on in another.

    Attributes:
      quantum: tokens that each may draw there; None for all it has left.
      recorded: by row, sampled tokens at which it left when the run was there before; others as `quantum` says.
      late: by row, its tokens, given ones included, when its environment ran out of time then, as it does again.
      urgent: they get lanes before samples that are not urgent.
    """

    quantum: int | None = None
    recorded: Mapping[int, int] = dataclasses.field(default_factory=dict)
    late: Mapping[int, int] = dataclasses.field(default_factory=dict)
    urgent: bool = True

    def hold(self, b: int, sampled: int) -> int | None:
        """The number of sampled tokens at which sample `b`, which has `sampled` now, leaves; None for never."""
        return self.recorded.get(b, None if self.quantum is None else sampled + self.quantum)


def points(given: "int | Points | None") -> Points:
    """Points of a plain quantum: samples without one are urgent."""
    return Points(given, urgent=given is None) if given is None or isinstance(given, int) else given
