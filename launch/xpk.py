"""Builds and runs the xpk command that trains podrl on a GKE cluster made by xpk, with or without Pathways.

  python -m launch.xpk --cluster=my-cluster --project=my-project --zone=us-east5-b --machine=v6e:4x4 \\
    --config=grpo_gemma.py --workdir=gs://bucket/run --image=REGISTRY/podrl:1 -- --config.trainer.learning_rate=1e-6

`--dry_run` prints the command and submits nothing; with `--manifest=FILE` xpk writes the JobSet, without a cluster.
Flags are those of xpk 1.16.0 (https://github.com/AI-Hypercomputer/xpk), installed by `pip install xpk==1.16.0`.

Rollout hosts of their own: with --topology=split among the flags after `--`, the workload only trains. The launcher
then prints the command for further workloads, one slice each, that generate for it (--join=NAME); they may come and go:

  python -m launch.xpk --join=podrl --env=PODRL_SECRET_FILE=gs://bucket/run.secret-... --name=podrl-rollout-0 [as above]

What xpk adds, and what it lacks:
  McJAX     one pod per host, all restarted together on exit codes 42, 75 and 127-255, --max_restarts times at most. xpk
            has no flag for restarts that are not counted. So while xpk runs, a program named kubectl stands before the
            real one on PATH and adds rules to the JobSet that xpk applies: after a preemption (a pod exits with 75, or
            the cluster disrupts it) the pods are recreated any number of times. The rules of an existing JobSet cannot
            be changed. This needs pyyaml here, and in the cluster JobSet 0.10, which xpk 1.16 installs.
  Pathways  (`create-pathways`) takes no restart codes and its manifest has no restart limit; the grace period reaches
            the workers only. The user container gets JAX_PLATFORMS=proxy and JAX_BACKEND_TARGET from xpk.

xpk writes every variable into the manifest and knows no Secrets. So the key that encrypts the hosts' channel is in a
file beside the run, gs://BUCKET/RUN.secret-..., which everyone who may read the run can read.
"""

import argparse
import importlib.util
import pathlib
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from . import command, machines, submission

