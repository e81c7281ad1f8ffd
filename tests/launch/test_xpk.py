"""launch.xpk builds commands for xpk; if xpk 1.16 is installed, the real xpk reads them."""

import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys

import jobset_failures
import pytest
import real_xpk
import yaml
from waits import PATIENCE_S, until

from launch import xpk

FLAGS = [
    "--cluster=c",
    "--project=p",
    "--zone=us-east5-b",
    "--machine=v6e:4x4*2",
]
IMAGE = ("--image=registry/podrl:1", "--config=grpo_gemma.py", "--workdir=gs://bucket/run")
PATHWAYS = ["--pathways", "--scratch=gs://bucket/pathways"]


def build(*flags: str) -> list[str]:
    args, extra = xpk.parse([*FLAGS, *flags])
    return xpk.xpk_command(args, extra)


def test_mcjax_command():
    words = build(*IMAGE, "--env=A=b c", "--max_restarts=9", "--grace_seconds=77", "--", "--config.note=it's")
    assert words[:3] == ["xpk", "workload", "create"]
    assert (
        "--command=exec python -m podrl.launch --config=grpo_gemma.py --workdir=gs://bucket/run "
        + ("'--config.note=it'\"'\"'s'")
        in words
    )
    assert {
        "--workload=podrl",
        "--cluster=c",
        "--project=p",
        "--zone=us-east5-b",
        "--tpu-type=v6e-4x4",
        "--num-slices=2",
        "--docker-image=registry/podrl:1",
        "--restart-on-exit-codes=42,75",
        "--max-restarts=9",
        "--termination-grace-period-seconds=77",
        "--env=A=b c",
        "--env=PYTHONUNBUFFERED=1",
    } <= set(words)


JOIN = ("--join=run1", "--env=PODRL_SECRET_FILE=gs://bucket/run.secret-5e5e5e5e", "--name=more", "--machine=v6e:2x4")


def test_a_further_workload_joins_one_that_trains(capsys):
    """The new workload runs the job's command. It gets the name of trainer 0 in the JobSet, and the job's secret."""
    job = ("--", "--topology=split", "--config.roles.trainer.mesh=fsdp=32")
    words = build(*IMAGE, *JOIN, *job)
    (command,) = (word.removeprefix("--command=exec ") for word in words if word.startswith("--command="))
    (theirs,) = (word.removeprefix("--command=exec ") for word in build(*IMAGE, "--name=run1", *job) if "exec" in word)
    assert command == f"{theirs} --join=run1-slice-job-0-0.run1:8483"
    assert [w for w in words if "SECRET" in w] == ["--env=PODRL_SECRET_FILE=gs://bucket/run.secret-5e5e5e5e"]
    assert xpk.main([*FLAGS, *IMAGE, "--name=run1", "--dry_run", *job]) == 0
    printed = capsys.readouterr().out
    (written,) = re.findall(r"gcloud storage cp - \\?\s*(gs://\S+)|$", printed)[:1]
    assert f"with --join=run1 --env=PODRL_SECRET_FILE={written}" in printed.splitlines()[-1]
    assert printed.splitlines()[-1].startswith("#")  # the earlier lines are shell commands
    assert xpk.main([*FLAGS, *IMAGE, *JOIN, "--dry_run", *job]) == 0
    assert "openssl" not in capsys.readouterr().out  # the further workload gets no new secret


def test_every_submission_has_a_secret_file_of_its_own():
    first, second = ([w for w in build(*IMAGE) if w.startswith("--env=PODRL_SECRET")] for _ in range(2))
    assert len(first) == len(second) == 1 and first != second
    assert re.fullmatch(r"--env=PODRL_SECRET_FILE=gs://bucket/run\.secret-[0-9a-f]{8}", first[0])
    assert not [w for w in build(*IMAGE, *PATHWAYS) if "PODRL_SECRET" in w]
    own = build(*IMAGE, "--env=PODRL_SECRET_FILE=gs://mine/s")
    assert [w for w in own if "PODRL_SECRET" in w] == ["--env=PODRL_SECRET_FILE=gs://mine/s"]


