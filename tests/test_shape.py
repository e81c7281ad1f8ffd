"""Rules for all files: no import cycles, no deadline by time.time(), distinct names of test files, indented
docstrings."""

import ast
import pathlib

import grimp

ROOT = pathlib.Path(__file__).resolve().parent.parent / "podrl"


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Finds import cycles by Kosaraju's algorithm: a first walk orders the modules, a second follows imports
    backwards."""

    def walk(start, edges, seen):
        stack, order = [(start, iter(sorted(edges[start])))], []
        seen.add(start)
        while stack:
            module, rest = stack[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                order.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))
        return order

    importers = {module: {other for other in imports if module in imports[other]} for module in imports}
    seen: set[str] = set()
    order = [module for start in imports if start not in seen for module in walk(start, imports, seen)]
    seen = set()
    groups = [set(walk(start, importers, seen)) for start in reversed(order) if start not in seen]
    return [group for group in groups if len(group) > 1]


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}) == [{"b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other():
    graph = grimp.build_graph("podrl", cache_dir=None)
    assert circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


# Files that may call time.time(): they write the time of day for people, or compare it with files' times.
_OF_DAY = {"sinks.py", "spans.py", "gauges.py", "recorder.py", "cache.py", "liveness.py", "serving.py", "front_http.py"}


def test_no_deadline_reads_the_clock_of_the_day():
    """Deadlines use time.monotonic(): time.time() jumps if somebody sets the machine's clock."""
    read, clocks = set(), ("time.time", "datetime.now", "datetime.datetime.now", "datetime.utcnow")
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in clocks:
                read.add(path.name)
    assert read == _OF_DAY


def test_files_of_tests_have_names_of_their_own():
    """Pytest imports test files by name alone, so two files may not share a name."""
    names = [path.name for path in pathlib.Path(__file__).parent.rglob("test_*.py")]
    assert names
    assert sorted(set(names)) == sorted(names)


def test_docstrings_are_indented_as_their_code():
    """The site reads an `Args:` indented deeper than its function as a quotation, and loses the arguments."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                text, column = node.body[0].value.value, node.body[0].col_offset
                lines = [line for line in text.splitlines()[1:] if line.strip()]
                heads = [line for line in lines if line.strip() in ("Args:", "Returns:", "Raises:", "Attributes:")]
                if any(len(line) - len(line.lstrip()) < column for line in lines) or any(
                    line != " " * column + line.strip() for line in heads
                ):
                    wrong.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not wrong
