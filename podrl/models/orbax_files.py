"""Reads and writes weights as an Orbax checkpoint beside a config.json: podrl's parameter tree as it is."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from podrl.mesh import rules
from podrl.models.config import ModelConfig
from podrl.models.decoder import Param, is_param, param_specs
from podrl.models.hf_config import config_to_hf
from podrl.runtime.storage import Place, absolute
from podrl.types import PyTree

_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")
_FOLDERS = ("", "params", "default", "state")
_LISTED = 8


def find_checkpoint(directory: Place) -> Place | None:
    """The Orbax checkpoint in a model directory (itself, or params/, default/, state/ in it); None if there is none."""
    for name in _FOLDERS:
        folder = directory / name
        if any((folder / mark).is_file() for mark in _MARKS) and (folder / _MARKS[0]).is_file():
            return folder
    return None


def load(folder: Place, config: ModelConfig, mesh: Mesh, dtype: jax.typing.DTypeLike) -> PyTree:
    """The parameters of a checkpoint on `mesh`, cast to `dtype`; each process reads what its devices hold.

    Args:
      folder: a checkpoint of the tree of `podrl.models.decoder.param_specs`, alone or under one key 'params', of any
        floating dtype and any mesh.
      config: the dense model.

    Raises:
      ValueError: a checkpoint that cannot be read; leaves that are missing, unknown or of the wrong shape (all listed).
    """
    specs = param_specs(config)
    with ocp.PyTreeCheckpointer() as reader:
        stored, wrapped = _stored(reader, folder)
        _check(stored, specs, config, folder)

        def argument(spec: Param) -> ocp.ArrayRestoreArgs:
            place = rules.sharding_for(spec.axes, spec.shape, mesh)
            return ocp.ArrayRestoreArgs(sharding=place, global_shape=spec.shape, dtype=jnp.dtype(dtype))

        def shape(spec: Param) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype))

        wrap = (lambda tree: {"params": tree}) if wrapped else (lambda tree: tree)
        try:
            tree = reader.restore(
                absolute(folder),
                args=ocp.args.PyTreeRestore(
                    item=wrap(jax.tree.map(shape, specs, is_leaf=is_param)),  # pyright: ignore[reportCallIssue]
                    restore_args=wrap(jax.tree.map(argument, specs, is_leaf=is_param)),  # pyright: ignore[reportCallIssue]
                    partial_restore=True,  # pyright: ignore[reportCallIssue]
                ),
            )
        except Exception as error:
            raise ValueError(f"The Orbax checkpoint {folder} cannot be read: {str(error).splitlines()[0]}") from error
    return tree["params"] if wrapped else tree


def save(directory: str | pathlib.Path, config: ModelConfig, params: PyTree) -> None:
    """Writes a dense model as config.json and params/, an Orbax checkpoint; every process of the mesh calls it.

    Raises:
      ValueError: the directory holds something already, or the model has adapters.
    """
    directory = pathlib.Path(directory).absolute()
    if config.lora.rank:
        raise ValueError(
            "Adapters are not part of an Orbax model directory: merge them first (podrl.models.lora.merge)."
        )
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: give a directory that does not exist yet.")
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(directory / "params", args=ocp.args.PyTreeSave(params))  # pyright: ignore[reportCallIssue]
    if jax.process_index() == 0:
        (directory / "config.json").write_text(json.dumps(config_to_hf(config), indent=2))


def _stored(reader: ocp.PyTreeCheckpointer, folder: Place) -> tuple[dict[tuple[str, ...], Any], bool]:
    """(shape and dtype of every leaf by path, whether the tree is under one key 'params')."""
    try:
        found: Any = reader.metadata(absolute(folder))
        tree: Any = getattr(getattr(found, "item_metadata", found), "tree", getattr(found, "tree", found))
    except Exception as error:
        raise ValueError(f"The Orbax checkpoint {folder} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, Mapping) or not tree:
        raise ValueError(f"The Orbax checkpoint {folder} cannot be read: it lists no arrays.")
    wrapped = set(tree) == {"params"}
    tree = tree["params"] if wrapped else tree
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in leaves}, wrapped


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
