"""The command that scores a model on sets of held-out records, and compares two models on the same records.

    python -m podrl.evaluate --model=DIR|RUN --sets=NAME=FILE.jsonl,... --out=DIR [--compare=DIR|RUN --n=4 ...]

--config.reward.KEY=VALUE (code.cpu_s, deadline_s, judge.url, ...) configures the functions of --fns, as in a job.
Arguments that are not listed here are passed on to podrl.generate, which completes the sets. The completions of --model
are in DIR/NAME.model.jsonl, and the completions of --compare are in DIR/NAME.compare.jsonl; after an interruption, the
same command continues. DIR/result.json holds the scores, with 95% intervals.
"""

import os

from podrl.runtime import environment, signals

# This block precedes the slow imports below, so that signals are handled meanwhile, and jax finds the environment set.
if __name__ == "__main__":
    signals.leave_on_signals(
        unwind=False, words=lambda: "before the evaluation was complete; the same command goes on with the rest."
    )
    environment.leave_out_libtpu(os.environ)

import argparse
import ast
import contextlib
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from podrl import generate
from podrl.config import build, hint_at, plural
from podrl.data import shape, sources
from podrl.data.template import SYSTEM_PROMPT
from podrl.mappings import ConfigValues, JsonObject, Record, TaskColumns, TaskFields
from podrl.rewards.compose import RewardConfig, RewardError, Rewards, without_outputs
from podrl.rewards.reference import accuracies, majority, pass_at_k
from podrl.rundir import intervals
from podrl.rundir.console import make_console, print_table
from podrl.runtime.arguments import Parser, as_sentence, write_line
from podrl.runtime.watchdog import announce_if_long
from podrl.storage.regular import load_object
from podrl.storage.storage import StorageError, locate

_SETTING = "--config.reward."
# Scores by name: arrays (P, G) with a row per record and a column per sample. 'right' is 0 or 1. 'majority' is (P, 1):
# 1 if the answer that most samples of the record give is right.
Scores = Mapping[str, np.ndarray]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.evaluate", __doc__)
    parser.add_argument("--model", required=True, help="Hugging Face directory, or the directory of a run")
    parser.add_argument(
        "--compare", default="", help="a second model, which completes the same records with the same seed"
    )
    parser.add_argument("--sets", required=True, help="sets of records: NAME=FILE, or several separated by commas")
    parser.add_argument(
        "--out",
        required=True,
        type=pathlib.Path,
        help="directory for completions and scores; created if it does not exist",
    )
    parser.add_argument("--fns", default="", help="reward functions by name; default: the answer's accuracies")
    parser.add_argument(
        "--right",
        type=float,
        default=1.0,
        help="least reward, from the first function or from the program, with which a sample counts as right",
    )
    parser.add_argument("--by", default="dataset", help="field of the records whose values are the rows of the table")
    parser.add_argument(
        "--question_field",
        default="",
        help="field of the records with the question; default: the field of the model's run",
    )
    parser.add_argument(
        "--answer_field", default="", help="field of the records with the answer; default: the field of the model's run"
    )
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
        # `Rewards` is opened before anything is sampled, because it refuses functions that cannot be loaded, and a
        # machine that cannot isolate the programs which the functions run.
        with Rewards(config) if config.fns else contextlib.nullcontext() as rewards:
            acts = bool({arg.partition("=")[0] for arg in rest} & {"--program", "--env"})
            fields = {name: getattr(args, name) or value for name, value in fields_of_run(args.model).items()}
            rest = [*rest, f"--question_field={fields['question_field']}"]
            score = Scoring(rewards, config, args.right, args.n, acts=acts, **fields)
            with announce_if_long("Reading the sets", write_line):
                records = {name: score.read(path) for name, path in sets.items()}
            if not any(arg.partition("=")[0] == "--stop" for arg in rest):
                rest += [f"--stop={text}" for text in stop_strings(models.values())]
            found = {name: _scored(name, path, sets, records, args, rest, score) for name, path in models.items()}
    except (ValueError, OSError, ImportError, RewardError, StorageError) as error:
        write_line(f"podrl.evaluate: error: {as_sentence(error)}")
        return 1
    result: dict[str, object] = {"models": models, "arguments": list(argv)}
    result |= {name: {one: _summaries(*scores) for one, scores in by_set.items()} for name, by_set in found.items()}
    if args.compare:
        result["difference"] = {one: difference(found["model"][one][0], found["compare"][one][0]) for one in sets}
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _print(result, models, sets)
    return 0


