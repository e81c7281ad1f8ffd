"""The decoding engines that a configuration can name, and the abilities of an engine."""

from collections.abc import Mapping
from typing import Any

from podrl.engine.config import Ability, RolloutConfig
from podrl.trainer.custom import found

# The engines of podrl by name: 'module:class' of each.
ENGINES: Mapping[str, str] = dict.fromkeys(("vanilla", "podrl"), "podrl.rollout.worker:RolloutWorker")
_METHODS = ("generate", "warm_up", "sleep", "wake")  # the methods that every engine needs


def engine_class(engine: str | type) -> Any:
    """Returns the class of an engine.

    Args:
      engine: a name in ENGINES, 'file.py:Class', 'package.module:Class', or the class itself.

    Raises:
      ValueError: the class cannot be loaded.
    """
    return found(ENGINES.get(engine, engine) if isinstance(engine, str) else engine, "rollout.engine")


def check_engine(engine: str | type, rollout: RolloutConfig, calls_per_window: int | None = None) -> None:
    """Refuses an engine that podrl cannot use.

    Args:
      engine: the engine, as for `engine_class`.
      rollout: settings of the rollout. Settings that change weights inside samples need the ability 'windows'.
      calls_per_window: value of env.calls_per_window; any number needs the ability 'windows', too.

    Raises:
      ValueError: no engine has this name, the class cannot be loaded, or it lacks a method or the ability.
    """
    if engine in ENGINES:
        return
    if isinstance(engine, str) and ":" not in engine:
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"rollout.engine={engine!r} must be {known}, 'file.py:Class' or 'package.module:Class'.")
    cls = engine_class(engine)
    if lacks := [name for name in _METHODS if not callable(getattr(cls, name, None))]:
        raise ValueError(
            f"rollout.engine={engine!r} lacks {', '.join(lacks)}: an engine is a class with the methods of "
            "podrl.rollout.interface.RolloutEngine."
        )
    if able(engine, "windows"):
        return
    needs = {f"rollout.window_tokens={rollout.window_tokens}": rollout.window_tokens is not None}
    needs |= {f"env.calls_per_window={calls_per_window}": calls_per_window is not None}
    needs |= {"rollout.clock='wall'": rollout.clock == "wall"}
    for setting in (setting for setting, used in needs.items() if used):
        way = "set rollout.clock='tokens'" if rollout.clock == "wall" else "leave it out"
        raise ValueError(
            f"{setting} changes weights inside samples, and rollout.engine={engine!r} does not declare the ability "
            f"'windows' (podrl.engine.config.Ability): {way}, or set rollout.engine='podrl'."
        )


def able(engine: str | type, ability: Ability) -> bool:
    """Returns True if an engine has an ability (podrl.engine.config.Ability)."""
    return ability in getattr(engine_class(engine), "abilities", ())
