"""PPO on a Gemma model: a critic of its own, generalised advantages, the KL to the reference in the reward.

Default: the checkpoint that comes with podrl learns word problems on a CPU machine with 8 faked devices, 4 of them
training actor and critic (fsdp=4) and 4 generating (data=4).

    python -m podrl.launch --config=ppo_gemma.py
    python -m podrl.launch --config=ppo_gemma.py --config.model.critic=DIR     # a critic from another model
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration, as plain data."""
    config = ConfigDict()
    config.algorithm = "ppo"
    config.seed = 0
    config.fake_devices = 8  # CPU only; ignored where there is an accelerator
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny", "reference": "", "critic": ""})
    config.roles = ConfigDict({"colocated": False, "trainer": {"mesh": "auto"}, "rollout": {"mesh": "auto"}})
    config.data = ConfigDict({"path": "problems", "eval_path": "", "system_prompt": "auto", "seed": 42})
    config.ppo = ConfigDict({"num_generations": 1, "num_iterations": 1, "critic_warmup": 5, "beta": 0.01})
    config.ppo.clip_range_value = 0.5
    config.rollout = ConfigDict({"prompts_per_step": 128, "max_prompt_length": 0, "max_tokens_to_generate": 40})
    config.rollout.temperature = 1.0
    config.reward = ConfigDict({"fns": ("exact_format", "approximate_format", "answer", "number"), "workers": 1})
    config.trainer = ConfigDict({"max_steps": 80, "eval_every_n_steps": 40, "learning_rate": 2e-4})
    config.trainer.update({"critic_learning_rate": 3e-3, "max_grad_norm": 1.0, "b2": 0.99})
    config.eval = ConfigDict({"problems": 256, "samples": 4})
    config.checkpoint = ConfigDict({"every": 40, "keep": 2})
    config.log = ConfigDict({"samples_every": 10})
    return config
