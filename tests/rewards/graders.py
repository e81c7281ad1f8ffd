"""Reward functions of a user's file, valid and invalid, for the tests of the workers that run them."""

import os
import re
import signal
import subprocess
import sys
import time


def length(prompts, completions, **fields):
    return [len(c) / 10 for c in completions]


def strict_signature(completions, prompts, answer):
    return [float(a == c) for a, c in zip(answer, completions)]  # noqa: B905


def other_names(p, c):
    assert p == ["prompt 0"]
    return [float(len(text)) for text in c]


def one_for_all(prompts, completions, **fields):
    return [1.0]


def completions_only(completions, **fields):
    assert set(fields) == {"prompts", "answer"}
    return [float(len(text)) for text in completions]


def imports(prompts, completions, **fields):
    return [float("jax" in sys.modules), float(os.environ.get("PODRL_USER_WORKER") == "1"), float(os.getpid())]


def chatty(prompts, completions, **fields):
    print("to standard output")  # noqa: T201
    sys.stdout.flush()
    return [1.0] * len(completions)


def raises(prompts, completions, **fields):
    return [10.0 / len(c) for c in completions]


def not_finite(prompts, completions, **fields):
    return [float(c) for c in completions]


def not_numbers(prompts, completions, **fields):
    return [1.0, "0.5", 2.0]


def too_few(prompts, completions, **fields):
    return [1.0 for c in completions if c != "drop"]


def nothing(prompts, completions, **fields):
    return None


def sleeps(prompts, completions, **fields):
    if "sleep" in completions:
        time.sleep(1000)
    return [0.0] * len(completions)


def holds_the_interpreter(prompts, completions, **fields):
    # Catastrophic backtracking inside the C engine: no Python thread of the process runs meanwhile.
    return [float(bool(re.fullmatch(r"(a|aa)+b", c))) for c in completions]


def slow(prompts, completions, **fields):
    time.sleep(0.1 * len(completions))
    return [0.0] * len(completions)


def exits(prompts, completions, **fields):
    if "exit" in completions:
        os._exit(3)
    return [0.0] * len(completions)


def always_sleeps(prompts, completions, **fields):
    time.sleep(1000)


def killed_once(prompts, completions, file):
    if not os.path.exists(file[0]):
        open(file[0], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(c)) for c in completions]


def always_killed(prompts, completions, **fields):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_quietly(prompts, completions, **fields):
    sys.exit(4)


def starts_a_child(prompts, completions, **fields):
    child = subprocess.Popen(["sleep", "1000"])
    return [float(child.pid)] * len(completions)


class Grader:
    @staticmethod
    def half(prompts, completions, **fields):
        return [0.5] * len(completions)


not_callable = 3
