"""The command that scores a model on sets of held-out records, and compares two models on the same ones.

    python -m podrl.evaluate --model=DIR|RUN --sets=NAME=FILE.jsonl,... --out=DIR [--compare=DIR|RUN --n=4 ...]

--config.reward.KEY=VALUE (code.cpu_s, deadline_s, judge.url, ...) are settings of the functions that --fns names, as of
a job. Arguments that are not listed here are those of podrl.generate, which completes the sets: DIR/NAME.MODEL.jsonl
holds the completions, and the same command goes on where it was ended. DIR/result.json holds the scores, with 95%
intervals.
"""

import argparse
import ast
import contextlib
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from podrl import generate
from podrl.config import build, hint_at
from podrl.data import shape, sources
from podrl.data.template import SYSTEM_PROMPT
from podrl.rewards.compose import RewardConfig, RewardError, Rewards, without_outputs
from podrl.rewards.reference import accuracies, majority, pass_at_k
from podrl.rundir import intervals
from podrl.rundir.console import make_console, print_table
from podrl.runtime import environment, signals
from podrl.runtime.arguments import Parser
from podrl.storage.storage import StorageError, locate

_SETTING = "--config.reward."
# Scores by name, a row per record and a column per sample; 'right' is 0 or 1.
Scores = Mapping[str, np.ndarray]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="podrl.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory, or the directory of a run")
    parser.add_argument(
        "--compare", default="", help="a second one, which completes the same records with the same seed"
    )
    parser.add_argument("--sets", required=True, help="NAME=FILE, several separated by commas")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="directory; made if it is not there")
    parser.add_argument("--fns", default="", help="reward functions by name; default: the answer's accuracies")
    parser.add_argument(
        "--right", type=float, default=1.0, help="the first function's reward from which a sample is right"
    )
    parser.add_argument("--by", default="dataset", help="the records' field whose values have a row of the table each")
    parser.add_argument("--n", type=int, default=1, help="completions per record")
    parser.add_argument("--devices", type=int, default=1, help="faked CPU devices where there is no accelerator")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    args, rest = _parser().parse_known_args(argv)
    environment.prepare(os.environ, fake_devices=args.devices)
    try:
        sets = _sets(args.sets)
        config = reward_config(args.fns, [arg for arg in rest if arg.startswith(_SETTING)])
        rest = [arg for arg in rest if not arg.startswith(_SETTING)]
        args.out.mkdir(parents=True, exist_ok=True)
        models = {"model": args.model, **({"compare": args.compare} if args.compare else {})}
        # Functions that cannot be loaded, and programs that cannot be isolated, are refused before anything is sampled.
        with Rewards(config) if config.fns else contextlib.nullcontext() as rewards:
            score = Scoring(rewards, config, args.right, args.n)
            records = {name: score.read(path) for name, path in sets.items()}
            if not any(arg.partition("=")[0] == "--stop" for arg in rest):
                rest += [f"--stop={text}" for text in stop_strings(models.values())]
            found = {name: _scored(name, path, sets, records, args, rest, score) for name, path in models.items()}
    except (ValueError, OSError, ImportError, RewardError, StorageError) as error:
        sys.stderr.write(f"podrl.evaluate: error: {error}\n")
        return 1
    result: dict[str, Any] = {"models": models, "arguments": list(argv)}
    result |= {name: {one: _summaries(*scores) for one, scores in by_set.items()} for name, by_set in found.items()}
    if args.compare:
        result["difference"] = {one: difference(found["model"][one][0], found["compare"][one][0]) for one in sets}
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _print(result, models, sets)
    return 0


def summary(scores: Scores) -> dict[str, dict[str, float]]:
    """Mean, ends `low` and `high` of the 95% interval over records, and number of records of every score.

    Beside the scores themselves: 'pass@k' for k = 1, 2, 4, ... and 'majority@n' where a record has several samples.
    Scores from 0 to 1 are shares; the mean of others has no interval where all records have the same.
    """
    right_PG = scores["right"]
    per_record = {name: score_PG.mean(axis=1) for name, score_PG in scores.items() if name != "majority"}
    n = right_PG.shape[1]
    for k in (2**power for power in range(1, n.bit_length()) if 2**power <= n):
        per_record[f"pass@{k}"] = np.array([pass_at_k(n, int(row.sum()), k) for row in right_PG])
    if n > 1:
        per_record[f"majority@{n}"] = scores["majority"][:, 0]
    return {name: _of_mean(mean_P, scores.get(name, right_PG)) for name, mean_P in per_record.items()}


def difference(scores: Scores, others: Scores) -> dict[str, dict[str, float]]:
    """Mean difference of two models, the second less the first, record by record, with its paired 95% interval."""
    shared = [name for name in scores if name in others and name != "majority"]
    found = {}
    for name in shared:
        change_P = others[name].mean(axis=1) - scores[name].mean(axis=1)
        if _are_shares(scores[name]) and _are_shares(others[name]):
            ends = intervals.share_difference(change_P.tolist())
        else:
            ends = intervals.mean(float(change_P.mean()), _error(change_P))
        found[name] = _with(change_P, ends)
    return found


