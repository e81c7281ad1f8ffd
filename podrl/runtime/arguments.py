"""The argument parser of podrl's commands: a wrong argument ends them with one sentence and exit code 1."""

import argparse
from typing import NoReturn

from podrl.runtime.watchdog import EXIT_USER


class Parser(argparse.ArgumentParser):
    """An argparse parser that does not print its usage or exit with 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the error in one line and exits with code 1."""
        self.exit(EXIT_USER, f"{self.prog}: error: {message} (see python -m {self.prog} --help)\n")
