"""The documentation site lists every public name, the keys that its first page names exist, and guides are short;
`.ci/run` builds the site."""

import pathlib
import re

import podrl

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


def test_the_page_of_the_python_interface_has_every_public_name():
    page = (DOCS / "reference" / "api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function|data):: (\S+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(f"{podrl._HOME[name]}.{name}" for name in podrl.__all__)


def test_the_keys_of_a_first_run_are_keys():
    begin = (DOCS / "index.md").read_text().partition("## The keys of a first run")[2]
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)`(?=[^|]*\|)", "\n".join(re.findall(r"^\|[^|]*\|", begin, re.MULTILINE)))
    page = (DOCS / "reference" / "keys.md").read_text()
    sections = {
        f"{section}.": text for section, text in re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    }
    assert len(named) > 8
    for key in named:
        section, _, name = key.rpartition(".")
        assert f"| `{name}` |" in sections[f"{section}."], key


def test_guides_are_short():
    guides = re.search(r":caption: Guides\n:hidden:\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    assert guides is not None
    elsewhere = dict(re.findall(r'    "(\w+)": "([\w/.]+)"', (DOCS / "conf.py").read_text()))
    assert elsewhere["launch"] == "launch/README.md"
    pages = [DOCS.parent / elsewhere.get(name, f"docs/{name}.md") for name in guides[1].split()]
    long = {page.name: count for page in pages if (count := len(page.read_text().splitlines())) > 200}
    assert len(pages) > 8 and not long, f"more than 200 lines: {long}"
