"""Safetensors files: finds named tensors, reads parts of them and writes them, without holding a file in memory."""

import dataclasses
import json
import math
import os
import pathlib
import struct
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from podrl.storage.regular import load_json, regular
from podrl.storage.storage import Place, file_size, is_remote

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COMPARED = 1 << 24  # bytes of a block of rows; two matrices are compared block by block
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor's place on disk: file, byte range, shape and type.

    Attributes:
      name: name of the tensor in the checkpoint.
      path: file that holds the tensor.
      code: dtype code of the safetensors format, e.g. 'BF16'.
      shape: shape of the tensor.
      start, stop: first byte of the tensor in the file, and the byte after its last.
    """

    name: str
    path: Place
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype:
        """The tensor's numpy dtype.

        Raises:
          ValueError: the tensor is not floating point.
        """
        if self.code not in _DTYPES:
            raise ValueError(
                f"Tensor {self.name} in {self.path} has dtype {self.code}: weights must be one of "
                f"{', '.join(_DTYPES)}. Convert the checkpoint first (quantised checkpoints are not read)."
            )
        return _DTYPES[self.code]

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a copy of the tensor, or of the rectangular part `index`; of a local file only this part is read."""
        return np.array(self._mapped()[index])

    def read_into(self, out: np.ndarray, index: tuple[slice, ...] = ()) -> None:
        """Copies the tensor, or the rectangular part `index`, into `out`, of the same shape; casts to `out.dtype`."""
        np.copyto(out, self._mapped()[index], casting="same_kind")

    def split(self, names: Sequence[str], shape: tuple[int, ...]) -> list["StoredTensor"]:
        """Cuts the tensor's bytes into tensors of equal shape, without reading them."""
        size = (self.stop - self.start) // len(names)
        return [
            dataclasses.replace(
                self, name=name, shape=shape, start=self.start + n * size, stop=self.start + (n + 1) * size
            )
            for n, name in enumerate(names)
        ]

    def as_bytes(self) -> np.ndarray:
        """Opens a tensor of unsigned bytes (code 'U8'): from a local file, parts are read as they are used."""
        return self._mapped(np.dtype(np.uint8))

    def _mapped(self, dtype: np.dtype | None = None) -> np.ndarray:
        dtype = self.dtype if dtype is None else dtype
        if is_remote(self.path):  # reads the whole tensor, because a part of it need not be contiguous in the file
            with self.path.open("rb") as file:
                file.seek(self.start)
                return np.frombuffer(file.read(self.stop - self.start), dtype).reshape(self.shape)
        return np.memmap(self.path, dtype, mode="r", offset=self.start, shape=self.shape)


def scan_file(path: Place) -> dict[str, StoredTensor]:
    """Reads a file's list of tensors and checks it against the file's size.

    Raises:
      ValueError: the file is not a safetensors file; a tensor ends after the file, shares bytes with another tensor, or
        leaves bytes unused (the message names the tensor).
    """
    size = file_size(regular(path))
    header, data_start = _read_header(path, size)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            code, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path} describes tensor {name} by {str(entry)[:200]}: the file is damaged.") from None
        counts = (*shape, begin, end)
        if not isinstance(code, str) or not all(type(n) is int and n >= 0 for n in counts) or begin > end:
            raise ValueError(f"{path} describes tensor {name} by {str(entry)[:200]}: the file is damaged.")
        start, stop = begin + data_start, end + data_start
        tensor = StoredTensor(name, path, code, shape, start, stop)
        if stop > size:
            raise ValueError(
                f"Tensor {name} of {path} is truncated: it should end at byte {stop} but the file has {size}. "
                "Download or copy the file again."
            )
        if code in _DTYPES and stop - start != math.prod(shape) * _DTYPES[code].itemsize:
            raise ValueError(
                f"Tensor {name} of {path} has shape {shape} in {code}, but {stop - start} bytes: the file is damaged."
            )
        tensors[name] = tensor
    used = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != used:
            gap = tensor.start - used
            why = "shares bytes with another" if gap < 0 else f"has {gap} bytes before it that no tensor uses"
            raise ValueError(f"Tensor {tensor.name} of {path} {why}: the file is damaged. Copy it again.")
        used = tensor.stop
    if used != size:
        raise ValueError(f"{path} has {size - used} bytes after its last tensor: the file is damaged. Copy it again.")
    return tensors


def _read_header(path: Place, size: int) -> tuple[dict, int]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} ({size} bytes) is not a complete safetensors file: its header would have {length} bytes. "
                "Download or copy the file again."
            )
        try:
            header = load_json(file.read(length))
        except ValueError as error:
            raise ValueError(f"The header of {path} is not JSON ({error}): the file is damaged.") from None
    if not isinstance(header, dict):
        raise ValueError(f"The header of {path} is not a JSON object: the file is damaged.")
    return header, 8 + length


