"""Trains the checkpoint that comes with podrl: a Gemma 2 of half a million parameters that solves some word problems.

First it learns to solve them in the reference form: reasoning and answer, each in its tags. In the last steps, most
targets lack some of the tags, like texts of a base model, so that reinforcement learning has something to find. From a
fixed seed, this command makes podrl/assets/tiny again, in tiny/ (about 10 minutes on 2 cores):

    python -m podrl.launch --config=sft_tiny.py && python -m podrl.export --workdir=runs/sft_tiny --out=tiny

The tokenizer comes from `python -m podrl.data.train_tokenizer --out=podrl/assets/tiny`.

Variants:
    sft_tiny.py:moe   a Qwen3-MoE of 643,000 parameters; two of its eight experts compute a token. Exported as
                      above with --out=tiny_moe, it resembles podrl/assets/tiny_moe, which grpo_gemma.py:moe trains.
                      The first 709 steps of the embedded checkpoint had slightly higher learning rates, because its
                      cosine schedule was made for 1,720 steps
    sft_tiny.py:hybrid   a Qwen 3.5 of 565,000 parameters: three layers of linear attention and one of full attention.
                      Exported as above with --out=tiny_hybrid, it became podrl/assets/tiny_hybrid, which
                      grpo_gemma.py:hybrid trains
"""

from ml_collections import ConfigDict

# Number of steps with all targets in the reference form, and of later steps in which most targets do not keep it.
STEPS = {"tiny": (1500, 220), "moe": (960, 160), "hybrid": (960, 160)}
VARIANTS = tuple(STEPS)


def get_config(variant: str = "tiny") -> ConfigDict:
    """Returns the configuration of a variant, as plain data."""
    if variant not in VARIANTS:
        raise ValueError(f"sft_tiny.py has no variant {variant!r}: use one of {', '.join(VARIANTS)}.")
    full_steps, mixed_steps = STEPS[variant]
    config = ConfigDict()
    config.algorithm = "sft"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "scratch"})
    if variant == "moe":
        config.scratch = ConfigDict({"experts": 8, "chosen": 2, "ffn_dim": 48})
    if variant == "hybrid":
        config.scratch = ConfigDict({"num_layers": 4, "linear": 3, "ffn_dim": 160})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "problems", "seed": 1})
    config.sft = ConfigDict({"batch_size": 64, "max_length": 96, "tagged_share": 0.12, "full_steps": full_steps})
    config.rollout = ConfigDict({"max_prompt_length": 64, "max_tokens_to_generate": 40})
    config.rollout.temperature = 0.9  # the distribution at this temperature learns the answers
    config.trainer = ConfigDict({"max_steps": full_steps + mixed_steps, "eval_every_n_steps": 500})
    config.trainer.update({"learning_rate": 3e-3, "schedule": "cosine", "warmup_fraction": 0.06, "end_fraction": 0.1})
    config.trainer.update(
        {
            "b2": 0.98,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "max_tokens_per_row": 128,
            "max_seq_token_per_tpu": 2048,
        }
    )
    config.eval = ConfigDict({"problems": 256, "samples": 4})
    config.checkpoint = ConfigDict({"every": 500})
    return config
