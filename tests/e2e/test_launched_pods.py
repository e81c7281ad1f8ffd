"""Pods that launch/ itself starts, and that are preempted and started again, end as undisturbed pods."""

import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys

import pytest
import yaml
from processes import DEADLINE_S, SMALL, environment, run, same_end, trained_steps
from waits import until

from launch import gke, gke_add
from podrl.runtime.local_pod import free_ports

# Hosts get a machine's environment, not a test's, so their programs are compiled as for users.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.optimised,
    pytest.mark.nightly("launch", "podrl/runtime/detect.py", "podrl/runtime/joining.py"),
]
ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "launch"))
import kubelet  # noqa: E402

_ADDRESS = r"[-\w]+\.podrl(?:-more)?:\d+"
FLAGS = [flag for flag in SMALL if not flag.startswith("--config=")] + ["--fake_devices=2", "--shared_workdir"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Runs pods of local processes with the same numbers of hosts and devices; returns their run directories by
    topology."""
    folder = tmp_path_factory.mktemp("undisturbed")
    split = ("--config.roles.trainer.hosts=0-1", "--topology=split", "--local_processes=4", "--fake_devices=2")
    return {
        "split": run(folder / "split" / "run", *split).workdir,
        "shared": run(folder / "shared" / "run", "--local_processes=2", "--fake_devices=2").workdir,
    }


class Set:
    """Runs the containers of a JobSet, and of a JobSet added to it, as local processes with GKE's environment."""

    def __init__(self, workdir: pathlib.Path, logs: pathlib.Path):
        flags = ["--config=grpo_gemma.py", "--workdir=gs://bucket/run", "--image=podrl:1"]
        args, extra = gke.parse([*flags, "--trainer=v5e:2x4", "--rollout=v5e:2x2*2", "--", *FLAGS])
        document = yaml.safe_load(gke.to_yaml(gke.manifest(args, extra)))
        document["metadata"]["uid"] = "1"
        joins = gke_add.manifest(gke_add.parse(["--join=podrl"]), document)
        pods = [self._pods(each, workdir) for each in (document, joins)]
        words = " ".join(word for command, place in (*pods[0], *pods[1]) for word in (*command, *place.values()))
        addresses = sorted(set(re.findall(_ADDRESS, words)))
        self._ports = dict(zip(addresses, free_ports(len(addresses)), strict=True))
        self._pods_of_the_job, self._added = pods
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self.processes = logs, []

    @staticmethod
    def _pods(document: dict, workdir: pathlib.Path) -> list[tuple[list[str], dict[str, str]]]:
        """Lists the command and the environment of every pod."""
        template = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        command = template["spec"]["containers"][0]["command"]
        assert command[:3] == ["python", "-m", "podrl.launch"]
        command = [f"--workdir={workdir}" if word.startswith("--workdir=") else word for word in command]
        return [(command, pod) for pod in kubelet.pods(document)]

    def _local(self, value: str) -> str:
        """Maps host names of the cluster's DNS to this machine, with a port for each listener."""
        return re.sub(_ADDRESS, lambda m: f"127.0.0.1:{self._ports[m[0]]}", value)

    def start(self, attempt: int, *, added: bool = False) -> "Set":
        self.processes = []
        for number, (command, pod) in enumerate(self._pods_of_the_job + (self._added if added else [])):
            more = {name: self._local(value) for name, value in pod.items()}
            more |= {"PODRL_RESTART_ATTEMPT": str(attempt), "JAX_PLATFORMS": "cpu"}
            words = [sys.executable, *map(self._local, command[1:])]
            with (self._logs / f"{attempt}-{number}.txt").open("w") as log:
                self.processes.append(subprocess.Popen(words, env=environment(**more), stdout=log, stderr=log))
        return self

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._logs.iterdir()))

    def end(self) -> list[int]:
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(DEADLINE_S))
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(self.logs()) from None
        return codes

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def wait_for_step(workdir: pathlib.Path, step: int, alive) -> None:
    def trained() -> bool:
        assert alive()
        return (workdir / "metrics.jsonl").exists() and step in trained_steps(workdir)

    until(trained, f"step {step}")


def test_a_jobset_is_preempted_restarted_and_finishes(tmp_path, undisturbed):
    """When the JobSet is started again, an added rollout host joins it."""
    workdir = tmp_path / "run"
    jobset = Set(workdir, tmp_path / "logs")
    try:
        jobset.start(0)
        wait_for_step(workdir, 2, lambda: all(p.poll() is None for p in jobset.processes))
        for process in jobset.processes:
            process.send_signal(signal.SIGTERM)
        assert jobset.end() == [75] * 4, jobset.logs()
        assert trained_steps(workdir)[-1] < 6
        assert jobset.start(1, added=True).end() == [0] * 5, jobset.logs()
        assert "rollout 2 (host 4) joined the job" in jobset.logs()
    finally:
        jobset.kill()
    same_end(workdir, undisturbed["split"])


def test_tpu_vm_hosts_are_killed_started_again_and_finish(tmp_path, undisturbed):
    workdir, fake = tmp_path / "run", tmp_path / "bin" / "gcloud"
    for worker in range(2):
        (tmp_path / f"w{worker}" / "dev").mkdir(parents=True)
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}\n{(ROOT / 'tests' / 'launch' / 'fake_gcloud.py').read_text()}")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    checkout = tmp_path / "checkout"
    for name in ("podrl", "launch", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for lock in ROOT.glob("requirements*.lock"):
        shutil.copy(lock, checkout)

    def tpu_vm(*words: str) -> subprocess.CompletedProcess:
        variables = {"FAKE_TPU_ROOT": str(tmp_path), "FAKE_TPU_METADATA": "127.0.0.1:9"}
        path = f"{fake.parent}:{os.environ['PATH']}"
        command = [str(checkout / "launch" / "tpu_vm.sh"), "tpu", "zone", *words]
        return subprocess.run(
            command, env=environment(**variables, PATH=path), capture_output=True, text=True, timeout=DEADLINE_S
        )

    def start(*more: str) -> subprocess.CompletedProcess:
        coordinator, channel = free_ports(2)
        place = [
            "PLATFORM=local",
            "PROCESS_COUNT=2",
            f"COORDINATOR=127.0.0.1:{coordinator}",
            f"CHANNEL=127.0.0.1:{channel}",
        ]
        exports = [f"--env=PODRL_{pair}" for pair in place] + ["--env=JAX_PLATFORMS=cpu"]
        flags = ["--config=grpo_gemma.py", f"--workdir={workdir}", *FLAGS]
        return tpu_vm(f"--python={sys.executable}", "--max_restarts=0", *exports, *more, "--", *flags)

    assert start("--detach").returncode == 0
    try:
        wait_for_step(workdir, 2, lambda: True)
    finally:
        killed = tpu_vm("--kill", "--grace=100")
    assert "exit status 75" in killed.stdout, killed.stdout + killed.stderr
    again = start()
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Resumed after step" in again.stdout and again.stdout.count("exit status 0") == 2
    same_end(workdir, undisturbed["shared"])
