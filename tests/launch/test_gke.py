"""The JobSet of launch.gke: published schemas, documented policies, and the ranks that its pods find."""

import copy
import functools
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jobset_failures
import pytest
import yaml
from kubelet import pods

from launch import gke
from podrl.runtime import detect

FLAGS = [
    "--config=grpo_gemma.py",
    "--workdir=gs://bucket/run",
    "--image=registry/podrl:1",
    "--trainer=v6e:4x4",
    "--rollout=v6e:2x4*2",
]


def jobset(*flags: str, channel: str | None = None) -> dict:
    args, extra = gke.parse([*FLAGS, *flags])
    args.channel = channel or args.channel
    return yaml.safe_load(gke.to_yaml(gke.manifest(args, extra)))


def job(document: dict, role: str) -> dict:
    return next(j for j in document["spec"]["replicatedJobs"] if j["name"] == role)


def pod_spec(document: dict, role: str) -> dict:
    return job(document, role)["template"]["spec"]["template"]["spec"]


def test_every_pod_finds_its_role_and_rank():
    places = [detect.detect(environment) for environment in pods(jobset())]
    trainers = [p for p in places if p.role == "trainer"]
    rollouts = [p for p in places if p.role == "rollout"]
    assert len(places) == 4 + 2 * 2
    assert [(p.process_index, p.process_count, p.coordinator) for p in trainers] == [
        (i, 4, "podrl-trainer-0-0.podrl:8482") for i in range(4)
    ]
    assert [(p.slice_index, p.process_index, p.process_count, p.coordinator) for p in rollouts] == [
        (s, i, 2, f"podrl-rollout-{s}-0.podrl:8482") for s in range(2) for i in range(2)
    ]
    assert {p.channel for p in places} == {"podrl-trainer-0-0.podrl:8490"}
    assert {p.topology for p in places} == {"split"} and {p.restart_attempt for p in places} == {2}
    assert all("MEGASCALE_NUM_SLICES" in p.unset for p in places)


def test_a_trainer_of_several_slices_is_one_cluster():
    flags = [f for f in FLAGS if not f.startswith("--trainer")]
    args, extra = gke.parse([*flags, "--trainer=v5p:2x2x2*3", "--name=big"])
    environments = pods(gke.manifest(args, extra))
    trainers = [c for c in map(detect.detect, environments) if c.role == "trainer"]
    assert [c.process_index for c in trainers] == list(range(6))
    assert {(c.process_count, c.coordinator, c.unset) for c in trainers} == {(6, "big-trainer-0-0.big:8482", ())}
    assert {e["PODRL_ROLLOUT_SLICES"] for e in environments} == {"2"}
    assert {e["PODRL_ROLLOUT_HOSTS_PER_SLICE"] for e in environments} == {"2"}


