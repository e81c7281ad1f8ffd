"""The profiler of a process: records jax's profile of some steps if the command line or a signal requests it."""

import contextlib
import logging
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

import jax

from podrl.storage.storage import StorageError, is_remote, locate

FOLDER = "profile"
_STEPS = 3  # number of steps to profile after a signal
_log = logging.getLogger("podrl.profiler")


def parse_steps(text: str) -> tuple[int, int] | None:
    """Parses the value of --profile, such as '120:125', into (first step, last step); None for ''.

    Raises:
      ValueError: the text is not two steps in ascending order.
    """
    if not text:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--profile={text} must be the first and the last step to profile, as in 120:125.")
    return int(found[1]), int(found[2])


class Profiler:
    """Writes profile/HOST/ in the run directory, for XProf and TensorBoard.

    Each process profiles itself. All processes of a pod have the same `planned`: the leader decides it and sends it to
    the other processes before the step (podrl/rundir/step_barrier.py). A profile that cannot be written does not end
    a run.

    Attributes:
      planned: (first, last) step of the profile that is planned or being recorded; None for no profile.
    """

    def __init__(self, place: str, host: str = "trainer 0", steps: tuple[int, int] | None = None):
        """Plans the profile of `steps`.

        Args:
          place: the run directory; '' disables profiling.
          host: name of this process, for its directory.
          steps: (first, last) step to profile; None plans no profile.
        """
        self._place, self._host, self.planned = place, host.replace(" ", "_"), steps
        self._requested = False
        self._folder: pathlib.Path | None = None  # directory of the profile under way; None without one
        self._marked = contextlib.ExitStack()  # marks the present step's number in the profile, for times per step

    def ask(self) -> None:
        """Requests a profile of the next steps; may be called from a signal handler."""
        self._requested = True

    def decide(self, step: int) -> tuple[int, int] | None:
        """Returns the (first, last) step that all processes must profile, or None; on the leader only.

        Args:
          step: number of steps done; if `ask` has requested a profile, the next steps are profiled.
        """
        if self._requested and self._folder is None:
            self.planned = (step + 1, step + _STEPS)
        self._requested = False
        return self.planned

    def after(self, step: int) -> None:
        """Starts or ends a profile, if one is due, after `step` steps are done."""
        if self.planned is None or not self._place:
            return
        first, last = self.planned
        self._marked.close()
        if self._folder is not None and step >= last:
            self.close()
        elif self._folder is None and first <= step + 1 <= last:
            self._begin(first, last)
        if self._folder is not None:
            self._marked.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step + 1))

    def close(self) -> None:
        """Ends and keeps the profile that is under way, if there is one."""
        if self._folder is None:
            return
        self._marked.close()
        folder, self._folder = self._folder, None
        with self._forgiven():
            jax.profiler.stop_trace()
            if is_remote(self._place):
                for path in [path for path in folder.rglob("*") if path.is_file()]:
                    target = locate(self._place) / FOLDER / self._host / path.relative_to(folder).as_posix()
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())
        self.planned = None
        if is_remote(self._place):
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self, first: int, last: int) -> None:
        with self._forgiven():
            if is_remote(self._place):
                folder = pathlib.Path(tempfile.mkdtemp("", "podrl-profile-"))
            else:
                folder = pathlib.Path(self._place) / FOLDER / self._host
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would fill the profile and slow the steps that it measures
            jax.profiler.start_trace(str(folder), profiler_options=options)
            self._folder = folder
            return
        self.planned = None

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        """Logs errors instead of raising them, for example if another profile runs or the disk is full."""
        try:
            yield
        except (RuntimeError, OSError, ValueError, StorageError) as error:
            _log.warning("Steps %s are not profiled: %s: %s", self.planned, type(error).__name__, error)
