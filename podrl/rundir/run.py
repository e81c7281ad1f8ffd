"""One run of the program: its directory, metric files and checkpoints, and the signals that stop it."""

import os
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import rich.console

from podrl.mappings import ConfigValues, SavedState
from podrl.python_names import speaks_python
from podrl.rundir import gauges, identity
from podrl.rundir.console import make_console
from podrl.rundir.metrics import LogConfig, MetricsLog, read_metrics
from podrl.rundir.profiler import Profiler
from podrl.rundir.sinks import check_installed
from podrl.rundir.spans import Spans
from podrl.rundir.times import StageTimes
from podrl.rundir.tracing import TraceSteps, Tracing
from podrl.runtime import signals
from podrl.runtime.watchdog import Watchdog
from podrl.storage.checkpoint import CheckpointConfig, Checkpoints
from podrl.storage.lock import Lock
from podrl.storage.mirror import Mirror
from podrl.storage.storage import StorageError, check, disk_trouble, is_remote, locate, write_whole
from podrl.workers.child import refuse_inside

OUTSIDE = "outside"  # folder with answers of tools and agents, which a resumed run reads instead of calling them again
_PATIENCE_S = 120.0  # time limit for copying the files of a run directory, which are small


def check_workdir(workdir: str | os.PathLike) -> None:
    """Refuses a local run directory that cannot be made or written, and leaves nothing behind.

    Raises:
      ValueError: the directory, or the nearest place above it that exists, is no directory or cannot be written.
    """
    if is_remote(workdir):
        return
    path = pathlib.Path(workdir).absolute()
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not place.is_dir():
        raise _no_run_directory(workdir, f"{place} is not a directory")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".podrl-", dir=place))
    except OSError as error:
        raise _no_run_directory(workdir, f"{place} cannot be written: {error.strerror}") from None


def _no_run_directory(workdir: str | os.PathLike, why: str) -> ValueError:
    return ValueError(
        f"--workdir={workdir} cannot be a run directory ({why}): name a directory that can be written, or one that "
        "does not exist yet."
    )


