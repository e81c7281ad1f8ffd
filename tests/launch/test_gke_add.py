"""Rollout hosts added to a running JobSet: their pods, the addresses they find, and their variables."""

import json
import re

import pytest
import yaml
from kubelet import SECRET, pods
from test_gke import check_admission, check_schema, job, jobset

from launch import gke, gke_add
from podrl.runtime import detect

UID = "7d7e2a0e-1c7c-4d55-9f0a-4a5d3e1f8a11"
CHANNEL = "run1-trainer-0-0.run1:8490"


def running(*flags: str) -> dict:
    """Returns a JobSet of launch.gke as the cluster shows it: with a uid, and with the queue's changes to its pods."""
    document = jobset("--name=run1", *flags, channel="run1-channel-abc123")
    document["metadata"]["uid"] = UID
    for replicated in document["spec"]["replicatedJobs"]:
        template = replicated["template"]["spec"]["template"]
        template["metadata"]["labels"]["kueue.x-k8s.io/tas"] = "true"
        template["metadata"]["annotations"] = {"autoscaling.x-k8s.io/consume-provisioning-request": "of-run1"}
        template["spec"]["nodeSelector"]["cloud.google.com/reservation-name"] = "ours"
        template["spec"]["tolerations"].append({"key": "of-the-flavor", "operator": "Exists"})
        template["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/topology"}]
    return document


def added(runs: dict, *flags: str) -> dict:
    return yaml.safe_load(gke.to_yaml(gke_add.manifest(gke_add.parse(["--join=run1", *flags]), runs)))


def test_added_pods_are_those_of_the_job_and_join_its_trainer():
    flags = ("--env=WANDB_API_KEY=w4ndb", "--env=A=b", "--service_account=s", "--", "--config.trainer.max_steps=3")
    document = added(running(*flags), "--slices=3")
    runs = jobset("--name=run1", *flags, channel="run1-channel-abc123")  # before the queue changed the JobSet
    theirs, mine = (job(each, "rollout")["template"]["spec"]["template"] for each in (runs, document))
    (other,), (container,) = theirs["spec"].pop("containers"), mine["spec"].pop("containers")
    assert container.pop("command") == [*other.pop("command"), f"--join={CHANNEL}"]
    (env, expected), own = (container.pop("env"), other.pop("env")), {"PODRL_SLICES": "3", "PODRL_CHANNEL": CHANNEL}
    assert env == [{"name": v["name"], "value": own[v["name"]]} if v["name"] in own else v for v in expected]
    secret = {"secretKeyRef": {"name": "run1-channel-abc123", "key": "secret"}}
    assert {"name": "PODRL_SECRET", "valueFrom": secret} in env
    assert container == other and mine == theirs
    # The job's NetworkPolicy applies to these pods too, and they are deleted with the job.
    args, _ = gke.parse(["--config=c", "--workdir=gs://b/r", "--image=i", "--trainer=t", "--rollout=r", "--name=run1"])
    admitted = gke.network_policy(args)["spec"]["podSelector"]["matchLabels"]
    assert admitted.items() <= mine["metadata"]["labels"].items()
    assert admitted.items() <= document["metadata"]["labels"].items()
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "run1", "uid": UID}
    assert document["metadata"]["ownerReferences"] == [owner]


def test_added_pods_find_their_slice_and_the_jobs_trainer():
    places = [(detect.detect(pod), pod["PODRL_SECRET"]) for pod in pods(added(running(), "--slices=3"))]
    assert [(p.slice_index, p.process_index, p.process_count, p.coordinator) for p, _ in places] == [
        (s, i, 2, f"run1-more-rollout-{s}-0.run1-more:8482") for s in range(3) for i in range(2)
    ]
    assert {(p.role, p.channel, secret) for p, secret in places} == {("rollout", CHANNEL, SECRET)}
    assert all("MEGASCALE_NUM_SLICES" in p.unset for p, _ in places)


