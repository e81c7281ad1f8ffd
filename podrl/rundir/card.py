"""Writes the model card of a run: base model, data, algorithm and results, as README.md of a model directory."""

import json

from podrl.mappings import ConfigValues
from podrl.rundir.identity import last_step
from podrl.storage.storage import Place


def card(workdir: Place, config: ConfigValues, step: int) -> str:
    """Returns the model card of a run as Markdown.

    Args:
      workdir: the run directory; the results come from its summary.json, if there is one.
      config: content of the run's config.json.
      step: step of the exported checkpoint.
    """
    base, data = config["model"]["path"], config.get("data", {})
    sources = [source["path"] for source in data.get("sources") or ()] or [data.get("path", "")]
    algorithm = config.get("algorithm", "grpo")
    head = {"library_name": "transformers", "tags": ["podrl", algorithm]}
    head |= {"base_model": base.partition("@")[0]} if "/" in base and not base.startswith((".", "/", "~")) else {}
    sets = sorted({path.removeprefix("hf:").partition("@")[0].partition(":")[0] for path in sources if "hf:" in path})
    head |= {"datasets": sets} if sets else {}
    lora = config["model"].get("lora", {}).get("rank", 0)
    rewards = ", ".join(map(str, config.get("reward", {}).get("fns", ())))
    rows = {
        "base": base,
        "data": ", ".join(sources),
        "algorithm": algorithm + (f", adapters of rank {lora}" if lora else ", all parameters"),
        "rewards": rewards,
        "steps": f"{step} of {last_step(config)}",
        "learning rate": config["trainer"].get("learning_rate"),
        "seed": config.get("seed", 0),
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", "", "# Model card", ""]
    lines += ["Trained with [podrl](https://pypi.org/project/podrl).", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in rows.items() if value not in ("", None)]
    file = workdir / "summary.json"
    summary = json.loads(file.read_text()) if file.exists() else {}
    before, after = summary.get("before") or {}, summary.get("after") or {}
    if shared := [name for name in before if name in after]:
        lines += ["", "## Results on held-out records", "", "| | before | after |", "|---|---|---|"]
        lines += [
            f"| {name.removeprefix('eval/')} | {_format(before[name])} | {_format(after[name])} |" for name in shared
        ]
    return "\n".join(lines) + "\n"


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
