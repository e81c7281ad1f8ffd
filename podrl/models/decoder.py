"""The decoder: the forward pass that training and decoding share."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from podrl import offload
from podrl.mesh import rules
from podrl.models import delta, dispatch, moe
from podrl.models.attention import attention, on_tpu
from podrl.models.config import MODULE_PROJECTIONS, Kind, ModelConfig
from podrl.models.parameters import EINSUMS, grouped_dim, projection_inputs, stacks_of
from podrl.models.remat import POLICIES
from podrl.types import PyTree


@flax.struct.dataclass
class LayerInfo:
    """Data of a layer besides its weights; stacked over the layers for the scan.

    Attributes:
      index: number of the layer in the model, from 0.
      rotation: number of the layer's rotation among the rotations of its kind, see `ModelConfig.rotations`.
      window: number of tokens that a token sees, itself included.
      ple: per-layer embeddings of the tokens, see `per_layer_embeddings`; () in models without them.
    """

    index: Int[Array, ""]
    rotation: Int[Array, ""]
    window: Int[Array, ""]
    ple: tuple[Float[Array, "B T P"], ...] = ()


# attend(q_BTNH, k_BTKH, v_BTKH, info, sinks) -> (out_BTNH, state): queries are scaled and rotated, keys are rotated.
# In layers that reuse keys, k_BTKH and v_BTKH are None, and `attend` takes the earlier layer's keys and values.
# `sinks` holds one array with the score of each head's sink, or nothing if heads have no sinks. `state` is any value
# that the caller of the forward pass wants from each layer (new keys and values, an updated cache).
# In layers of linear attention: attend(h_BTD, layer, project) -> (out_BTD, state), where h_BTD is the normalised
# residual stream.
Attend = Callable[..., tuple[Array, PyTree]]
# routed(h_BTD, layer, info, router_BTD) -> (out_BTD, route_BTk): the experts' output, and the chosen experts. The
# router reads router_BTD, or h_BTD if router_BTD is None.
RoutedFeedForward = Callable[[Array, PyTree, LayerInfo, Array | None], tuple[Array, Array]]


def layer_infos(config: ModelConfig, ple_BTLP: tuple[Array, ...] = ()) -> tuple[LayerInfo, ...]:
    """Builds the stacked LayerInfo of each kind of layer; `ple_BTLP` comes from `per_layer_embeddings`."""
    return tuple(
        LayerInfo(
            index=jnp.asarray(config.layers_of(k), jnp.int32) if config.kinds else jnp.arange(config.num_layers),
            rotation=jnp.asarray(alike.rotations()[1], jnp.int32),
            window=jnp.asarray(alike.windows()),
            ple=tuple(jnp.moveaxis(x[:, :, jnp.asarray(config.layers_of(k))], 2, 0) for x in ple_BTLP),
        )
        for k, alike in enumerate(config.alike())
    )


def rms_norm(x: Array, weight: Array | None, config: ModelConfig) -> Array:
    """Computes x / rms(x) times the norm's scale, in float32; returns x's dtype.

    Args:
      x: values to normalise over their last axes, as many as `weight` has.
      weight: weight w of the norm. The scale is w, or 1 + w with `norm_plus_one`. None normalises over the last axis
        and does not scale.
      config: the model.
    """
    wide = x.astype(jnp.float32)
    axes = tuple(range(-(1 if weight is None else weight.ndim), 0))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + config.norm_eps)
    if weight is None:
        return wide.astype(x.dtype)
    scale = weight.astype(jnp.float32) + (1.0 if config.norm_plus_one else 0.0)
    return (wide * scale).astype(x.dtype)


@flax.struct.dataclass
class Rotations:
    """Cosines and sines of the rotary positions of some tokens, for the R different rotations of a kind of layer."""

    cos_RBT1H: Float[Array, "R B T 1 H/2"]
    sin_RBT1H: Float[Array, "R B T 1 H/2"]

    def of(self, rotation: Int[Array, ""]) -> tuple[Float[Array, "B T 1 H/2"], Float[Array, "B T 1 H/2"]]:
        """Returns the cosines and sines of one rotation."""
        number = 0 if len(self.cos_RBT1H) == 1 else rotation
        return self.cos_RBT1H[number], self.sin_RBT1H[number]


def rotations(config: ModelConfig, position_BT: Int[Array, "B T"]) -> tuple[Rotations, ...]:
    """Computes the cosines and sines of rotary positions for each kind of layer, in float32 (arXiv 2104.09864).

    Args:
      config: the model.
      position_BT: position of each token inside its own sequence.
    """
    return tuple(_rotations(alike, position_BT) for alike in config.alike())


def _rotations(alike: ModelConfig, position_BT: Int[Array, "B T"]) -> Rotations:
    (freq_RH, factor_R), _ = alike.rotations()
    angle_RBT1H = position_BT[..., None, None].astype(jnp.float32) * jnp.asarray(freq_RH)[:, None, None, None]
    cos_RBT1H, sin_RBT1H = jnp.cos(angle_RBT1H), jnp.sin(angle_RBT1H)
    if set(factor_R) != {1.0}:
        factor_R1111 = jnp.asarray(factor_R, jnp.float32).reshape(-1, 1, 1, 1, 1)
        cos_RBT1H, sin_RBT1H = cos_RBT1H * factor_R1111, sin_RBT1H * factor_R1111
    # Without the barrier XLA computes a cosine and a sine again for each number that it rotates, which took a tenth of
    # an update's processor time on CPU.
    return Rotations(*jax.lax.optimization_barrier((cos_RBT1H, sin_RBT1H)))


def rotate(x_BTNH: Array, cos_BT1H: Array, sin_BT1H: Array) -> Array:
    """Applies rotary position embedding in the half-split form, in float32; returns x's dtype (arXiv 2104.09864).

    If there are cosines and sines for fewer dimensions than a head has, only the first dimensions are rotated.

    Args:
      x_BTNH: queries or keys.
      cos_BT1H, sin_BT1H: cosines and sines of the tokens' positions, see `Rotations`.
    """
    turned = 2 * cos_BT1H.shape[-1]
    if turned < x_BTNH.shape[-1]:
        turning, rest = jnp.split(x_BTNH, [turned], axis=-1)
        return jnp.concatenate([rotate(turning, cos_BT1H, sin_BT1H), rest], axis=-1)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned_BTNH = [first * cos_BT1H - second * sin_BT1H, second * cos_BT1H + first * sin_BT1H]
    return jnp.concatenate(turned_BTNH, axis=-1).astype(x_BTNH.dtype)


# drop(name, x) -> x: applies dropout to the input of the adapter of projection `name`.
Drop = Callable[[str, Array], Array]


def drop_nothing(name: str, x: Array) -> Array:
    return x


def adapter_dropout(config: ModelConfig, key: PRNGKeyArray, layer_index: Int[Array, ""]) -> Drop:
    """Builds a function that zeroes adapter inputs with probability `config.lora.dropout`, and scales the others up.

    The scale keeps the mean. A mask depends only on the key, the layer and the projection.
    """
    layer_key = jax.random.fold_in(key, layer_index)
    keep = 1.0 - config.lora.dropout

    def drop(name: str, x: Array) -> Array:
        mask = jax.random.bernoulli(jax.random.fold_in(layer_key, MODULE_PROJECTIONS.index(name)), keep, x.shape)
        return jnp.where(mask, x / keep, 0).astype(x.dtype)

    return drop


def dense_weight(name: str, layer: PyTree, dtype: jax.typing.DTypeLike) -> Array:
    """Returns a projection's weight in one layer, dequantized if it is stored as integers."""
    weight = layer[name].astype(dtype)
    if f"{name}_scale" not in layer:
        return weight
    return dispatch.dequantize(weight, layer[f"{name}_scale"], grouped_dim(name))


