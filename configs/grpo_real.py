"""GRPO on GSM8K: adapters of published models on machines that one can rent; docs/real-model.md goes through them.

No variant has been run on its machine. grpo_qwen.py trains all weights of larger models.

    python -m podrl.launch --config=grpo_real.py:qwen3_06b_gpu --config.model.path=DIR --config.data.path=train.jsonl

Variants:
    gemma4_e4b_v5e16  Gemma 4 E4B on one v5e 4x4 slice: hosts 0 and 1 train, hosts 2 and 3 generate
    gemma3_4b_v5e16   Gemma 3 4B on the same machine
    qwen3_06b_gpu     Qwen 3 0.6B on one GPU that trains and generates in turn
    qwen3_06b_v6e8    Qwen 3 0.6B on one v6e-8 host: four chips train, four generate
"""

from typing import Any

from ml_collections import ConfigDict

_V5E16 = {"gemma4_e4b_v5e16": "gemma4-e4b", "gemma3_4b_v5e16": "gemma3-4b"}
VARIANTS = (*_V5E16, "qwen3_06b_gpu", "qwen3_06b_v6e8")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the configuration of a variant, as plain data."""
    if not variant:
        raise ValueError(f"grpo_real.py has no default: write grpo_real.py:VARIANT, with one of {', '.join(VARIANTS)}.")
    if variant not in VARIANTS:
        raise ValueError(f"grpo_real.py has no variant {variant!r}: use one of {', '.join(VARIANTS)}.")
    config: Any = _gsm8k()  # a type checker does not know a ConfigDict's keys
    if variant in _V5E16:
        config.model.size = _V5E16[variant]
        config.fake_devices = 16  # for --dry_run on a laptop
        config.roles.update({"trainer": {"mesh": "fsdp=8"}, "rollout": {"mesh": "data=4,tensor=2"}})
        config.trainer.update({"train_micro_batch_size": 2, "remat": "full"})
    elif variant == "qwen3_06b_gpu":
        config.fake_devices = 1
        config.roles.colocated = True
        config.trainer.update({"train_micro_batch_size": 2, "remat": "full"})
    else:
        config.fake_devices = 8
        config.roles.update({"trainer": {"mesh": "fsdp=4"}, "rollout": {"mesh": "data=4"}})
        config.trainer.update({"train_micro_batch_size": 4})
    return config


def _gsm8k() -> ConfigDict:
    """Returns the base of all variants: one pass over the 7,473 problems of GSM8K, 16 at a time with 8 samples each."""
    config = ConfigDict()
    config.algorithm = "grpo"
    config.seed = 0
    config.compile_cache = "auto"
    config.model = ConfigDict({"path": "", "size": "qwen3-0.6b"})
    config.model.lora = ConfigDict({"rank": 64, "alpha": 64.0, "pattern": "q|k|v|o|gate|up|down", "dropout": 0.0})
    config.roles = ConfigDict({"colocated": False})
    config.data = ConfigDict(
        {"path": "train.jsonl", "system_prompt": "auto", "template": "chat", "long_prompts": "skip"}
    )
    config.grpo = ConfigDict({"num_generations": 8, "beta": 0.04})
    config.rollout = ConfigDict({"prompts_per_step": 16, "max_prompt_length": 256, "max_tokens_to_generate": 512})
    config.rollout.update({"temperature": 1.0, "data_type": "bfloat16", "kv_cache_size": 1024, "lanes": 128})
    config.trainer = ConfigDict({"max_steps": 450, "eval_every_n_steps": 50, "learning_rate": 1e-5})
    config.trainer.update({"schedule": "cosine", "warmup_fraction": 0.05, "max_grad_norm": 0.1, "dtype": "bfloat16"})
    config.eval = ConfigDict({"problems": 256, "samples": 1})
    config.checkpoint = ConfigDict({"every": 25, "keep": 3})
    return config
