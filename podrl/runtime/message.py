"""Messages between processes: JSON and arrays with a checksum, and buffers without one; never pickled objects."""

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

VERSION = 2
_KINDS = "biufc"  # numpy dtype kinds that are plain numbers
_DIGEST = 16
PIECE = 1 << 20

Frames = Sequence[bytes | memoryview]


class MessageError(ValueError):
    """A message has the wrong form or version, or was damaged."""


@dataclasses.dataclass(frozen=True)
class Message:
    """Content of a message: JSON and named arrays.

    Attributes:
      value: any value that JSON can hold.
      arrays: arrays of numbers by name; they travel as raw bytes.
      bulk: buffers that are sent without a copy and without a checksum. They must not change until they are sent, and
        their users must check them in another way, as the transfer of weights does.
    """

    value: Any = None
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    bulk: Sequence[memoryview] = ()


def encode(message: Message) -> list[bytes | memoryview]:
    """Encodes a message as frames: checksum and array count; JSON head; a frame per array; a frame per bulk buffer."""
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    frames = [array.tobytes() for array in arrays.values()]
    head = {
        "version": VERSION,
        "value": message.value,
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
    }
    body = json.dumps(head).encode()
    return [_digest([body, *frames]) + len(frames).to_bytes(4, "little"), body, *frames, *message.bulk]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """Decodes the frames of `encode`.

    Raises:
      MessageError: frames are missing, cut or changed, are of another version, or hold values that are not plain
        numbers.
    """
    if len(frames) < 2:
        raise MessageError(f"A message was cut: {len(frames)} of its frames arrived, and at least 2 are needed.")
    digest, body = bytes(frames[0][:_DIGEST]), bytes(frames[1])
    checked = 2 + int.from_bytes(frames[0][_DIGEST:], "little")
    rest, bulk = frames[2:checked], frames[checked:]
    if digest != _digest([body, *rest]):
        raise MessageError(f"A message of {sum(map(len, frames))} bytes was refused: its checksum does not match.")
    head = json.loads(body)
    if head.get("version") != VERSION:
        raise MessageError(
            f"A message of version {head.get('version')} arrived, but this process reads version {VERSION}: run the "
            "same podrl on all hosts."
        )
    if len(head["arrays"]) != len(rest):
        raise MessageError(f"A message was cut: {len(rest)} of its {len(head['arrays'])} arrays arrived.")
    arrays = {
        name: _array(frame, dtype, shape) for (name, dtype, shape), frame in zip(head["arrays"], rest, strict=True)
    }
    return Message(head["value"], arrays, [memoryview(frame) for frame in bulk])


def in_pieces(frames: Frames) -> Frames:
    """Splits frames into pieces of at most PIECE bytes; the first piece holds the length of each frame."""
    pieces: list[bytes | memoryview] = [struct.pack(f"<{len(frames)}Q", *map(len, frames))]
    for frame in frames:
        whole = memoryview(frame)
        pieces += [whole[at : at + PIECE] for at in range(0, len(frame), PIECE)]
    return pieces


def from_pieces(pieces: Sequence[Any]) -> Frames:
    """Joins the pieces of `in_pieces` into frames; the frames are copies, aligned as numpy aligns arrays.

    Raises:
      MessageError: the pieces do not have the lengths that the first piece names.
    """
    buffers = [memoryview(getattr(piece, "buffer", piece)) for piece in pieces]
    if not buffers or len(buffers[0]) % 8:
        raise MessageError(
            "A message arrived without the lengths of its frames: it was cut, or another version of podrl sent it."
        )
    lengths = struct.unpack(f"<{len(buffers[0]) // 8}Q", buffers[0])
    rest = iter(buffers[1:])
    if sum(lengths) != sum(map(len, buffers[1:])):
        raise MessageError(f"A message was cut: {sum(map(len, buffers[1:]))} of its {sum(lengths)} bytes arrived.")
    frames: list[bytes | memoryview] = []
    for length in lengths:
        frame = np.empty(length, np.uint8)
        at = 0
        while at < length:
            piece = next(rest)
            if at + len(piece) > length:
                raise MessageError("A message was refused: its pieces do not have the lengths of its frames.")
            frame[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        frames.append(frame.data)
    return frames


def _array(frame: bytes | memoryview, dtype_text: str, shape: Sequence[int]) -> np.ndarray:
    dtype = np.dtype(dtype_text)
    if dtype.kind not in _KINDS:
        raise MessageError(f"An array of type {dtype_text} arrived: only numbers and booleans travel.")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise MessageError(f"An array {dtype_text}{list(shape)} was damaged: it arrived with {len(frame)} bytes.")
    return np.frombuffer(frame, dtype).reshape(shape)


def _digest(frames: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
