"""The page of podrl.view: its files, its HTML, and the conversion of its data to valid JSON."""

import pathlib
from collections.abc import Mapping
from typing import Any

STATIC = pathlib.Path(__file__).parent / "static"
VIEWS = ("curves", "timeline", "groups", "samples", "run")
SCRIPTS = ("uplot.js", "core.js", "curves.js", "timeline.js", "groups.js", "samples.js", "run.js")
STYLES = ("uplot.css", "view.css")


def page(styles: str, scripts: str) -> str:
    """Returns the page's HTML, equal for all views; its scripts add the contents, as text.

    Args:
      styles: HTML elements of the styles.
      scripts: HTML elements of the scripts.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>podrl</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark">{styles}</head><body><noscript>This page shows a run by JavaScript, which is off here: '
        "allow JavaScript for this page and load it again, or read the samples as text with <code>python -m podrl.view "
        "RUN --samples=10</code> and the findings with <code>python -m podrl.doctor RUN</code>."
        '</noscript><header id="top"></header><main id="view" tabindex="-1"></main>'
        f"{scripts}</body></html>"
    )


def finite(value: Any) -> Any:
    """Returns a copy of a value in which NaN and infinities, which JSON does not have, are None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
