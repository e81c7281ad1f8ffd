"""Handles SIGTERM and Ctrl-C before there is anything to save: the process prints a sentence and exits.

This module imports only modules that load fast, so that a command can handle signals before its slow imports.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)
_PATIENCE_S = 10.0  # time for the main thread to unwind; while it is inside a compiler, it runs no signal handler


class StoppedError(KeyboardInterrupt):
    """A signal asked this process to end before it had anything to save; str(error) is the sentence for the user."""

    def __init__(self, number: int):
        super().__init__(sentence(number))
        self.number = number


def exit_code(number: int) -> int:
    """Returns the exit code for a signal: 75 (preempted) for SIGTERM, and 130 for Ctrl-C, as in shells.

    The code 75 tells the sender of SIGTERM that the command may be started again.
    """
    return 130 if number == signal.SIGINT else 75


def _of_run() -> str:
    return "before there was anything new to save; the same command starts again, or resumes the run."


def sentence(number: int, words: Callable[[], str] = _of_run) -> str:
    """Returns the sentence that a process prints when a signal ends it before it had anything to save.

    Args:
      number: number of the signal.
      words: function that returns the sentence without its first word, which is the signal's name.
    """
    return f"{'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name} {words()}"


def leave_on_signals(*, unwind: bool, words: Callable[[], str] = _of_run) -> None:
    """Makes SIGTERM and Ctrl-C end this process, with a sentence and `exit_code`.

    Call this function again to restore the handlers if a library may have replaced them.

    Args:
      unwind: True to raise `StoppedError` in the main thread, so that open files and sockets are closed; if this takes
        more than 10 s, the process exits anyway. False to exit at once.
      words: function that returns the rest of the sentence that begins with the signal's name; it may be called in
        another thread. By default the sentence is about a training run.
    """
    global _unwinds, _words
    _unwinds, _words = unwind, words
    for number in NUMBERS:
        signal.signal(number, _on_signal)
    if _watcher is None:
        _watch()


def raise_swallowed() -> None:
    """Raises `StoppedError` again if an earlier one was raised and lost.

    Python discards an exception that is raised in a finalizer, in a callback of a weak reference or in a callback of
    the garbage collector. A signal may arrive in one of them, and jax has such a callback. Call this function right
    after this module's handlers were replaced.
    """
    global _raised
    number, _raised = _raised, None
    if number is not None:
        raise StoppedError(number)


def leaves(number: int = signal.SIGTERM) -> bool:
    """Returns True if this module's handler is still installed for a signal."""
    return signal.getsignal(number) is _on_signal


_unwinds = False
_words: Callable[[], str] = _of_run
_raised: int | None = None  # the signal of the last StoppedError
_watcher: threading.Thread | None = None


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _raised
    del frame
    if _unwinds:
        _raised = number
        raise StoppedError(number)
    _leave(number)


def _watch() -> None:
    """Starts a thread that acts on signals while the main thread is in foreign code, which runs no Python handler."""
    global _watcher
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := os.read(receiver, 64):
            for number in (n for n in numbers if n in NUMBERS and leaves(n)):
                time.sleep(_PATIENCE_S if _unwinds else 0.5)
                if leaves(number):  # if not, training has begun meanwhile, and the run's handler deals with the signal
                    _leave(number)

    _watcher = threading.Thread(target=watch, name="podrl-signals", daemon=True)
    _watcher.start()


def _leave(number: int) -> None:
    path = sys.argv[0].removesuffix("/__main__.py").removesuffix(".py") if sys.argv else ""
    program = os.path.basename(path)
    text = f"\npodrl{f'.{program}' if program not in ('', 'launch', '-m') else ''}: {sentence(number, _words)}\n"
    try:
        os.write(2, text.encode())
    finally:
        os._exit(exit_code(number))
