"""Plain values and frames between a program and its tests: nothing that one side sends runs on the other side."""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct(">I")
_MOST = 1 << 24  # largest number of bytes of a frame
_EXACT = 1 << 53  # integers of at least this size are sent as hexadecimal text


class Reference:
    """An object that stays on the program's side.

    Attributes:
      number: index of the object in the program's list.
      kind: name of the object's type.
    """

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind


def encode(value: object, refer: Callable[[object], Reference]) -> object:
    """Encodes a value for JSON.

    A value of a subclass of a plain type is sent as a value of the plain type.

    Args:
      value: the value to send, of any type. A value that is not plain, by itself or in a container such as a list,
        becomes a reference.
      refer: function that makes a reference to a value that is not plain, to be sent in place of the value.
    """
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value) if -_EXACT < value < _EXACT else {"int": hex(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode(one, refer) for one in value]
            return items if kind is list else {kind.__name__: items}
    found = refer(value)
    return {"reference": [found.number, found.kind]}


def decode(value: Any, resolve: Callable[[Reference], object]) -> Any:
    """Makes the value that was encoded.

    Args:
      value: a result of `encode`, read back from JSON; other values may come, because the sender is not trusted.
      resolve: finds the object of a reference.

    Raises:
      ValueError, TypeError, LookupError, ArithmeticError: `value` is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(one, resolve) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 16)
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind].fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in content}
    if kind == "reference":
        return resolve(Reference(int(content[0]), str(content[1])))
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(one, resolve) for one in content)


def send(channel: socket.socket, message: object) -> None:
    body = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> Any:
    """Waits for the next message and reads it from JSON.

    Raises:
      EOFError: the other side has ended.
      TimeoutError: nothing came within the timeout of the socket.
      ValueError, RecursionError: the message is not JSON, is longer than 16 MiB, or is nested too deeply.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes is longer than {_MOST}")
    return json.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        part = channel.recv(min(size - len(body), 1 << 20))
        if not part:
            raise EOFError("the channel has ended")
        body += part
    return bytes(body)
