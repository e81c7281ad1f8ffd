"""Tells from a run's summary, lock and newest record whether the run is running, finished, stopped, dead or silent."""

import time
from typing import Any

from podrl.storage.lock import NAME as LOCK
from podrl.storage.lock import Owner
from podrl.storage.storage import Place

_QUIET_S = 90.0  # a run may write nothing for this time, or for three of its steps if they take longer


def state(path: Place, *, finished: bool, step_s: float) -> tuple[str, str]:
    """Returns the state of a run in one word, and a sentence about it, '' if there is nothing to add.

    The words are 'finished', 'running', 'stopped' (the process ended by itself before the last step), 'died' (the
    process was killed) and 'silent' (nobody here can see the process, and it has written nothing for long).

    Args:
      path: the run directory.
      finished: True if the run has written the summary of its last step.
      step_s: seconds that a step takes; 0 if they are not known.
    """
    if finished:
        return "finished", ""
    owner = _owner(path)
    if owner is None:
        return "stopped", "Its process ended before the last step: the same command resumes it."
    alive, age = owner.alive(), _age(path)
    if alive is False:
        return "died", f"Its process is gone ({owner.shown}): the same command resumes it."
    quiet = f"No record for {_shown(age)}" if age > max(_QUIET_S, 3 * step_s) else ""
    if alive or not quiet:
        return "running", f"{quiet}." if quiet and step_s else ""
    return "silent", f"{quiet} from {owner.shown}: check on that machine whether it still runs."


def _owner(path: Place) -> Owner | None:
    """Returns the process that the lock names. A run that ends removes its lock; a run that is killed leaves it."""
    try:
        return Owner.parse((path / LOCK).read_bytes())
    except OSError:
        return None


def _age(path: Place) -> float:
    """Returns the seconds since the run's metrics or its lock were last written; 0 if the storage does not say."""
    newest = 0.0
    for name in ("metrics.jsonl", LOCK):
        try:
            found: Any = (path / name).stat()
        except OSError:
            continue
        newest = max(newest, float(getattr(found, "st_mtime", 0) or getattr(found, "mtime", 0)))
    return time.time() - newest if newest else 0.0


def _shown(seconds: float) -> str:
    """Describes a time of at least a minute."""
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} days"
