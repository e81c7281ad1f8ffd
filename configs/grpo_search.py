"""GRPO with a search server: questions that a model cannot know, and cited answers. DR-Tulu's task in small.

Default: the checkpoint that comes with podrl (configs/sft_search.py makes it) can search and cite, but mostly
guesses the answer without a search. The search server, podrl/environments/search_server.py, starts with the job (extra
[tools]). The job rewards the right number, citations that their documents support, and the format.
docs/from-dr-tulu.md has the results.

    python -m podrl.launch --config=grpo_search.py
    python -m podrl.launch --config=grpo_search.py --config.env.max_tool_calls=0     # a control: no call is answered

Variants:
    grpo_search.py:prompted     for a model of your own, with podrl's search and citation prompt before each question:
                                add --config.model.path=DIR --config.data.path=FILE, your server in --config.env.mcp,
                                and for a judge --config.reward.fns=rubric,citations,citation_format
"""

import pathlib

from ml_collections import ConfigDict

import podrl

VARIANTS = ("small", "prompted")


def get_config(variant: str = "small") -> ConfigDict:
    """Returns the configuration of a variant, as plain data."""
    if variant not in VARIANTS:
        raise ValueError(f"grpo_search.py has no variant {variant!r}: use one of {', '.join(VARIANTS)}.")
    config = ConfigDict()
    config.algorithm = "grpo"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny_search"})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "facts", "seed": 42})
    config.env = ConfigDict({"environment": "tools", "mcp": ("python -m podrl.environments.search_server",)})
    small = {"snippet_search": {"limit": 1}}  # one document in the answer of a search
    config.env.update({"max_tool_calls": 2, "arguments": small if variant == "small" else {}})
    config.grpo = ConfigDict({"num_generations": 8, "loss_agg_mode": "sequence-mean-token-mean", "beta": 0.0})
    config.rollout = ConfigDict({"prompts_per_step": 8, "max_prompt_length": 32})
    # Largest number of tokens of a response, and of tokens that the model samples; the other tokens come from the
    # server.
    config.rollout.update({"max_response_tokens": 128, "max_tokens_to_generate": 48, "temperature": 1.0})
    # With these weights a sample gets 1.5 for the right number, up to 0.5 for citations and up to 0.2 for the format.
    config.reward = ConfigDict({"fns": ("number", "citations", "citation_format"), "weights": (1.0, 0.5, 0.2)})
    config.reward.workers = 1
    config.trainer = ConfigDict({"max_steps": 40, "eval_every_n_steps": 20, "learning_rate": 2e-4})
    config.trainer.update({"schedule": "constant", "max_grad_norm": 1.0, "b2": 0.99, "max_seq_token_per_tpu": 2048})
    config.eval = ConfigDict({"problems": 128, "samples": 2})
    config.checkpoint = ConfigDict({"every": 40, "keep": 2})
    config.log = ConfigDict({"samples_every": 10})
    if variant == "prompted":
        config.env.system_prompt_file = str(pathlib.Path(podrl.__file__).parent / "assets" / "search_prompt.txt")
        config.env.max_tool_calls = 10
        config.rollout.update({"max_prompt_length": 2048, "max_response_tokens": 16384})
        config.rollout.update({"max_tokens_to_generate": 8192, "kv_cache_size": 18432})
        config.trainer.max_seq_token_per_tpu = 18432
    return config
