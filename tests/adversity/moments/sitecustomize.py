"""Sends this process a signal when it begins to import a module: SIGNAL_AT=SIGTERM@jax."""

import os
import signal
import sys


class _AtImport:
    """An import finder that finds no module; it only sends the signal when the module is about to be imported."""

    def __init__(self, number: int, module: str):
        self._number, self._module = number, module

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == self._module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), self._number)


if "SIGNAL_AT" in os.environ:
    _name, _, _module = os.environ["SIGNAL_AT"].partition("@")
    sys.meta_path.insert(0, _AtImport(signal.Signals[_name], _module))