def project(
    name: str, x: Array, layer: PyTree, config: ModelConfig, drop: Drop = drop_nothing, *, cut: bool = False
) -> Array:
    """Applies one named projection with its bias and adapter, in x's dtype.

    Args:
      name: name of the projection, one of `MODULE_PROJECTIONS`.
      x: input, (B, T, ...).
      layer: leaves of the layer.
      config: the model.
      drop: dropout of adapter inputs.
      cut: True if time is cut over several devices. Rows and time then stay two axes, because an axis merged from the
        two could not be cut along time.
    """
    einsum = EINSUMS[name][0]
    split = projection_inputs(name)
    weight = dense_weight(name, layer, x.dtype)
    # One matrix product over rows and time together: for the weight's gradient an einsum over two axes would copy and
    # transpose its operands, which took a third of a step on CPU.
    lead = x.shape[:2] if cut else (math.prod(x.shape[:2]),)
    y_XY = x.reshape(*lead, -1) @ weight.reshape(math.prod(weight.shape[:split]), -1)
    y = y_XY.reshape(*x.shape[:2], *weight.shape[split:])
    if f"{name}_bias" in layer:
        y = y + layer[f"{name}_bias"].astype(x.dtype)
    if f"{name}_lora_a" in layer:
        inputs, rest = einsum.split(",")
        weight, output = rest.split("->")
        contracted = "".join(c for c in weight if c in inputs)
        kept = "".join(c for c in weight if c not in inputs)
        low = jnp.einsum(f"{inputs},{contracted}R->BTR", drop(name, x), layer[f"{name}_lora_a"].astype(x.dtype))
        y = y + config.lora.scale * jnp.einsum(f"BTR,R{kept}->{output}", low, layer[f"{name}_lora_b"].astype(x.dtype))
    return y


