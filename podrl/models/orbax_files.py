"""Reads and writes weights as an Orbax checkpoint of podrl's parameter tree, beside a config.json."""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from podrl.mesh import rules
from podrl.models.config import INTEGER_PROJECTIONS, LoraConfig, ModelConfig
from podrl.models.finite import refuse_nonfinite
from podrl.models.hf_config import config_to_hf
from podrl.models.parameters import Param, is_param, param_specs
from podrl.models.quantize import quantized_leaves
from podrl.storage.storage import Place, absolute, first_line
from podrl.types import PyTree

CHUNK_BYTES = 1 << 26  # readers take whole chunks, so with small chunks they read little beyond their shards

_MARK = "_METADATA"  # file that lists the leaves; it is written when all leaves are complete
_FOLDERS = ("", "params", "default", "state")
_LISTED = 8


def find_checkpoint(directory: Place) -> Place | None:
    """Returns the Orbax checkpoint in a model directory, or None.

    The checkpoint is the directory itself, or params/, default/ or state/ in the directory.
    """
    for name in _FOLDERS:
        folder = directory / name
        if (folder / _MARK).is_file():
            return folder
    return None


def load(folder: Place, config: ModelConfig, mesh: Mesh, dtype: jax.typing.DTypeLike) -> PyTree:
    """Loads a checkpoint onto `mesh`; each process reads only the parts that its devices hold.

    Leaves are read one after another, see `read_leaves`. With `config.lora.base_dtype`, projections become integers as
    soon as they are read.

    Args:
      folder: checkpoint of the tree of `podrl.models.parameters.param_specs`, or of a tree whose only key 'params'
        holds this tree. It may have any floating dtype, and may come from any mesh.
      config: the model; its adapters are not read.
      mesh: devices that hold the parameters.
      dtype: storage type of the parameters.

    Raises:
      ValueError: the checkpoint cannot be read; leaves are missing, unknown, of the wrong shape or not floating point
        (the message counts them and names the first eight of each kind), or hold NaN or infinity.
    """
    specs = param_specs(dataclasses.replace(config, lora=LoraConfig()))
    stored = stored_leaves(folder)
    wrapped = {path[0] for path in stored} == {"params"}
    _check({path[wrapped:]: leaf for path, leaf in stored.items()}, specs, config, folder)

    def shape(spec: Param) -> jax.ShapeDtypeStruct:
        place = rules.sharding_for(spec.axes, spec.shape, mesh)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype_in(dtype), sharding=place)

    def finish(path: tuple[str, ...], leaf: jax.Array) -> Mapping[str, jax.Array]:
        name = "/".join(path)
        names = [f"{name}[{i}]" for i in range(leaf.shape[0])] if path[wrapped] == "layers" else [name]
        refuse_nonfinite(leaf, names, str(folder))
        if config.lora.base_dtype and path[-1] in INTEGER_PROJECTIONS:
            return quantized_leaves(path[wrapped:], leaf, config, mesh)
        return {path[-1]: leaf}

    abstract = jax.tree.map(shape, specs, is_leaf=is_param)
    if wrapped:
        return read_leaves(folder, {"params": abstract}, finish)["params"]
    return read_leaves(folder, abstract, finish)


def stored_leaves(folder: Place) -> dict[tuple[str, ...], Any]:
    """Reads shape, dtype and chunks of every leaf of a checkpoint, by the leaf's path.

    Raises:
      ValueError: the checkpoint cannot be read, or lists no arrays.
    """
    try:
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            found: Any = handler.metadata(epath.Path(absolute(folder)))
        tree: Any = getattr(found, "tree", found)
    except Exception as error:
        raise ValueError(f"The Orbax checkpoint {folder} cannot be read: {first_line(error)}") from error
    if not isinstance(tree, Mapping) or not tree:
        raise ValueError(f"The Orbax checkpoint {folder} cannot be read: it lists no arrays.")
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in leaves}


def read_leaves(
    folder: Place,
    abstract: PyTree,
    finish: Callable[[tuple[str, ...], jax.Array], Mapping[str, jax.Array]] = lambda path, leaf: {path[-1]: leaf},
) -> PyTree:
    """Reads some leaves of a checkpoint, one after another, onto the devices of this process.

    Each part of a leaf is read once, however many devices hold it. Parts are read in parallel, with at most the bytes
    of the stored leaf in flight. No process waits for another, so a process that fails does not block the others.

    Args:
      folder: checkpoint, which must be complete on disk.
      abstract: nested dict of jax.ShapeDtypeStruct with shardings, one for each leaf to read; a stored leaf of another
        dtype is cast.
      finish: function (path, leaf) -> leaves that replace the leaf, by the last key of their paths.

    Raises:
      ValueError: the checkpoint lacks a leaf, or a leaf cannot be read (the message names it).
    """
    stored = stored_leaves(folder)
    tree: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(abstract)[0]:
        path = tuple(key.key for key in keys)
        name = "/".join(path)
        if path not in stored:
            raise ValueError(f"The Orbax checkpoint {folder} has no leaf {name}: it holds another model.")
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        try:
            found = jax.block_until_ready(_read_leaf(folder, path, leaf, stored[path]))
        except Exception as error:
            raise ValueError(
                f"Leaf {name} of the Orbax checkpoint {folder} cannot be read: {first_line(error)}. Copy the "
                "checkpoint again."
            ) from error
        node |= finish(path, found)
    return tree


