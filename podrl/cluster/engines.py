"""The decoding engines that a configuration can name, and the abilities of an engine."""

import importlib
from collections.abc import Mapping
from typing import Any

from podrl.engine.config import Ability

# The engines that ClusterConfig.rollout_engine can name: 'module:class' of each.
ENGINES: Mapping[str, str] = dict.fromkeys(("vanilla", "podrl"), "podrl.rollout.worker:RolloutWorker")


def engine_class(engine: str | type) -> Any:
    """Returns the class of an engine; `engine` is a name in ENGINES or the class itself."""
    if not isinstance(engine, str):
        return engine
    module, _, name = ENGINES[engine].partition(":")
    return getattr(importlib.import_module(module), name)


def able(engine: str | type, ability: Ability) -> bool:
    """Returns whether an engine has an ability (podrl.engine.config.Ability)."""
    return ability in getattr(engine_class(engine), "abilities", ())
