"""Loads a Hugging Face checkpoint onto device shards, one tensor at a time."""

import collections
import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from podrl.mesh import build, rules
from podrl.models import lora, mxfp4, orbax_files
from podrl.models.config import INTEGER_PROJECTIONS, LoraConfig, ModelConfig
from podrl.models.finite import refuse_nonfinite
from podrl.models.hf_config import read_config
from podrl.models.hf_names import Entry, entries, to_leaf
from podrl.models.quantize import quantized_leaves
from podrl.models.tensor_files import StoredTensor, scan_directory
from podrl.storage.storage import locate
from podrl.types import JaxDevice, PyTree

_FREQUENCIES = re.compile(r".*rotary_emb\.inv_freq")  # rotary frequencies: podrl computes them, and does not read them
# Parts of a model other than its text decoder: towers of images and sound, and layers that predict further tokens.
_OTHER_PARTS = re.compile(
    r"(mtp|(?:model\.)?(?:visual|vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio))\..*"
)
# Prefixes of the text decoder's tensors in checkpoints that also hold other towers, each with the prefix that the
# tensors have in a checkpoint of the decoder alone.
_TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
_PEFT_PREFIX = "base_model.model."  # prefix that PEFT adds to the model's own names of tensors
# A tensor that holds the matrices of all experts of a layer; gate and up are stacked in one tensor.
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_LISTED = 8
_log = logging.getLogger("podrl.models")


def load(
    directory: str | os.PathLike,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    lora_config: LoraConfig | None = None,
    *,
    seed: int = 0,
) -> tuple[ModelConfig, PyTree]:
    """Loads a checkpoint directory directly onto the shards of `mesh`.

    Of a local file each process reads only the parts that its devices hold; of a file in a bucket it reads whole
    tensors. Tensors are read one after another, so host memory holds one tensor at a time.

    Args:
      directory: directory, local or gs://, with config.json and safetensors weights of any floating dtype, or with an
        Orbax checkpoint of podrl's parameter tree instead of the weights (podrl/models/orbax_files.py).
      mesh: devices that hold the parameters; None for the first device.
      dtype: storage type of the parameters on the devices.
      lora_config: settings of fresh adapters to add, which do not change the outputs yet; None for no adapters.
      seed: seed of the adapters' random values.

    Returns:
      The configuration, adapters included, and the parameter tree.

    Raises:
      ValueError: the configuration is not supported; a file is missing or damaged; tensors are missing, unknown, of the
        wrong shape or not floating point (the message counts them and names the first eight of each kind), or hold NaN
        or infinity.
    """
    directory = locate(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{str(directory)!r} is not a directory: give a Hugging Face directory, or ORG/NAME of the hub."
        )
    config = read_config(directory)
    mesh = single_device_mesh() if mesh is None else mesh
    adapted = dataclasses.replace(config, lora=lora_config or LoraConfig())
    if (checkpoint := orbax_files.find_checkpoint(directory)) is not None:
        params = orbax_files.load(checkpoint, adapted, mesh, dtype)
    else:
        stored = mxfp4.joined(scan_directory(directory))
        if any(isinstance(tensor, mxfp4.PackedTensor) for tensor in stored.values()):
            _log.info(
                "%s holds weights in MXFP4. They are read exactly, as bfloat16. A model saved from them holds plain "
                "weights, and its config.json has no quantization_config.",
                directory,
            )
        params = load_entries(entries(config), stored, adapted, mesh, dtype, where=str(directory))
    if lora_config is None or not lora_config.rank:
        return config, params
    return lora.with_adapters(config, params, lora_config, mesh, dtype, seed=seed)


def single_device_mesh() -> Mesh:
    """Builds a mesh of this process's first device."""
    return build.make_mesh("data=1", jax.local_devices()[:1])


def load_entries(
    wanted: Sequence[Entry],
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    mesh: Mesh,
    dtype: jax.typing.DTypeLike,
    *,
    where: str,
) -> dict[str, PyTree]:
    """Loads the leaves of `wanted` from stored tensors as a parameter tree.

    Args:
      wanted: leaves to load.
      stored: tensors of the checkpoint by name.
      config: the model, whose `lora.base_dtype` is the storage type of projections.
      mesh: devices that hold the parameters.
      dtype: storage type of all other parameters.
      where: name of the directory in messages.

    Raises:
      ValueError: tensors are missing, unknown, of the wrong shape or not floating point, or hold NaN or infinity.
    """
    found = _match(wanted, stored, config, where)
    params: dict[str, PyTree] = {}
    staging = _Staging(max(found[name].stop - found[name].start for entry in wanted for name in entry.names()))
    for entry in wanted:
        node = params
        for key in entry.leaf[:-1]:
            node = node.setdefault(key, {})
        name = entry.leaf[-1]
        node[name] = _load_leaf(entry, [found[n] for n in entry.names()], mesh, entry.param.dtype_in(dtype), staging)
        refuse_nonfinite(node[name], entry.names(), where)
        if config.lora.base_dtype and name in INTEGER_PROJECTIONS:
            node |= quantized_leaves(entry.leaf, node[name], config, mesh)
    return params


