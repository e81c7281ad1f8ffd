"""Frames between a process and its workers: a pair of lengths, a JSON header and a body, through pipes."""

import json
import struct
from collections.abc import Mapping
from typing import Any

LENGTHS = struct.Struct(">II")


def pack(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A message as it goes through the pipe."""
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def take(data: bytearray) -> dict[str, Any] | None:
    """Takes a message off the front of `data` and returns its header; None while bytes of it are missing."""
    if len(data) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack_from(data)
    start, end = LENGTHS.size, LENGTHS.size + head + body
    if len(data) < end:
        return None
    header = json.loads(bytes(data[start : start + head]))
    del data[:end]
    return header
