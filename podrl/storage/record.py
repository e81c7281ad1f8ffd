"""The JSON record of a checkpoint: host values, and checksums of leaves and arrays."""

import dataclasses
import json
from collections.abc import Mapping

import numpy as np
from etils import epath

from podrl.mappings import ConfigValues, JsonObject, SavedState
from podrl.storage.bits import tree_sums
from podrl.storage.seal import array_digest, is_sealed, seal, unseal
from podrl.storage.storage import Place, first_line
from podrl.types import PyTree


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """The JSON object of a checkpoint.

    Attributes:
      content: host values of the checkpoint.
      config: configuration of the run; None in a checkpoint without one.
      state: checksums of the saved leaves by `bits.leaf_name`; None in a checkpoint of an older podrl, which had none.
      arrays: checksums of the host arrays by name; None in a checkpoint of an older podrl, which had none.
      step: the step after which the checkpoint was taken; None in a checkpoint of an older podrl, which did not say.
    """

    content: SavedState
    config: ConfigValues | None
    state: dict[str, int] | None
    arrays: dict[str, str] | None
    step: int | None = None

    def sealed(self) -> JsonObject:
        """Returns the record as JSON values, with a checksum of itself."""
        return seal(dataclasses.asdict(self))

    @classmethod
    def read(cls, checkpoint: Place) -> "CheckpointRecord":
        """Reads the record of the checkpoint in a directory.

        Raises:
          ValueError: the record is damaged, or belongs to another step than the directory's name says.
        """
        path = epath.Path(checkpoint) / "host" / "metadata"
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError(f"it holds a value of type {type(values).__name__}, not an object")
            names = [field.name for field in dataclasses.fields(cls) if field.name != "step"]  # older ones have no step
            if not is_sealed(values) and not set(names) & set(values):
                return cls(values, None, None, None)
            values = unseal(values)
            if set(values) - {"step"} != set(names):
                raise ValueError(f"it has the keys {sorted(values)}, not {sorted(names)}")
            if (at := path.parts[-3]).isdigit() and values.get("step") not in (None, int(at)):
                raise ValueError(f"it is of step {values['step']}: another checkpoint is in the place of step {at}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"host data in {path} is not what podrl wrote: {first_line(error)}") from error
        return cls(**values)

    def check_state(self, state: PyTree, prefix: str = "") -> None:
        """Compares the checksums of leaves, computed on their devices, with the checksums at the save.

        All processes that hold a part of a leaf call this together.

        Args:
          state: the saved state, or the part of it below `prefix`.
          prefix: name of that part, such as 'params/'; '' for the whole state.

        Raises:
          ValueError: a leaf has other bits than when it was saved, is missing, or was not saved.
        """
        if self.state is None:
            return
        current = {prefix + name: value for name, value in tree_sums(state).items()}
        saved = {name: value for name, value in self.state.items() if name.startswith(prefix)}
        _compare("leaves of the state", current, saved)

    def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Compares the checksums of host arrays with the checksums at the save.

        Raises:
          ValueError: an array has other bits than when it was saved, is missing, or was not saved.
        """
        if self.arrays is not None:
            _compare("host arrays", {name: array_digest(array) for name, array in arrays.items()}, self.arrays)


def _compare(kind: str, current: JsonObject, saved: JsonObject) -> None:
    names = sorted({*current, *saved})
    wrong = [name for name in names if current.get(name) != saved.get(name)]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(names)} {kind} are not what was saved, such as {wrong[0]}")
