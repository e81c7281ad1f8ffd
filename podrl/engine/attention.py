"""Attention of the decode engine: each query reads only the key pages in use, so its cost is in proportion to them.

Every read of a page gives a partial result (maximum, normaliser, weighted values) for the queries that the read
serves. The partial results of a sample's pages are merged in a fixed order. So the sample's result does not depend, bit
for bit, on its lane, on the indices of its pages, or on other samples.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int

from podrl.engine import page_attention, page_attention_gpu
from podrl.engine.reads import ReadList, Runs
from podrl.models.attention import NEG_INF

SHARED_BLOCK = 4  # number of reads of shared (prompt) pages that are computed together
OWN_BLOCK = 16  # number of reads of lanes' own pages that are computed together


@flax.struct.dataclass
class PartialSoftmax:
    """The partial result of a softmax, over some of the keys, for some queries.

    Attributes:
      top: largest score of each query.
      mass: sum of the weights exp(score - top).
      value: sum of the values, each times its weight.
    """

    top: Float[Array, "*q"]
    mass: Float[Array, "*q"]
    value: Float[Array, "*q H"]

    def scaled(self, top: Array) -> tuple[Array, Array]:
        """Rescales mass and value to another maximum; returns (mass, value)."""
        factor = jnp.exp(self.top - top)
        return self.mass * factor, self.value * factor[..., None]

    def merge(self, other: "PartialSoftmax") -> "PartialSoftmax":
        """Merges the results over two disjoint sets of keys."""
        top = jnp.maximum(self.top, other.top)
        (mass, value), (mass2, value2) = self.scaled(top), other.scaled(top)
        return PartialSoftmax(top, mass + mass2, value + value2)

    def with_sinks(self, sinks: tuple[Array, ...]) -> "PartialSoftmax":
        """Adds an attention sink, which is a key with the value 0.

        `sinks` has one array with the sink's score for each query, or is () to add no sink.
        """
        part = self
        for sink_q in sinks:
            top = jnp.broadcast_to(sink_q.astype(jnp.float32), part.top.shape)
            part = part.merge(PartialSoftmax(top, jnp.ones_like(top), jnp.zeros_like(part.value)))
        return part

    def result(self, dtype: jnp.dtype) -> Array:
        """Divides the values by the sum of weights; gives 0 for a query that saw no key."""
        return (self.value / jnp.maximum(self.mass, 1e-30)[..., None]).astype(dtype)


def partial_attention(
    q_BKQH: Float[Array, "B K Q H"],
    k_BKCH: Float[Array, "B K C H"],
    v_BKCH: Float[Array, "B K C H"],
    seen_BQC: Bool[Array, "B Q C"],
    softcap: float,
) -> PartialSoftmax:
    """Attends to some of the keys: scores in float32, weights in the values' dtype; unseen keys weigh exactly 0."""
    score_BKQC = jnp.einsum("BKQH,BKCH->BKQC", q_BKQH, k_BKCH, preferred_element_type=jnp.float32)
    if softcap:
        score_BKQC = jnp.tanh(score_BKQC / softcap) * softcap
    seen_B1QC = seen_BQC[:, None]
    score_BKQC = jnp.where(seen_B1QC, score_BKQC, NEG_INF)
    top_BKQ = jnp.max(score_BKQC, axis=-1)
    weight_BKQC = jnp.where(seen_B1QC, jnp.exp(score_BKQC - top_BKQ[..., None]), 0.0)
    value_BKQH = jnp.einsum(
        "BKQC,BKCH->BKQH", weight_BKQC.astype(v_BKCH.dtype), v_BKCH, preferred_element_type=jnp.float32
    )
    return PartialSoftmax(top_BKQ, jnp.sum(weight_BKQC, axis=-1), value_BKQH)


