"""The decoder and its checkpoints; the names of this package are imported on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrl.models.config import LoraConfig, ModelConfig
    from podrl.models.hf_load import load
    from podrl.models.hf_save import save
    from podrl.models.pretrained import Decoder, check_vocab, from_pretrained

_HOME = {
    "Decoder": "pretrained",
    "LoraConfig": "config",
    "ModelConfig": "config",
    "check_vocab": "pretrained",
    "from_pretrained": "pretrained",
    "load": "hf_load",
    "save": "hf_save",
}

__all__ = ["Decoder", "LoraConfig", "ModelConfig", "check_vocab", "from_pretrained", "load", "save"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
