"""Supervised training, then GRPO: a model with random weights learns first from answers, then from rewards.

    python examples/sft_then_grpo.py

Four minutes on a laptop. The second run starts from the Hugging Face directory that the first one exports.
"""

import pathlib

import podrl
from podrl import export


def main(workdir="runs/sft_then_grpo", sft=None, **settings):
    first, model, second = (f"{workdir}/{name}" for name in ("sft", "model", "grpo"))
    supervised = {"model.path": "scratch", "trainer.max_steps": 400, "sft.full_steps": 300}
    if not pathlib.Path(model).exists():
        if code := podrl.run("sft_tiny.py", {**supervised, "fake_devices": 8} | (sft or {}), workdir=first):
            return code
        export.main([f"--workdir={first}", f"--out={model}"])
    rewarded = {"model.path": model, "trainer.max_steps": 60}
    return podrl.run("grpo_gemma.py", rewarded | settings, workdir=second)


if __name__ == "__main__":
    raise SystemExit(main())
