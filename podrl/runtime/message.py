"""What processes tell each other: JSON and arrays in checksummed frames, nothing that could run code."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

VERSION = 1
_KINDS = "biufc"  # numpy kinds that are plain numbers


class MessageError(ValueError):
    """A message that is not one of ours, of another version, or not what was sent."""


@dataclasses.dataclass(frozen=True)
class Message:
    """JSON-able content and named arrays.

    Attributes:
      value: anything JSON holds.
      arrays: numbers; they travel as raw bytes.
    """

    value: Any = None
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def encode(message: Message) -> list[bytes]:
    """Frames: a JSON head, then one frame per array."""
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    frames = [array.tobytes() for array in arrays.values()]
    head = {
        "version": VERSION,
        "value": message.value,
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
    }
    body = json.dumps(head).encode()
    return [_digest([body, *frames]), body, *frames]


def decode(frames: Sequence[bytes]) -> Message:
    """Inverse of `encode`.

    Raises:
      MessageError: frames missing, cut, changed, of another version, or of a type that is not a plain number.
    """
    if len(frames) < 2:
        raise MessageError(f"A message of {len(frames)} frames arrived: at least 2 are needed; it was cut.")
    digest, body, *rest = (bytes(frame) for frame in frames)
    if digest != _digest([body, *rest]):
        raise MessageError(
            f"A message of {sum(map(len, frames))} bytes arrived changed: its checksum does not match; it is refused."
        )
    head = json.loads(body)
    if head.get("version") != VERSION:
        raise MessageError(
            f"A message of version {head.get('version')} arrived, this process speaks {VERSION}: run the same podrl "
            "on all hosts."
        )
    if len(head["arrays"]) != len(rest):
        raise MessageError(f"A message of {len(head['arrays'])} arrays arrived with {len(rest)}: it was cut.")
    arrays = {
        name: _array(frame, dtype, shape) for (name, dtype, shape), frame in zip(head["arrays"], rest, strict=True)
    }
    return Message(head["value"], arrays)


def _array(frame: bytes, dtype_text: str, shape: Sequence[int]) -> np.ndarray:
    dtype = np.dtype(dtype_text)
    if dtype.kind not in _KINDS:
        raise MessageError(f"An array of type {dtype_text} arrived: only numbers and booleans travel.")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise MessageError(f"An array of {len(frame)} bytes arrived as {dtype_text}{list(shape)}: it was cut.")
    return np.frombuffer(frame, dtype).reshape(shape)


def _digest(frames: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
