"""Finds the files on which a test file depends, by its imports. If none of them has changed, the test file need not
run."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

CODE = ("podrl", "tests")
_SETS_UP = "tests/conftest.py"
# Files that match matter to no test, except to tests whose dependencies are unknown. Any other file outside CODE may
# matter to any test.
_APART = re.compile(r"docs/|benchmarks/|[\w/-]+\.md$|\.ci/(nightly-passed|long-tests|run)$")
# Files of these folders matter only to tests that name the file or its folder, or that reach a file which does so.
_NAMED = re.compile(r"configs/|podrl/view/static/|tests/.*[.](?!py$)\w+$")
# A test with one of these words starts processes, or reads more files than it imports.
_BEYOND = re.compile(
    r"subprocess|Popen|sys\.executable|multiprocessing|inspect|glob\(|benchmarks|docs|\.md\b|ROOT|parents\[(?!1\])"
)
# Names of modules in strings: these modules are imported late or started as processes.
_MODULE = re.compile(r"(podrl(?:\.\w+)+)(?::\w+)?")


class Reach:
    """Finds the files of one checkout that each test file depends on."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._paths = {path.relative_to(root).as_posix() for top in CODE for path in (root / top).rglob("*.py")}
        self._modules = {path.removesuffix(".py").removesuffix("/__init__"): path for path in self._paths}

    def untouched(self, test: str, changed: Sequence[str]) -> bool:
        """Returns True if a test file depends on none of the changed files; paths are relative to the root."""
        changed = [path for path in changed if not _APART.match(path)]
        named = [path for path in changed if _NAMED.match(path)]
        files, code = self.of(test), set(changed).difference(named)
        if files is None or not self._paths.issuperset(code) or not files.isdisjoint(code):
            return False
        return not any(self._mentioned(path, files) for path in named)

    def _mentioned(self, path: str, files: Iterable[str]) -> bool:
        """Returns True if one of `files` names the last folder or the file name of `path`.

        For a path outside podrl/, only the files of tests/ among `files` count.
        """
        *_, folder, name = path.split("/")
        words = re.compile(rf"\b({re.escape(folder)}|{re.escape(name.rpartition('.')[0])})\b")
        tops = "podrl/" if path.startswith("podrl/") else "tests/"
        return any(words.search(self._source(file)) for file in files if file.startswith(("tests/", tops)))

    @functools.cache  # noqa: B019 - a session has one such object
    def of(self, test: str) -> frozenset[str] | None:
        """Lists the files that a test file depends on, itself included; None if it starts processes or reads files, so
        that its imports do not tell."""
        found = {test, *(f"{folder}/conftest.py" for folder in _around(test))} & self._paths
        waiting = [*(found - {_SETS_UP})]
        while waiting:
            path = waiting.pop()
            if path.startswith("tests/") and _BEYOND.search(self._source(path)):
                return None
            new = self._imports(path) - found
            found |= new
            waiting += new
        # The __init__.py of a package imports nothing. tests/conftest.py is not searched for _BEYOND: it starts
        # processes only for tests that match _BEYOND themselves.
        packages = {f"{folder}/__init__.py" for path in found for folder in _around(path)} & self._paths
        return frozenset(found | packages | self._imports(_SETS_UP))

    def imports(self, test: str) -> frozenset[str]:
        """Lists a test file, the conftest.py files of its folders, and the files that these import directly."""
        own = {test, *({f"{folder}/conftest.py" for folder in _around(test)} & self._paths - {_SETS_UP})}
        return frozenset(own).union(*map(self._imports, own))

    def _source(self, path: str) -> str:
        return (self._root / path).read_text()

    @functools.cache  # noqa: B019 - a session has one such object
    def _imports(self, path: str) -> frozenset[str]:
        """Lists the files that a file imports anywhere, that its strings name as modules, or that it may read in its
        own folder."""
        if self._homes(path):
            return frozenset()  # a package: the module of each name is followed where the name is used
        source = self._source(path)
        found = {file for name in _names(ast.parse(source)) for file in self._files(name.split("."), path)}
        if path.startswith("tests/") and "__file__" in source:
            found |= {other for other in self._beside(path) if "/test_" not in other}
        return frozenset(found)

    def _files(self, names: Sequence[str], importer: str) -> set[str]:
        """Finds the file of the longest part of a dotted name that is a module; if this part is a package, the
        package's files."""
        folders = ["", f"{importer.rpartition('/')[0]}/", "tests/"] if importer.startswith("tests/") else [""]
        for end in range(len(names), 0, -1):
            for folder in folders:
                path = self._modules.get(folder + "/".join(names[:end]), "")
                if path.endswith("/__init__.py") and end < len(names):
                    home = self._homes(path).get(names[end], "")
                    return self._files(home.split("."), importer) if home else {path}
                if path:  # the name `podrl` alone adds only podrl/__init__.py
                    return self._beside(path) if path.endswith("/__init__.py") and names != ["podrl"] else {path}
        return set()

    @functools.cache  # noqa: B019 - a session has one such object
    def _homes(self, path: str) -> dict[str, str]:
        """Reads the modules of a package's public names from the dictionary _HOME in its __init__.py."""
        for node in ast.parse(self._source(path)).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="_HOME")], value=value):
                    package = path.removesuffix("/__init__.py").replace("/", ".")
                    homes = ast.literal_eval(value)
                    return {n: h if h.startswith("podrl.") else f"{package}.{h}" for n, h in homes.items()}
        return {}

    def _beside(self, path: str) -> set[str]:
        return {other for other in self._paths if other.rpartition("/")[0] == path.rpartition("/")[0]}


def _around(path: str) -> Iterator[str]:
    """Lists the folders around a file, the outermost first."""
    parts = path.split("/")[:-1]
    return ("/".join(parts[:end]) for end in range(1, len(parts) + 1))


def _names(tree: ast.AST) -> Iterator[str]:
    """Lists the dotted names that a file imports, takes from the package podrl, or has in a string.

    The name of a logger is also a module's or package's name, but does not make the file depend on it.
    """
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="getLogger"), args=[name]):
                prose.add(id(name))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id="podrl"), attr=name):
                yield f"podrl.{name}"
            case ast.Constant(value=str(text)) if id(node) not in prose:
                yield from (f"{found[1]}.__init__" for found in [_MODULE.fullmatch(text)] if found)
