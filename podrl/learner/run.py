"""One run of the program: its directory, its sinks, its checkpoints, and the wish to stop."""

import json
import os
import pathlib
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import rich.console

from podrl.learner.console import make_console
from podrl.runtime.checkpoint import CheckpointConfig, Checkpoints
from podrl.runtime.metrics import LogConfig, MetricsLog
from podrl.runtime.mirror import Mirror
from podrl.runtime.storage import StorageError, check, is_remote, locate
from podrl.runtime.watchdog import Watchdog

# Keys that may differ between the runs of one workdir: they change what is written, not what is learned.
_FREE_KEYS = (
    "log.",
    "checkpoint.",
    "eval.",
    "compile_cache",
    "reward.workers",
    "reward.deadline_s",
    "trainer.eval_every_n_steps",
)
_PATIENCE_S = 120.0  # for copying the files of a run directory, which are small


class Run:
    """Owns the run directory for the length of a `with` block, which may be nested; turns signals into a wish to stop.

    A run directory in a bucket is written in a local one, whose files are copied there (podrl/runtime/mirror.py);
    checkpoints go to the bucket themselves. The block ends well only if everything has arrived.

    Attributes:
      workdir: where files are written; None keeps the run in memory (no files, no resume).
      place: the run directory as the user names it.
      leads: whether this process writes metrics and tells the user.
      checkpoints: None without a workdir.
      console: where tables and progress go.
      watchdog: names and times the stages.
    """

    def __init__(
        self,
        workdir: str | os.PathLike | None,
        *,
        log: LogConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        config: Mapping[str, Any] | None = None,
        console: rich.console.Console | None = None,
        leads: bool = True,
        savers: Sequence[int] = (),
    ):
        """Opens the run directory.

        Args:
          workdir: the run directory, or None.
          log: sinks.
          checkpoint: when to save.
          config: what config.json holds, and what an existing one must hold.
          console: by default one on stdout; silent where this process does not lead.
          leads: whether this process writes metrics, samples and config.json.
          savers: processes that save together; () for this one alone.

        Raises:
          ValueError: the directory cannot be made or used, or belongs to a run of another configuration.
          StorageError: the bucket it is in does not answer.
        """
        self.leads = leads
        self.place = "" if workdir is None else os.fspath(workdir)
        self.workdir: pathlib.Path | None = None
        self._mirror: Mirror | None = None
        self.log_config = log or LogConfig()
        self.checkpoint_config = checkpoint or CheckpointConfig()
        self.config = dict(config or {})
        self.console = console or (make_console() if leads else rich.console.Console(quiet=True))
        self.watchdog = Watchdog(self.log_config.stall_s)
        self.checkpoints: Checkpoints | None = None
        self.metrics: MetricsLog | None = None
        self._stop = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._entered = 0
        if workdir is not None:
            self.workdir = self._open_workdir(workdir)
            if leads:
                self._check_config()
                if self._mirror is not None:
                    self._mirror.start()
            directory = locate(workdir) / "checkpoints"
            self.checkpoints = Checkpoints(directory, keep=self.checkpoint_config.keep, processes=savers)

    def __enter__(self) -> "Run":
        self._entered += 1
        if self._entered > 1:
            return self
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
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
        if self.metrics is not None:
            self.metrics.close()
        try:
            self._close_mirror(failed=exc[0] is not None)
        finally:
            self.watchdog.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop.set()
        name = signal.Signals(number).name
        text = f"\npodrl: {name}: stopping after this step, then saving (Ctrl-C again to leave at once).\n"
        os.write(2, text.encode())  # print may not be entered again from a handler

    def stopping(self) -> bool:
        return self._stop.is_set()

    def saved_step(self) -> int:
        """The newest step with a complete checkpoint; 0 when there is none."""
        return max(self.checkpoints.steps(), default=0) if self.checkpoints is not None else 0

    def open_metrics(self, start: int) -> None:
        """Opens the sinks; records at or after step `start` of an earlier life of this run are dropped."""
        if self.workdir is not None and self.leads:
            self.metrics = MetricsLog(self.workdir, self.log_config, start=start, run_config=self.config)

    def push(self, *, wait: bool = True) -> None:
        """Copies what was written so far to the bucket, if the run directory is in one; waits, but not for ever."""
        if self._mirror is not None:
            with self.watchdog.stage("copying to the bucket"):
                self._mirror.push(_PATIENCE_S if wait else 0.0)

    def _open_workdir(self, workdir: str | os.PathLike) -> pathlib.Path:
        """The local directory that files go to."""
        if is_remote(workdir):
            check(workdir, "--workdir", writes=True)
            self._mirror = Mirror(locate(workdir))
            return self._mirror.local
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

    def _check_config(self) -> None:
        """Writes config.json, or compares with the one that is there.

        Raises:
          ValueError: the directory belongs to a run of another configuration; says which keys differ.
        """
        assert self.workdir is not None
        path = self.workdir / "config.json"
        mine = json.loads(json.dumps(self.config, default=_name))
        if path.exists():
            try:
                theirs = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(
                    f"{self.place}/config.json is not JSON ({error}), so it cannot be told whether the run in this "
                    "directory is the same: restore the file, remove it if you are sure, or give another --workdir."
                ) from error
            differences = [
                f"{key} was {theirs_value!r}, now {mine_value!r}"
                for key, theirs_value, mine_value in _differences(theirs, mine)
                if not key.startswith(_FREE_KEYS)
            ]
            if differences:
                raise ValueError(
                    f"{self.place} holds a run of another configuration: " + "; ".join(differences[:8]) + ". "
                    "Give the same configuration to resume it, or another --workdir to start a new run."
                )
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(mine, indent=2, sort_keys=True) + "\n")
        temporary.replace(path)


def _name(value: Any) -> str:
    """A value JSON cannot hold; functions by name, which is the same in every process."""
    name = getattr(value, "__qualname__", None)
    return str(value) if name is None else f"{getattr(value, '__module__', '')}.{name}"


def _differences(a: Any, b: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(set(a) | set(b))
        return [d for k in keys for d in _differences(a.get(k, "(absent)"), b.get(k, "(absent)"), f"{prefix}{k}.")]
    return [] if a == b else [(prefix.removesuffix("."), a, b)]
