"""One run of the program: its directory, metric files and checkpoints, and stop signals."""

import json
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import rich.console

from podrl.rundir import gauges, identity
from podrl.rundir.console import make_console
from podrl.rundir.metrics import LogConfig, MetricsLog, read_metrics
from podrl.rundir.profiler import Profiler
from podrl.rundir.spans import Spans
from podrl.rundir.tracing import TraceSteps, Tracing
from podrl.runtime import signals
from podrl.runtime.watchdog import Watchdog
from podrl.storage.checkpoint import CheckpointConfig, Checkpoints
from podrl.storage.lock import Lock
from podrl.storage.mirror import Mirror
from podrl.storage.storage import StorageError, check, disk_trouble, is_remote, locate, write_whole
from podrl.workers.child import refuse_inside

OUTSIDE = "outside"  # folder of the outside answers, which a resumed run reads
_PATIENCE_S = 120.0  # for copying the files of a run directory, which are small


class Run:
    """Owns the run directory for the length of a `with` block, which may be nested; a signal then asks the run to stop.

    A run directory in a bucket is written in a local one, whose files are copied there (podrl/storage/mirror.py);
    checkpoints go to the bucket themselves. The block ends well only if everything has arrived.

    Attributes:
      workdir: directory that files are written to; None keeps the run in memory (no files, no resume).
      place: the run directory as the user names it.
      leads: whether this process writes metrics and tells the user.
      checkpoints: None without a workdir.
      console: console for tables and progress.
      watchdog: names and times the stages.
      planned: seconds by stage of the plan that log.plan names.
      command: command that starts this run again, as the user would type it.
      profiler: writes jax's profile of steps that are asked for.
      spans: record of what this process did when, its stages among it.
      tracing: records spans and samples; None where this process writes no metrics, and with log.trace='off'.
      passed: function that is called after a save with the newest step that has a complete checkpoint.
      taking: function that is called before samples are drawn here that another process had begun.
    """

    def __init__(
        self,
        workdir: str | os.PathLike | None,
        *,
        log: LogConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        config: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        console: rich.console.Console | None = None,
        leads: bool = True,
        savers: Sequence[int] = (),
    ):
        """Opens the run directory.

        Args:
          workdir: the run directory, or None.
          log: sinks.
          checkpoint: settings that say when to save.
          config: content of config.json; an existing one must hold the same but for what may change
            (rundir/identity.py).
          defaults: defaults of the configuration's keys; a key that the run in the directory does not know had its
            default there.
          console: console; by default one on stdout, silent where this process does not lead.
          leads: whether this process writes metrics, samples and config.json.
          savers: processes that save together; () for this one alone.

        Raises:
          ValueError: the directory cannot be made or used, another process uses it, or it belongs to a run of another
            configuration.
          StorageError: the bucket it is in does not answer.
        """
        refuse_inside()
        self.leads = leads
        self.place = "" if workdir is None else os.fspath(workdir)
        self.workdir: pathlib.Path | None = None
        self._mirror: Mirror | None = None
        self.log_config = log or LogConfig()
        self.planned = gauges.read_plan(self.log_config.plan) if leads else {}
        self._plan = pathlib.Path(self.log_config.plan).read_bytes() if self.planned else b""
        self.checkpoint_config = checkpoint or CheckpointConfig()
        self.config, self._defaults = dict(config or {}), dict(defaults or {})
        self.console = console or make_console(quiet=not leads)
        self.watchdog = Watchdog(self.log_config.stall_s)
        self.watchdog.tells, self.watchdog.last_words = leads, self.how_to_resume
        self.watchdog.say = self.console.print
        self.command = "the same script"
        self._told = 0  # newest step that a complete checkpoint was known of
        self.profiler = Profiler(self.place)
        self.spans = Spans()
        self.watchdog.ended = self.spans.add
        self.tracing: Tracing | None = None
        self.checkpoints: Checkpoints | None = None
        self.metrics: MetricsLog | None = None
        self.passed: list[Callable[[int], None]] = []
        self.taking: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._entered = 0
        self._lock: Lock | None = None
        if workdir is not None:
            try:
                with self.watchdog.stage("opening the run directory"):
                    self._open(workdir, savers)
                self.watchdog.expected = self._last_times()
            except BaseException as error:
                self._give_back()
                if trouble := disk_trouble(error):
                    raise ValueError(f"--workdir={workdir} cannot be a run directory. {trouble}") from error
                raise

    def __enter__(self) -> "Run":
        self._entered += 1
        if self._entered > 1:
            return self
        if not signals.leaves():
            self.begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered -= 1
        if self._entered:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.checkpoints is not None:
            with self.watchdog.stage("closing checkpoints"):
                self.checkpoints.close()
        try:
            with self.watchdog.stage("closing the run directory"):
                self.profiler.close()
                if self.metrics is not None:
                    stopped = self._stop.is_set() or isinstance(exc[1], KeyboardInterrupt)
                    self.metrics.close("stopped" if stopped else "failed" if exc[0] is not None else "finished")
                if self.tracing is not None:
                    self.tracing.add_spans(self.spans.take())
                    self.tracing.close()
                self._close_mirror(failed=exc[0] is not None)
        finally:
            self._give_back()
            self.watchdog.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop.set()
        name = signal.Signals(number).name
        text = f"\npodrl: {name}: stopping after this step, then saving (Ctrl-C again to leave at once).\n"
        os.write(2, text.encode())  # print may not be entered again from a handler

    def begin(self) -> None:
        """Begins training: from now on a signal asks the run to stop after the step, and no longer ends the process.

        Raises:
          StoppedError: a signal before this moment should have ended the process.
        """
        if threading.current_thread() is threading.main_thread():
            for number in signals.NUMBERS:
                self._handlers.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._on_signal)
            if hasattr(signal, "SIGUSR2"):
                self._handlers.setdefault(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))
                signal.signal(signal.SIGUSR2, lambda number, frame: self.profiler.ask())
            signals.raise_swallowed()

    def stop(self) -> None:
        """Asks the run to stop, as a signal does."""
        self._stop.set()

    def stopping(self) -> bool:
        """True if the run was asked to stop.

        Raises:
          ValueError: another process has taken the run directory over.
        """
        if self._lock is not None:
            self._lock.check()
        return self._stop.is_set()

    @property
    def traced(self) -> TraceSteps | None:
        """The steps whose samples are recorded, on all hosts that train; None where none are."""
        records = self.workdir is not None and self.log_config.trace != "off"
        return TraceSteps(self.log_config) if records else None

    def saved_step(self) -> int:
        """The newest step with a complete checkpoint; 0 when there is none."""
        return max(self.checkpoints.steps(), default=0) if self.checkpoints is not None else 0

    def how_to_resume(self) -> str:
        """Names the saved step and the command that resumes; asks no bucket; '' where another process tells."""
        if self.checkpoints is None or not self.leads:
            return ""
        step = self._told if is_remote(self.place) else self.saved_step()
        if not step:
            return f"No step is saved in {self.place} yet. Start again with: {self.command}"
        return f"Step {step} is saved in {self.place}. Resume with: {self.command}"

    def tell_saved(self, step: int) -> None:
        """Tells those who keep things of a step that a checkpoint has passed it."""
        self._told = max(self._told, step)
        for passed in self.passed:
            passed(step)

    def tell_taking(self) -> None:
        """Calls `taking`: what other processes have recorded has grown, and is to be read again."""
        for taking in self.taking:
            taking()

    def open_metrics(self, start: int, marks: Mapping[str, Any] | None = None) -> None:
        """Opens the metric files; drops records at or after step `start` of an earlier start of this run.

        Args:
          start: the first step that will be written.
          marks: the marks that `marks` returned for the checkpoint that the run goes on from; the user is told what is
            lost.
        """
        self.begin()
        if self.workdir is not None and self.leads:
            self.metrics = MetricsLog(self.workdir, self.log_config, start=start, run_config=self.config, marks=marks)
            if self._plan:
                write_whole(self.workdir / gauges.PLAN, self._plan)
            if self.log_config.trace != "off":
                self.tracing = Tracing(self.workdir, self.log_config, start=start)
            for sentence in self.metrics.lost:
                self.console.print(sentence)

    def marks(self) -> dict[str, Any]:
        """Returns sizes and checksums of the files of metrics and samples, for a checkpoint."""
        return {} if self.metrics is None else self.metrics.marks()

    def push(self, *, wait: bool = True) -> None:
        """Copies all files written so far to the bucket, if the run directory is in one; waits for a bounded time."""
        if self._lock is not None:
            self._lock.check()
        if self._mirror is not None:
            with self.watchdog.stage("copying to the bucket"):
                self._mirror.push(_PATIENCE_S if wait else 0.0)

    def hurry(self) -> None:
        """Has new files copied to the bucket soon, if the run directory is in one; returns at once."""
        if self._mirror is not None:
            self._mirror.hurry()

    def _open(self, workdir: str | os.PathLike, savers: Sequence[int]) -> None:
        """Locks the directory, checks whose run it holds, and prepares to write there."""
        if is_remote(workdir):
            check(workdir, "--workdir", writes=True)
        else:
            self.workdir = self._make_workdir(workdir)
        if self.leads:  # before anything there is read, which another run may be writing
            self._lock = Lock(locate(workdir), self.place)
        if is_remote(workdir):
            self._mirror = Mirror(locate(workdir), folders=(OUTSIDE,) if self.leads else ())
            self.workdir = self._mirror.local
        if self.leads:
            self._claim()
            if self._mirror is not None:
                self._mirror.start()
        self.checkpoints = self._checkpoints(savers)

    def _last_times(self) -> dict[str, float]:
        """Seconds of the stages before the first step at the last start of this run, as far as it has one."""
        earlier = read_metrics(self.workdir) if self.workdir is not None and self.leads else []
        stages = ("start-up", "restoring", "evaluation")
        return {stage: record[name] for record in earlier for stage in stages if (name := f"time/{stage}") in record}

    def _give_back(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _make_workdir(self, workdir: str | os.PathLike) -> pathlib.Path:
        """Makes the directory that files go to."""
        path = pathlib.Path(workdir)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--workdir={workdir} cannot be a run directory ({error.strerror}): name a directory that can be "
                "written, or one that does not exist yet."
            ) from error
        return path

    def _close_mirror(self, *, failed: bool) -> None:
        """Waits until all files are in the bucket.

        Args:
          failed: an error is on its way already, and is told instead.

        Raises:
          StorageError: they could not be copied.
        """
        if self._mirror is None:
            return
        with self.watchdog.stage("copying to the bucket"):
            good = self._mirror.close(_PATIENCE_S)
        if not good:
            text = (
                f"The last files of this run could not be copied to {self.place} within {_PATIENCE_S:.0f} s: they are "
                f"in {self.workdir}. The same command goes on from the newest checkpoint."
            )
            if not failed:
                raise StorageError(text)
            self.console.print(text)

    def _claim(self) -> None:
        """Compares the configuration with that of the run in the directory, then writes config.json.

        Raises:
          ValueError: the directory belongs to a run of another configuration; says which keys differ.
        """
        assert self.workdir is not None
        mine, known = (json.loads(json.dumps(values, default=_name)) for values in (self.config, self._defaults))
        checkpoints = locate(self.place) / "checkpoints"
        if identity.has_past(self.workdir, checkpoints):
            theirs = identity.read(self.workdir, checkpoints)
            theirs = theirs or mine  # a run that described nothing binds nothing
            allowed, refused = identity.changes(theirs, mine, known)
            if refused:
                raise ValueError(
                    f"{self.place} holds a run of another configuration: " + "; ".join(refused[:8]) + ". "
                    "Give the same configuration to resume it, or another --workdir to start a new run."
                )
            if allowed:
                self.console.print("Changed since this run was last started: " + "; ".join(allowed) + ".")
            if new := list(identity.unknown(theirs, mine)):
                self.console.print(
                    "Not known when this run was last started, and so by default: " + ", ".join(new) + "."
                )
        identity.write(self.workdir, mine, known)

    def _checkpoints(self, savers: Sequence[int]) -> Checkpoints:
        config = json.loads(json.dumps(self.config, default=_name))
        directory = locate(self.place) / "checkpoints"
        given = self.checkpoint_config
        return Checkpoints(
            directory,
            processes=savers,
            config=config,
            keep=given.keep,
            keep_every=given.keep_every,
            keep_hours=given.keep_hours,
        )


def _name(value: Any) -> str:
    """Converts a value JSON cannot hold; a function becomes its name, which is the same in every process."""
    name = getattr(value, "__qualname__", None)
    return str(value) if name is None else f"{getattr(value, '__module__', '')}.{name}"
