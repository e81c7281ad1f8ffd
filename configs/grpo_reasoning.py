"""GRPO on problems of reasoning-gym, scored by their dataset's own scorer; needs the extra [reasoning].

python -m podrl.launch --config=grpo_reasoning.py
python -m podrl.launch --config=grpo_reasoning.py --config.data.arguments.max_terms=3
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration, as plain data."""
    config = ConfigDict()
    config.algorithm = "grpo"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny"})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "reasoning_gym:chain_sum", "seed": 42, "size": 100_000})
    config.data.arguments = ConfigDict({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    config.grpo = ConfigDict({"num_generations": 8})
    config.rollout = ConfigDict({"prompts_per_step": 16, "max_prompt_length": 256, "max_tokens_to_generate": 64})
    config.reward = ConfigDict({"workers": 1})
    config.trainer = ConfigDict({"max_steps": 50, "eval_every_n_steps": 10, "learning_rate": 2e-4})
    config.eval = ConfigDict({"problems": 8, "samples": 2})  # of 11 held-out questions; more terms give more questions
    config.checkpoint = ConfigDict({"every": 10, "keep": 2})
    return config
