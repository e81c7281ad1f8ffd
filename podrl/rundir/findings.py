"""Findings: what checks say of a run, read whole by the doctor or step by step while the run goes on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from podrl.rundir import token_checks  # noqa: F401 - fills CHECKS
from podrl.rundir.checks import CHECKS
from podrl.rundir.history import Past, Record, kind_of


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run.

    Attributes:
      name: of the check that found it.
      step: the first step where it did.
      text: what was seen, with its numbers.
      meaning: what that means.
      key: what to turn.
      sample: where the sample is that it is of, '' where it is of none.
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


class Examination:
    """Looks at the records of a run in their order; each check speaks once."""

    def __init__(self, config: Mapping[str, Any]):
        """Nothing has been seen yet of the run that `config` describes."""
        self._past = Past(config)
        self._open = list(CHECKS)

    def see(self, record: Record) -> list[Finding]:
        """Returns what is wrong with a line of metrics.jsonl or samples.jsonl or a trace, in the table's order."""
        kind = kind_of(record)
        found = []
        for row in [row for row in self._open if row.kind == kind]:
            if text := row.look(record, self._past):
                self._open.remove(row)
                key = row.key.replace("SECTION", self._past.section)
                found.append(
                    Finding(row.name, int(record["step"]), text, row.meaning, key, str(record.get("sample", "")))
                )
        self._past.add(kind, record)
        return found
