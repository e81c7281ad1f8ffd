"""The process that writes problems of reasoning-gym: `python -m podrl.data.reasoning_worker`, for podrl.data.reasoning.

The problem at an index is a function of the dataset's name, its arguments, the seed, the size, the split and the index.
"""

import difflib
import functools
import json
from collections.abc import Sequence
from typing import Any

from podrl.config import install
from podrl.data.problem_generator import RandomDraws, Split, held_out
from podrl.mappings import JsonObject
from podrl.workers import child
from podrl.workers.user_objects import explain

_TRIES = 1000  # largest number of candidates for one problem of a split


@functools.lru_cache(maxsize=16)
def dataset(name: str, arguments: str) -> Any:
    """Makes a dataset of reasoning-gym; `arguments` are its settings as JSON.

    Raises:
      ValueError: the package is not installed, or does not have the dataset with these settings.
    """
    try:
        import reasoning_gym
        from reasoning_gym import factory
    except ImportError as error:
        raise ValueError(f"it needs the package reasoning-gym: {install('reasoning')} ({error}).") from error
    if name not in factory.DATASETS:
        close = difflib.get_close_matches(name, factory.DATASETS, n=3)
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {len(factory.DATASETS)} others, such as {close}.")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(arguments))
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"data.arguments={arguments} with data.size and data.seed is not accepted: {error}") from error


def records(name: str, arguments: JsonObject, seed: int, size: int, split: Split, indices: Sequence[int]) -> list[str]:
    """Writes the problems at some indices of a split.

    The candidates for index i are problem i of the dataset, and then problems at random places after the first `size`.
    The first candidate whose question belongs to the split, by the question's hash, is the problem at index i.

    Args:
      name: name of the dataset.
      arguments: settings of the dataset, without its seed and size.
      seed: seed of the dataset.
      size: number of problems of a split.
      split: 'train' or 'held_out'.
      indices: positions in the split, from 0 to size - 1.

    Returns:
      A record for each index, as JSON: 'question', 'answer' if the problem has one, and 'entry' for the scorer.

    Raises:
      ValueError: there is no such dataset, or it has no problem that belongs to the split.
    """
    of = dataset(name, json.dumps({**arguments, "seed": seed, "size": 2 * size}, sort_keys=True))
    return [json.dumps(_record(name, arguments, _entry(of, seed, size, split, index))) for index in indices]


def _entry(of: Any, seed: int, size: int, split: Split, index: int) -> JsonObject:
    draw = RandomDraws(seed, 5, index)
    for tried in range(_TRIES):
        entry = of[draw.between(size, 2 * size - 1) if tried else index]
        if held_out(" ".join(entry["question"].split())) == (split == "held_out"):
            return entry
    raise ValueError(
        f"none of {_TRIES} problems belongs to the split {split!r}, to which a question's hash assigns it: the dataset "
        "has too few questions. Change data.arguments, or use the dataset for training or evaluation alone."
    )


def _record(name: str, arguments: JsonObject, entry: JsonObject) -> JsonObject:
    answer = {"answer": entry["answer"]} if isinstance(entry["answer"], str) and entry["answer"].strip() else {}
    # Some scorers compare with tuples, or with keys that are numbers. JSON has neither, so this field is the text of a
    # Python literal.
    whole = repr({"name": name, "arguments": arguments, "entry": _plain(entry)})
    return {"question": entry["question"], **answer, "entry": whole}


def _plain(value: Any) -> Any:
    """Converts a value to builtin types, which can be written as a Python literal."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return kind(map(_plain, value))
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return _plain(value.tolist())
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _answer(arguments: JsonObject) -> JsonObject:
    try:
        return {"records": records(**arguments)}
    except ValueError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - the parent shows the traceback in its own error
        return {"refused": f"reasoning-gym raised an error.\n{explain(error)}"}


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    child.serve(lambda fn, spec: {}, lambda fn, arguments: _answer(arguments))


if __name__ == "__main__":
    main()