def summary(scores: Scores) -> dict[str, dict[str, float]]:
    """Computes the mean of every score over records, with its 95% interval.

    With several samples per record, the scores 'pass@k' for k = 2, 4, 8, ... and 'majority@n' are added.

    Args:
      scores: scores of P records with n samples each.

    Returns:
      'mean', 'records' (number of records), and 'low' and 'high' (ends of the interval) for every score. A score with
      values outside 0 to 1 has no interval if it is equal for all records, or if there is only one record.
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
    """Computes the mean difference of two models (second minus first) with its paired 95% interval.

    Args:
      scores: scores of the first model.
      others: scores of the second model on the same records.

    Returns:
      'mean', 'records', 'low' and 'high' as in `summary`, for every score but 'majority' that both models have.
    """
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
    """Reads the value of --sets, NAME=FILE,...

    Raises:
      ValueError: the value is not of this form, or a name occurs twice.
    """
    sets: dict[str, str] = {}
    for part in text.split(","):
        name, equals, path = part.partition("=")
        if not equals or not path or not name.isidentifier() or name in sets:
            raise ValueError(f"--sets={text}: {part!r} must be NAME=FILE, where every NAME is a different word.")
        sets[name] = path
    return sets


def reward_config(fns: str, arguments: Sequence[str]) -> RewardConfig:
    """Reads the settings of reward functions from the command line.

    Args:
      fns: names of the functions, separated by commas; '' for none.
      arguments: arguments of the form --config.reward.KEY=VALUE.

    Raises:
      ValueError: a key does not exist or has no use here, or does not take its value.
    """
    values: dict[str, Any] = {"fns": tuple(fns.split(",")) if fns else ()}
    for arg in arguments:
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
            with contextlib.suppress(ValueError, SyntaxError):  # other values stay text, which `build` refuses
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
    records: Mapping[str, Sequence[Record]],
    args: argparse.Namespace,
    rest: Sequence[str],
    score: "Scoring",
) -> dict[str, tuple[Scores, list[str]]]:
    """Completes every set with one model, and scores the completions.

    The records are read from the set's own file, because numbers in the output have at most the digits of a float.

    Args:
      name: 'model' or 'compare'.
      path: directory of the model or run.
      sets: files of the sets, by name.
      records: records of the sets, by name.
      args: arguments of this command.
      rest: arguments for podrl.generate.
      score: the Scoring that scores the completions.

    Returns:
      (scores, value of the field --by of each record), by name of the set.
    """
    directory = model_directory(name, path, args.out)
    found = {}
    for one, prompts in sets.items():
        out = args.out / f"{one}.{name}.jsonl"
        arguments = [f"--model={directory}", f"--prompts={prompts}", f"--out={out}", f"--n={args.n}", *rest]
        if (
            not args.fns
            and not any(arg.startswith(("--system_prompt", "--program")) for arg in rest)
            and not generate.prompt_settings_of(directory)
        ):
            # This system prompt asks for an answer in tags, because the accuracies look for the answer in these tags.
            arguments.append(f"--system_prompt={SYSTEM_PROMPT}")
        if generate.main([*arguments, f"--devices={args.devices}"]):
            raise ValueError(f"--sets: {one} was not completed; see the error above.")
        # Reads bytes, because str.splitlines would also cut at characters such as U+2028 within a text.
        lines = map(json.loads, out.read_bytes().splitlines())
        outputs = [{**own, "completions": line["completions"]} for own, line in zip(records[one], lines, strict=True)]
        with announce_if_long(f"Scoring the completions of {one}", write_line):
            scores = score(outputs)
        found[one] = (scores, [str(record.get(args.by, "")) for record in outputs])
    return found


def stop_strings(paths: Iterable[str]) -> list[str]:
    """Collects the stop strings of training from all models that are runs; every model is scored with all of them."""
    settings = [_settings_of_run(path, "rollout") or {} for path in paths]
    return list(dict.fromkeys(text for one in settings for text in one.get("stop_strings") or ()))


def _settings_of_run(path: str, section: str) -> ConfigValues | None:
    """Reads a section of a run's configuration; None if `path` is not the directory of a run."""
    run = pathlib.Path(path)
    return (load_object(run / "config.json").get(section) or {}) if (run / "checkpoints").is_dir() else None


