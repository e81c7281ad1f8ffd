"""Adds rollout hosts to a running JobSet of launch.gke: writes, and on --apply submits, a second JobSet that joins it.

  python -m launch.gke_add --join=podrl --slices=2 [--name=podrl-more] [--spot] [--apply]

Everything else is read from the running set, by `kubectl get jobset`: image, command, environment, the shape of its
rollout slices, and the name of its Secret, whose content stays in the cluster. So the added pods have the job's
settings, and an added slice holds the weights in the same way as the other slices. The added pods reach trainer 0 by
the name that JobSet gives it.

What happens to the added pods:
  a pod ends      it is restarted in place, like a rollout pod of the job, even while the trainers are recreated or if
                  its machine is taken away. After 20 restarts per host (gke.ROLLOUT_RETRIES) these pods are not started
                  again, because the job has then probably failed.
  the job's end   the added set is complete; when the job's set is deleted, the added set is also deleted.
  fewer hosts     after `kubectl delete jobset NAME` each pod gets SIGTERM and leaves after its step; the job goes on.
"""

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import command, gke, submission

# Keys that gke.py sets; only these are copied. When the queue admits a job, it adds further keys for the job's quota.
# The queue refuses pods with labels or annotations of another job's quota, and a copied scheduling gate would never be
# lifted.
_SELECTED = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")
_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance")
_COMPONENT = "app.kubernetes.io/component"
_QUEUE = "kueue.x-k8s.io/queue-name"
_SPOT = "cloud.google.com/gke-spot"
_TOLERATED = ("google.com/tpu", _SPOT)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the flags."""
    parser = command.make_parser("gke_add", __doc__)
    parser.add_argument("--join", required=True, help="name of the JobSet that runs")
    parser.add_argument(
        "--slices", type=int, default=1, help="slices to add, of the shape that the job's rollouts have"
    )
    parser.add_argument("--name", help="name of the added JobSet; default: that of --join with -more")
    parser.add_argument("--namespace", default="default", help="namespace of both")
    parser.add_argument("--queue", help="Kueue LocalQueue; default: the job's; '' for none")
    parser.add_argument("--spot", action="store_true", help="run on spot node pools, even if the job itself does not")
    parser.add_argument("--apply", action="store_true", help="submit with kubectl apply")
    parser.add_argument("--dry_run", action="store_true", help="with --apply: print the kubectl command, run nothing")
    args = parser.parse_args(argv)
    args.name = args.name or f"{args.join}-more"
    return args


def manifest(args: argparse.Namespace, runs: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the JobSet that joins the running JobSet.

    Args:
      args: the launcher's flags.
      runs: the running JobSet, as kubectl prints it.

    Raises:
      ValueError: the running JobSet does not have launch.gke's trainer and rollout jobs, or a flag has a bad value.
    """
    if args.slices < 1:
        raise ValueError(f"--slices={args.slices} must be at least 1.")
    name = command.job_name(args.name, gke.NAME_LIMIT)
    if name == args.join:
        raise ValueError(f"--name={name} is the set that runs: give the added set another name.")
    of = {job["name"]: job for job in runs["spec"]["replicatedJobs"]}
    if set(of) != {"trainer", "rollout"}:
        raise ValueError(f"--join={args.join} is a JobSet of {', '.join(of)}: launch.gke makes trainer and rollout.")
    added = copy.deepcopy(of["rollout"]["template"])
    batch = added["spec"]
    pod = batch["template"]["spec"]
    pod["nodeSelector"] = {key: pod["nodeSelector"][key] for key in (*_SELECTED, _SPOT) if key in pod["nodeSelector"]}
    pod["tolerations"] = [taint for taint in pod["tolerations"] if taint.get("key") in _TOLERATED]
    pod.pop("schedulingGates", None)
    if args.spot and _SPOT not in pod["nodeSelector"]:
        pod["nodeSelector"][_SPOT] = "true"
        pod["tolerations"].append({"key": _SPOT, "operator": "Exists", "effect": "NoSchedule"})
    (container,) = pod["containers"]
    channel = f"{args.join}-trainer-0-0.{args.join}:{gke.CHANNEL_PORT}"
    container["command"].append(f"--join={channel}")
    own = {"PODRL_SLICES": str(args.slices), "PODRL_CHANNEL": channel}
    for variable in container["env"]:
        variable |= {"value": own[variable["name"]]} if variable["name"] in own else {}
    labels_of_pod = batch["template"]["metadata"]["labels"]
    batch["template"]["metadata"] = {"labels": {key: labels_of_pod[key] for key in (*_LABELS, _COMPONENT)}}
    labels = {key: labels_of_pod[key] for key in _LABELS}
    queue = runs["metadata"].get("labels", {}).get(_QUEUE, "") if args.queue is None else args.queue
    owner = {"apiVersion": gke.API, "kind": "JobSet", "name": args.join, "uid": runs["metadata"]["uid"]}
    return {
        "apiVersion": gke.API,
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": args.namespace,
            "labels": labels | ({_QUEUE: queue} if queue else {}),
            "ownerReferences": [owner],
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["rollout"]},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": 3600,
            "replicatedJobs": [{"name": "rollout", "replicas": args.slices, "template": added}],
        },
    }


def read(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the running JobSet.

    Raises:
      ValueError: kubectl is not installed, kubectl finds no such set, or the set has ended.
    """
    words = ["kubectl", "get", "jobset", args.join, f"--namespace={args.namespace}", "--output=json"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"kubectl is not on PATH: {gke.MISSING['kubectl']}") from None
    if done.returncode:
        raise ValueError(f"--join={args.join} cannot be read: {submission.sentence(done.stderr)}")
    runs = json.loads(done.stdout)
    if ended := runs.get("status", {}).get("terminalState"):
        raise ValueError(f"--join={args.join} has ended ({ended}), so it cannot be joined.")
    return runs


def main(argv: Sequence[str]) -> int:
    """Prints the manifest, submits it on --apply; returns the exit code."""
    args = parse(argv)
    try:
        text = gke.to_yaml(manifest(args, read(args)))
    except ValueError as error:
        sys.stderr.write(f"launch.gke_add: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        sys.stderr.write(f"launch.gke_add: {error}: 'pip install pyyaml' installs it.\n")
        return 1
    print(text, end="", flush=True)
    return gke.submit(text, args) if args.apply else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
