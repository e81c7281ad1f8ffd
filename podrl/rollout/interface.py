"""The interface of a decoding engine: what podrl calls, and what an engine may leave out.

podrl's own engine is podrl.rollout.worker.RolloutWorker. Another one is a class that is made with the same arguments,
has these attributes and methods, and is named in podrl.cluster.worker.ENGINES or given as
`ClusterConfig(rollout_engine=...)`.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

from podrl.engine.config import Ability, RolloutConfig, Sampling
from podrl.engine.device import Device, Tell
from podrl.engine.stats import RolloutStats
from podrl.rollout.episodes import Partner
from podrl.rollout.partial import Partial
from podrl.rollout.players import Chosen, Player
from podrl.types import Mode, Policy, Prompts, PyTree, Rollouts


class RolloutEngine(Protocol):
    """A decoding engine of one process's rollout mesh; the methods are documented in RolloutWorker.

    Attributes:
      abilities: the engine's abilities beyond whole batches (`podrl.engine.config.Ability`). An engine without this
        attribute has none: it needs `generate`, `warm_up`, `sleep` and `wake` alone.
      config: settings of the engine, and of sampling.
      stats: counts of the work of the last call.
      partner: the environments of all samples; None where they have none.
      tell: tells other processes of the mesh what to run; None where there are none.
    """

    abilities: ClassVar[frozenset[Ability]]
    config: RolloutConfig
    stats: RolloutStats
    partner: Partner | None
    tell: Tell | None

    def warm_up(self, params: PyTree, progress: Callable[[str], None] | None = None) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def generate(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        step: int,
        sampling: Sampling | None = None,
        mode: Mode = "train",
        ended: Callable[[Any], None] | None = None,
    ) -> Rollouts: ...

    # windows

    def player(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        step: int,
        sampling: Sampling | None = None,
        mode: Mode = "train",
        policy: Policy | None = None,
        partial: Partial | None = None,
    ) -> Player: ...

    def advance(
        self, policy: Policy, players: Chosen, *, calls: int | None = None, halt: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Player, Any]]: ...

    def rows(self, player: Player, seconds: float) -> Rollouts: ...

    # a mesh over several processes

    def device(self, policy: Policy, tell: Tell | None = None) -> Device: ...

    def put_back(self, device: Device) -> None: ...
