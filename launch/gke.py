"""Writes, and on --apply submits, one JobSet with two replicated jobs: hosts that train and hosts that generate.

  python -m launch.gke --config=grpo_gemma.py --trainer=v6e:4x4 --rollout=v6e:2x4*2 \\
    --image=REGISTRY/podrl:1 --workdir=gs://bucket/run [--apply] [-- --config.trainer.learning_rate=1e-6]

Without --apply the manifest is printed and nothing else happens; with --apply --dry_run the kubectl command is printed
after the manifest. The key that encrypts the hosts' channel, and variables of --env whose names sound secret, are in a
Secret that is never printed; without --host_network, a NetworkPolicy lets only pods of the job and of launch.gke_add
reach the hosts. This needs pyyaml here, and in the cluster JobSet 0.10 or later (https://jobset.sigs.k8s.io) and, for
the queue label, Kueue.

What happens when a pod ends:
  trainer pod   preempted (it exits with 75, or the cluster disrupts it): all jobs of the set are recreated, however
                often, and podrl resumes from its checkpoint. Exit 42 or death by signal: the same, at most
                --max_restarts times. Any other exit code is the user's error: the set fails at once.
  rollout pod   restarted in place by the kubelet; the set goes on. If only this pod gets SIGTERM, it leaves with exit
                75 after its step and is restarted, too; if no other rollout host is left, it stops the job, which
                saves. After 20 restarts per host (ROLLOUT_RETRIES) the job fails, and the set is recreated as above.
  the end       the set is complete when the trainer is; rollout pods are then removed.
"""

import argparse
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from . import command, machines, submission

