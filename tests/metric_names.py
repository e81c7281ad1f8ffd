"""Collects the names of metrics: those that docs/metrics.md lists, and those that podrl's source writes to
metrics.jsonl."""

import ast
import pathlib
import re
from collections.abc import Iterable, Iterator

from podrl.rewards.reference import accuracies

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Packages whose code makes metrics: in these packages a dictionary key with a slash is the name of a metric.
MAKERS = ("algorithms", "cluster", "engine", "job", "learner", "rollout", "rundir", "trainer")
_NAME = re.compile(r"[a-z_*]+/[a-z_0-9*/]+")
# Names of intermediate values, which podrl combines into other metrics before it writes a record.
REPLACED = {"rollout/age", "rollout/kept_tokens", "sampler/moment_*", "sampler/moment_weight"}
# Stages whose seconds never reach a record: stages after the last step, and stages of other hosts.
UNTIMED = {"closing checkpoints", "closing the run directory", "waiting for trainer 0 to restore"}


def listed() -> list[str]:
    """Lists the names of docs/metrics.md; a word in capitals becomes *."""
    names = re.findall(r"^- `([^`]+)` \(", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return [re.sub(r"(?<![A-Za-z])[A-Z]+\b", "*", name) for name in names]


def unlisted(names: Iterable[str]) -> list[str]:
    """Lists the names in a run's records that docs/metrics.md does not have."""
    known = [re.compile(re.escape(name).replace(r"\*", ".+")) for name in listed()]
    return sorted(name for name in set(names) - {"step"} if not any(form.fullmatch(name) for form in known))


def written() -> set[str]:
    """Collects the names of metrics that the source can write; * stands for a part that is only known in a run."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "podrl").rglob("*.py"))}
    makers = [tree for path, tree in trees.items() if path.relative_to(ROOT / "podrl").parts[0] in MAKERS]
    stages = {stage for tree in trees.values() for stage in _stages(tree)} - UNTIMED
    own = [set(_prefixes(tree)) - {""} for tree in makers]
    shared = {prefix for tree in makers for prefix in _defaults(tree)} - {""}
    return {
        whole
        for tree, prefixes in zip(makers, own, strict=True)
        for name in set(_keys(tree)) - REPLACED
        if _NAME.fullmatch(name)
        for whole in _expanded(name, stages, prefixes or shared)
    }


def _expanded(name: str, stages: set[str], prefixes: set[str]) -> Iterator[str]:
    """Yields the names that `name` stands for: each * is replaced by the values that the code names for it."""
    group, _, rest = name.partition("/")
    if name == "time/*":
        values: Iterable[str] = stages
    elif group == "*":
        yield from (f"{prefix}/{rest}" for prefix in prefixes)
        return
    elif name == "eval/*_*":  # kind of sampling, and the measured quantity
        measured = [*accuracies("", "1"), "reward", "reward/*"]
        yield from (f"eval/{how}_{what}" for how in ("greedy", "sampled") for what in measured)
        return
    elif group == "accuracy":
        values = accuracies("", "1")
    else:
        values = ("*",)
    yield from (name.replace("*", value) for value in values)


def _keys(tree: ast.AST) -> Iterator[str]:
    """Yields the keys of dictionaries in a module: in literals, assignments, setdefault() and comprehensions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (_text(key) for key in node.keys)
        elif isinstance(node, ast.DictComp):
            yield _text(node.key)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield _text(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
            yield _text(node.args[0])


def _stages(tree: ast.AST) -> Iterator[str]:
    """Yields the fixed names that a module passes to the watchdog's `stage()`."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(called, ast.Attribute) and called.attr == "stage":
            name = _text(node.args[0])
            if name and "*" not in name:
                yield name


def _prefixes(tree: ast.AST) -> Iterator[str]:
    """Yields the values that a module's calls pass as `prefix`; if there are any, the module's metrics have only these
    prefixes."""
    yield from (_text(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "prefix")


def _defaults(tree: ast.AST) -> Iterator[str]:
    """Yields the defaults of a module's parameters called `prefix`, for modules whose functions are called from other
    modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            defaults = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            yield from (_text(value) for arg, value in defaults if arg.arg == "prefix")


def _text(node: ast.AST | None) -> str:
    """Returns the text of a literal, with * for an f-string's values; '' for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return ""
