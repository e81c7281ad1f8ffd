"""README tells the truth: the file tree is right, the script runs. `python tests/test_readme.py` rewrites the tree."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_TREE = re.compile(r"(## Files\n\n```\n)(.*?)(\n```)", re.DOTALL)


def tree() -> str:
    """One line per source file: its path and the first line of its docstring."""
    files = [p for folder in ("configs", "launch", "podrl") for p in sorted((ROOT / folder).rglob("*.py"))]
    rows = [(str(p.relative_to(ROOT)), ast.get_docstring(ast.parse(p.read_text()))) for p in files]
    rows = [(name, doc.splitlines()[0]) for name, doc in rows if doc and not name.endswith("__init__.py")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {line.rstrip('.')}" for name, line in rows)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_file_tree_is_that_of_the_checkout():
    found = _TREE.search(README.read_text())
    assert found and found.group(2) == tree(), "run: python tests/test_readme.py"


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_python_examples_are_python():
    for block in blocks("python"):
        compile(block, "README.md", "exec")


@pytest.mark.e2e
def test_the_script_trains(tmp_path):
    script = next(block for block in blocks("python") if "def main" in block)
    assert len(script.splitlines()) <= 40
    (tmp_path / "script.py").write_text(script)
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout, done.stdout


if __name__ == "__main__":
    README.write_text(_TREE.sub(lambda m: m.group(1) + tree() + m.group(3), README.read_text()))
