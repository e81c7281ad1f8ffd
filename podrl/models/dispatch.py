"""Computes the products of the chosen experts: rows sorted by expert, and a gradient that costs what they cost.

Dimensions beside those of podrl/types.py: E experts, k chosen experts of a token, X tokens of a call, P rows sorted by
expert, M rows of a block, N blocks, G experts of one or of several layers, R rank of adapters.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from podrl.models import tiles
from podrl.types import PyTree

# Names for remat policies: ROUTES_NAME for the chosen experts and the order of rows, EXPERTS_NAME for products of
# experts. Chosen experts must be kept: recomputed scores may differ in the last bit, and choose another expert.
ROUTES_NAME, EXPERTS_NAME = "routes", "experts"
_LEAST, _MOST = 8, 128  # bounds of the rows in a block: with fewer, reads of weights dominate; with more, padding does
_LIMIT, _GAIN = 7.0, 1.702  # constants of the activation 'clamped_silu', see `gated`
GROUPED_DIM = {"expert_in": 2, "expert_out": 1}  # dimension along which inputs share a scale
# Indices of an expert's matrices in a leaf: 0 is gate and 1 is up; None if the leaf has one matrix for each expert.
_PARTS = {"expert_in": (0, 1), "expert_out": (None,)}

ACTIVATIONS = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}


def gated(activation: str) -> Callable[[Array, Array], Array]:
    """Returns the function of a feed-forward's gate and up projections.

    For a key of ACTIVATIONS, the function is activation(gate) x up. For 'clamped_silu' (gpt-oss), it is
    gate x sigmoid(1.702 gate) x (up + 1), where the gate is at most 7 and up lies in [-7, 7].
    """

    def clamped(gate: Array, up: Array) -> Array:
        gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
        return gate * jax.nn.sigmoid(_GAIN * gate) * (up + 1)

    return clamped if activation == "clamped_silu" else lambda gate, up: ACTIVATIONS[activation](gate) * up


class _SortedRows(NamedTuple):
    """Rows sorted by expert, one for each token and chosen expert; an expert's rows begin at a multiple of the block.

    Attributes:
      count_E: number of rows of each expert, without padding.
      token_P: token of each row; 0 on padding.
      live_P: False on padding.
      row_Xk: row of each token and choice; at least P for choices without a row.
      block_N: expert of each block of rows.
      padded_E: number of rows of each expert, with the padding that fills its last block.
      blocks: number of blocks that hold rows.
      block: number of rows of a block.
    """

    count_E: Int[Array, " E"]
    token_P: Int[Array, " P"]
    live_P: Bool[Array, " P"]
    row_Xk: Int[Array, "X k"]
    block_N: Int[Array, " N"]
    padded_E: Int[Array, " E"]
    blocks: Int[Array, ""]

    @property
    def block(self) -> int:
        return self.token_P.shape[0] // self.block_N.shape[0]

    def rows(self, x_XD: Array) -> Array:
        """Copies each token to its rows; padding is 0."""
        return jnp.where(self.live_P[:, None], x_XD[self.token_P], 0)

    def spread(self, value_Xk: Array) -> Array:
        """Copies each value of a token and choice to its row; padding is 0."""
        value_P = jnp.zeros(self.live_P.shape, value_Xk.dtype)
        return value_P.at[self.row_Xk.reshape(-1)].set(value_Xk.reshape(-1), unique_indices=True)

    def each(self, value_PX: Array) -> Array:
        """Copies the value of each row to its token and choice; it is 0 for choices without a row."""
        return value_PX.at[self.row_Xk].get(mode="fill", fill_value=0)


def _sort(expert_Xk: Int[Array, "X k"], count: int, block: int, rows: int) -> _SortedRows:
    """Sorts choices by expert, and within an expert by token, so that equal choices give equal sums bit for bit.

    Args:
      expert_Xk: number of each chosen expert; choices with numbers outside [0, E) get no row.
      count: number of experts, E.
      block: number of rows of a block; 1 leaves no padding between experts.
      rows: number of rows to sort into, P.
    """
    flat_Z = expert_Xk.reshape(-1)
    flat_Z = jnp.where((flat_Z >= 0) & (flat_Z < count), flat_Z, count)
    order_Z = jnp.argsort(flat_Z, stable=True).astype(jnp.int32)
    count_E = jnp.bincount(flat_Z, length=count).astype(jnp.int32)
    blocks_E = -(-count_E // block)
    end_E = jnp.cumsum(blocks_E)
    begin_E, first_E = (end_E - blocks_E) * block, jnp.cumsum(count_E) - count_E
    block_N = jnp.minimum(jnp.searchsorted(end_E, jnp.arange(rows // block), side="right"), count - 1)
    expert_P = jnp.repeat(block_N, block)
    offset_P = jnp.arange(rows) - begin_E[expert_P]
    live_P = (offset_P < count_E[expert_P]) & (jnp.arange(rows) < end_E[-1] * block)
    token_P = jnp.where(live_P, order_Z[jnp.minimum(first_E[expert_P] + offset_P, flat_Z.size - 1)], 0)
    rank_Z = jnp.zeros_like(order_Z).at[order_Z].set(jnp.arange(flat_Z.size, dtype=jnp.int32), unique_indices=True)
    row_Z = jnp.where(flat_Z < count, begin_E[flat_Z] + rank_Z - first_E[flat_Z], rows + rank_Z)
    k = expert_Xk.shape[1]
    row_Xk = row_Z.reshape(expert_Xk.shape)
    return _SortedRows(count_E, token_P // k, live_P, row_Xk, block_N, blocks_E * block, end_E[-1])


class Form(NamedTuple):
    """Constants of the products of experts.

    Attributes:
      experts: number of a layer's experts on this device, E.
      parts: number of devices that a layer's experts are split over.
      activation: gate non-linearity, see `gated`.
      scale: factor of the adapters' products.
      tpu: True if the TPU kernel computes the products.
    """

    experts: int
    parts: int
    activation: str
    scale: float
    tpu: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def apply(
    x_XD: Float[Array, "X D"],
    expert_Xk: Int[Array, "X k"],
    weight_Xk: Float[Array, "X k"],
    leaves: Mapping[str, Array],
    first: Int[Array, ""] | int,
    form: Form,
) -> Float[Array, "X D"]:
    """Computes the weighted sum of the outputs of each token's experts, float32.

    Only the chosen experts cost time, forward and backward. Integer weights become dense inside the products and have
    no gradient. The backward pass reads the products with `expert_in` that the forward pass computed.

    Args:
      x_XD: normalised residual stream.
      expert_Xk: numbers of the experts that compute each token, from this device's first expert on. Numbers outside
        [0, E) belong to experts of other devices or to no expert, and add nothing to the sum.
      weight_Xk: weights of these experts.
      leaves: weights, scales of integer weights, and adapters of the experts of this layer, or of several layers one
        after another, (G, ...).
      first: index of this layer's first expert in `leaves`.
      form: constants of the products.
    """
    return _forward(x_XD, expert_Xk, weight_Xk, leaves, first, form)[0]


def _plan(expert_Xk: Array, form: Form) -> _SortedRows:
    count, parts = form.experts, form.parts
    if form.tpu:
        block = tiles.alignment(expert_Xk.size / (count * parts), parts)
        return _sort(expert_Xk, count, block, -(-(expert_Xk.size + count * (block - 1)) // tiles.ROWS) * tiles.ROWS)
    block = _LEAST
    # A block grows only if an expert then still has 1.5 blocks of rows on average. Beyond this bound the padding of a
    # larger block costs more time than its speed per row saves.
    while 3 * block * count * parts <= expert_Xk.size and block < _MOST:
        block *= 2
    return _sort(expert_Xk, count, block, (-(-expert_Xk.size // block) + min(count, expert_Xk.size)) * block)


class _Products(NamedTuple):
    """Products of rows with the matrices of their experts.

    Attributes:
      dot: dot(name, x_PX, part, transposed=False) multiplies each row by matrix `part` of its expert in leaf `name`.
      bias: bias(name, part) returns the bias that belongs to matrix `part` of weight `name`: one for each row, or one
        for all rows. None without biases.
    """

    dot: Callable[..., Array]
    bias: Callable[[str, int | None], Array | None]


def _times(
    products: _Products, leaves: Mapping[str, Array], name: str, x_PX: Array, scale: float
) -> tuple[list[Array], Array | None]:
    """Multiplies rows by the matrices of weight `name`, adapters included.

    Returns:
      One product for each matrix, and the rows times the adapter's matrix A; None without an adapter.
    """
    dot, bias = products
    y = [_plus(dot(name, x_PX, part), bias(name, part)) for part in _PARTS[name]]
    if f"{name}_lora_a" not in leaves:
        return y, None
    low_PR = dot(f"{name}_lora_a", x_PX, None)
    return [y + scale * dot(f"{name}_lora_b", low_PR, part) for y, part in zip(y, _PARTS[name], strict=True)], low_PR


def _times_transposed(
    products: _Products, leaves: Mapping[str, Array], name: str, dy: Sequence[Array], scale: float
) -> tuple[Array, Array | None]:
    """Computes the gradients of the rows, and of the rows times A, from the gradients of the products of `_times`."""
    dot = products.dot
    dx_PX = functools.reduce(jnp.add, [dot(name, d, part, True) for d, part in zip(dy, _PARTS[name], strict=True)])
    if f"{name}_lora_a" not in leaves:
        return dx_PX, None
    low = [scale * dot(f"{name}_lora_b", d, part, True) for d, part in zip(dy, _PARTS[name], strict=True)]
    dlow_PR = functools.reduce(jnp.add, low)
    return dx_PX + dot(f"{name}_lora_a", dlow_PR, None, True), dlow_PR


def _factors(
    leaves: Mapping[str, Array],
    name: str,
    x_PX: Array,
    low_PR: Array | None,
    dy: Sequence[Array],
    dlow_PR: Array | None,
    scale: float,
) -> list[tuple[str, int | None, Array | None, Array]]:
    """Lists two arrays for each trained matrix of weight `name`; the outer products of their rows sum to its gradient.

    Returns:
      Tuples (leaf, matrix, left factor, right factor); the left factor of a bias is None, which stands for ones.
    """
    found: list[tuple[str, int | None, Array | None, Array]] = []
    if f"{name}_bias" in leaves:
        found += [(f"{name}_bias", part, None, d) for d, part in zip(dy, _PARTS[name], strict=True)]
    if f"{name}_scale" not in leaves:
        found += [(name, part, x_PX, d) for d, part in zip(dy, _PARTS[name], strict=True)]
    if low_PR is not None and dlow_PR is not None:
        found += [(f"{name}_lora_a", None, x_PX, dlow_PR)]
        found += [(f"{name}_lora_b", part, low_PR, scale * d) for d, part in zip(dy, _PARTS[name], strict=True)]
    return found


_Inner = tuple[list[Array], Array | None]  # the result of `_times` for the weight expert_in


def _outputs(products: _Products, leaves: Mapping[str, Array], x_PD: Array, form: Form) -> tuple[Array, _Inner]:
    """Computes the output of each row's expert, and the products with expert_in."""
    inner = _times(products, leaves, "expert_in", x_PD, form.scale)
    (y_PD,), _ = _times(products, leaves, "expert_out", gated(form.activation)(*inner[0]), form.scale)
    return y_PD, inner


