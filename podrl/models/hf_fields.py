"""The config.json fields that each model family reads, and the values that all other fields must have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrl.config import nearest
from podrl.mappings import JsonObject

# Fields of models with experts, each with the families whose models read the field.
EXPERT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("gemma4", "qwen3_moe", "qwen3_5_moe"),
    "n_routed_experts": ("glm4_moe",),
    "num_local_experts": ("gpt_oss", "mixtral", "qwen3_moe", "glm4_moe"),
    "num_experts_per_tok": ("gpt_oss", "mixtral", "qwen3_moe", "qwen3_5_moe", "glm4_moe"),
    "top_k_experts": ("gemma4",),
    "moe_intermediate_size": ("gemma4", "qwen3_moe", "qwen3_5_moe", "glm4_moe"),
    "norm_topk_prob": ("qwen3_moe", "glm4_moe"),
    "n_shared_experts": ("glm4_moe",),
    "routed_scaling_factor": ("glm4_moe",),
    "first_k_dense_replace": ("glm4_moe",),
    "use_qk_norm": ("glm4_moe",),
    "shared_expert_intermediate_size": ("qwen3_5_moe",),
}
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
PARTIAL_ROPE = (*QWEN3_5, "glm4_moe")  # rotary positions turn a part of each head
_GEMMA4 = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config")
# Fields of Gemma 4 for per-layer embeddings, and for layers that reuse the keys of other layers.
_SMALL = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
_CLAMPED = ("swiglu_limit", "swiglu_alpha")
# Fields of gpt-oss's published file that only repeat others: transformers reads the same values under other names.
_TWICE = ("experts_per_token", "initial_context_length")
_LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval"),
)
# Fields that podrl computes with.
COMPUTED = frozenset(
    (
        *EXPERT_FIELDS,
        *_GEMMA4,
        *_SMALL,
        *_LINEAR,
        *_TWICE,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "layer_types",
        "partial_rotary_factor",
        "use_sliding_window",
        "max_window_layers",
    )
)
# Fields that do not change the logits: provenance, token ids (which come from the tokenizer), sampling, caching.
_IGNORABLE = frozenset(
    (
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "_name_or_path",
        "cache_implementation",
        "pretraining_tp",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "tokenizer_class",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "max_length",
        "min_length",
        "num_beams",
        "repetition_penalty",
        "chunk_size_feed_forward",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "use_return_dict",
        "bad_words_ids",
        "length_penalty",
        "output_router_logits",
        "mamba_ssm_dtype",  # type of the states, which are float32 in podrl
        "num_nextn_predict_layers",  # layers that predict further tokens; podrl does not load their tensors
        "num_mtp_layers",
        "mtp_num_hidden_layers",  # layers that predict further tokens; podrl does not load their tensors
        "mtp_use_dedicated_embeddings",
        "router_aux_loss_coef",  # coefficient of the balance loss in training; podrl reads trainer.balance_coef instead
    )
)
# Fields that change the mathematics, each with the values that podrl computes.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "enable_moe_block": (False, None),
    "swiglu_limit": (7.0, None),
    "swiglu_alpha": (1.702, None),
    "quantization_config": (None,),
    "attn_output_gate": (True, None),  # a field of Qwen 3.5, whose attention podrl computes with the gate
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "decoder_sparse_step": (1, None),  # every layer has experts
    "mlp_only_layers": ([], None),
    "router_jitter_noise": (0, 0.0, None),
    "n_group": (1, None),  # podrl chooses experts among all experts, not group by group
    "topk_group": (1, None),
}
# Further values of these fields that podrl computes, but only for the named family.
_FIXED_OF: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    # In Gemma 4, use_bidirectional_attention changes only tokens of images. In Gemma 3 it changes all tokens.
    "gemma4": {"use_bidirectional_attention": ("vision",), "enable_moe_block": (True,)},
    "gpt_oss": {"attention_bias": (True,)},
    "glm4_moe": {"attention_bias": (True,)},
}
_GEMMA23 = ("gemma2", "gemma3")
_GEMMA234 = (*_GEMMA23, "gemma4")
_QWEN = ("qwen2", "qwen3")
KINDS_OF_ROPE = ("gemma3", "gemma4", "olmo3")  # rotary settings differ between layers with and without a window
# For each field, the families whose models in transformers read it. All families read a field that is not listed.
_READERS: Mapping[str, tuple[str, ...]] = {
    "attn_logit_softcapping": ("gemma2",),  # Gemma 3 stores the field but does not use it
    "final_logit_softcapping": _GEMMA234,
    "query_pre_attn_scalar": _GEMMA23,
    "rope_local_base_freq": ("gemma3",),
    "hidden_activation": _GEMMA234,
    "hidden_act": ("gemma", "llama", "mistral", "mixtral", "olmo3", "qwen3_moe", *PARTIAL_ROPE, *_QWEN),
    "layer_types": (*_GEMMA234, *_QWEN, *QWEN3_5, "gpt_oss", "olmo3"),
    "partial_rotary_factor": PARTIAL_ROPE,
    "sliding_window": (*_GEMMA234, *_QWEN, "gpt_oss", "mistral", "mixtral", "olmo3", "qwen3_moe"),
    "sliding_window_pattern": ("gemma3",),
    "_sliding_window_pattern": (),
    "use_sliding_window": (*_QWEN, "qwen3_moe"),
    "max_window_layers": _QWEN,
    **dict.fromkeys((*_GEMMA4, *_SMALL), ("gemma4",)),
    **dict.fromkeys(_LINEAR, QWEN3_5),
    **dict.fromkeys(_CLAMPED, ("gpt_oss",)),
    **EXPERT_FIELDS,
}


# Bounds of counts and of numbers: no model exceeds them, and beyond them arithmetic might overflow.
_MOST, _LARGEST = 1 << 30, 1e30


def _count(key: str, value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(f"{where} has {key}={value!r}: it must be a whole number above 0 (and at most {_MOST}).")


def _layers(key: str, value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where} has {key}={value!r}: it must be a number of layers, 0 or more.")


def _width(key: str, value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{where} has {key}={value!r}: it must be a whole number, 0 or more (and at most {_MOST}).")


def _number(key: str, value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{where} has {key}={value!r}: it must be a number, not negative, at most {_LARGEST:g}.")


def _positive(key: str, value: object, where: str) -> None:
    _number(key, value, where)
    if value == 0:
        raise ValueError(f"{where} has {key}={value!r}: it must be above 0.")


def _flag(key: str, value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{where} has {key}={value!r}: it must be true or false.")


def _text(key: str, value: object, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where} has {key}={value!r}: it must be a string.")


def _texts(key: str, value: object, where: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{where} has {key}={value!r}: it must be a list of strings.")


def _rope(key: str, value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} has {key}={value!r}: it must be an object with rope_type and that type's fields.")
    for name, inner in value.items():
        if name in ("full_attention", "sliding_attention"):
            _rope(f"{key}.{name}", inner, where)
        elif name in ("rope_type", "type"):
            _text(f"{key}.{name}", inner, where)
        elif name == "truncate" and inner is not None:
            _flag(f"{key}.{name}", inner, where)
        elif name in _ROPE_NUMBERS and inner is not None:
            _positive(f"{key}.{name}", inner, where)


def _overrides(key: str, value: object, where: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(layer, Mapping) for layer in value.values()):
        raise ValueError(f"{where} has {key}={value!r}: it must be an object of objects, one for each layer it names.")
    for layer, fields in value.items():
        for name, inner in fields.items():
            _count(f"{key}.{layer}.{name}", inner, where)


_ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
_TYPES: Mapping[str, Callable[[str, object, str], None]] = {
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
            *("sliding_window_pattern", "_sliding_window_pattern"),
            *("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input"),
            *_LINEAR,
            *_TWICE,
            *("num_experts", "num_local_experts", "num_experts_per_tok", "top_k_experts", "moe_intermediate_size"),
            *("shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts"),
        ),
        _count,
    ),
    **dict.fromkeys(("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping"), _number),
    **dict.fromkeys(
        (
            "rope_theta",
            "rope_local_base_freq",
            "query_pre_attn_scalar",
            "partial_rotary_factor",
            "routed_scaling_factor",
        ),
        _positive,
    ),
    **dict.fromkeys(
        (
            *("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "attention_k_eq_v", "use_qk_norm"),
            "use_double_wide_mlp",
        ),
        _flag,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _text),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _rope),
    "layer_types": _texts,
    **dict.fromkeys(("max_window_layers", "first_k_dense_replace", "num_kv_shared_layers"), _layers),
    "hidden_size_per_layer_input": _width,
    "per_layer_config": _overrides,
}


def refuse_unknown(family: str, fields: Mapping[str, object], where: str) -> None:
    """Refuses fields that podrl does not know, values that it does not compute, and values of the wrong type.

    Args:
      family: family of the model, a key of `podrl.models.hf_config.FAMILIES`.
      fields: fields of the config.json.
      where: name of the file in messages.

    Raises:
      ValueError: a field is refused; the message names it.
    """
    for key, value in fields.items():
        if key == "quantization_config" and family == "gpt_oss" and _mxfp4(value):
            continue  # this field tells how weights are stored, which the tensors' names also tell
        if key in _FIXED:
            if value not in (*_FIXED[key], *_FIXED_OF.get(family, {}).get(key, ())):
                raise ValueError(
                    f"{where} has {key}={value!r}, which podrl does not compute: it must be {_FIXED[key][0]!r}."
                )
        elif key not in COMPUTED and key not in _IGNORABLE:
            raise ValueError(
                f"{where} has the field {key}={value!r}, which podrl does not know: it may change the mathematics. "
                f"If it does not, delete it from the file.{nearest(key, COMPUTED)}"
            )
        elif key in _TYPES and value is not None:
            _TYPES[key](key, value, where)


def _mxfp4(value: object) -> bool:
    known = {"quant_method", "modules_to_not_convert", "dequantize"}
    return isinstance(value, Mapping) and value.get("quant_method") == "mxfp4" and set(value) <= known


def reads(family: str, key: str) -> bool:
    """True if the family's model in transformers reads the field `key`."""
    return family in _READERS.get(key, (family,))


