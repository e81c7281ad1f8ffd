"""ModelConfig: every number and switch that distinguishes one supported decoder from another."""

import dataclasses
import itertools
import re
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int

from podrl.config import Natural, Positive, Range, section

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION_PROJECTIONS = PROJECTIONS[:4]
# Weights of experts, and the names of the parameters that hold them in `transformers`.
EXPERT_PROJECTIONS = {"expert_in": "gate_up_proj", "expert_out": "down_proj"}
# Projections of linear attention, and the names of their modules in `transformers`.
LINEAR_PROJECTIONS = {
    "delta_in": "in_proj_qkv",
    "delta_gate": "in_proj_z",
    "delta_beta": "in_proj_b",
    "delta_decay": "in_proj_a",
    "delta_out": "out_proj",
}
MODULE_PROJECTIONS = (*PROJECTIONS, *LINEAR_PROJECTIONS)  # projections that are modules of their own in `transformers`
# Projections that `LoraConfig.base_dtype` stores as integers. Linear attention's delta_beta and delta_decay are left
# out: they are small, and their rounding errors would add up in the states, token after token.
INTEGER_PROJECTIONS = (*PROJECTIONS, "delta_in", "delta_gate", "delta_out", *EXPERT_PROJECTIONS)
QUANT_GROUP = 64  # number of inputs that share a scale in integer weights
GLOBAL_WINDOW = 1 << 30  # window of a layer that sees all earlier tokens: longer than any sequence


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Settings of rotary-frequency scaling for long contexts.

    Attributes:
      kind: name of the scaling. 'none' changes nothing. 'linear' divides all frequencies by `factor`. 'llama3' divides
        the frequencies of long wavelengths, with a smooth transition to short ones. 'yarn' (arXiv 2309.00071) also
        divides the frequencies of long wavelengths, but its transition is linear in the index of the frequency; it also
        multiplies cosines and sines by `attention_factor`. 'proportional' (Gemma 4) divides the highest frequencies,
        which are the share `turned` of all, and sets all other frequencies to 0.
      factor: divisor of the frequencies; wavelengths grow by this factor.
      low_freq_factor: number that sets the upper end of llama3's transition: wavelengths above
        `original_length / low_freq_factor` are stretched fully.
      high_freq_factor: number that sets the lower end of llama3's transition: wavelengths below
        `original_length / high_freq_factor` are not stretched.
      original_length: context length of pre-training for llama3 and yarn, tokens.
      turned: share of the frequencies that are not 0, for proportional.
      beta_fast, beta_slow: numbers of turns over `original_length` tokens at the two ends of yarn's transition: faster
        frequencies are not divided, slower ones are divided fully.
      truncate: True if yarn rounds the ends of its transition outwards, to whole numbers of frequencies.
      attention_factor: factor of cosines and sines, for yarn.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    turned: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@section("model.lora")
