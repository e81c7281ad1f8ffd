"""GRPO on a Gemma model.

Default: the checkpoint that comes with podrl learns word problems on a CPU machine with 2 faked devices, which train
(fsdp=2) and generate (data=2) in turn. The variants moe, hybrid and async have 8 faked devices: 4 train (fsdp=4), and
4 generate (data=4).

    python -m podrl.launch --config=grpo_gemma.py
    python -m podrl.launch --config=grpo_gemma.py --config.data.path=gsm8k_train.jsonl --config.model.path=DIR

Variants:
    grpo_gemma.py:lora              adapters only, the same task
    grpo_gemma.py:moe               all weights of a small Qwen3-MoE that comes with podrl, the same task; the trainer
                                    uses the experts that the sampler chose (docs/models.md)
    grpo_gemma.py:hybrid            all weights of a small Qwen 3.5 that comes with podrl, the same task: three layers
                                    of linear attention and one of full attention
    grpo_gemma.py:async             two batches in flight, and the decoupled loss that is meant for them (docs/async.md)
    grpo_gemma.py:gemma2_2b_v5e16   Gemma 2 2B on GSM8K with LoRA, trainer and rollout on 8 TPU v5e chips each: numbers
                                    of Tunix's recipe, words of podrl (docs/from-tunix.md); needs
                                    --config.model.path=DIR and --config.data.path=FILE

Variants that train all weights of Gemma 4 on GSM8K, on two slices: one slice trains, the other generates. They need the
same two paths. None has been run on its machine; docs/measurements/planning.md has what podrl.plan counted for each.
    grpo_gemma.py:gemma4_e2b_v6e16      E2B on two v6e 2x4 slices
    grpo_gemma.py:gemma4_e4b_v6e16      E4B on two v6e 2x4 slices
    grpo_gemma.py:gemma4_26b_a4b_v5p32  26B-A4B on two v5p 2x2x4 slices; each of four chips holds a quarter of the
                                        experts
    grpo_gemma.py:gemma4_31b_v5p32      31B on two v5p 2x2x4 slices
"""

from typing import Any

from ml_collections import ConfigDict

# Published size, chips of each side, and the meshes of trainer and rollout.
_GEMMA4 = {
    "gemma4_e2b_v6e16": ("gemma4-e2b", 8, "fsdp=8", "data=4,tensor=2"),
    "gemma4_e4b_v6e16": ("gemma4-e4b", 8, "fsdp=8", "data=4,tensor=2"),
    "gemma4_26b_a4b_v5p32": ("gemma4-26b-a4b", 16, "fsdp=4,expert=4", "data=4,expert=4"),
    "gemma4_31b_v5p32": ("gemma4-31b", 16, "fsdp=16", "data=4,tensor=4"),
}
VARIANTS = ("tiny", "lora", "moe", "hybrid", "async", "gemma2_2b_v5e16", *_GEMMA4)


def get_config(variant: str = "tiny") -> ConfigDict:
    """Returns the configuration of a variant, as plain data."""
    if variant not in VARIANTS:
        raise ValueError(f"grpo_gemma.py has no variant {variant!r}: use one of {', '.join(VARIANTS)}.")
    config: Any = _tiny()  # a type checker does not know a ConfigDict's keys
    if variant in ("tiny", "lora"):
        config.fake_devices, config.roles.colocated = 2, True  # on two cores faster than eight devices
    if variant == "lora":
        config.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "pattern": "q|k|v|o|gate|up|down", "dropout": 0.0})
        config.trainer.learning_rate = 2e-3
    if variant in ("moe", "hybrid"):
        config.model.path = f"tiny_{variant}"
    if variant == "async":
        config.grpo.update({"max_staleness": 2, "old_logprob": "trainer", "sampler_correction": "tis"})
    if variant == "gemma2_2b_v5e16":
        _gemma2_2b(config)
    if variant in _GEMMA4:
        _gemma4(config, *_GEMMA4[variant])
    return config


