"""Regenerates tests/models/fixtures: `python tests/parity/make_fixtures.py` (needs the extra [parity])."""

import json
import pathlib
import shutil

import hf_cases
import numpy as np
import torch
import transformers

TARGET = pathlib.Path(__file__).parents[1] / "models" / "fixtures"


def main() -> None:
    for name, config_class, changes in hf_cases.FIXTURE_CASES:
        directory = TARGET / name
        shutil.rmtree(directory, ignore_errors=True)
        model = hf_cases.make_model(config_class, hf_cases.FIXTURE_SIZES | changes, seed=1).to(torch.bfloat16)
        hf_cases.save_model(model, directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        wide = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        tokens_BT = hf_cases.make_tokens((2, 12), config["vocab_size"])
        np.savez_compressed(
            directory / "expected.npz", tokens_BT=tokens_BT, logits_BTV=hf_cases.logits(wide, tokens_BT)
        )


if __name__ == "__main__":
    main()
