"""The split topology: a trainer cluster of two processes, and rollout clusters that are killed and replaced."""

import textwrap

import pytest
import workers
from waits import until

COMMON = """
    import pathlib, sys, time
    import jax
    address, count, rank, *rest = sys.argv[1:]
    jax.distributed.initialize(address, int(count), int(rank), cluster_detection_method="deactivate")
    import numpy as np
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as Spec
    from podrl.mesh.build import make_mesh
    from podrl.runtime.channel import Channel
    from podrl.runtime.message import Message
    from podrl.transfer.pull.fetch import PullReceiver
    from podrl.transfer.pull.serve import PullServer

    shapes = {"embed": (16, 8), "layers": (3, 8, 8), "norm": (5,), "scale": ()}
    specs = {"embed": Spec("tensor", "fsdp"), "layers": Spec(None, "fsdp", "tensor"), "norm": Spec(), "scale": Spec()}
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))

    def values(version):
        rng = np.random.default_rng(version)
        return {k: np.asarray(rng.standard_normal(shape), np.float32) for k, shape in shapes.items()}

    def tree(mesh, dtype):
        return {k: jax.ShapeDtypeStruct(shapes[k], dtype, sharding=NamedSharding(mesh, specs[k])) for k in shapes}
"""

TRAINER = """
    mesh, (folder, port) = make_mesh("fsdp=2,tensor=2", devices), rest
    server = PullServer(lease_s=5)
    channel = Channel("trainer", secret="s", port=int(port))
    channel.serve("pull", server.answer)
    abstract = tree(mesh, jnp.float32)
    served = server.serve("all", abstract, target_dtype=jnp.bfloat16, bucket_bytes=128)
    for version in (1, 2):
        while not pathlib.Path(folder, f"go{version}").exists():
            time.sleep(0.02)
        want = values(version)
        put = lambda k: jax.make_array_from_callback(shapes[k], abstract[k].sharding, lambda index: want[k][index])
        served.offer({k: put(k) for k in shapes}, version, donate=True)
    while not pathlib.Path(folder, "stop").exists():
        time.sleep(0.02)
    print("trained on", flush=True)
"""

ROLLOUT = """
    mesh, ports = make_mesh(rest[0], devices), [int(port) for port in rest[1:]]
    channel = Channel("rollout", secret="s")

    def ask(process, request):
        return channel.request(f"127.0.0.1:{ports[process]}", "call", "pull", Message(request), lane=1)

    receiver = PullReceiver("all", tree(mesh, jnp.bfloat16), ask, timeout=120)
    for version in (1, 2):
        if version == 1 and count == "1":
            continue
        policy, want = receiver.receive(version), values(version)
        for name, array in policy.params.items():
            for shard in array.addressable_shards:
                assert (np.asarray(shard.data) == want[name].astype(jnp.bfloat16)[shard.index]).all(), name
        print("arrived", version, flush=True)
"""


def wait_for(said, worker):
    def is_said() -> bool:
        assert worker.process.poll() is None, worker.output
        return said in worker.output

    until(is_said, said)


@pytest.mark.e2e
def test_rollouts_die_and_are_replaced(tmp_path):
    scripts = {name: tmp_path / f"{name}.py" for name in ("trainer", "rollout", "replacement")}
    for name, script in scripts.items():
        script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(TRAINER if name == "trainer" else ROLLOUT))
    ports = [str(workers.free_port()) for _ in range(5)]
    address = [f"127.0.0.1:{port}" for port in ports[2:]]
    trainers = [[address[0], "2", str(rank), str(tmp_path), ports[rank]] for rank in range(2)]
    rollouts = [[address[1], "2", str(rank), "data=2,tensor=2", *ports[:2]] for rank in range(2)]
    with workers.started(scripts["trainer"], trainers, devices=2) as training:
        (tmp_path / "go1").touch()
        with workers.started(scripts["rollout"], rollouts, devices=2) as rolling:
            for worker in rolling:
                wait_for("arrived 1", worker)
        # The end of the block has killed both rollout processes while they waited for version 2.
        (tmp_path / "go2").touch()
        (said,) = workers.run(scripts["replacement"], [[address[2], "1", "0", "tensor=2", *ports[:2]]], devices=2)
        assert "arrived 2" in said
        (tmp_path / "stop").touch()
        assert [worker.wait() for worker in training] == [0, 0], [worker.output for worker in training]
        assert all("trained on" in worker.output for worker in training)
