"""Lists a run's samples of lowest reward as text, with the rewards by function and the reason why a sample ended."""

from collections import Counter

from podrl.config import plural
from podrl.mappings import JsonObject
from podrl.view.runs import RunFiles

_PROMPT, _COMPLETION = 120, 400  # characters shown: the end of the prompt, the beginning of the completion


def listing(run: RunFiles, count: int) -> str:
    """Returns a summary of the samples that `RunFiles.found` finds, then the `count` samples of lowest reward.

    Among samples with equal rewards the newest come first.

    Raises:
      ValueError: the run recorded no samples with rewards.
    """
    rows = run.found({"sort": "reward"})
    if not rows:
        raise ValueError(
            f"{run.place} recorded no samples with rewards: log.trace and log.samples_every choose the samples that "
            "a run records, and training on answers of the data has no samples."
        )
    steps = sorted({row["step"] for row in rows})
    at = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    lines = [f"{run.name}: {plural(len(rows), 'sample')} of {at}."]
    for name in dict.fromkeys(name for row in rows for name in row.get("rewards", {})):
        values = [value for row in rows if (value := row.get("rewards", {}).get(name)) is not None]
        if values:
            nothing = sum(value <= 0 for value in values)
            lines.append(f"{name}: mean {sum(values) / len(values):.3g}, 0 or less for {nothing} of {len(values)}")
    ended = Counter(row["stop"] for row in rows if "stop" in row)
    if ended:
        lines.append("Endings: " + ", ".join(f"{name} {number}" for name, number in ended.most_common()))
    return "\n".join([*lines, *(_describe(row) for row in rows[:count])])


def _describe(row: JsonObject) -> str:
    """Describes one sample; its texts are shown by `repr`, so that control characters cannot reach the terminal."""
    parts = [f"\nstep {row['step']}", f"reward {row['reward']:.3g}"]
    if rewards := row.get("rewards"):
        parts[-1] += f" ({', '.join(f'{name} {_figure(value)}' for name, value in rewards.items())})"
    if "stop" in row:
        parts.insert(1, f"group {row['group']}, sample {row['sample']}")
        parts.append(f"ending: {row['stop']} after {row['length']} tokens")
    prompt, completion = row["prompt"], row["completion"]
    question = ("..." if len(prompt) > _PROMPT else "") + repr(prompt[-_PROMPT:])
    wrote = repr(completion[:_COMPLETION]) + ("..." if len(completion) > _COMPLETION else "")
    return f"{', '.join(parts)}\n  prompt:     {question}\n  completion: {wrote}"


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