def scan_directory(directory: Place) -> dict[str, StoredTensor]:
    """Lists every tensor of a checkpoint directory: of `model.safetensors`, or of the files that an index names.

    Raises:
      ValueError: there are no weights; the index is unreadable; a file is missing, damaged, or lacks a tensor of the
        index; or two files could both hold a tensor.
    """
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        single = directory / SINGLE_NAME
        if not single.exists():
            found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
            raise ValueError(
                f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}, but {', '.join(found[:12]) or 'nothing'}: "
                "point model.path at a Hugging Face directory with safetensors weights."
            )
        return scan_file(single)
    weight_map = _weight_map(index_path)
    files = sorted(set(weight_map.values()))
    missing = [f for f in files if not (directory / f).exists()]
    if missing:
        lost = sum(f in missing for f in weight_map.values())
        raise ValueError(
            f"{directory} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing)} "
            f"({lost} tensors). Download or copy them again."
        )
    if SINGLE_NAME not in files and (directory / SINGLE_NAME).exists():
        raise ValueError(
            f"{directory} has {SINGLE_NAME}, and {INDEX_NAME} that names other files ({', '.join(files[:2])}): it is "
            "unclear which weights to use. Remove one of them."
        )
    held = {file: scan_file(directory / file) for file in files}
    absent = [name for name, file in weight_map.items() if name not in held[file]]
    if absent:
        raise ValueError(f"{index_path} lists tensors its files do not hold: {', '.join(absent[:8])}.")
    stored: dict[str, StoredTensor] = {}
    for tensors in held.values():
        if twice := stored.keys() & tensors.keys():
            raise ValueError(
                f"{directory} has tensor {min(twice)} in two of its files: it is unclear which one to use."
            )
        stored |= tensors
    return stored


def has_own_head(directory: Place) -> bool:
    """True if a checkpoint's `lm_head.weight` differs from its embedding matrix; False without weights."""
    index, head = directory / INDEX_NAME, "lm_head.weight"
    if index.exists():
        names = _weight_map(index)
        if not any(name.endswith(head) for name in names) or not all((directory / f).exists() for f in names.values()):
            return False
    elif not (directory / SINGLE_NAME).exists():
        return False
    stored = scan_directory(directory)
    heads, embeddings = ([t for n, t in stored.items() if n.endswith(end)] for end in (head, "embed_tokens.weight"))
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    (mine,), (theirs,) = heads, embeddings
    if mine.shape != theirs.shape or len(mine.shape) != 2:
        return True
    rows = max(1, _COMPARED // (mine.shape[1] * mine.dtype.itemsize))
    blocks = [(slice(first, first + rows),) for first in range(0, mine.shape[0], rows)]
    return not all(np.array_equal(mine.read(block), theirs.read(block)) for block in blocks)


def _weight_map(index_path: Place) -> dict[str, str]:
    """Reads an index, which maps tensors to file names; refuses names of files outside its own directory."""
    try:
        weight_map = load_json(regular(index_path).read_bytes())["weight_map"]
        items = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index_path} is not a safetensors index ({error!r}).") from None
    for tensor, file in items:
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise ValueError(
                f"{index_path} says that tensor {tensor} is in {file!r}: an index may only name files that lie beside "
                "it. Get the checkpoint again from a source that you trust."
            )
    return weight_map


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """Name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split_into_files(tensors: Sequence[Outgoing], max_bytes: int) -> dict[str, list[Outgoing]]:
    """Assigns tensors, in order, to files of at most `max_bytes` bytes; a larger tensor gets its own file.

    Returns:
      The tensors of each file, by file name.
    """
    groups: list[list[Outgoing]] = [[]]
    used = 0
    for tensor in tensors:
        if groups[-1] and used + tensor.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups)}


def write_file(path: pathlib.Path, tensors: Sequence[Outgoing], arrays: Iterable[np.ndarray]) -> None:
    """Writes a safetensors file, one array after another, and flushes it to disk.

    Args:
      path: file to write.
      tensors: descriptions of the arrays, in the order in which they are written.
      arrays: arrays in the same order; they are consumed lazily, so that one is in memory at a time.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        code = _CODES[tensor.dtype]
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pads the header, so that the data starts at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor, array in zip(tensors, arrays, strict=True):
            assert array.shape == tensor.shape and array.dtype == tensor.dtype, (tensor, array.shape, array.dtype)
            file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
        file.flush()
        os.fsync(file.fileno())


def write_index(directory: pathlib.Path, files: Mapping[str, Sequence[Outgoing]]) -> None:
    """Writes the index of several weight files; writes nothing for a single file."""
    if len(files) == 1:
        return
    total = sum(t.nbytes for tensors in files.values() for t in tensors)
    weight_map = {t.name: file for file, tensors in files.items() for t in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
