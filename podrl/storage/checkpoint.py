"""Asynchronous, atomic checkpoints with Orbax; every bit is checked, and damaged checkpoints are skipped."""

import contextlib
import dataclasses
import datetime
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.config import Count, Natural, NonNegative, section
from podrl.mappings import ConfigValues, SavedState
from podrl.storage.bits import Leaf, compile_sums, tree_sums
from podrl.storage.record import CheckpointRecord
from podrl.storage.seal import array_digest
from podrl.storage.storage import Place, absolute, complete_steps, first_line, is_remote, remove_tree, tree_size
from podrl.types import PyTree

log = logging.getLogger("podrl.checkpoint")
_DAMAGED = "damaged_checkpoint_"
_EMPTY = "empty."
_UNFINISHED = ".orbax-checkpoint-tmp"  # ending of the names of directories whose save is not finished
# The longest time for which Orbax's threads go on writing after their save has failed, and the pause between two
# removals of the files that they have written meanwhile.
_WRITERS_STOP_S, _LOOK_AGAIN_S = 10.0, 0.2


@section("checkpoint")
@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Settings of checkpoints: when to save, and which checkpoints to keep.

    Attributes:
      every: number of steps between checkpoints; the last step is always saved. With 0 a checkpoint is written only
        after the last step and on preemption.
      keep: number of newest checkpoints to keep.
      keep_every: checkpoints of steps that are multiples of this number are also kept; 0 for none.
      keep_hours: further checkpoints are kept so that each is at least this many hours younger than the kept one before
        it; 0 for none.
    """

    every: Natural = 50
    keep: Count = 2
    keep_every: Natural = 0
    keep_hours: NonNegative = 0.0


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint:
    """The content of a checkpoint.

    Attributes:
      step: number of steps that were done when the checkpoint was taken.
      state: device arrays in the requested shardings.
      host: values that were saved as JSON.
      arrays: host arrays by name.
      content: result of the argument `decode` of `restore_latest`; None from `restore`.
    """

    step: int
    state: PyTree
    host: SavedState
    arrays: dict[str, np.ndarray]
    content: Any = None


class Checkpoints:
    """The checkpoints of one directory.

    `save` returns as soon as the device arrays are copied, and the checkpoint is written in the background. The
    checkpoint's directory gets its final name last, so a process that is killed leaves either a complete checkpoint or
    none. If a save fails, for example because the disk is full, the error is logged and counted in `failures`; training
    goes on, and older checkpoints stay.

    Every checkpoint holds checksums of its leaves, computed on the devices before anything is copied. When the leaves
    are read, the checksums are computed on the devices again, so a bit that a disk or a copy changed is noticed.

    Attributes:
      directory: the directory of the checkpoints.
      failures: number of saves that have failed.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 2,
        keep_every: int = 0,
        keep_hours: float = 0.0,
        processes: Sequence[int] = (),
        config: ConfigValues | None = None,
    ):
        """Opens the directory; makes it if it does not exist.

        Args:
          directory: a directory on a file system that every process sees, or gs://.
          keep, keep_every, keep_hours: attributes of CheckpointConfig.
          processes: processes of this jax.distributed cluster that save together (the trainers); () for all. Each of
            them makes this object and calls its methods in the same order.
          config: configuration of the run, which is saved with every checkpoint, JSON values; None to save none.
        """
        self._processes, self._config = tuple(processes), None if config is None else dict(config)
        self.directory = absolute(directory)
        if not is_remote(self.directory):  # a bucket needs no directories, and gcsfs would make the bucket itself
            self.directory.mkdir(parents=True, exist_ok=True)
        self._keeps: Any = {"max_to_keep": keep, "keep_period": keep_every or None}
        self._keeps["keep_time_interval"] = datetime.timedelta(hours=keep_hours) if keep_hours else None
        self.failures = 0
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            **self._keeps,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=self._multiprocessing(),
            # In the foreground, making the directories takes 7 ms on a disk. In the background, Orbax's threads would
            # wait five minutes for directories that cannot be made (no inode left), and the process could not exit.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def _multiprocessing(self) -> ocp.options.MultiprocessingOptions:
        return ocp.options.MultiprocessingOptions(
            primary_host=min(self._processes, default=0),
            active_processes=set(self._processes) or None,
            barrier_sync_key_prefix="podrl" if self._processes else None,
        )

    def steps(self) -> list[int]:
        """Lists the steps that have a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree, host: SavedState, arrays: Mapping[str, np.ndarray]) -> bool:
        """Waits for the previous save, and starts to write a checkpoint.

        Args:
          step: number of steps that are done; the name of the checkpoint.
          state: tree of jax arrays, which may be donated as soon as this call returns.
          host: values for JSON.
          arrays: host arrays by name.

        Returns:
          False if this save could not start, or if the previous save has failed.
        """
        healthy = self.wait()
        jax.block_until_ready(state)
        sums = tree_sums(state)
        # Check the space first: if the disk fills while Orbax writes, each of its threads prints a screen of traceback.
        size = _size([*jax.tree.leaves(state), *arrays.values()])
        # Several processes do not check: they may see different free space, and either all or none of them must save.
        if not self._processes and not is_remote(self.directory):
            free = self._make_room(step, size)
            if size > free:
                self._failed(OSError(f"it needs about {_mb(size)} and {_mb(free)} are free"))
                return False
        record = CheckpointRecord(
            dict(host), self._config, sums, {name: array_digest(x) for name, x in arrays.items()}, step
        )
        if len(self._processes) == 1:  # Orbax refuses device arrays of one process in a cluster of several
            state = jax.tree.map(np.asarray, state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            host=ocp.args.JsonSave(record.sealed()),  # pyright: ignore[reportCallIssue]
            arrays=ocp.args.StandardSave({"count": np.int64(len(arrays)), **_stored(arrays)}),  # pyright: ignore[reportCallIssue]
        )
        try:
            self._manager.save(step, args=items)
        except Exception as error:  # noqa: BLE001 - whatever storage raises, training must outlive it
            self._failed(error)
            return False
        return healthy

    def wait(self) -> bool:
        """Waits until the last save is on disk; returns False, and logs the error, if it failed."""
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
        self._clear_remains()
        self._manager = self._open()  # after a failed save the old manager still counts the unfinished step

    def _clear_remains(self) -> None:
        """Removes the files of a failed save, repeatedly, until the threads of the save have stopped writing.

        Orbax itself removes them only once, and its threads may write after that.
        """
        if jax.process_index() != min(self._processes, default=0):  # as in Orbax, one process removes files
            return
        until = time.monotonic() + _WRITERS_STOP_S
        while time.monotonic() < until and (left := sorted(self.directory.glob(f"*{_UNFINISHED}"))):
            for place in left:
                with contextlib.suppress(OSError):
                    remove_tree(place)
            time.sleep(_LOOK_AGAIN_S)

    def _make_room(self, step: int, size: int) -> int:
        """Frees space for a checkpoint of `size` bytes, if needed and possible; returns the free bytes.

        Damaged checkpoints are removed first, then the oldest checkpoints. The newest complete checkpoint always stays.
        """
        free = shutil.disk_usage(self.directory).free
        spare: list[Place] = sorted(self.directory.parent.glob(f"{_DAMAGED}*"))
        spare += [self.directory / str(old) for old in self.steps()[:-1]]
        if size > free + sum(tree_size(place) for place in spare):
            return free
        for place in spare:
            if size <= free:
                break
            log.warning(
                "%s are free in %s and the checkpoint of step %d takes about %s: %s is removed first.",
                *(_mb(free), self.directory, step, _mb(size), place),
            )
            if place.parent == self.directory:
                self._manager.delete(int(place.name))
            else:
                remove_tree(place)
            free = shutil.disk_usage(self.directory).free
        return free

    def restore_latest(
        self,
        abstract_state: PyTree,
        decode: Callable[[SavedState, Mapping[str, np.ndarray]], Any] = lambda host, arrays: None,
    ) -> RestoredCheckpoint | None:
        """Restores the newest undamaged checkpoint; damaged checkpoints that are newer are logged and moved aside.

        It also compiles the program with which `save` computes the checksums of the state.

        Args:
          abstract_state: tree of jax.ShapeDtypeStruct with shardings, with the structure of the saved state.
          decode: function (host, arrays) -> `RestoredCheckpoint.content`; a checkpoint for which it raises an error
            counts as damaged.

        Returns:
          The checkpoint; None if there is none.

        Raises:
          ValueError: there are checkpoints, but none can be read; a damaged one cannot be moved; or there is none, and
            the disk has no room for one.
        """
        compile_sums(abstract_state)
        steps = sorted(self.steps(), reverse=True)
        if not steps:
            self._check_room(_size(jax.tree.leaves(abstract_state)))
        problems = []
        for step in steps:
            restored, problem = self._try(step, abstract_state, decode)
            if restored is None:
                problems.append(f"step {step}: {problem}")
                log.warning("Checkpoint %s/%d cannot be read (%s).", self.directory, step, problem)
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

    def restore(self, step: int, abstract_state: PyTree) -> RestoredCheckpoint:
        """Restores the checkpoint of one step.

        Raises:
          ValueError: the step has no checkpoint (the error lists the steps that have one), or it is damaged.
        """
        if step not in self.steps():
            raise ValueError(f"{self.directory} has no checkpoint of step {step}: it has {self.steps() or 'none'}.")
        restored, problem = self._try(step, abstract_state, lambda host, arrays: None)
        if restored is None:
            raise ValueError(f"Checkpoint {self.directory}/{step} cannot be read: {problem}.")
        return restored

    def _try(
        self, step: int, abstract_state: PyTree, decode: Callable[..., Any]
    ) -> tuple[RestoredCheckpoint | None, str]:
        """Tries to restore a step; returns (checkpoint, '') or (None, problem). All processes have the same outcome."""
        found, record, problem = None, None, ""
        try:
            record, found = self._read(step, abstract_state)
            found = dataclasses.replace(found, content=decode(found.host, found.arrays))
        except Exception as error:  # noqa: BLE001 - any damage counts; the error is reported
            problem = _describe(error)
        problem = self._agree(problem)
        if problem or record is None or found is None:
            return None, problem
        try:
            record.check_state(found.state)  # a collective: either all processes must reach it, or none
        except ValueError as error:
            return None, str(error)
        if record.state is None:
            log.warning(
                "Checkpoint %s/%d was written without checksums: its bits are not checked.", self.directory, step
            )
        return found, ""

    def _read(self, step: int, abstract_state: PyTree) -> tuple[CheckpointRecord, RestoredCheckpoint]:
        """Reads a checkpoint and checks its host arrays, without waiting for another process."""
        folder = epath.Path(self.directory) / str(step)
        record = CheckpointRecord.read(folder)
        among = self._multiprocessing()
        with contextlib.closing(ocp.StandardCheckpointHandler(multiprocessing_options=among)) as handler:
            stored = handler.restore(folder / "arrays", args=ocp.args.StandardRestore())  # pyright: ignore[reportCallIssue]
            arrays = dict(_from_stored(name, np.asarray(value)) for name, value in stored.items())
            if int(arrays.pop("count")) != len(arrays):
                raise ValueError(f"host arrays are incomplete: {sorted(arrays)}")
            record.check_arrays(arrays)
            args = ocp.args.StandardRestore(abstract_state)  # pyright: ignore[reportCallIssue]
            state = handler.restore(folder / "state", args=args)
        return record, RestoredCheckpoint(step, state, record.content, arrays)

    def _agree(self, problem: str) -> str:
        """Agrees with the other saving processes on whether one of them has a problem; a collective.

        Returns:
          `problem` if this process has a problem; a sentence about the others if only another process has one; '' if no
          process has a problem.
        """
        among = self._processes or tuple(range(jax.process_count()))
        if len(among) < 2:
            return problem
        mesh = Mesh([next(d for d in jax.devices() if d.process_index == p) for p in among], ("process",))
        split = NamedSharding(mesh, Spec("process"))
        mine = jax.make_array_from_callback((len(among),), split, lambda _: np.array([bool(problem)]))
        anyone = bool(jax.jit(jnp.any, out_shardings=NamedSharding(mesh, Spec()))(mine))
        return problem or ("another process could not read its part" if anyone else "")

    def _check_room(self, size: int) -> None:
        """Raises ValueError if the disk has less free space than one checkpoint of `size` bytes needs."""
        if is_remote(self.directory):
            return
        free = shutil.disk_usage(self.directory).free
        if self._agree("too small" if size > free else ""):
            raise ValueError(
                f"The disk of {self.directory} has {_mb(free)} free and one checkpoint of this run takes about "
                f"{_mb(size)}: free space there, or give a --workdir on another disk."
            )

    def _set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint to a directory beside the checkpoints, so that its step can be saved again."""
        target, problem = self.directory.parent / f"{_DAMAGED}{step}", ""
        if jax.process_index() == min(self._processes, default=0):  # the other processes wait in `_agree`
            try:
                remove_tree(target)
                (self.directory / str(step)).rename(target)
                log.warning("Damaged checkpoint of step %d was moved to %s.", step, target)
            except OSError as error:
                problem = first_line(error)
        if problem := self._agree(problem):
            raise ValueError(f"The damaged checkpoint of step {step} cannot be moved to {target}: {problem}.")
        self._manager = self._open()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _size(leaves: Sequence[Leaf | np.ndarray]) -> int:
    """Returns the total bytes of arrays, or of shapes with dtypes."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def _stored(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replaces arrays without elements, which Orbax refuses, by their shapes, under names that begin with _EMPTY."""
    empty = {name: array for name, array in arrays.items() if not array.size}
    shapes = {f"{_EMPTY}{array.dtype.name}.{name}": np.asarray(array.shape) for name, array in empty.items()}
    return {name: array for name, array in arrays.items() if name not in empty} | shapes


def _from_stored(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if not name.startswith(_EMPTY):
        return name, array
    dtype, _, name = name.removeprefix(_EMPTY).partition(".")
    return name, np.zeros(array, dtype)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _describe(error: Exception) -> str:
    """Describes an error. Errors other than ValueError get their type, because the text of a KeyError is only a key."""
    return first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"


def read_state(directory: str | os.PathLike, step: int | None = None) -> tuple[int, PyTree]:
    """Reads a checkpoint's state as host arrays, on any machine and from any mesh.

    Args:
      directory: directory of the checkpoints.
      step: step of the checkpoint; None for the newest.

    Returns:
      (step, saved state as nested mappings of host arrays).

    Raises:
      ValueError: there is no such checkpoint (the error lists the steps that have one), or it is damaged.
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
    CheckpointRecord.read(root / str(chosen)).check_state(state)
    return chosen, state
