"""Losses and advantages of one's own: functions found by name, with their numbers as keys of the configuration."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrl.config import nearest
from podrl.workers.user_objects import explain_load, load_function, spec_at

# What a function may ask for by keyword, beside its own numbers.
OF_A_LOSS = ("mask_BT", "length_BT", "segment_BT")
OF_AN_ADVANTAGE = ("length_PG",)
# The setting that names a function, and the group that holds its numbers.
ARGUMENTS = {"policy_loss_fn": "policy_loss_args", "advantage_estimator": "advantage_args"}


def found(value: str | Callable[..., Any], key: str) -> Callable[..., Any]:
    """The function that a setting names; `key` is that of the configuration.

    Raises:
      ValueError: there is none.
    """
    if callable(value):
        return value
    place, _, name = value.rpartition(":")
    try:
        spec = spec_at(place, name)
        return load_function(spec)
    except Exception as error:  # noqa: BLE001 - a user's file may raise anything while it is loaded
        raise ValueError(f"{key}={value!r}: {explain_load(error, place)}") from None


def numbers(function: Callable[..., object], key: str, given: tuple[str, ...]) -> dict[str, object]:
    """The function's own numbers with their defaults: keyword-only parameters that are not among `given`.

    Raises:
      ValueError: a keyword-only parameter that has no number as default.
    """
    own: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY or name in given:
            continue
        if isinstance(parameter.default, bool) or not isinstance(parameter.default, int | float):
            raise ValueError(
                f"{key}: the keyword {name!r} of {_name(function)} must have a number as default, or be one of "
                f"{', '.join(given)}."
            )
        own[name] = parameter.default
    return own


def completed(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The groups of numbers of the functions that a section's settings name: their defaults, then what is given."""
    groups = {}
    for name, group in ARGUMENTS.items():
        value = settings.get(name)
        if callable(value) or (isinstance(value, str) and ":" in value):
            of = OF_A_LOSS if group == "policy_loss_args" else OF_AN_ADVANTAGE
            key = f"{section}.{name}"
            groups[group] = {**numbers(found(value, key), key, of), **(settings.get(group) or {})}
    return groups


def bound(value: Any, arguments: Mapping[str, Any], key: str, given: tuple[str, ...]) -> Callable[..., Any]:
    """The function that a setting names, its own numbers bound to those of the configuration.

    It takes all of `given` by keyword, and passes on those that the function asks for.

    Raises:
      ValueError: no such function, or a number that it does not have; names the group of its keys.
    """
    function = found(value, key)
    own = numbers(function, key, given)
    group = f"{key.rpartition('.')[0]}.{ARGUMENTS[key.rpartition('.')[2]]}"
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{group}={arguments!r} must be a group of numbers, by the names of the function's keywords.")
    for name, number in arguments.items():
        if name not in own:
            raise ValueError(f"{group} has no key {name!r}, as {_name(function)} has none.{nearest(name, own)}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{group}.{name}={number!r} must be a number.")
    asked = [name for name in given if name in inspect.signature(function).parameters]

    @functools.wraps(function)
    def call(*arrays: Any, **context: Any) -> Any:
        return function(*arrays, **{name: context[name] for name in asked}, **{**own, **arguments})

    return call


def loss(value: object, arguments: Mapping[str, object], key: str) -> Callable[..., object]:
    """A token loss of the user, ready for a PolicyLoss, and tried once on shapes.

    `function(logprob_BT, old_logprob_BT, advantage_BT, *, numbers...)` returns the loss of every token, finite wherever
    its inputs are; what it returns where the mask is 0 plays no part. It may ask for `mask_BT`, `length_BT` (loss
    tokens of the token's sample) and `segment_BT` (the sample's number in the row) by keyword. KL, entropy, corrections
    and the aggregation are added as to any other loss.

    Raises:
      ValueError: no such function, or it fails on arrays.
    """
    call = bound(value, arguments, key, OF_A_LOSS)
    block = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    context = {"mask_BT": block, "length_BT": block, "segment_BT": jax.ShapeDtypeStruct((2, 3), jnp.int32)}
    try:
        made = jax.eval_shape(lambda arrays, context: call(*arrays, **context), [block] * 3, context)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise ValueError(f"{key}: {_name(call)} fails on arrays of shape (2, 3): {_where(error, call)}") from None
    if getattr(made, "shape", None) != (2, 3) or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(
            f"{key}: {_name(call)} returns {made} for arrays of shape (2, 3): it must return the loss of every token, "
            "floats of the same shape."
        )
    return call


def advantage(value: object, arguments: Mapping[str, object], key: str) -> Callable[..., object]:
    """An advantage estimator of the user, ready for an AdvantageEstimator.

    `function(reward_PG, *, numbers...)` takes the rewards of P prompts with G samples each and returns the advantages
    in the same shape; every sampled token of a sample gets its advantage. It may ask for `length_PG`, the number of
    tokens that were sampled.

    Raises:
      ValueError: no such function, or it fails on arrays.
    """
    call = bound(value, arguments, key, OF_AN_ADVANTAGE)
    try:
        made = np.asarray(call(np.array([[0.0, 1.0], [2.0, 2.0]]), length_PG=np.array([[1, 2], [3, 1]])))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise ValueError(f"{key}: {_name(call)} fails on rewards of shape (2, 2): {_where(error, call)}") from None
    if made.shape != (2, 2):
        raise ValueError(
            f"{key}: {_name(call)} returns shape {made.shape} for rewards of shape (2, 2): it must return the "
            "advantage of every sample."
        )
    return call


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _where(error: BaseException, call: Callable[..., object]) -> str:
    """Describes an error with the line of the user's file."""
    return explain_load(error, inspect.getsourcefile(inspect.unwrap(call)) or "")
