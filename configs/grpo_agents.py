"""GRPO of an agent program, which asks the model over HTTP and has a calculator of its own.

Default: the program podrl/environments/sums_agent.py, the checkpoint that comes with podrl, and the sums of
configs/grpo_tools.py, on a CPU machine with 2 cores: greedy answers 0 -> 83 %, sampled 11 -> 55 % (64 sums, seed 0). It
needs the extra [agents].

    python -m podrl.launch --config=grpo_agents.py
    python -m podrl.launch --config=grpo_agents.py --config.env.program='python agent.py'     # a program of your own
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration, as plain data."""
    config = ConfigDict()
    config.algorithm = "grpo"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny_tools"})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "sums", "seed": 42})
    config.env = ConfigDict({"program": "python -m podrl.environments.sums_agent", "processes": 16})
    config.grpo = ConfigDict({"num_generations": 8, "loss_agg_mode": "sequence-mean-token-mean", "beta": 0.0})
    config.rollout = ConfigDict({"prompts_per_step": 16, "max_prompt_length": 48})
    # Largest numbers of tokens in all requests of an episode together: first all tokens after the prompt, then the
    # sampled tokens alone.
    config.rollout.update({"max_response_tokens": 144, "max_tokens_to_generate": 56, "temperature": 1.0})
    config.reward = ConfigDict({"fns": ("number",), "workers": 1})
    config.trainer = ConfigDict({"max_steps": 20, "eval_every_n_steps": 20, "learning_rate": 2e-4})
    config.trainer.update({"schedule": "constant", "max_grad_norm": 1.0, "b2": 0.99, "max_seq_token_per_tpu": 2048})
    config.eval = ConfigDict({"problems": 64, "samples": 1})
    config.checkpoint = ConfigDict({"every": 20, "keep": 2})
    config.log = ConfigDict({"samples_every": 10})
    return config
