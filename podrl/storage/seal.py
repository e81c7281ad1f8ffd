"""Checksums of host data: JSON objects that carry a checksum of themselves, and arrays."""

import hashlib
import json

import numpy as np

from podrl.mappings import JsonObject

_KEY = "sha256"


def seal(values: JsonObject) -> JsonObject:
    """Returns a copy of JSON values with their checksum under the key 'sha256'."""
    plain = json.loads(json.dumps(dict(values)))
    return {**plain, _KEY: _digest(plain)}


def is_sealed(values: JsonObject) -> bool:
    """Returns True if values carry a checksum, right or wrong."""
    return _KEY in values


def unseal(values: JsonObject) -> JsonObject:
    """Checks the checksum of `seal`, and returns the values without it.

    Raises:
      ValueError: the values do not have the checksum that they carry.
    """
    content = {key: value for key, value in values.items() if key != _KEY}
    if values.get(_KEY) != (found := _digest(content)):
        raise ValueError(f"its checksum is {values.get(_KEY)!r}, but its content has the checksum {found!r}")
    return content


def array_digest(array: np.ndarray) -> str:
    """Returns a checksum of the bits, shape and dtype of a host array."""
    hashed = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    hashed.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
    return hashed.hexdigest()


def _digest(values: JsonObject) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
