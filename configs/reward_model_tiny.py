"""Trains a reward model on pairs of answers to one prompt, with one answer of each pair preferred (Bradley-Terry).

Default: the checkpoint that comes with podrl, with a new head, learns to score a solution in the task's tags above the
same solution as a base model might write it, on a CPU machine: held-out pairs ranked right 50.0 -> 100 %, in 30 steps.

    python -m podrl.launch --config=reward_model_tiny.py
    python -m podrl.export --workdir=runs/reward_model_tiny --out=scores
    python -m podrl.launch --config=grpo_gemma.py --config.reward.model=scores --config.reward.fns=answer
    python -m podrl.launch --config=reward_model_tiny.py --config.model.path=DIR --config.data.path=FILE

A line of FILE, a .jsonl: {"prompt": "...", "chosen": "...", "rejected": "..."}; data.eval_path holds held-out pairs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration, as plain data."""
    config = ConfigDict()
    config.algorithm = "reward_model"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny"})
    config.model.lora = ConfigDict({"rank": 0, "alpha": 16.0, "pattern": "q|k|v|o|gate|up|down", "dropout": 0.0})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "problems", "eval_path": "", "system_prompt": "auto", "seed": 42})
    config.reward_model = ConfigDict({"batch_size": 32, "max_length": 112})
    config.rollout = ConfigDict({"max_prompt_length": 64, "max_tokens_to_generate": 40})  # nothing is generated
    config.trainer = ConfigDict({"max_steps": 30, "eval_every_n_steps": 30, "learning_rate": 3e-4})
    config.trainer.update({"schedule": "constant", "max_grad_norm": 1.0, "b2": 0.99})
    config.eval = ConfigDict({"problems": 256})
    config.checkpoint = ConfigDict({"every": 30, "keep": 2})
    config.log = ConfigDict({"samples_every": 10})
    return config
