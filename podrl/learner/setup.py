"""Which weights every job starts from."""

import dataclasses
import pathlib

from podrl.models.config import LoraConfig
from podrl.runtime.storage import Place, locate

TINY = pathlib.Path(__file__).resolve().parent.parent / "assets" / "tiny"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Which weights a job starts from.

    Attributes:
      path: a Hugging Face directory, local or gs://; 'tiny' is the checkpoint shipped with podrl.
      size: the published size (podrl/models/sizes.py) that podrl.plan takes where `path` is empty.
      reference: directory of the reference policy; '' for the starting weights.
      critic: directory of the critic's starting weights; '' for a copy of the policy with a value head.
      lora: adapters; rank 0 trains all parameters.
    """

    path: str = "tiny"
    size: str = ""
    reference: str = ""
    critic: str = ""
    lora: LoraConfig = LoraConfig()

    @property
    def directory(self) -> Place:
        path = TINY if self.path == "tiny" else locate(self.path)
        if not path.is_dir():
            raise ValueError(
                f"model.path={self.path!r} is not a directory: give a Hugging Face directory (config.json, "
                "safetensors, tokenizer files), or 'tiny' for the checkpoint that comes with podrl."
            )
        return path
