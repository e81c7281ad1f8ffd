"""Chooses each token's experts and computes the feed-forward of a layer with experts; no token is dropped.

Dimensions beside those of podrl/types.py: E experts, k chosen experts of a token, X tokens of a call. A route is the k
chosen experts of a token, each stored as its number plus 1. podrl/models/dispatch.py computes the experts' products.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int, UInt8

from podrl.mesh import build, rules
from podrl.models import dispatch
from podrl.models.config import EXPERT_PROJECTIONS, Experts, ModelConfig, quant_groups
from podrl.types import PyTree

UNKNOWN = 0  # entry of a route for which no expert is recorded; expert e is recorded as e + 1
_ROUTING = ("router", "router_bias", "router_gain", "selection_bias")
_BIASES = ("expert_in_bias", "expert_out_bias")

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


def param_shapes(config: ModelConfig) -> Mapping[str, tuple[tuple[int, ...], tuple[str, ...], float]]:
    """Declares the leaves of a layer's experts by name: (shape, logical axes, initial values as in `Param.std`).

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
    expert_Xk = checkpoint_name(expert_Xk, dispatch.ROUTES_NAME)
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
    form = dispatch.Form(count, layout.parts, config.activation, config.lora.scale if config.lora.rank else 1.0, tpu)
    out_XD: Array = dispatch.apply(x_XD, expert_Xk, weight_Xk, leaves, first, form)
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
      real_BT: False for tokens whose output nobody reads. No routed expert computes these tokens; their output is 0, or
        the shared expert's output if the layer has one. None if all outputs are read.
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
    out_BTD = checkpoint_name(out_BTD, dispatch.EXPERTS_NAME)
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
    out_BTD = dispatch.gated(config.activation)(x_BTD @ w_in[0], x_BTD @ w_in[1]) @ w_out
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


def routes_by_kind(route_LBTk: Array | None, config: ModelConfig) -> list[Array | None]:
    """Splits the routes of all layers with experts by the kind of layer; None for kinds of dense layers."""
    found, first = [], 0
    for alike in config.alike():
        layers = 0 if alike.experts is None else alike.num_layers
        found.append(route_LBTk[first : first + layers] if route_LBTk is not None and layers else None)
        first += layers
    return found