def block(
    x_BTD: Float[Array, "B T D"],
    layer: PyTree,
    info: LayerInfo,
    rotary: Rotations,
    config: ModelConfig,
    attend: Attend,
    mesh: Mesh | None = None,
    drop: Drop = drop_nothing,
    routed: RoutedFeedForward | None = None,
) -> tuple[Float[Array, "B T D"], PyTree, Int[Array, "B T k"] | None]:
    """Applies one transformer layer.

    Args:
      x_BTD: residual stream.
      layer: leaves of the layer.
      info: the layer's number, rotation and window.
      rotary: rotations of the layer's kind at the tokens' positions.
      config: configuration of a model whose layers are all of this layer's kind, see `ModelConfig.alike`.
      attend: attention over the layer's queries, keys and values, see `Attend`.
      mesh: mesh on which activations are placed; None for one device.
      drop: dropout of adapter inputs.
      routed: feed-forward of a model with experts, see `RoutedFeedForward`; None without experts.

    Returns:
      The residual stream, the second result of `attend`, and the experts that `routed` chose (None without experts).
    """

    cut = mesh is not None and bool(rules.axes_over("time", mesh))

    def norm(name: str, x: Array) -> Array:
        return rms_norm(x, layer[name], config) if name in layer else x

    def proj(name: str, x: Array) -> Array:
        return project(name, x, layer, config, drop, cut=cut)

    def keep(x: Array, *axes: str) -> Array:
        return rules.constrain(x, axes, mesh)

    def attention_of(h_BTD: Array) -> tuple[Array, PyTree]:
        q_BTNH, gate_BTNH = proj("q", h_BTD), None
        if config.gated_attention:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
        q_BTNH = norm("q_norm", q_BTNH)
        k_BTKH = v_BTKH = None
        if not config.reuses_keys:
            plain_BTKH = proj("k", h_BTD)
            k_BTKH = norm("k_norm", plain_BTKH)
            v_BTKH = plain_BTKH if config.key_is_value else proj("v", h_BTD)
            if config.v_norm:
                v_BTKH = rms_norm(v_BTKH, None, config)
        q_BTNH = keep(rotate(q_BTNH, *rotary.of(info.rotation)), "batch", "time", "heads", "head_dim")
        if k_BTKH is not None:
            k_BTKH = keep(rotate(k_BTKH, *rotary.of(info.rotation)), "batch", "time", "kv_heads", "head_dim")
        sinks = (layer["sinks"],) if config.sinks else ()
        out_BTNH, state = attend(q_BTNH * jnp.asarray(config.query_scale, q_BTNH.dtype), k_BTKH, v_BTKH, info, sinks)
        if gate_BTNH is not None:
            out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
        return proj("o", out_BTNH), state

    h_BTD = norm("pre_attn_norm", x_BTD)
    out_BTD, state = attention_of(h_BTD) if config.delta is None else attend(h_BTD, layer, proj)
    out_BTD = keep(out_BTD, "batch", "time", "act")
    x_BTD = x_BTD + norm("post_attn_norm", out_BTD)

    def dense(h_BTD: Array) -> Array:
        gate_BTF = dispatch.ACTIVATIONS[config.activation](proj("gate", h_BTD))
        h_BTF = keep(gate_BTF * proj("up", h_BTD), "batch", "time", "mlp")
        return proj("down", h_BTF)

    h_BTD = norm("pre_mlp_norm", x_BTD)
    route_BTk = None
    if config.experts is None:
        out_BTD = dense(h_BTD)
    else:
        assert routed is not None
        if config.experts.beside_dense:
            experts_BTD, router_BTD = norm("pre_experts_norm", x_BTD), norm("router_norm", x_BTD)
            out_BTD, route_BTk = routed(experts_BTD, layer, info, router_BTD)
            out_BTD = norm("post_dense_norm", dense(h_BTD)) + norm("post_experts_norm", out_BTD)
        else:
            out_BTD, route_BTk = routed(h_BTD, layer, info, None)
    x_BTD = x_BTD + norm("post_mlp_norm", keep(out_BTD, "batch", "time", "act"))
    for ple_BTP in info.ple:
        gate_BTP = dispatch.ACTIVATIONS[config.activation](x_BTD @ layer["ple_gate"].astype(x_BTD.dtype))
        out_BTD = (gate_BTP * ple_BTP) @ layer["ple_out"].astype(x_BTD.dtype)
        x_BTD = x_BTD + norm("post_ple_norm", keep(out_BTD, "batch", "time", "act"))
    if config.layer_scalar:
        x_BTD = x_BTD * jax.lax.stop_gradient(layer["layer_scalar"]).astype(x_BTD.dtype)
    return x_BTD, state, route_BTk