def decode_attention(
    q_RNH: Float[Array, "R N H"],
    layer: Int[Array, ""] | int,
    key_LMKCH: Float[Array, "L M K C H"],
    value_LMKCH: Float[Array, "L M K C H"],
    recent: PartialSoftmax,
    reads: ReadList,
    scratch: tuple[PartialSoftmax, PartialSoftmax],
    position_R: Int[Array, " R"],
    *,
    window: Int[Array, ""],
    softcap: float,
) -> tuple[Float[Array, "R N H"], tuple[PartialSoftmax, PartialSoftmax]]:
    """Computes attention of one token per lane to the pages of the lane and to the keys of this dispatch.

    The pages of a lane are the pages of its prompt, which other lanes may share, and the pages of its own sample.

    Args:
      q_RNH: scaled, rotated queries; head n reads key/value head n // (N / K).
      layer: index of the layer in the pools.
      key_LMKCH, value_LMKCH: the pools of keys and of values.
      recent: partial result over the keys of this dispatch, (R, K, N/K).
      reads: read list of the dispatch.
      scratch: arrays for the partial results of shared and of own reads, from `make_scratch`. They are overwritten and
        returned; no step clears the entries that it does not use.
      position_R: position of the query.
      window: number of tokens that a query sees: its own token and the tokens just before it.
      softcap: bound of the scores, `softcap * tanh(score / softcap)`; 0 for none.

    Returns:
      The attention's output, and `scratch`.
    """
    R, N, H = q_RNH.shape
    _, _, K, C, _ = key_LMKCH.shape
    q_RKGH = q_RNH.reshape(R, K, N // K, H)
    place_C = jnp.arange(C)

    def read(page_B: Array, q_BKQH: Array, lane_BQ: Array, start_B: Array, count_B: Array) -> PartialSoftmax:
        k_BKCH = key_LMKCH.at[layer, page_B].get(mode="promise_in_bounds")
        v_BKCH = value_LMKCH.at[layer, page_B].get(mode="promise_in_bounds")
        back_BQC = position_R[lane_BQ][..., None] - (start_B[:, None] + place_C)[:, None]
        seen_BQC = (place_C < count_B[:, None])[:, None] & (back_BQC < window)
        return partial_attention(q_BKQH, k_BKCH, v_BKCH, seen_BQC, softcap)

    def own(cut: Callable[[Array], Array]) -> PartialSoftmax:
        lane_B = cut(reads.own_lane_O)
        q_BKGH, lane_BG = q_RKGH[lane_B], jnp.broadcast_to(lane_B[:, None], (OWN_BLOCK, N // K))
        return read(cut(reads.own_page_O), q_BKGH, lane_BG, cut(reads.own_start_O), cut(reads.own_count_O))

    def shared(cut: Callable[[Array], Array]) -> PartialSoftmax:
        lane_BW = cut(reads.shared_lane_UW)
        B, W = lane_BW.shape
        q_BKQH = q_RKGH[lane_BW].transpose(0, 2, 1, 3, 4).reshape(B, K, W * (N // K), H)
        lane_BQ = jnp.repeat(lane_BW, N // K, axis=1)
        part = read(cut(reads.shared_page_U), q_BKQH, lane_BQ, cut(reads.shared_start_U), cut(reads.shared_count_U))
        apart = lambda x: jnp.moveaxis(x.reshape(B, K, W, N // K, *x.shape[3:]), 2, 1)  # noqa: E731
        return jax.tree.map(lambda x: apart(x).reshape(B * W, K, N // K, *x.shape[3:]), part)

    W = reads.shared_lane_UW.shape[1]
    with jax.named_scope("shared_reads"):
        from_shared = _blocks(shared, reads.total_2[0], SHARED_BLOCK, scratch[0], rows=W)
    with jax.named_scope("own_reads"):
        from_own = _blocks(own, reads.total_2[1], OWN_BLOCK, scratch[1], rows=1)
    with jax.named_scope("merge_shared"):
        result = _gather(recent, from_shared, reads.shared_first_R, reads.shared_number_R, reads.longest_2[0], W)
    with jax.named_scope("merge_own"):
        result = _gather(result, from_own, reads.own_first_R, reads.own_number_R, reads.longest_2[1], 1)
    return result.result(q_RNH.dtype).reshape(R, N, H), (from_shared, from_own)


def kernel_attention(
    q_RNH: Float[Array, "R N H"],
    layer: Int[Array, ""] | int,
    key_LMKCH: Float[Array, "L M K C H"],
    value_LMKCH: Float[Array, "L M K C H"],
    recent: PartialSoftmax,
    reads: ReadList,
    position_R: Int[Array, " R"],
    *,
    window: Int[Array, ""],
    softcap: float,
    tensor: bool = False,
    gpu: bool = False,
    interpret: bool = False,
) -> Float[Array, "R N H"]:
    """Computes the output of `decode_attention` in a Pallas kernel for TPUs or GPUs, without scratch arrays.

    Here, too, a sample's result does not depend on its lane, its pages or its neighbours, but its last bits differ from
    those of `decode_attention`. The other arguments are those of `decode_attention`.

    Args:
      tensor: True if heads are cut over the mesh's axis `tensor`. XLA cannot partition a kernel, so the kernel is
        mapped over the axis here.
      gpu: True for the kernel of GPUs (`podrl.engine.page_attention_gpu`), False for the kernel of TPUs
        (`podrl.engine.page_attention`).
      interpret: True to run the kernel on CPU, slowly.
    """
    R, N, H = q_RNH.shape
    K = key_LMKCH.shape[2]
    attend = (page_attention_gpu if gpu else page_attention).page_attention

    def local(q_RNH, layer, key_LMKCH, value_LMKCH, top_RKG, mass_RKG, value_RKGH, reads, position_R, window):
        result = PartialSoftmax(top_RKG, mass_RKG, value_RKGH)
        r = reads
        own = Runs(r.own_first_R, r.own_number_R, r.own_lane_O[:, None], r.own_page_O, r.own_start_O, r.own_count_O)
        shared = Runs(
            r.shared_first_R,
            r.shared_number_R,
            r.shared_lane_UW,
            r.shared_page_U,
            r.shared_start_U,
            r.shared_count_U,
        )
        for name, runs in (("shared_pages", shared), ("own_pages", own)):
            part = attend(
                q_RNH,
                layer,
                key_LMKCH,
                value_LMKCH,
                runs,
                position_R,
                window=window,
                softcap=softcap,
                name=name,
                interpret=interpret,
            )
            result = result.merge(PartialSoftmax(*part))
        return result.result(q_RNH.dtype).reshape(R, -1, H)

    if tensor:
        none, head, pool = Spec(), Spec(None, "tensor"), Spec(None, None, "tensor")
        local = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(head, none, pool, pool, head, head, head, none, none, none),
            out_specs=head,
            axis_names={"tensor"},
            check_vma=False,
        )
    assert recent.top.shape == (R, K, N // K)
    layer, window = jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)
    where = (recent.top, recent.mass, recent.value, reads, position_R, window)
    return local(q_RNH, layer, key_LMKCH, value_LMKCH, *where)


def loop_counts(reads: ReadList) -> dict[str, int]:
    """Counts, from a read list on the host, the iterations of each loop and the page reads of a layer's decode step.

    Returns:
      The counts of iterations by the named scope of the loop, and of page reads by the name of the attention kernel.
    """
    return {
        "shared_reads": -(-int(reads.total_2[0]) // SHARED_BLOCK),
        "own_reads": -(-int(reads.total_2[1]) // OWN_BLOCK),
        "merge_shared": int(reads.longest_2[0]),
        "merge_own": int(reads.longest_2[1]),
        "shared_pages": int(reads.total_2[0]),
        "own_pages": int(reads.total_2[1]),
    }


def make_scratch(reads: ReadList, kv_heads: int, heads: int, head_dim: int) -> tuple[PartialSoftmax, PartialSoftmax]:
    """Allocates arrays for the partial results of shared reads, (U * W, K, N/K), and of own reads, (O, K, N/K).

    The arrays of values have one more dimension, the head dimension, which is the last.
    """

    def room(*rows: int) -> PartialSoftmax:
        shape = (*rows, kv_heads, heads // kv_heads)
        return PartialSoftmax(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))

    return room(reads.shared_lane_UW.size), room(*reads.own_lane_O.shape)


def recent_attention(
    q_RNH: Float[Array, "R N H"],
    k_RKCH: Float[Array, "R K C H"],
    v_RKCH: Float[Array, "R K C H"],
    step: Int[Array, ""],
    *,
    window: Int[Array, ""],
    softcap: float,
    sinks: tuple[Float[Array, " N"], ...] = (),
) -> PartialSoftmax:
    """Computes each lane's attention to the tokens that it has fed in this dispatch, and to the sinks.

    Args:
      q_RNH: scaled, rotated queries.
      k_RKCH, v_RKCH: keys and values of the dispatch so far; C is the number of its decode steps.
      step: number of the present decode step, from 0; also the index of the query's own token among the C keys.
      window, softcap: arguments of `decode_attention`.
      sinks: scores of the heads' sinks, in one array, see `podrl.models.attention.attention`; () if heads have none.

    Returns:
      The partial result of each query, (R, K, N/K).
    """
    R, N, H = q_RNH.shape
    K, C = k_RKCH.shape[1:3]
    back_C = step - jnp.arange(C)
    seen_RQC = jnp.broadcast_to((back_C >= 0) & (back_C < window), (R, N // K, C))
    part = partial_attention(q_RNH.reshape(R, K, N // K, H), k_RKCH, v_RKCH, seen_RQC, softcap)
    return part.with_sinks(tuple(sink_N.reshape(K, N // K) for sink_N in sinks))


def prefill_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    layer: Int[Array, ""] | int,
    key_LMKCH: Float[Array, "L M K C H"],
    value_LMKCH: Float[Array, "L M K C H"],
    prior_page_BJ: Int[Array, "B J"],
    prior_start_BJ: Int[Array, "B J"],
    prior_count_BJ: Int[Array, "B J"],
    longest: Int[Array, ""],
    position_BT: Int[Array, "B T"],
    *,
    window: Int[Array, ""],
    softcap: float,
    sinks: tuple[Float[Array, " N"], ...] = (),
) -> Float[Array, "B T N H"]:
    """Computes attention of each row's chunk to the row's earlier pages, to the sinks and, causally, to itself.

    The other arguments are those of `decode_attention` and `recent_attention`.

    Args:
      q_BTNH, k_BTKH, v_BTKH: queries, keys and values of the chunks.
      prior_page_BJ, prior_start_BJ, prior_count_BJ: index, position of the first token and number of tokens of the
        row's pages before the chunk; a count of 0 marks an unused entry.
      longest: largest number of prior pages of any row.
      position_BT: positions of the tokens, contiguous in a row.
    """
    B, T, N, H = q_BTNH.shape
    K, C = key_LMKCH.shape[2:4]
    q_BKQH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * (N // K), H)
    position_BQ = jnp.repeat(position_BT, N // K, axis=1)
    place_T, place_C = jnp.arange(T), jnp.arange(C)
    back_QT = jnp.repeat(place_T, N // K)[:, None] - place_T
    seen_BQT = jnp.broadcast_to((back_QT >= 0) & (back_QT < window), (B, *back_QT.shape))
    own = partial_attention(q_BKQH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), seen_BQT, softcap)
    own = own.with_sinks(tuple(jnp.tile(sink_N.reshape(K, N // K), (1, T)) for sink_N in sinks))

    def earlier(j: Array, so_far: PartialSoftmax) -> PartialSoftmax:
        page_B, start_B, count_B = prior_page_BJ[:, j], prior_start_BJ[:, j], prior_count_BJ[:, j]
        back_BQC = position_BQ[..., None] - (start_B[:, None] + place_C)[:, None]
        seen_BQC = (place_C < count_B[:, None])[:, None] & (back_BQC < window)
        k_BKCH, v_BKCH = key_LMKCH[layer, page_B], value_LMKCH[layer, page_B]
        return so_far.merge(partial_attention(q_BKQH, k_BKCH, v_BKCH, seen_BQC, softcap))

    out_BKQH = jax.lax.fori_loop(0, longest, earlier, own).result(q_BTNH.dtype)
    return out_BKQH.reshape(B, K, T, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def _blocks(
    compute: Callable[[Callable[[Array], Array]], PartialSoftmax],
    total: Int[Array, ""],
    block: int,
    scratch: PartialSoftmax,
    *,
    rows: int,
) -> PartialSoftmax:
    """Computes the partial results of `total` reads block by block into `scratch`.

    The entries of `scratch` that these reads do not fill keep stale values of an earlier layer or step.
    """

    def body(i: Array, parts: PartialSoftmax) -> PartialSoftmax:
        done = compute(lambda x: jax.lax.dynamic_slice_in_dim(x, i * block, block))
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * block * rows, 0), parts, done)

    return jax.lax.fori_loop(0, (total + block - 1) // block, body, scratch)


def _gather(
    result: PartialSoftmax,
    parts: PartialSoftmax,
    first_R: Int[Array, " R"],
    number_R: Int[Array, " R"],
    longest: Int[Array, ""],
    stride: int,
) -> PartialSoftmax:
    """Merges the partial results of each lane's reads into the lane's result, in the order of the reads.

    Iterations of the loop after a lane's last read leave the lane's result unchanged.
    """

    def body(j: Array, result: PartialSoftmax) -> PartialSoftmax:
        mine_R = j < number_R
        index_R = jnp.where(mine_R, first_R + j * stride, 0)
        part = jax.tree.map(lambda x: x.at[index_R].get(mode="promise_in_bounds"), parts)
        keep = mine_R[:, None, None]
        part = PartialSoftmax(
            jnp.where(keep, part.top, NEG_INF),
            jnp.where(keep, part.mass, 0.0),
            jnp.where(keep[..., None], part.value, 0.0),
        )
        return result.merge(part)

    return jax.lax.fori_loop(0, longest, body, result)