MISSING = {
    "xpk": "pip install xpk==1.16.0, best in an environment of its own, because it pins other versions than podrl.",
    "gcloud": "https://cloud.google.com/sdk/docs/install.",
    "kubectl": "https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-access-for-kubectl.",
}
# Names of this length leave room for '-slice-job-99-99-abcde', which xpk appends, in the 63 characters of a pod name.
# With Pathways the limit is Google's,
# https://cloud.google.com/ai-hypercomputer/docs/workloads/pathways-on-cloud/pathways-interactive-mode
NAME_LIMIT = 40
# Names of xpk's pods, and the port of podrl's channel there: podrl/runtime/detect.py.
_TRAINER_0 = "{0}-slice-job-0-0.{0}:8483"
PATHWAYS_NAME_LIMIT = 22
_WRITES_S = 300  # longest wait for xpk to write a manifest


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the launcher's flags, and podrl's own flags after `--`."""
    own, extra = command.split_extra(argv)
    parser = command.make_parser("xpk", __doc__)
    parser.add_argument("--cluster", required=True, help="cluster made by xpk cluster create[-pathways]")
    parser.add_argument("--config", help="podrl configuration, as grpo_gemma.py (not for --headless)")
    parser.add_argument("--workdir", help="run directory, gs://BUCKET/RUN (not for --headless)")
    parser.add_argument("--image", help="container image built from launch/Dockerfile (not for --headless)")
    parser.add_argument("--machine", required=True, help="MACHINE:TOPOLOGY[*SLICES], as v6e:4x4*2")
    parser.add_argument("--name", default="podrl", help="name of the workload")
    parser.add_argument(
        "--join", help="name of a running workload with --topology=split: the new workload generates for it"
    )
    parser.add_argument("--code", metavar="DIR", help=submission.HELP)
    parser.add_argument("--project", help="project; default: gcloud's")
    parser.add_argument("--zone", help="zone; default: gcloud's")
    parser.add_argument(
        "--pathways",
        action="store_true",
        help="run one controller with the Pathways proxy instead of one process per host",
    )
    parser.add_argument(
        "--headless", action="store_true", help="with --pathways: start the proxy only, run podrl elsewhere"
    )
    parser.add_argument("--scratch", help="with --pathways: gs:// directory for Pathways' compilation artifacts")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=50,
        help="restarts before the job counts as failed; see above for preemptions",
    )
    parser.add_argument("--grace_seconds", type=int, default=300, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--priority", default="medium", help="xpk's --priority")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the container; may be repeated")
    parser.add_argument("--manifest", help="also write the manifest to this file; with --dry_run without a cluster")
    parser.add_argument("--dry_run", action="store_true", help="print the command and run nothing")
    args = parser.parse_args(own)
    args.secret_file = f"{(args.workdir or '').rstrip('/')}.secret-{secrets.token_hex(4)}"  # new for every submission
    return args, extra


def xpk_command(args: argparse.Namespace, extra: Sequence[str], code: submission.Code | None = None) -> list[str]:
    """Builds the xpk command line for the launcher's flags.

    Args:
      args: the launcher's flags.
      extra: podrl's flags, the arguments after `--`.
      code: the user's code that is sent with the job; None for none.

    Raises:
      ValueError: flags contradict one another, or xpk would refuse them only after minutes.
    """
    slices = machines.parse_slices(args.machine, "--machine")
    _check(args, slices)
    words = ["xpk", "workload", "create-pathways" if args.pathways else "create"]
    name = command.job_name(args.name, PATHWAYS_NAME_LIMIT if args.pathways else NAME_LIMIT)
    words += [f"--workload={name}", f"--cluster={args.cluster}"]
    words += [f"--{flag}={value}" for flag, value in (("project", args.project), ("zone", args.zone)) if value]
    words += [f"--tpu-type={slices.xpk_type}", f"--num-slices={slices.count}"]
    if args.headless:
        words += ["--headless"]
    else:
        chips = {} if args.join else {"trainer" if "--topology=split" in extra else "all": slices.devices}
        submission.check_job(args.config, extra, chips, code=code)
        leader = _TRAINER_0.format(command.job_name(args.join, NAME_LIMIT, "--join")) if args.join else ""
        joins = [f"--join={leader}"] if leader else []
        podrl = command.podrl_command(args.config, args.workdir, [*extra, *joins], code)
        # xpk runs `(COMMAND) &` and sends SIGTERM to this subshell, which would not pass it on without exec.
        words += [f"--docker-image={args.image}", f"--command=exec {shlex.join(podrl)}"]
        environment = command.environment(args.env)
        if needs_secret(args):
            environment["PODRL_SECRET_FILE"] = args.secret_file
        words += [f"--env={name}={value}" for name, value in environment.items()]
    if args.pathways:
        words += [f"--pathways-gcs-location={args.scratch}"]
    else:
        words += [f"--restart-on-exit-codes={','.join(map(str, command.RESTART_CODES))}"]
    words += [f"--max-restarts={args.max_restarts}", f"--termination-grace-period-seconds={args.grace_seconds}"]
    words += [f"--priority={args.priority}"]
    if args.manifest:
        words += [f"--output-manifest-file={args.manifest}"]
    return words


def needs_secret(args: argparse.Namespace) -> bool:
    """True if this submission must write a secret.

    Pathways needs none, and --env=PODRL_SECRET_FILE may name a file that holds one.
    """
    own = any(pair.startswith("PODRL_SECRET_FILE=") for pair in args.env)
    return not (args.pathways or args.headless or own)


def _check(args: argparse.Namespace, slices: machines.Slices) -> None:
    if args.join and args.pathways:
        raise ValueError(f"--join={args.join} is for hosts with a process each: leave --pathways out.")
    if args.join and slices.count > 1:
        raise ValueError(
            f"--machine={args.machine} would make one cluster of {slices.count} slices, which all end when one of them "
            "ends: with --join give each slice a workload of its own."
        )
    if args.join and needs_secret(args):
        raise ValueError(
            f"--join={args.join} needs --env=PODRL_SECRET_FILE=gs://..., the file with that job's secret: launch.xpk "
            "printed the command when it submitted the job."
        )
    if not args.pathways:
        machines.check_multislice(slices, f"--machine={args.machine}")
    if args.join == args.name:
        raise ValueError(f"--name={args.name} is the workload that runs: give this workload another name.")
    if args.headless and not args.pathways:
        raise ValueError("--headless starts a Pathways proxy without a program: give --pathways too.")
    if args.pathways and not (args.scratch or "").startswith("gs://"):
        raise ValueError(f"--scratch={args.scratch}: Pathways needs a gs:// directory for its artifacts.")
    if args.scratch and not args.pathways:
        raise ValueError(f"--scratch={args.scratch} is read by Pathways only: give --pathways, or leave it out.")
    for flag in ("image", "config", "workdir", "code"):
        if not args.headless and not getattr(args, flag) and flag != "code":
            raise ValueError(f"--{flag} is missing: only --headless needs none. See --help.")
        if args.headless and getattr(args, flag):
            raise ValueError(f"--{flag} is given, but --headless starts no program to use it: leave it out.")


def with_rules(manifest: str) -> str:
    """Returns xpk's manifest with the rules by which restarts after a preemption are not counted.

    Args:
      manifest: YAML that xpk applies for a job without Pathways. YAML that is not one JobSet in the form of xpk 1.16 is
        returned as it is.
    """
    import yaml

    documents = list(yaml.safe_load_all(manifest))
    if len(documents) != 1 or not isinstance(documents[0], dict) or documents[0].get("kind") != "JobSet":
        return manifest
    try:
        spec = documents[0]["spec"]
        for replicated in spec["replicatedJobs"]:
            pod_policy = replicated["template"]["spec"]["podFailurePolicy"]
            container = pod_policy["rules"][0]["onExitCodes"]["containerName"]
            pod_policy["rules"] = [*command.preempted_pod_rules(container), *pod_policy["rules"]]
            spec["failurePolicy"]["rules"] = [
                command.preempted_rule(replicated["name"]),
                *spec["failurePolicy"]["rules"],
            ]
    except (KeyError, IndexError, TypeError):  # made by another xpk version; run_xpk warns that no JobSet got the rules
        return manifest
    return yaml.safe_dump(documents[0], sort_keys=False)


def kubectl_apply(argv: Sequence[str], done: str) -> int:
    """Runs `kubectl apply` as xpk does, with podrl's rules in the JobSet of `-f FILE`; returns the exit code.

    Args:
      argv: path of the real kubectl, and xpk's arguments for it.
      done: path of an empty file that is made if a JobSet got the rules.
    """
    words, content = list(argv), None
    if "-f" in words and pathlib.Path(words[at := words.index("-f") + 1]).is_file():
        manifest = pathlib.Path(words[at]).read_text(encoding="utf-8")
        content, words[at] = with_rules(manifest), "-"
        if content != manifest:
            pathlib.Path(done).touch()
    return subprocess.run(words, input=content, encoding="utf-8", check=False).returncode


def run_xpk(words: Sequence[str], kubectl: str) -> int:
    """Runs xpk with a script named kubectl before the real kubectl on PATH; returns the exit code.

    Warns if xpk succeeds and no JobSet got podrl's rules: an xpk other than 1.16 may apply the JobSet in another way.

    Args:
      words: command line of xpk for a job without Pathways.
      kubectl: path of the real kubectl.
    """
    root = str(pathlib.Path(__file__).resolve().parents[(__package__ or "").count(".") + 1])
    with tempfile.TemporaryDirectory() as folder:
        done, script = pathlib.Path(folder, "done"), pathlib.Path(folder, "kubectl")
        program = (
            f"import sys; sys.path.insert(0, {root!r}); from {__package__} import xpk; "
            f"sys.exit(xpk.kubectl_apply(sys.argv[1:], {str(done)!r}))"
        )
        ours = shlex.join([sys.executable, "-c", program])
        script.write_text(
            f'#!/bin/sh\n[ "$1" = apply ] && exec {ours} {shlex.quote(kubectl)} "$@"\n'
            f'exec {shlex.quote(kubectl)} "$@"\n'
        )
        script.chmod(0o755)
        exit_code = command.run(words, path=folder, missing=MISSING)
        if exit_code == 0 and not done.exists():
            sys.stderr.write(
                "launch.xpk: no JobSet got the rules of launch.xpk, so restarts after a preemption count towards "
                "--max_restarts. Either xpk did not use the kubectl that launch.xpk put on its PATH, or its JobSet has "
                f"another form than that of xpk 1.16: {MISSING['xpk']}\n"
            )
        return exit_code


def write_manifest(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Makes xpk write the manifest of a job without submitting it; returns the exit code.

    Args:
      args: the launcher's flags.
      words: xpk's command, which names the file.
    """
    if shutil.which("xpk") is None:
        sys.stderr.write(f"launch.xpk: xpk, which writes {args.manifest}, is not on PATH: {MISSING['xpk']}\n")
        return 1
    if not args.zone:
        sys.stderr.write("launch.xpk: --manifest with --dry_run needs --zone=ZONE, which xpk cannot ask gcloud for.\n")
        return 1
    # With these flags xpk needs no cluster, no gcloud and no docker.
    alone = [*words, "--dry-run", "--skip-validation"]
    try:
        done = subprocess.run(alone, capture_output=True, text=True, timeout=_WRITES_S, check=False)
    except subprocess.TimeoutExpired:
        sys.stderr.write(
            f"launch.xpk: xpk has not written {args.manifest} within {_WRITES_S} s. Run: {command.show(alone)}\n"
        )
        return 1
    if done.returncode:
        pathlib.Path(args.manifest).unlink(missing_ok=True)  # xpk may have written it, without podrl's rules
        sys.stderr.write(f"launch.xpk: xpk has not written {args.manifest}:\n{(done.stdout + done.stderr)[-2000:]}\n")
        return 1
    if not args.pathways:
        _add_rules(args.manifest)
    print(f"# {args.manifest} is written.")
    return 0


