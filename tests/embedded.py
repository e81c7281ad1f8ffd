"""Paths of the models that come with podrl; a test that imports only this file does not depend on the modules of a
job's configuration."""

import importlib.resources
import pathlib

_ASSETS = pathlib.Path(str(importlib.resources.files("podrl"))) / "assets"
EMBEDDED = {name: _ASSETS / name for name in ("tiny", "tiny_moe", "tiny_hybrid", "tiny_tools", "tiny_search")}
TINY = EMBEDDED["tiny"]