def _of_mean(mean_P: np.ndarray, of: np.ndarray) -> dict[str, float]:
    average = float(mean_P.mean())
    if _are_shares(of):
        return _with(mean_P, intervals.share(average, _error(mean_P), len(mean_P)))
    return _with(mean_P, intervals.mean(average, _error(mean_P)))


def _are_shares(value_PG: np.ndarray) -> bool:
    return bool(((value_PG >= 0) & (value_PG <= 1)).all())


def _error(value_P: np.ndarray) -> float | None:
    return float(value_P.std(ddof=1) / math.sqrt(len(value_P))) if len(value_P) > 1 else None


def _with(value_P: np.ndarray, ends: tuple[float, float] | None) -> dict[str, float]:
    found = {"mean": float(value_P.mean()), "records": len(value_P)}
    return found | ({"low": ends[0], "high": ends[1]} if ends else {})


def _sets(text: str) -> dict[str, str]:
    """Reads NAME=FILE,...

    Raises:
      ValueError: this is none.
    """
    sets: dict[str, str] = {}
    for part in text.split(","):
        name, equals, path = part.partition("=")
        if not equals or not path or not name.isidentifier() or name in sets:
            raise ValueError(f"--sets={text}: {part!r} must be NAME=FILE, with a name of letters of its own.")
        sets[name] = path
    return sets


def reward_config(fns: str, given: Sequence[str]) -> RewardConfig:
    """Reads the settings of the reward functions `fns` from arguments --config.reward.KEY=VALUE.

    Raises:
      ValueError: a key that there is not, or has no use here, or a value that it does not take.
    """
    values: dict[str, Any] = {"fns": tuple(fns.split(",")) if fns else ()}
    for arg in given:
        if not fns:
            raise ValueError(f"{arg} sets reward functions, and there are none: name them in --fns.")
        key, equals, text = arg.removeprefix(_SETTING).partition("=")
        path = key.split(".")
        if not equals:
            raise ValueError(f"{arg} must be {_SETTING}KEY=VALUE.")
        if path[0] in ("fns", "weights", "named", "model", "model_weight"):
            raise ValueError(
                f"{arg}: podrl.evaluate takes functions from --fns, and shows each one's rewards by itself."
            )
        value: Any = text
        if hint_at(RewardConfig, path) is not str:
            with contextlib.suppress(ValueError, SyntaxError):  # else it is refused as text
                value = ast.literal_eval(text)
        group = values
        for name in path[:-1]:
            group = group.setdefault(name, {})
            if not isinstance(group, dict):
                raise ValueError(f"{arg}: config.reward.{name} is given as a value, too.")
        group[path[-1]] = value
    return build(RewardConfig, values, "config.reward")


def _scored(
    name: str,
    path: str,
    sets: Mapping[str, str],
    records: Mapping[str, Sequence[shape.Record]],
    args: argparse.Namespace,
    rest: Sequence[str],
    score: "Scoring",
) -> dict[str, tuple[Scores, list[str]]]:
    """Completes every set with one model; returns each one's scores, and where its records are from.

    The records are those of the set's own file: in the output, a number has no more digits than a float.
    """
    directory = model_directory(name, path, args.out)
    found = {}
    for one, prompts in sets.items():
        out = args.out / f"{one}.{name}.jsonl"
        given = [f"--model={directory}", f"--prompts={prompts}", f"--out={out}", f"--n={args.n}", *rest]
        if (
            not args.fns
            and not any(arg.startswith("--system_prompt") for arg in rest)
            and not generate.asked_as(directory)
        ):
            given.append(f"--system_prompt={SYSTEM_PROMPT}")  # the accuracies look for its tags
        if generate.main([*given, f"--devices={args.devices}"]):
            raise ValueError(f"--sets: {one} was not completed, as said above.")
        lines = map(json.loads, out.read_bytes().splitlines())  # texts have more ends of lines
        told = [{**own, "completions": line["completions"]} for own, line in zip(records[one], lines, strict=True)]
        found[one] = (score(told), [str(record.get(args.by, "")) for record in told])
    return found


def stop_strings(paths: Iterable[str]) -> list[str]:
    """The stop strings that those of the models that are runs were trained with; all models are scored with them."""
    runs = [pathlib.Path(path) for path in paths if (pathlib.Path(path) / "checkpoints").is_dir()]
    settings = [json.loads((run / "config.json").read_text()).get("rollout") or {} for run in runs]
    return list(dict.fromkeys(text for one in settings for text in one.get("stop_strings") or ()))


def model_directory(name: str, path: str, out: pathlib.Path) -> str:
    """A directory in Hugging Face's layout; a run's newest checkpoint is written below `out`."""
    if not (pathlib.Path(path) / "checkpoints").is_dir():
        return path
    from podrl.export import export_params, load_run

    run, step, params = load_run(locate(path))
    target = out / f"{name}-step{step}"
    if not (target / "config.json").exists():
        export_params(run.config, params, run.tokenizer, target, dtype=run.dtype, prompts=run.prompts)
    return os.fspath(target)


