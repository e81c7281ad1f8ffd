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
QUANT_GROUP = 64  # inputs that share a scale in integer weights
GLOBAL_WINDOW = 1 << 30  # a window no sequence reaches: the layer sees everything before it


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Settings of rotary-frequency scaling for long contexts.

    Attributes:
      kind: 'none', 'linear' (all frequencies divided by `factor`), 'llama3' (only the long wavelengths, smoothly) or
        'proportional' (as linear, and only the highest frequencies, the share `turned` of them, turn at all: Gemma 4).
      factor: the stretch.
      low_freq_factor: llama3: wavelengths above `original_length / low_freq_factor` are stretched fully.
      high_freq_factor: llama3: wavelengths below `original_length / high_freq_factor` are left alone.
      original_length: llama3: context length of pre-training, tokens.
      turned: proportional: share of the frequencies that are not 0.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    turned: float = 1.0


@section("model.lora")
@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside the projections (arXiv 2106.09685): y = x W + (alpha / rank) x A B, where B starts at 0.

    Attributes:
      rank: inner dimension; 0 turns adapters off.
      alpha: scale numerator.
      pattern: regular expression on whole projection names (q, k, v, o, gate, up, down, or with _proj behind) that get
        an adapter.
      dropout: probability of zeroing an input feature of the adapter while training.
      base_dtype: 'int8' or 'int4' stores the frozen projections as integers with a scale per group of 64 inputs (QLoRA,
        arXiv 2305.14314, with uniform levels); '' stores them like everything else.

    Raises:
      ValueError: a pattern that matches no projection, a negative rank, a dropout outside [0, 1), an unknown or idle
        base_dtype.
    """

    rank: Natural = 0
    alpha: Positive = 16.0
    pattern: str = "q|k|v|o|gate|up|down"
    dropout: Annotated[float, Range("[0, 1)")] = 0.0
    base_dtype: Literal["", "int8", "int4"] = ""

    def __post_init__(self):
        if self.base_dtype and not self.rank:
            raise ValueError(
                f"lora.base_dtype={self.base_dtype!r} with lora.rank={self.rank}: integer weights need adapters (a "
                "rank above 0), as they are not trained themselves."
            )
        try:
            matched = [name for name in PROJECTIONS if self._matches(name)]
        except re.error as error:
            raise ValueError(f"lora.pattern={self.pattern!r} is not a regular expression: {error}.") from None
        if self.rank and not matched:
            raise ValueError(
                f"lora.pattern={self.pattern!r} matches no projection: it must match at least one of "
                f"{', '.join(PROJECTIONS)} (or {', '.join(f'{name}_proj' for name in PROJECTIONS)})."
            )

    def _matches(self, name: str) -> bool:
        return any(re.fullmatch(self.pattern, spelling) for spelling in (name, f"{name}_proj"))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def covers(self, name: str) -> bool:
        return self.rank > 0 and self._matches(name)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The routed feed-forwards of a layer, and the way a token's are chosen and weighted.

    Attributes:
      count: feed-forwards in each layer, E.
      chosen: feed-forwards that compute each token, k.
      ffn_dim: inner dimension of each, F.
      score: function of the router's logits: 'softmax' over all experts, 'sigmoid' of each, or 'chosen': a softmax over
        the chosen ones. The experts with the highest scores are chosen.
      normalize: True divides the weights of a token's experts by their sum.
      scale: factor of the weights.
      selection_bias: whether a number per expert is added to the scores for choosing, but not to the weights. It has no
        gradient.
      shared_dim: inner dimension of one more feed-forward that computes every token; 0 is none.
      shared_gate: True multiplies the shared expert's output by a sigmoid of the token.
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

    def __post_init__(self):
        if not 1 <= self.chosen <= self.count:
            raise ValueError(
                f"{self.chosen} experts of {self.count} cannot be chosen for a token: num_experts_per_tok must be at "
                "least 1 and at most the number of experts."
            )
        if self.score not in ("softmax", "sigmoid", "chosen"):
            raise ValueError(f"Router score {self.score!r} is not known: softmax, sigmoid and chosen are.")
        if self.shared_gate and not self.shared_dim:
            raise ValueError("shared_gate=True without a shared feed-forward: shared_dim must be above 0.")


@dataclasses.dataclass(frozen=True)
class Delta:
    """Sizes of linear attention by the gated delta rule, see `podrl.models.delta`.

    Attributes:
      key_heads, value_heads: heads of queries and keys, and of values, a multiple of those.
      key_dim, value_dim: widths of a head.
      taps: tokens that the convolution before it mixes, the token's own included.
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
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layers in a model whose layers are not all alike.

    Attributes:
      name: key of these layers' parameters under 'layers'.
      num_kv_heads, head_dim: K and H.
      key_is_value: the values are the keys before norm and rotation: there is no projection v.
      delta: linear attention in place of attention; the two numbers above then mean nothing.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    key_is_value: bool = False
    delta: Delta | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder-only transformer.

    Attributes:
      family: name of the architecture in checkpoints, e.g. 'gemma2'.
      vocab_size, num_layers, model_dim, ffn_dim: V, L, D, F.
      num_heads, num_kv_heads, head_dim: N, K, H; where layers are of several kinds, K and H are those of `kinds[0]`.
      activation: gate non-linearity: 'gelu_tanh', 'gelu' or 'silu'.
      norm_eps: added to the mean square in every RMS norm.
      norm_plus_one: norms scale by 1 + w (Gemma) instead of w.
      post_norms: the outputs of attention and MLP are normalised too (Gemma 2 and 3).
      qk_norm: queries and keys are normalised per head (Gemma 3, Qwen 3).
      qkv_bias: the q, k and v projections have biases (Qwen 2).
      embed_scale: multiplies token embeddings (Gemma: sqrt(D)).
      tie_embeddings: the output projection is the embedding matrix.
      query_scale: multiplies queries before the dot product.
      attn_softcap, logit_softcap: c in c * tanh(x / c) on attention scores and on logits; 0 is off.
      window_L: per layer, how many tokens back (itself included) attention reaches; GLOBAL_WINDOW is everything.
      rope_theta_L: per layer, base of the rotary frequencies.
      rope_scaling_L: per layer, stretching of the frequencies.
      max_length: longest sequence the checkpoint was made for, tokens.
      lora: adapters beside the projections.
      experts: routed feed-forwards in place of one of `ffn_dim`, in every layer; None where there are none.
      v_norm: values are normalised per head, without a weight (Gemma 4).
      layer_scalar: the output of every layer is multiplied by a number that does not train (Gemma 4).
      rotary_dim: leading dimensions of a head that rotary positions turn; 0 turns all.
      gated_attention: the projection q has a gate beside each query, whose sigmoid scales the head's output (Qwen 3.5).
      key_is_value: whether values are the keys before norm and rotation, if all layers are of one kind; see Kind.
      delta: the gated delta rule of all layers, if they are of one kind; see Kind.
      kinds: the kinds of layers; () where all layers are alike.
      kind_L: per layer, index of its kind; () where all layers are alike.
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
    v_norm: bool = False
    layer_scalar: bool = False
    rotary_dim: int = 0
    gated_attention: bool = False
    key_is_value: bool = False
    delta: Delta | None = None
    kinds: tuple[Kind, ...] = ()
    kind_L: tuple[int, ...] = ()

    def __post_init__(self):
        if self.experts is not None:
            self._check_adapters()
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
        """Names of the dense projections in a layer: with experts, only those of attention."""
        names = ATTENTION_PROJECTIONS if self.experts is not None else PROJECTIONS
        if self.delta is not None:
            return tuple(name for name in names if name not in ATTENTION_PROJECTIONS)
        return tuple(name for name in names if name != "v" or not self.key_is_value)

    def alike(self) -> tuple["ModelConfig", ...]:
        """Returns for each kind of layers the configuration of a model of these layers alone, in the model's order.

        A model whose layers are all alike is the only one of its own.
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
            key_is_value=kind.key_is_value,
            delta=kind.delta,
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
        """Returns of each layer, in order, its kind and its place among the layers of this kind."""
        if not self.kinds:
            return tuple((0, i) for i in range(self.num_layers))
        return tuple((kind, self.kind_L[:i].count(kind)) for i, kind in enumerate(self.kind_L))

    def runs(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Returns the shortest sequence of runs of equal layers that repeats to the whole model, and how often it does.

        A run is (kind, number of layers).
        """
        kind_L = self.kind_L
        if not self.kinds:
            return ((0, self.num_layers),), 1
        unit = next(n for n in range(1, len(kind_L) + 1) if kind_L[:n] * (len(kind_L) // n) == kind_L)
        runs = tuple((kind, len(list(same))) for kind, same in itertools.groupby(kind_L[:unit]))
        return runs, len(kind_L) // unit

    @property
    def active_ffn_dim(self) -> int:
        """Inner dimension of all feed-forwards that compute one token in a layer."""
        return (
            self.ffn_dim
            if self.experts is None
            else self.experts.chosen * self.experts.ffn_dim + self.experts.shared_dim
        )

    @property
    def chosen_share(self) -> float:
        """Share of the routed experts that compute one token; 1 without experts."""
        return 1.0 if self.experts is None else self.experts.chosen / self.experts.count

    @property
    def recurrent(self) -> bool:
        """True where some layers are of linear attention."""
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
        if self.experts is not None:
            raise ValueError(
                f"A {self.family} model has layers of several kinds and experts: podrl has no such model yet."
            )
        self.alike()  # checks each kind

    def _check_adapters(self) -> None:
        """Refuses adapters and integer weights of experts; the default pattern means those of attention."""
        own = [name for name in PROJECTIONS if name not in ATTENTION_PROJECTIONS and self.lora.covers(name)]
        if own and (self.lora.pattern != LoraConfig.pattern):
            raise ValueError(
                f"lora.pattern={self.lora.pattern!r} matches {', '.join(own)}: the experts of a {self.family} model "
                f"take no adapters yet. Make model.lora.pattern match {', '.join(ATTENTION_PROJECTIONS)} alone."
            )
        if self.lora.base_dtype:
            raise ValueError(
                f"lora.base_dtype={self.lora.base_dtype!r}: the experts of a {self.family} model are not stored as "
                "integers yet. Set model.lora.base_dtype=''."
            )

    def inverse_frequencies(self) -> Float[np.ndarray, "L H/2"]:
        """Computes every layer's rotary frequencies, radians per position (arXiv 2104.09864), with its scaling.

        Only of a model whose layers are alike.
        """
        assert not self.kinds, "head_dim differs by kind: ask each of alike()"
        turned = self.rotary_dim or self.head_dim
        exponent_H = np.arange(0, turned, 2, dtype=np.float64) / turned
        rows = [
            _scale(theta**-exponent_H, scaling)
            for theta, scaling in zip(self.rope_theta_L, self.rope_scaling_L, strict=True)
        ]
        return np.stack(rows).astype(np.float32)

    def windows(self) -> Int[np.ndarray, " L"]:
        return np.asarray(self.window_L, np.int32)


def _scale(freq_H: np.ndarray, scaling: RopeScaling) -> np.ndarray:
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
    raise ValueError(f"Rope scaling {scaling.kind!r} is not known: none, linear, llama3 and proportional are.")


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
    """Builds a Gemma 2 of any size: even layers are sliding-window, odd layers global (arXiv 2408.00118)."""
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
