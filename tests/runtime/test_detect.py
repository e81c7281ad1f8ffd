"""Cluster detection on each platform's environment, and on common mistakes.

The variables are those that jax 0.10.2 reads, that xpk 1.16.0 writes (its Pathways manifest) and that GKE documents for
Jobs, multislice and JobSet. The variables of launch/gke.py are compared with its manifest in tests/launch/test_gke.py.
"""

import http.server
import inspect
import subprocess
import sys
import threading
import types

import jax
import pytest

from podrl.runtime import detect, joining

HOSTS = ",".join(f"train-slice-job-0-{i}.train" for i in range(4))
GKE = {
    "TPU_WORKER_ID": "2",
    "TPU_WORKER_HOSTNAMES": HOSTS,
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "2,2,1",
    "TPU_SKIP_MDS_QUERY": "true",
    "KUBERNETES_SERVICE_HOST": "34.118.224.1",
}
MULTISLICE = {
    **GKE,
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "train-slice-job-0-0.train:8080",
}
SPLIT = {
    **{key: value for key, value in GKE.items() if key != "TPU_WORKER_HOSTNAMES"},
    "TPU_WORKER_HOSTNAMES": "job-rollout-1-0.job,job-rollout-1-1.job",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-rollout-0-0.job",
    "PODRL_PLATFORM": "jobset_split",
    "PODRL_JOBSET": "job",
    "PODRL_ROLE": "rollout",
    "PODRL_SLICE_INDEX": "1",
    "PODRL_SLICES": "3",
    "PODRL_TRAINER_SLICES": "1",
    "PODRL_TRAINER_HOSTS_PER_SLICE": "4",
    "PODRL_ROLLOUT_SLICES": "3",
    "PODRL_ROLLOUT_HOSTS_PER_SLICE": "2",
    "PODRL_HOST_INDEX": "1",
    "PODRL_HOSTS_PER_SLICE": "2",
    "PODRL_RESTART_ATTEMPT": "4",
    "PODRL_COORDINATOR": "job-rollout-1-0.job:8482",
    "PODRL_CHANNEL": "job-trainer-0-0.job:8490",
}
PATHWAYS = {
    "PATHWAYS_HEAD": "run-pathways-head-0-0.run",
    "JAX_PLATFORMS": "proxy",
    "XCLOUD_ENVIRONMENT": "GCP",
    "JAX_BACKEND_TARGET": "grpc://run-pathways-head-0-0.run:29000",
}
LOCAL = {
    "PODRL_PLATFORM": "local",
    "PODRL_PROCESS_INDEX": "3",
    "PODRL_PROCESS_COUNT": "4",
    "PODRL_COORDINATOR": "127.0.0.1:40211",
    "PODRL_ROLE": "rollout",
    "JAX_PLATFORMS": "cpu",
}
TPU_VM = {
    "agent-worker-number": "3",
    "worker-network-endpoints": "a:0:10.164.0.5,b:1:10.164.0.6,c:2:10.164.0.7,d:3:10.164.0.8",
    "accelerator-type": "v5litepod-16",
}
LAPTOP = {"HOME": "/home/me", "PATH": "/usr/bin", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
POD = detect.Cluster("tpu_vm", "shared", 0, 4, coordinator="10.164.0.5:8482")


def test_single():
    cluster = detect.detect(LAPTOP)
    assert cluster == detect.Cluster("single", "single")
    assert cluster.distributed_arguments is None


def test_local_fakes():
    cluster = detect.detect(LOCAL)
    assert cluster == detect.Cluster("local", "shared", 3, 4, role="rollout", coordinator="127.0.0.1:40211")
    arguments = cluster.distributed_arguments
    assert arguments is not None and arguments["process_id"] == 3
    # 'deactivate' keeps jax from detecting a real cluster of this machine.
    assert arguments["cluster_detection_method"] == "deactivate"
    assert set(arguments) <= set(inspect.signature(jax.distributed.initialize).parameters)


def test_local_fake_of_one_process_needs_no_coordinator():
    cluster = detect.detect({"PODRL_PLATFORM": "local", "PODRL_PROCESS_INDEX": "0", "PODRL_PROCESS_COUNT": "1"})
    assert cluster == detect.Cluster("local", "single") and cluster.distributed_arguments is None


@pytest.mark.parametrize("endpoints", [TPU_VM["worker-network-endpoints"], "10.164.0.5,10.164.0.6,h2,h3"])
def test_tpu_vm_with_both_forms_of_endpoints(endpoints):
    cluster = detect.detect(LAPTOP, metadata={**TPU_VM, "worker-network-endpoints": endpoints})
    assert cluster == detect.Cluster("tpu_vm", "shared", 3, 4, coordinator="10.164.0.5:8482")
    assert cluster.distributed_arguments == {}


def test_tpu_vm_of_one_host():
    metadata = {"agent-worker-number": "0", "worker-network-endpoints": "a:0:10.164.0.5"}
    assert detect.detect({}, metadata=metadata) == detect.Cluster("tpu_vm", "single")


def test_gke_single_slice():
    cluster = detect.detect(GKE)
    assert cluster == detect.Cluster("gke", "shared", 2, 4, coordinator="train-slice-job-0-0.train:8482")
    assert cluster.distributed_arguments == {}


def test_gke_single_host():
    cluster = detect.detect({**GKE, "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"})
    assert cluster == detect.Cluster("gke", "single")


def test_process_addresses_win_as_they_do_in_jax():
    cluster = detect.detect({**GKE, "TPU_PROCESS_ADDRESSES": "h0:8471,h0:8472,h1:8471,h1:8472"})
    assert (cluster.process_index, cluster.process_count, cluster.coordinator) == (2, 4, "h0:8482")


def test_multislice_ranks_follow_slices_then_hosts():
    cluster = detect.detect(MULTISLICE)
    assert cluster.kind == "multislice" and cluster.topology == "shared"
    assert (cluster.process_index, cluster.process_count) == (1 * 4 + 2, 8)
    assert (cluster.slice_index, cluster.slice_count) == (1, 2)
    assert cluster.coordinator == "train-slice-job-0-0.train:8482"
    one = detect.detect({**MULTISLICE, "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"})
    assert one.kind == "gke" and one.process_index == 2


def test_gke_ranks_agree_with_jax():
    from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

    for environment in (GKE, MULTISLICE):
        cluster = detect.detect(environment)
        with pytest.MonkeyPatch.context() as patch:
            for name in detect.MEGASCALE:
                patch.delenv(name, raising=False)
            for name, value in {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0", **environment}.items():
                patch.setenv(name, value)
            assert cluster.process_index == GkeTpuCluster.get_process_id()
            assert cluster.process_count == GkeTpuCluster.get_process_count()


def test_rollout_slice_of_a_split_jobset_is_its_own_cluster():
    cluster = detect.detect(SPLIT)
    assert (cluster.kind, cluster.topology, cluster.role) == ("jobset_split", "split", "rollout")
    assert (cluster.process_index, cluster.process_count) == (1, 2)
    assert (cluster.slice_index, cluster.slice_count, cluster.restart_attempt) == (1, 3, 4)
    assert (cluster.coordinator, cluster.channel) == ("job-rollout-1-0.job:8482", "job-trainer-0-0.job:8490")
    # GKE's variables make this pod slice 1 of a multislice job of 3; libtpu must not see them.
    assert set(cluster.unset) >= {"MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"}
    assert cluster.distributed_arguments == {
        "coordinator_address": "job-rollout-1-0.job:8482",
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }


def test_trainer_slices_of_a_split_jobset_are_one_cluster():
    trainer = {**SPLIT, "PODRL_ROLE": "trainer", "PODRL_COORDINATOR": "job-trainer-0-0.job:8482"}
    cluster = detect.detect(trainer)
    assert (cluster.process_index, cluster.process_count) == (1 * 2 + 1, 6)
    assert cluster.unset == ()
    one = detect.detect({**trainer, "PODRL_SLICES": "1", "PODRL_SLICE_INDEX": "0"})
    assert (one.process_index, one.process_count) == (1, 2) and "MEGASCALE_NUM_SLICES" in one.unset


def test_pathways():
    cluster = detect.detect(PATHWAYS)
    assert (cluster.kind, cluster.topology, cluster.process_count) == ("pathways", "pathways", 1)
    assert cluster.coordinator == "grpc://run-pathways-head-0-0.run:29000"
    assert cluster.distributed_arguments is None
    assert detect.detect({**PATHWAYS, "JAX_PLATFORMS": "proxy,cpu"}).kind == "pathways"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**PATHWAYS, "JAX_BACKEND_TARGET": ""}, "JAX_BACKEND_TARGET='': it must be the address of the Pathways proxy"),
        ({**GKE, "TPU_WORKER_ID": "4"}, r"TPU_WORKER_ID=4 must be below 4 \(hosts in TPU_WORKER_HOSTNAMES\)"),
        ({**GKE, "TPU_WORKER_ID": "two"}, "TPU_WORKER_ID='two' must be an integer"),
        ({"TPU_WORKER_ID": "0"}, "TPU_WORKER_HOSTNAMES is empty: GKE sets both"),
        ({**MULTISLICE, "MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID=2 must be below 2"),
        ({**MULTISLICE, "MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID='' must be an integer"),
        ({**MULTISLICE, "MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR_ADDRESS is empty"),
        ({**SPLIT, "PODRL_ROLE": "critic"}, "PODRL_ROLE='critic' must be trainer or rollout"),
        ({**SPLIT, "PODRL_HOSTS_PER_SLICE": "4"}, "PODRL_HOSTS_PER_SLICE=4 but TPU_WORKER_HOSTNAMES .* names 2 hosts"),
        ({**SPLIT, "PODRL_HOST_INDEX": "2"}, "PODRL_HOST_INDEX=2 must be below 2"),
        ({**SPLIT, "PODRL_COORDINATOR": "job-rollout-1-0.job"}, "PODRL_COORDINATOR='job-rollout-1-0.job' must be HOST"),
        ({**LOCAL, "PODRL_PROCESS_INDEX": "4"}, "PODRL_PROCESS_INDEX=4 must be below 4"),
        ({**LOCAL, "PODRL_PROCESS_COUNT": "0"}, "PODRL_PROCESS_COUNT=0 must be at least 1"),
        ({**LOCAL, "PODRL_ROLE": "actor"}, "PODRL_ROLE='actor' must be trainer or rollout"),
        ({"PODRL_PLATFORM": "slurm"}, "PODRL_PLATFORM=slurm is unknown"),
    ],
)
def test_broken_environments_are_refused_by_name(environment, message):
    with pytest.raises(ValueError, match=message):
        detect.detect(environment)


def test_tpu_vm_that_is_not_ready_is_refused():
    with pytest.raises(ValueError, match="no worker-network-endpoints: the TPU is not READY"):
        detect.detect({}, metadata={"agent-worker-number": "0"})


@pytest.mark.parametrize(
    ("topology", "environment", "message"),
    [
        ("single", GKE, "--topology=single needs exactly 1 process, .*, but this is gke with 4 processes."),
        ("shared", LAPTOP, "--topology=shared needs at least 2 processes in one jax.distributed cluster"),
        ("split", LAPTOP, "rollout hosts join it: set PODRL_CHANNEL to the HOST:PORT at which it listens for them"),
        ("split", PATHWAYS, "--topology=split needs several processes, or one cluster per role, or trainers that"),
        ("pathways", LAPTOP, "--topology=pathways needs JAX_PLATFORMS=proxy"),
        ("mesh", LAPTOP, "--topology=mesh is unknown"),
    ],
)
def test_topologies_the_platform_cannot_run(topology, environment, message):
    with pytest.raises(ValueError, match=message):
        detect.detect(environment, topology=topology)


@pytest.mark.parametrize(("topology", "environment"), [("shared", GKE), ("split", SPLIT), ("pathways", PATHWAYS)])
def test_a_topology_asked_for_and_found(topology, environment):
    assert detect.detect(environment, topology=topology) == detect.detect(environment)


@pytest.mark.parametrize(
    ("environment", "metadata", "channel"),
    [
        (GKE, {}, None),
        (MULTISLICE, {}, None),
        ({}, TPU_VM, None),
        ({}, {**TPU_VM, "worker-network-endpoints": "tpu:0:10.0.0.2", "agent-worker-number": "0"}, "10.0.0.2:8483"),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "run-slice-job-0-0.run"}, {}, "run-slice-job-0-0.run:8483"),
        ({**LAPTOP, "PODRL_CHANNEL": "10.0.0.9:7000"}, {}, "10.0.0.9:7000"),
    ],
)
def test_all_processes_of_a_platform_may_train_and_rollout_hosts_join_them(environment, metadata, channel):
    together = detect.detect(environment, metadata=metadata)
    cluster = detect.detect(environment, metadata=metadata, topology="split")
    assert channel is not None or together.process_count > 1
    assert cluster.channel == (channel or f"{together.coordinator.split(':')[0]}:8483")
    assert (cluster.topology, cluster.trainers, cluster.rollouts) == ("split", together.process_count, 0)
    assert cluster.distributed_arguments == together.distributed_arguments
    hosts = joining.hosts_of(cluster, "", "", "data=4")
    assert hosts.trainer == tuple(range(together.process_count)) and hosts.rollout == hosts.heads == ()
    assert hosts.name(hosts.count) == "rollout 0"


