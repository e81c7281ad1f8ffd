"""The JSON record of a checkpoint: host values, and checksums of leaves and arrays."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from podrl.storage.bits import tree_sums
from podrl.storage.seal import array_digest, is_sealed, seal, unseal
from podrl.storage.storage import Place, first_line
from podrl.types import PyTree


@dataclasses.dataclass(frozen=True)
class Record:
    """The JSON object of a checkpoint.

    Attributes:
      content: the host values it was saved with.
      config: the configuration of the run.
      state: sums of the saved leaves by `bits.leaf_name`; None in a checkpoint of before there were any.
      arrays: digests of the host arrays by name; None as above.
      step: the step after which the checkpoint was taken; None in a checkpoint that does not say so.
    """

    content: dict[str, Any]
    config: dict[str, Any] | None
    state: dict[str, int] | None
    arrays: dict[str, str] | None
    step: int | None = None

    def sealed(self) -> dict[str, Any]:
        """Encodes the record as JSON, with its own checksum."""
        return seal(dataclasses.asdict(self))

    @classmethod
    def read(cls, checkpoint: Place) -> "Record":
        """Reads the record of the checkpoint in a directory.

        Raises:
          ValueError: it is not what was written, or was written in another directory, whose name is the step.
        """
        path = epath.Path(checkpoint) / "host" / "metadata"
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}")
            names = [field.name for field in dataclasses.fields(cls) if field.name != "step"]  # which came later
            if not is_sealed(values) and not set(names) & set(values):
                return cls(values, None, None, None)
            values = unseal(values)
            if set(values) - {"step"} != set(names):
                raise ValueError(f"it holds {sorted(values)}, not {sorted(names)}")
            if (at := path.parts[-3]).isdigit() and values.get("step") not in (None, int(at)):
                raise ValueError(f"it is of step {values['step']}: another checkpoint is in the place of step {at}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"host data in {path} is not what podrl wrote: {first_line(error)}") from error
        return cls(**values)

    def check_state(self, state: PyTree, prefix: str = "") -> None:
        """Compares leaves, on their devices, with their sums at the save.

        Args:
          state: the saved state, or the part of it below `prefix`.
          prefix: the name of that part, 'params/' for instance.

        Raises:
          ValueError: a leaf has other bits than were saved; or the leaves are not those that were.
        """
        if self.state is None:
            return
        found = {prefix + name: value for name, value in tree_sums(state).items()}
        saved = {name: value for name, value in self.state.items() if name.startswith(prefix)}
        _compare("leaves of the state", found, saved)

    def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Compares host arrays with their sums at the save."""
        if self.arrays is not None:
            _compare("host arrays", {name: array_digest(array) for name, array in arrays.items()}, self.arrays)


def _compare(what: str, found: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    wrong = [name for name in sorted({*found, *saved}) if found.get(name) != saved.get(name)]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(saved)} {what} are not what was saved, such as {wrong[0]}")
