"""The step barrier: a pod's processes continue or stop after the same step."""

from collections.abc import Mapping

from podrl.rundir.run import Run
from podrl.runtime.message import Message
from podrl.runtime.pod import LEADER, Pod


class StepBarrier:
    """Keeps a pod's processes in step: at every step the leader decides whether all continue or stop.

    Attributes:
      needed_step: first step whose batch a trainer host may still need, as far as the leader knows.
      orders: number of the leader's orders that each rollout host must have read before it goes on, by the host's
        address.
    """

    def __init__(self, pod: Pod, run: Run, deadline_s: float):
        self._pod, self._run, self._deadline_s = pod, run, deadline_s
        self._stop = self._wished = False
        self._trains = pod.seat.process in pod.seat.hosts.trainer
        self._reached = dict.fromkeys(pod.seat.hosts.trainer, 0)
        self._words: list[int] = []  # steps whose decision (continue or stop) the leader still offers
        self.needed_step = 0
        self.orders: Mapping[str, int] = {}
        if pod.leads:
            pod.channel.serve("reached", self._on_reached)

    def ending(self) -> bool:
        """Returns, on the leader, whether the run was asked to stop, even before the processes have agreed to stop."""
        return self._stop or self._wished or self._run.stopping()

    def stopping(self) -> bool:
        """Returns True if the leader decided to stop at the last step on which the processes have agreed."""
        return self._stop

    def agree(self, step: int, orders: Mapping[str, int] | None = None) -> None:
        """Agrees with the other processes whether to go on with a step; the leader decides.

        Args:
          step: the step that this process has reached.
          orders: value of attribute `orders` for all processes; on the leader only.

        Raises:
          ChannelError: the leader did not answer within the deadline.
        """
        if self._pod.leads:
            self._reached[LEADER] = step
            self.needed_step = min(self._reached.values())
            self._stop = self.ending()
            word = {"stop": self._stop, "taken": self.needed_step, "orders": dict(orders or {})}
            word["profile"] = self._run.profiler.decide(step)
            self._pod.channel.put(f"word/{step}", Message(word))
            self._words.append(step)
            # Rollout hosts are at `step` already. A trainer may be behind, and then still needs older decisions.
            while self._words[0] < min(step - 1, self.needed_step):
                self._pod.channel.drop(f"word/{self._words.pop(0)}")
            return
        stops = self._run.stopping()
        if self._trains or stops:
            reached = {"process": self._pod.seat.process, "step": step, "stop": stops}
            self._pod.call(LEADER, "reached", Message(reached), self._deadline_s)
        with self._run.watchdog.stage(f"waiting for trainer 0 at step {step}"):
            word = self._pod.get(LEADER, f"word/{step}", self._deadline_s).value
        self._stop, self.needed_step, self.orders = bool(word["stop"]), int(word["taken"]), word["orders"]
        self._run.profiler.planned = word["profile"]

    def _on_reached(self, message: Message) -> Message:
        """Records, on the channel's thread, the step that another host has reached and whether it was asked to stop."""
        self._wished = self._wished or message.value["stop"]
        if (process := message.value["process"]) in self._reached:
            self._reached[process] = max(self._reached[process], message.value["step"])
        return Message()
