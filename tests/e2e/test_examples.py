"""The scripts and the notebook of examples/ run as they are, with fewer and smaller steps."""

import json
import os
import subprocess
import sys

import pytest
from metric_names import ROOT
from processes import environment, trained_steps

EXAMPLES = ROOT / "examples"
DEVICES = "--xla_force_host_platform_device_count=8"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SMALL = {
    "trainer.max_steps": 1,
    "trainer.eval_every_n_steps": 0,
    "eval.problems": 4,
    "eval.samples": 1,
    "rollout.prompts_per_step": 4,
    "rollout.lanes": 16,
    "rollout.max_prompt_length": 128,
    "rollout.max_tokens_to_generate": 16,
    "log.to": (),
}
# One process runs all examples, so that programs which several examples share are compiled only once.
ALL = f"""
import json, os, pathlib, sys
small = {SMALL!r}
grpo = small | {{"grpo.num_generations": 4}}
import lora, own_loss, own_reward, ppo_reward_model, sft_then_grpo, two_meshes
ends = {{
    "own_reward": own_reward.main(**grpo),
    "lora": lora.main(**grpo),
    "own_loss": own_loss.main(**grpo),
    "ppo_reward_model": ppo_reward_model.main(**small),
    "sft_then_grpo": sft_then_grpo.main(sft={{"trainer.max_steps": 1, "eval.problems": 0}}, **grpo),
    "two_meshes": two_meshes.main(max_steps=1) - 1,
}}
book = json.loads(pathlib.Path(sys.argv[1]).read_text())
names = {{}}
for cell in book["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
        names["SETTINGS"] = grpo
ends["first_run"] = names["code"]
print("ends", json.dumps(ends))
"""


def test_there_are_six_short_scripts_and_a_notebook_that_the_page_lists():
    assert len(SCRIPTS) == 6 and [path.name for path in EXAMPLES.glob("*.ipynb")] == ["first_run.ipynb"]
    for name in SCRIPTS:
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 120, name
        assert f"[{name}.py]({name}.py)" in (EXAMPLES / "README.md").read_text()
    book = json.loads((EXAMPLES / "first_run.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in book["cells"])


@pytest.mark.nightly("examples", "podrl/learner/learner.py")
@pytest.mark.e2e
def test_all_of_them_run(tmp_path):
    paths = os.pathsep.join([str(EXAMPLES), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ALL, str(EXAMPLES / "first_run.ipynb")],
        cwd=tmp_path,
        env=environment(PYTHONPATH=paths, XLA_FLAGS=DEVICES),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.rpartition("ends ")[2])
    assert set(ends) == {*SCRIPTS, "first_run"} and not any(ends.values()), ends
    runs = tmp_path / "runs"
    for run in ("own_reward", "lora", "own_loss", "ppo_reward_model/run", "sft_then_grpo/grpo", "notebook/run"):
        assert trained_steps(runs / run) == [1], run
    assert (runs / "lora" / "merged" / "model.safetensors").exists()
    assert (runs / "lora" / "adapters" / "adapter_config.json").exists()
    assert "step 1  reward" in done.stdout  # the notebook reads a sample