MISSING = {
    "kubectl": "https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-access-for-kubectl.",
    "gcloud": "https://cloud.google.com/sdk/docs/install.",
}
# Host names are NAME-rollout-SLICE-HOST and must fit 63 characters, pod names add 6 more.
NAME_LIMIT = 40
ROLLOUT_RETRIES = 20
API = "jobset.x-k8s.io/v1alpha2"
COORDINATOR_PORT = 8482  # jax's own choice on TPU
CHANNEL_PORT = 8490
PORTS = {
    "tpu-runtime": 8471,
    "megascale": 8080,
    "coordinator": COORDINATOR_PORT,
    "channel": CHANNEL_PORT,
}
_SET_RULES = [
    command.preempted_rule("trainer"),
    {
        "name": "trainerUserError",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": ["trainer"],
    },
]
_JOBSET_LABELS = {
    "PODRL_JOBSET": "jobset.sigs.k8s.io/jobset-name",
    "PODRL_ROLE": "jobset.sigs.k8s.io/replicatedjob-name",
    "PODRL_SLICE_INDEX": "jobset.sigs.k8s.io/job-index",
    "PODRL_RESTART_ATTEMPT": "jobset.sigs.k8s.io/restart-attempt",
    "PODRL_HOST_INDEX": "batch.kubernetes.io/job-completion-index",
}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the launcher's flags, and podrl's own flags after `--`."""
    own, extra = command.split_extra(argv)
    parser = command.make_parser("gke", __doc__)
    parser.add_argument("--config", required=True, help="podrl configuration, as grpo_gemma.py")
    parser.add_argument("--workdir", required=True, help="run directory, gs://BUCKET/RUN")
    parser.add_argument("--image", required=True, help="container image built from launch/Dockerfile")
    parser.add_argument("--trainer", required=True, help="MACHINE:TOPOLOGY[*SLICES], as v6e:4x4")
    parser.add_argument("--rollout", required=True, help="MACHINE:TOPOLOGY[*SLICES], as v6e:2x4*2")
    parser.add_argument("--code", metavar="DIR", help=submission.HELP)
    parser.add_argument("--name", default="podrl", help="name of the JobSet")
    parser.add_argument("--namespace", default="default", help="namespace of the JobSet")
    parser.add_argument("--queue", default="multislice-queue", help="Kueue LocalQueue (xpk's name); '' for none")
    parser.add_argument("--service_account", help="Kubernetes service account allowed to read and write --workdir")
    parser.add_argument("--spot", action="store_true", help="run on spot node pools")
    parser.add_argument(
        "--run_as_root", action="store_true", help="override the image's user, if TPU devices need root"
    )
    parser.add_argument(
        "--privileged", action="store_true", help="privileged containers, if only these can use TPU devices"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="YAML for a place of the manifest: metadata, spec, or [trainer.|rollout.]template and container, as "
        "template.spec.priorityClassName=high; lists are appended to; may be repeated",
    )
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=50,
        help="restarts of the set before it counts as failed; restarts after a preemption do not count",
    )
    parser.add_argument("--grace_seconds", type=int, default=300, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for every container; may be repeated")
    parser.add_argument(
        "--host_network", action="store_true", help="pods on the network of their hosts, where no NetworkPolicy holds"
    )
    parser.add_argument("--apply", action="store_true", help="submit with kubectl apply")
    parser.add_argument("--dry_run", action="store_true", help="with --apply: print the kubectl command, run nothing")
    args = parser.parse_args(own)
    # The Secret has a new name in every submission. If a second set is submitted by mistake with the name of a running
    # set, the second set is refused, because pods cannot be changed. The running pods must then still find their own
    # key.
    args.channel = f"{args.name}-channel-{secrets.token_hex(3)}"
    return args, extra


def manifest(args: argparse.Namespace, extra: Sequence[str], code: submission.Code | None = None) -> dict[str, Any]:
    """Builds the JobSet for the launcher's flags, as kubectl reads it.

    Args:
      args: the launcher's flags.
      extra: podrl's flags, the arguments after `--`.
      code: the user's code that is sent with the job; None for none.

    Raises:
      ValueError: a machine, name, environment or workdir cannot work, or podrl would refuse the job.
    """
    trainer = machines.parse_slices(args.trainer, "--trainer")
    rollout = machines.parse_slices(args.rollout, "--rollout")
    chips = {"trainer": trainer.devices, "rollout": rollout.devices}
    submission.check_job(args.config, extra, chips, code=code)
    podrl = command.podrl_command(args.config, args.workdir, extra, code)
    machines.check_multislice(trainer, f"--trainer={args.trainer}")
    name = command.job_name(args.name, NAME_LIMIT)
    labels = _labels(args)
    if args.queue:
        labels["kueue.x-k8s.io/queue-name"] = args.queue
    document = {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": args.namespace, "labels": labels},
        "spec": {
            # JobSet makes the headless service and gives every pod the stable name JOBSET-ROLE-SLICE-HOST.JOBSET.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "failurePolicy": {
                "maxRestarts": args.max_restarts,
                "rules": _SET_RULES,
            },
            "ttlSecondsAfterFinished": 86400,
            "replicatedJobs": [
                _replicated_job("trainer", trainer, args, podrl, trainer, rollout),
                _replicated_job("rollout", rollout, args, podrl, trainer, rollout),
            ],
        },
    }
    for setting in args.set:
        _merge_setting(document, setting)
    return document


def _merge_setting(document: dict[str, Any], setting: str) -> None:
    """Merges a --set into a JobSet.

    Args:
      document: the JobSet, which is changed.
      setting: 'PATH=VALUE': PATH begins with metadata or spec of the JobSet, or with template or container of a role's
        pods, of both roles unless 'trainer.' or 'rollout.' stands before it; VALUE is YAML.

    Raises:
      ValueError: `setting` has another form, VALUE is not YAML, PATH leads into the list of jobs, or a value that is
        not a list or a mapping would replace one.
    """
    import yaml

    path, separator, text = setting.partition("=")
    roles, names = ("trainer", "rollout"), path.split(".")
    if names[0] in roles:
        roles, names = (names[0],), names[1:]
    jobs = [job for job in document["spec"]["replicatedJobs"] if job["name"] in roles]
    templates = [job["template"]["spec"]["template"] for job in jobs]
    places = {"template": templates, "container": [template["spec"]["containers"][0] for template in templates]}
    if len(roles) == 2:
        places |= {name: [document[name]] for name in ("metadata", "spec")}
    if not separator or len(names) < 2 or names[0] not in places:
        raise ValueError(
            f"--set={setting} must be PATH=VALUE, where PATH begins with metadata, spec, template or container and "
            "names a key inside, such as --set=template.spec.priorityClassName=high. The prefix trainer. or rollout. "
            "before template or container changes one role only."
        )
    for place in places[names[0]]:
        try:
            value: dict[str, Any] = {names[-1]: yaml.safe_load(text)}
        except yaml.YAMLError as error:
            raise ValueError(f"--set={setting}: the value is not YAML ({str(error).splitlines()[0]}).") from None
        for name in names[-2:0:-1]:
            value = {name: value}
        _merge(place, value, setting)


def _merge(into: dict[str, Any], value: dict[str, Any], setting: str) -> None:
    for name, new in value.items():
        old = into.get(name)
        if isinstance(old, list) and name == "replicatedJobs":
            raise ValueError(f"--set={setting}: set what differs in a role's pods by template or container.")
        if isinstance(old, list | dict) and not isinstance(new, type(old)):
            raise ValueError(f"--set={setting}: {name} must stay a {'list' if isinstance(old, list) else 'mapping'}.")
        if isinstance(new, dict) and old is not None and not isinstance(old, dict):
            raise ValueError(f"--set={setting}: {name} is {old!r}, which has no keys inside.")
        if isinstance(old, dict) and isinstance(new, dict):
            _merge(old, new, setting)
        else:
            into[name] = [*old, *new] if isinstance(old, list) else new


def _labels(args: argparse.Namespace) -> dict[str, str]:
    return {"app.kubernetes.io/name": "podrl", "app.kubernetes.io/instance": args.name}


def _replicated_job(
    role: str,
    slices: machines.Slices,
    args: argparse.Namespace,
    podrl: Sequence[str],
    trainer: machines.Slices,
    rollout: machines.Slices,
) -> dict[str, Any]:
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": slices.hosts,
        "completions": slices.hosts,
        "backoffLimit": 0 if role == "trainer" else ROLLOUT_RETRIES * slices.hosts,
    }
    if role == "trainer":
        codes = sorted((*command.RESTART_CODES, *command.SIGNAL_CODES))
        others = {"containerName": "podrl", "operator": "NotIn", "values": codes}
        user_error = {"action": "FailJob", "onExitCodes": others, "onPodConditions": []}
        job["podFailurePolicy"] = {"rules": [*command.preempted_pod_rules("podrl"), user_error]}
    job["template"] = {
        "metadata": {"labels": {**_labels(args), "app.kubernetes.io/component": role}},
        "spec": _pod(role, slices, args, podrl, trainer, rollout),
    }
    # A slice of several hosts is a node pool, which no other job may share; a slice of one host is a node.
    domain = "cloud.google.com/gke-nodepool" if slices.hosts > 1 else "kubernetes.io/hostname"
    annotations = {"alpha.jobset.sigs.k8s.io/exclusive-topology": domain}
    return {
        "name": role,
        "replicas": slices.count,
        "template": {"metadata": {"annotations": annotations}, "spec": job},
    }


def _pod(
    role: str,
    slices: machines.Slices,
    args: argparse.Namespace,
    podrl: Sequence[str],
    trainer: machines.Slices,
    rollout: machines.Slices,
) -> dict[str, Any]:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": slices.machine.accelerator,
        "cloud.google.com/gke-tpu-topology": slices.topology,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if args.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"})
    security: dict[str, Any] = {"privileged": True} if args.privileged else {}
    if args.run_as_root:
        security["runAsUser"] = 0
    chips = {"google.com/tpu": str(slices.machine.chips_per_host)}
    container = {
        "name": "podrl",
        "image": args.image,
        "command": [*podrl],
        "env": _environment(role, slices, args, trainer, rollout),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in PORTS.items()],
        "resources": {"requests": chips, "limits": chips},
        "securityContext": security,
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        # If a trainer host fails, the other trainers end, so the whole set restarts. A rollout host restarts alone.
        "restartPolicy": "Never" if role == "trainer" else "OnFailure",
        "terminationGracePeriodSeconds": args.grace_seconds,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    if args.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if args.service_account:
        pod["serviceAccountName"] = args.service_account
    return pod


def _environment(
    role: str, slices: machines.Slices, args: argparse.Namespace, trainer: machines.Slices, rollout: machines.Slices
) -> list[dict[str, Any]]:
    """Makes the variables with role and rank for podrl/runtime/detect.py; the kubelet fills in $(NAME)."""
    from_labels = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        for name, label in _JOBSET_LABELS.items()
    ]
    # Trainer slices form one cluster, led by slice 0; each rollout slice is a cluster of its own, led by its host 0.
    leader = "0" if role == "trainer" else "$(PODRL_SLICE_INDEX)"
    values = {
        "PODRL_PLATFORM": "jobset_split",
        "PODRL_SLICES": str(slices.count),
        "PODRL_HOSTS_PER_SLICE": str(slices.hosts),
        "PODRL_TRAINER_SLICES": str(trainer.count),
        "PODRL_TRAINER_HOSTS_PER_SLICE": str(trainer.hosts),
        "PODRL_ROLLOUT_SLICES": str(rollout.count),
        "PODRL_ROLLOUT_HOSTS_PER_SLICE": str(rollout.hosts),
        "PODRL_COORDINATOR": f"$(PODRL_JOBSET)-$(PODRL_ROLE)-{leader}-0.$(PODRL_JOBSET):{COORDINATOR_PORT}",
        "PODRL_CHANNEL": f"$(PODRL_JOBSET)-trainer-0-0.$(PODRL_JOBSET):{CHANNEL_PORT}",
        **command.environment(args.env),
    }
    variables: list[dict[str, Any]] = [_from_secret("PODRL_SECRET", args.channel, "secret")]
    for name, value in values.items():
        variables.append(
            _from_secret(name, args.channel, name) if command.is_secret(name) else {"name": name, "value": value}
        )
    return [*from_labels, *variables]


def _from_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def channel_secret(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the Secret with the key that encrypts the pods' messages, new for every submission.

    Variables of --env whose names sound secret are in it, too.
    """
    secret_values = {name: value for name, value in command.environment(args.env).items() if command.is_secret(name)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": args.channel, "namespace": args.namespace, "labels": _labels(args)},
        "type": "Opaque",
        "stringData": {"secret": secrets.token_hex(16), **secret_values},
    }


