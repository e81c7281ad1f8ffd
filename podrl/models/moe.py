"""Routed feed-forwards: the choice of each token's experts, and their exact computation (no token is dropped).

Dimensions beside those of podrl/types.py: E experts, k chosen experts of a token, X tokens of a call, P rows sorted by
expert, M rows of a block, N blocks, G experts of one or of several layers, R rank of adapters. A route is the k chosen
experts of a token, each stored as its number plus 1.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as Spec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from podrl.mesh import build, rules
from podrl.models import tiles
from podrl.models.config import EXPERT_PROJECTIONS, Experts, ModelConfig, quant_groups
from podrl.types import PyTree

# Names for remat policies: ROUTES_NAME for the chosen experts and the order of rows, EXPERTS_NAME for products of
# experts. Chosen experts must be kept: recomputed scores may differ in the last bit, and choose another expert.
ROUTES_NAME, EXPERTS_NAME = "routes", "experts"
UNKNOWN = 0  # entry of a route for which no expert is recorded; expert e is recorded as e + 1
_LEAST, _MOST = 8, 128  # bounds of the rows in a block: with fewer, reads of weights dominate; with more, padding does
_ROUTING = ("router", "router_bias", "router_gain", "selection_bias")
_BIASES = ("expert_in_bias", "expert_out_bias")
_LIMIT, _GAIN = 7.0, 1.702  # constants of the activation 'clamped_silu', see `gated`

# name: (shape letters, logical axes)
_WEIGHTS = {
    "router": ("DE", ("norm", "norm")),
    "expert_in": ("E2DF", ("expert", "norm", "embed", "mlp")),
    "expert_out": ("EFD", ("expert", "mlp", "embed")),
    "selection_bias": ("E", ("norm",)),
    "router_bias": ("E", ("norm",)),
    "router_gain": ("E", ("norm",)),
    "expert_in_bias": ("E2F", ("expert", "norm", "mlp")),
    "expert_out_bias": ("ED", ("expert", "norm")),
    "shared_in": ("2DS", ("norm", "embed", "mlp")),
    "shared_out": ("SD", ("mlp", "embed")),
    "shared_gate": ("D", ("norm",)),
    "expert_in_scale": ("E2dF", ("expert", "norm", "embed", "mlp")),
    "expert_out_scale": ("EfD", ("expert", "mlp", "embed")),
    "expert_in_lora_a": ("EDR", ("expert", "embed", "rank")),
    "expert_in_lora_b": ("E2RF", ("expert", "norm", "rank", "mlp")),
    "expert_out_lora_a": ("EFR", ("expert", "mlp", "rank")),
    "expert_out_lora_b": ("ERD", ("expert", "rank", "embed")),
}
GROUPED_DIM = {"expert_in": 2, "expert_out": 1}  # dimension along which inputs share a scale, see grouped_dim
# Indices of an expert's matrices in a leaf: 0 is gate and 1 is up; None if the leaf has one matrix for each expert.
_PARTS = {"expert_in": (0, 1), "expert_out": (None,)}


def param_shapes(config: ModelConfig) -> Mapping[str, tuple[tuple[int, ...], tuple[str, ...], float]]:
    """Declares the leaves of a layer's experts by name: (shape, logical axes, standard deviation of initial values).

    `expert_in` holds the gate and up projections as two matrices, which the TPU kernel takes without a copy. In one
    matrix, side by side in the last dimension, they would have to be copied for the kernel.
    """
    experts = config.experts
    assert experts is not None
    size = {"D": config.model_dim, "E": experts.count, "F": experts.ffn_dim, "S": experts.shared_dim, "2": 2}
    size |= {"R": config.lora.rank, "d": quant_groups(config.model_dim), "f": quant_groups(experts.ffn_dim)}
    std = dict.fromkeys(_WEIGHTS, config.model_dim**-0.5)
    std |= {"expert_out": experts.ffn_dim**-0.5, "selection_bias": 0.0, "router_gain": -1.0}
    std |= dict.fromkeys(("router_bias", *_BIASES), 0.0)
    used = ["router", "expert_in", "expert_out"]
    used += ["router_bias", *_BIASES] if experts.bias else []
    used += ["selection_bias"] if experts.selection_bias else []
    used += ["router_gain"] if experts.beside_dense else []
    used += ["shared_in", "shared_out"] if experts.shared_dim else []
    used += ["shared_gate"] if experts.shared_gate else []
    if experts.shared_dim:
        std["shared_out"] = experts.shared_dim**-0.5
    for name in EXPERT_PROJECTIONS:
        if config.lora.base_dtype:
            used, std[f"{name}_scale"] = [*used, f"{name}_scale"], -1.0
        if config.lora.covers(name):
            used += [f"{name}_lora_a", f"{name}_lora_b"]
            std |= {f"{name}_lora_a": std[name], f"{name}_lora_b": 0.0}
    return {name: (tuple(size[c] for c in _WEIGHTS[name][0]), _WEIGHTS[name][1], std[name]) for name in used}


def route_dtype(experts: Experts) -> jnp.dtype:
    """Returns the smallest integer type that holds all expert numbers plus 1, and `UNKNOWN`."""
    return jnp.dtype(jnp.uint8 if experts.count < 256 else jnp.uint16)


def route_bytes(config: ModelConfig) -> int:
    """Returns the number of bytes of a token's recorded routes in all layers; 0 for a model without experts."""
    experts = config.experts
    return 0 if experts is None else config.routed_layers * experts.chosen * route_dtype(experts).itemsize


