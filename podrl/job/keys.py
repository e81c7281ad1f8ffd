"""Every key of a configuration: its type, range, default and meaning, and the algorithms that read it.

    python -m podrl.launch --help_config [prefix]       prints the keys, or those below a prefix
    python -m podrl.job.keys FILE                        writes the page of all keys

The meanings are written in one place only: under `Attributes:` in the docstrings of the settings.
"""

import dataclasses
import difflib
import inspect
import pathlib
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping

from podrl.algorithms.presets import PRESETS
from podrl.config import described, nearest, types_of
from podrl.job.config import KINDS, Job, section_of, unset
from podrl.mappings import ConfigValues

_ATTRIBUTE = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): +(.*)")
# Beginnings of keys that only some algorithms read, and the sections of these algorithms. An algorithm also reads its
# own section.
_GENERATING = tuple(name for name, kind in KINDS.items() if not kind.offline)
_SECTIONS = {
    "data.curriculum": _GENERATING,
    "model.critic": ("ppo",),
    "reward.": _GENERATING,
    "roles.critic": ("ppo",),
    "roles.reward": _GENERATING,
    "trainer.critic_": ("ppo",),
    "trainer.mini_batch_size": _GENERATING,
}
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
      path: dotted path below `config`; `[]` stands for an entry of a list.
      kind: allowed values in words, with their range.
      default: value if the configuration does not set the key, as Python writes it; '' if the key must be set.
      presets: default of each algorithm that starts with another value.
      meaning: explanation of the key in whole sentences; '' if the docstring has none.
      readers: sections of the algorithms that read the key; most keys are read by all.
    """

    path: str
    kind: str
    default: str
    meaning: str
    readers: tuple[str, ...]
    presets: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def read_by(self) -> str:
        """The algorithms that read the key, in words."""
        return "all" if set(self.readers) == set(KINDS) else ", ".join(self.readers)


def meanings(cls: type) -> dict[str, str]:
    """Reads the meaning of each field, by its name, from the docstrings of a dataclass and of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, text = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        names: list[str] = []
        for line in text.splitlines():
            if line and not line.startswith(" "):
                break
            # The first line of a field is indented by two columns, its further lines by more.
            match = _ATTRIBUTE.fullmatch(line.strip()) if re.match(r"  \S", line) else None
            if match:
                names = match[1].split(", ")
                found.update(dict.fromkeys(names, match[2]))
            elif line.startswith("   "):
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
            else:
                names = []
    return found


def all_keys() -> list[Key]:
    """Lists every key: keys that all algorithms share, in the order of `Job`, then the section of each algorithm."""
    shared = _keys(Job, "", tuple(KINDS), leave_out=("algo",))
    own = (key for name, kind in KINDS.items() for key in _keys(kind.settings, f"{name}.", (name,)))
    starts = {name: unset(name) for name in sorted({*KINDS, *PRESETS})}
    return [dataclasses.replace(key, presets=_presets(key, starts)) for key in (*shared, *own)]


def _presets(key: Key, starts: Mapping[str, ConfigValues]) -> dict[str, str]:
    """Finds the algorithms whose configuration starts with another value of `key` than its default."""
    found: dict[str, str] = {}
    for algorithm, values in starts.items():
        value: object = values
        for name in key.path.split("."):
            value = value.get(name, dataclasses.MISSING) if isinstance(value, Mapping) else dataclasses.MISSING
        if value is not dataclasses.MISSING and repr(value) != key.default and key.path != "algorithm":
            found[algorithm] = repr(value)
    return found


