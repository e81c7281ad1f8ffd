"""The journal of a run by the wall clock: the groups of each batch, and which version drew which of their tokens."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrl.storage import sealed_lines
from podrl.storage.storage import sync_directory

NAME = "batches.jsonl"
# Lines of before they had checksums.
_UNSEALED = ({"step": int, "again": list}, {"step": int, "groups": list, "queue": dict})


class WallJournal:
    """The decisions of the clock, one JSON line with a checksum each, on disk before they are acted on.

      {"step": 7, "again": [12]}                prompts that are asked again when 7 steps are done, and trained none of
      {"step": 7, "groups": [...], "queue": {}} the batch that step 7 trains on, and the metrics of the queue

    A group is {"index": of the prompt, "asked": the step it was asked in, "runs": of each sample [[version, tokens],
    ...], tokens sampled in all when a session was left (two of one version where it was interrupted), "tokens": of
    each, given ones included, "late": samples whose environments ran out of time}. Later lines hold where two are of
    one step: a run that was killed may have decided what it did not live to act on.
    """

    def __init__(self, directory: pathlib.Path, written: Callable[[], None] = lambda: None):
        """Of the run in a directory; reads what an earlier start of it, or the run that is repeated, decided.

        `written` is called after a line was.

        Raises:
          ValueError: a line is damaged, and with it a decision that the run would have to repeat is lost.
        """
        self._path, self._written = directory / NAME, written
        self._again: dict[int, list[int]] = {}
        self._batches: dict[int, Mapping[str, Any]] = {}
        found = sealed_lines.read(self._path, _UNSEALED)
        for number, why in found.damaged:
            if number > max(found.unsealed, default=0):  # earlier versions left torn lines before others
                raise ValueError(self._lost(number, why, found.records))
        for _, line in found.records:
            self._note(line)

    def batch(self, step: int) -> Mapping[str, Any] | None:
        """The batch that a step trains on; None where that is not decided."""
        return self._batches.get(step)

    def known(self, step: int) -> int:
        """Returns the first step, from `step` on, whose batch is not decided."""
        while step in self._batches:
            step += 1
        return step

    def again(self, step: int) -> Sequence[int]:
        """The prompts that are asked again at a step."""
        return self._again.get(step, ())

    def group(self, index: int, asked: int, step: int) -> Mapping[str, Any] | None:
        """A group of a batch of `step` or later; None where it is in none."""
        later = (batch for s, batch in self._batches.items() if s >= step)
        groups = (group for batch in later for group in batch["groups"])
        return next((group for group in groups if (group["index"], group["asked"]) == (index, asked)), None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line; returns when it would outlive this process and its machine's power."""
        new = not self._path.exists()
        with sealed_lines.open_to_append(self._path, _UNSEALED) as file:
            file.write(sealed_lines.encode(line))
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_directory(self._path.parent)
        self._note(line)
        self._written()

    def forget(self, before: int) -> None:
        """Frees the memory of steps before one."""
        for known in (self._batches, self._again):
            for step in [step for step in known if step < before]:
                del known[step]

    def _lost(self, number: int, why: str, records: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
        """Writes the error for a damaged line: the steps of its neighbours, and how to go on."""
        before = [record["step"] for at, record in records if at < number]
        after = [record["step"] for at, record in records if at > number]
        between = " and ".join(f"step {step}" for step in (*before[-1:], *after[:1])) or "no other step"
        return (
            f"Line {number} of {self._path} is damaged ({why}), and with it a decision of the clock is lost: prompts "
            f"might be trained twice or never. The lines beside it are of {between}. Restore the file from a copy; or, "
            "where the run has a checkpoint after these steps, remove the line."
        )

    def _note(self, line: Mapping[str, Any]) -> None:
        if "groups" in line:
            self._batches[line["step"]] = line
        else:
            self._again[line["step"]] = list(line["again"])


def runs_of(versions: Sequence[int], breaks: Sequence[int]) -> list[list[int]]:
    """Lists the sessions that drew a sample: [[version, sampled tokens at the session's end], ...].

    Args:
      versions: the version that drew each token; -1 for a given token.
      breaks: numbers of sampled tokens at which another session went on under the same version (`Track.breaks`).
    """
    runs: list[list[int]] = []
    sampled = 0
    for version in versions:
        if version >= 0:
            if not runs or runs[-1][0] != version or sampled in breaks:
                runs.append([version, 0])
            sampled += 1
            runs[-1][1] = sampled
    return runs


def agrees(group: Mapping[str, Any], drawn: Sequence[Sequence[Sequence[int]]], step: int) -> bool:
    """Returns True if samples that are drawn in part can still become the recorded ones.

    They cannot where a host was lost, and with it what was drawn before: the group was begun anew then.

    Args:
      group: the group's entry of the journal.
      drawn: the sessions of each sample so far, as `runs_of` lists them; all of versions before `step`.
      step: the step at which the samples go on.
    """
    recorded = [[list(run) for run in runs if run[0] < step] for runs in group["runs"]]
    return recorded == [[list(run) for run in runs] for runs in drawn]