def embed(
    params: PyTree, tokens_BT: Int[Array, "B T"], config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None
) -> Float[Array, "B T D"]:
    """Looks up token embeddings times `embed_scale`, in the compute dtype."""
    x_BTD = params["embed"].at[tokens_BT].get(mode="clip").astype(dtype) * jnp.asarray(config.embed_scale, dtype)
    # The table is cut over fsdp along D, so at first the rows are cut over data alone and D stays cut over fsdp. The
    # step to the final sharding is then one all-to-all along fsdp; otherwise XLA would make the whole array on every
    # device.
    x_BTD = rules.constrain(x_BTD, ("replica", "time", "embed"), mesh)
    return rules.constrain(x_BTD, ("batch", "time", "act"), mesh)


def per_layer_embeddings(
    params: PyTree, tokens_BT: Int[Array, "B T"], x_BTD: Array, config: ModelConfig, mesh: Mesh | None = None
) -> tuple[Float[Array, "B T L P"], ...]:
    """Computes each layer's vector for each token: (sqrt(P) x row of the table + projection) / sqrt(2).

    The projection is a linear map of the token's embedding, normalised for each layer by itself.

    Args:
      params: parameters of the model; only parameters outside the layers are read.
      tokens_BT: token ids.
      x_BTD: embeddings of the tokens, as `embed` returns them.
      config: the model; without per-layer embeddings the result is ().
      mesh: mesh on which activations are placed; None for one device.
    """
    if not config.ple_dim:
        return ()
    shape, P = (*tokens_BT.shape, config.num_layers, config.ple_dim), config.ple_dim
    found_BTX = params["ple_table"].at[tokens_BT].get(mode="clip").astype(x_BTD.dtype) * jnp.asarray(
        P**0.5, x_BTD.dtype
    )
    found_BTX = rules.constrain(found_BTX, ("replica", "time", "embed"), mesh)  # in two steps, as in `embed`
    found_BTX = rules.constrain(found_BTX, ("batch", "time", "act"), mesh)
    made_BTX = (x_BTD @ params["ple_in"].astype(x_BTD.dtype)) * jnp.asarray(config.model_dim**-0.5, x_BTD.dtype)
    made_BTLP = rms_norm(made_BTX.reshape(shape), params["ple_norm"], config)
    return ((made_BTLP + found_BTX.reshape(shape)) * jnp.asarray(2**-0.5, x_BTD.dtype),)


