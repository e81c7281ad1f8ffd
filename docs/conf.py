"""The documentation as a site: `sphinx-build -W docs site`, with the extra [docs].

The pages are Markdown that also reads well in the repository. READMEs outside docs/ become pages, and a link to another
file of the repository becomes plain text, as the site does not have it.
"""

import pathlib
import posixpath
import re

from sphinx.application import Sphinx

_ROOT = pathlib.Path(__file__).parent.parent
# Pages whose text is that of a file outside docs/.
_ELSEWHERE = {
    "readme": "README.md",
    "examples": "examples/README.md",
    "launch": "launch/README.md",
    "contributing": "CONTRIBUTING.md",
}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
_PICTURE = re.compile(r"!\[(?P<text>[^\]]*)\]\(docs/(?P<path>[^)\s]+)\)")

project = "podrl"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", "podrl"
html_copy_source = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
default_role = "code"  # what stands between backticks
napoleon_use_ivar = True
napoleon_custom_sections = [("Shared arguments", "params_style")]


def setup(app: Sphinx) -> None:
    """Registers what turns files of the repository into pages."""
    app.connect("source-read", _read)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Takes the text of a file outside docs/, and points links at pages."""
    path = _ELSEWHERE.get(page, f"docs/{page}.md")
    text = _PICTURE.sub(r"![\g<text>](\g<path>)", (_ROOT / path).read_text()) if page in _ELSEWHERE else source[0]

    def pointed(match: re.Match[str]) -> str:
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
        pages = {file: f"{name}.md" for name, file in _ELSEWHERE.items()}
        target = pages.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
        if target is None and (_ROOT / found).exists():
            return match["text"]
        to = match["path"] if target is None else posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"[{match['text']}]({to}{match['anchor'] or ''})"

    source[0] = _LINK.sub(pointed, text)
