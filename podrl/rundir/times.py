"""Remembers how long a job's first stages took, beside jax's compilation cache, for later runs of equal programs."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

from podrl.mappings import ConfigValues, LogRecord
from podrl.storage.storage import write_whole

_STAGES = ("start-up", "evaluation", "update", "rollout")  # stages whose first time compiles programs or reads them
# Settings that do not choose the file. Most of them change no program. If one does (reward.model, or trainer.max_steps
# with a schedule), the file may hold the seconds of other programs.
_OTHER = ("seed", "data", "reward", "log", "checkpoint", "compile_cache")
_OF_TRAINER = ("max_steps", "eval_every_n_steps", "checkpoint_root_directory")


class StageTimes:
    """The seconds that the first stages of a job take on this machine, in a file for each set of programs.

    Without a local directory of the cache nothing is remembered. A damaged file counts as missing. A file that cannot
    be written is left out, because the seconds are only shown.
    """

    def __init__(self, config: ConfigValues):
        """Finds the file of a job.

        Args:
          config: configuration of the run.
        """
        import jax

        values = {name: value for name, value in config.items() if name not in _OTHER}
        if isinstance(trainer := config.get("trainer"), Mapping):
            values["trainer"] = {k: v for k, v in trainer.items() if k not in _OF_TRAINER}
        values = json.loads(json.dumps(values, default=str, skipkeys=True))  # keys that are no texts become sortable
        devices = [device.device_kind for device in jax.devices()]
        text = json.dumps([values, jax.__version__, devices, jax.process_count()], sort_keys=True)
        directory = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
        name = f"podrl-times-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
        self._path = pathlib.Path(directory, name) if directory and "://" not in directory else None
        self._missing = {*_STAGES}  # stages of this run whose seconds are not written yet

    def read(self) -> dict[str, float]:
        """Returns the seconds of each stage in the last run of the same programs; {} if no run is known."""
        with contextlib.suppress(OSError, ValueError):
            if self._path is not None and isinstance(found := json.loads(self._path.read_bytes()), dict):
                return {name: found[name] for name in _STAGES if isinstance(found.get(name), int | float)}
        return {}

    def see(self, record: LogRecord) -> None:
        """Writes the seconds of each stage from the first record of metrics of this run that has them."""
        found = {name: record[f"time/{name}"] for name in self._missing if f"time/{name}" in record}
        self._missing -= {*found}
        if found and self._path is not None:
            with contextlib.suppress(OSError):
                write_whole(self._path, json.dumps(self.read() | found))