@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside the projections (arXiv 2106.09685): y = x W + (alpha / rank) x A B, where B starts at 0.

    Attributes:
      rank: inner dimension of the adapters; 0 turns adapters off.
      alpha: numerator of the scale alpha / rank.
      pattern: regular expression for the projections that get an adapter. It must match the whole name: q, k, v, o,
        gate, up or down, or one of these with _proj appended. Experts have expert_in (also gate_up_proj) and expert_out
        (also down_proj) in place of gate, up and down. Linear attention has in_proj_qkv, in_proj_z, in_proj_b,
        in_proj_a and out_proj in place of q, k, v and o. The default pattern leaves experts and linear attention
        without adapters.
      dropout: probability with which training zeroes an input feature of an adapter; must be 0 if experts have
        adapters.
      base_dtype: storage type of the frozen projections: 'int8' or 'int4' for integers with a scale per group of 64
        inputs (QLoRA, arXiv 2305.14314, with uniform levels); '' for the type of all other parameters.

    Raises:
      ValueError: the pattern is not a regular expression or matches no projection; the rank is negative; the dropout
        lies outside [0, 1); `base_dtype` is unknown, or set with rank 0.
    """

    rank: Natural = 0
    alpha: Positive = 16.0
    pattern: str = "q|k|v|o|gate|up|down"
    dropout: Annotated[float, Range("[0, 1)")] = 0.0
    base_dtype: Literal["", "int8", "int4"] = ""

    def __post_init__(self):
        if self.base_dtype and not self.rank:
            raise ValueError(
                f"model.lora.base_dtype={self.base_dtype!r} with model.lora.rank={self.rank}: integer weights "
                "need adapters (a rank above 0), as they are not trained themselves."
            )
        try:
            matched = [name for name in (*MODULE_PROJECTIONS, *EXPERT_PROJECTIONS) if self._matches(name)]
        except re.error as error:
            raise ValueError(f"model.lora.pattern={self.pattern!r} is not a regular expression: {error}.") from None
        if self.rank and not matched:
            raise ValueError(
                f"model.lora.pattern={self.pattern!r} matches no projection: it must match at least one of "
                f"{', '.join((*PROJECTIONS, *EXPERT_PROJECTIONS))} (or "
                f"{', '.join(f'{name}_proj' for name in PROJECTIONS)}, gate_up_proj), or, in linear attention, "
                f"{', '.join(LINEAR_PROJECTIONS.values())}."
            )

    def _matches(self, name: str) -> bool:
        spellings = (name, (EXPERT_PROJECTIONS | LINEAR_PROJECTIONS).get(name, f"{name}_proj"))
        return any(re.fullmatch(self.pattern, spelling) for spelling in spellings)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def covers(self, name: str) -> bool:
        return self.rank > 0 and self._matches(name)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts (routed feed-forwards) of a layer, and the rule that chooses and weighs the experts of a token.

    Attributes:
      count: number of experts in each layer, E.
      chosen: number of experts that compute each token, k.
      ffn_dim: inner dimension of an expert, F.
      score: function of the router's logits that gives scores: 'softmax' over all experts, 'sigmoid' of each logit, or
        'chosen' for a softmax over the chosen experts. The k experts with the highest scores are chosen, and their
        scores are their weights.
      normalize: True if the weights of a token's experts are divided by their sum.
      scale: factor of the weights.
      selection_bias: True if experts are chosen by their scores plus a number per expert, which has no gradient. The
        weights do not use this number.
      shared_dim: inner dimension of a shared expert, which computes every token; 0 for no shared expert.
      shared_gate: True if the shared expert's output is multiplied by a sigmoid of a projection of the token.
      bias: True if the router and the projections of the experts have biases.
      beside_dense: True if the layer also has the dense feed-forward of `ffn_dim`, whose output is added to the
        experts' output. Both outputs, and the input of the experts, have norms of their own. The router reads the
        residual stream through another norm, its logits are multiplied by D**-0.5, and the weights by a learned number
        per expert (Gemma 4).
    """

    count: int
    chosen: int
    ffn_dim: int
    score: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    shared_dim: int = 0
    shared_gate: bool = False
    bias: bool = False
    beside_dense: bool = False

    def __post_init__(self):
        if not 1 <= self.chosen <= self.count:
            raise ValueError(
                f"{self.chosen} experts of {self.count} cannot be chosen for a token: num_experts_per_tok must be at "
                "least 1 and at most the number of experts."
            )
        if self.score not in ("softmax", "sigmoid", "chosen"):
            raise ValueError(f"Router score {self.score!r} is not known: use softmax, sigmoid or chosen.")
        if self.shared_gate and not self.shared_dim:
            raise ValueError("shared_gate=True without a shared feed-forward: shared_dim must be above 0.")