def refuse_unread(
    family: str,
    fields: JsonObject,
    *,
    head_dim: int,
    theta_L: Sequence[float],
    activation: str,
    sliding: Sequence[bool],
    original: int,
    where: str,
) -> None:
    """Refuses fields that the family's model ignores, unless their value agrees with what the model computes.

    Args:
      family: family of the model, a key of `podrl.models.hf_config.FAMILIES`.
      fields: fields of the config.json.
      head_dim, theta_L, sliding: head dimension, rotary bases and sliding layers of the model.
      activation: name of the model's activation, as the file spells it.
      original: context length of pre-training that the scaling of rotary positions starts from, tokens.
      where: name of the file in messages.

    Raises:
      ValueError: a field is refused; the message names it.
    """

    def agrees(key: str, value: Any) -> bool:
        if key in EXPERT_FIELDS or key in _GEMMA4 or key in _LINEAR or key in _CLAMPED:
            return False
        if key in _SMALL:
            return not value or key == "vocab_size_per_layer_input"
        if key in ("attn_logit_softcapping", "final_logit_softcapping"):
            return value == 0
        if key == "partial_rotary_factor":
            return value == 1
        if key == "query_pre_attn_scalar":
            return value == head_dim
        if key == "rope_local_base_freq":
            return set(theta_L) == {value}
        if key in ("hidden_act", "hidden_activation"):
            # Early Gemma files say gelu but mean the tanh form.
            return value == activation or (family.startswith("gemma") and value == "gelu")
        if key == "layer_types":
            return [kind == "sliding_attention" for kind in value] == list(sliding)
        if key == "use_sliding_window":
            return value == any(sliding)
        if key == "sliding_window" or not any(sliding):
            return not any(sliding) and key != "sliding_window"
        if key == "max_window_layers":
            return value == 0 and all(sliding)
        # sliding_window_pattern says that every n-th layer is not sliding. A family that reads layer_types ignores the
        # pattern if the file has layer_types.
        listed = reads(family, "layer_types") and fields.get("layer_types") is not None
        return listed or [bool((i + 1) % value) for i in range(len(sliding))] == list(sliding)

    originals = {"num_experts_per_tok": fields.get("num_experts_per_tok"), "rope_scaling": original}
    for key, other in zip(_TWICE, originals, strict=True):
        if fields.get(key) not in (None, originals[other]):
            raise ValueError(
                f"{where} has {key}={fields[key]!r}, but {other} says {originals[other]!r}: they must be the same."
            )
    for key, value in fields.items():
        if key not in _TWICE and value is not None and not reads(family, key) and not agrees(key, value):
            raise ValueError(
                f"{where} has {key}={value!r}, which a {family} model does not use: the model may then compute "
                "something else than its authors meant. If the key changes nothing, delete it from the file."
            )
