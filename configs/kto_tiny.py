"""KTO: answers that are labelled good or bad, one to a prompt (arXiv 2402.01306).

Default: the checkpoint that comes with podrl learns from solutions in the task's tags, labelled good, and from
solutions as a base model might write them, labelled bad, on a CPU machine: right greedy answers 25.0 -> 74.2 %, right
sampled answers 14.1 -> 44.2 %, in 40 steps.

    python -m podrl.launch --config=kto_tiny.py
    python -m podrl.launch --config=kto_tiny.py --config.model.path=DIR --config.data.path=FILE --config.eval.problems=0

A line of FILE, a .jsonl: {"prompt": "...", "completion": "...", "label": true}.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration, as plain data."""
    config = ConfigDict()
    config.algorithm = "kto"
    config.seed = 0
    config.fake_devices = 1  # on a CPU, one device is fastest
    config.compile_cache = "auto"  # keeps compiled programs for the next start; "" keeps none; a path is the directory
    config.model = ConfigDict({"path": "tiny", "reference": ""})
    config.model.lora = ConfigDict({"rank": 0, "alpha": 16.0, "pattern": "q|k|v|o|gate|up|down", "dropout": 0.0})
    config.roles = ConfigDict({"colocated": True})
    config.data = ConfigDict({"path": "problems", "eval_path": "", "system_prompt": "auto", "seed": 42})
    config.kto = ConfigDict({"batch_size": 64, "max_length": 112, "beta": 0.1})
    config.kto.update({"desirable_weight": 1.0, "undesirable_weight": 1.0})
    config.rollout = ConfigDict({"max_prompt_length": 64, "max_tokens_to_generate": 40})
    config.trainer = ConfigDict({"max_steps": 40, "eval_every_n_steps": 40, "learning_rate": 2e-4})
    config.trainer.update({"schedule": "constant", "max_grad_norm": 1.0, "b2": 0.99})
    config.eval = ConfigDict({"problems": 256, "samples": 4})
    config.checkpoint = ConfigDict({"every": 40, "keep": 2})
    config.log = ConfigDict({"samples_every": 10})
    return config