def _gradients(
    products: _Products,
    leaves: Mapping[str, Array],
    x_PD: Array,
    inner: _Inner,
    dy_PD: Array,
    weight_P1: Array,
    form: Form,
) -> tuple[Array, Array, list[tuple[str, int | None, Array | None, Array]]]:
    """Computes the gradients of rows and of tokens' weights, and the factors of the leaves' gradients (`_factors`)."""
    scale, out_bias, (h, low_PR) = form.scale, products.bias("expert_out", None), inner
    a_PF, back = jax.vjp(gated(form.activation), *h)
    da_PF, dlow_PR = _times_transposed(products, leaves, "expert_out", [dy_PD], scale)
    dweight_P = jnp.sum(a_PF.astype(jnp.float32) * da_PF, axis=-1)
    if out_bias is not None:
        dweight_P = dweight_P + jnp.sum(dy_PD.astype(jnp.float32) * out_bias, axis=-1)
    dh = back(da_PF * weight_P1)
    dx_PD, dlow_in_PR = _times_transposed(products, leaves, "expert_in", dh, scale)
    factors = _factors(leaves, "expert_in", x_PD, low_PR, dh, dlow_in_PR, scale)
    if dlow_PR is not None:
        low_PR, dlow_PR = products.dot("expert_out_lora_a", a_PF, None), dlow_PR * weight_P1
    else:
        low_PR = None
    factors += _factors(leaves, "expert_out", a_PF, low_PR, [dy_PD * weight_P1], dlow_PR, scale)
    return dx_PD, dweight_P, factors