class Scoring:
    """The scores of records' completions: by reward functions, or the accuracies of their answers."""

    def __init__(self, rewards: Rewards | None, config: RewardConfig, right: float, n: int) -> None:
        """Keeps what scores.

        Args:
          rewards: the functions; None for the accuracies.
          config: their settings.
          right: the first function's reward from which a sample is right.
          n: completions of a record.
        """
        self._rewards, self._config, self._right, self._n = rewards, config, right, n

    def read(self, path: str) -> Sequence[shape.Record]:
        """Reads the records of a set.

        Raises:
          ValueError: a record that cannot be scored; names its file and line.
        """
        source = generate.read_prompts(path)
        records = [source[i] for i in range(len(source))]
        given = {"turns": "", "model_text": "", "sample_text": ""}  # of episodes, and of every completion
        fields_of = sources.made(source, lambda record: given | shape.fields(record))
        asked = [(source.place(i), fields) for i, fields in enumerate(fields_of)]
        lacks = [
            f"{place} lacks 'answer' (it has {', '.join(record)})"
            for (place, fields), record in zip(asked, records, strict=True)
            if "answer" not in fields
        ]
        if self._rewards is not None:
            self._rewards.check_answers([(lacks[0], ())] if lacks else [])
            self._rewards.check_fields(asked, (), set[str]().union(*(fields for _, fields in asked)))
        elif lacks:
            raise ValueError(f"{lacks[0]}: give it, or --fns=FUNCTION.")
        return records

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> Scores:
        """Scores every completion of every record, which `read` has accepted.

        Raises:
          ValueError: a function gave no reward.
          RewardError: a reward function failed.
        """
        texts = [one["text"] for record in records for one in record["completions"]]
        own = [without_outputs(text) for text in texts]
        asked = [shape.fields({k: v for k, v in record.items() if k != "completions"}) for record in records]
        size = (len(records), self._n)
        if self._rewards is not None:
            scores = self._rewarded(self._rewards, asked, texts)
            first = next(iter(scores))
            scores = {"right": (scores[first] >= self._right).astype(float), **scores}
        else:
            truths = [fields["answer"] for fields in asked for _ in range(self._n)]
            found = [accuracies(text, truth) for text, truth in zip(own, truths, strict=True)]
            scores = {key: np.array([one[key] for one in found]) for key in found[0]}
            scores["right"] = scores.pop("answer")
        votes = [self._config.text.vote_of(text) for text in own]
        scores = {key: np.asarray(value).reshape(size) for key, value in scores.items()}
        pairs = zip(np.array(votes, object).reshape(size).tolist(), scores["right"].tolist(), strict=True)
        return {**scores, "majority": np.array([[majority(own, right)] for own, right in pairs])}

    def _rewarded(self, rewards: Rewards, asked: Sequence[Mapping[str, Any]], texts: list[str]) -> dict[str, Any]:
        """The rewards of completions; `asked` are the fields of each record as in training."""
        names = list(dict.fromkeys(key for fields in asked for key in fields))
        each = [fields for fields in asked for _ in range(self._n)]
        fields = {key: [one.get(key) for one in each] for key in names}
        scores = rewards.score([one["question"] for one in each], texts, fields)
        if np.isnan(scores).any():
            function, at = np.argwhere(np.isnan(scores))[0]
            raise ValueError(
                f"Reward function {rewards.names[function]} gave no reward for completion {at % self._n} of record "
                f"{at // self._n}: its process died on it twice. Mend the function, or leave it out of --fns."
            )
        return dict(zip(rewards.names, scores, strict=True))


def _summaries(scores: Scores, sources: Sequence[str]) -> dict[str, Any]:
    """The summary of a set, and of every source where its records have several."""
    names = sorted(set(sources))
    where = {name: np.array([source == name for source in sources]) for name in names}
    split = {name: summary({k: v[rows] for k, v in scores.items()}) for name, rows in where.items()}
    return {"all": summary(scores)} | ({"by": split} if len(names) > 1 else {})


def _print(result: Mapping[str, Any], models: Mapping[str, str], sets: Mapping[str, str]) -> None:
    console = make_console()

    def row(title: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
        return [
            title,
            *(
                f"{100 * one['mean']:.1f} "
                + intervals.written((one["low"], one["high"]) if "low" in one else None, percent=True)
                for one in found.values()
            ),
        ]

    for one in sets:
        rows = []
        for name, path in models.items():
            rows.append(row(path, result[name][one]["all"]))
            rows += [row(f"  {key}", found) for key, found in result[name][one].get("by", {}).items()]
        if "difference" in result:
            rows.append(row("difference", result["difference"][one]))
        columns = [one, *result["model"][one]["all"]]
        print_table(
            console,
            f"{one}: {result['model'][one]['all']['right']['records']} records, in percent [95% interval]",
            columns,
            rows,
        )


if __name__ == "__main__":
    signals.leave_on_signals(unwind=False)
    sys.exit(main(sys.argv[1:]))
