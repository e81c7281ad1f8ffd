"""Assigns hosts to training, rollout and evaluation: pure arithmetic on process numbers, before jax is imported."""

import dataclasses

TRAINER, ROLLOUT, EVAL = "trainer", "rollout", "eval"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes of each role, by number in the job, ascending. A single process both trains and generates.

    Processes that join later are rollouts; their numbers and ranks follow the numbers and ranks of the processes with
    which the job begins. The processes of a replica have neighbouring numbers.

    Attributes:
      trainer: processes that train.
      rollout: processes that generate; empty if only processes that join later generate.
      replica: number of rollout processes that hold one copy of the weights together. The first of them is the head: it
        decides what all of them run, and other processes speak to it alone.
      eval: processes that evaluate and do nothing else.
    """

    trainer: tuple[int, ...]
    rollout: tuple[int, ...]
    replica: int = 1
    eval: tuple[int, ...] = ()

    @property
    def heads(self) -> tuple[int, ...]:
        """Returns the heads of all replicas: all rollout processes if each holds a copy of the weights by itself."""
        return self.rollout[:: self.replica]

    def replica_of(self, process: int) -> tuple[int, ...]:
        """Returns the processes of the replica that a rollout process belongs to, the head first."""
        if self.replica == 1:
            return (process,)
        if process >= self.count:
            late = process - (process - self.count) % self.replica
            return tuple(range(late, late + self.replica))
        first = self.rollout.index(process) // self.replica * self.replica
        return self.rollout[first : first + self.replica]

    def follows(self, process: int) -> bool:
        """Returns True if a process is a rollout process that is not the head of its replica."""
        return self.role(process) == ROLLOUT and self.replica_of(process)[0] != process

    @property
    def everyone(self) -> frozenset[int]:
        """Returns the processes with which the job begins."""
        return frozenset((*self.trainer, *self.rollout, *self.eval))

    @property
    def count(self) -> int:
        """Returns the number of processes with which the job begins."""
        return len(self.everyone)

    def role(self, process: int) -> str:
        """Returns 'trainer', 'rollout' or 'eval'; the only process of a job counts as trainer."""
        return TRAINER if process in self.trainer else EVAL if process in self.eval else ROLLOUT

    def rank(self, process: int) -> int:
        """Returns the position of a process within its role."""
        if process >= self.count:
            return len(self.rollout) + process - self.count
        return {TRAINER: self.trainer, ROLLOUT: self.rollout, EVAL: self.eval}[self.role(process)].index(process)

    def name(self, process: int) -> str:
        """Names a process for logs: 'rollout 1' is the head of replica 1, 'rollout 1.1' the replica's next process."""
        role, rank = self.role(process), self.rank(process)
        if role != ROLLOUT or self.replica == 1:
            return f"{role} {rank}"
        return f"{role} {rank // self.replica}" + (f".{rank % self.replica}" if rank % self.replica else "")


def parse_hosts(text: str, key: str) -> tuple[int, ...]:
    """Parses a host list such as '0-1' or '0,2-3' into process numbers, ascending.

    Raises:
      ValueError: a part is neither a number nor an ascending range, or a number is named twice.
    """
    hosts: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = (p.strip() for p in part.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{key}={text!r} holds {part!r}: write host numbers and ranges, as '0-1' or '0,2-3'.")
        if dash and int(last) < int(first):
            raise ValueError(f"{key}={text!r} holds {part!r}, which ends before it begins: write {last}-{first}.")
        hosts += range(int(first), int(last if dash else first) + 1)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"{key}={text!r} names a host twice: name each once.")
    return tuple(sorted(hosts))


def hosts_per_replica(mesh: str, hosts: int) -> int:
    """Returns the number of hosts that hold one copy of the weights together, in a rollout mesh over `hosts` hosts.

    The number of copies is the size of the mesh's axis data, 1 if the mesh does not name data. A mesh with fewer copies
    than hosts spreads each copy over several hosts. With the mesh 'auto' every host has a copy of its own.

    Raises:
      ValueError: the copies cannot be spread equally over the hosts.
    """
    sizes = {name.strip(): size.strip() for name, _, size in (part.partition("=") for part in mesh.split(","))}
    copies = sizes.get("data", sizes.get("dp", "1"))
    if mesh.strip() == "auto" or not copies.isdigit() or int(copies) >= hosts:
        return 1
    if int(copies) < 1 or hosts % int(copies):
        raise ValueError(
            f"roles.rollout.mesh={mesh!r} spreads {copies} copies of the weights over {hosts} hosts: the number of "
            "copies (data) must be at least 1, and divide the number of hosts."
        )
    return hosts // int(copies)