def fields_of_run(path: str) -> dict[str, str]:
    """Finds the names of the question field and the answer field in the records of a model's run.

    Args:
      path: directory of a run or of a model; the directory of an exported model has only the question field's name.

    Returns:
      'question_field' and 'answer_field', as in `DataConfig`.
    """
    own = _settings_of_run(path, "data")
    if own is None:
        own = generate.prompt_settings_of(path)
    defaults = {"question_field": shape.QUESTION, "answer_field": shape.ANSWER}
    return {name: own.get(name) or default for name, default in defaults.items()}


def model_directory(name: str, path: str, out: pathlib.Path) -> str:
    """Finds the model's directory in Hugging Face's layout; exports a run's newest checkpoint to a directory in `out`.

    Args:
      name: 'model' or 'compare', for the name of the directory.
      path: directory of a model or a run.
      out: directory for the export.
    """
    if not (pathlib.Path(path) / "checkpoints").is_dir():
        return path
    from podrl.export import export_params, load_run

    with announce_if_long(f"Exporting the newest checkpoint of {path}", write_line):
        run, step, params = load_run(locate(path))
        target = out / f"{name}-step{step}"
        if not (target / "config.json").exists():
            export_params(run.config, params, run.tokenizer, target, dtype=run.dtype, prompts=run.prompts)
    return os.fspath(target)