def dequantize(weight: Array, scale: Array, axis: int) -> Array:
    """Multiplies integer weights, converted to the wanted type, by the scales of their groups along `axis`."""
    return weight * jnp.repeat(scale.astype(weight.dtype), weight.shape[axis] // scale.shape[axis], axis)


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _at(g: Array, part: int | None) -> tuple[int | Array, ...]:
    """Returns the index of matrix `part` of expert `g` in a leaf."""
    return (g,) if part is None else (g, part)


def _block_products(leaves: Mapping[str, Array], g: Array) -> _Products:
    """Builds products of rows of one expert, whose index in the leaves is `g`."""

    def dot(name: str, a_MX: Array, part: int | None, transposed: bool = False) -> Array:
        w_XY = leaves[name][_at(g, part)]
        if f"{name}_scale" in leaves:
            w_XY = dequantize(w_XY.astype(a_MX.dtype), leaves[f"{name}_scale"][_at(g, part)], 0)
        # A product of few rows with a transposed matrix takes up to twice as long on CPU as the transposed product.
        return (w_XY @ a_MX.T).T if transposed else a_MX @ w_XY

    return _Products(dot, _biases(leaves, g))


def _biases(leaves: Mapping[str, Array], g: Array) -> Callable[[str, int | None], Array | None]:
    """Builds the function `bias` of `_Products`; `g` is the expert of all rows, or an array with each row's expert."""
    return lambda name, part: leaves[f"{name}_bias"][_at(g, part)] if f"{name}_bias" in leaves else None


def _forward(
    x_XD: Array, expert_Xk: Array, weight_Xk: Array, leaves: Mapping[str, Array], first: int | Array, form: Form
) -> tuple[Array, tuple]:
    plan = _plan(expert_Xk, form)
    x_PD = plan.rows(x_XD)
    if form.tpu:
        y_PD, inner = _outputs(_kernels(plan, leaves, first, x_XD.dtype, form)[0], leaves, x_PD, form)
    else:

        def body(n: int | Array) -> tuple[Array, _Inner]:
            return _outputs(_block_products(leaves, first + plan.block_N[n]), leaves, _cut(x_PD, n, plan.block), form)

        empty = jax.tree.map(lambda a: jnp.zeros((x_PD.shape[0], a.shape[1]), a.dtype), jax.eval_shape(body, 0))
        y_PD, inner = lax.fori_loop(0, plan.blocks, lambda n, whole: _put(whole, body(n), n), empty)
    y_XkD = plan.each(y_PD).astype(jnp.float32)
    out_XD = jnp.sum(y_XkD * weight_Xk[..., None], axis=1)
    plan = checkpoint_name(plan, ROUTES_NAME)
    if form.parts == 1:  # a device with a part of the experts may have mostly empty rows, which waste memory if kept
        inner = checkpoint_name(inner, EXPERTS_NAME)
    return out_XD, (x_XD, plan, inner, weight_Xk, leaves, first)


def _cut(whole: PyTree, n: int | Array, block: int) -> Any:
    """Cuts block `n` out of arrays of rows."""
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, n * block, block), whole)