def check_evaluation_hosts(evaluates: str, *, split: bool) -> None:
    """Refuses evaluation hosts in a job whose hosts must all fetch the weights at the same time.

    Args:
      evaluates: value of the key roles.eval.hosts.
      split: True if each role of the job has a cluster of its own (topology split).

    Raises:
      ValueError: evaluation hosts are named, and the job is not split.
    """
    if evaluates and not split:
        raise ValueError(
            f"roles.eval.hosts={evaluates!r} names hosts that evaluate at their own pace: that needs a job of several "
            "processes with --topology=split. Leave it empty, and training stops for evaluations."
        )


def check_own_copies(evaluates: str, hosts: Hosts, mesh: str) -> Hosts:
    """Returns `hosts`; refuses evaluation hosts if several rollout hosts hold one copy of the weights together.

    Raises:
      ValueError: there are evaluation hosts, and a rollout replica has several hosts.
    """
    if hosts.eval and hosts.replica > 1:
        raise ValueError(
            f"roles.eval.hosts={evaluates!r}: with roles.rollout.mesh={mesh!r} {hosts.replica} hosts hold each copy of "
            "the weights together, but an evaluation host needs a whole copy: leave roles.eval.hosts empty, or raise "
            "data."
        )
    return hosts


def assign(trainer: str, rollout: str, processes: int, mesh: str = "auto", evaluates: str = "") -> Hosts:
    """Assigns roles to the hosts of a job.

    If `trainer` and `rollout` are both '', the first half (rounded up) of the hosts that do not evaluate trains, and
    the others generate. A job of one process without lists trains and generates in this process.

    Args:
      trainer: host list of the trainers; '' takes the hosts that the other lists leave.
      rollout: host list of the rollouts; '' takes the hosts that the other lists leave.
      processes: number of hosts in the job.
      mesh: spec of the rollout mesh.
      evaluates: host list of the evaluation hosts; '' for none.

    Raises:
      ValueError: a list is malformed; a host has two roles or none, or is not in the job; a role has no hosts;
        process 0 is not a trainer; or the mesh does not fit the hosts.
    """
    keys = ("roles.trainer.hosts", "roles.rollout.hosts", "roles.eval.hosts")
    if processes == 1 and not trainer and not rollout and not evaluates:
        return Hosts((0,), (0,))
    everyone = set(range(processes))
    lists = zip((trainer, rollout, evaluates), keys, strict=True)
    trains, generates, tests = (set(parse_hosts(text, key)) for text, key in lists)
    settings = f"{keys[0]}={trainer!r}, {keys[1]}={rollout!r}, "
    settings += (f"{keys[2]}={evaluates!r}, " if evaluates else "") + f"{processes} hosts (0-{processes - 1})"
    if not trainer and not rollout:
        others = sorted(everyone - tests)
        trains = set(others[: (len(others) + 1) // 2])
    if unknown := sorted((trains | generates | tests) - everyone):
        raise ValueError(f"{settings}: hosts {unknown} are not in this job; name hosts from 0 to {processes - 1}.")
    trains, generates = trains or everyone - tests - generates, generates or everyone - tests - trains
    if both := sorted((trains & generates) | (tests & (trains | generates))):
        raise ValueError(
            f"{settings}: hosts {both} have two roles: in a job of several hosts, give each host one role."
        )
    if left := sorted(everyone - trains - generates - tests):
        raise ValueError(f"{settings}: hosts {left} have no role; every host must be named once.")
    if not trains or not generates:
        raise ValueError(f"{settings}: {'no host trains' if not trains else 'no host generates'}; each role needs one.")
    if 0 not in trains:
        raise ValueError(f"{settings}: host 0 must be a trainer, it writes the run directory and leads the job.")
    together = hosts_per_replica(mesh, len(generates))
    hosts = Hosts(tuple(sorted(trains)), tuple(sorted(generates)), together, tuple(sorted(tests)))
    return check_own_copies(evaluates, hosts, mesh)