class Run:
    """Owns the run directory while a `with` block lasts (blocks may be nested); in a block signals ask the run to stop.

    A run directory in a bucket is written to a local directory, whose files are copied to the bucket
    (podrl/storage/mirror.py); checkpoints are written to the bucket directly. The block ends without an error only if
    all files have arrived.

    Attributes:
      workdir: local directory that files are written to; None keeps the run in memory (no files, no resume).
      place: the run directory as the user names it.
      leads: True if this process writes metrics and informs the user.
      checkpoints: checkpoints of the run; None without a workdir.
      metrics: the metric files and trackers; None before `open_metrics`, without a workdir and if `leads` is False.
      console: console for tables and progress.
      watchdog: watchdog that names and times the stages.
      planned: planned seconds from the plan that log.plan names, by metric; {} for no plan.
      command: command that starts this run again, as the user would type it.
      profiler: profiler that writes jax's profile of the requested steps.
      spans: record of what this process did at what time, its stages included.
      tracing: records spans and samples; None if this process writes no metrics or log.trace is 'off'.
      times: seconds of the first stages, kept for other runs; None for a run without a directory or a configuration.
      on_saved: functions that are called after a save with the newest step that has a complete checkpoint.
      on_takeover: functions that are called before this process takes over another process's samples.
    """

    @speaks_python
    def __init__(
        self,
        workdir: str | os.PathLike | None,
        *,
        log: LogConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        config: ConfigValues | None = None,
        defaults: ConfigValues | None = None,
        console: rich.console.Console | None = None,
        leads: bool = True,
        savers: Sequence[int] = (),
    ):
        """Opens the run directory.

        Args:
          workdir: the run directory, a path or URL; None for a run without a directory.
          log: settings of logging; None for the defaults.
          checkpoint: settings of checkpoints; None for the defaults.
          config: content of config.json; an existing config.json must be equal, except for the settings that may
            change (rundir/identity.py).
          defaults: defaults of the configuration's keys; a key that an existing config.json lacks had its default.
          console: console for tables and progress; None makes one on standard output, silent unless `leads`.
          leads: True if this process writes metrics, samples and config.json.
          savers: processes that save checkpoints together; () for this process alone.

        Raises:
          ValueError: the directory cannot be made or used, another process uses it, it belongs to a run of another
            configuration, a tracker of log.to is not installed, or log.plan is not a plan.
          StorageError: the directory is in a bucket that does not answer.
        """
        refuse_inside()
        self.leads = leads
        self.place = "" if workdir is None else os.fspath(workdir)
        self.workdir: pathlib.Path | None = None
        self._mirror: Mirror | None = None
        self.log_config = log or LogConfig()
        self.planned = gauges.read_plan(self.log_config.plan) if leads else {}
        if leads and workdir is not None:
            check_installed(self.log_config.to)
        self._plan = pathlib.Path(self.log_config.plan).read_bytes() if self.planned else b""
        self.checkpoint_config = checkpoint or CheckpointConfig()
        self.config, self._defaults = dict(config or {}), dict(defaults or {})
        self.console = console or make_console(quiet=not leads)
        self.watchdog = Watchdog(self.log_config.stall_s)
        self.watchdog.informs, self.watchdog.last_words = leads, self.how_to_resume
        self.watchdog.log = self.console.print
        self.command = "the same script"
        self._last_saved = 0  # newest step that is known to have a complete checkpoint
        self.profiler = Profiler(self.place)
        self.spans = Spans()
        self.watchdog.on_stage_end = self.spans.add
        self.tracing: Tracing | None = None
        self.checkpoints: Checkpoints | None = None
        self.metrics: MetricsLog | None = None
        self.on_saved: list[Callable[[int], None]] = []
        self.on_takeover: list[Callable[[], None]] = []
        self.times: StageTimes | None = None
        self._stop = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._entered = 0
        self._lock: Lock | None = None
        if workdir is not None:
            try:
                with self.watchdog.stage("opening the run directory"):
                    self._open(workdir, savers)
                self.times = StageTimes(self.config) if self.leads and self.config else None
                known = {} if self.times is None else self.times.read()
                self.watchdog.expected = known | self._last_times()
            except BaseException as error:
                self._release_lock()
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
            self._release_lock()
            self.watchdog.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop.set()
        name = signal.Signals(number).name
        text = f"\npodrl: {name}: stopping after this step, then saving (Ctrl-C again to leave at once).\n"
        os.write(2, text.encode())  # a signal may interrupt print, which is not reentrant

    def begin(self) -> None:
        """Marks the beginning of training: from now on a signal asks the run to stop after the step.

        Until this call a signal ends the process.

        Raises:
          StoppedError: a signal before this call should have ended the process.
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
        """Asks the run to stop after the present step, as a signal does."""
        self._stop.set()

    def stopping(self) -> bool:
        """Returns True if the run was asked to stop.

        Raises:
          ValueError: another process has taken the run directory over.
        """
        if self._lock is not None:
            self._lock.check()
        return self._stop.is_set()

    @property
    def traced(self) -> TraceSteps | None:
        """Returns the steps whose samples are recorded, equal on all hosts that train; None if there are none."""
        records = self.workdir is not None and self.log_config.trace != "off"
        return TraceSteps(self.log_config) if records else None

    def saved_step(self) -> int:
        """Returns the newest step with a complete checkpoint; 0 if there is none."""
        return max(self.checkpoints.steps(), default=0) if self.checkpoints is not None else 0

    def how_to_resume(self) -> str:
        """Returns sentences that name the saved step and the command that resumes the run; '' unless `leads`.

        Sends no request to a bucket, so it may be called while the bucket cannot be reached.
        """
        if self.checkpoints is None or not self.leads:
            return ""
        step = self._last_saved if is_remote(self.place) else self.saved_step()
        if not step:
            return f"No step is saved in {self.place} yet. Start again with: {self.command}"
        return f"Step {step} is saved in {self.place}. Resume with: {self.command}"

    def notify_saved(self, step: int) -> None:
        """Calls the functions of `on_saved`: `step` has a complete checkpoint, so files of earlier steps can go."""
        self._last_saved = max(self._last_saved, step)
        for call in self.on_saved:
            call(step)

    def notify_takeover(self) -> None:
        """Calls the functions of `on_takeover`; they read the records that other processes have added meanwhile."""
        for call in self.on_takeover:
            call()

    def open_metrics(self, start: int, marks: SavedState | None = None) -> None:
        """Opens the metric files, and drops records of step `start` and later that an earlier start of this run wrote.

        Args:
          start: the first step that will be written.
          marks: result of `marks` in the checkpoint from which the run continues; if the files differ, the user is
            told.
        """
        self.begin()
        if self.workdir is not None and self.leads:
            self.metrics = MetricsLog(self.workdir, self.log_config, start=start, run_config=self.config, marks=marks)
            if self._plan:
                write_whole(self.workdir / gauges.PLAN, self._plan)
            if self.log_config.trace != "off":
                self.tracing = Tracing(self.workdir, self.log_config, start=start)
            for sentence in self.metrics.problems:
                self.console.print(sentence)

    def marks(self) -> SavedState:
        """Returns size and checksum of the files of metrics and samples, for a checkpoint."""
        return {} if self.metrics is None else self.metrics.marks()

    def push(self, *, wait: bool = True) -> None:
        """If the run directory is in a bucket, copies all files written so far to it.

        Args:
          wait: True to wait until the files have arrived, at most 120 s; False to return at once.
        """
        if self._lock is not None:
            self._lock.check()
        if self._mirror is not None:
            with self.watchdog.stage("copying to the bucket"):
                self._mirror.push(_PATIENCE_S if wait else 0.0)

    def hurry(self) -> None:
        """If the run directory is in a bucket, makes the next copy of new files start soon; returns at once."""
        if self._mirror is not None:
            self._mirror.hurry()

    def _open(self, workdir: str | os.PathLike, savers: Sequence[int]) -> None:
        """Locks the directory, checks that the run in it is this run, and prepares to write there."""
        if is_remote(workdir):
            check(workdir, "--workdir", writes=True)
        else:
            self.workdir = self._make_workdir(workdir)
        if self.leads:  # the lock comes before the first read, because another run may be writing there
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
        """Returns the seconds that stages took the last time, by stage; of update and rollout in a start's first step.

        The first step compiles their programs, or reads them from the cache.
        """
        earlier = read_metrics(self.workdir) if self.workdir is not None and self.leads else []
        times: dict[str, float] = {}
        first = False  # True from a start's first record to the record of its first step
        for record in earlier:
            first |= "time/start-up" in record
            is_step = "time/step" in record
            stages = ("start-up", "restoring", "evaluation", *(("update", "rollout") if first and is_step else ()))
            times |= {stage: record[name] for stage in stages if (name := f"time/{stage}") in record}
            first &= not is_step
        return times

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _make_workdir(self, workdir: str | os.PathLike) -> pathlib.Path:
        """Makes the local directory that files are written to."""
        path = pathlib.Path(workdir)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_run_directory(workdir, f"{error.strerror}") from error
        return path

    def _close_mirror(self, *, failed: bool) -> None:
        """Waits until all files are in the bucket.

        Args:
          failed: True if another error ends the run already; then a failure to copy is only printed.

        Raises:
          StorageError: the files could not be copied.
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
        """Compares the configuration with the configuration of the run in the directory, then writes config.json.

        Raises:
          ValueError: the directory belongs to a run of another configuration; the error names the keys that differ.
        """
        assert self.workdir is not None
        mine, defaults = identity.plain(self.config), identity.plain(self._defaults)
        for sentence in identity.compare(self.place, self.workdir, mine, defaults):
            self.console.print(sentence)
        identity.write(self.workdir, mine, defaults)

    def _checkpoints(self, savers: Sequence[int]) -> Checkpoints:
        config = identity.plain(self.config)
        directory = locate(self.place) / "checkpoints"
        settings = self.checkpoint_config
        return Checkpoints(
            directory,
            processes=savers,
            config=config,
            keep=settings.keep,
            keep_every=settings.keep_every,
            keep_hours=settings.keep_hours,
        )