FLAGS = {"coordinator": "h0:9000", "process_id": "1", "num_processes": "4"}


def test_flags_say_the_place_where_no_platform_does():
    found = detect.detect({"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b"}, flags=FLAGS)  # flags win
    assert found == detect.Cluster("flags", "shared", 1, 4, coordinator="h0:9000")
    arguments = found.distributed_arguments
    assert arguments["coordinator_address"] == "h0:9000" and arguments["process_id"] == 1
    assert (arguments["num_processes"], arguments["cluster_detection_method"]) == (4, "deactivate")
    assert detect.detect({}, flags=FLAGS | {"coordinator": "10.0.0.1"}).coordinator == "10.0.0.1:8482"
    split = detect.detect({}, topology="split", flags=FLAGS)
    assert (split.role, split.trainers, split.channel) == ("trainer", 4, "h0:8483")
    alone = detect.detect({}, flags=FLAGS | {"process_id": "0", "num_processes": "1"})
    assert (alone.topology, alone.distributed_arguments) == ("single", None)
    assert detect.detect({}, flags=dict.fromkeys(FLAGS, "")) == detect.detect({})
    assert "--process_id from 0 on" in detect.too_few_workers(found, 1, 300)


@pytest.mark.parametrize(
    ("change", "environment", "message"),
    [
        ({"coordinator": ""}, {}, "--coordinator must be given too"),
        ({"process_id": "", "num_processes": ""}, {}, "--process_id and --num_processes must be given too"),
        ({"process_id": "4"}, {}, r"--process_id=4 must be below 4 \(--num_processes\)"),
        ({"process_id": "one"}, {}, "--process_id='one' must be an integer"),
        ({"num_processes": "0"}, {}, "--num_processes=0 must be at least 1"),
        ({"coordinator": ":1"}, {}, "--coordinator=':1' must be HOST:PORT"),
        ({}, {"PODRL_PLATFORM": "local"}, "and so does PODRL_PLATFORM=local"),
    ],
)
def test_flags_that_say_no_place_are_refused(change, environment, message):
    with pytest.raises(ValueError, match=message):
        detect.detect(environment, flags=FLAGS | change)