def _tiny() -> ConfigDict:
    config = ConfigDict()
    config.algorithm = "grpo"
    config.seed = 0
    config.fake_devices = 8  # CPU only; ignored where there is an accelerator
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny", "size": "", "reference": ""})
    config.model.lora = ConfigDict({"rank": 0, "alpha": 16.0, "pattern": "q|k|v|o|gate|up|down", "dropout": 0.0})
    config.roles = ConfigDict({"colocated": False, "trainer": {"mesh": "auto"}, "rollout": {"mesh": "auto"}})
    config.data = ConfigDict({"path": "problems", "eval_path": "", "system_prompt": "auto", "seed": 42})
    config.data.template = "chat"
    config.data.long_prompts = "skip"
    config.grpo = ConfigDict({"num_generations": 8, "num_iterations": 1, "max_staleness": 0})
    # max_prompt_length 0 is the longest prompt of the data.
    config.rollout = ConfigDict({"prompts_per_step": 16, "max_prompt_length": 0, "max_tokens_to_generate": 40})
    config.rollout.temperature = 1.0
    config.rollout.members_per_read = 8  # one read of a prompt's page serves all samples of a group
    config.reward = ConfigDict(
        {
            "fns": ("exact_format", "approximate_format", "answer", "number"),
            "weights": (),
            "deadline_s": 30.0,
            "workers": 1,
        }
    )
    config.trainer = ConfigDict(
        {"max_steps": 120, "eval_every_n_steps": 40, "learning_rate": 2e-4, "schedule": "constant"}
    )
    config.trainer.max_grad_norm = 1.0
    config.trainer.b2 = 0.99
    config.eval = ConfigDict({"problems": 256, "samples": 4})
    config.checkpoint = ConfigDict({"every": 40, "keep": 2})
    config.log = ConfigDict({"to": ("tensorboard",), "samples_every": 10, "stall_s": 900.0})
    return config


def _gemma2_2b(config: Any) -> None:
    """Sets sizes and rates of Tunix's GSM8K recipe for Gemma 2 2B, on 16 chips: two v5e 2x4 slices.

    The recipe trains for one epoch, two prompts a step. The prompt asks for the same tags in podrl's own words. For the
    recipe's words, set data.system_prompt to SYSTEM_PROMPT of tunix/examples/data/math_dataset.py; docs/from-tunix.md
    has the command, what else is podrl's own, and the numbers of Tunix's other publications.
    """
    config.model.path = ""
    config.model.size = "gemma2-2b"  # for podrl.plan, which needs no weights
    config.fake_devices = 16  # for --dry_run on a laptop
    config.model.lora = ConfigDict({"rank": 64, "alpha": 64.0, "pattern": "q|k|v|o|gate|up|down", "dropout": 0.0})
    config.roles.trainer.mesh = "fsdp=4,tensor=2"
    config.roles.rollout.mesh = "data=4,tensor=2"
    config.data.path = "gsm8k_train.jsonl"
    config.data.system_prompt = "auto"
    config.grpo.update({"num_generations": 4, "num_iterations": 1, "beta": 0.08, "epsilon": 0.2})
    config.grpo.loss_agg_mode = "sequence-mean-token-mean"
    config.rollout.update({"prompts_per_step": 2, "max_prompt_length": 256, "max_tokens_to_generate": 512})
    config.rollout.update(
        {"temperature": 0.9, "top_p": 1.0, "top_k": 50, "data_type": "bfloat16", "kv_cache_size": 1024}
    )
    config.rollout.members_per_read = 4  # one read of a prompt's page serves all samples of a group
    config.trainer = ConfigDict(
        # GSM8K has 7,473 problems to train on: all of them once.
        {"max_steps": 3738, "eval_every_n_steps": 500, "learning_rate": 3e-6, "schedule": "cosine"}
    )
    config.trainer.update({"warmup_fraction": 0.1, "b1": 0.9, "b2": 0.99, "weight_decay": 0.1, "max_grad_norm": 0.1})
    config.trainer.update({"train_micro_batch_size": 2, "dtype": "bfloat16", "remat": "full"})
    config.checkpoint.update({"every": 500, "keep": 4})


def _gemma4(config: Any, size: str, chips: int, trainer: str, rollout: str) -> None:
    """Sets GRPO on GSM8K for all weights of a Gemma 4: one pass over the problems, 16 at a time with 8 samples each."""
    config.model.update({"path": "", "size": size})  # podrl.plan needs no weights
    config.fake_devices = 2 * chips  # for --dry_run on a laptop
    config.roles = ConfigDict({"colocated": False, "trainer": {"mesh": trainer}, "rollout": {"mesh": rollout}})
    config.data.path = "gsm8k_train.jsonl"
    config.grpo.update({"num_generations": 8, "beta": 0.0})  # without a KL term, no reference model is in memory
    config.rollout.update({"prompts_per_step": 16, "max_prompt_length": 256, "max_tokens_to_generate": 512})
    config.rollout.update({"data_type": "bfloat16", "kv_cache_size": 1024, "lanes": 128})
    config.trainer = ConfigDict({"max_steps": 450, "eval_every_n_steps": 50, "learning_rate": 1e-6})
    config.trainer.update({"schedule": "cosine", "warmup_fraction": 0.05, "max_grad_norm": 0.1, "dtype": "bfloat16"})
    config.trainer.update({"micro_batch_sequences": chips, "remat": "full"})
    config.eval.update({"problems": 256, "samples": 1})
    config.checkpoint.update({"every": 25, "keep": 3})