@dataclasses.dataclass(frozen=True)
class Delta:
    """Sizes of linear attention by the gated delta rule, see `podrl.models.delta`.

    Attributes:
      key_heads, value_heads: number of heads of queries and keys, and of values; value_heads is a multiple of
        key_heads.
      key_dim, value_dim: width of a head of queries and keys, and of values.
      taps: number of tokens that the convolution before the rule mixes, the token itself included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} must be a multiple of key_heads={self.key_heads}.")

    @property
    def sections(self) -> tuple[int, int, int]:
        """Widths of a key head's query, key and values; the head's convolution channels come in this order."""
        return self.key_dim, self.key_dim, self.value_heads // self.key_heads * self.value_dim

    @property
    def head_channels(self) -> int:
        """Number of the convolution's channels that belong to one key head."""
        return sum(self.sections)

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: all dimensions of queries, keys and values."""
        return self.key_heads * self.head_channels

    @property
    def outputs(self) -> int:
        """Number of dimensions of a token's values over all heads; the input of the last projection has as many."""
        return self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer in a model whose layers are not all alike.

    Attributes:
      name: key of the kind's parameters under 'layers'.
      num_kv_heads, head_dim: number of key/value heads, K, and head dimension, H.
      key_is_value: True if values are the keys before norm and rotation, so that there is no projection v.
      delta: sizes of linear attention, if the layers have it in place of attention; `num_kv_heads` and `head_dim` then
        have no meaning. None for attention.
      dense: True if the layers have the feed-forward of the model's `ffn_dim` in place of the model's experts.
      keys_of: index of the kind whose last layer lends its keys and values. The borrowing layers have no projections k
        and v, and follow all other layers of the model. -1 for layers with keys and values of their own.
      ffn_scale: factor of the model's `ffn_dim`.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    key_is_value: bool = False
    delta: Delta | None = None
    dense: bool = False
    keys_of: int = -1
    ffn_scale: int = 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder-only transformer.

    Attributes:
      family: name of the architecture in checkpoints, e.g. 'gemma2'.
      vocab_size, num_layers, model_dim, ffn_dim: sizes V, L, D, F.
      num_heads, num_kv_heads, head_dim: sizes N, K, H; if layers are of several kinds, K and H belong to `kinds[0]`.
      activation: gate non-linearity: 'gelu_tanh', 'gelu', 'silu', or 'clamped_silu' (gpt-oss), see
        `podrl.models.dispatch.gated`.
      norm_eps: number added to the mean square in every RMS norm.
      norm_plus_one: True if norms scale by 1 + w (Gemma 1 to 3, Qwen 3.5) instead of w.
      post_norms: True if the outputs of attention and MLP are normalised (Gemma 2 to 4, OLMo 3).
      qk_norm: True if queries and keys are normalised (Gemma 3 and 4, Qwen 3 and 3.5, OLMo 3, some GLM 4.5).
      qkv_bias: True if the q, k and v projections have biases (Qwen 2, gpt-oss, some GLM 4.5).
      o_bias: True if the o projection has a bias (gpt-oss).
      sinks: True if every head has a sink: a key of value 0 and a learned score that every token sees (gpt-oss).
      embed_scale: factor of the token embeddings (Gemma: sqrt(D)).
      tie_embeddings: True if the output projection is the embedding matrix.
      query_scale: factor of the queries before the dot product.
      attn_softcap, logit_softcap: c in c * tanh(x / c) on attention scores and on logits; 0 is off.
      window_L: number of tokens that a token sees in each layer, itself included; GLOBAL_WINDOW for all earlier tokens.
      rope_theta_L: base of the rotary frequencies of each layer.
      rope_scaling_L: scaling of the rotary frequencies of each layer.
      max_length: length of the longest sequence that the checkpoint was made for, tokens.
      lora: adapters beside the projections.
      experts: experts of every layer, in place of the feed-forward of `ffn_dim` or beside it; None for a model without
        experts. If layers are of several kinds, kinds with `dense` have none.
      pre_norms: True if the inputs of attention and MLP are normalised (all families except OLMo 3).
      joint_qk_norm: True if a norm of queries or keys runs over all heads of a token together (OLMo 3), and not over
        each head alone.
      v_norm: True if values are normalised per head, without a weight (Gemma 4).
      layer_scalar: True if the output of every layer is multiplied by a number that does not train (Gemma 4).
      rotary_dim: number of leading dimensions of a head that rotary positions turn; 0 for all.
      gated_attention: True if the projection q also makes a gate for each query; the sigmoid of the gate multiplies the
        head's output (Qwen 3.5).
      key_is_value: True if values are the keys before norm and rotation; if layers are of several kinds, the value of
        `kinds[0]`.
      delta: sizes of linear attention in place of attention, None for attention; if layers are of several kinds, the
        value of `kinds[0]`.
      ple_dim: size P of per-layer embeddings: each layer has a vector for each token, and adds a function of it to the
        layer's output. The vector comes from a table (V, L P) and from a projection of the token's embedding (Gemma 4
        E2B, E4B). 0 for none.
      reuses_keys: True if the layers attend to keys and values of an earlier layer, see `Kind.keys_of`; False for a
        whole model.
      kinds: kinds of layers; () if all layers are alike.
      kind_L: index of each layer's kind; () if all layers are alike.
    """

    family: str
    vocab_size: int
    num_layers: int
    model_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    norm_plus_one: bool
    post_norms: bool
    qk_norm: bool
    qkv_bias: bool
    embed_scale: float
    tie_embeddings: bool
    query_scale: float
    attn_softcap: float
    logit_softcap: float
    window_L: tuple[int, ...]
    rope_theta_L: tuple[float, ...]
    rope_scaling_L: tuple[RopeScaling, ...]
    max_length: int
    lora: LoraConfig = LoraConfig()
    experts: Experts | None = None
    o_bias: bool = False
    sinks: bool = False
    pre_norms: bool = True
    joint_qk_norm: bool = False
    v_norm: bool = False
    layer_scalar: bool = False
    rotary_dim: int = 0
    gated_attention: bool = False
    key_is_value: bool = False
    delta: Delta | None = None
    ple_dim: int = 0
    reuses_keys: bool = False
    kinds: tuple[Kind, ...] = ()
    kind_L: tuple[int, ...] = ()

    def __post_init__(self):
        if self.experts is not None:
            self._check_adapters(self.experts)
        if self.kinds:
            self._check_kinds()
        for name in ("window_L", "rope_theta_L", "rope_scaling_L"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, because rotary positions turn pairs.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not split over {self.num_kv_heads} key/value heads: "
                "num_attention_heads must be a multiple of num_key_value_heads."
            )

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of a layer's dense projections. If experts replace the feed-forward, only attention has any."""
        names = ATTENTION_PROJECTIONS if self.experts is not None and not self.experts.beside_dense else PROJECTIONS
        if self.delta is not None:
            return (*LINEAR_PROJECTIONS, *(name for name in names if name not in ATTENTION_PROJECTIONS))
        absent = {"k", "v"} if self.reuses_keys else {"v"} if self.key_is_value else set()
        return tuple(name for name in names if name not in absent)

    def alike(self) -> tuple["ModelConfig", ...]:
        """Returns, for each kind of layer, the configuration of a model that has only the layers of this kind.

        The layers keep their order. A model whose layers are all alike returns itself alone.
        """
        if not self.kinds:
            return (self,)
        return tuple(self._of_kind(k) for k in range(len(self.kinds)))

    def _of_kind(self, k: int) -> "ModelConfig":
        kind, layers = self.kinds[k], self.layers_of(k)
        return dataclasses.replace(
            self,
            num_layers=len(layers),
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            ffn_dim=self.ffn_dim * kind.ffn_scale,
            key_is_value=kind.key_is_value,
            reuses_keys=kind.keys_of >= 0,
            delta=kind.delta,
            experts=None if kind.dense else self.experts,
            lora=self.lora if self.experts is None or self.experts.beside_dense else self._attention_adapters(),
            window_L=tuple(self.window_L[i] for i in layers),
            rope_theta_L=tuple(self.rope_theta_L[i] for i in layers),
            rope_scaling_L=tuple(self.rope_scaling_L[i] for i in layers),
            kinds=(),
            kind_L=(),
        )

    def layers_of(self, k: int) -> tuple[int, ...]:
        """Returns the indices of the layers of kind `k`."""
        return tuple(i for i in range(self.num_layers) if not self.kinds or self.kind_L[i] == k)

    def places(self) -> tuple[tuple[int, int], ...]:
        """Returns (index of the kind, index among the layers of this kind) of each layer, in order."""
        if not self.kinds:
            return tuple((0, i) for i in range(self.num_layers))
        return tuple((kind, self.kind_L[:i].count(kind)) for i, kind in enumerate(self.kind_L))

    def patterns(self) -> tuple[tuple[tuple[tuple[int, int], ...], int], ...]:
        """Returns the layers in order as repeated patterns, as short as possible: (pattern, number of repetitions).

        A pattern is a sequence of runs of equal layers: (index of the kind, number of layers). Layers that reuse the
        keys of other layers have a second pattern; all other layers have one.
        """
        if not self.kinds:
            return ((((0, self.num_layers),), 1),)
        parts = itertools.groupby(self.kind_L, lambda kind: self.kinds[kind].keys_of >= 0)
        return tuple(_repeated(tuple(kinds)) for _, kinds in parts)

    @property
    def lenders(self) -> tuple[int, ...]:
        """Indices of the kinds whose last layer lends its keys and values to layers of other kinds."""
        return tuple(sorted({kind.keys_of for kind in self.kinds if kind.keys_of >= 0}))

    @property
    def active_ffn_dim(self) -> int:
        """Sum of the inner dimensions of all feed-forwards that compute one token in a layer."""
        experts = self.experts
        if experts is None:
            return self.ffn_dim
        return experts.chosen * experts.ffn_dim + experts.shared_dim + (self.ffn_dim if experts.beside_dense else 0)

    @property
    def routed_layers(self) -> int:
        """Number of layers with experts."""
        return sum(alike.num_layers for alike in self.alike() if alike.experts is not None)

    @property
    def chosen_share(self) -> float:
        """Share of the routed experts that compute one token; 1 without experts."""
        return 1.0 if self.experts is None else self.experts.chosen / self.experts.count

    @property
    def recurrent(self) -> bool:
        """True if some layers have linear attention."""
        return any(alike.delta is not None for alike in self.alike())

    def _check_kinds(self) -> None:
        names = [kind.name for kind in self.kinds]
        if len(self.kinds) < 2 or len(set(names)) != len(names):
            raise ValueError(
                f"Kinds of layers {names} must be two or more, of different names; () is a model of one kind."
            )
        if len(self.kind_L) != self.num_layers or set(self.kind_L) != set(range(len(names))):
            raise ValueError(
                f"kind_L={self.kind_L} must name each of {names} by its index, for {self.num_layers} layers."
            )
        first = self.kinds[0]
        own = (self.num_kv_heads, self.head_dim, self.key_is_value, self.delta)
        if own != (first.num_kv_heads, first.head_dim, first.key_is_value, first.delta):
            raise ValueError(
                f"num_kv_heads, head_dim, key_is_value, delta are {own}: they must be those of kinds[0], {first}."
            )
        for kind in self.kinds:
            lender = self.kinds[kind.keys_of] if 0 <= kind.keys_of < len(names) else None
            if kind.keys_of >= 0 and (
                lender is None
                or (lender.keys_of, lender.num_kv_heads, lender.head_dim) != (-1, kind.num_kv_heads, kind.head_dim)
                or {kind.delta, lender.delta} != {None}
            ):
                raise ValueError(f"{kind} must reuse the keys of a kind with keys of its own, of the same sizes.")
        if self.lenders and (len(self.patterns()) != 2 or self.kinds[self.kind_L[0]].keys_of >= 0):
            raise ValueError(f"kind_L={self.kind_L}: layers that reuse keys must follow all others.")
        if self.lenders and self.experts is not None:
            raise ValueError(f"A {self.family} model with experts and with layers that reuse keys is not computed.")
        self.alike()  # checks each kind

    def _check_adapters(self, experts: Experts) -> None:
        """Refuses a pattern that names a dense feed-forward but not the experts, and dropout in experts' adapters.

        The default pattern is never refused: in a layer with experts only, it means attention. In a layer that also has
        a dense feed-forward, every pattern is taken as it is written.
        """
        lora, family = self.lora, self.family
        dense = [name for name in ("gate", "up") if lora.covers(name) and not lora.covers("expert_in")]
        dense += ["down"] if lora.covers("down") and not lora.covers("expert_out") else []
        if dense and lora.pattern != LoraConfig.pattern and not experts.beside_dense:
            raise ValueError(
                f"model.lora.pattern={lora.pattern!r} matches {', '.join(dense)} but not the experts, which are a "
                f"{family} model's feed-forwards: make model.lora.pattern match "
                f"{', '.join((*ATTENTION_PROJECTIONS, *EXPERT_PROJECTIONS))}, or leave it out for attention alone."
            )
        if lora.dropout and any(map(lora.covers, EXPERT_PROJECTIONS)):
            raise ValueError(
                f"lora.dropout={lora.dropout} with adapters on experts, for which neither podrl nor PEFT computes "
                "dropout: set model.lora.dropout=0."
            )

    def _attention_adapters(self) -> LoraConfig:
        """Returns `lora` for a model with experts, in which the default pattern means attention only."""
        if self.lora.pattern != LoraConfig.pattern:
            return self.lora
        return dataclasses.replace(self.lora, pattern="|".join(ATTENTION_PROJECTIONS))

    def inverse_frequencies(self) -> Float[np.ndarray, "L H/2"]:
        """Computes every layer's rotary frequencies, radians per position (arXiv 2104.09864), with its scaling.

        If `rotary_dim` is set, there are half as many as it says, and not H/2. The layers must be alike: call it on
        each configuration of `alike`.
        """
        assert not self.kinds, "head_dim differs by kind: call inverse_frequencies on each configuration of alike()"
        turned = self.rotary_dim or self.head_dim
        exponent_H = np.arange(0, turned, 2, dtype=np.float64) / turned
        rows = [
            _scale(theta**-exponent_H, scaling, theta)
            for theta, scaling in zip(self.rope_theta_L, self.rope_scaling_L, strict=True)
        ]
        return np.stack(rows).astype(np.float32)

    def rotations(self) -> tuple[tuple[Float[np.ndarray, "R H/2"], tuple[float, ...]], tuple[int, ...]]:
        """Returns the different rotations of rotary positions, and for each layer the index of its rotation.

        The layers must be alike. A rotation has frequencies, see `inverse_frequencies`, and a factor of its cosines and
        sines.
        """
        rotation_L = list(zip(self.rope_theta_L, self.rope_scaling_L, strict=True))
        first_R = [rotation_L.index(rotation) for rotation in dict.fromkeys(rotation_L)]
        factor_R = tuple(self.rope_scaling_L[layer].attention_factor for layer in first_R)
        number_L = tuple(first_R.index(rotation_L.index(rotation)) for rotation in rotation_L)
        return (self.inverse_frequencies()[first_R], factor_R), number_L

    def windows(self) -> Int[np.ndarray, " L"]:
        return np.asarray(self.window_L, np.int32)


