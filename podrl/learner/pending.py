"""Batches in flight as plain arrays and JSON, so that a checkpoint can hold them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrl.types import Experience, Prompts, Rollouts


def dump(experiences: Sequence[Experience]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """(JSON-able part of each batch, all arrays keyed by batch and field)."""
    host, arrays = [], {}
    for i, experience in enumerate(experiences):
        record: dict[str, Any] = {}
        for group, part in _parts(experience).items():
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if isinstance(value, np.ndarray):
                    arrays[f"{i}.{group}.{field.name}"] = value
                elif isinstance(value, bytes):
                    record[f"{group}.{field.name}"] = value.decode()
                elif not dataclasses.is_dataclass(value):
                    record[f"{group}.{field.name}"] = _plain(value)
        host.append(record)
    return host, arrays


def load(host: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Experience]:
    """Inverse of `dump`."""
    experiences = []
    for i, record in enumerate(host):

        def read(cls: type, group: str, i: int = i, record: Mapping[str, Any] = record, **nested: Any) -> Any:
            values = dict(nested)
            for field in dataclasses.fields(cls):
                key = f"{group}.{field.name}"
                if f"{i}.{key}" in arrays:
                    values[field.name] = arrays[f"{i}.{key}"]
                elif key in record:
                    values[field.name] = record[key]
            return cls(**values)

        prompts = read(Prompts, "prompts")
        prompts = dataclasses.replace(prompts, data_state=str(prompts.data_state).encode())
        experiences.append(read(Experience, "experience", rollouts=read(Rollouts, "rollouts", prompts=prompts)))
    return experiences


def _parts(experience: Experience) -> dict[str, Any]:
    return {"experience": experience, "rollouts": experience.rollouts, "prompts": experience.rollouts.prompts}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value
