"""Settings: frozen dataclasses with a type and a range for each field, and errors that name the wrong field."""

import ast
import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import inspect
import math
import numbers as abc
import pathlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from podrl import python_names
from podrl.mappings import ConfigValues

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., object])


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Suggests the known name closest to `name` (' Did you mean X?'); lists the known names if none is close."""
    known = sorted(known)
    return near(name, known) or f" Known: {', '.join(known)}."


def near(name: str, known: typing.Iterable[str]) -> str:
    """Suggests the known name closest to `name` (' Did you mean X?'); '' if none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" Did you mean {match[0]!r}?" if match else ""


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Returns a number with its noun: '1 record', '1,024 records'; `nouns` is an irregular plural, or ''."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def percent(share: float) -> str:
    """Writes a share (0 to 1) in percent, with enough digits that 0 % means exactly none and 100 % exactly all."""
    digits = 0
    while 0 < share < 1 and float(f"{100 * share:.{digits}f}") in (0, 100):
        digits += 1
    return f"{share:.{digits}%}"


def install(extra: str) -> str:
    """Returns the command that adds the packages of an extra, for a checkout or for an installed podrl."""
    root = pathlib.Path(__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        return f"pip install 'podrl[{extra}]'"
    return f"pip install -e '{'.' if root.samefile('.') else root}[{extra}]'"


# The job's key for a setting, by the names that other systems give this setting.
COMMON_NAMES = {
    "batch_size": "rollout.prompts_per_step",
    "train_batch_size": "rollout.prompts_per_step",
    "group_size": "grpo.num_generations",
    "num_samples": "grpo.num_generations",
    "kl_coef": "grpo.beta",
    "lr": "trainer.learning_rate",
    "steps": "trainer.max_steps",
    "num_steps": "trainer.max_steps",
    "max_new_tokens": "rollout.max_tokens_to_generate",
    "max_tokens": "rollout.max_tokens_to_generate",
    "max_completion_length": "rollout.max_tokens_to_generate",
    "model": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "lora_rank": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "r": "model.lora.rank",
    "target_modules": "model.lora.pattern",
    "learning_rate": "trainer.learning_rate",
    "lr_scheduler_type": "trainer.schedule",
    "warmup_ratio": "trainer.warmup_fraction",
    "adam_beta1": "trainer.b1",
    "adam_beta2": "trainer.b2",
    "adam_epsilon": "trainer.eps",
    "weight_decay": "trainer.weight_decay",
    "max_grad_norm": "trainer.max_grad_norm",
    "max_steps": "trainer.max_steps",
    "gradient_accumulation_steps": "trainer.gradient_accumulation_steps",
    "eval_steps": "trainer.eval_every_n_steps",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "num_iterations": "grpo.num_iterations",
}

_OF_GRPO = "in a job of the GRPO family use"

# What to use instead of settings of other systems for which no single key of podrl stands, by shell-style patterns of
# their names. A name is either here or in `COMMON_NAMES`.
COMMON_ADVICE = {
    "seed": "use --config.seed=N for random weights and sampling, and --config.data.seed=N for the order of the data.",
    "output_dir": "use --workdir=DIR (podrl.run(..., workdir=DIR)); the same command or script then resumes.",
    "report_to": "log.to names trackers, such as --config.log.to=\"('wandb',)\"; every run with a directory writes "
    "metrics.jsonl and TensorBoard events.",
    "per_device_*_batch_size": "a batch is rollout.prompts_per_step x grpo.num_generations samples (jobs on answers "
    "from data: batch_size of the algorithm's section). trainer.max_seq_token_per_tpu bounds the tokens that a device "
    "trains on at once, and rollout.lanes the samples that are decoded at once.",
    "generation_batch_size": "a batch is rollout.prompts_per_step x grpo.num_generations samples.",
    "num_train_epochs": "trainer.max_steps is the number of updates; in Python, an RLTrainingConfig without max_steps "
    "makes one pass over the records.",
    "warmup_steps": "trainer.warmup_fraction is the share of trainer.max_steps over which the learning rate rises.",
    "logging_steps": "metrics.jsonl has every step; log.console_every is the number of steps between printed lines.",
    "bf16": "trainer.dtype='bfloat16' computes in bfloat16, and trainer.param_dtype is the type of the weights.",
    "fp16": "podrl trains in float32 or bfloat16; trainer.dtype='bfloat16' computes in bfloat16.",
    "remove_unused_columns": "there is nothing to set; reward functions receive all fields of a record by name.",
    "gradient_checkpointing": "trainer.remat says what the backward pass recomputes: 'none', 'dots', 'full' or "
    "'offload'.",
    "steps_per_generation": "trainer.mini_batch_size is the number of prompts of an update, each with its samples.",
    "scale_rewards": f"{_OF_GRPO} grpo.advantage_scale='std' (TRL's 'group'), 'batch' or 'none'.",
    "mask_truncated_completions": f"{_OF_GRPO} grpo.overlong_filter.",
    "delta": f"{_OF_GRPO} grpo.epsilon_c.",
    "loss_type": f"{_OF_GRPO} grpo.loss_agg_mode and grpo.policy_loss_fn; docs/algorithms.md has both for each "
    "loss_type.",
    "importance_sampling_level": f"{_OF_GRPO} grpo.policy_loss_fn='gspo' for the ratio of a whole sequence.",
    "vllm_importance_sampling_mode": f"{_OF_GRPO} grpo.sampler_correction='tis', 'sequence_tis' or 'sequence_mask'.",
    "use_vllm": "podrl decodes with its own engine, on the mesh of the rollout role; there is nothing to set.",
    "vllm_*": "podrl decodes with its own engine; the settings of the engine are the keys of rollout.",
    "reward_weights": "use reward.weights (of a learner: reward_config=podrl.RewardConfig(weights=(...))).",
    "max_tool_calling_iterations": "use env.max_tool_calls, which counts calls, not rounds.",
    "resume_from_checkpoint": "the same command or script with the same --workdir resumes.",
}
# Names in `COMMON_ADVICE` for which False asks for something in the other system, so that podrl refuses False too.
_FALSE_ASKS = ("scale_rewards",)


def _pattern_advice(name: str, advice: Mapping[str, str]) -> str:
    """Returns the sentence in `advice` whose shell-style pattern fits `name`; '' if none fits."""
    return next((text for pattern, text in advice.items() if fnmatch.fnmatchcase(name, pattern)), "")


def unknown(name: str, known: typing.Collection[str], advice: Mapping[str, str]) -> str:
    """Writes the end of the error about the unknown `name`, after 'X has no key NAME': what to use instead.

    Args:
      name: name that the user gave.
      known: the names that are allowed in its place.
      advice: for each shell-style pattern of names of other systems, a sentence that says what to use instead;
        then `COMMON_ADVICE` and `COMMON_NAMES` are searched, and then the nearest known name is given.
    """
    if sentence := _pattern_advice(name, advice) or _pattern_advice(name, COMMON_ADVICE):
        return f": {sentence}"
    common = COMMON_NAMES.get(name, "")
    own = common.rpartition(".")[2]
    if common and own not in known:
        return f": podrl's name for it is {common}."
    return f".{nearest(own if own in known else name, known)}"


def elsewhere(name: str, group: Mapping[str, object], prefix: str = "") -> str:
    """Suggests the key that `COMMON_NAMES` gives for `name`, or else all dotted paths in `group` that end in the key
    `name`; '' if there is none."""
    common, paths = COMMON_NAMES.get(name, ""), _paths(group)
    places = [common] if common in paths else sorted(path for path in paths if path.rpartition(".")[2] == name)
    return f" Did you mean {' or '.join(repr(prefix + place) for place in places)}?" if places else ""


def _paths(group: Mapping[str, object], prefix: str = "") -> set[str]:
    """Returns the dotted paths of all keys of `group` and of the mappings inside it."""
    inside = (_paths(value, f"{prefix}{key}.") for key, value in group.items() if isinstance(value, Mapping))
    return {prefix + key for key in group}.union(*inside)


def _called(call: Callable[..., object], args: Sequence[object]) -> str:
    """Names a called function; a method gets the name of the class of its object, which may inherit the method."""
    name = call.__qualname__
    if args and "." in name and hasattr(type(args[0]), call.__name__):
        name = f"{type(args[0]).__name__}.{call.__name__}"
    return name.removesuffix(".__init__")


def known_arguments(call: Call) -> Call:
    """Decorates a function: an unknown keyword raises a TypeError that says what to use instead."""
    names = [name for name in inspect.signature(call).parameters if name != "self"]

    @functools.wraps(call)
    def checked(*args: object, **kwargs: object) -> object:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{_called(call, args)} has no argument {name!r}{unknown(name, names, {})}")
        return call(*args, **kwargs)

    return typing.cast(Call, checked)


def refused_arguments(ways: Mapping[str, str]) -> Callable[[Call], Call]:
    """Decorates a function: to pass an argument of another library raises a TypeError that names podrl's replacement.

    An argument of another library with the value None or False is ignored.

    Args:
      ways: for the name of each such argument, a sentence that says what to use instead.
    """

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def checked(*args: object, **kwargs: object) -> object:
            for name in [name for name in kwargs if name in ways]:
                # Not `value in (None, False)`, which fails on arrays.
                if (value := kwargs.pop(name)) is not None and value is not False:
                    raise TypeError(f"{_called(call, args)} has no argument {name!r}: {ways[name]}")
            return call(*args, **kwargs)

        return typing.cast(Call, checked)

    return decorate


class Elsewhere:
    """An attribute that another library's class has and podrl's class lacks; reading it raises an AttributeError."""

    def __init__(self, way: str):
        """Stores `way`, the sentence of the error that names the replacement."""
        self._way, self._name = way, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(f"{owner.__name__}.{self._name} does not exist in podrl: {self._way}")


class SavedByRun:
    """Base of classes that lack transformers' and TRL's methods to save a model, because a run saves the model."""

    _way = (
        "RLTrainingConfig(checkpoint_root_directory=RUN) saves the run, and `python -m podrl.export --workdir=RUN "
        "--out=DIR` writes a directory for transformers (--push=ORG/NAME for the hub)."
    )
    save_pretrained, save_model = Elsewhere(_way), Elsewhere(_way)
    save_checkpoint, push_to_hub = Elsewhere(_way), Elsewhere(_way)


def as_settings(cls: type[T], value: object, name: str) -> T:
    """Returns `value` if it is an instance of the settings `cls`, or makes an instance if it is a dict of fields.

    Args:
      cls: dataclass of settings.
      value: instance of `cls`, or a dict of its fields.
      name: name of the settings in error messages.

    Raises:
      ValueError: `value` is neither an instance nor a dict, or a field is unknown or has a value that is not allowed.
    """
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        return build(cls, value, name)
    raise ValueError(f"{name}={value!r:.80} must be a {cls.__name__}, or a dict of its fields.")


@contextlib.contextmanager
def named(key: str, value: object) -> Iterator[None]:
    """Puts a setting in front of the errors of a `with` block that uses it (ValueError, FileNotFoundError).

    An error that names the setting already stays as it is.
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if f"{key}=" in str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{key}={value!r}: {error}") from error


def require(fits: bool, name: str, value: object, kind: str) -> None:
    """Raises a ValueError unless `fits` is true; the error says that argument `name` is `value` and must be `kind`."""
    if not fits:
        raise ValueError(f"{name}={value!r:.80} must be {kind}.")


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a numeric setting, for `typing.Annotated`: an interval in mathematical notation, such as '[0, 1)'.

    Both ends are finite numbers; a bracket includes its end, a parenthesis excludes it.
    """

    text: str

    @functools.cached_property
    def _bounds(self) -> tuple[float, float]:
        low, _, high = self.text[1:-1].partition(",")
        assert self.text[0] in "[(" and self.text[-1] in "])" and math.isfinite(float(low) + float(high)), self.text
        return float(low), float(high)

    def __contains__(self, value: float) -> bool:
        low, high = self._bounds
        return (low <= value if self.text[0] == "[" else low < value) and (
            value <= high if self.text[-1] == "]" else value < high
        )

    def __str__(self) -> str:
        return self.text


Natural = Annotated[int, Range("[0, 2147483647]")]
Count = Annotated[int, Range("[1, 2147483647]")]
Devices = Annotated[int, Range("[0, 4096]")]
Seed = Annotated[int, Range("[0, 4294967295]")]
Workers = Annotated[int, Range("[1, 1024]")]
Share = Annotated[float, Range("[0, 1]")]
NonNegative = Annotated[float, Range("[0, 1e9]")]
Positive = Annotated[float, Range("(0, 1e9]")]
Finite = Annotated[float, Range("[-1e9, 1e9]")]


_FORMER: dict[str, str] = {}
_REFUSED: dict[str, str] = {}


def refused(path: str, *, of_others: bool = True) -> str:
    """Returns the sentence that names the replacement of a key, if podrl had this key once or another system has it.

    Args:
      path: the key's dotted path.
      of_others: False to leave out names of other systems (`COMMON_ADVICE`), for a path whose group does not exist.

    Returns:
      The sentence; '' for all other keys.
    """
    others = _pattern_advice(path.rpartition(".")[2], COMMON_ADVICE) if of_others else ""
    return _pattern_advice(path, _REFUSED) or others


def former(path: str) -> str:
    """Returns the sentence that names the replacement of a former key such as 'log.tensorboard'; '' for other keys."""
    return _FORMER.get(path, "")


def section(
    name: str, advice: Mapping[str, str] | None = None, *, former: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """Decorates a frozen dataclass of settings, so that every new instance is checked.

    A value of the wrong type, or a number outside its `Range`, raises a ValueError that names the key, the value and
    the allowed values. Unknown keywords raise a single ValueError, which names the replacement of each keyword or the
    most similar name. A field of another system is ignored if its value is None or False, which asks for nothing (see
    `_FALSE_ASKS`). Values are converted to the type of their field: a whole number to a float, a list to a tuple, a
    mapping to a dataclass.

    Args:
      name: group of the configuration that holds these settings, such as 'trainer'; '' for the whole configuration.
      advice: for each shell-style pattern of names of other systems' fields, a sentence that says what to use instead.
      former: for the name of each field that these settings had once, a sentence that says what to use instead. A
        former field is refused with any value.
    """

    def decorate(cls: type[T]) -> type[T]:
        original = cls.__init__
        signature = inspect.signature(original)
        own: Any = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        python_names.fields.setdefault(name, set()).update(field.name for field in own)

        @functools.wraps(original)
        def init(self, *args: object, **kwargs: object) -> None:
            try:
                checked(self, *args, **kwargs)
            except (ValueError, TypeError) as error:
                if python_names.from_outside():
                    python_names.reword(error, {name: type(self).__name__} if name else {})
                raise

        def checked(self, *args: object, **kwargs: object) -> None:
            hints = types_of(cls)
            kwargs = _fields_of(cls, kwargs)
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                lacks = [text for key, text in required(cls).items() if text and f"argument: {key!r}" in str(error)]
                about = "".join(f" {text}" for text in lacks)
                raise TypeError(f"{cls.__name__}: {error}.{about}") from None
            for key in [key for key in bound.arguments if key in hints]:
                bound.arguments[key] = check(bound.arguments[key], hints[key], f"{name}.{key}" if name else key)
            original(*bound.args, **bound.kwargs)

        cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
        cls.__section__ = name  # pyright: ignore[reportAttributeAccessIssue]
        _FORMER.update({f"{name}.{key}": sentence for key, sentence in (former or {}).items()})
        cls.__refused__ = {**(advice or {}), **(former or {})}  # pyright: ignore[reportAttributeAccessIssue]
        _REFUSED.update({f"{name}.{key}".lstrip("."): sentence for key, sentence in cls.__refused__.items()})  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def group_of(settings: Any) -> str:
    """Returns the configuration group of these settings: the `name` that their class passed to `section`."""
    return settings.__section__


@functools.cache
def types_of(cls: type) -> dict[str, object]:
    """Returns the types of a dataclass's fields with their ranges."""
    fields: object = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {f.name: hints[f.name] for f in fields if f.init}
    for name, hint in found.items():
        for leaf in _leaves(hint):
            assert leaf not in (int, float), f"{cls.__name__}.{name} is a number and has no Range"
            assert hasattr(leaf, "__section__") or not dataclasses.is_dataclass(leaf), (
                f"{cls.__name__}.{name}: no section"
            )
    return found


def hint_at(cls: type, path: Sequence[str]) -> object:
    """Returns the type of the field at a path of names below `cls`; None if there is no such field."""
    hint: object = cls
    for name in path:
        if not hasattr(hint, "__section__") or name not in types_of(hint):
            return None
        hint = types_of(hint)[name]
    return hint


def numbers(cls: type) -> dict[str, Range]:
    """Lists the numeric fields of a dataclass (numbers, tuples of numbers) with their ranges."""
    ranges = {name: [o for o in _leaves(hint) if _range_of(o)] for name, hint in types_of(cls).items()}
    return {name: typing.cast(Range, _range_of(found[0])) for name, found in ranges.items() if found}


def refusal(cls: type, key: str, names: typing.Collection[str], prefix: str = "") -> str:
    """Returns the sentence of the error for `key`, which is not a field of `cls`; `prefix` is the path of its group."""
    what = f"{prefix.removesuffix('.')} has no key {key!r}" if prefix else f"{cls.__name__} has no field {key}"
    return what + unknown(key, names, getattr(cls, "__refused__", {}))


def build(cls: type[T], values: Mapping[str, object], prefix: str = "config") -> T:
    """Makes a dataclass of settings (see `section`) from a mapping, with its nested settings.

    Args:
      cls: dataclass of settings.
      values: values of the fields, by name; mappings for nested settings.
      prefix: dotted path of `values` in the user's config, for messages about keys.

    Raises:
      ValueError: a key is unknown (the message suggests a known one), a required key is missing, or a value is not
        allowed.
    """
    values = _fields_of(cls, values, prefix=f"{prefix}.")
    needed = required(cls)
    if missing := [name for name in needed if name not in values]:
        about = "".join(f" {needed[name]}" for name in missing if needed[name])
        if "[" in prefix:
            raise ValueError(f"{prefix} lacks {', '.join(missing)}: set {missing[0]!r} there.{about}")
        raise ValueError(f"{prefix} lacks {', '.join(missing)}: set --{prefix}.{missing[0]}=VALUE.{about}")
    if "[" in prefix:  # for an item of a list, whose index the class would not name in its errors
        path = prefix.removeprefix("config.")
        values = {key: check(value, types_of(cls)[key], f"{path}.{key}") for key, value in values.items()}
    return cls(**values)


def required(cls: type) -> dict[str, str]:
    """Returns the fields without a default: for the name of each, the sentence that errors about a missing value add,
    which is the field's metadata 'if_missing', or ''."""
    fields: object = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    missing = [f for f in fields if f.init and f.default is f.default_factory is dataclasses.MISSING]
    return {f.name: f.metadata.get("if_missing", "") for f in missing}


def _fields_of(cls: type, values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns the values whose names are fields of `cls`.

    Raises:
      ValueError: `values` has other names. Fields of other systems are ignored if their value, None or False, asks for
        nothing.
    """
    hints, advice = types_of(cls), {**COMMON_ADVICE, **getattr(cls, "__refused__", {})}
    asking = [
        key
        for key, value in values.items()
        if key not in hints
        and not (
            (value is None or (value is False and key not in _FALSE_ASKS))
            and _pattern_advice(key, advice)
            and not former(f"{getattr(cls, '__section__', '')}.{key}")
        )
    ]
    if asking:
        raise ValueError("\n".join(refusal(cls, key, hints, prefix) for key in asking))
    return {key: value for key, value in values.items() if key in hints}


def defaults(cls: type) -> dict[str, Any]:
    """Returns a dataclass's defaults as nested plain mappings; fields without a default are left out.

    Nested settings without a default have the defaults of their own fields. A field whose default is None becomes a
    placeholder of its type, so that command-line overrides are converted to it.
    """
    from ml_collections import config_dict  # a slow import, which reward workers do not need

    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    value: Any
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if dataclasses.is_dataclass(hints[field.name]):
                values[field.name] = defaults(hints[field.name])
            continue
        value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # pyright: ignore[reportCallIssue]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values[field.name] = merge(defaults(type(value)), _without_none(dataclasses.asdict(value)))
        elif value is None:
            options = typing.get_args(hints[field.name])
            choices = [type(c) for t in options if typing.get_origin(t) is typing.Literal for c in typing.get_args(t)]
            kinds = [*options, *choices, *(tuple for t in options if typing.get_origin(t) is tuple)]
            simple = [t for t in kinds if t in (int, float, str, bool, tuple)]
            values[field.name] = config_dict.placeholder(simple[0]) if simple else None
        else:
            values[field.name] = value
    return values


def _without_none(values: Mapping[str, object]) -> dict[str, object]:
    """Removes values that are None, also from nested mappings."""
    present = {key: value for key, value in values.items() if value is not None}
    return {key: _without_none(value) if isinstance(value, Mapping) else value for key, value in present.items()}


def merge(base: ConfigValues, over: ConfigValues) -> dict[str, Any]:
    """Merges `over` into `base`: nested mappings are merged, and other values of `over` replace values of `base`."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def check(value: object, hint: object, key: str) -> Any:
    """Checks and converts `value` to type `hint`, such as `Count` or `Share | None`; `key` names it in messages.

    Raises:
      ValueError: `value` has another type, or is a number outside the range.
    """
    options = _options(hint)
    for option in options:
        ok, result = _try(value, option, key)
        if ok:
            return result
    raise ValueError(f"{key}={value!r} must be {_names(options)}.")


def check_text(text: str, hint: object, key: str) -> bool:
    """Checks the text of a command-line flag for a field of type `hint`.

    Returns:
      True if the text is 'none' and stands for None, in a field whose other values are numbers; else False.

    Raises:
      ValueError: the field takes only numbers, switches and named values, and the text is none of them; the message is
        the same as from `check`. Or the text begins like a list but is no list.
    """
    options = _options(hint)
    if type(None) in options and text.lower() == "none" and any(_range_of(option) is not None for option in options):
        return True
    for option in options:
        if option is type(None) and text.lower() == "none":
            return False
        if typing.get_origin(option) is typing.Literal and text in typing.get_args(option):
            return False
        if _range_of(option) is not None:
            try:
                typing.get_args(option)[0](text)
                return False
            except ValueError:
                continue
        if option is bool:
            if text.lower() in ("true", "t", "1", "false", "f", "0"):
                return False
            continue
        if typing.get_origin(option) is tuple and str not in options and text.startswith(("(", "[")):
            try:
                items = ast.literal_eval(text)
            except (SyntaxError, ValueError):
                raise ValueError(
                    f"{key}={text} is no list as Python writes it: close every bracket and quote, quote texts, and "
                    "separate items by commas."
                ) from None
            if isinstance(items, Mapping):
                raise ValueError(
                    f"{key}={text} is a single item, but the key holds a list: put a comma after it, as in ({{...}},)."
                )
        if option is not type(None) and typing.get_origin(option) is not typing.Literal:
            return False  # the parser of flags checks texts and tuples
    raise ValueError(f"{key}={text} must be {_names(options)}.")


def takes_texts(hint: object) -> bool:
    """True if a field of type `hint` holds a list whose items may be texts."""
    items = typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else ()
    return any(
        option is str or typing.get_origin(option) is typing.Literal for item in items for option in _options(item)
    )


def _try(value: Any, option: Any, key: str) -> tuple[bool, object]:
    """Checks a value against one type of a union; returns (whether the value fits, the converted value)."""
    kind, limits = typing.get_origin(option) or option, _range_of(option)
    if limits is not None:
        kind = typing.get_args(option)[0]
        number = isinstance(value, abc.Integral if kind is int else abc.Real) and not isinstance(value, bool)
        fits = number and typing.cast(Any, value) in limits
        return fits, kind(typing.cast(Any, value)) if fits else None
    if kind is typing.Literal:
        return value in typing.get_args(option), value
    if hasattr(option, "__section__"):
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return True, build(typing.cast(type, option), value, f"config.{key}")
        return isinstance(value, option), value
    if kind is tuple:
        item, *_ = typing.get_args(option)
        several = isinstance(value, list | tuple)
        return several, tuple(check(v, item, f"{key}[{i}]") for i, v in enumerate(value)) if several else None
    if option in (str, bool, type(None)):
        return isinstance(value, option), value
    return True, value  # only Python code can pass other objects, such as functions; they are not checked


def _options(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _leaves(hint: object) -> list[object]:
    """Lists the plain types in a hint, including the types inside unions and tuples."""
    inner = _options(hint)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
    return [hint] if inner == (hint,) else [leaf for option in inner for leaf in _leaves(option)]


def _range_of(option: object) -> Range | None:
    metadata = getattr(option, "__metadata__", ())
    return next((data for data in metadata if isinstance(data, Range)), None)


def described(hint: object) -> str:
    """Describes the values that a field of type `hint` takes, in words."""
    return _names(_options(hint))


def _names(options: typing.Iterable[object], many: bool = False) -> str:
    """Describes types in words: 'a number in [0, 1] or None', "'a', 'b' or 'c'"; with plural nouns if `many`."""
    a, s = ("", "s") if many else ("a ", "")
    kinds: list[str] = []
    for option in options:
        if (limits := _range_of(option)) is not None:
            kinds.append(f"{a}{'whole ' if typing.get_args(option)[0] is int else ''}number{s} in {limits}")
        elif typing.get_origin(option) is typing.Literal:
            kinds += [repr(value) for value in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            kinds.append(f"{a}list{s} of {_names(_options(typing.get_args(option)[0]), many=True)}")
        else:
            words = {str: f"text{s}", bool: "True or False", type(None): "None"}
            kinds.append(words.get(option) or getattr(option, "__name__", str(option)))
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}" if len(kinds) > 1 else kinds[0]
