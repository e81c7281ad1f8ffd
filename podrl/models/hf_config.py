"""Translates between Hugging Face's config.json and ModelConfig; refuses, by name, fields that podrl cannot compute."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from podrl.mappings import JsonObject
from podrl.models.config import GLOBAL_WINDOW, Delta, Experts, Kind, ModelConfig, RopeScaling
from podrl.models.hf_fields import COMPUTED, KINDS_OF_ROPE, PARTIAL_ROPE, QWEN3_5, reads, refuse_unknown, refuse_unread
from podrl.models.tensor_files import has_own_head
from podrl.storage.regular import load_object
from podrl.storage.storage import locate


@dataclasses.dataclass(frozen=True)
class Family:
    """Facts about a model family that its config.json does not state.

    Attributes:
      model_type: value of config.json's model_type.
      architecture: class name written on export.
      gemma: True if embeddings are scaled by sqrt(D) and norms scale by 1 + w (but by w in Gemma 4).
      post_norms, qk_norm, qkv_bias: fields of ModelConfig with these names.
      defaults: values of fields that config.json may omit.
      experts: field with the number of experts, and its value if config.json omits it; None without experts.
    """

    model_type: str
    architecture: str
    gemma: bool
    post_norms: bool
    qk_norm: bool
    qkv_bias: bool
    defaults: JsonObject
    experts: tuple[str, int] | None = None


_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}
_LLAMA = {"hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GEMMA2 = _GEMMA | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA4 = _GEMMA | {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "attention_k_eq_v": False,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_QWEN = _LLAMA | {"max_window_layers": 28, "use_sliding_window": False, "sliding_window": 4096}
_QWEN3_5 = _LLAMA | {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 32_768,
}
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_MOE = _LLAMA | {
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_GLM4_MOE = _LLAMA | {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
    "attention_bias": False,
}
_MIXTRAL = _LLAMA | {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_experts_per_tok": 2,
}
_GPT_OSS = _LLAMA | {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
_OLMO3 = _LLAMA | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "rope_theta": 500_000.0,
}

FAMILIES: Mapping[str, Family] = {
    "gemma": Family("gemma", "GemmaForCausalLM", True, False, False, False, _GEMMA),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", True, True, False, False, _GEMMA2),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", True, True, True, False, _GEMMA3),
    "gemma4": Family("gemma4_text", "Gemma4ForCausalLM", True, True, True, False, _GEMMA4, ("num_experts", 128)),
    "glm4_moe": Family(
        "glm4_moe", "Glm4MoeForCausalLM", False, False, False, False, _GLM4_MOE, ("n_routed_experts", 128)
    ),
    "gpt_oss": Family("gpt_oss", "GptOssForCausalLM", False, False, False, True, _GPT_OSS, ("num_local_experts", 128)),
    "llama": Family("llama", "LlamaForCausalLM", False, False, False, False, _LLAMA),
    "mistral": Family("mistral", "MistralForCausalLM", False, False, False, False, _LLAMA | {"sliding_window": 4096}),
    "mixtral": Family("mixtral", "MixtralForCausalLM", False, False, False, False, _MIXTRAL, ("num_local_experts", 8)),
    "olmo3": Family("olmo3", "Olmo3ForCausalLM", False, True, True, False, _OLMO3),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", False, False, False, True, _QWEN),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", False, False, True, False, _QWEN | {"head_dim": 128}),
    "qwen3_5": Family("qwen3_5_text", "Qwen3_5ForCausalLM", False, False, True, False, _QWEN3_5),
    "qwen3_5_moe": Family(
        *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", False, False, True, False, _QWEN3_5_MOE),
        ("num_experts", 256),
    ),
    "qwen3_moe": Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", False, False, True, False, _QWEN3_MOE, ("num_experts", 128)
    ),
}

_CLAMPED = "clamped_silu"  # the activation of gpt-oss, whose file says silu
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "swish": "silu"}


def read_config(directory: str | os.PathLike) -> ModelConfig:
    """Reads the ModelConfig of a Hugging Face directory.

    If the weights have an output matrix that differs from the embedding, embeddings are not tied, whatever config.json
    says.

    Raises:
      ValueError: there is no config.json; podrl does not support the architecture; a field changes the mathematics in a
        way that podrl does not compute (the message names the field); or the weights are damaged.
    """
    path = locate(directory) / "config.json"
    if not path.exists():
        raise ValueError(f"{directory} has no config.json: give a Hugging Face model directory.")
    config = config_from_hf(load_object(path), where=str(path))
    # An output matrix in the weights overrides the flag tie_word_embeddings, as in transformers.
    own_head = config.tie_embeddings and has_own_head(locate(directory))
    return dataclasses.replace(config, tie_embeddings=False) if own_head else config


def config_from_hf(raw: JsonObject, *, where: str = "config.json") -> ModelConfig:
    """Translates the fields of a config.json; error messages name the file `where`.

    Raises:
      ValueError: see `read_config`, without the errors of missing files and weights.
    """
    name, fields = _family_of(raw, where)
    family = FAMILIES[name]
    refuse_unknown(name, fields, where)
    read = {k: v for k, v in fields.items() if reads(name, k)}
    known = {**family.defaults, **{k: v for k, v in read.items() if v is not None}}

    def need(key: str, condition: str = "") -> Any:
        if key not in known:
            raise ValueError(f"{where} lacks {key}, which a {name} model{condition} needs.")
        return known[key]

    heads, model_dim, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
    head_dim = known.get("head_dim") or model_dim // heads
    if not known.get("head_dim") and model_dim % heads:
        raise ValueError(
            f"{where} has hidden_size={model_dim}, which does not split over num_attention_heads={heads}: it must be a "
            "multiple of that number, or head_dim must be given."
        )
    if head_dim % 2:
        raise ValueError(f"{where} has head_dim={head_dim}: it must be even, because rotary positions turn pairs.")
    window = _window(name, known, read)
    sliding = _sliding_layers(name, known, layers, window, where)
    kinds, kind_L = _kinds(name, known, sliding, where)
    if name in QWEN3_5:
        kinds, kind_L = _linear_kinds(known, layers, head_dim, where)
    if name == "glm4_moe":
        kinds, kind_L = _dense_first(known, layers, head_dim, where)
    theta_L, scaling_L = _rope(name, known, read, sliding, where)
    activation_name, activation = _activation(name, known, where)
    refuse_unread(
        name,
        fields,
        head_dim=head_dim,
        theta_L=theta_L,
        activation=activation_name,
        sliding=sliding,
        original=scaling_L[0].original_length,
        where=where,
    )
    if known.get("enable_moe_block"):  # a Gemma 4 with experts
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            need(key, " with enable_moe_block")
    experts = _experts(name, known, where)
    narrow = name == "qwen3_5_moe" and "intermediate_size" not in known  # no layer has a dense feed-forward
    query_scale = 1.0 if name == "gemma4" else head_dim**-0.5
    if name in ("gemma2", "gemma3"):
        query_scale = known["query_pre_attn_scalar"] ** -0.5
    return ModelConfig(
        family=name,
        vocab_size=need("vocab_size"),
        num_layers=layers,
        model_dim=model_dim,
        ffn_dim=need("moe_intermediate_size" if narrow else "intermediate_size"),
        num_heads=heads,
        num_kv_heads=known.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        activation=activation,
        norm_eps=need("rms_norm_eps"),
        norm_plus_one=(family.gemma and name != "gemma4") or name in QWEN3_5,
        post_norms=family.post_norms,
        qk_norm=known.get("use_qk_norm", family.qk_norm),
        qkv_bias=bool(known["attention_bias"]) if name in ("glm4_moe", "gpt_oss") else family.qkv_bias,
        o_bias=name == "gpt_oss" and known["attention_bias"],
        sinks=name == "gpt_oss",
        pre_norms=name != "olmo3",
        joint_qk_norm=name == "olmo3",
        embed_scale=model_dim**0.5 if family.gemma else 1.0,
        tie_embeddings=need("tie_word_embeddings"),
        query_scale=query_scale,
        attn_softcap=_softcap("attn_logit_softcapping", read, family),
        logit_softcap=_softcap("final_logit_softcapping", read, family),
        window_L=tuple(window if s and window else GLOBAL_WINDOW for s in sliding),
        rope_theta_L=theta_L,
        rope_scaling_L=scaling_L,
        max_length=max(need("max_position_embeddings"), *map(_stretched, scaling_L)),
        experts=experts,
        v_norm=name == "gemma4",
        layer_scalar=name == "gemma4",
        rotary_dim=_rotary_dim(name, known, head_dim, where) if name in PARTIAL_ROPE else 0,
        gated_attention=name in QWEN3_5,
        delta=kinds[0].delta if kinds else None,
        ple_dim=_per_layer_dim(known, fields, where) if name == "gemma4" else 0,
        kinds=kinds,
        kind_L=kind_L,
    )


def _per_layer_dim(known: JsonObject, fields: JsonObject, where: str) -> int:
    """Reads the size of a Gemma 4's per-layer embeddings: 0 for null, transformers' default for a missing field."""
    dim = fields.get("hidden_size_per_layer_input", known["hidden_size_per_layer_input"]) or 0
    if dim and known["vocab_size_per_layer_input"] != known["vocab_size"]:
        raise ValueError(
            f"{where} has vocab_size_per_layer_input={known['vocab_size_per_layer_input']} and vocab_size="
            f"{known['vocab_size']}: they must be the same."
        )
    return dim


def _kinds(
    name: str, known: JsonObject, sliding: tuple[bool, ...], where: str
) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Reads the kinds of layers of a Gemma 4: layers with a window, and full layers, whose heads have another size.

    The last layers may reuse the keys of the last earlier layer of the same type; there must be such a layer.
    """
    if name != "gemma4":
        return (), ()
    if sliding[-1] or not any(sliding):
        raise ValueError(
            f"{where} has layer_types that podrl does not compute: some must slide, and the last must not."
        )
    near = {"num_key_value_heads": known["num_key_value_heads"], "head_dim": known["head_dim"]}
    change = {"head_dim": known["global_head_dim"]}
    if known["attention_k_eq_v"] and known.get("num_global_key_value_heads"):
        change["num_key_value_heads"] = known["num_global_key_value_heads"]
    if "per_layer_config" in known:  # newer files describe full layers in this field, which overrides the fields above
        per_layer = {int(i): dict(changes) for i, changes in known["per_layer_config"].items() if changes}
        full = [i for i, slides in enumerate(sliding) if not slides]
        change = per_layer.get(full[0], {})
        if per_layer != {i: change for i in full if change} or set(change) - set(near):
            raise ValueError(
                f"{where} has per_layer_config={known['per_layer_config']!r}: it must give num_key_value_heads and "
                f"head_dim of the layers {full} of full_attention, the same for all, and nothing else."
            )
    wide = near | change
    kinds = (
        Kind("sliding", near["num_key_value_heads"], near["head_dim"]),
        Kind("full", wide["num_key_value_heads"], wide["head_dim"], known["attention_k_eq_v"]),
    )
    shared = known["num_kv_shared_layers"]
    own = [0 if slides else 1 for slides in sliding]
    if not shared:
        return kinds, tuple(own)
    producing = own[: max(len(own) - shared, 0)]
    if set(producing) != {0, 1} or known.get("enable_moe_block"):
        raise ValueError(
            f"{where} has num_kv_shared_layers={shared}: a sliding and a full layer must come before the layers that "
            "share their keys, and podrl computes no experts (enable_moe_block) beside such layers."
        )
    scale = 2 if known["use_double_wide_mlp"] else 1
    reusing = [k for k in (0, 1) if k in own[len(producing) :]]
    kinds += tuple(
        Kind(f"{kinds[k].name}_shared", kinds[k].num_kv_heads, kinds[k].head_dim, keys_of=k, ffn_scale=scale)
        for k in reusing
    )
    return kinds, (*producing, *(2 + reusing.index(k) for k in own[len(producing) :]))