def _keys(
    cls: type, prefix: str, readers: tuple[str, ...], start: object = None, leave_out: tuple[str, ...] = ()
) -> Iterator[Key]:
    """Lists the keys of the settings `cls`; `start` has their default values, None stands for the defaults of `cls`."""
    meanings_of_fields, fields = meanings(cls), {field.name: field for field in dataclasses.fields(cls)}
    groups: list[tuple[str, type, object]] = []
    for name, hint in types_of(cls).items():
        path = prefix + name
        if name in leave_out:
            continue
        default = _default(fields[name]) if start is None else getattr(start, name)
        inner, listed = _settings_in(hint)
        if inner is not None and not listed:
            groups.append((path, inner, default if isinstance(default, inner) else None))
            continue
        text = "" if default is dataclasses.MISSING else getattr(default, "__name__", None) or repr(default)
        yield Key(path, described(hint), text, meanings_of_fields.get(name, ""), _readers(path, readers))
        if inner is not None:
            groups.append((f"{path}[]", inner, None))
    for path, inner, default in groups:  # after the keys above, so that the keys of a group stay together
        yield from _keys(inner, f"{path}.", _readers(path, readers), default)


def _readers(path: str, others: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the sections of the algorithms that read a key; `others` for a key without an entry in `_SECTIONS`."""
    return next((names for begin, names in _SECTIONS.items() if path.startswith(begin)), others)


def _settings_in(hint: typing.Any) -> tuple[type | None, bool]:
    """Finds the dataclass of settings in a hint: (the class or None, whether the hint is a list of them)."""
    if hasattr(hint, "__section__"):
        return hint, False
    for inner in typing.get_args(hint):
        found, listed = _settings_in(inner)
        if found is not None:
            return found, listed or typing.get_origin(hint) is tuple
    return None, False


def _default(field: dataclasses.Field) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _other_defaults(key: Key) -> list[str]:
    """Writes the defaults that single algorithms have for a key, each value once: '0.28 with dapo'."""
    values = dict.fromkeys(key.presets.values())
    return [f"{one} with {', '.join(name for name, value in key.presets.items() if value == one)}" for one in values]


def help_text(prefix: str = "") -> str:
    """Writes, for a terminal, the keys whose path is `prefix`, lies below `prefix`, or begins with `prefix`.

    Raises:
      ValueError: no key begins with `prefix`; the message names the nearest key.
    """
    prefix = prefix.removeprefix("--").removeprefix("config.")
    keys = all_keys()
    chosen = [key for key in keys if key.path.startswith(prefix)]
    if not chosen:
        paths = [key.path for key in keys]
        dots = {path[: i + 1] for path in paths for i, letter in enumerate(path) if letter == "."}
        near = difflib.get_close_matches(prefix, [*paths, *dots], n=1)  # a group is suggested as 'trainer.'
        hint = nearest(prefix, near or {path.partition(".")[0] for path in paths})
        raise ValueError(f"--help_config {prefix}: no key begins with this.{hint}")
    lines = []
    for key in chosen:
        default = ", ".join([f"default {key.default}" if key.default else "must be set", *_other_defaults(key)])
        lines.append(f"--config.{key.path}")
        for text in (f"{key.kind}; {default}; read by {key.read_by}", key.meaning):
            lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """Writes all keys as a page in Markdown, a heading per group."""
    families = {name: [preset for preset in PRESETS if section_of(preset) == name] for name in KINDS}
    lines = [
        "# Configuration keys",
        "",
        "Generated by `python -m podrl.job.keys docs/reference/keys.md` from the docstrings of the settings.",
        "`python -m podrl.launch --help_config trainer.` prints the same in a terminal. A key is set on the command",
        "line with `--config.` before its path, or in a configuration file. `[]` stands for an entry of a list.",
        "",
        "Read by `all` means every algorithm. A name stands for a section and every algorithm that it serves:",
        "",
        *(
            f"- `{name}`: {', '.join(f'`{one}`' for one in names)}"
            for name, names in families.items()
            if len(names) > 1
        ),
        "",
        "A loss or an advantage of your own adds its numbers as keys of its section.",
    ]
    group = None
    for key in all_keys():
        at = key.path.rpartition(".")[0]
        if at != group:
            group = at
            heading = f"`{at}`" if at else "The job"
            lines += [
                "",
                f"## {heading}",
                "",
                "| key | values | default | read by | meaning |",
                "|---|---|---|---|---|",
            ]
        default = "; ".join([f"`{key.default}`" if key.default else "must be set", *_other_defaults(key)])
        cells = (f"`{key.path.rpartition('.')[2]}`", key.kind, default, key.read_by, key.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(page())
