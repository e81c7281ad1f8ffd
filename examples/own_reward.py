"""A reward of your own on a file of your own: answers of podrl's small model get shorter.

    python examples/own_reward.py

Two minutes on a laptop. runs/own_reward holds the metrics, samples of every tenth step, and curve.png.
"""

import json
import pathlib

import podrl


def brief(prompts, completions, **fields):
    """Gives a completion that ends with the closing answer tag 1 point, and takes off 0.01 for every character."""
    return [float(text.strip().endswith("</answer>")) - 0.01 * len(text) for text in completions]


def main(workdir="runs/own_reward", **settings):
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"question": f"Tom has {a} apples and buys {b}. How many?", "answer": f"{a + b}"}
               for a in range(2, 22) for b in range(2, 12)]  # fmt: skip
    (folder / "apples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    wanted = {"data.path": str(folder / "apples.jsonl"), "trainer.max_steps": 40, "eval.problems": 16}
    return podrl.run("grpo_gemma.py", wanted | settings, workdir=folder, reward_fns=["answer", brief])


if __name__ == "__main__":  # reward workers import this file
    raise SystemExit(main())
