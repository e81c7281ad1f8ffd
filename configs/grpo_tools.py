"""GRPO with a tool: sums too large for mental arithmetic, and a calculator.

Default: the checkpoint that comes with podrl (configs/sft_tools.py makes it) can ask a calculator and rarely does.
GRPO teaches it to ask, on a CPU machine with 2 cores: greedy answers 0 -> 83 %, sampled 9 -> 72 %, in under 3 minutes.

    python -m podrl.launch --config=grpo_tools.py
    python -m podrl.launch --config=grpo_tools.py --config.env.max_tool_calls=0      # a control: no call is answered

Variants:
    grpo_tools.py:mcp       the same calculator as an MCP server over stdio (extra [tools]); the results are equal
    grpo_tools.py:mixture   three sources in one update: RL with the calculator; a cross-entropy on the calculator's
                            answers; and sums without the calculator, on which the policy is its own teacher and the
                            teacher reads the answer
"""

from ml_collections import ConfigDict

VARIANTS = ("python", "mcp", "mixture")


def get_config(variant: str = "python") -> ConfigDict:
    """Returns the configuration of a variant, as plain data."""
    if variant not in VARIANTS:
        raise ValueError(f"grpo_tools.py has no variant {variant!r}: use one of {', '.join(VARIANTS)}.")
    config = ConfigDict()
    config.algorithm = "grpo"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny_tools"})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "sums", "seed": 42})
    config.env = ConfigDict({"environment": "tools", "tools": ("calculator",), "mcp": (), "max_tool_calls": 2})
    if variant == "mcp":
        config.env.update({"tools": (), "mcp": ("python -m podrl.environments.calculator_server",)})
    if variant == "mixture":
        observed = {"reward_coef": 0.0, "observation_coef": 0.1}
        taught = {"reward_coef": 0.0, "teacher_coef": 0.1}
        config.data.sources = (
            {"path": "sums", "weight": 2.0, "grpo": {"policy_loss_fn": "ipo", "epsilon": 0.1}},
            {"path": "sums", "name": "observed", "weight": 1.0, "grpo": observed},
            {"path": "sums", "name": "by_heart", "weight": 1.0, "env": "none", "hint": "{answer}", "grpo": taught},
        )
        config.env.others = ("none",)
    config.grpo = ConfigDict({"num_generations": 8, "loss_agg_mode": "sequence-mean-token-mean", "beta": 0.0})
    if variant == "mixture":
        config.grpo.update({"teacher": "initial", "teacher_hint_tokens": 16})
    config.rollout = ConfigDict({"prompts_per_step": 16, "max_prompt_length": 48})
    # Largest number of tokens of a response, and of tokens that the model samples; the other tokens come from the
    # calculator.
    config.rollout.update({"max_response_tokens": 88, "max_tokens_to_generate": 56, "temperature": 1.0})
    # With these weights a sample gets 1.5 for the right answer, and each failed call costs a tenth of 1.5.
    config.reward = ConfigDict({"fns": ("number", "failed_calls"), "weights": (1.0, 0.15), "workers": 1})
    config.trainer = ConfigDict({"max_steps": 60, "eval_every_n_steps": 20, "learning_rate": 2e-4})
    config.trainer.update({"schedule": "constant", "max_grad_norm": 1.0, "b2": 0.99, "max_seq_token_per_tpu": 2048})
    config.eval = ConfigDict({"problems": 256, "samples": 2})
    config.checkpoint = ConfigDict({"every": 60, "keep": 2})
    config.log = ConfigDict({"samples_every": 10})
    return config
