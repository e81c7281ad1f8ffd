"""Sizes of the engine's programs and pools, from the configuration, and the check that the pools fit memory."""

from jax.sharding import Mesh

from podrl.engine.config import RolloutConfig
from podrl.engine.state import STOP_IDS, EngineShape
from podrl.runtime.memory import free_memory


def check_memory(needed: int, mesh: Mesh, config: RolloutConfig, shape: EngineShape) -> None:
    """Refuses a key/value pool that is larger than the free memory, before any of it is allocated.

    Args:
      needed: bytes of the pool, summed over all devices of the mesh. Only this host's share is checked.
      mesh: mesh that the pool is allocated on.
      config: settings, named in the message.
      shape: sizes of the pool, named in the message.

    Raises:
      ValueError: the pool does not fit.
    """
    needed = needed * len(mesh.local_devices) // mesh.size  # bytes on this host's devices
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if mesh.devices.flat[0].platform == "cpu":
        room, what = free_memory(), "on this machine"
    else:
        rooms = [s["bytes_limit"] - s["bytes_in_use"] for s in stats if "bytes_limit" in s and "bytes_in_use" in s]
        room, what = sum(rooms) if len(rooms) == len(stats) else None, f"on this host's {len(stats)} devices"
    if room is None or needed <= room:
        return
    raise ValueError(
        f"The key/value pool of rollout.lanes={config.lanes} needs {needed / 2**30:,.1f} GiB, but only "
        f"{room / 2**30:,.1f} GiB are free {what}. It has {shape.pages} pages of {shape.page_tokens} tokens per shard. "
        f"Lower rollout.lanes, rollout.max_tokens_to_generate={config.max_tokens_to_generate} or "
        f"rollout.max_prompt_length={config.max_prompt_length} (with an environment, rollout.max_response_tokens), or "
        "set a smaller rollout.pool_tokens."
    )


def engine_shape(config: RolloutConfig, shards: int, *, recurrent: bool = False) -> EngineShape:
    """Works out the sizes of each shard's programs and pools.

    Args:
      config: settings of the rollout.
      shards: number of data-parallel shards of the mesh.
      recurrent: True if the model has layers of linear attention.
    """
    C, prompt, longest = config.page_tokens, config.prompt_pages, config.longest_pages
    lanes = -(-config.lanes // shards)
    pages = lanes * (prompt + -(-config.response_tokens // C))
    if config.pool_tokens is not None:
        pages = config.pool_tokens // C
    largest = max(C, min(prompt * C, config.prefill_tokens // C * C))
    # If samples have environments there is a bucket of half a page, because most observations are shorter than a page.
    buckets = [C // 2, C] if config.response_tokens > config.max_tokens_to_generate and C > 1 else [C]
    while buckets[-1] < largest:
        buckets.append(min(2 * buckets[-1], largest))
    return EngineShape(
        lanes=lanes,
        pages=max(pages, longest) + 1,
        page_tokens=C,
        steps=config.steps_per_dispatch,
        prompt_pages=prompt,
        max_pages=2 * longest,
        members=config.members_per_read,
        stop_ids=STOP_IDS,
        buckets=tuple(buckets),
        prefill_tokens=config.prefill_tokens,
        slots=lanes if recurrent else 0,
    )
