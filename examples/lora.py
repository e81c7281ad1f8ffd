"""LoRA: only adapters are trained, the base weights stay fixed; exports a PEFT directory and a merged model.

    python examples/lora.py

Two minutes on a laptop. Any Hugging Face directory works in the place of 'tiny'.
"""

import podrl
from podrl import export


def main(workdir="runs/lora", **settings):
    wanted = {
        "model.path": "tiny",
        "model.lora": {"rank": 16, "alpha": 32.0, "pattern": "q|k|v|o|gate|up|down"},
        "trainer.learning_rate": 2e-3,  # adapters need a larger learning rate than full weights
        "trainer.max_steps": 60,
    }
    code = podrl.run("grpo_gemma.py", wanted | settings, workdir=workdir)
    if code == 0:  # 75: stopped by Ctrl-C after saving; the same command goes on
        export.main([f"--workdir={workdir}", f"--out={workdir}/merged"])
        export.main([f"--workdir={workdir}", f"--out={workdir}/adapters", "--adapter"])
    return code


if __name__ == "__main__":
    raise SystemExit(main())
