"""Writes a model as a Hugging Face directory, one tensor at a time; the directory appears only when it is complete."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mappings import JsonObject
from podrl.models.config import ModelConfig
from podrl.models.hf_config import config_to_hf
from podrl.models.hf_names import Entry, entries, part_of, to_stored
from podrl.models.parameters import is_adapter, stacks_of
from podrl.models.tensor_files import Outgoing, split_into_files, write_file, write_index
from podrl.types import PyTree

MAX_FILE_BYTES = 5_000_000_000
DTYPES = ("float32", "bfloat16", "float16")


def save(
    directory: str | pathlib.Path,
    config: ModelConfig,
    params: PyTree,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    fields: JsonObject | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    wanted: Sequence[Entry] | None = None,
) -> None:
    """Writes config.json and weights that `transformers` and `podrl.models.load` read.

    Every process that holds a part of `params` calls this; tensors are gathered one at a time and the first of these
    processes writes. The directory appears under its name only when it is complete.

    Args:
      directory: directory to write, which must be empty or not exist.
      config, params: configuration and parameters of a model without adapters (see `podrl.models.lora.merge`), as jax
        or numpy arrays.
      dtype: type of the written weights, except leaves that are float32 in every model (`Param.dtype`).
      fields: further fields of config.json, such as token ids.
      extra_files: contents of further files by name, such as the tokenizer's.
      max_file_bytes: largest size of a weight file, bytes.
      wanted: tensors to write; None for the tensors of a causal language model.

    Raises:
      ValueError: the directory is not empty; the model has adapters, or no config.json describes it; parameters have
        another shape than the configuration; or weights cannot be written in this dtype.
    """
    if any(is_adapter(name) for stack in stacks_of(params["layers"], config) for name in stack):
        raise ValueError("A model with adapters cannot be saved as plain weights: merge it, or save the adapters.")
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"Weights cannot be written as {name}: use one of {', '.join(DTYPES)}.")
    raw = config_to_hf(config) | {"torch_dtype": name} | dict(fields or {})
    with finished_directory(directory, writes=is_writer(params)) as partial:
        write_entries(partial, wanted or entries(config), params, np.dtype(dtype), max_file_bytes=max_file_bytes)
        if partial is not None:
            for file, content in (extra_files or {}).items():
                (partial / file).parent.mkdir(exist_ok=True)
                (partial / file).write_bytes(content)
            (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def write_entries(
    partial: pathlib.Path | None,
    wanted: Sequence[Entry],
    params: PyTree,
    dtype: np.dtype,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    single_name: str | None = None,
) -> None:
    """Writes the tensors of `wanted`; every process that holds a part of `params` must call it.

    Args:
      partial: directory to write into; None in a process that does not write and only takes part in the gathers.
      wanted: tensors to write.
      params: parameter tree.
      dtype: type of the written weights.
      max_file_bytes: largest size of a weight file, bytes.
      single_name: name of the only file, whatever its size; None to split weights into files of `max_file_bytes`.
    """
    source = {name: (entry, index) for entry in wanted for name, index in entry.places().items()}
    outgoing = [Outgoing(n, entry.stored_shape, entry.param.dtype_in(dtype)) for n, (entry, _) in source.items()]
    files = {single_name: outgoing} if single_name else split_into_files(outgoing, max_file_bytes)
    for file, tensors in files.items():
        arrays = (_stored(params, *source[t.name], t.dtype) for t in tensors)
        if partial is None:
            for _ in arrays:
                pass
        else:
            write_file(partial / file, tensors, arrays)
    if partial is not None and not single_name:
        write_index(partial, files)


def refuse_existing(directory: str | pathlib.Path) -> None:
    """Raises ValueError if `directory` exists and is not an empty directory."""
    directory = pathlib.Path(directory).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists already: give a directory that does not exist, or delete this one.")


@contextlib.contextmanager
def finished_directory(directory: str | pathlib.Path, *, writes: bool = True) -> Iterator[pathlib.Path | None]:
    """Writes a directory that appears only when it is complete; a context manager.

    Yields:
      A scratch directory, which is renamed to `directory` when the block ends, and removed if the block raises; None in
      processes that do not write.

    Raises:
      ValueError: `directory` exists and is not an empty directory.
    """
    directory = pathlib.Path(directory).absolute()
    if not writes:
        yield None
        return
    refuse_existing(directory)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_writer(params: PyTree) -> bool:
    """True in the first of the processes that hold the parameters; always True if they are not arrays of jax."""
    leaf = jax.tree.leaves(params)[0]
    if not isinstance(leaf, jax.Array):
        return True
    return min(d.process_index for d in leaf.sharding.device_set) == jax.process_index()


def _stored(params: PyTree, entry: Entry, index: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Gathers one tensor of a leaf and returns it in its stored form, on the host."""
    leaf = functools.reduce(lambda node, key: node[key], entry.leaf, params)
    if tuple(leaf.shape) != entry.param.shape:
        raise ValueError(
            f"Parameter {'/'.join(entry.leaf)} has shape {tuple(leaf.shape)} but this configuration needs "
            f"{entry.param.shape}: configuration and parameters are of different models."
        )
    if not isinstance(leaf, jax.Array):
        value = np.asarray(leaf[entry.part(index)]).astype(dtype)
        return np.ascontiguousarray(to_stored(value, entry.order, entry.sections, entry.stored_shape))
    sharding = NamedSharding(leaf.sharding.mesh, Spec()) if isinstance(leaf.sharding, NamedSharding) else None
    take = _taking(entry.stored_shape, entry.stacked, entry.order, entry.sections, dtype, sharding)
    gathered = take(leaf, np.asarray(index, np.int32))
    return np.asarray(gathered.addressable_data(0))


@functools.lru_cache(maxsize=64)
def _taking(
    stored_shape: tuple[int, ...],
    stacked: tuple[int, ...],
    order: tuple[int, ...],
    sections: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding | None,
):
    """Builds a jitted function (leaf, index of its stacked dimensions) -> the whole tensor in its stored form."""

    def take(leaf: Array, index: Array) -> Array:
        value = leaf[part_of(stacked, list(index), leaf.ndim)].astype(dtype)
        return to_stored(value, order, sections, stored_shape)

    return jax.jit(take, out_shardings=sharding)
