"""GRPO on GSM8K with the Qwen 3 and 3.5 models, from 0.6B to 35B with experts; all weights are trained.

No variant has been run on its machine. docs/measurements/planning.md has what podrl.plan counted for each.

    python -m podrl.launch --config=grpo_qwen.py:qwen3_4b_v6e16 --config.model.path=DIR --config.data.path=train.jsonl

Variants, most of them on two slices (one slice trains, the other generates):
    qwen3_06b_v6e8        0.6B on one v6e-8 host: four chips train, four generate
    qwen3_17b_v6e8        1.7B on the same machine
    qwen3_4b_v6e16        4B on two v6e 2x4 slices
    qwen3_8b_v5p16        8B on two v5p 2x2x2 slices
    qwen3_8b_v6e32        8B on two v6e 4x4 slices
    qwen3_14b_v6e32       14B on two v6e 4x4 slices
    qwen3_32b_v5p32       32B on two v5p 2x2x4 slices
    qwen3_30b_a3b_v5p32   30B-A3B on two v5p 2x2x4 slices; each of four chips holds a quarter of the experts
    qwen3_30b_a3b_v6e64   30B-A3B on two v6e 4x8 slices
    qwen35_08b_v6e8       Qwen 3.5 0.8B on one v6e-8 host
    qwen35_2b_v6e8        2B on the same machine
    qwen35_4b_v6e16       4B on two v6e 2x4 slices
    qwen35_9b_v6e32       9B on two v6e 4x4 slices
    qwen35_27b_v5p32      27B on two v5p 2x2x4 slices
    qwen35_35b_a3b_v5p32  35B-A3B on two v5p 2x2x4 slices; each of four chips holds a quarter of the experts
"""

from typing import Any

from ml_collections import ConfigDict

# Published size, chips of each side, and the meshes of trainer and rollout.
_JOBS = {
    "qwen3_06b_v6e8": ("qwen3-0.6b", 4, "fsdp=4", "data=4"),
    "qwen3_17b_v6e8": ("qwen3-1.7b", 4, "fsdp=4", "data=4"),
    "qwen3_4b_v6e16": ("qwen3-4b", 8, "fsdp=8", "data=4,tensor=2"),
    "qwen3_8b_v5p16": ("qwen3-8b", 8, "fsdp=8", "data=2,tensor=4"),
    "qwen3_8b_v6e32": ("qwen3-8b", 16, "fsdp=16", "data=4,tensor=4"),
    "qwen3_14b_v6e32": ("qwen3-14b", 16, "fsdp=16", "data=4,tensor=4"),
    "qwen3_32b_v5p32": ("qwen3-32b", 16, "fsdp=16", "data=4,tensor=4"),
    "qwen3_30b_a3b_v5p32": ("qwen3-30b-a3b", 16, "fsdp=4,expert=4", "data=4,expert=4"),
    "qwen3_30b_a3b_v6e64": ("qwen3-30b-a3b", 32, "fsdp=8,expert=4", "data=4,expert=8"),
    "qwen35_08b_v6e8": ("qwen3.5-0.8b", 4, "fsdp=4", "data=4"),
    "qwen35_2b_v6e8": ("qwen3.5-2b", 4, "fsdp=4", "data=4"),
    "qwen35_4b_v6e16": ("qwen3.5-4b", 8, "fsdp=8", "data=4,tensor=2"),
    "qwen35_9b_v6e32": ("qwen3.5-9b", 16, "fsdp=16", "data=4,tensor=4"),
    "qwen35_27b_v5p32": ("qwen3.5-27b", 16, "fsdp=16", "data=4,tensor=4"),
    "qwen35_35b_a3b_v5p32": ("qwen3.5-35b-a3b", 16, "fsdp=4,expert=4", "data=4,expert=4"),
}
VARIANTS = tuple(_JOBS)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the configuration of a variant, as plain data."""
    if not variant:
        raise ValueError(f"grpo_qwen.py has no default: write grpo_qwen.py:VARIANT, with one of {', '.join(VARIANTS)}.")
    if variant not in VARIANTS:
        raise ValueError(f"grpo_qwen.py has no variant {variant!r}: use one of {', '.join(VARIANTS)}.")
    size, chips, trainer, rollout = _JOBS[variant]
    prompts = max(16, chips)  # at least one group for each chip that trains
    config: Any = ConfigDict()  # a type checker does not know a ConfigDict's keys
    config.algorithm = "grpo"
    config.seed = 0
    config.fake_devices = 2 * chips  # for --dry_run on a laptop
    config.compile_cache = "auto"
    config.model = ConfigDict({"path": "", "size": size})
    config.roles = ConfigDict({"colocated": False, "trainer": {"mesh": trainer}, "rollout": {"mesh": rollout}})
    config.data = ConfigDict(
        {"path": "train.jsonl", "system_prompt": "auto", "template": "chat", "long_prompts": "skip"}
    )
    config.grpo = ConfigDict({"num_generations": 8, "beta": 0.0})  # without a KL term, no reference model is in memory
    config.rollout = ConfigDict({"prompts_per_step": prompts, "max_prompt_length": 256, "max_tokens_to_generate": 512})
    config.rollout.update({"temperature": 1.0, "data_type": "bfloat16", "kv_cache_size": 1024, "lanes": 8 * prompts})
    config.trainer = ConfigDict({"max_steps": 7200 // prompts, "eval_every_n_steps": 50, "learning_rate": 1e-6})
    config.trainer.update({"schedule": "cosine", "warmup_fraction": 0.05, "max_grad_norm": 0.1, "dtype": "bfloat16"})
    config.trainer.update({"micro_batch_sequences": chips, "remat": "full"})
    config.eval = ConfigDict({"problems": 256, "samples": 1})
    config.checkpoint = ConfigDict({"every": 25, "keep": 3})
    return config