def _add_rules(file: str) -> None:
    path = pathlib.Path(file)
    path.write_text(with_rules(path.read_text(encoding="utf-8")), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Prints the command, and runs it unless --dry_run; returns the exit code."""
    args, extra = parse(argv)
    try:
        code = submission.read_code(args.code) if args.code else None
        words = xpk_command(args, extra, code)
        if not args.headless:
            submission.check_flags(args.config, extra, code)
    except ValueError as error:
        sys.stderr.write(f"launch.xpk: {error}\n")
        return 1
    write = ["gcloud", "storage", "cp", "-", args.secret_file]
    if needs_secret(args):
        print(f"openssl rand -hex 16 | {command.show(write)}", flush=True)
    if code:
        print(code.described(args.workdir), flush=True)
    if not args.pathways:
        print("# launch.xpk also adds rules to the JobSet, by which restarts after a preemption are not counted.")
    print(command.show(words), flush=True)
    if "--topology=split" in extra and not args.join:
        own = next((pair for pair in args.env if pair.startswith("PODRL_SECRET_FILE=")), "")
        secret = own or f"PODRL_SECRET_FILE={args.secret_file}"
        print(f"# Rollout hosts: this launch.xpk with --join={args.name} --env={secret} and another --name, --machine")
    if args.dry_run:
        return write_manifest(args, words) if args.manifest else 0
    paths = {name: shutil.which(name) for name in MISSING}
    for name, path in paths.items():
        if path is None:
            sys.stderr.write(f"launch.xpk: {name} is not on PATH: {MISSING[name]}\n")
            return 1
    if not args.pathways and not importlib.util.find_spec("yaml"):
        sys.stderr.write(
            "launch.xpk: pyyaml is not installed, and the JobSet cannot be read without it: pip install pyyaml.\n"
        )
        return 1
    if needs_secret(args) and (failed := command.run(write, stdin=secrets.token_hex(16), missing=MISSING)):
        sys.stderr.write(
            f"launch.xpk: {args.secret_file} cannot be written (gcloud's exit code {failed}); see above.\n"
        )
        return 1
    if code and command.run(code.upload(args.workdir), stdin=code.archive, missing=MISSING):
        sys.stderr.write(f"launch.xpk: {code.url(args.workdir)} cannot be written; see above.\n")
        return 1
    if args.pathways:
        return command.run(words, missing=MISSING)
    exit_code = run_xpk(words, str(paths["kubectl"]))
    if args.manifest and exit_code == 0:
        _add_rules(args.manifest)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
