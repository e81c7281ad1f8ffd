"""Computes the environment that the kubelet and GKE give every pod of a JobSet."""

import re

SECRET = "what the Secret holds"


def pods(document: dict) -> list[dict[str, str]]:
    """Returns the environment of every pod: labels as the JobSet and Job controllers set them, $(NAME) as the kubelet
    expands it, and the variables that GKE injects into TPU pods of a JobSet."""
    name = document["metadata"]["name"]
    found = []
    for replicated in document["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        for index in range(replicated["replicas"]):
            hosts = [f"{name}-{replicated['name']}-{index}-{h}.{name}" for h in range(spec["completions"])]
            for host in range(len(hosts)):
                labels = {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                    "jobset.sigs.k8s.io/job-index": str(index),
                    "jobset.sigs.k8s.io/restart-attempt": "2",
                    "batch.kubernetes.io/job-completion-index": str(host),
                }
                environment = {
                    "TPU_WORKER_ID": str(host),
                    "TPU_WORKER_HOSTNAMES": ",".join(hosts),
                    "MEGASCALE_NUM_SLICES": str(replicated["replicas"]),
                    "MEGASCALE_SLICE_ID": str(index),
                    "MEGASCALE_COORDINATOR_ADDRESS": f"{name}-{replicated['name']}-0-0.{name}",
                }
                for variable in spec["template"]["spec"]["containers"][0]["env"]:
                    if "secretKeyRef" in variable.get("valueFrom", {}):
                        value = SECRET
                    elif "valueFrom" in variable:
                        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                        match = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
                        assert match, path
                        value = labels[match[1]]
                    else:
                        # Only variables earlier in the list are expanded.
                        value = re.sub(r"\$\((\w+)\)", lambda m, e=environment: e[m[1]], variable["value"])
                    environment[variable["name"]] = value
                found.append(environment)
    return found