def test_jax_initialised_first_is_refused():
    program = (
        "import sys, jax; from podrl.runtime import detect; detect.check_fresh_jax(sys.modules); jax.devices();"
        "detect.check_fresh_jax(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "line 1" in done.stderr
    assert "jax was initialised before podrl.launch (backends cpu" in done.stderr


def test_importing_jax_alone_is_allowed():
    detect.check_fresh_jax({"jax._src.xla_bridge": types.SimpleNamespace(_backends={})})
    detect.check_fresh_jax({})


def test_detection_imports_no_jax():
    program = "import sys; from podrl.runtime import detect; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_pathways_without_its_library_is_refused():
    cluster = detect.detect(PATHWAYS)
    with pytest.raises(ValueError, match="JAX_PLATFORMS=proxy but pathwaysutils is missing: pip install pathwaysutils"):
        detect.check_pathways(cluster, find_spec=lambda name: None)
    detect.check_pathways(cluster, find_spec=lambda name: name)
    detect.check_pathways(POD, find_spec=lambda name: None)


MOUNTS = """overlay / overlay rw 0 0
/dev/sda1 /home ext4 rw 0 0
10.0.0.2:/share /mnt/nfs nfs4 rw 0 0
bucket /mnt/with\\040space fuse.gcsfuse rw 0 0
tmpfs /mnt/nfs/scratch tmpfs rw 0 0
"""


@pytest.mark.parametrize("path", ["/home/me/run", "/mnt/nfs/scratch/run", "/mnt/nfsx/run"])
def test_host_local_checkpoints_of_several_hosts_are_refused(path):
    with pytest.raises(ValueError, match="checkpoint directory is host-local and this run has 4 hosts: --workdir="):
        detect.check_shared_directory(path, POD, MOUNTS)
    with pytest.raises(ValueError, match="host-local"):
        detect.check_shared_directory(path, detect.Cluster("jobset_split", "split"), MOUNTS)


@pytest.mark.parametrize(
    "path", ["gs://bucket/run", "s3://bucket/run", "/mnt/nfs/run", "/mnt/nfs", "/mnt/with space/r"]
)
def test_shared_checkpoints_pass(path):
    detect.check_shared_directory(path, POD, MOUNTS)


@pytest.mark.parametrize("environment", [LAPTOP, LOCAL, PATHWAYS])
def test_one_file_system_is_enough_where_there_is_one_machine(environment):
    detect.check_shared_directory("/home/me/run", detect.detect(environment), MOUNTS)


def test_too_few_workers_says_how_to_start_the_rest():
    message = detect.too_few_workers(POD, reached=1, waited_s=300)
    assert message.startswith("Only 1 of 4 TPU workers reached the coordinator 10.164.0.5:8482 within 300 s.")
    assert "run with --worker=all" in message
    assert "kubectl get pods" in detect.too_few_workers(detect.detect(SPLIT), reached=1, waited_s=1)


@pytest.fixture
def metadata_server():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            key = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known = self.headers["Metadata-Flavor"] == "Google" and key in self.server.values
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(self.server.values[key].encode() if known else b"")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.values = dict(TPU_VM)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_metadata_of_a_tpu_vm(metadata_server, tmp_path):
    environment = {"GCE_METADATA_IP": f"127.0.0.1:{metadata_server.server_address[1]}"}
    assert detect.tpu_vm_metadata(environment, devices=tmp_path) == {}  # without chips the metadata server is not asked
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert detect.tpu_vm_metadata(environment, devices=tmp_path) == {}
    (tmp_path / "vfio" / "0").touch()
    assert detect.tpu_vm_metadata(environment, devices=tmp_path) == TPU_VM
    del metadata_server.values["accelerator-type"]
    assert set(detect.tpu_vm_metadata(environment, devices=tmp_path)) == {
        "agent-worker-number",
        "worker-network-endpoints",
    }
    assert detect.tpu_vm_metadata({**environment, **GKE}, devices=tmp_path) == {}


def test_no_metadata_server(tmp_path):
    (tmp_path / "accel0").touch()
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
    assert detect.tpu_vm_metadata({"GCE_METADATA_IP": f"127.0.0.1:{port}"}, devices=tmp_path) == {}
