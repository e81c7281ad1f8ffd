"""Makes the checkpoint that can search and cite but often does not: a Gemma 2 of half a million parameters.

First every example searches the corpus and cites the document that has the answer. In the last steps, most examples
guess the answer, and some search without a citation or cite an id that no document has, so that reinforcement learning
has something to find. The output of a search is part of the input, and is not learned. From a fixed seed, this command
makes a checkpoint like podrl/assets/tiny_search, in tiny_search/:

    python -m podrl.launch --config=sft_search.py && python -m podrl.export --workdir=runs/sft_search --out=tiny_search

The tokenizer comes from
`python -m podrl.data.train_tokenizer --search --out=podrl/assets/tiny_search`.
"""

from ml_collections import ConfigDict

FULL_STEPS, MIXED_STEPS = 240, 100


def get_config() -> ConfigDict:
    """Returns the configuration, as plain data."""
    config = ConfigDict()
    config.algorithm = "sft"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "scratch"})
    config.scratch = ConfigDict({"window": 1024})
    config.tokenizer = "tiny_search"
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "facts", "seed": 1})
    config.sft = ConfigDict({"batch_size": 64, "max_length": 112, "tagged_share": 0.16, "full_steps": FULL_STEPS})
    config.rollout = ConfigDict({"max_prompt_length": 32, "max_tokens_to_generate": 48})
    config.trainer = ConfigDict({"max_steps": FULL_STEPS + MIXED_STEPS, "eval_every_n_steps": 0})
    config.trainer.update({"learning_rate": 3e-3, "schedule": "cosine", "warmup_fraction": 0.06, "end_fraction": 0.1})
    config.trainer.update({"b2": 0.98, "weight_decay": 0.01, "max_grad_norm": 1.0, "max_tokens_per_row": 112})
    config.trainer.max_seq_token_per_tpu = 2240
    config.eval = ConfigDict({"problems": 0})
    config.checkpoint = ConfigDict({"every": 60})
    return config
