"""User-defined losses and advantages: loads functions by name, and makes their numbers keys of the configuration."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrl.algorithms.policy_loss import CONTEXT
from podrl.config import nearest
from podrl.mappings import ConfigValues
from podrl.workers.user_objects import explain_load, load_function, spec_at

# Arrays that an advantage function may take by keyword, besides its own numbers.
OF_AN_ADVANTAGE = ("length_PG",)
# The setting that names a function, and the group that holds its numbers.
ARGUMENTS = {"policy_loss_fn": "policy_loss_args", "advantage_estimator": "advantage_args"}


def found(value: str | Callable[..., Any], key: str) -> Callable[..., Any]:
    """Returns the function that a setting names; error messages name the config key `key`.

    Args:
      value: the function itself, or 'file.py:function'.
      key: config key of the setting.

    Raises:
      ValueError: there is no such function, or its file cannot be loaded.
    """
    if callable(value):
        return value
    place, _, name = value.rpartition(":")
    try:
        spec = spec_at(place, name)
        return load_function(spec)
    except Exception as error:  # noqa: BLE001 - a user's file may raise anything while it is loaded
        raise ValueError(f"{key}={value!r}: {explain_load(error, place)}") from None


def numbers(function: Callable[..., object], key: str, reserved: tuple[str, ...]) -> dict[str, object]:
    """Lists a function's own numbers with their defaults: its keyword-only parameters that are not in `reserved`.

    Args:
      function: function of the user's.
      key: config key of the setting, which error messages name.
      reserved: names of the arrays that podrl passes by keyword.

    Raises:
      ValueError: a keyword-only parameter has no default, or a default that is not a number.
    """
    own: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY or name in reserved:
            continue
        if isinstance(parameter.default, bool) or not isinstance(parameter.default, int | float):
            raise ValueError(
                f"{key}: the keyword {name!r} of {_name(function)} must have a number as default, or be one of "
                f"{', '.join(reserved)}."
            )
        own[name] = parameter.default
    return own


def completed(settings: ConfigValues, section: str) -> ConfigValues:
    """Returns the numbers of the user's functions that a section's settings name: the set values, else the defaults.

    Args:
      settings: settings of the section by name.
      section: name of the section, such as 'grpo'.

    Returns:
      A mapping from 'policy_loss_args' or 'advantage_args' to the numbers by name, for each user's function.
    """
    groups = {}
    for name, group in ARGUMENTS.items():
        value = settings.get(name)
        if callable(value) or (isinstance(value, str) and ":" in value):
            of = CONTEXT if group == "policy_loss_args" else OF_AN_ADVANTAGE
            key = f"{section}.{name}"
            groups[group] = {**numbers(found(value, key), key, of), **(settings.get(group) or {})}
    return groups


def bound(value: Any, arguments: Mapping[str, object], key: str, reserved: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the function that a setting names, with its own numbers bound to the configuration's numbers.

    The returned function takes every array of `reserved` by keyword, and passes on the arrays that the user's function
    takes.

    Args:
      value: the function itself, or 'file.py:function'.
      arguments: numbers of the configuration, by the function's keywords.
      key: config key of the setting, such as 'grpo.policy_loss_fn'.
      reserved: names of the arrays that podrl passes by keyword.

    Raises:
      ValueError: there is no such function; a keyword of the function has no number as default (`numbers`); or
        `arguments` is no mapping, or has a name that the function lacks or a value that is not a number.
    """
    function = found(value, key)
    own = numbers(function, key, reserved)
    group = f"{key.rpartition('.')[0]}.{ARGUMENTS[key.rpartition('.')[2]]}"
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{group}={arguments!r} must be a group of numbers, by the names of the function's keywords.")
    for name, number in arguments.items():
        if name not in own:
            raise ValueError(f"{group} has no key {name!r}, as {_name(function)} has none.{nearest(name, own)}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{group}.{name}={number!r} must be a number.")
    context_names = [name for name in reserved if name in inspect.signature(function).parameters]

    @functools.wraps(function)
    def call(*arrays: object, **context: object) -> object:
        return function(*arrays, **{name: context[name] for name in context_names}, **{**own, **arguments})

    return call


def loss(value: object, arguments: Mapping[str, object], key: str) -> Callable[..., object]:
    """Loads a user's token loss for a PolicyLoss, and tries it and its gradient on small arrays.

    `function(logprob_BT, old_logprob_BT, advantage_BT, *, numbers...)` returns the loss of every token, finite wherever
    its inputs are finite; its results where the mask is 0 are ignored. It may take `mask_BT`, `length_BT` (number of
    loss tokens of the token's sample) and `segment_BT` (number of the sample within its row) by keyword. KL, entropy,
    correction and aggregation are added as for every other loss.

    Args:
      value: the function itself, or 'file.py:function'.
      arguments: numbers of the configuration, by the function's keywords.
      key: config key of the setting, such as 'grpo.policy_loss_fn'.

    Raises:
      ValueError: there is no such function; it fails on arrays; it does not return a finite float for every token; or
        its gradient is not finite, is 0 everywhere, or has the wrong sign everywhere.
    """
    call = bound(value, arguments, key, CONTEXT)
    block = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    context = dict(zip(CONTEXT, (block, block, jax.ShapeDtypeStruct((2, 3), jnp.int32)), strict=True))
    try:
        result = jax.eval_shape(lambda arrays, context: call(*arrays, **context), [block] * 3, context)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        traced = isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError)
        if traced or _BRANCH in str(error):
            what = (
                "jax compiles the function, so its arrays have no values yet: use jnp.where instead of `if`, and "
                "jax.numpy instead of numpy"
            )
            error = TypeError(what).with_traceback(error.__traceback__)
        raise ValueError(f"{key}: {_name(call)} fails on arrays of shape (2, 3): {_where(error, call)}") from None
    if getattr(result, "shape", None) != (2, 3) or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(
            f"{key}: {_name(call)} returns {_described(result)} for arrays of shape (2, 3): it must return the loss of "
            "every token, floats of the same shape."
        )
    _try_numbers(call, key)
    return call