def _match(
    wanted: Sequence[Entry], stored: Mapping[str, StoredTensor], config: ModelConfig, where: str
) -> dict[str, StoredTensor]:
    """Maps the tensor names of `wanted` to stored tensors; refuses missing, unknown and wrongly shaped tensors."""
    other = {name: part for name in stored if (part := _other_part(name, config))}
    if other:
        counts = collections.Counter(other.values())
        _log.info(
            "%s holds %d tensors of parts that podrl does not compute (images, sound, predictions of several tokens at "
            "once, or keys and values in layers that reuse those of another layer). They are skipped: %s.",
            where,
            len(other),
            ", ".join(f"{count} of {part}" for part, count in counts.items()),
        )
    named = {
        _plain_name(name): tensor
        for name, tensor in stored.items()
        if name not in other and not _FREQUENCIES.fullmatch(name)
    }
    shapes = {name: entry.stored_shape for entry in wanted for name in entry.names()}
    named = {part.name: part for name, tensor in named.items() for part in _experts_apart(name, tensor, shapes)}
    if config.tie_embeddings:
        named.pop("lm_head.weight", None)
    missing = [name for name in shapes if name not in named]
    extra = [name for name in named if name not in shapes]
    wrong = [
        f"{name} is {named[name].shape} but must be {shape}"
        for name, shape in shapes.items()
        if name in named and named[name].shape != shape
    ]
    problems = [
        f"{len(found)} tensors {text}: {_listing(found)}"
        for text, found in (("are missing", missing), ("are unknown", extra), ("have the wrong shape", wrong))
        if found
    ]
    if problems:
        raise ValueError(
            f"The weights in {where} do not fit their configuration ({config.family}, {config.num_layers} layers). "
            + " ".join(problems)
        )
    for name in shapes:
        named[name].dtype  # noqa: B018 - raises for a dtype that cannot be weights
    return named


