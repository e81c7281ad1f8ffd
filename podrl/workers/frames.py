"""Frames that a process and its workers send through pipes: a pair of lengths, a JSON header and a body."""

import json
import struct

from podrl.mappings import JsonObject

LENGTHS = struct.Struct(">II")
MOST_BYTES = 1 << 30  # bound on the bytes of a frame


class FrameError(ValueError):
    """A frame is too long, or the bytes are not a frame; the message says which."""


def pack(header: JsonObject, body: bytes = b"") -> bytes:
    """Encodes a header and a body as one frame.

    Raises:
      FrameError: header and body together are longer than MOST_BYTES.
    """
    return frame_of(json.dumps(header).encode(), body)


def frame_of(head: bytes, body: bytes = b"") -> bytes:
    """Makes a frame of a header that is JSON already; raises the errors of `pack`."""
    _check_size(len(head) + len(body))
    return b"".join((LENGTHS.pack(len(head), len(body)), head, body))


def take(data: bytearray) -> JsonObject | None:
    """Removes the first frame from `data` and returns its header; changes nothing and returns None while the frame is
    incomplete.

    Raises:
      FrameError: `data` does not begin with a frame.
    """
    if len(data) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack_from(data)
    _check_size(head + body)
    start, end = LENGTHS.size, LENGTHS.size + head + body
    if len(data) < end:
        return None
    try:
        header = json.loads(bytes(data[start : start + head]))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise FrameError(f"a message that is not a JSON object ({type(header).__name__})")
    del data[:end]
    return header


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise FrameError(f"a message of {size} bytes, more than the limit of {MOST_BYTES}")
