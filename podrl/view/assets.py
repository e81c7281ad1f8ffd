"""The page: its files, its HTML, and numbers as JSON has them."""

import pathlib
from collections.abc import Mapping
from typing import Any

STATIC = pathlib.Path(__file__).parent / "static"
VIEWS = ("curves", "timeline", "groups", "samples", "run")
SCRIPTS = ("uplot.js", "core.js", "curves.js", "timeline.js", "groups.js", "samples.js", "run.js")
STYLES = ("uplot.css", "view.css")


def page(styles: str, scripts: str) -> str:
    """The page's HTML, which is the same for all views; what it shows is added by its scripts, as text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>podrl</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark">{styles}</head><body><header id="top"></header><main id="view" tabindex="-1"></main>'
        f"{scripts}</body></html>"
    )


def finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have by null."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
