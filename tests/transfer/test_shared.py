"""The shared topology: one jax.distributed cluster of four processes, two of them trainers and two rollouts."""

import textwrap

import pytest
import workers

# The program of each process. Under LoRA, RLCluster publishes the base once, and the adapters at every version.
FOUR = """
    import dataclasses
    import sys
    import jax
    jax.distributed.initialize(sys.argv[1], 4, int(sys.argv[2]), cluster_detection_method="deactivate")
    import numpy as np
    import jax.numpy as jnp
    from podrl.mesh.build import make_mesh
    from podrl.transfer.publish import Publisher, WeightMismatchError
    from podrl.models import parameters
    from podrl.models.config import LoraConfig, gemma2_config
    from podrl.types import Policy

    rank = jax.process_index()
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    trainer, rollout = make_mesh("fsdp=2,tensor=2", devices[:4]), make_mesh("data=2,tensor=2", devices[4:])
    sizes = dict(vocab_size=32, num_layers=2, model_dim=16, ffn_dim=32, num_heads=4, num_kv_heads=2, head_dim=8)
    model = dataclasses.replace(gemma2_config(**sizes), lora=LoraConfig(rank=2))
    source = parameters.abstract_params(model, trainer, jnp.float32)
    target = parameters.abstract_params(model, rollout, jnp.bfloat16)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

    def values(tree, version):
        rng = np.random.default_rng(version)
        return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), tree)

    def placed(tree, version):
        if rank > 1:
            return None
        put = lambda leaf, x: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: x[index])
        return jax.tree.map(put, tree, values(tree, version))

    def arrived(policy, tree, version):
        for array, want in zip(*map(jax.tree.leaves, (policy.params, values(tree, version))), strict=True):
            for shard in array.addressable_shards:
                assert (np.asarray(shard.data) == want.astype(jnp.bfloat16)[shard.index]).all()

    adapters, base = parameters.split_trainable(source, model)
    adapters_to, base_to = parameters.split_trainable(shardings, model)
    base_publisher = Publisher(base, base_to, target_dtype=jnp.bfloat16)
    publisher = Publisher(adapters, adapters_to, target_dtype=jnp.bfloat16)
    frozen = base_publisher.publish(placed(base, 100), 1)
    policies = [publisher.publish(placed(adapters, 1), 1)]
    given = [placed(adapters, version) for version in (2, 3)]

    kind = type(jnp.zeros(()))
    events, reads = [], []
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: events.append(event))
    original = kind.__array__
    kind.__array__ = lambda self, *a, **k: (reads.append(self.shape), original(self, *a, **k))[1]
    for version in (2, 3):
        policies.append(publisher.publish(given[version - 2], version, donate=version == 3))
    kind.__array__ = original
    assert not [event for event in events if event.endswith("backend_compile_duration")], events
    checksums = (4, len(jax.tree.leaves(adapters)))
    assert set(reads) <= {checksums, ()}, reads

    if rank > 1:
        arrived(frozen, base, 100)
        for version, policy in enumerate(policies, 1):
            assert policy.version == version
            arrived(policy, adapters, version)
        name, array = next(iter(policies[1].params["layers"].items()))
        pieces = [np.array(shard.data) for shard in array.addressable_shards]
        if rank == 3:
            pieces[1].reshape(-1).view(np.uint16)[0] ^= 1
        flipped = [jax.device_put(x, shard.device) for x, shard in zip(pieces, array.addressable_shards)]
        array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, flipped)
        try:
            publisher.verify(Policy(params={"layers": {**policies[1].params["layers"], name: array}}, version=2))
            raise SystemExit("a flipped bit was not seen")
        except WeightMismatchError as error:
            assert name in str(error), error
    else:
        assert policies[0].params == frozen.params == {}
        assert all(x.is_deleted() for x in jax.tree.leaves(given[1]))
        assert not any(x.is_deleted() for x in jax.tree.leaves(given[0]))
    print("done", flush=True)
"""


@pytest.mark.e2e
def test_lora_over_four_processes(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(FOUR))
    address = f"127.0.0.1:{workers.free_port()}"
    said = workers.run(script, [[address, str(rank)] for rank in range(4)], devices=2)
    assert all(text.rstrip().endswith("done") for text in said), said