def output_matrix(params: PyTree) -> Float[Array, "D V"]:
    """Returns the matrix from the final hidden state to logits; with tied embeddings, the transposed embeddings."""
    return params["unembed"] if "unembed" in params else params["embed"].T


def cap_logits(logits: Array, config: ModelConfig) -> Array:
    """Applies the model's soft cap to logits, in float32."""
    logits = logits.astype(jnp.float32)
    return jnp.tanh(logits / config.logit_softcap) * config.logit_softcap if config.logit_softcap else logits


def unembed(params: PyTree, hidden_BTD: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T V"]:
    """Computes capped float32 logits; training uses podrl/trainer/logprob.py, which never holds all logits."""
    matrix_DV = output_matrix(params).astype(hidden_BTD.dtype)
    logits_BTV = jnp.einsum("BTD,DV->BTV", hidden_BTD, matrix_DV, preferred_element_type=jnp.float32)
    return cap_logits(logits_BTV, config)


def hidden(
    params: PyTree,
    tokens_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"],
    config: ModelConfig,
    *,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    mesh: Mesh | None = None,
    dropout_key: PRNGKeyArray | None = None,
    last_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Computes final normalised hidden states of packed rows; `replayed` describes the arguments."""
    hidden_BTD, _ = replayed(
        params,
        tokens_BT,
        segment_BT,
        position_BT,
        config,
        dtype=dtype,
        remat=remat,
        mesh=mesh,
        dropout_key=dropout_key,
        last_BT=last_BT,
        route_LBTk=None,
    )
    return hidden_BTD


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The arguments of `replayed` that all layers of a forward pass share, and the chunks of rows for linear attention.

    Attributes:
      linear: arguments of `podrl.models.delta.mix` for these rows; None without layers of linear attention.
    """

    config: ModelConfig
    mesh: Mesh | None
    remat: str
    segment_BT: Int[Array, "B T"]
    position_BT: Int[Array, "B T"]
    rotary: tuple[Rotations, ...]
    last_BT: Int[Array, "B T"] | None
    dropout_key: PRNGKeyArray | None
    linear: tuple[PyTree, PyTree] | None
    balance: Float[Array, ""] | None

    def step(self, kind: int, alike: ModelConfig, lent: Mapping[int, tuple[Array, Array]], waiting: PyTree) -> Callable:
        """Builds the step of a kind of layer for `over_layers`; it fetches the weights that wait in the host's memory.

        Args:
          kind: index of the kind of layer.
          alike: configuration of a model that has only layers of this kind.
          lent: keys and values that other layers may reuse, by the index of the kind that made them.
          waiting: weights of the kind's layers that wait in the host's memory.
        """
        config, mesh, tpu, real_BT = self.config, self.mesh, on_tpu(self.mesh), self.segment_BT != 0
        place_L = jnp.asarray([place for _, place in config.places()])

        def mix(h_BTD: Array, layer: PyTree, project: delta.Project) -> tuple[Array, None]:
            assert self.linear is not None
            return delta.mix(h_BTD, layer, alike, project, *self.linear), None

        def attend(
            q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, info: LayerInfo, sinks: tuple[Array, ...]
        ) -> tuple[Array, tuple[Array, Array]]:
            if alike.reuses_keys:
                k_BTKH, v_BTKH = lent[config.kinds[kind].keys_of]
            out = attention(
                *(q_BTNH, k_BTKH, v_BTKH, self.segment_BT),
                window=info.window,
                softcap=config.attn_softcap,
                shared=None if self.last_BT is None else (self.last_BT, self.position_BT),
                sinks=sinks,
                mesh=mesh,
                windows=alike.window_L,
            )
            return out, (k_BTKH, v_BTKH)

        mixer = attend if alike.delta is None else mix
        feed_forward = functools.partial(
            moe.feed_forward, config=config, mesh=mesh, tpu=tpu, real_BT=real_BT, balance=self.balance
        )

        def step(carry: tuple, xs: tuple[PyTree, LayerInfo, Array | None]) -> tuple[tuple, Array | None]:
            (x_BTD, keys), (layer, info, route_BTk) = carry, xs
            layer = {**offload.fetched(layer), **offload.fetched_layer(waiting, place_L[info.index])}
            drop = drop_nothing if self.dropout_key is None else adapter_dropout(config, self.dropout_key, info.index)

            def routed(h_BTD: Array, layer: PyTree, info: LayerInfo, router_BTD: Array | None) -> tuple[Array, Array]:
                return feed_forward(h_BTD, layer, info.index, route_BTk=route_BTk, router_BTD=router_BTD)

            x_BTD, own_keys, own_BTk = block(x_BTD, layer, info, self.rotary[kind], alike, mixer, mesh, drop, routed)
            keys = {**keys, kind: own_keys} if kind in keys else keys
            return (x_BTD, keys), None if route_BTk is None else own_BTk

        return step if self.remat == "none" else jax.checkpoint(step, policy=POLICIES[self.remat], prevent_cse=False)


def replayed(
    params: PyTree,
    tokens_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"],
    config: ModelConfig,
    *,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    mesh: Mesh | None = None,
    dropout_key: PRNGKeyArray | None = None,
    last_BT: Int[Array, "B T"] | None = None,
    route_LBTk: Int[Array, "L B T k"] | None,
    balance: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "L B T k"] | None]:
    """Computes final normalised hidden states of packed rows; tokens with recorded routes take the recorded experts.

    Args:
      params: whole parameter tree, adapters joined in.
      tokens_BT: packed tokens.
      segment_BT: segment of each token, 0 on padding; attention is causal within equal, non-zero segments.
      position_BT: position of each token inside its own sequence.
      config: the model.
      dtype: compute dtype; parameters are cast where they are used.
      remat: values that are kept for the backward pass: 'none' keeps all, 'dots' the outputs of projections, attention
        and experts, 'full' only the layers' inputs and the experts' routes; 'offload' keeps the values of 'dots' in
        the host's memory.
      mesh: mesh on which activations are placed; None for one device.
      dropout_key: random key of the adapters' dropout (training only); None for no dropout.
      last_BT: last segment that sees the token, see `podrl.types.Layout`; None if segments share no tokens. Layers of
        linear attention support one level only: a segment that others continue must not itself continue another.
      route_LBTk: recorded experts of each token, see `podrl.models.moe.routes_of`; None lets every token choose.
      balance: factor of the experts' balance loss, see `podrl.models.moe.feed_forward`; None adds no gradient of it.

    Returns:
      The hidden states, and the routes that the routers would choose themselves (None if `route_LBTk` is None).

    Raises:
      ValueError: 'offload' on devices that cannot reach the host's memory; linear attention on rows cut along time.
    """
    dropping = config.lora.rank > 0 and config.lora.dropout > 0
    linear = None
    if config.recurrent:
        if mesh is not None and rules.axes_over("time", mesh):
            raise ValueError(
                f"A {config.family} model has layers of linear attention, which podrl does not compute over rows cut "
                "along time yet: leave seq out of the mesh."
            )
        prefix_BT = None if last_BT is None else delta.prefixes(segment_BT, last_BT)
        linear = delta.cut(segment_BT, prefix_BT), delta.previous(segment_BT, prefix_BT)
    rotary, key = rotations(config, position_BT), dropout_key if dropping else None
    shared = _Pass(config, mesh, remat, segment_BT, position_BT, rotary, last_BT, key, linear, balance)
    if remat == "offload":
        offload.check(mesh, "trainer.remat='offload'", "set trainer.remat='full' or 'dots'.")
    x_BTD = embed(params, tokens_BT, config, dtype, mesh)
    infos = layer_infos(config, per_layer_embeddings(params, tokens_BT, x_BTD, config, mesh))
    here, waiting = offload.apart(stacks_of(params["layers"], config), indexed=bool(config.kinds) and on_tpu(mesh))
    stacks = list(zip(here, infos, moe.routes_by_kind(route_LBTk, config), strict=True))

    # Layers of a lending kind pass their keys and values on in the scan's carry, so that at the end the carry holds the
    # keys and values of the kind's last layer. Layers that reuse keys and values are scanned with the residual stream
    # alone in the carry, because a scan keeps the carry of every layer for the backward pass.
    def empty(kind: Kind) -> tuple[Array, Array]:
        zeros = jnp.zeros((*tokens_BT.shape, kind.num_kv_heads, kind.head_dim), dtype)
        zeros = rules.constrain(zeros, ("batch", "time", "kv_heads", "head_dim"), mesh)
        return zeros, zeros

    lent = {k: empty(config.kinds[k]) for k in config.lenders}
    owns, alikes = {}, list(enumerate(config.alike()))
    for number, pattern in enumerate(config.patterns()):
        steps = [shared.step(k, alike, lent, waiting[k]) for k, alike in alikes]
        (x_BTD, keys), own = over_layers(steps, (x_BTD, {} if number else lent), stacks, pattern)
        lent, owns = keys or lent, owns | own
    chosen = [own_LBTk for _, own_LBTk in sorted(owns.items()) if own_LBTk is not None]
    own_LBTk = jnp.concatenate(chosen) if len(chosen) > 1 else next(iter(chosen), None)
    return rms_norm(x_BTD, params["final_norm"], config), own_LBTk


def over_layers(
    steps: Sequence[Callable],
    carry: PyTree,
    stacks: Sequence[PyTree],
    pattern: tuple[tuple[tuple[int, int], ...], int],
) -> tuple[PyTree, dict[int, PyTree]]:
    """Applies layers in turn: a scan over each run of equal layers, inside a scan over repetitions of the pattern.

    Args:
      steps: function step(carry, layer) -> (carry, result) for each kind of layer.
      carry: arrays that pass from layer to layer, such as the residual stream.
      stacks: argument `layer` of `step`, stacked over the layers of a kind, for each kind.
      pattern: an element of `ModelConfig.patterns`; only kinds of the pattern are read.

    Returns:
      The final carry, and for each kind of the pattern the results stacked over its layers.
    """
    runs, times = pattern
    if len(runs) == times == 1:
        kind = runs[0][0]
        carry, result = jax.lax.scan(steps[kind], carry, stacks[kind])
        return carry, {kind: result}

    def repetition(carry: PyTree, stacks: Mapping[int, PyTree]) -> tuple[PyTree, dict[int, PyTree]]:
        first: dict[int, int] = dict.fromkeys(stacks, 0)
        parts: dict[int, list[PyTree]] = {kind: [] for kind in stacks}
        for kind, count in runs:
            part = slice(first[kind], first[kind] + count)
            carry, result = jax.lax.scan(steps[kind], carry, jax.tree.map(lambda a: a[part], stacks[kind]))  # noqa: B023
            first[kind] += count
            parts[kind].append(result)
        return carry, {kind: jax.tree.map(lambda *each: jnp.concatenate(each), *parts[kind]) for kind in parts}

    own = {kind: stacks[kind] for kind, _ in runs}
    cut = jax.tree.map(lambda a: a.reshape(times, -1, *a.shape[1:]), own)
    carry, results = jax.lax.scan(repetition, carry, cut)
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)