_LINEAR_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def _rotary_dim(name: str, known: JsonObject, head_dim: int, where: str) -> int:
    """Reads the number of leading dimensions of a head that rotary positions turn.

    Text has the same position on all three axes of mrope, so mrope is ordinary rotary embedding here.
    """
    outer = known.get("partial_rotary_factor", 0.25 if name in QWEN3_5 else 0.5)
    share = _not_null(known.get("rope_parameters")).get("partial_rotary_factor", outer)
    if "partial_rotary_factor" in known and share != outer:
        raise ValueError(
            f"{where} has partial_rotary_factor={outer!r} and in rope_parameters {share!r}: they must be the same."
        )
    turned = int(head_dim * share)
    if turned % 2 or not 0 < turned <= head_dim:
        raise ValueError(
            f"{where} has partial_rotary_factor={share!r} and head_dim={head_dim}: their product, rounded down, must "
            "be even, above 0 and at most head_dim."
        )
    return turned


def _linear_kinds(
    known: JsonObject, layers: int, head_dim: int, where: str
) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Reads the two kinds of layers of a Qwen 3.5: attention and linear attention."""
    every = known["full_attention_interval"]
    types = known.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    if set(types) != {"linear_attention", "full_attention"} or len(types) != layers:
        raise ValueError(
            f"{where} has layer_types={types!r}: it must name linear_attention or full_attention for each of {layers} "
            "layers, and each of the two at least once."
        )
    sizes = Delta(
        known["linear_num_key_heads"],
        known["linear_num_value_heads"],
        known["linear_key_head_dim"],
        known["linear_value_head_dim"],
        known["linear_conv_kernel_dim"],
    )
    heads = known["num_key_value_heads"]
    kinds = (Kind("full", heads, head_dim), Kind("linear", heads, head_dim, delta=sizes))
    return kinds, tuple(1 if kind == "linear_attention" else 0 for kind in types)


def _dense_first(known: JsonObject, layers: int, head_dim: int, where: str) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Reads the two kinds of layers of a GLM 4.5: dense layers come first, and all later layers have experts."""
    dense, heads = known["first_k_dense_replace"], known["num_key_value_heads"]
    if dense >= layers:
        raise ValueError(
            f"{where} has first_k_dense_replace={dense} for {layers} layers: at least one must have experts."
        )
    kinds = (Kind("routed", heads, head_dim), Kind("dense", heads, head_dim, dense=True))
    return (kinds, (1,) * dense + (0,) * (layers - dense)) if dense else ((), ())