class Scoring:
    """Scores completions by reward functions, by the rewards that a program gave, or by the accuracies of answers."""

    def __init__(
        self,
        rewards: Rewards | None,
        config: RewardConfig,
        right: float,
        n: int,
        *,
        acts: bool = False,
        question_field: str = shape.QUESTION,
        answer_field: str = shape.ANSWER,
    ) -> None:
        """Stores the arguments.

        Args:
          rewards: the reward functions; None scores with the program's rewards, or else with the accuracies.
          config: settings of the reward functions.
          right: smallest reward of the first function, or of the program, at which a sample counts as right.
          n: number of completions per record.
          acts: True if a program or an environment completes the records; it may give rewards.
          question_field, answer_field: names of the fields with the question and the answer in the records; a record
            without the question field may have 'question', 'prompt' or 'messages'.

        Raises:
          ValueError: a reward function and a score of the program have the same name.
        """
        if acts and rewards is not None and (taken := {"reward", "lost"} & set(rewards.names)):
            raise ValueError(
                f"--fns: {', '.join(sorted(taken))} is the name of a score of --program or --env, too: rename "
                "the function."
            )
        self._rewards, self._config, self._right, self._n, self._acts = rewards, config, right, n, acts
        self._question, self._answer = question_field, answer_field

    def _fields(self, record: Record) -> TaskFields:
        question_field = self._question if self._question in record else shape.QUESTION
        return shape.fields(record, question_field, self._answer)

    def read(self, path: str) -> Sequence[Record]:
        """Reads the records of a set.

        Args:
          path: file of the set.

        Raises:
          ValueError: a record cannot be scored; the message names its file and line.
        """
        source = generate.read_prompts(path, self._question)
        records = [source[i] for i in range(len(source))]
        # Fields that functions may take although records lack them.
        optional = {"sample_text": ""} | ({"turns": "", "model_text": ""} if self._acts else {})
        fields_of = sources.make_all(source, lambda record: {**optional, **self._fields(record)})
        tasks = [(source.place(i), fields) for i, fields in enumerate(fields_of)]
        lacks = [
            shape.without_answer(record, place, self._answer)
            for (place, fields), record in zip(tasks, records, strict=True)
            if "answer" not in fields
        ]
        if self._rewards is not None:
            self._rewards.check_answers([(lacks[0], ())] if lacks else [])
            self._rewards.check_fields(tasks, (), set[str]().union(*(fields for _, fields in tasks)))
        elif lacks and not self._acts:
            raise ValueError(f"{lacks[0]}: give it, name it by --answer_field, or --fns=FUNCTION.")
        return records

    def __call__(self, records: Sequence[TaskFields]) -> Scores:
        """Scores every completion of every record.

        The rewards of a program or an environment are the score 'reward'. A completion whose program failed or gave no
        reward counts as 0 in the score 'reward', and as 1 in the score 'lost'.

        Args:
          records: records that `read` has accepted, each with a list of n completions in "completions".

        Raises:
          ValueError: a function gave no reward, or there is neither a reward nor an answer.
          RewardError: a reward function failed.
        """
        completions = [one for record in records for one in record["completions"]]
        texts = [one["text"] for one in completions]
        own = [without_outputs(text) for text in texts]
        tasks = [self._fields({k: v for k, v in record.items() if k != "completions"}) for record in records]
        size = (len(records), self._n)
        rewards = [one.get("reward") for one in completions]
        acted: dict[str, Any] = {}
        # If no episode ended, every answer would count as wrong, and the accuracies would not show the reason.
        none_ended = self._acts and all(one.get("stop") == "deadline" for one in completions)
        if none_ended or any(reward is not None for reward in rewards):
            acted["reward"] = np.array([0.0 if reward is None else reward for reward in rewards])
            acted["lost"] = np.array([float(reward is None) for reward in rewards])
        if self._rewards is not None:
            fields: dict[str, Sequence[object]] = {"sample_text": texts}
            if self._acts:  # as in training, episodes add these fields
                fields |= {"turns": [one.get("turns", []) for one in completions], "model_text": own}
            scores = self._rewarded(self._rewards, tasks, texts, fields)
            first = next(iter(scores))
            scores = {"right": (scores[first] >= self._right).astype(float), **scores, **acted}
        elif acted:
            scores = {"right": (acted["reward"] >= self._right) * (1 - acted["lost"]), **acted}
        elif lacking := [fields for fields in tasks if "answer" not in fields]:
            raise ValueError(
                f"No completion has a reward, and a record lacks 'answer' (it has {', '.join(lacking[0])}): let the "
                "program return a reward, give the answers, or --fns=FUNCTION."
            )
        else:
            truths = [fields["answer"] for fields in tasks for _ in range(self._n)]
            found = [accuracies(text, truth) for text, truth in zip(own, truths, strict=True)]
            scores = {key: np.array([one[key] for one in found]) for key in found[0]}
            scores["right"] = scores.pop("answer")
        votes = [self._config.text.vote_of(text) for text in own]
        scores = {key: np.asarray(value).reshape(size) for key, value in scores.items()}
        pairs = zip(np.array(votes, object).reshape(size).tolist(), scores["right"].tolist(), strict=True)
        return {**scores, "majority": np.array([[majority(own, right)] for own, right in pairs])}

    def _rewarded(
        self,
        rewards: Rewards,
        tasks: Sequence[TaskFields],
        texts: list[str],
        of_samples: TaskColumns,
    ) -> JsonObject:
        """Computes the rewards of all completions.

        Args:
          rewards: the reward functions.
          tasks: fields of each record, as training has them.
          texts: completions, record by record, n of each.
          of_samples: fields by name, a value for each completion.

        Returns:
          Rewards by the name of the function, each (P * G).
        """
        names = list(dict.fromkeys(key for fields in tasks for key in fields))
        each = [fields for fields in tasks for _ in range(self._n)]
        fields = {key: [one.get(key) for one in each] for key in names} | dict(of_samples)
        scores = rewards.score([one["question"] for one in each], texts, fields)
        if np.isnan(scores).any():
            function, at = np.argwhere(np.isnan(scores))[0]
            raise ValueError(
                f"Reward function {rewards.names[function]} gave no reward for completion {at % self._n} of record "
                f"{at // self._n}: its process died on it twice. Repair the function, or leave it out of --fns."
            )
        return dict(zip(rewards.names, scores, strict=True))


def _summaries(scores: Scores, sources: Sequence[str]) -> JsonObject:
    """Summarises a set, and the records of each source (a value of the field --by) if there are several sources."""
    names = sorted(set(sources))
    where = {name: np.array([source == name for source in sources]) for name in names}
    split = {name: summary({k: v[rows] for k, v in scores.items()}) for name, rows in where.items()}
    return {"all": summary(scores)} | ({"by": split} if len(names) > 1 else {})


def _print(result: JsonObject, models: Mapping[str, str], sets: Mapping[str, str]) -> None:
    console = make_console()

    def row(title: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
        return [
            title,
            *(
                f"{100 * one['mean']:.1f}"
                + intervals.format_interval((one["low"], one["high"]) if "low" in one else None, percent=True)
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
            f"{one}: {plural(result['model'][one]['all']['right']['records'], 'record')}, in percent [95% interval]",
            columns,
            rows,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
