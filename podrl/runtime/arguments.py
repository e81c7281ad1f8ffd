"""The argument parser of podrl's commands, and the arguments that several commands share.

A wrong argument ends a command with one sentence and exit code 1.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from podrl.runtime.watchdog import EXIT_USER

DTYPES = ("float32", "bfloat16", "float16")


def as_sentence(error: object) -> str:
    """Writes an error and its notes as a sentence: adds the full stop that texts of other libraries often lack.

    The text for a module that Python does not find also says which Python this is.
    """
    text = str(error).rstrip() + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, ModuleNotFoundError) and error.name:
        text += f" in {sys.executable}: install it there, or run the Python for which podrl is installed"
    return text if text.endswith((".", "?", "!")) else f"{text}."


def write_line(line: str) -> None:
    """Writes a line to standard error, as commands do with progress and errors."""
    sys.stderr.write(line + "\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and adds the default value to the help of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, "", [], argparse.SUPPRESS) or isinstance(default, bool):
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """The parser of a command: --help shows defaults, and a wrong argument ends the command with one sentence."""

    def __init__(self, module: str, description: str | None):
        """Makes a parser without options.

        Args:
          module: the command's module, such as podrl.export.
          description: text above the list of options.
        """
        super().__init__(prog=f"python -m {module}", description=description, formatter_class=_Help)
        self._module = module

    def error(self, message: str) -> NoReturn:
        """Prints the error in one line and exits with code 1."""
        self.exit(EXIT_USER, f"{self._module}: error: {message} (see {self.prog} --help).\n")


def add_history_option(parser: argparse.ArgumentParser, choices: Sequence[str]) -> None:
    """Adds --history; `choices` are the values of env.history, the default first."""
    parser.add_argument(
        "--history",
        choices=choices,
        default=choices[0],
        help="'template' opens a branch where the chat template renders earlier turns anew, 'append' continues the "
        "sampled tokens (env.history)",
    )


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype, --mesh and --devices: the precision of a model, and the devices that it runs on."""
    parser.add_argument(
        "--dtype",
        default=None,
        choices=DTYPES,
        help="dtype of the weights and the cache; default: bfloat16 on an accelerator, float32 on a CPU",
    )
    parser.add_argument("--mesh", default="auto", help="for example data=2,tensor=4; auto: data over all devices")
    parser.add_argument("--devices", type=int, default=1, help="number of CPU devices to fake without an accelerator")


def check_numbers(args: argparse.Namespace, *counts: str) -> None:
    """Checks the named counts, --seed and --temperature; a count or temperature of None is not checked.

    Raises:
      ValueError: a count is below 1, the seed is negative or has more than 32 bits, or the temperature is negative or
        not finite.
    """
    for name in counts:
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name}={value} must be at least 1.")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed={args.seed} must be at least 0 and below 2**32.")
    if args.temperature is not None and not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise ValueError(f"--temperature={args.temperature} must be 0 (greedy) or a positive, finite number.")
