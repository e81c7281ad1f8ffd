"""The help of every command shows what a user types, and the default of every option."""

import argparse
import ast
import importlib
import pathlib

import pytest
from absl import flags

from podrl.runtime.arguments import Parser

ROOT = pathlib.Path(__file__).parents[2]
# Modules that a user starts and that parse their own arguments.
COMMANDS = ("podrl.contrib.kaggle_gemma", "podrl.doctor", "podrl.evaluate", "podrl.export", "podrl.generate")
COMMANDS += ("podrl.replay", "podrl.serve", "podrl.verifiers", "podrl.view.__main__")
COMMANDS += ("launch.gke", "launch.gke_add", "launch.xpk")
# Modules with absl's flags; absl's help shows defaults by itself.
ABSL = ("podrl.launch", "podrl.plan.__main__")


def _parses(path: pathlib.Path) -> bool:
    """True if a file makes a parser: it calls Parser, ArgumentParser or make_parser. The file need not be a command."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
    return bool(names & {"Parser", "ArgumentParser", "make_parser"})


def test_commands_are_listed():
    found = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for folder in ("podrl", "launch")
        for path in (ROOT / folder).rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() and _parses(path)
    }
    assert found == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_command_and_its_defaults(command, monkeypatch, capsys):
    parsers: list[argparse.ArgumentParser] = []
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def recorded(self, *args, **kwargs):
        parsers.append(self)
        return parse_known_args(self, *args, **kwargs)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", recorded)
    module = importlib.import_module(command)
    # podrl.view's main takes the program's name first.
    with pytest.raises(SystemExit) as stop:
        module.main(["view", "--help"] if command == "podrl.view.__main__" else ["--help"])
    assert stop.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith(f"usage: python -m {command.removesuffix('.__main__')} ")
    assert (module.__doc__ or "?").splitlines()[0] in words
    for action in parsers[0]._actions:
        assert action.help, action.dest
        valued = isinstance(action.default, str | int | float) and not isinstance(action.default, bool)
        if valued and action.default not in ("", argparse.SUPPRESS):
            assert f"(default: {action.default})" in words, action.dest


@pytest.mark.parametrize("command", ABSL)
def test_every_flag_is_explained(command):
    module = importlib.import_module(command)
    for flag in flags.FLAGS.get_key_flags_for_module(module):
        assert flag.help, flag.name
    assert f"python -m {command.removesuffix('.__main__')} " in (module.__doc__ or "")


def test_wrong_argument_names_the_command_that_explains_it(capsys):
    with pytest.raises(SystemExit) as stop:
        Parser("podrl.export", None).parse_args(["--wide"])
    assert stop.value.code == 1
    assert capsys.readouterr().err == (
        "podrl.export: error: unrecognized arguments: --wide (see python -m podrl.export --help).\n"
    )
