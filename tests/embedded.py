"""Finds the models that come with podrl without importing the modules that configure a job, so tests depend on less."""

import importlib.resources
import pathlib

_ASSETS = pathlib.Path(str(importlib.resources.files("podrl"))) / "assets"
EMBEDDED = {name: _ASSETS / name for name in ("tiny", "tiny_moe", "tiny_hybrid", "tiny_tools", "tiny_search")}
TINY = EMBEDDED["tiny"]
