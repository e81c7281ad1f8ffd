"""Splits hosts into trainer and rollout: pure arithmetic on process numbers, before jax is imported."""

import dataclasses

TRAINER, ROLLOUT = "trainer", "rollout"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes of each role, by number in the job, ascending. A single process has both roles.

    Those that join later, as rollouts, have the numbers after these, and the ranks.
    """

    trainer: tuple[int, ...]
    rollout: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of processes in the job as it begins."""
        return len(set(self.trainer) | set(self.rollout))

    def role(self, process: int) -> str:
        """Returns 'trainer' or 'rollout'; the only process of a job counts as trainer."""
        return TRAINER if process in self.trainer else ROLLOUT

    def rank(self, process: int) -> int:
        """Returns the position of a process within its role."""
        if process >= self.count:
            return len(self.rollout) + process - self.count
        return (self.trainer if process in self.trainer else self.rollout).index(process)

    def name(self, process: int) -> str:
        """Names a process for logs: 'rollout 1'."""
        return f"{self.role(process)} {self.rank(process)}"


def parse_hosts(text: str, key: str) -> tuple[int, ...]:
    """Parses a host list such as '0-1' or '0,2-3' into process numbers, ascending.

    Raises:
      ValueError: something that is neither a number nor a range, or a number named twice.
    """
    hosts: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = (p.strip() for p in part.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{key}={text!r} holds {part!r}: write host numbers and ranges, as '0-1' or '0,2-3'.")
        hosts += range(int(first), int(last if dash else first) + 1)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"{key}={text!r} names a host twice: name each once.")
    return tuple(sorted(hosts))


def assign(trainer: str, rollout: str, processes: int) -> Hosts:
    """Assigns roles to `processes` hosts.

    Args:
      trainer: host list of the trainers; '' takes what the rollouts leave.
      rollout: host list of the rollouts; '' takes what the trainers leave. Both empty: the first half trains.
      processes: hosts in the job.

    Raises:
      ValueError: hosts in both roles, in none, or not in the job; a role without hosts; process 0 not a trainer.
    """
    keys = ("roles.trainer.hosts", "roles.rollout.hosts")
    if processes == 1 and not trainer and not rollout:
        return Hosts((0,), (0,))
    everyone = set(range(processes))
    trains, generates = (set(parse_hosts(text, key)) for text, key in zip((trainer, rollout), keys, strict=True))
    given = f"{keys[0]}={trainer!r}, {keys[1]}={rollout!r}, {processes} hosts (0-{processes - 1})"
    if not trainer and not rollout:
        trains = set(range((processes + 1) // 2))
    if unknown := sorted((trains | generates) - everyone):
        raise ValueError(f"{given}: hosts {unknown} are not in this job; name hosts from 0 to {processes - 1}.")
    trains, generates = trains or everyone - generates, generates or everyone - trains
    if both := sorted(trains & generates):
        raise ValueError(f"{given}: hosts {both} are in both roles; several hosts cannot be colocated, separate them.")
    if left := sorted(everyone - trains - generates):
        raise ValueError(f"{given}: hosts {left} have no role; every host must be named once.")
    if not trains or not generates:
        raise ValueError(f"{given}: {'no host trains' if not trains else 'no host generates'}; each role needs one.")
    if 0 not in trains:
        raise ValueError(f"{given}: host 0 must be a trainer, it writes the run directory and leads the job.")
    return Hosts(tuple(sorted(trains)), tuple(sorted(generates)))
