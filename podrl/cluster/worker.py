"""Creates a process's rollout worker, with its lanes (rows of the decode batch) and the token ids that end samples."""

import dataclasses

from jax.sharding import Mesh

from podrl.cluster.config import ClusterConfig
from podrl.cluster.engines import engine_class
from podrl.data.dialogue import Dialogue
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig
from podrl.mesh.build import check_decodes
from podrl.models.config import ModelConfig
from podrl.rollout.interface import RolloutEngine


def rollout_worker(
    cluster: ClusterConfig, model: ModelConfig, mesh: Mesh, local_mesh: Mesh, tokenizer: Tokenizer, *, seed: int
) -> RolloutEngine:
    """Returns a worker on this process's part of the rollout mesh; the worker has no memory on the devices yet.

    Args:
      cluster: configuration of the cluster.
      model: configuration of the model that the rollout decodes.
      mesh: mesh of the rollout, over all its processes.
      local_mesh: mesh of this process's part of `mesh`.
      tokenizer: tokenizer of the policy.
      seed: seed of sampling.

    Raises:
      ValueError: sizes do not fit together, the mesh cuts rows along time, or a stop string mixes text with a special
        token.
    """
    check_decodes(mesh, key="role_to_mesh[Role.ROLLOUT]")
    config = cluster.rollout()
    if local_mesh is not mesh:  # `lanes` counts the lanes of all hosts; each host gets its share
        share = mesh.shape["data"] // local_mesh.shape["data"]
        config = dataclasses.replace(config, lanes=max(config.lanes // share, 1))
    texts, eos_ids = ends_of_samples(config, tokenizer)
    return engine_class(cluster.rollout_engine)(
        model,
        local_mesh,
        dataclasses.replace(config, stop_strings=texts),
        pad_id=tokenizer.pad_id,
        eos_ids=eos_ids,
        decode=tokenizer.decode,
        seed=seed,
    )


def ends_of_samples(config: RolloutConfig, tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the stop strings that are text, and the ids that end every sample.

    Raises:
      ValueError: a stop string mixes text with a special token; completions are decoded without special tokens, so
        they never contain it.
    """
    texts, ids = Dialogue(tokenizer).stops(config.stop_strings)
    return texts, tuple(dict.fromkeys([*(config.eos_tokens or tokenizer.eos_ids), *ids]))