def network_policy(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the policy by which only pods of the job and of gke_add.py reach the job's ports.

    Some of these ports have no authentication.
    """
    pods = {"matchLabels": _labels(args)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": args.name, "namespace": args.namespace, "labels": _labels(args)},
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]},
    }


def _without_secret(args: argparse.Namespace, keys: Sequence[str]) -> str:
    """Writes comments that take the place of the Secret in the printed manifest."""
    more = "".join(f" --from-file={key}=FILE" for key in keys if key != "secret")
    labels = " ".join(f"{name}={value}" for name, value in _labels(args).items())
    return (
        f"# The Secret {args.channel} is not printed; --apply makes it. By hand:\n"
        f"#   openssl rand -hex 16 | kubectl create secret generic {args.channel} --namespace={args.namespace} "
        f"--from-file=secret=/dev/stdin{more}\n"
        f"#   kubectl label secret {args.channel} --namespace={args.namespace} {labels}\n"
    )


def to_yaml(document: dict[str, Any]) -> str:
    """Writes the manifest as YAML, without anchors, with keys in the order in which this module writes them."""
    import yaml  # imported here, so that `--help` works without pyyaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(document, Dumper=Plain, sort_keys=False, width=120)


def main(argv: Sequence[str]) -> int:
    """Prints the manifest, submits it on --apply; returns the exit code."""
    args, extra = parse(argv)
    try:
        secret = channel_secret(args)
        code = submission.read_code(args.code) if args.code else None
        documents = [manifest(args, extra, code)]
        submission.check_flags(args.config, extra, code)
        if not args.host_network:
            documents.insert(0, network_policy(args))
        shown = "---\n".join(map(to_yaml, documents))
        text = f"{to_yaml(secret)}---\n{shown}"
    except ValueError as error:
        sys.stderr.write(f"launch.gke: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        sys.stderr.write(f"launch.gke: {error}: 'pip install pyyaml' installs it.\n")
        return 1
    sent = f"{code.described(args.workdir)}\n" if code else ""
    print(sent, _without_secret(args, list(secret["stringData"])), shown, sep="", end="", flush=True)
    applies = args.apply and not args.dry_run
    if code and applies and command.run(code.upload(args.workdir), stdin=code.archive, missing=MISSING):
        sys.stderr.write(f"launch.gke: {code.url(args.workdir)} cannot be written; see above.\n")
        return 1
    return submit(text, args, f"a Secret {args.channel} and ") if args.apply else 0


def submit(text: str, args: argparse.Namespace, more: str = "") -> int:
    """Applies manifests, or with --dry_run prints the command instead; returns the exit code.

    Args:
      text: manifests as YAML.
      args: the launcher's flags.
      more: names of the objects in `text` that --dry_run does not show, as words for its message; '' for none.
    """
    apply = ["kubectl", "apply", "-f", "-"]
    if args.dry_run:
        sys.stderr.write(f"would run, with {more}the manifest above as its input: {command.show(apply)}\n")
        return 0
    return command.run(apply, stdin=text, missing=MISSING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