def test_pathways_command_has_no_restart_codes():
    words = build(*IMAGE, *PATHWAYS)
    assert words[:3] == ["xpk", "workload", "create-pathways"]
    assert "--pathways-gcs-location=gs://bucket/pathways" in words
    assert not [w for w in words if w.startswith("--restart-on-exit-codes")]


def test_headless_pathways_runs_no_program():
    words = build(*PATHWAYS, "--headless")
    assert "--headless" in words
    assert not [w for w in words if w.startswith(("--command", "--docker-image", "--env"))]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--image is missing: only --headless"),
        (IMAGE[:1], "--config is missing"),
        ([*PATHWAYS, "--headless", IMAGE[2]], "--workdir is given, but --headless starts no program"),
        ([*IMAGE, "--headless"], "--headless starts a Pathways proxy without a program: give --pathways too"),
        ([*IMAGE, "--pathways"], "--scratch=None: Pathways needs a gs:// directory"),
        ([*IMAGE, "--scratch=gs://b"], "is read by Pathways only"),
        ([*IMAGE, "--machine=v6e-8t:2x4"], "xpk 1.16 has no v6e-8t:2x4 (ct6e-standard-8t)"),
        ([*IMAGE, '--env=A="b"'], "holds a quote"),
        ([*IMAGE, "--env=PODRL_SECRET=s3"], "to everyone who lists processes: leave it out"),
        ([*IMAGE, *PATHWAYS, "--name=" + "a" * 23], "have at most 22 characters; this one has 23"),
        ([*IMAGE, "--workdir=/tmp/run"], "is a path inside a pod"),
        ([*IMAGE, "--join=run1"], "--machine=v6e:4x4*2 would make one cluster of 2 slices"),
        ([*IMAGE, *JOIN[:1], *JOIN[2:]], "--join=run1 needs --env=PODRL_SECRET_FILE=gs://"),
        ([*IMAGE, *JOIN, "--name=run1"], "--name=run1 is the workload that runs"),
        ([*IMAGE, *JOIN, "--join=Run1"], "--join=Run1 must be lower-case"),
        ([*IMAGE, *JOIN, *PATHWAYS], "leave --pathways out"),
        ([*IMAGE, "--", "--topology=split", "--config.roles.trainer.mesh=fsdp=4"], "roles.trainer.mesh=fsdp=4 take 4"),
    ],
)
def test_refuses_by_name(flags, message, capsys):
    assert xpk.main([*FLAGS, *flags, "--dry_run"]) == 1
    assert message in capsys.readouterr().err