def _experts_apart(name: str, tensor: StoredTensor, wanted: Container[str]) -> list[StoredTensor]:
    """Splits a tensor with the matrices of all experts, as in Qwen 3.5's files, into one tensor for each matrix."""
    match = _FUSED.fullmatch(name)
    if match is None or name in wanted or len(tensor.shape) != 3:
        return [dataclasses.replace(tensor, name=name)]
    names = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    each = [f"{match[1]}.{e}.{part}.weight" for e in range(tensor.shape[0]) for part in names]
    return tensor.split(each, (tensor.shape[1] // len(names), tensor.shape[2]))


def _other_part(name: str, config: ModelConfig) -> str:
    """Returns the name of the part that a tensor belongs to; '' if this part is the text decoder.

    Files of GLM 4.5 hold further layers after the decoder's last layer, which predict several tokens at once. Files of
    small Gemma 4 models may hold unused key and value projections in layers that reuse the keys and values of others.
    """
    if match := _OTHER_PARTS.fullmatch(name):
        return match[1]
    layer = re.match(r"model\.layers\.(\d+)\.(?:(self_attn\.[kv]_(?:proj|norm))\.)?", _plain_name(name))
    if layer is not None and layer[2] and config.lenders and int(layer[1]) < config.num_layers:
        return layer[2] if config.kinds[config.kind_L[int(layer[1])]].keys_of >= 0 else ""
    behind = config.family == "glm4_moe" and layer is not None and int(layer[1]) >= config.num_layers
    return f"model.layers.{layer[1]}" if behind and layer is not None else ""


def _plain_name(name: str) -> str:
    if name.startswith(_PEFT_PREFIX):
        return _PEFT_PREFIX + _plain_name(name.removeprefix(_PEFT_PREFIX))
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f", and {len(names) - _LISTED} more." if len(names) > _LISTED else ".")


def _load_leaf(
    entry: Entry, tensors: Sequence[StoredTensor], mesh: Mesh, dtype: np.dtype, staging: "_Staging"
) -> Array:
    """Reads a leaf's tensors one after another into its (stacked) device array.

    Each tensor must be on the devices before the next one is read, because all use the same host memory (`staging`).
    """
    target = rules.sharding_for(entry.param.axes, entry.param.shape, mesh)
    raw_sharding = _stored_sharding(entry, target)
    if not entry.stacked:
        place = _place_whole(entry.shape, entry.order, dtype, target)
        return jax.block_until_ready(place(_to_devices(tensors[0], raw_sharding, staging)))
    stack = _zeros(entry.param.shape, dtype, target)()
    place = _place_part(entry.shape, entry.stacked, entry.order, entry.sections, target)
    for index, tensor in zip(entry.places().values(), tensors, strict=True):
        raw = _to_devices(tensor, raw_sharding, staging)
        stack = jax.block_until_ready(place(stack, raw, np.asarray(index, np.int32)))
    return stack


class _Staging:
    """Host memory for one tensor, reused for every tensor.

    With a new buffer for each tensor, several buffers would exist at a time, because the runtime frees them late.
    """

    def __init__(self, nbytes: int):
        self._memory = np.empty(nbytes, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Marks the whole memory as free; arrays that were taken from it must no longer be read."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialised array in the free part of the memory."""
        start, self._used = self._used, self._used + math.prod(shape) * dtype.itemsize
        assert self._used <= self._memory.nbytes, (shape, dtype, self._used, self._memory.nbytes)
        return self._memory[start : self._used].view(dtype).reshape(shape)


def _stored_sharding(entry: Entry, target: NamedSharding) -> NamedSharding:
    """Derives the sharding of a stored tensor from its leaf's sharding, so that devices read only their final part.

    A dimension of the stored tensor without a counterpart in the leaf is not cut: every device reads all of it.
    """
    axes = list(target.spec) + [None] * (len(entry.param.shape) - len(target.spec))
    axes = entry.unstacked(axes)
    if entry.alternating:
        axes = [axes[0], *axes[2:]]
    elif entry.inputs:
        axes = [axes[dim] for dim in entry.order]
        if entry.sections:
            axes[0] = None  # the file stores a head in several places, so a device's heads are no slice of it
        cuts = (1, -1) if entry.whole else (-entry.inputs,)
        axes = [_merged(axes[a:b]) for a, b in zip((None, *cuts), (*cuts, None), strict=True)]
    elif entry.sections:
        axes = []
    elif len(entry.stored_shape) < len(axes):
        axes = [_merged(axes)]
    return NamedSharding(target.mesh, Spec(*axes))


def _merged(axes: Sequence[Any]) -> Any:
    """Returns the mesh axes of several dimensions that are flattened into one: the axes of the first dimension; None if
    a later dimension is cut."""
    return axes[0] if axes and all(a is None for a in axes[1:]) else None


def _to_devices(tensor: StoredTensor, sharding: NamedSharding, staging: "_Staging") -> Array:
    """Copies a tensor's shards to this process's devices; reads each part once, however many devices hold it."""
    parts: dict[tuple, list[JaxDevice]] = {}
    for device, index in sharding.addressable_devices_indices_map(tensor.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), tensor.shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    shards = []
    staging.clear()
    dtype = np.dtype(np.float32) if tensor.dtype == np.float64 else tensor.dtype  # devices have no float64
    for bounds, devices in parts.items():
        part = staging.take(tuple(stop - start for start, stop in bounds), dtype)
        tensor.read_into(part, tuple(slice(*b) for b in bounds))
        shards += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, shards, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: np.dtype, target: NamedSharding):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=target)


@functools.lru_cache(maxsize=64)
def _place_whole(shape: tuple[int, ...], order: tuple[int, ...], dtype: np.dtype, target: NamedSharding):
    return jax.jit(
        # Without the copy jax may return the input itself, whose memory can be the host's staging memory.
        lambda raw: jnp.copy(to_leaf(raw, shape, order, ())).astype(dtype),
        out_shardings=target,
    )


@functools.lru_cache(maxsize=64)
def _place_part(
    shape: tuple[int, ...],
    stacked: tuple[int, ...],
    order: tuple[int, ...],
    sections: tuple[int, ...],
    target: NamedSharding,
):
    def place(stack: Array, raw: Array, index: Array) -> Array:
        value = to_leaf(raw, shape, order, sections).astype(stack.dtype)
        start = [jnp.int32(0)] * stack.ndim
        for dim, at in zip(stacked, index, strict=True):
            start[dim] = at
        return jax.lax.dynamic_update_slice(stack, jnp.expand_dims(value, stacked), start)

    return jax.jit(place, donate_argnums=0, out_shardings=target)