def _experts(name: str, known: JsonObject, where: str) -> Experts | None:
    """Reads the experts of a model; None for a model without experts."""
    family = FAMILIES[name]
    if family.experts is None or (name == "gemma4" and not known.get("enable_moe_block")):
        return None
    counts = {key: known[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in known}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{where} has {' and '.join(f'{k}={v}' for k, v in counts.items())}: they must be the same.")
    key, count = next(iter(counts.items()), family.experts)
    chosen_key = "top_k_experts" if name == "gemma4" else "num_experts_per_tok"
    chosen = known[chosen_key]
    if chosen > count:
        raise ValueError(
            f"{where} has {chosen_key}={chosen} and {key}={count}: a token cannot have more experts than there are."
        )
    if name == "gpt_oss":
        return Experts(count, chosen, known["intermediate_size"], score="chosen", normalize=False, bias=True)
    shared = known.get("n_shared_experts", 0) * known.get("moe_intermediate_size", 0)
    return Experts(
        count,
        chosen,
        known["intermediate_size" if name == "mixtral" else "moe_intermediate_size"],
        normalize=known.get("norm_topk_prob", True),
        shared_dim=known.get("shared_expert_intermediate_size", 0) or shared,
        score="sigmoid" if name == "glm4_moe" else "softmax",
        selection_bias=name == "glm4_moe",
        scale=float(known.get("routed_scaling_factor", 1.0)),
        shared_gate=name in QWEN3_5,
        beside_dense=name == "gemma4",
    )


def _family_of(raw: JsonObject, where: str) -> tuple[str, JsonObject]:
    model_type = raw.get("model_type")
    if model_type in ("gemma3", "gemma4", *QWEN3_5) and isinstance(raw.get("text_config"), Mapping):
        # A checkpoint for images and text; podrl computes its text decoder.
        inner = raw["text_config"]
        outer = {k: v for k, v in raw.items() if v is not None and (k in COMPUTED or k == "quantization_config")}
        for key, value in outer.items():
            if inner.get(key) is not None and inner[key] != value:
                raise ValueError(
                    f"{where} has {key}={value!r} and in text_config {key}={inner[key]!r}: they must be the same."
                )
        return model_type, {**inner, **outer}
    for name, family in FAMILIES.items():
        if family.model_type == model_type:
            return name, raw
    types = sorted({f.model_type for f in FAMILIES.values()})
    if not model_type:
        raise ValueError(f"{where} has no model_type, which says the architecture: {', '.join(types)} are supported.")
    raise ValueError(
        f"{where} has model_type {model_type!r}, an architecture podrl does not have: {', '.join(types)} are supported."
    )


def _activation(name: str, known: JsonObject, where: str) -> tuple[str, str]:
    """Reads the activation: (its name in the file, podrl's name)."""
    activation = known["hidden_activation" if reads(name, "hidden_activation") else "hidden_act"]
    if name == "gemma" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # early Gemma files say gelu but mean the tanh form
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{where} has activation {activation!r}: {', '.join(_ACTIVATIONS)} are supported.")
    return activation, _CLAMPED if name == "gpt_oss" else _ACTIVATIONS[activation]


def _softcap(key: str, fields: JsonObject, family: Family) -> float:
    value = fields[key] if key in fields else family.defaults.get(key)
    return float(value or 0.0)


def _window(name: str, known: JsonObject, fields: JsonObject) -> int | None:
    """Reads the window of sliding layers, in tokens; None if the model has no window, or the file has null."""
    if "use_sliding_window" in known and not known["use_sliding_window"]:
        return None
    return fields["sliding_window"] if "sliding_window" in fields else known.get("sliding_window")


def _sliding_layers(name: str, known: JsonObject, layers: int, window: int | None, where: str) -> tuple[bool, ...]:
    """Returns, for each layer, whether it has a sliding window."""
    if name in QWEN3_5:
        return (False,) * layers
    if "layer_types" in known:
        kinds = known["layer_types"]
        strange = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if strange or len(kinds) != layers:
            raise ValueError(
                f"{where} has layer_types={kinds!r}: it must name sliding_attention or full_attention for each of "
                f"{layers} layers."
            )
        sliding = tuple(k == "sliding_attention" for k in kinds)
    elif name in ("gemma2", "gemma3", "gpt_oss", "olmo3"):
        sliding = tuple(bool((i + 1) % known["sliding_window_pattern"]) for i in range(layers))
    elif name == "gemma4":
        sliding = tuple(bool((i + 1) % 6) and i + 1 < layers for i in range(layers))
    elif name in ("qwen2", "qwen3"):
        return tuple(window is not None and i >= known["max_window_layers"] for i in range(layers))
    else:
        return (window is not None,) * layers
    if any(sliding) and window is None:
        switch = " and use_sliding_window must be true" if "use_sliding_window" in known else ""
        raise ValueError(
            f"{where} has layers of sliding_attention but no window: sliding_window must be a number of tokens{switch}."
        )
    return sliding


def _rope(
    name: str, known: JsonObject, fields: JsonObject, sliding: tuple[bool, ...], where: str
) -> tuple[tuple[float, ...], tuple[RopeScaling, ...]]:
    """Reads every layer's rotary base and scaling from rope_theta and rope_scaling, or from rope_parameters."""
    shared = _not_null(known.get("rope_parameters"))
    if name in PARTIAL_ROPE:
        shared = {key: value for key, value in shared.items() if key not in _LINEAR_ROPE}
    theta = float(known.get("rope_theta", 10_000.0))
    local = known.get("rope_local_base_freq")
    full = {"rope_theta": theta, **_not_null(known.get("rope_scaling"))}
    near = {"rope_theta": float(local)} if local is not None else full
    if name == "olmo3":  # rope_scaling applies to the layers without a window only
        near = {"rope_theta": theta}
    old = {True: near, False: full}
    kinds = {"full_attention", "sliding_attention"}
    if kinds & set(shared) or (shared and name == "olmo3"):
        if name not in KINDS_OF_ROPE or not set(shared) <= kinds:
            raise ValueError(
                f"{where} has rope_parameters={shared!r}: only a gemma3, gemma4 or olmo3 model has other positions in "
                "layers with a window. For such positions, and always in an olmo3 model, rope_parameters must hold "
                "nothing but full_attention and sliding_attention."
            )
        full = {"rope_theta": full["rope_theta"], **_not_null(shared.get("full_attention", full))}
        near = {"rope_theta": near["rope_theta"], **_not_null(shared.get("sliding_attention", near))}
    elif shared:
        full = {"rope_theta": full["rope_theta"], **shared}
        near = near if local is not None else full
    limit = known.get("max_position_embeddings")
    parsed = {True: _rope_kind(near, limit, where), False: _rope_kind(full, limit, where)}
    named = {"rope_theta", "rope_scaling", "rope_local_base_freq"}
    legacy = {name: fields[name] for name in named if fields.get(name) is not None}
    for slides, keys in ((False, ("rope_theta", "rope_scaling")), (True, ("rope_local_base_freq",))):
        before, now = _rope_kind(old[slides], limit, where), parsed[slides]
        differs = (before[0] != now[0] and keys[0] in legacy) or (
            before[1] != now[1] and keys[-1] in legacy and not slides
        )
        if shared and differs:
            raise ValueError(
                f"{where} has {', '.join(f'{name}={value!r}' for name, value in sorted(legacy.items()))} beside "
                f"rope_parameters={shared!r}, which contradict them: delete one of the two spellings."
            )
    return tuple(parsed[s][0] for s in sliding), tuple(parsed[s][1] for s in sliding)


def _not_null(fields: JsonObject | None) -> dict[str, Any]:
    return {key: value for key, value in (fields or {}).items() if value is not None}


def _rope_kind(rope: JsonObject, limit: int | None, where: str) -> tuple[float, RopeScaling]:
    allowed = {
        "default": set(),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "yarn": {"factor", "original_max_position_embeddings", *_YARN},
        "proportional": {"factor", "partial_rotary_factor"},
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("type") not in (None, kind):
        raise ValueError(f"{where} has rope_type={kind!r} and type={rope['type']!r}: they must be the same.")
    if kind not in allowed:
        raise ValueError(f"{where} has rope scaling {kind!r}: {', '.join(allowed)} are supported.")
    rope = {k: v for k, v in rope.items() if v is not None and not (k == "partial_rotary_factor" and v == 1)}
    extra = sorted(set(rope) - allowed[kind] - {"rope_theta", "rope_type", "type"})
    if extra:
        raise ValueError(f"{where} has rope field(s) {', '.join(extra)}, which its rope scaling {kind!r} does not use.")
    theta = float(rope["rope_theta"])
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", factor=float(rope["factor"]))
        if kind == "proportional":
            turned = float(rope.get("partial_rotary_factor", 1.0))
            if turned > 1:
                raise ValueError(f"{where} has partial_rotary_factor={turned:g}: it must be at most 1.")
            return theta, RopeScaling("proportional", factor=float(rope.get("factor", 1.0)), turned=turned)
        if kind == "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            if low >= high:
                raise ValueError(f"{where} has low_freq_factor={low:g}, which must be below high_freq_factor={high:g}.")
            length = int(rope.get("original_max_position_embeddings") or limit or 8192)
            return theta, RopeScaling("llama3", float(rope["factor"]), low, high, length)
        if kind == "yarn":
            return theta, _yarn(rope, theta, limit, where)
    except KeyError as error:
        raise ValueError(f"{where} has rope scaling {kind!r} without {error}.") from None
    return theta, RopeScaling()


_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def _yarn(rope: JsonObject, theta: float, limit: int | None, where: str) -> RopeScaling:
    """Reads YaRN (arXiv 2309.00071) with the defaults of transformers."""
    factor, fast, slow = float(rope["factor"]), float(rope.get("beta_fast", 32)), float(rope.get("beta_slow", 1))
    if fast < slow or theta <= 1:
        raise ValueError(
            f"{where} has beta_fast={fast:g}, beta_slow={slow:g} and rope_theta={theta:g}: beta_fast must be at least "
            "beta_slow, and rope_theta above 1."
        )

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    inferred = grown(1)
    if "mscale" in rope and "mscale_all_dim" in rope:
        inferred = grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return RopeScaling(
        "yarn",
        factor,
        original_length=int(rope.get("original_max_position_embeddings") or limit or 8192),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.get("truncate", True),
        attention_factor=float(rope.get("attention_factor", inferred)),
    )


def _stretched(scaling: RopeScaling) -> int:
    """Returns the context length that YaRN stretches to, tokens; 0 for other scalings.

    With YaRN, max_position_embeddings may be the length before stretching.
    """
    return round(scaling.factor * scaling.original_length) if scaling.kind == "yarn" else 0


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json fields that `transformers` and `config_from_hf` read as this model, without its adapters.

    Raises:
      ValueError: no config.json describes this model.
    """
    family = FAMILIES[config.family]
    activation = {_CLAMPED: "silu", **{v: k for k, v in _ACTIVATIONS.items() if k != "swish"}}[config.activation]
    raw: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "hidden_activation" if reads(config.family, "hidden_activation") else "hidden_act": activation,
    }
    if config.family in ("gemma2", "gemma3"):
        raw["query_pre_attn_scalar"] = _whole(config.query_scale**-2)
        raw["attn_logit_softcapping"] = config.attn_softcap or None
        raw["final_logit_softcapping"] = config.logit_softcap or None
    if config.family == "gemma4":
        raw |= _gemma4_fields(config)
    if config.family in QWEN3_5:
        raw |= _linear_fields(config)
    if config.family == "gpt_oss":
        raw |= {"attention_bias": config.qkv_bias, "swiglu_limit": 7.0}
    if config.family == "glm4_moe":
        raw["attention_bias"] = config.qkv_bias
    raw |= _window_fields(config) | _rope_fields(config) | _expert_fields(config)
    back = dataclasses.replace(config_from_hf(raw), lora=config.lora)
    same_scale = math.isclose(back.query_scale, config.query_scale, rel_tol=1e-6)
    if not same_scale or dataclasses.replace(back, query_scale=config.query_scale) != config:
        raise ValueError(f"This {config.family} configuration has no form in Hugging Face's config.json: {config}.")
    return raw


def _gemma4_fields(config: ModelConfig) -> dict[str, object]:
    full = config.kinds[1]
    return {
        "final_logit_softcapping": config.logit_softcap or None,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads if full.key_is_value else None,
        "attention_k_eq_v": full.key_is_value,
        "hidden_size_per_layer_input": config.ple_dim,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": sum(config.kinds[kind].keys_of >= 0 for kind in config.kind_L),
        "use_double_wide_mlp": any(kind.ffn_scale == 2 for kind in config.kinds),
        **({"enable_moe_block": True} if config.experts is not None else {}),
    }


def _linear_fields(config: ModelConfig) -> dict[str, object]:
    sizes = config.kinds[1].delta
    assert sizes is not None
    return {
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.taps,
    }


def _expert_fields(config: ModelConfig) -> dict[str, object]:
    experts, counted = config.experts, FAMILIES[config.family].experts
    if experts is None or counted is None:
        return {}
    values = {
        counted[0]: experts.count,
        "num_experts_per_tok": experts.chosen,
        "top_k_experts": experts.chosen,
        "moe_intermediate_size": experts.ffn_dim,
        "norm_topk_prob": experts.normalize,
        "shared_expert_intermediate_size": experts.shared_dim,
        "n_shared_experts": experts.shared_dim // experts.ffn_dim,
        "routed_scaling_factor": experts.scale,
        "first_k_dense_replace": sum(config.kinds[kind].dense for kind in config.kind_L),
        "use_qk_norm": config.qk_norm,
    }
    return {key: value for key, value in values.items() if reads(config.family, key)}


def _whole(value: float) -> float | int:
    return round(value) if abs(value - round(value)) < 1e-6 * abs(value) else value


def _window_fields(config: ModelConfig) -> dict[str, object]:
    sliding = [w != GLOBAL_WINDOW for w in config.window_L]
    window = min(config.window_L)
    fields: dict[str, object] = {}
    if reads(config.family, "layer_types"):
        fields["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
    if config.family in QWEN3_5:
        fields["layer_types"] = [f"{config.kinds[kind].name}_attention" for kind in config.kind_L]
    if reads(config.family, "use_sliding_window"):
        fields["use_sliding_window"] = any(sliding)
    if reads(config.family, "sliding_window"):
        fields["sliding_window"] = window if any(sliding) else (4096 if config.post_norms else None)
    return fields


def _rope_fields(config: ModelConfig) -> dict[str, object]:
    """Returns the rotary fields in both spellings, so that transformers before and after version 5 read them alike."""
    scaling_of = {
        w != GLOBAL_WINDOW: (theta, scaling)
        for w, theta, scaling in zip(config.window_L, config.rope_theta_L, config.rope_scaling_L, strict=True)
    }
    theta, scaling = scaling_of.get(False, scaling_of.get(True, (10_000.0, RopeScaling())))
    old = _scaling_fields(scaling)
    fields: dict[str, object] = {"rope_theta": theta}
    if old:
        fields["rope_scaling"] = old
    if config.family in PARTIAL_ROPE:
        share = config.rotary_dim / config.head_dim
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **old, "partial_rotary_factor": share}}
    if config.family == "gpt_oss":  # without this field, transformers takes the published scaling
        fields["rope_parameters"] = {"rope_theta": theta, **(old or {"rope_type": "default"})}
    if config.family in KINDS_OF_ROPE:
        local_theta, local_scaling = scaling_of.get(True, (10_000.0, RopeScaling()))
        if config.family == "gemma3":
            fields["rope_local_base_freq"] = local_theta
        elif config.family == "gemma4":
            fields = {}
        fields["rope_parameters"] = {
            "full_attention": {"rope_theta": theta, **(old or {"rope_type": "default"})},
            "sliding_attention": {
                "rope_theta": local_theta,
                **(_scaling_fields(local_scaling) or {"rope_type": "default"}),
            },
        }
    return fields


def _scaling_fields(scaling: RopeScaling) -> dict[str, object]:
    if scaling.kind == "none":
        return {}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "proportional":
        stretch = {} if scaling.factor == 1 else {"factor": scaling.factor}
        return {"rope_type": "proportional", "partial_rotary_factor": scaling.turned, **stretch}
    if scaling.kind == "yarn":
        names = ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")
        fields = {name: getattr(scaling, name) for name in names}
        return {"rope_type": "yarn", **fields, "original_max_position_embeddings": scaling.original_length}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