def _put(whole: PyTree, part: PyTree, n: int | Array) -> Any:
    """Writes block `n` into arrays of rows."""
    return jax.tree.map(lambda a, b: lax.dynamic_update_slice_in_dim(a, b, n * len(b), 0), whole, part)


def _backward(form: Form, saved: tuple, dout_XD: Array) -> tuple:
    x_XD, plan, inner, weight_Xk, leaves, first = saved
    x_PD, dy_PD = plan.rows(x_XD), plan.rows(dout_XD.astype(x_XD.dtype))
    weight_P = plan.spread(weight_Xk).astype(x_XD.dtype)
    if form.tpu:
        products, outer = _kernels(plan, leaves, first, x_XD.dtype, form)
        dx_PD, dweight_P, factors = _gradients(products, leaves, x_PD, inner, dy_PD, weight_P[:, None], form)
        parts: dict[str, list[Array]] = {}
        for name, _, left, right in factors:
            parts.setdefault(name, []).append(outer(left, right))
        total = {name: ds[0] if len(ds) == 1 else jnp.stack(ds, axis=1) for name, ds in parts.items()}
    else:

        def body(n: Array, carry: tuple) -> tuple:
            *whole, total = carry
            g = first + plan.block_N[n]
            x_MD, inner_M, dy_MD, weight_M = _cut((x_PD, inner, dy_PD, weight_P), n, plan.block)
            *found, factors = _gradients(
                _block_products(leaves, g), leaves, x_MD, inner_M, dy_MD, weight_M[:, None], form
            )
            for name, part, left, right in factors:
                d = jnp.sum(right.astype(jnp.float32), axis=0) if left is None else _outer(left, right)
                total = total | {name: total[name].at[_at(g, part)].add(d)}
            return *_put(whole, found, n), total

        zero = lambda a: jnp.zeros(a.shape, jnp.float32)  # noqa: E731
        trained = {name: zero(w) for name, w in leaves.items() if not _is_integer(name, leaves)}
        carry = (jnp.zeros_like(x_PD), zero(weight_P), trained)
        dx_PD, dweight_P, total = lax.fori_loop(0, plan.blocks, body, carry)
    dx_XD = jnp.sum(plan.each(dx_PD).astype(jnp.float32), axis=1).astype(x_XD.dtype)
    dweight_Xk = plan.each(dweight_P).astype(weight_Xk.dtype)
    dleaves = {name: total[name].astype(w.dtype) if name in total else None for name, w in leaves.items()}
    return dx_XD, None, dweight_Xk, dleaves, None