def routes_of(route_BTX: UInt8[Array, "B T X"], config: ModelConfig) -> Int[Array, "L B T k"]:
    """Converts routes recorded as bytes into expert numbers plus 1.

    L counts the layers with experts; layers of the model's first kind come first.
    """
    assert config.experts is not None
    dtype, dims = route_dtype(config.experts), (*route_BTX.shape[:2], config.routed_layers, config.experts.chosen)
    if dtype.itemsize > 1:
        route_BTX = lax.bitcast_convert_type(route_BTX.reshape(*dims, dtype.itemsize), dtype)
    return jnp.moveaxis(route_BTX.reshape(dims), 2, 0)


def same_sets(a_Xk: Int[Array, "*X k"], b_Xk: Int[Array, "*X k"]) -> Bool[Array, "*X"]:
    """True where two routes name the same experts, in any order."""
    return jnp.all(jnp.sort(a_Xk.astype(jnp.int32), axis=-1) == jnp.sort(b_Xk.astype(jnp.int32), axis=-1), axis=-1)


def use_of_experts(
    route_LBTk: Int[Array, "L B T k"], real_BT: Bool[Array, "B T"], experts: Experts
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Measures how evenly the tokens of a batch use the experts.

    Args:
      route_LBTk: routes as expert numbers plus 1; entries of `UNKNOWN` are not counted.
      real_BT: False on padding.
      experts: numbers of experts and of chosen experts.

    Returns:
      The number of tokens that choose the busiest expert of any layer, and the smallest evenness of a layer. Evenness
      is 1 if all experts are chosen equally often and 0 if all tokens choose the same experts; between these it is
      linear in the entropy of the experts' loads.
    """
    real_X1 = real_BT.reshape(-1, 1).astype(jnp.float32)

    def count(route_BTk: Array) -> Array:
        route_Xk = route_BTk.reshape(-1, experts.chosen).astype(jnp.int32)
        return jnp.zeros(experts.count + 1, jnp.float32).at[route_Xk].add(real_X1)[1:]

    count_LE = lax.map(count, route_LBTk)
    share_LE = count_LE / jnp.maximum(jnp.sum(count_LE, axis=1, keepdims=True), 1)
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(share_LE, share_LE), axis=1)
    least, most = math.log(experts.chosen), math.log(experts.count)
    return jnp.max(count_LE), jnp.min((entropy_L - least) / (most - least)) if least < most else jnp.float32(1)


def route(
    x_XD: Float[Array, "X D"],
    layer: PyTree,
    experts: Experts,
    route_Xk: Int[Array, "X k"] | None = None,
    loss: Callable[[Array, Array], Array] | None = None,
) -> tuple[Int[Array, "X k"], Float[Array, "X k"], Int[Array, "X k"]]:
    """Chooses the experts of each token, and computes the experts' weights.

    Scores are float32 products of float32 inputs. In a narrower type, experts with nearly equal scores would change
    places.

    Args:
      x_XD: normalised residual stream that the router reads.
      layer: leaves of the layer, with the router.
      experts: rule of the choice.
      route_Xk: routes recorded by the sampler, as expert numbers plus 1; tokens whose route is `UNKNOWN` choose for
        themselves. None lets all tokens choose. The weights come from the router in any case, so the router always has
        a gradient.
      loss: function (logits, or sigmoids if the scores are sigmoids; chosen experts) -> a scalar whose gradient the
        backward pass adds; None adds none.

    Returns:
      The numbers of the experts that compute each token, their float32 weights, and the numbers of the experts with the
      highest scores. For tokens without a recorded route these are the experts that compute the token.
    """
    logit_XE = jnp.dot(x_XD.astype(jnp.float32), layer["router"].astype(jnp.float32), precision=lax.Precision.HIGHEST)
    if experts.beside_dense:
        logit_XE = logit_XE * x_XD.shape[-1] ** -0.5
    if experts.bias:
        logit_XE = logit_XE + layer["router_bias"].astype(jnp.float32)
    score_XE = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "chosen": lambda x: x}[experts.score](logit_XE)
    choice_XE = lax.stop_gradient(score_XE)
    if experts.selection_bias:
        choice_XE = choice_XE + lax.stop_gradient(layer["selection_bias"].astype(jnp.float32))
    own_Xk = expert_Xk = lax.top_k(choice_XE, experts.chosen)[1]
    if route_Xk is not None:
        route_Xk = route_Xk.astype(jnp.int32)
        expert_Xk = jnp.where(route_Xk != UNKNOWN, route_Xk - 1, expert_Xk)
    expert_Xk = checkpoint_name(expert_Xk, ROUTES_NAME)
    weight_Xk = jnp.take_along_axis(score_XE, expert_Xk, axis=-1)
    if loss is not None:
        weight_Xk = _with_loss(weight_Xk, loss(score_XE if experts.score == "sigmoid" else logit_XE, expert_Xk))
    if experts.score == "chosen":
        weight_Xk = jax.nn.softmax(weight_Xk)
    if experts.normalize:
        # The small number avoids 0 / 0 if the sigmoids of all chosen experts are 0.
        weight_Xk = weight_Xk / (jnp.sum(weight_Xk, axis=-1, keepdims=True) + 1e-20)
    if experts.beside_dense:
        weight_Xk = weight_Xk * layer["router_gain"].astype(jnp.float32)[expert_Xk]
    return expert_Xk, weight_Xk * experts.scale, own_Xk


@jax.custom_vjp
def _with_loss(x: Array, loss: Float[Array, ""]) -> Array:
    """Returns x; the backward pass adds the gradient of `loss` to the objective's gradient."""
    return x


_with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, d: (d, jnp.ones_like(loss)))


