"""Every error and refusal of the launchers is a sentence with a full stop."""

import ast
import os
import pathlib
import subprocess

import pytest

from launch.submission import sentence

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
# Texts that end in a value: a sentence from elsewhere, which has its own full stop, or a command to copy.
VALUES = {
    "error",
    "why",
    "why.strip()",
    "main(sys.argv[1:])",
    "MISSING['xpk']",
    "MISSING[name]",
    "missing[command[0]]",
    "gke.MISSING['kubectl']",
    "command.show(alone)",
    "command.show(apply)",
    "(done.stdout + done.stderr)[-2000:]",
    "f'; this one has {len(name)}.' if len(name) > limit else '.'",
    "sentence(done.stderr.strip().rpartition('\\n')[2])",
    "submission.sentence(done.stderr)",
}


def endings() -> list[tuple[str, str]]:
    """Lists the ends of the launchers' errors: (place, text, or the expression of a value)."""
    found = []
    for file in sorted(LAUNCH.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func) in ("ValueError", "SystemExit", "sys.exit", "sys.stderr.write"):
                found.append((f"{file.name}:{node.lineno}", _end(node.args[0])))
    return found


def _end(text: ast.expr) -> str:
    """Returns the end of an expression that makes a text: its characters, or the source of its last value."""
    if isinstance(text, ast.JoinedStr):
        *_, last = text.values
        before_newline = isinstance(last, ast.Constant) and last.value == "\n"
        return _end(text.values[-2] if before_newline else last)
    if isinstance(text, ast.FormattedValue):
        return ast.unparse(text.value)
    if isinstance(text, ast.BinOp):
        return _end(text.right)
    return str(text.value).rstrip() if isinstance(text, ast.Constant) else ast.unparse(text)


def test_every_error_of_the_launchers_in_python_ends_in_a_full_stop():
    found = endings()
    assert len(found) > 60
    wrong = [(place, end) for place, end in found if not end.endswith((".", "?", "4")) and end not in VALUES]
    assert wrong == []  # sys.exit(4) is a code


def test_sentences_of_other_programs_get_their_full_stop():
    assert sentence("Error from server (NotFound)\n") == "Error from server (NotFound)."
    assert sentence("Why? ") == "Why?" and sentence("It is so.") == "It is so."


@pytest.mark.parametrize(
    "words",
    [
        ["tpu_vm.sh", "--nothing"],
        ["tpu_vm.sh", "tpu"],
        ["tpu_vm.sh", "tpu", "zone", "--max_restarts=x", "--", "--config=a.py"],
        ["tpu_vm.sh", "tpu", "zone"],
        ["tpu_vm_worker.sh", "start", "--nothing"],
        ["tpu_vm_worker.sh", "nothing"],
        ["tpu_vm_worker.sh", "tell"],
        ["tpu_vm_worker.sh", "stacks"],
    ],
    ids=" ".join,
)
def test_refusals_of_the_shell_launcher_end_in_a_full_stop(words, tmp_path):
    file, *arguments = words
    done = subprocess.run(
        ["bash", str(LAUNCH / file), *arguments],
        env=os.environ | {"HOME": str(tmp_path), "TPU_WORKER_ID": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and done.stderr.strip(), done
    assert done.stderr.strip().endswith("."), done.stderr