apply.defvjp(_forward, _backward)


def _is_integer(name: str, leaves: Mapping[str, Array]) -> bool:
    """True for integer weights and for their scales."""
    return f"{name}_scale" in leaves or name.endswith("_scale")


def _outer(a_MX: Array, b_MY: Array) -> Float[Array, "X Y"]:
    """Sums outer products over rows, in float32."""
    return lax.dot_general(a_MX, b_MY, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _kernels(
    plan: _SortedRows,
    leaves: Mapping[str, Array],
    first: int | Array,
    dtype: DTypeLike,
    form: Form,
    *,
    interpret: bool = False,
) -> tuple[_Products, Callable[[Array | None, Array], Array]]:
    """Builds the TPU products: of rows with a leaf's matrices, and outer products of rows summed by expert.

    The kernel takes all matrices of the leaves as groups. Matrices of other layers are groups of 0 rows, so no matrix
    is copied. Integer weights become dense for this layer only, all experts at once. The padding behind an expert's
    rows belongs to its group: it adds 0 to sums of outer products, because `_SortedRows.rows` makes it 0. Rows after
    the last group are not computed, and no other code reads them: `outer` stops at the last group.
    """
    # This import takes a fifth of a second, so only programs that use the kernel pay for it.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    count = plan.count_E.shape[0]
    expert_P = jnp.repeat(plan.block_N, plan.block)
    rows = plan.row_Xk.size / (count * form.parts)  # mean number of rows of an expert

    def dense(name: str) -> tuple[Array, int | Array]:
        if f"{name}_scale" not in leaves:
            return leaves[name], first
        own, scale = (lax.dynamic_slice_in_dim(leaves[n], first, count) for n in (name, f"{name}_scale"))
        return dequantize(own.astype(dtype), scale, GROUPED_DIM[name]), 0

    def dot(name: str, a_PX: Array, part: int | None, transposed: bool = False) -> Array:
        w, begin = dense(name)
        stride, offset = (1, 0) if part is None else (w.shape[1], part)
        w_NXY = w.reshape(-1, *w.shape[-2:])
        place_E = (begin + jnp.arange(count)) * stride + offset
        size_N = jnp.zeros(len(w_NXY), jnp.int32).at[place_E].set(plan.padded_E)
        x, y = w_NXY.shape[1:][:: -1 if transposed else 1]
        tiling = tiles.for_rows(rows, x, y, a_PX.dtype.itemsize)
        return gmm(a_PX, w_NXY, size_N, a_PX.dtype, tiling, transpose_rhs=transposed, interpret=interpret)

    def outer(a_PX: Array | None, b_PY: Array) -> Array:
        if a_PX is None:
            mine_PE = plan.live_P[:, None] * jax.nn.one_hot(expert_P, count, dtype=b_PY.dtype)
            return _outer(mine_PE, jnp.where(plan.live_P[:, None], b_PY, 0))
        tiling = tiles.for_outer(rows, a_PX.shape[1], b_PY.shape[1], b_PY.dtype.itemsize)
        assert len(leaves["expert_in"]) == count, "gradients are of one layer's experts"
        return tgmm(a_PX.T, b_PY, plan.padded_E, b_PY.dtype, tiling, interpret=interpret)

    return _Products(dot, _biases(leaves, first + expert_P)), outer
