"""PPO with a critic, and rewards from a reward model: a sequence classifier with one label, in Hugging Face's form.

    python examples/ppo_reward_model.py [DIR]

Without DIR the reward model has a random head, whose rewards teach nothing. The function 'answer' rewards, too.
"""

import json
import pathlib
import sys

import numpy as np

import podrl
from podrl.models.tensor_files import Outgoing, scan_directory, write_file


def random_reward_model(out):
    """Writes the small model with a random head of one output, in the form of Gemma2ForSequenceClassification."""
    tensors = {name: stored.read() for name, stored in scan_directory(podrl.TINY).items()}
    width = tensors["model.norm.weight"].shape[0]
    head = np.random.default_rng(0).normal(size=(1, width))
    tensors["score.weight"] = head.astype(tensors["model.norm.weight"].dtype)
    out.mkdir(parents=True, exist_ok=True)
    for path in podrl.TINY.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((podrl.TINY / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma2ForSequenceClassification"]}))
    write_file(out / "model.safetensors", [Outgoing(n, t.shape, t.dtype) for n, t in tensors.items()], tensors.values())


def main(workdir="runs/ppo_reward_model", model="", **settings):
    model = model or f"{workdir}/reward_model"
    pathlib.Path(model).exists() or random_reward_model(pathlib.Path(model))
    wanted = {"reward": {"fns": ("answer",), "model": model, "model_weight": 0.1}, "trainer.max_steps": 40}
    return podrl.run("ppo_gemma.py", wanted | settings, workdir=f"{workdir}/run")


if __name__ == "__main__":
    raise SystemExit(main(model="".join(sys.argv[1:])))
