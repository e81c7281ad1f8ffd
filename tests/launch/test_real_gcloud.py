"""tpu_vm.sh runs the real gcloud, where it is installed; only the services and the ssh that gcloud calls are faked.

The tests with a stand-in cannot show that gcloud knows the flags of tpu_vm.sh, passes the command to the workers'
shells unchanged, runs it on all workers, and exits with the status of a worker that fails.
"""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from test_tpu_vm import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly("launch"),
    pytest.mark.skipif(not (shutil.which("gcloud") and shutil.which("ssh-keygen")), reason="gcloud is not installed"),
]

WORKERS = 2
NODE = {
    "name": "projects/p/locations/z-1/nodes/my-tpu",
    "id": "123",
    "state": "READY",
    "health": "HEALTHY",
    "apiVersion": "V2",
    "acceleratorType": "v6e-8",
    "networkEndpoints": [
        {"ipAddress": f"10.0.0.{i}", "port": 8470, "accessConfig": {"externalIp": f"192.0.2.{i}"}}
        for i in range(WORKERS)
    ],
    "metadata": {},
}
DONE = {"name": "projects/p/locations/z-1/operations/1", "done": True, "response": {**NODE, "@type": "node"}}

# Fakes ssh and scp: machine 192.0.2.N is the directory wN.
SSH = """#!/bin/bash
set -u
words=("$@") n=0
while [[ ${words[n]} != *@192.0.2.* ]]; do n=$((n + 1)); done
target=${words[n]##*@192.0.2.}
home=ROOT/w${target%%:*}
if [[ $0 == */scp ]]; then exec cp "${words[n - 1]}" "$home/${target#*:}"; fi
[[ ${words[n + 1]} == -- ]] || exit 255
cd "$home" || exit 255
exec env -i HOME="$home" PATH="$PATH" TPU_WORKER_ID="${target%%:*}" GCE_METADATA_IP=127.0.0.1:9 \\
  PODRL_TPU_DEVICES="$home/dev" PODRL_TPU_LOCK_FILE="$home/lock" bash -c "${words[*]:n + 2}"
"""

PROGRAM = """
import json, os, sys
print("arguments", json.dumps(sys.argv[1:]), "NOTE=" + os.environ["NOTE"])
sys.exit(7 * int(os.environ["TPU_WORKER_ID"]))
"""


class Service(http.server.BaseHTTPRequestHandler):
    """Fakes the TPU and Compute Engine services for `gcloud compute tpus tpu-vm`."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if path.endswith(":getGuestAttributes"):
            found = {"guestAttributes": []}
        elif path.endswith("/nodes/my-tpu"):
            found = NODE if self.command == "GET" else DONE
        elif "/operations/" in path:
            found = DONE
        else:
            found = {"name": "p", "commonInstanceMetadata": {"fingerprint": "abc=", "items": []}}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PATCH = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def tpu_vm(tmp_path):
    """Yields a function that runs tpu_vm.sh from a small checkout."""
    checkout = tmp_path / "checkout"
    (checkout / "podrl").mkdir(parents=True)
    (checkout / "podrl" / "launch.py").write_text(PROGRAM)
    shutil.copytree(REPOSITORY / "launch", checkout / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bin").mkdir()
    for name in ("ssh", "scp"):
        (tmp_path / "bin" / name).write_text(SSH.replace("ROOT", str(tmp_path)))
        (tmp_path / "bin" / name).chmod(0o755)
    for worker in range(WORKERS):
        (tmp_path / f"w{worker}" / "dev").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CLOUDSDK_", "SSH_"))},
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CLOUDSDK_CONFIG": str(tmp_path / "home" / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{url}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{url}/compute/v1/",
    }

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [str(checkout / "launch" / "tpu_vm.sh"), "my-tpu", "z-1", "--project=p", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    yield run
    server.shutdown()
    server.server_close()


def test_the_real_gcloud_runs_what_we_say_on_every_worker(tpu_vm, tmp_path):
    flags = ["--config=grpo_gemma.py", '--config.data.system_prompt=it\'s  $HOME; "x"']
    done = tpu_vm(f"--python={sys.executable}", "--env=NOTE=two  words", "--", *flags)
    assert done.returncode == 7, done.stdout + done.stderr
    for worker in range(WORKERS):
        assert f"[w{worker}] arguments {json.dumps(flags)} NOTE=two  words" in done.stdout.splitlines()
        assert f"[w{worker}] exit status {7 * worker}" in done.stdout.splitlines()
    status = tpu_vm("--status")
    assert status.returncode == 0 and "READY\tHEALTHY" in status.stdout, status.stderr
    assert "[w1] ended with exit status 7" in status.stdout
    (tmp_path / "w0" / "lock").touch()
    assert tpu_vm("--kill").returncode == 0 and not (tmp_path / "w0" / "lock").exists()
    logs = tpu_vm("--logs")
    assert logs.returncode == 7 and logs.stdout.count("arguments") == WORKERS
