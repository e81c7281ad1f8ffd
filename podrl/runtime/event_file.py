"""Event files of TensorBoard: scalars and texts by step, as protocol buffers in records with checksums.

Written here because tensorboardX, which a test reads them back with, takes a CPU second to import.
"""

import logging
import math
import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping

log = logging.getLogger("podrl.metrics")


class EventFile:
    """A new event file in a directory, written at once: a full disk ends no thread, a killed process loses no event."""

    def __init__(self, directory: pathlib.Path, start: int):
        """Creates the file.

        Args:
          directory: TensorBoard reads all event files in it, by the time in their names.
          start: events of later steps, in files of earlier lives, are hidden.
        """
        directory.mkdir(parents=True, exist_ok=True)
        earlier = any(directory.glob("events*"))
        self._directory, self._failing = directory, False
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._append(0, _chunk(3, b"brain.Event:2"))
        if start or earlier:
            self._append(start, _chunk(7, b"\x08\x01"))  # a session log: started

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one event with the scalars of a step."""
        scalars = (_chunk(1, name.encode()) + b"\x15" + _float(value) for name, value in metrics.items())
        self._append(step, _chunk(5, b"".join(_chunk(1, scalar) for scalar in scalars)))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Appends one event with a text, which TensorBoard shows as Markdown."""
        shown = _chunk(9, _chunk(1, _chunk(1, b"text")))  # metadata: the plugin's name
        one = _chunk(2, _chunk(2, b"\x08\x01"))  # a shape of one dimension, of size 1
        tensor = b"\x08\x07" + one + _chunk(8, text.encode(errors="backslashreplace"))  # 7 is text
        self._append(step, _chunk(5, _chunk(1, _chunk(1, name.encode()) + shown + _chunk(8, tensor))))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, step: int, what: bytes) -> None:
        """Appends an event: its time (field 1), step (2) and the field `what`, between their length and checksums."""
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(event))
        left = memoryview(length + _checksum(length) + event + _checksum(event))
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            if not self._failing:
                log.error("TensorBoard events in %s are incomplete: %s.", self._directory, error.strerror)
            self._failing = True


def _chunk(field: int, content: bytes) -> bytes:
    """Encodes a field of text or of a message."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _float(value: float) -> bytes:
    """Encodes a number in 4 bytes; one that is too large becomes infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _table() -> list[int]:
    """Tabulates CRC-32C (Castagnoli, reflected) by byte."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table


_CRC = _table()


def _checksum(content: bytes) -> bytes:
    """Computes a record's checksum: CRC-32C, rotated, and moved by a constant."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
