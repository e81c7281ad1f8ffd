"""Checkpoints through Orbax: asynchronous, atomic, and a way back when the newest one is damaged."""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from podrl.runtime.storage import absolute, complete_steps, first_line, is_remote, remove_tree
from podrl.types import PyTree

log = logging.getLogger("podrl.checkpoint")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are taken.

    Attributes:
      every: steps between checkpoints; the last step is always saved. 0: only the last step and on preemption.
      keep: newest checkpoints kept on disk.
    """

    every: int = 50
    keep: int = 2

    def __post_init__(self):
        if self.every < 0 or self.keep < 1:
            raise ValueError(
                f"checkpoint.every={self.every} must be 0 or more steps and checkpoint.keep={self.keep} at least 1."
            )


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint read back.

    Attributes:
      step: the step it was taken after.
      state: device arrays in the shardings asked for.
      host: what was saved as JSON.
      arrays: what was saved as host arrays.
    """

    step: int
    state: PyTree
    host: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """One directory of checkpoints.

    Saving returns as soon as the device arrays are copied; writing goes on in the background and the directory gets its
    final name last, so a killed process leaves either a complete checkpoint or none. A save that fails (a full disk) is
    logged and counted in `failures`; training goes on and older checkpoints stay.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 2, processes: Sequence[int] = ()):
        """Opens, or makes, the directory.

        Args:
          directory: on a file system that every process sees, or gs://.
          keep: newest checkpoints kept.
          processes: the processes of this jax.distributed cluster that save together (the trainers), all of which make
            this object and call its methods in the same order; () for all.
        """
        self._processes = tuple(processes)
        self.directory = absolute(directory)
        if not is_remote(self.directory):  # in a bucket there is nothing to make, and gcsfs would make the bucket
            self.directory.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self.failures = 0
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=min(self._processes, default=0),
                active_processes=set(self._processes) or None,
                barrier_sync_key_prefix="podrl" if self._processes else None,
            ),
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
        """Starts writing a checkpoint taken after `step` steps; waits for the previous one first.

        Args:
          step: unique number of the checkpoint.
          state: tree of jax arrays; may be donated as soon as this returns.
          host: JSON-able values.
          arrays: host arrays.

        Returns:
          False when this save could not start or the previous one turned out to have failed.
        """
        healthy = self.wait()
        # Looked at first: when the disk fills under Orbax its threads print a screen of tracebacks each.
        size = sum(leaf.nbytes for leaf in [*jax.tree.leaves(state), *arrays.values()])
        if not self._processes and not is_remote(self.directory):  # hosts that see different numbers must not part
            free = shutil.disk_usage(self.directory).free
            if size > free:
                self._failed(OSError(f"it needs about {size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"))
                return False
        if len(self._processes) == 1:  # Orbax takes device arrays of one process among several for a mistake
            state = jax.tree.map(np.asarray, state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            host=ocp.args.JsonSave(json.loads(json.dumps(dict(host)))),  # pyright: ignore[reportCallIssue]
            arrays=ocp.args.StandardSave({"count": np.int64(len(arrays)), **arrays}),  # pyright: ignore[reportCallIssue]
        )
        try:
            self._manager.save(step, args=items)
        except Exception as error:  # noqa: BLE001 - whatever storage raises, training must outlive it
            self._failed(error)
            return False
        return healthy

    def wait(self) -> bool:
        """Blocks until the last save is on disk; False (and a log line) if it failed."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:  # noqa: BLE001 - as in save
            self._failed(error)
            return False
        return True

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        log.error(
            "A checkpoint could not be written to %s: %s. Training goes on; the newest complete checkpoint is step %s. "
            "Free space there, or point --workdir at another file system.",
            self.directory,
            first_line(error),
            max(complete_steps(self.directory), default="(none)"),
        )
        self._manager = self._open()  # a failed save leaves the manager with half a step in its books

    def restore_latest(self, abstract_state: PyTree) -> Restored | None:
        """The newest checkpoint that can be read; damaged ones are set aside, named, and the one before is tried.

        Args:
          abstract_state: tree of jax.ShapeDtypeStruct with shardings, structured as the saved state.

        Returns:
          None when there is no checkpoint.

        Raises:
          ValueError: there are checkpoints and none can be read.
        """
        steps = sorted(self.steps(), reverse=True)
        problems = []
        for step in steps:
            try:
                restored = self._restore(step, abstract_state)
            except Exception as error:  # noqa: BLE001 - any damage counts; the error is reported below
                problems.append(f"step {step}: {first_line(error)}")
                log.warning("Checkpoint %s/%d cannot be read (%s).", self.directory, step, first_line(error))
                continue
            for damaged in (s for s in steps if s > step):
                self._set_aside(damaged)
            return restored
        if problems:
            raise ValueError(
                f"None of the checkpoints in {self.directory} can be read: " + "; ".join(problems) + ". "
                "If the model or mesh changed, use another --workdir; otherwise restore the directory from a backup."
            )
        return None

    def restore(self, step: int, abstract_state: PyTree) -> Restored:
        """The checkpoint of one step.

        Raises:
          ValueError: there is none; the steps that exist are listed.
        """
        if step not in self.steps():
            raise ValueError(f"{self.directory} has no checkpoint of step {step}: it has {self.steps() or 'none'}.")
        return self._restore(step, abstract_state)

    def _restore(self, step: int, abstract_state: PyTree) -> Restored:
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state),  # pyright: ignore[reportCallIssue]
                host=ocp.args.JsonRestore(),
                arrays=ocp.args.StandardRestore(),  # pyright: ignore[reportCallIssue]
            ),
        )
        arrays = {name: np.asarray(value) for name, value in items["arrays"].items()}
        if int(arrays.pop("count")) != len(arrays):
            raise ValueError(f"host arrays are incomplete: {sorted(arrays)}")
        return Restored(step, items["state"], items["host"], arrays)

    def _set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint out of the way (kept for inspection), so that its step can be saved again."""
        target = self.directory.parent / f"damaged_checkpoint_{step}"
        remove_tree(target)
        (self.directory / str(step)).rename(target)
        log.warning("Damaged checkpoint of step %d was moved to %s.", step, target)
        self._manager = self._open()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def read_state(directory: str | os.PathLike, step: int | None = None) -> tuple[int, PyTree]:
    """(step, saved state as nested mappings of host arrays), on any machine, whatever mesh it was saved from.

    Args:
      directory: of the checkpoints.
      step: None for the newest.

    Raises:
      ValueError: no such checkpoint; those that exist are listed.
    """
    root = absolute(directory)
    steps = complete_steps(root)
    chosen = steps[-1] if steps and step is None else step
    if chosen not in steps:
        wanted = "" if step is None else f" of step {step}"
        raise ValueError(f"{root} has no checkpoint{wanted}: it has {steps or 'none'}.")
    path = root / str(chosen) / "state"
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    tree = reader.metadata(path).item_metadata.tree  # pyright: ignore[reportOptionalMemberAccess]
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted))  # pyright: ignore[reportCallIssue]
    reader.close()
    return chosen, state
