"""At any moment a signal ends a command with one sentence and the documented code, and no process stays alive."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from processes import TWO_DEVICES, await_end, job

pytestmark = pytest.mark.e2e
MOMENTS = pathlib.Path(__file__).resolve().parent / "moments"
CODES = {"SIGTERM": 75, "SIGINT": 130}


def _interrupted(name: str, module: str, *args: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a command that gets the signal `name` when it begins to import `module`."""
    path = os.pathsep.join([str(MOMENTS), *filter(None, [os.environ.get("PYTHONPATH"), str(MOMENTS.parents[2])])])
    environment = os.environ | {"PYTHONPATH": path, "SIGNAL_AT": f"{name}@{module}"}
    command = [sys.executable, "-m", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("module", ["absl", "ml_collections", "jax", "podrl.job.job"])
def test_a_signal_during_the_imports(module, name, tmp_path):
    done = _interrupted(name, module, "podrl.launch", "--config=grpo_gemma.py", "--workdir=run", cwd=tmp_path)
    said = "SIGTERM" if name == "SIGTERM" else "Ctrl-C"
    assert done.stderr.strip().startswith(f"podrl: {said} before there was anything new to save"), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.returncode == CODES[name]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["generate", "export", "plan"])
def test_a_signal_during_the_imports_of_the_other_commands(command, tmp_path):
    tiny = MOMENTS.parents[2] / "podrl" / "assets" / "tiny"  # without a model, jax would not be imported
    args = {"generate": [f"--model={tiny}", "--prompts=p.jsonl", "--out=o.jsonl"], "export": ["--workdir=w", "--out=o"]}
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    given = args.get(command, ["--config=grpo_gemma.py", "--trainer=v5e:2x4"])
    done = _interrupted("SIGINT", "jax", f"podrl.{command}", *given, cwd=tmp_path)
    assert done.stderr.strip().startswith(f"podrl.{command}: Ctrl-C"), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.returncode == 130


@pytest.mark.parametrize(
    ("number", "args"),
    [
        (signal.SIGTERM, [TWO_DEVICES]),
        (signal.SIGINT, [TWO_DEVICES]),
        (signal.SIGTERM, ["--local_processes=2", "--fake_devices=1"]),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM of a pod"],
)
def test_a_signal_while_models_are_loaded_and_compiled(number, args, tmp_path):
    workdir = tmp_path / "run"
    with job(workdir, *args) as stopped:
        stopped.wait_for("the table of roles", lambda: "Run directory" in stopped.stdout)
        children = stopped.children()
        stopped.signal(number)
        stopped.finish(75 if number == signal.SIGTERM else 130)
    await_end(children)
    assert "Traceback" not in stopped.stderr
    assert "before there was anything new to save; the same command starts again" in stopped.stderr
    assert not (workdir / "metrics.jsonl").exists() and "Stopped after" not in stopped.stdout