def balance_loss(
    score_XE: Float[Array, "X E"],
    expert_Xk: Int[Array, "X k"],
    real_X: Bool[Array, " X"],
    experts: Experts,
    axes: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Computes a layer's balance loss E x sum_e f_e P_e (arXiv 2101.03961, eq. 4), times the number of real tokens.

    f_e is the share of real tokens' choices that name expert e; it has no gradient. P_e is the mean, over real tokens,
    of the router's probability of e. With sigmoids, a probability is a token's score divided by the sum of its scores.

    Args:
      score_XE: the router's sigmoids if `experts.score` is 'sigmoid', else its logits.
      expert_Xk: the experts that compute each token.
      real_X: False on padding.
      experts: rule of the choice.
      axes: mesh axes over which the tokens of the micro-batch are cut. f_e counts the tokens of all devices, and the
        result is this device's part of the sum over tokens.
    """
    sigmoid = experts.score == "sigmoid"
    share_XE = score_XE / (jnp.sum(score_XE, axis=-1, keepdims=True) + 1e-20) if sigmoid else jax.nn.softmax(score_XE)
    real_X1 = real_X[:, None].astype(share_XE.dtype)
    chosen_E = jnp.zeros(experts.count, share_XE.dtype).at[expert_Xk].add(real_X1)
    chosen_E = lax.psum(chosen_E, axes) if axes else chosen_E
    f_E = lax.stop_gradient(chosen_E) / jnp.maximum(jnp.sum(chosen_E), 1)
    return experts.count * jnp.sum(f_E * real_X1 * share_XE)


class _Layout(NamedTuple):
    """The placement of tokens and experts on the devices that compute a layer.

    The defaults describe one device, which holds all tokens and experts.

    Attributes:
      spread: mesh axes over which the experts are cut.
      parts: number of parts into which the experts are cut.
      cuts: partition specs of the weights before they are gathered, by name.
      tensor: mesh axes over which each expert is cut.
      cut: mesh axes over which the tokens are cut.
      copies: number of devices that hold the same tokens.
    """

    spread: tuple[str, ...] = ()
    parts: int = 1
    cuts: Mapping[str, Spec] = MappingProxyType({})
    tensor: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    copies: int = 1


def _on_device(
    x_BTD: Array,
    weights: PyTree,
    index: int | Array,
    given: Mapping[str, Array],
    *,
    config: ModelConfig,
    layout: _Layout,
    tpu: bool,
) -> tuple[Array, Array]:
    """Computes a device's part of `feed_forward`: (output of its tokens, the experts that the router chooses, from 0).

    Args:
      x_BTD: the device's tokens.
      weights: the device's parts of router and experts.
      index, config, tpu: the arguments of `feed_forward` with these names.
      given: arguments of `feed_forward` that are not None: 'route', 'router', 'real' and 'balance'.
      layout: how tokens and experts are cut over the devices.
    """
    experts = config.experts
    assert experts is not None
    floats = [n for n in weights if n not in _ROUTING and f"{n}_scale" not in weights]
    if layout.spread:  # gathers weights in the type of the products, because bfloat16 takes half the bytes
        weights = {n: w.astype(x_BTD.dtype) if n in floats else w for n, w in weights.items()}
    # Weights are gathered inside shard_map, so that each device sums the gradient of its own part only.
    whole: dict[str, Array] = {name: _gathered(w, layout.cuts.get(name, Spec())) for name, w in weights.items()}
    x_XD = x_BTD.reshape(-1, x_BTD.shape[-1])
    route_Xk = given["route"].reshape(len(x_XD), -1) if "route" in given else None
    router_XD = given["router"].reshape(x_XD.shape) if "router" in given else x_XD

    def loss(score_XE: Array, expert_Xk: Array) -> Array:
        # The transposed shard_map adds up the gradients of devices that hold copies of the same tokens.
        real_X = given["real"].reshape(-1)
        return given["balance"] / layout.copies * balance_loss(score_XE, expert_Xk, real_X, experts, layout.cut)

    added = loss if "balance" in given else None
    expert_Xk, weight_Xk, own_Xk = route(router_XD, whole, experts, route_Xk, added)
    own_Xk = expert_Xk if route_Xk is None else own_Xk
    if "real" in given:
        expert_Xk = jnp.where(given["real"].reshape(-1, 1), expert_Xk, experts.count)
    leaves = {n: w.astype(x_BTD.dtype) if n in floats else w for n, w in whole.items() if n not in _ROUTING}
    first, count = 0, leaves["expert_in"].shape[-4]
    if leaves["expert_in"].ndim == 5:
        first = index * count
        leaves = {name: w.reshape(-1, *w.shape[2:]) for name, w in leaves.items()}
    if layout.tensor and "expert_out_bias" in leaves:  # outputs are summed over tensor, so one device adds the bias
        leaves["expert_out_bias"] = jnp.where(lax.axis_index(layout.tensor) == 0, leaves["expert_out_bias"], 0)
    if layout.spread:
        x_XD, expert_Xk, weight_Xk = (
            lax.all_gather(a, layout.spread, tiled=True) for a in (x_XD, expert_Xk, weight_Xk)
        )
        expert_Xk = expert_Xk - count * lax.axis_index(layout.spread)
    form = _Form(count, layout.parts, config.activation, config.lora.scale if config.lora.rank else 1.0, tpu)
    out_XD: Array = _apply(x_XD, expert_Xk, weight_Xk, leaves, first, form)
    if layout.spread:
        out_XD = lax.psum_scatter(out_XD.astype(x_BTD.dtype), layout.spread, tiled=True)
    out_XD = lax.psum(out_XD, layout.tensor) if layout.tensor else out_XD
    return out_XD.astype(x_BTD.dtype).reshape(x_BTD.shape), own_Xk.reshape(*x_BTD.shape[:2], -1)


def feed_forward(
    x_BTD: Float[Array, "B T D"],
    layer: PyTree,
    index: Int[Array, ""] | int,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    inside: bool = False,
    tpu: bool = False,
    route_BTk: Int[Array, "B T k"] | None = None,
    router_BTD: Float[Array, "B T D"] | None = None,
    real_BT: Bool[Array, "B T"] | None = None,
    balance: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T k"]]:
    """Applies the routed feed-forward of one layer.

    Args:
      x_BTD: normalised residual stream that the experts read.
      layer: leaves of the layer. The leaves of experts may hold all layers, (L, E, ...), so that no copy of one layer's
        weights is made.
      index: number of the layer; read only if leaves hold all layers.
      config: the model.
      mesh: mesh on which each device computes its own rows, with weights gathered over fsdp and outputs summed over
        tensor. Over the axis expert, devices gather each other's tokens, compute the tokens of their own experts, and
        sum the outputs. None if the calling device has the rows and the whole weights.
      inside: True if the caller is in a shard_map of `mesh` over all axes (without the axis tensor, if it is larger
        than 1) and has gathered the weights over fsdp.
      tpu: True if the TPU kernel computes the products.
      route_BTk: recorded routes, see `route`; None lets all tokens choose.
      router_BTD: normalised residual stream that the router reads; None for `x_BTD`.
      real_BT: False for tokens whose output nobody reads. No expert computes these tokens, and their output is 0. None
        if all outputs are read.
      balance: factor of `balance_loss`, which is a sum over the tokens; the backward pass adds the gradient of the
        product. None adds none.

    Returns:
      The output in x's dtype, and the routes that the router chooses, as expert numbers plus 1. A token
      without a recorded route is computed by the experts that the router chooses.
    """
    experts = config.experts
    assert experts is not None
    weights = {name: w for name, w in layer.items() if name in _ROUTING or name.startswith("expert_")}
    given = {"route": route_BTk, "router": router_BTD, "real": real_BT, "balance": balance}
    given = {name: a for name, a in given.items() if a is not None}
    spread = spread_over(experts, mesh) if mesh is not None else ()
    parts = math.prod(mesh.shape[axis] for axis in spread) if mesh is not None else 1

    if mesh is None or mesh.size == 1 or (inside and mesh.shape["tensor"] == 1):
        layout = _Layout(spread, parts)
        out_BTD, own_BTk = _on_device(x_BTD, weights, index, given, config=config, layout=layout, tpu=tpu)
    else:
        known = dict(rules.DEFAULT_RULES) | ({"batch": (), "time": (), "embed": (), "expert": ()} if inside else {})
        tensor = rules.axes_over("mlp", mesh) if experts.ffn_dim % mesh.shape["tensor"] == 0 else ()
        if tensor and "expert_out_scale" in weights:
            # A scale serves a group of rows. If the group is cut over several devices, each of them needs the scale.
            group = experts.ffn_dim // weights["expert_out_scale"].shape[-2]
            times = group // math.gcd(group, experts.ffn_dim // mesh.shape["tensor"])
            weights["expert_out_scale"] = jnp.repeat(weights["expert_out_scale"], times, axis=-2)
        rows = rules.spec_for(("batch", "time", "act"), x_BTD.shape, mesh, known)
        axes = {name: ("layers", *_WEIGHTS[name][1])[-w.ndim :] for name, w in weights.items()}
        cuts = {name: rules.spec_for(axes[name], w.shape, mesh, known) for name, w in weights.items()}
        cut = tuple(axis for entry in rows if entry for axis in ((entry,) if isinstance(entry, str) else entry))
        copies = mesh.size // math.prod(mesh.shape[axis] for axis in cut)
        layout = _Layout(spread, parts, cuts, tensor, cut, copies)
        out_BTD, own_BTk = jax.shard_map(
            functools.partial(_on_device, config=config, layout=layout, tpu=tpu),
            mesh=mesh,
            in_specs=(
                rows,
                cuts,
                Spec(),
                dict.fromkeys(given, rows) | ({"balance": Spec()} if "balance" in given else {}),
            ),
            out_specs=(rows, rows),
            axis_names={"tensor"} if inside else set(mesh.axis_names),
            check_vma=False,
        )(x_BTD, weights, jnp.asarray(index, jnp.int32), given)
    out_BTD = checkpoint_name(out_BTD, EXPERTS_NAME)
    if "shared_in" in layer:
        out_BTD = out_BTD + _shared(x_BTD, layer, config)
    return out_BTD, own_BTk + 1


def spread_over(experts: Experts, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Lists the mesh axes over which a layer's experts are cut; none if they do not split into equal parts."""
    return rules.axes_over("expert", mesh) if experts.count % mesh.shape.get("expert", 1) == 0 else ()


def check_mesh(config: ModelConfig, mesh: Mesh | str, *, key: str) -> None:
    """Checks that a mesh, or a mesh string, cuts experts only if the model has them, and into equal parts.

    Raises:
      ValueError: axis "expert" is not 1, and the model is dense or its number of experts is not a multiple of the axis.
    """
    if isinstance(mesh, str):
        size, shown = build.parse_mesh(mesh, key=key)[build.AXES.index(build.EXPERT)], mesh
    else:
        size, shown = mesh.shape.get(build.EXPERT, 1), build.describe_mesh(mesh)
    named = f"{key}={shown!r} cuts experts (expert={size}), but "
    if size != 1 and config.experts is None:
        raise ValueError(f"{named}a {config.family} model has none: give these devices to data, fsdp or tensor.")
    if config.experts is not None and config.experts.count % size:
        raise ValueError(
            f"{named}the {config.experts.count} experts of a {config.family} model do not divide by {size}: give a "
            "divisor to expert, and the other devices to data, fsdp or tensor."
        )


def check_balance(config: ModelConfig, coef: float) -> None:
    """Checks that a coefficient of the balance loss is 0 unless the model has experts.

    Raises:
      ValueError: the model has no experts, and the coefficient is not 0.
    """
    if coef and config.experts is None:
        raise ValueError(
            f"trainer.balance_coef={coef} needs experts, and a {config.family} model has none: set it to 0."
        )


def _shared(x_BTD: Array, layer: PyTree, config: ModelConfig) -> Array:
    """Applies the shared expert, which computes every token."""
    w_in, w_out = (layer[name].astype(x_BTD.dtype) for name in ("shared_in", "shared_out"))
    out_BTD = gated(config.activation)(x_BTD @ w_in[0], x_BTD @ w_in[1]) @ w_out
    if "shared_gate" in layer:
        out_BTD = out_BTD * jax.nn.sigmoid(x_BTD @ layer["shared_gate"].astype(x_BTD.dtype))[..., None]
    return out_BTD


def _gathered(x: Array, cut: Spec) -> Array:
    """Gathers a weight over the axes that cut its model dimension (the mesh axes of "embed")."""
    model_axes = rules.DEFAULT_RULES["embed"]
    for dim, entry in enumerate(cut):
        axes = (entry,) if isinstance(entry, str) else entry or ()
        if axes and set(axes) <= set(model_axes):
            x = _joined(x, axes, dim)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _joined(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    """Gathers an array over the mesh axes that cut its dimension `dim`; its gradient is `_scattered`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def _scattered(axes: tuple[str, ...], dim: int, shape: tuple[int, ...], d: Array) -> tuple[Array]:
    """Sums the gradient of `_joined` over the axes; each device gets the sum of its own part, of shape `shape`.

    The parts are scattered as rows. To scatter the last dimension, a TPU would add up the whole gradient on every
    device, and so send twice the bytes.
    """
    parts = jnp.moveaxis(d.reshape(*d.shape[:dim], -1, shape[dim], *d.shape[dim + 1 :]), dim, 0)
    rows = parts.reshape(-1, shape[-1])  # each device's part is a block of consecutive rows
    return (lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True).reshape(shape),)


_joined.defvjp(lambda x, axes, dim: (_joined(x, axes, dim), x.shape), _scattered)


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


class _Form(NamedTuple):
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
def _apply(
    x_XD: Float[Array, "X D"],
    expert_Xk: Int[Array, "X k"],
    weight_Xk: Float[Array, "X k"],
    leaves: Mapping[str, Array],
    first: Int[Array, ""] | int,
    form: _Form,
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


def _plan(expert_Xk: Array, form: _Form) -> _SortedRows:
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


def _outputs(products: _Products, leaves: Mapping[str, Array], x_PD: Array, form: _Form) -> tuple[Array, _Inner]:
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
    form: _Form,
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
    x_XD: Array, expert_Xk: Array, weight_Xk: Array, leaves: Mapping[str, Array], first: int | Array, form: _Form
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


def _backward(form: _Form, saved: tuple, dout_XD: Array) -> tuple:
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


_apply.defvjp(_forward, _backward)


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
    form: _Form,
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


def routes_by_kind(route_LBTk: Array | None, config: ModelConfig) -> list[Array | None]:
    """Splits the routes of all layers with experts by the kind of layer; None for kinds of dense layers."""
    found, first = [], 0
    for alike in config.alike():
        layers = 0 if alike.experts is None else alike.num_layers
        found.append(route_LBTk[first : first + layers] if route_LBTk is not None and layers else None)
        first += layers
    return found
