"""Reads and writes adapters in PEFT's directory layout."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podrl.models.config import (
    ATTENTION_PROJECTIONS,
    EXPERT_PROJECTIONS,
    MODULE_PROJECTIONS,
    PROJECTIONS,
    LoraConfig,
    ModelConfig,
)
from podrl.models.hf_load import load_entries, single_device_mesh
from podrl.models.hf_names import Entry, entries, expert_module, module_of
from podrl.models.hf_save import finished_directory, is_writer, write_entries
from podrl.models.lora import matches_nothing
from podrl.models.parameters import as_layers, is_adapter, stacks_of
from podrl.models.tensor_files import scan_file
from podrl.storage.regular import load_object
from podrl.types import PyTree

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

# PEFT's fields that change what an adapter computes, each with the values that podrl computes.
_FIXED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "alora_invocation_tokens": (None,),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "layers_pattern": (None, [], ""),
    "layer_replication": (None,),
    "exclude_modules": (None, [], ""),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None,),
}

# PEFT's names of the parameters of all experts in `transformers`; Gemma 4's names are the ends of these names.
_PARAMETERS = {name: f"mlp.experts.{parameter}" for name, parameter in EXPERT_PROJECTIONS.items()}


def adapter_entries(config: ModelConfig) -> list[Entry]:
    """Returns the entries of a model's adapters.

    Raises:
      ValueError: the model has no adapters.
    """
    if not (found := entries(config, adapters=True)):
        raise ValueError("This model has no adapters to save: model.lora.rank is 0. Save the whole model instead.")
    return found


def save_adapters(
    directory: str | pathlib.Path,
    config: ModelConfig,
    params: PyTree,
    *,
    base: str,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> None:
    """Writes the adapters of a model so that `peft` loads them on top of the base model.

    Args:
      directory: directory to write, which must be empty or not exist.
      config, params: configuration and parameters of a model with adapters; leaves other than adapters are not read.
      base: path or name of the base model, for the field of adapter_config.json from which PEFT loads it.
      dtype: type of the written matrices.

    Raises:
      ValueError: the model has no adapters, or adapters that PEFT cannot load; or the directory is not empty.
    """
    wanted = adapter_entries(config)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": config.lora.dropout,
        "target_modules": _modules(config),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }
    if parameters := [p for n, p in EXPERT_PROJECTIONS.items() if config.lora.covers(n) and config.experts]:
        raw["target_parameters"] = [f"{expert_module(config)}.{parameter}" for parameter in parameters]
    with finished_directory(directory, writes=is_writer(params)) as partial:
        write_entries(partial, wanted, params, np.dtype(dtype), single_name=WEIGHTS_NAME)
        if partial is not None:
            (partial / CONFIG_NAME).write_text(json.dumps(raw, indent=2) + "\n")


def _modules(config: ModelConfig) -> list[str]:
    """Lists the modules with adapters as PEFT's `target_modules`.

    Raises:
      ValueError: adapters lie on the dense feed-forwards that some layers have in place of experts. PEFT 0.21 takes the
        names of their modules for names of experts, and leaves these adapters out without an error.
    """
    covered = [n for n in MODULE_PROJECTIONS if any(n in a.projections and a.lora.covers(n) for a in config.alike())]
    dense = [name for name in covered if name in PROJECTIONS and name not in ATTENTION_PROJECTIONS]
    if config.experts is not None and not config.experts.beside_dense and dense:
        raise ValueError(
            f"model.lora.pattern={config.lora.pattern!r} puts adapters on {', '.join(dense)} in the dense layers of a "
            f"{config.family} model, which PEFT cannot load beside experts: export the merged model instead, or train "
            "with a pattern of q, k, v, o, expert_in and expert_out."
        )
    return [module_of(name).split(".")[-1] for name in covered]


def read_lora_config(directory: str | pathlib.Path) -> LoraConfig:
    """Reads the LoraConfig of a PEFT directory.

    Raises:
      ValueError: there is no adapter_config.json, or a field has an invalid value or an effect that podrl does not
        compute (the message names the field).
    """
    path = pathlib.Path(directory) / CONFIG_NAME
    if not path.exists():
        raise ValueError(f"{directory} has no {CONFIG_NAME}: give a directory written by PEFT or podrl.export.")
    raw = load_object(path)
    for key, allowed in _FIXED.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"{path} has {key}={raw[key]!r}, which podrl does not compute: it must be {allowed[0]!r}.")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path} has r={rank!r}: it must be a whole number above 0.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e30:
        raise ValueError(f"{path} has lora_alpha={alpha!r}: it must be a finite number.")
    targets = raw.get("target_modules")
    covered = [p for p in MODULE_PROJECTIONS if _targeted(p, targets)]
    parameters = raw.get("target_parameters") or []
    experts = [n for n, place in _PARAMETERS.items() if any(f".{place}".endswith(f".{t}") for t in parameters)]
    unknown = [t for t in parameters if not any(f".{place}".endswith(f".{t}") for place in _PARAMETERS.values())]
    if unknown:
        known = ", ".join(_PARAMETERS.values())
        raise ValueError(f"{path} has target_parameters={unknown}, which podrl does not compute: only {known}.")
    covered += experts
    if not covered:
        raise ValueError(
            f"{path} has target_modules={targets!r} and target_parameters={parameters!r}, which match none of podrl's "
            "projections."
        )
    return LoraConfig(
        rank=rank,
        alpha=float(alpha),
        dropout=float(raw.get("lora_dropout") or 0.0),
        pattern="|".join(covered),
    )


def _targeted(projection: str, targets: Any) -> bool:
    """Returns True if PEFT's `target_modules` match a projection of a text model, or of a model with several towers."""
    paths = [f"{above}.layers.0.{module_of(projection)}" for above in ("model", "model.language_model")]
    if isinstance(targets, str):
        return targets == "all-linear" or any(re.fullmatch(targets, path) for path in paths)
    return any(f".{path}".endswith(f".{target}") for target in targets or () for path in paths)


def load_adapters(
    directory: str | pathlib.Path,
    config: ModelConfig,
    params: PyTree,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[ModelConfig, PyTree]:
    """Loads the adapters of a PEFT directory into a tree with base weights.

    Args:
      directory: directory written by PEFT or podrl.export.
      config, params: configuration and parameters of the base model; its arrays are shared, not copied.
      mesh: devices that hold the adapters; None for the first device.
      dtype: storage type of the adapters.

    Returns:
      The configuration with adapters, and the parameter tree with adapters.

    Raises:
      ValueError: see `read_lora_config`; also, there is no adapter_model.safetensors; the adapters match no projection
        of the model; or tensors are missing, unknown, of another shape than the base model needs, not floating
        point, or hold NaN or infinity.
    """
    directory = pathlib.Path(directory)
    lora = read_lora_config(directory)
    weights = directory / WEIGHTS_NAME
    if not weights.exists():
        raise ValueError(f"{directory} has no {WEIGHTS_NAME}: give a directory written by PEFT or podrl.export.")
    config = dataclasses.replace(config, lora=lora)
    mesh = single_device_mesh() if mesh is None else mesh
    if not (wanted := entries(config, adapters=True)):
        raise matches_nothing(config)
    read = load_entries(wanted, scan_file(weights), config, mesh, dtype, where=str(directory))
    found = {kind.name: {} for kind in config.kinds} | read["layers"]  # layers of some kinds may have no adapters
    both = zip(stacks_of(params["layers"], config), stacks_of(found, config), strict=True)
    layers = [{k: v for k, v in base.items() if not is_adapter(k)} | adapters for base, adapters in both]
    return config, {**params, "layers": as_layers(layers, config)}
