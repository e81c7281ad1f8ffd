"""Attention on rows cut along time: whole rows of some heads after an all-to-all, or queries against gathered keys."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from podrl.mesh import rules

Attend = Callable[..., Array]


def time_axis(mesh: Mesh | None, tokens: int) -> str:
    """Returns the mesh axis over which rows of `tokens` tokens are cut along time; '' if they stay whole."""
    names = rules.axes_over("time", mesh) if mesh is not None else ()
    return names[0] if names and mesh is not None and tokens % mesh.shape[names[0]] == 0 else ""


def over_time(run: Attend, blockwise: Attend, axis: str, size: int, block: int) -> Attend:
    """Wraps attention over whole rows for use inside shard_map, where rows are cut over a mesh axis.

    The returned function has the arguments of `run`, (q_BTNH, k_BTKH, v_BTKH, segment_BT, window, sinks, *shared), with
    the device's part of each row; see `podrl.models.attention.attention`. It exchanges heads if the number of query
    heads is a multiple of `size`, and gathers keys otherwise. In both cases causal masks leave every device the same
    amount of work, unless keys are gathered and a device has an odd number of tokens (see `_gathered`).

    Args:
      run: attention over whole rows, in any form.
      blockwise: attention that takes `block` and `order`, for queries from some blocks of a row.
      axis: mesh axis that cuts rows along time.
      size: number of devices along the axis.
      block: largest number of tokens of a block.
    """

    def cut(q_BTNH: Array, *arguments: Array) -> Array:
        divides = q_BTNH.shape[2] % size == 0
        attend = _exchanged(run, axis, size) if divides else _gathered(blockwise, axis, size, block)
        return attend(q_BTNH, *arguments)

    return cut


def _exchanged(run: Attend, axis: str, size: int) -> Attend:
    """Exchanges time for heads by an all-to-all, and back (DeepSpeed-Ulysses, arXiv 2309.14509).

    Each device attends over whole rows with 1/size of the query heads. If the number of key/value heads is not a
    multiple of `size`, each key/value head is repeated the fewest times that make it one.
    """

    def to_heads(x_BTNH: Array) -> Array:
        return jax.lax.all_to_all(x_BTNH, axis, split_axis=2, concat_axis=1, tiled=True)

    def cut(
        q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segment_BT: Array, window: Array, sinks: tuple, *shared: Array
    ) -> Array:
        K = k_BTKH.shape[2]
        times = math.lcm(K, size) // K
        if times > 1:
            k_BTKH, v_BTKH = (jnp.repeat(x, times, axis=2) for x in (k_BTKH, v_BTKH))
        heads = (to_heads(x) for x in (q_BTNH, k_BTKH, v_BTKH))
        sinks = tuple(sink_N.reshape(size, -1)[jax.lax.axis_index(axis)] for sink_N in sinks)
        rows = (_whole(x, axis) for x in (segment_BT, *shared))
        out_BTNH = run(*heads, next(rows), window, sinks, *rows)
        return jax.lax.all_to_all(out_BTNH, axis, split_axis=1, concat_axis=2, tiled=True)

    return cut


def _gathered(blockwise: Attend, axis: str, size: int, block: int) -> Attend:
    """Gathers keys and values along time; each device attends with two parts of the row's queries.

    The row has 2 size equal parts. Device d computes parts d and 2 size - 1 - d, one near each end of the row, so that
    causal masks leave all devices the same amount of work (zigzag, as in arXiv 2407.21783, section 3.3.2). Permutations
    send the parts to their devices and back. If the number of a device's tokens is odd, every device keeps its own
    tokens, and the last device has the most work.
    """

    def owner(part: int) -> int:
        return min(part, 2 * size - 1 - part)

    def cut(
        q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segment_BT: Array, window: Array, sinks: tuple, *shared: Array
    ) -> Array:
        device, halves = jax.lax.axis_index(axis), q_BTNH.shape[1] % 2 == 0
        moves: list[list[tuple[int, int]]] = []
        parts = [device]
        if halves:
            # Every device has one even part, and all even parts go to different devices; the same holds for odd parts.
            moves = [[(d, owner(2 * d + odd)) for d in range(size)] for odd in (0, 1)]
            parts = [jnp.where(device % 2 == odd, device, 2 * size - 1 - device) for odd in (0, 1)]
        tokens = q_BTNH.shape[1] // len(parts)
        step = max(n for n in range(1, min(block, tokens) + 1) if tokens % n == 0)
        blocks = tokens // step
        order = jnp.concatenate([part * blocks + jnp.arange(blocks) for part in parts])
        rows = (_whole(x, axis) for x in (k_BTKH, v_BTKH, segment_BT, *shared))
        out_BTNH = blockwise(
            _moved(q_BTNH, moves, axis),
            *(next(rows), next(rows), next(rows)),
            window,
            sinks,
            *rows,
            block=step,
            order=(order,),
        )
        return _moved(out_BTNH, [[(b, a) for a, b in move] for move in moves], axis)

    return cut


def _whole(x: Array, axis: str) -> Array:
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _moved(x_BTNH: Array, moves: Sequence[Sequence[tuple[int, int]]], axis: str) -> Array:
    """Sends each half of a device's tokens to the device that `moves` gives for it; without moves, keeps the tokens."""
    if not moves:
        return x_BTNH
    halves = jnp.split(x_BTNH, len(moves), axis=1)
    return jnp.concatenate([jax.lax.ppermute(x, axis, move) for x, move in zip(halves, moves, strict=True)], axis=1)
