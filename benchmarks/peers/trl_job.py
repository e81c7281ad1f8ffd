"""The job of `benchmarks peers` by TRL's GRPOTrainer, in TRL's environment; prints one JSON object.

    PYTHONPATH=CHECKOUT python benchmarks/peers/trl_job.py --model=DIR --data=FILE --steps=20

It imports only podrl's reward functions, which need nothing but Python.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSON lines with question and answer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max_new", type=int, default=40)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as out:
        print(json.dumps(_train(args, out)))


def _train(args: argparse.Namespace, out: str) -> dict[str, Any]:
    import datasets  # pyright: ignore[reportMissingImports]
    import torch
    import transformers
    import trl  # pyright: ignore[reportMissingImports]

    from podrl.rewards import reference

    ended: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    with open(args.data) as file:
        records = [json.loads(line) for line in file]
    prompts = [
        {"prompt": [{"role": "user", "content": record["question"]}], "answer": record["answer"]} for record in records
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    ends = transformers.GenerationConfig.from_pretrained(args.model).eos_token_id
    # TRL ends a completion at one token only; of the model's several end tokens, the last ends its turns.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[-1] if isinstance(ends, list) else ends)
    config = trl.GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=args.prompts * args.group,
        gradient_accumulation_steps=1,
        num_generations=args.group,
        max_completion_length=args.max_new,
        max_steps=args.steps,
        temperature=1.0,
        beta=0.04,
        loss_type="grpo",
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=[_for_trl(getattr(reference, name)) for name in REWARDS],
        args=config,
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [record["reward"] for record in trainer.state.log_history if "reward" in record]
    return {
        "step_s": [later - earlier for earlier, later in itertools.pairwise(ended)],
        "rewards": rewards,
        "tokens": statistics.mean(r["completions/mean_length"] for r in trainer.state.log_history if "reward" in r),
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


REWARDS = ("exact_format", "approximate_format", "answer", "number")


def _for_trl(reward: Any) -> Any:
    """Wraps a reward function for TRL, which passes completions as messages."""

    def scored(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        return reward(prompts, [completion[0]["content"] for completion in completions], answer=answer)

    scored.__name__ = reward.__name__
    return scored


if __name__ == "__main__":
    main()
