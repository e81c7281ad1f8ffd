"""The interface of a decoding engine: the methods that podrl calls, and which of them an engine may lack.

podrl's own engine is podrl.rollout.worker.RolloutWorker. Another engine is a class that is constructed with the same
arguments and has these attributes and methods. A job names it by `rollout.engine`, as 'file.py:Class'; in Python it may
be passed as `ClusterConfig(rollout_engine=...)`.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

from podrl.engine.config import Ability, RolloutConfig, Sampling
from podrl.engine.device import Broadcast, Device
from podrl.engine.stats import RolloutStats
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.partial import PartialBatch
from podrl.rollout.players import Chosen, Player
from podrl.types import Mode, Policy, Prompts, PyTree, Rollouts


class RolloutEngine(Protocol):
    """The decoding engine of one process's rollout mesh; RolloutWorker documents the methods.

    Attributes:
      abilities: abilities of the engine beyond whole batches (`podrl.engine.config.Ability`). An engine without this
        attribute has none of them, and needs only `generate`, `warm_up`, `sleep` and `wake`.
      config: settings of the engine and of sampling.
      stats: counters of the last call's work.
      env_client: the environments of all samples; None if samples have no environments.
      broadcast: function that sends the engine's calls to the other processes of the mesh, which run the calls, too;
        None if the mesh has no other processes.
    """

    abilities: ClassVar[frozenset[Ability]]
    config: RolloutConfig
    stats: RolloutStats
    env_client: EnvironmentClient | None
    broadcast: Broadcast | None

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

    # Methods for the ability "windows".

    def player(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        step: int,
        sampling: Sampling | None = None,
        mode: Mode = "train",
        policy: Policy | None = None,
        partial: PartialBatch | None = None,
    ) -> Player: ...

    def advance(
        self, policy: Policy, players: Chosen, *, calls: int | None = None, halt: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Player, Any]]: ...

    def rows(self, player: Player, seconds: float) -> Rollouts: ...

    # Methods for a mesh over several processes.

    def device(self, policy: Policy, broadcast: Broadcast | None = None) -> Device: ...

    def put_back(self, device: Device) -> None: ...
