"""Coming into a job where that needs a service: Pathways' client is the real one, its proxy is not there."""

import os
import subprocess
import sys

import pytest


def test_a_pathways_proxy_that_cannot_be_reached_is_told_in_one_line_and_worth_a_restart(tmp_path):
    pytest.importorskip("pathwaysutils", reason="pip install 'podrl[pathways]'")
    environment = os.environ | {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": "grpc://127.0.0.1:9",
        "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": "1",
    }
    command = [sys.executable, "-m", "podrl.launch", "--config=grpo_gemma.py", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 42, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podrl: error: ")]
    assert "The Pathways proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:9 cannot be reached: " in line
    assert "ifrt_proxy" in line and "kubectl get pods" in line
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
