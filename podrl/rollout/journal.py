"""The journal of a run with `rollout.clock='wall'`: the groups of each batch, and the versions that drew the tokens."""

import os
import pathlib
from collections.abc import Callable, Sequence

from podrl.mappings import JournalEntry
from podrl.storage import sealed_lines
from podrl.storage.storage import sync_directory

NAME = "batches.jsonl"
# Fields of lines without checksums: earlier versions of podrl wrote such lines, which can still be read.
_UNSEALED = ({"step": int, "again": list}, {"step": int, "groups": list, "queue": dict})


class WallJournal:
    """The decisions of a `WallClock`, one JSON line with a checksum for each.

    A line is on disk before any process acts on its decision.

      {"step": 7, "again": [12]}                prompts that are submitted again when 7 steps are done, because their
                                                old samples are dropped
      {"step": 7, "groups": [...], "queue": {}} the batch that step 7 trains on, and the metrics of the queue. With
                                                dynamic sampling also "dropped": [[12, 5], ...], `index` and `asked` of
                                                the groups that step 7 dropped because their rewards were all equal

    The fields of a group are:

      index   position of the prompt in the data
      asked   step at which the prompt was submitted
      runs    for each sample [[version, tokens], ...], one pair per session: the version of the weights, and the number
              of tokens sampled in all when the sample left the session. A version whose window was interrupted has
              several pairs
      tokens  for each sample the number of its tokens, including appended tokens
      late    rows of the samples whose environments ran out of time

    If two lines have the same step and kind, the later line counts. A second line "again" adds groups that turned out
    to be too old after the step had begun (`WallClock.stale_since`). And a run that was killed after it wrote a
    decision, but before it acted on the decision, may decide differently when it is started again.
    """

    def __init__(self, directory: pathlib.Path, written: Callable[[], None] = lambda: None):
        """Reads the decisions in the journal of a run's directory, if it has one.

        The decisions come from an earlier start of the run, or from the run that is repeated.

        Args:
          directory: the run's directory.
          written: function that is called after each line is written.

        Raises:
          ValueError: a line is damaged, and the run could not repeat the decision in it.
        """
        self._path, self._written = directory / NAME, written
        self._again: dict[int, list[int]] = {}
        self._batches: dict[int, JournalEntry] = {}
        found = sealed_lines.read(self._path, _UNSEALED)
        for number, why in found.damaged:
            # Earlier versions of podrl, which wrote no checksums, could leave a torn line between whole lines. So a
            # damaged line before the last line without a checksum is no error.
            if number > max(found.unsealed, default=0):
                raise ValueError(self._damage_message(number, why, found.records))
        for _, line in found.records:
            self._note(line)

    def batch(self, step: int) -> JournalEntry | None:
        """Returns the line of the batch that a step trains on; None if the batch is not decided."""
        return self._batches.get(step)

    def known(self, step: int) -> int:
        """Returns the first step, from `step` on, whose batch is not decided."""
        while step in self._batches:
            step += 1
        return step

    def again(self, step: int) -> Sequence[int]:
        """Returns the data positions of the prompts that are submitted again when `step` steps are done."""
        return self._again.get(step, ())

    def group(self, index: int, submit_step: int, step: int) -> JournalEntry | None:
        """Returns the entry of a group in a batch of `step` or later; None if no such batch has the group.

        Args:
          index: position of the prompt in the data.
          submit_step: the step at which the prompt was submitted.
          step: first step whose batch is searched for the group.
        """
        later = (batch for s, batch in self._batches.items() if s >= step)
        groups = (group for batch in later for group in batch["groups"])
        return next((group for group in groups if (group["index"], group["asked"]) == (index, submit_step)), None)

    def write(self, line: JournalEntry) -> None:
        """Adds a line, and returns when it is on disk, so that it survives a killed process and a power failure."""
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
        """Frees the memory of decisions for steps before `before`; their lines stay in the file."""
        for known in (self._batches, self._again):
            for step in [step for step in known if step < before]:
                del known[step]

    def _damage_message(self, number: int, why: str, records: Sequence[tuple[int, JournalEntry]]) -> str:
        """Returns the error message for a damaged line, with the steps of its neighbours in the file and the remedy."""
        before = [record["step"] for at, record in records if at < number]
        after = [record["step"] for at, record in records if at > number]
        between = " and ".join(f"step {step}" for step in (*before[-1:], *after[:1])) or "no other step"
        return (
            f"Line {number} of {self._path} is damaged ({why}), and with it a decision of the clock is lost: prompts "
            f"might be trained twice or never. The lines before and after it belong to {between}. Restore the file "
            "from a copy; or, where the run has a checkpoint after these steps, remove the line."
        )

    def _note(self, line: JournalEntry) -> None:
        if "groups" in line:
            self._batches[line["step"]] = line
        else:
            self._again[line["step"]] = list(line["again"])


def runs_of(versions: Sequence[int], breaks: Sequence[int]) -> list[list[int]]:
    """Lists the sessions that drew a sample: [[version, sampled tokens at the session's end], ...].

    Args:
      versions: version that drew each token; -1 for an appended token.
      breaks: numbers of sampled tokens after which another session of the same version continued (`Track.breaks`).
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


def agrees(group: JournalEntry, drawn: Sequence[Sequence[Sequence[int]]], step: int) -> bool:
    """Returns True if partly drawn samples can still become the recorded samples of their group.

    They cannot become the recorded samples if the recorded run later lost their host, because another host then drew
    all samples of the group again from their beginning.

    Args:
      group: the group's entry in the journal.
      drawn: sessions of each sample so far, as `runs_of` lists them; all their versions are older than `step`.
      step: the step at which the samples continue.
    """
    recorded = [[list(run) for run in runs if run[0] < step] for runs in group["runs"]]
    return recorded == [[list(run) for run in runs] for runs in drawn]