def test_failures_are_sorted_by_whose_they_are():
    document = jobset("--max_restarts=7")
    trainer, rollout = (job(document, role)["template"]["spec"] for role in ("trainer", "rollout"))
    *_, rule = trainer["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "NotIn"
    codes = rule["onExitCodes"]["values"]
    assert {42, 75} <= set(codes) and not {0, 1} & set(codes)
    assert codes == sorted(set(codes))  # the API server refuses any other order
    assert rule["onExitCodes"]["containerName"] == trainer["template"]["spec"]["containers"][0]["name"]
    assert trainer["backoffLimit"] == 0 and trainer["template"]["spec"]["restartPolicy"] == "Never"
    # The kubelet restarts a rollout's container in place. A podFailurePolicy is forbidden beside OnFailure.
    assert rollout["template"]["spec"]["restartPolicy"] == "OnFailure" and "podFailurePolicy" not in rollout
    assert rollout["backoffLimit"] == gke.ROLLOUT_RETRIES * 2
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert document["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["trainer"]}


def test_restarts_after_a_preemption_do_not_use_up_max_restarts():
    document = jobset()
    check_admission(document)
    check_schema(document)
    uncounted = "RestartJobSetAndIgnoreMaxRestarts"
    action = functools.partial(jobset_failures.action, document, "trainer")
    assert action(75) == action(75, disrupted=True) == uncounted
    assert {action(code, disrupted=True) for code in (1, 42, 137, 143)} == {uncounted}
    assert {action(code) for code in (42, 134, 137, 139, 143)} == {"RestartJobSet"}
    assert {action(code) for code in (1, 2, 130)} == {"FailJobSet"}


def test_pods_reach_their_machines_and_each_other():
    document = jobset("--spot", "--service_account=trainer-sa", "--grace_seconds=60")
    assert document["spec"]["network"]["enableDNSHostnames"] is True
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
    for role, topology, hosts, replicas in (("trainer", "4x4", 4, 1), ("rollout", "2x4", 2, 2)):
        replicated, pod = job(document, role), pod_spec(document, role)
        spec = replicated["template"]["spec"]
        assert (replicated["replicas"], spec["parallelism"], spec["completions"]) == (replicas, hosts, hosts)
        assert spec["completionMode"] == "Indexed"
        assert replicated["template"]["metadata"]["annotations"] == {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
        assert pod["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
            "cloud.google.com/gke-tpu-topology": topology,
            "cloud.google.com/gke-spot": "true",
        }
        assert pod["terminationGracePeriodSeconds"] == 60 and pod["serviceAccountName"] == "trainer-sa"
        assert {t["key"] for t in pod["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"google.com/tpu": "4"} == container["resources"]["requests"]
        assert {p["containerPort"] for p in container["ports"]} == {8471, 8080, 8482, 8490}


def test_single_host_slices_take_a_node_each():
    document = jobset("--rollout=v6e-8t:2x4*3")
    annotations = job(document, "rollout")["template"]["metadata"]["annotations"]
    assert annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "kubernetes.io/hostname"
    assert pod_spec(document, "rollout")["containers"][0]["resources"]["limits"] == {"google.com/tpu": "8"}


def test_command_and_environment_reach_the_container():
    document = jobset("--env=A=b=c d", "--queue=", "--run_as_root", "--", "--config.trainer.steps=3", "--note=x y")
    (container,) = pod_spec(document, "rollout")["containers"]
    assert container["command"] == [
        *("python", "-m", "podrl.launch", "--config=grpo_gemma.py", "--workdir=gs://bucket/run"),
        *("--config.trainer.steps=3", "--note=x y"),
    ]
    assert {"name": "A", "value": "b=c d"} in container["env"]
    assert container["securityContext"]["runAsUser"] == 0
    assert "runAsUser" not in pod_spec(jobset(), "rollout")["containers"][0]["securityContext"]
    assert "kueue.x-k8s.io/queue-name" not in document["metadata"]["labels"]


def check_schema(document: dict) -> None:
    """Parses the manifest with the published models of JobSet and Kubernetes and asserts that they drop no field as
    unknown."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api==2.3.0")
    read = models.JobsetV1alpha2JobSet.from_dict(document)
    assert read.to_dict() == document


# Rules of the API server and JobSet's webhook that their schemas do not contain.
DNS_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
JOB_FAILURES = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"} | {
    "PodFailurePolicy"
}
SET_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}


def check_admission(document: dict) -> None:
    name, spec = document["metadata"]["name"], document["spec"]
    assert re.fullmatch(DNS_LABEL, spec["network"]["subdomain"]) and spec["successPolicy"]["operator"] in {"All", "Any"}
    roles = {replicated["name"] for replicated in spec["replicatedJobs"]}
    assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= roles
    for rule in spec["failurePolicy"].get("rules", ()):
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) and rule["action"] in SET_ACTIONS
        assert set(rule["targetReplicatedJobs"]) <= roles and set(rule["onJobFailureReasons"]) <= JOB_FAILURES
    for replicated in spec["replicatedJobs"]:
        batch = replicated["template"]["spec"]
        pod = batch["template"]["spec"]
        last = f"{name}-{replicated['name']}-{replicated['replicas'] - 1}-{batch['completions'] - 1}-abcde"
        assert re.fullmatch(DNS_LABEL, last), last
        (container,) = pod["containers"]
        for rule in batch.get("podFailurePolicy", {"rules": []})["rules"]:
            assert pod["restartPolicy"] == "Never" and rule["action"] in {"FailJob", "Ignore", "Count"}
            assert ("onExitCodes" in rule) != bool(rule["onPodConditions"])
            if "onExitCodes" not in rule:
                continue
            codes = rule["onExitCodes"]["values"]
            assert codes == sorted(set(codes)) and 1 <= len(codes) <= 255
            assert rule["onExitCodes"]["operator"] in {"In", "NotIn"}
            assert rule["onExitCodes"]["containerName"] == container["name"]
        for port in container["ports"]:  # on a host's network the container's port is the host's port
            assert re.fullmatch(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", port["name"])
            assert port.get("hostPort", port["containerPort"]) == port["containerPort"]
        assert len({port["name"] for port in container["ports"]}) == len(container["ports"])
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]  # required for devices
        labels = batch["template"]["metadata"]["labels"] | document["metadata"]["labels"]
        assert all(re.fullmatch(r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", value) for value in labels.values())
        for variable in container["env"]:
            assert re.fullmatch(r"[A-Za-z_]\w*", variable["name"]) and ("value" in variable) != (
                "valueFrom" in variable
            )
        defined = [variable["name"] for variable in container["env"]]
        assert len(set(defined)) == len(defined)


@pytest.mark.parametrize("flags", [[], ["--name=" + "a" * gke.NAME_LIMIT, "--rollout=v6e:16x16*100", "--spot"]])
def test_the_servers_would_admit_it(flags):
    document = jobset(*flags)
    check_admission(document)
    document["spec"]["failurePolicy"]["rules"][0]["action"] = "Sometimes"
    with pytest.raises(AssertionError):
        check_admission(document)


@pytest.mark.parametrize("flags", [[], ["--spot", "--service_account=s", "--run_as_root", "--rollout=v5e-1t:1x1*4"]])
def test_validates_against_the_published_schemas(flags):
    check_schema(jobset(*flags))


def test_the_schemas_refuse_what_is_wrong():
    misspelt, mistyped, unknown = (copy.deepcopy(jobset()) for _ in range(3))
    misspelt["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    with pytest.raises(AssertionError):
        check_schema(misspelt)
    pod_spec(mistyped, "trainer")["terminationGracePeriodSeconds"] = "soon"
    with pytest.raises(ValueError):
        check_schema(mistyped)
    pod_spec(unknown, "trainer")["restartPolicy"] = "Sometimes"
    with pytest.raises(ValueError):
        check_schema(unknown)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir=/data/run"], "is a path inside a pod and dies with it: use gs://"),
        (["--name=Podrl"], "--name=Podrl must be lower-case"),
        (["--name=" + "a" * 41], "have at most 40 characters; this one has 41"),
        (["--env=novalue"], "--env=novalue must be NAME=VALUE"),
        (["--trainer=v6e"], "--trainer=v6e is not MACHINE:TOPOLOGY"),
        (["--", "--config=other.py"], "stands after --: give --config before it"),
    ],
)
def test_refuses_by_name(flags, message, capsys):
    assert gke.main([*FLAGS, *flags]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_settings_are_merged_into_the_manifest():
    document = jobset(
        "--set=template.spec.nodeSelector={cloud.google.com/reservation-name: mine}",
        "--set=template.spec.priorityClassName=high",
        "--set=rollout.template.spec.tolerations=[{key: spare, operator: Exists}]",
        "--set=template.metadata.annotations={team: a}",
        "--set=template.spec.volumes=[{name: d, emptyDir: {}}]",
        "--set=container.volumeMounts=[{name: d, mountPath: /d}]",
        "--set=spec.failurePolicy.maxRestarts=3",
        "--set=metadata.labels={cost: b}",
    )
    plain = jobset()
    for role in ("trainer", "rollout"):
        pod, before = pod_spec(document, role), pod_spec(plain, role)
        assert pod["nodeSelector"] == before["nodeSelector"] | {"cloud.google.com/reservation-name": "mine"}
        assert pod["priorityClassName"] == "high" and pod["volumes"] == [
            *before["volumes"],
            {"name": "d", "emptyDir": {}},
        ]
        assert pod["containers"][0]["volumeMounts"][1:] == [{"name": "d", "mountPath": "/d"}]
        spare = [{"key": "spare", "operator": "Exists"}] if role == "rollout" else []
        assert pod["tolerations"] == [*before["tolerations"], *spare]
        assert job(document, role)["template"]["spec"]["template"]["metadata"]["annotations"] == {"team": "a"}
    assert document["spec"]["failurePolicy"] == plain["spec"]["failurePolicy"] | {"maxRestarts": 3}
    assert document["metadata"]["labels"] == plain["metadata"]["labels"] | {"cost": "b"}
    check_schema(document)


def test_every_set_of_the_page_reaches_the_manifest():
    """Finds each value of the table in docs/clusters.md at its path in the JobSet, whose schema must still hold."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| `(--(?:set|queue)=[^`]+)` \|$", page, re.MULTILINE))
    assert {"a reservation", "flex-start", "flex-start with queued provisioning", "a priority class"} <= {*rows}
    for flags in map(shlex.split, rows.values()):
        document = jobset(*flags)
        check_schema(document)
        for setting in (flag.removeprefix("--set=") for flag in flags if flag.startswith("--set=")):
            path, _, text = setting.partition("=")
            for role in ["rollout"] if path.startswith("rollout.") else ["trainer", "rollout"]:
                template = job(document, role)["template"]["spec"]["template"]
                found = document | {"template": template, "container": template["spec"]["containers"][0]}
                for name in path.removeprefix("rollout.").split("."):
                    found = found[name]
                value = yaml.safe_load(text)
                if isinstance(value, dict):
                    assert value.items() <= found.items()
                elif isinstance(value, list):
                    assert found[-len(value) :] == value
                else:
                    assert found == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pod.x=1", "PATH begins with metadata, spec, template or container"),
        ("trainer.spec.suspend=true", "PATH begins with"),
        ("spec=1", "PATH begins with"),
        ("template.spec.volumes", "must be PATH=VALUE"),
        ("template.spec.volumes=1", "volumes must stay a list"),
        ("spec.failurePolicy.maxRestarts.x=1", "maxRestarts is "),
        ("template.spec.nodeSelector=[a]", "nodeSelector must stay a mapping"),
        ("spec.replicatedJobs=[]", "by template or container"),
        ("template.spec.x={", "is not YAML"),
    ],
)
def test_settings_of_no_place_are_refused(given, message, capsys):
    assert gke.main([*FLAGS, f"--set={given}"]) == 1
    assert message in capsys.readouterr().err


def test_containers_are_privileged_on_demand_only():
    for flags, security in (((), {}), (("--privileged", "--run_as_root"), {"privileged": True, "runAsUser": 0})):
        assert pod_spec(jobset(*flags), "trainer")["containers"][0]["securityContext"] == security


def test_a_trainer_of_several_slices_of_one_host_is_refused(capsys):
    flags = [flag for flag in FLAGS if not flag.startswith("--trainer")]
    assert gke.main([*flags, "--trainer=v6e-8t:2x4*3"]) == 1
    assert "3 slices of one host each, which multislice does not join" in capsys.readouterr().err


def test_host_names_fit_in_63_characters():
    document = jobset("--name=" + "a" * gke.NAME_LIMIT, "--rollout=v6e:16x16*100", "--trainer=v6e:16x16")
    longest = max(len(e["TPU_WORKER_HOSTNAMES"].split(",")[-1].split(".")[0]) for e in pods(document))
    assert longest + len("-xxxxx") <= 63


def test_prints_without_apply_and_pipes_to_kubectl_with_it(tmp_path, monkeypatch, capfd):
    received = tmp_path / "received.yaml"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >{tmp_path}/arguments\ncat >{received}\nexit 3\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    flags = [*FLAGS, "--env=WANDB_API_KEY=w4ndb", "--env=NOTE=n"]
    assert gke.main(flags) == 0
    printed = capfd.readouterr().out
    shown_policy, printed_jobset = yaml.safe_load_all(printed)
    (channel,) = set(re.findall(r"podrl-channel-[0-9a-f]{6}", printed))
    assert printed_jobset == jobset(*flags[len(FLAGS) :], channel=channel) and not received.exists()
    assert gke.main([*flags, "--apply", "--dry_run"]) == 0
    planned = capfd.readouterr()
    assert "kubectl apply" in planned.err and not received.exists()
    assert gke.main([*flags, "--apply"]) == 3
    secret, policy, applied = yaml.safe_load_all(received.read_text())
    assert policy == shown_policy
    assert secret["metadata"]["name"] != channel  # a new secret for every submission
    channel = secret["metadata"]["name"]
    labels = {"app.kubernetes.io/name": "podrl", "app.kubernetes.io/instance": "podrl"}
    assert secret["metadata"] == {"name": channel, "namespace": "default", "labels": labels}
    assert labels.items() <= printed_jobset["metadata"]["labels"].items()
    assert len(secret["stringData"]["secret"]) == 32 and secret["stringData"]["WANDB_API_KEY"] == "w4ndb"
    assert applied == jobset(*flags[len(FLAGS) :], channel=channel)
    for role in ("trainer", "rollout"):
        (container,) = pod_spec(applied, role)["containers"]
        found = {v["name"]: v["valueFrom"] for v in container["env"] if "secretKeyRef" in v.get("valueFrom", {})}
        assert found == {
            "PODRL_SECRET": {"secretKeyRef": {"name": channel, "key": "secret"}},
            "WANDB_API_KEY": {"secretKeyRef": {"name": channel, "key": "WANDB_API_KEY"}},
        }
        assert {"name": "NOTE", "value": "n"} in container["env"]
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    # The Secret's content is printed nowhere; comments in its place say how to make a Secret by hand.
    everything = printed + planned.out + planned.err + "".join(capfd.readouterr())
    assert "w4ndb" not in everything and secret["stringData"]["secret"] not in everything
    assert not re.search(r"\b[0-9a-f]{32}\b", everything)
    assert "kubectl create secret generic podrl-channel-" in printed and "--from-file=WANDB_API_KEY=FILE" in printed


def test_only_the_jobs_own_pods_reach_them(capfd):
    args, _ = gke.parse([*FLAGS, "--name=mine", "--namespace=research"])
    policy = gke.network_policy(args)
    labels = {"app.kubernetes.io/name": "podrl", "app.kubernetes.io/instance": "mine"}
    own = {"matchLabels": labels}
    for role in ("trainer", "rollout"):
        pods = job(jobset("--name=mine"), role)["template"]["spec"]["template"]["metadata"]["labels"]
        assert labels.items() <= pods.items()
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    assert policy["metadata"]["namespace"] == "research"
    # Network policies do not apply to pods on their hosts' network, so pods use that network only on request.
    assert "hostNetwork" not in pod_spec(jobset(), "trainer")
    pod = pod_spec(jobset("--host_network"), "trainer")
    assert pod["hostNetwork"] is True and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert gke.main([*FLAGS, "--host_network"]) == 0
    assert [document["kind"] for document in yaml.safe_load_all(capfd.readouterr().out)] == ["JobSet"]


def test_missing_kubectl_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gke.main([*FLAGS, "--apply"]) == 1
    assert "kubectl is not on PATH: https://" in capfd.readouterr().err


def test_launch_imports_neither_podrl_nor_jax(tmp_path):
    source = pathlib.Path(gke.__file__).parent
    shutil.copytree(source, tmp_path / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    program = (
        "import sys, launch.gke, launch.gke_add, launch.xpk, launch.machines, launch.command\n"
        "sys.exit(bool({'jax', 'podrl', 'numpy', 'absl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