def _repeated(kinds: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Returns the shortest pattern of kinds whose repetition is `kinds`, as in `ModelConfig.patterns`."""
    if len(set(kinds)) == 1:
        return ((kinds[0], len(kinds)),), 1
    unit = next(n for n in range(1, len(kinds) + 1) if kinds[:n] * (len(kinds) // n) == kinds)
    return tuple((kind, len(list(same))) for kind, same in itertools.groupby(kinds[:unit])), len(kinds) // unit


def quant_groups(size: int) -> int:
    """Returns the number of groups of an input dimension in integer weights; 1 if 64 does not divide `size`."""
    return size // QUANT_GROUP if size % QUANT_GROUP == 0 else 1


def _scale(freq_H: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    if scaling.kind == "none":
        return freq_H
    if scaling.kind == "linear":
        return freq_H / scaling.factor
    if scaling.kind == "proportional":
        turned = int(scaling.turned * len(freq_H))
        return np.where(np.arange(len(freq_H)) < turned, freq_H / scaling.factor, 0.0)
    if scaling.kind == "llama3":
        wavelength_H = 2 * np.pi / freq_H
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep_H = np.clip((scaling.original_length / wavelength_H - scaling.low_freq_factor) / span, 0.0, 1.0)
        return keep_H * freq_H + (1 - keep_H) * freq_H / scaling.factor
    if scaling.kind == "yarn":
        # Indices (real numbers) of the frequencies that turn beta_fast and beta_slow times over the original length.
        low, high = (
            len(freq_H) * np.log(scaling.original_length / (turns * 2 * np.pi)) / np.log(theta)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(freq_H) - 1)
        high = low + 0.001 if low == high else high
        keep_H = 1 - np.clip((np.arange(len(freq_H)) - low) / (high - low), 0.0, 1.0)
        return keep_H * freq_H + (1 - keep_H) * freq_H / scaling.factor
    raise ValueError(f"Rope scaling {scaling.kind!r} is not known: use none, linear, llama3, yarn or proportional.")


def gemma2_config(
    *,
    vocab_size: int,
    num_layers: int,
    model_dim: int,
    ffn_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 4096,
    attn_softcap: float = 50.0,
    logit_softcap: float = 30.0,
    max_length: int = 8192,
) -> ModelConfig:
    """Builds a Gemma 2 of any size (arXiv 2408.00118), in which layers of even index have the window."""
    return ModelConfig(
        family="gemma2",
        vocab_size=vocab_size,
        num_layers=num_layers,
        model_dim=model_dim,
        ffn_dim=ffn_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation="gelu_tanh",
        norm_eps=1e-6,
        norm_plus_one=True,
        post_norms=True,
        qk_norm=False,
        qkv_bias=False,
        embed_scale=model_dim**0.5,
        tie_embeddings=True,
        query_scale=head_dim**-0.5,
        attn_softcap=attn_softcap,
        logit_softcap=logit_softcap,
        window_L=tuple(window if i % 2 == 0 else GLOBAL_WINDOW for i in range(num_layers)),
        rope_theta_L=(10_000.0,) * num_layers,
        rope_scaling_L=(RopeScaling(),) * num_layers,
        max_length=max_length,
    )
