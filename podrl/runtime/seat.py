"""The place of a process in a job of several processes: its number, every process's role, and the leader's address."""

import dataclasses
from collections.abc import Mapping

from podrl.runtime.roles import Hosts


@dataclasses.dataclass(frozen=True)
class Seat:
    """This process's place in the job.

    Attributes:
      process: number of this process in the job; 0 is the leader.
      hosts: role of every process of the job.
      leader: 'host:port' of the leader's endpoint.
      secret: shared secret of the job's channel.
      disposable: True if rollout and evaluation processes may come and go (topology split).
    """

    process: int
    hosts: Hosts
    leader: str
    secret: str
    disposable: bool = False

    @property
    def late(self) -> bool:
        """Returns True if this process joined a job that was running already; such a process may also leave the job."""
        return self.process >= self.hosts.count

    def describe(self) -> dict[str, str]:
        """Describes the roles of the job's hosts as values of settings; equal in all processes of one job."""
        hosts = self.hosts
        roles = {"trainer": hosts.trainer, "rollout": hosts.rollout, "eval": hosts.eval}
        values = {f"roles.{role}.hosts": ",".join(map(str, numbers)) or "none" for role, numbers in roles.items()}
        copies = {"hosts per copy of the weights (roles.rollout.mesh)": str(hosts.replica)}
        return {"--topology": "split" if self.disposable else "shared", **values, **copies}

    def differences(self, theirs: Mapping[str, str]) -> list[str]:
        """Lists the settings whose values differ in another process: 'KEY is VALUE there, and VALUE here'.

        `theirs` is the result of the other process's `describe`.
        """
        each = [(key, theirs.get(key), mine) for key, mine in self.describe().items()]
        return [f"{key} is {there} there, and {mine} here" for key, there, mine in each if there != mine]
