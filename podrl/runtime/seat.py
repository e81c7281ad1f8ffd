"""A process's place in a job of several processes, as the process itself was told it."""

import dataclasses
from collections.abc import Mapping

from podrl.runtime.roles import Hosts


@dataclasses.dataclass(frozen=True)
class Seat:
    """This process's place in the job: role, rank, addresses.

    Attributes:
      process: number in the job; 0 leads.
      hosts: the role of every process of the job.
      leader: 'host:port' of the leader's endpoint.
      secret: shared secret of the job's channel.
      disposable: rollout and evaluation processes may come and go (topology split).
    """

    process: int
    hosts: Hosts
    leader: str
    secret: str
    disposable: bool = False

    @property
    def late(self) -> bool:
        """True where this process came to a job that was running, and may leave it."""
        return self.process >= self.hosts.count

    def told(self) -> dict[str, str]:
        """Describes who does what in the job, by setting; the same for all processes of one job."""
        hosts = self.hosts
        roles = {"trainer": hosts.trainer, "rollout": hosts.rollout, "eval": hosts.eval}
        named = {f"roles.{role}.hosts": ",".join(map(str, numbers)) or "none" for role, numbers in roles.items()}
        copies = {"hosts per copy of the weights (roles.rollout.mesh)": str(hosts.replica)}
        return {"--topology": "split" if self.disposable else "shared", **named, **copies}

    def differences(self, theirs: Mapping[str, str]) -> list[str]:
        """Lists what another process was told otherwise, in its words and in this one's."""
        each = [(key, theirs.get(key), mine) for key, mine in self.told().items()]
        return [f"{key} is {there} there, and {mine} here" for key, there, mine in each if there != mine]