_BRANCH = "truth value of an array"  # words of numpy's and jax's errors about `if` on an array
# Tokens on which a user's loss is tried: log-probabilities now and under the old policy, and advantages.
_LOGPROB_BT = np.array([[-0.5, -1.25, -0.125], [-2.0, -0.75, -0.25]], np.float32)
_OLD_BT = _LOGPROB_BT + np.array([[0.0, 0.75, -0.125], [0.25, 0.0, -0.5]], np.float32)
_ADVANTAGE_BT = np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]], np.float32)


def _try_numbers(call: Callable[..., Any], key: str) -> None:
    """Refuses a token loss that is not finite, or whose gradient is not finite, all 0, or of the wrong sign everywhere.

    The loss is tried on two small batches. In the first, both policies are equal, as in an update on fresh samples.
    """
    mask_BT, segment_BT = jnp.ones((2, 3), jnp.float32), jnp.zeros((2, 3), jnp.int32)
    context = dict(zip(CONTEXT, (mask_BT, 3 * mask_BT, segment_BT), strict=True))

    def total(logprob_BT: jax.Array, old_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss_BT = call(logprob_BT, old_BT, jnp.asarray(_ADVANTAGE_BT), **context)
        return loss_BT.sum(), loss_BT

    moved, along, compute = False, True, jax.jit(jax.value_and_grad(total, has_aux=True))
    for old_BT in (_LOGPROB_BT, _OLD_BT):
        (_, loss_BT), gradient_BT = compute(_LOGPROB_BT, old_BT)
        for what, array in (("loss", np.asarray(loss_BT)), ("gradient", np.asarray(gradient_BT))):
            for b, t in np.argwhere(~np.isfinite(array))[:1]:
                raise ValueError(
                    f"{key}: the {what} of {_name(call)} is {array[b, t]} where logprob={_LOGPROB_BT[b, t]:g}, "
                    f"old_logprob={old_BT[b, t]:g} and advantage={_ADVANTAGE_BT[b, t]:g}: it must be finite wherever "
                    "its inputs are."
                )
        moved |= bool(np.any(gradient_BT))
        along &= bool(np.all((gradient_BT * _ADVANTAGE_BT)[_ADVANTAGE_BT != 0] > 0))
    if along:
        raise ValueError(
            f"{key}: a step down the gradient of {_name(call)} makes every token with a positive advantage less "
            "likely, and every token with a negative one more likely: turn its sign round."
        )
    if not moved:
        raise ValueError(
            f"{key}: the gradient of {_name(call)} with respect to logprob_BT is 0 at all {2 * mask_BT.size} tokens "
            "that it was tried on, with advantages of 1, -1 and 0: no update would change the weights. Does it read "
            "logprob_BT, outside jax.lax.stop_gradient?"
        )


def advantage(value: object, arguments: Mapping[str, object], key: str) -> Callable[..., object]:
    """Loads a user's advantage estimator for an AdvantageEstimator, and calls it once with rewards of shape (2, 2).

    `function(reward_PG, *, numbers...)` takes the rewards of P prompts with G samples each and returns advantages of
    the same shape; every sampled token of a sample has the sample's advantage. It may take `length_PG`, the number of
    sampled tokens of each sample, by keyword.

    Args:
      value: the function itself, or 'file.py:function'.
      arguments: numbers of the configuration, by the function's keywords.
      key: config key of the setting, such as 'grpo.advantage_estimator'.

    Raises:
      ValueError: there is no such function, or it fails on arrays, or returns another shape, NaN or infinity.
    """
    call = bound(value, arguments, key, OF_AN_ADVANTAGE)
    try:
        with np.errstate(all="ignore"):
            result = np.asarray(call(np.array([[0.0, 1.0], [2.0, 2.0]]), length_PG=np.array([[1, 2], [3, 1]])))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        if _BRANCH in str(error):
            error = TypeError("an array has no single truth value: use np.where instead of `if`").with_traceback(
                error.__traceback__
            )
        raise ValueError(f"{key}: {_name(call)} fails on rewards of shape (2, 2): {_where(error, call)}") from None
    if result.shape != (2, 2):
        raise ValueError(
            f"{key}: {_name(call)} returns shape {result.shape} for rewards of shape (2, 2): it must return the "
            "advantage of every sample."
        )
    if not np.isfinite(result.astype(float)).all():
        raise ValueError(
            f"{key}: {_name(call)} returns {result.tolist()} for the rewards [[0, 1], [2, 2]]: advantages must be "
            "finite. Where samples of a prompt have equal rewards, a divisor may be 0: add a small number to it."
        )
    return call


def _described(value: object) -> str:
    """Describes what a function returned: shape and type of an array, or the class of another value."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"shape {shape} of {dtype}"


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _where(error: BaseException, call: Callable[..., object]) -> str:
    """Describes an error with the line of the user's file that raised it."""
    return explain_load(error, inspect.getsourcefile(inspect.unwrap(call)) or "")