def test_dry_run_prints_what_would_run_and_runs_nothing(tmp_path, monkeypatch, capfd):
    for name, code in (("xpk", 5), ("gcloud", 0), ("kubectl", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >{tmp_path}/{name}.arguments\n')
        if name == "gcloud":
            program.write_text(program.read_text() + f"cat >{tmp_path}/secret\n")
        program.write_text(program.read_text() + f"exit {code}\n")
        program.chmod(0o755)

    def arguments(name: str) -> list[str]:
        return (tmp_path / f"{name}.arguments").read_text().split("\0")[:-1]

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(secrets, "token_hex", lambda n: "5e" * n)
    flags = [*FLAGS, *IMAGE, "--env=A=b c"]
    assert xpk.main([*flags, "--dry_run"]) == 0
    printed = capfd.readouterr().out
    assert not (tmp_path / "xpk.arguments").exists() and not (tmp_path / "gcloud.arguments").exists()
    assert xpk.main(flags) == 5
    ran, wrote = arguments("xpk"), arguments("gcloud")
    assert ran == build(*IMAGE, "--env=A=b c")[1:]
    assert wrote == ["storage", "cp", "-", "gs://bucket/run.secret-5e5e5e5e"]
    assert f"--env=PODRL_SECRET_FILE={wrote[-1]}" in ran
    secret = (tmp_path / "secret").read_text()
    assert len(secret) == 32 and not any(secret in word for word in [*ran, *wrote, printed, *capfd.readouterr()])
    # A shell reads the printed command as the same arguments.
    (tmp_path / "xpk.arguments").unlink()
    assert subprocess.run(["bash", "-c", printed], check=False).returncode == 5
    assert arguments("xpk") == ran and arguments("gcloud") == wrote
    # Values of variables with secret-like names go to the command only, and are not printed.
    assert xpk.main([*flags, "--env=WANDB_API_KEY=w4ndb"]) == 5
    assert "--env=WANDB_API_KEY=w4ndb" in arguments("xpk")
    assert "--env=WANDB_API_KEY=REDACTED" in (shown := capfd.readouterr().out) and "w4ndb" not in shown
    # Without a place for the secret the job is not submitted.
    (tmp_path / "xpk.arguments").unlink()
    (tmp_path / "gcloud").write_text("#!/bin/sh\nexit 7\n")
    assert xpk.main(flags) == 1 and "gs://bucket/run.secret-5e5e5e5e cannot be written" in capfd.readouterr().err
    assert not (tmp_path / "xpk.arguments").exists()


XPKS_JOBSET = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  failurePolicy:
    rules:
      - action: FailJobSet
        onJobFailureReasons:
        - PodFailurePolicy
    maxRestarts: 50
  replicatedJobs:
    - name: slice-job
      template:
        spec:
          podFailurePolicy:
            rules:

            - action: FailJob
              onPodConditions: []
              onExitCodes:
                containerName: jax-tpu
                operator: NotIn
                values: [42, 75, 134, 137, 139, 143]
"""


def check_restarts(document: dict) -> None:
    """Checks which exit codes of a pod restart the JobSet, and which restarts count towards its limit."""
    uncounted = "RestartJobSetAndIgnoreMaxRestarts"
    actions = {code: jobset_failures.action(document, "slice-job", code) for code in (1, 2, 42, 75, 134, 137, 139, 143)}
    assert {code for code in actions if actions[code] == uncounted} == {75}
    assert {code for code in actions if actions[code] == "FailJobSet"} == {1, 2}
    assert {jobset_failures.action(document, "slice-job", code, disrupted=True) for code in (1, 42, 75, 143)} == {
        uncounted
    }


def test_an_xpk_that_never_ends_is_given_up_with_its_command(tmp_path, monkeypatch, capfd):
    (tmp_path / "xpk").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "xpk").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(xpk, "_WRITES_S", 0.1)
    assert xpk.main([*FLAGS, *IMAGE, "--manifest=m.yaml", "--dry_run"]) == 1
    said = capfd.readouterr().err
    assert "xpk has not written m.yaml within 0.1 s. Run: " in said and "--skip-validation" in said


@pytest.mark.parametrize(("zone", "why"), [(False, "needs --zone=ZONE"), (True, "xpk has not written")])
def test_an_xpk_that_fails_leaves_no_manifest(tmp_path, monkeypatch, capfd, zone, why):
    manifest = tmp_path / "written.yaml"
    (tmp_path / "xpk").write_text(f"#!/bin/sh\necho half >{manifest}\nexit 1\n")
    (tmp_path / "xpk").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    flags = [flag for flag in FLAGS if zone or not flag.startswith("--zone")]
    assert xpk.main([*flags, *IMAGE, f"--manifest={manifest}", "--dry_run"]) == 1
    assert why in capfd.readouterr().err and not manifest.exists()


@pytest.mark.nightly("launch", ".ci/xpk.txt")
@pytest.mark.slow
def test_a_dry_run_writes_the_manifest_that_is_submitted(tmp_path, monkeypatch, capfd):
    manifest = tmp_path / "written.yaml"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert xpk.main([*FLAGS, *IMAGE, f"--manifest={manifest}", "--dry_run"]) == 1
    assert "xpk, which writes" in capfd.readouterr().err
    (tmp_path / "xpk").symlink_to(real_xpk.program())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    assert xpk.main([*FLAGS, *IMAGE, f"--manifest={manifest}", "--dry_run"]) == 0, capfd.readouterr()
    check_restarts(yaml.safe_load(manifest.read_text()))


def test_xpk_submits_a_jobset_in_which_restarts_after_a_preemption_are_not_counted(tmp_path, monkeypatch, capfd):
    """xpk starts kubectl through a shell, which finds the kubectl of launch.xpk first. It adds the rules to the JobSet
    and hands the JobSet to the real kubectl."""
    source, manifest, applied = (tmp_path / name for name in ("source.yaml", "written.yaml", "applied.yaml"))
    source.write_text(XPKS_JOBSET)
    for name, text in (
        ("xpk", f"cp {source} {manifest}\nkubectl get nodes && kubectl apply -f {source} -n default || exit 9"),
        ("kubectl", f'echo "$*" >>{tmp_path}/calls\n[ "$1" != apply ] || cat >{applied}'),
        ("gcloud", "cat >/dev/null"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert xpk.main([*FLAGS, *IMAGE, f"--manifest={manifest}"]) == 0, capfd.readouterr()
    assert (tmp_path / "calls").read_text().splitlines() == ["get nodes", "apply -f - -n default"]
    document = yaml.safe_load(applied.read_text())
    assert document == yaml.safe_load(manifest.read_text())
    check_restarts(document)
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 50
    assert "count towards" not in capfd.readouterr().err
    # Manifests of other kinds, and files with several manifests, are applied unchanged; podrl then warns that all
    # restarts count.
    (tmp_path / "calls").unlink()
    source.write_text(others := "kind: ConfigMap\n---\nkind: JobSet\n")
    assert xpk.main([*FLAGS, *IMAGE]) == 0 and applied.read_text() == others
    assert "restarts after a preemption count towards --max_restarts" in capfd.readouterr().err
    source.write_text(other := "kind: JobSet\nspec: {replicatedJobs: [{name: a, template: {spec: {}}}]}\n")
    assert xpk.main([*FLAGS, *IMAGE]) == 0 and applied.read_text() == other
    assert "restarts after a preemption count towards --max_restarts" in capfd.readouterr().err
    # The exit code of the real kubectl is xpk's.
    (tmp_path / "kubectl").write_text("#!/bin/sh\n[ $1 != apply ]\n")
    assert xpk.main([*FLAGS, *IMAGE]) == 9


@pytest.mark.parametrize(
    ("pathways", "lacks", "message"),
    [
        (False, "kubectl", "kubectl is not on PATH: https://"),
        (False, "xpk", "xpk is not on PATH: pip install xpk"),
        (False, "gcloud", "gcloud is not on PATH: https://"),
        (False, "yaml", "pyyaml is not installed"),
        (True, "kubectl", "kubectl is not on PATH: https://"),
        (True, "yaml", ""),
        (True, "", ""),
    ],
)
def test_a_missing_program_or_package_is_named_before_anything_is_written(
    pathways, lacks, message, tmp_path, monkeypatch, capfd
):
    """Pathways jobs get no failure rules, so they need no pyyaml."""
    for name in {"xpk", "gcloud", "kubectl"} - {lacks}:
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/calls\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if lacks == "yaml":
        monkeypatch.setitem(sys.modules, "yaml", None)
    assert xpk.main([*FLAGS, *IMAGE, *(PATHWAYS if pathways else [])]) == bool(message)
    assert message in capfd.readouterr().err and (tmp_path / "calls").exists() != bool(message)


def real_manifest(tmp_path: pathlib.Path, *flags: str) -> dict:
    return real_xpk.manifest(build(*flags), tmp_path)


@pytest.mark.nightly("launch", ".ci/xpk.txt")
@pytest.mark.slow
def test_real_xpk_runs_our_command_with_our_codes(tmp_path):
    document = real_manifest(tmp_path, *IMAGE, "--env=NOTE=two words", "--max_restarts=9", "--grace_seconds=77")
    (replicated,) = document["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completions"], job["parallelism"]) == (2, 4, 4)
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 9
    check_restarts(yaml.safe_load(xpk.with_rules(yaml.safe_dump(document))))
    (rule,) = job["podFailurePolicy"]["rules"]
    assert {42, 75, 134, 137, 143} <= set(rule["onExitCodes"]["values"]) and 1 not in rule["onExitCodes"]["values"]
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 77
    (container,) = pod["containers"]
    assert container["image"] == "registry/podrl:1"
    assert {"name": "NOTE", "value": "two words"} in container["env"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    shell = container["command"]
    assert "exec python -m podrl.launch --config=grpo_gemma.py --workdir=gs://bucket/run" in shell[-1]
    run_container(tmp_path, shell)


def run_container(tmp_path: pathlib.Path, shell: list[str]) -> None:
    """Runs a container's command, and asserts that xpk's wrapper passes SIGTERM to podrl and returns podrl's exit code.

    The wrapper can do so only because launch.xpk starts podrl with `exec`.
    """
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'started').write_text(' '.join(sys.argv[1:]))\n"
        "time.sleep(600)\n"
    )
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    container = subprocess.Popen(shell, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    until((tmp_path / "started").exists)
    assert (tmp_path / "started").read_text().startswith("-m podrl.launch --config=grpo_gemma.py")
    container.send_signal(signal.SIGTERM)
    output, _ = container.communicate(timeout=PATIENCE_S)
    assert container.returncode == 75, output
    assert "EXIT_CODE=75" in output


@pytest.mark.nightly("launch", ".ci/xpk.txt")
@pytest.mark.slow
def test_real_xpk_gives_trainer_0_the_name_that_others_join(tmp_path):
    """JobSet names a pod JOBSET-JOB-SLICE-HOST.JOBSET, unless its network has another subdomain."""
    document = real_manifest(tmp_path, *IMAGE, "--name=run1", "--", "--topology=split")
    assert document["metadata"]["name"] == "run1" and "network" not in document["spec"]
    assert [replicated["name"] for replicated in document["spec"]["replicatedJobs"]] == ["slice-job"]
    joins = real_manifest(tmp_path, *IMAGE, *JOIN)
    (replicated,) = joins["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["replicas"] == 1 and "--join=run1-slice-job-0-0.run1:8483" in container["command"][-1]


@pytest.mark.nightly("launch", ".ci/xpk.txt")
@pytest.mark.slow
def test_real_xpk_accepts_pathways(tmp_path):
    document = real_manifest(tmp_path, *IMAGE, *PATHWAYS)
    head, worker = document["spec"]["replicatedJobs"]
    (user,) = head["template"]["spec"]["template"]["spec"]["containers"]
    environment = {v["name"]: v.get("value") for v in user["env"]}
    assert environment["JAX_PLATFORMS"] == "proxy" and environment["PYTHONUNBUFFERED"] == "1"
    assert environment["JAX_BACKEND_TARGET"] == "grpc://$(PATHWAYS_HEAD):29000"
    assert "exec python -m podrl.launch" in user["command"][-1]
    assert (worker["replicas"], worker["template"]["spec"]["completions"]) == (2, 4)


@pytest.mark.nightly("launch", ".ci/xpk.txt")
@pytest.mark.slow
def test_real_xpk_accepts_headless_pathways(tmp_path):
    document = real_manifest(tmp_path, *PATHWAYS, "--headless")
    head = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [c["name"] for c in head["containers"]] == ["pathways-proxy", "pathways-rm"]