def test_machines_are_of_the_jobs_shape_and_may_be_spot():
    shape = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "2x4"}
    for flags, spot in (((), False), (("--spot",), True)):
        document = added(running(), *flags)
        pod = job(document, "rollout")["template"]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == shape | ({"cloud.google.com/gke-spot": "true"} if spot else {})
        assert [t["key"] for t in pod["tolerations"]] == ["google.com/tpu", *["cloud.google.com/gke-spot"] * spot]
        assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
    assert "kueue.x-k8s.io/queue-name" not in added(running("--queue="))["metadata"]["labels"]
    assert added(running(), "--queue=other")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "other"


@pytest.mark.parametrize("flags", [["--spot"], ["--name=" + "a" * gke.NAME_LIMIT, "--slices=100"]])
def test_the_servers_would_admit_it(flags):
    check_admission(added(running("--rollout=v6e:16x16"), *flags))


def test_validates_against_the_published_schemas():
    check_schema(added(running(), "--spot"))


def test_hosts_that_end_are_restarted_and_a_job_that_is_gone_is_given_up():
    document = added(running())
    batch = job(document, "rollout")["template"]["spec"]
    assert batch["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert batch["backoffLimit"] == gke.ROLLOUT_RETRIES * 2
    assert document["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert document["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["rollout"]}


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Puts a stand-in for kubectl on PATH that returns the running JobSet and records its calls and the applied
    manifests."""
    (tmp_path / "runs.json").write_text(json.dumps(running("--env=WANDB_API_KEY=w4ndb")))
    program = tmp_path / "kubectl"
    program.write_text(
        f"""#!/bin/sh
printf "%s\\n" "$*" >>{tmp_path}/calls
case "$1 $3" in
"get run1") cat {tmp_path}/runs.json ;;
"get "*) echo 'Error from server (NotFound): jobsets.jobset.x-k8s.io "other" not found' >&2; exit 1 ;;
*) cat >{tmp_path}/applied.yaml ;;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_what_is_printed_is_applied_and_no_secret_is_read(kubectl, capfd):
    assert gke_add.main(["--join=run1"]) == 0
    printed = capfd.readouterr().out
    assert (kubectl / "calls").read_text() == "get jobset run1 --namespace=default --output=json\n"
    assert yaml.safe_load(printed) == added(running("--env=WANDB_API_KEY=w4ndb"))
    assert gke_add.main(["--join=run1", "--apply", "--dry_run"]) == 0
    told = "".join(capfd.readouterr())
    assert "would run, with the manifest above as its input: kubectl apply" in told
    assert not (kubectl / "applied.yaml").exists()
    assert gke_add.main(["--join=run1", "--apply"]) == 0
    assert (kubectl / "applied.yaml").read_text() == printed
    calls = (kubectl / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"get", "apply"} and not any("secret" in call for call in calls)
    everything = printed + told + "".join(capfd.readouterr())
    assert "w4ndb" not in everything and not re.search(r"\b[0-9a-f]{32}\b", everything)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--join=other"],
            '--join=other cannot be read: Error from server (NotFound): jobsets.jobset.x-k8s.io "other"',
        ),
        (["--join=run1", "--slices=0"], "--slices=0 must be at least 1"),
        (["--join=run1", "--name=run1"], "--name=run1 is the set that runs"),
        (["--join=run1", "--name=Run"], "--name=Run must be lower-case"),
    ],
)
def test_refuses_by_name(kubectl, flags, message, capfd):
    assert gke_add.main(flags) == 1
    told = capfd.readouterr()
    assert message in told.err and told.out == ""


def test_a_set_that_is_none_of_ours_or_has_ended_is_refused(kubectl, capfd):
    document = running()
    document["status"] = {"terminalState": "Completed"}
    (kubectl / "runs.json").write_text(json.dumps(document))
    assert gke_add.main(["--join=run1", "--apply"]) == 1 and "has ended (Completed)" in capfd.readouterr().err
    del document["status"], document["spec"]["replicatedJobs"][0]
    (kubectl / "runs.json").write_text(json.dumps(document))
    assert gke_add.main(["--join=run1"]) == 1 and "is a JobSet of rollout: launch.gke makes" in capfd.readouterr().err
