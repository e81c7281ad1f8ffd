"""Findings: runs the checks over a run's records, all at once for the doctor or step by step while the run goes on."""

import dataclasses
import json

from podrl.mappings import ConfigValues, LogRecord
from podrl.python_names import in_python
from podrl.rundir import token_checks  # noqa: F401 - the import adds to CHECKS
from podrl.rundir.checks import CHECKS
from podrl.rundir.history import KINDS, Past, kind_of
from podrl.rundir.metrics import read_records
from podrl.rundir.trace import FOLDER, file_name, read_step, traced_steps
from podrl.storage.storage import Place, locate


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem of a run.

    Attributes:
      name: name of the check that found the problem.
      step: the first step at which the check found it.
      text: observation, with its numbers.
      meaning: consequence of the observation.
      key: configuration key to change.
      sample: file of the sample that the finding is about, with the line if it has lines; '' if there is no sample.
    """

    name: str
    step: int
    text: str
    meaning: str
    key: str
    sample: str = ""

    def __str__(self) -> str:
        at = f", {self.sample}" if self.sample else ""
        return f"step {self.step}{at}: {self.name}: {self.text}"

    def report(self) -> str:
        """Returns the finding as short lines: the observation, its consequence, and the key to change."""
        return f"{self}.\nIt means: {self.meaning}.\nTurn: {self.key}.".replace("\n", "\n   ")


class Examination:
    """Runs all checks over the records of a run, in the order of the records; each check reports at most once."""

    def __init__(self, config: ConfigValues):
        """Begins an examination of a run; `config` is the content of its config.json."""
        self._past = Past(config)
        self._python = "trainer" in config and "data" not in config  # the run of a learner, which has no data.*
        self._open = list(CHECKS)

    def see(self, record: LogRecord) -> list[Finding]:
        """Returns the findings about a record: a line of metrics.jsonl or samples.jsonl, or a step's trace.

        Findings come in the order of CHECKS.
        """
        kind = kind_of(record)
        found = []
        for row in [row for row in self._open if row.kind == kind]:
            if text := row.look(record, self._past):
                self._open.remove(row)
                said = in_python if self._python else str
                texts = said(text), said(row.meaning), said(row.key.replace("SECTION", self._past.section))
                found.append(Finding(row.name, int(record["step"]), *texts, str(record.get("sample", ""))))
        self._past.add(kind, record)
        return found


def examine(run: str) -> list[Finding]:
    """Reads a run directory and returns all findings, in the order of their steps.

    Raises:
      ValueError: the directory holds no run, or its config.json is damaged.
    """
    place = locate(run)
    config = place / "config.json"
    if not config.exists():
        raise ValueError(
            f"{run} is not a run directory: it holds no config.json. Give the directory that was passed as --workdir."
        )
    try:
        settings = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is damaged ({error}): the run's configuration cannot be read.") from error
    examination = Examination(settings if isinstance(settings, dict) else {})
    samples = enumerate(read_records(run, "samples.jsonl"), 1)
    records: list[LogRecord] = [{**record, "sample": f"line {line} of samples.jsonl"} for line, record in samples]
    records += read_records(run, "metrics.jsonl")
    records += [_trace_record(place, step) for step in traced_steps(place)]
    records.sort(key=lambda record: (record["step"], KINDS.index(kind_of(record))))
    return [finding for record in records for finding in examination.see(record)]


def _trace_record(place: Place, step: int) -> LogRecord:
    file = f"{FOLDER}/{file_name(step)}"
    try:
        return {"step": step, "trace": read_step(place, step), "sample": file}
    except ValueError as error:
        return {"step": step, "trace": None, "sample": file, "unreadable": str(error)}