def _read_leaf(folder: Place, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct, stored: Any) -> jax.Array:
    argument = ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    item, arguments = leaf, argument
    for key in reversed(path):
        item, arguments = {key: item}, {key: arguments}
    args = ocp.args.PyTreeRestore(
        item=item,  # pyright: ignore[reportCallIssue]
        restore_args=arguments,  # pyright: ignore[reportCallIssue]
        partial_restore=True,  # pyright: ignore[reportCallIssue]
    )
    gigabytes = (_bytes_read(stored) + 1) / 1e9  # one byte more, as Orbax starts only reads smaller than the limit
    with contextlib.closing(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=gigabytes)) as handler:  # pyright: ignore[reportArgumentType]
        return jax.tree.leaves(handler.restore(epath.Path(absolute(folder)), args=args))[0]


def _bytes_read(stored: Any) -> int:
    """Computes the bytes of a leaf rounded up to whole chunks: the most memory that one read can need."""
    chunk = stored.storage.chunk_shape if stored.storage is not None else stored.shape
    whole = [math.ceil(size / part) * part for size, part in zip(stored.shape, chunk or stored.shape, strict=True)]
    return math.prod(whole) * np.dtype(stored.dtype).itemsize


def save(directory: str | pathlib.Path, config: ModelConfig, params: PyTree) -> None:
    """Writes a dense model as config.json and an Orbax checkpoint params/.

    Exactly the processes that hold a part of `params` must call this; all return when everything is on disk.

    Args:
      directory: directory to write, which must be empty or not exist.
      config, params: configuration and parameters of a model without adapters.

    Raises:
      ValueError: the directory is not empty, the model has adapters, or one process of several holds the
        whole model and is not process 0.
    """
    directory = pathlib.Path(directory).absolute()
    if config.lora.rank:
        raise ValueError(
            "Adapters are not part of an Orbax model directory: merge them first (podrl.models.lora.merge)."
        )
    devices = {d for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) for d in leaf.sharding.device_set}
    processes = {device.process_index for device in devices} or {jax.process_index()}
    among = ocp.options.MultiprocessingOptions(
        primary_host=min(processes),
        active_processes=processes,
        barrier_sync_key_prefix=f"podrl:{directory}",
    )
    if len(processes) == 1 and jax.process_count() > 1:  # Orbax refuses device arrays of one process of several
        if jax.process_index():
            raise ValueError(
                f"Process {jax.process_index()} of {jax.process_count()} holds the whole model: a process that "
                "saves alone with Orbax must be process 0. Spread the model over several, or use podrl.models.save."
            )
        params = jax.tree.map(np.asarray, params)
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: give a directory that does not exist yet.")
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), params)
    # Orbax does not pass the processes in `among` on to its array handler. The handler must be told separately which
    # process writes the descriptions of the arrays.
    arrays = ocp.type_handlers.ArrayHandler(primary_host=min(processes))
    types = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=among, type_handler_registry=types)
    with ocp.Checkpointer(handler, multiprocessing_options=among) as writer:
        # save() first waits for all processes, so all have checked that the directory is empty before one writes.
        args = ocp.args.PyTreeSave(params, save_args=chunked)  # pyright: ignore[reportCallIssue]
        writer.save(directory / "params", args=args)
    if jax.process_index() == min(processes):
        (directory / "config.json").write_text(json.dumps(config_to_hf(config), indent=2))
    ocp.multihost.sync_global_processes(f"podrl:{directory}/config.json", processes=processes)


def _check(stored: Mapping[tuple[str, ...], Any], specs: PyTree, config: ModelConfig, folder: Place) -> None:
    flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_param)[0]
    wanted: dict[tuple[str, ...], Param] = {tuple(k.key for k in path): spec for path, spec in flat}
    name = "/".join
    missing = [name(path) for path in wanted if path not in stored]
    extra = [name(path) for path in stored if path not in wanted]
    wrong = [
        f"{name(path)} is {tuple(stored[path].shape)} but must be {spec.shape}"
        for path, spec in wanted.items()
        if path in stored and tuple(stored[path].shape) != spec.shape
    ]
    whole = [
        f"{name(path)} is {stored[path].dtype}"
        for path in wanted
        if path in stored and not jnp.issubdtype(stored[path].dtype, jnp.floating)
    ]
    parts = [
        f"{len(found)} leaves {text}: {', '.join(found[:_LISTED])}{', ...' if len(found) > _LISTED else ''}."
        for text, found in (
            ("are missing", missing),
            ("are unknown", extra),
            ("have the wrong shape", wrong),
            ("are not floating point", whole),
        )
        if found
    ]
    if parts:
        total = sum(math.prod(spec.shape) for spec in wanted.values())
        raise ValueError(
            f"The Orbax checkpoint {folder} does not fit its configuration ({config.family}, {config.num_layers} "
            f"layers, {total:,} parameters). " + " ".join(parts)
        )
