"""Reports a step of reinforcement learning: metrics, records of samples, and the check on sampler mismatch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from podrl import groups
from podrl.algorithms.mismatch import derived, divided
from podrl.data.pools import Curriculum
from podrl.learner.control import MismatchGate
from podrl.learner.generation import repeated
from podrl.learner.settings import GRPOConfig, PPOConfig
from podrl.mappings import EpisodeRecord, JsonObject, LogRecord, Metrics, TurnRecord
from podrl.rundir.metrics import UserMetrics
from podrl.types import STOP_CALLS, STOP_DEADLINE, STOP_LENGTH, Experience, Rollouts

# metric_fn(prompts, completions, rewards, **fields) -> {name: value, or (value, function of a list of values)}
MetricFn = Callable[..., Metrics]


class SampleReport:
    """Implements podrl.learner.recorder.StepReport for GRPO and PPO."""

    def __init__(
        self,
        config: GRPOConfig | PPOConfig,
        *,
        reward_names: Sequence[str],
        metric_fns: Sequence[MetricFn],
        watched: Sequence[tuple[str, str]],
        skipped: Callable[[], int],
        curriculum: Curriculum | None = None,
        groups: Sequence[str] = (),
    ):
        """Stores the settings.

        Args:
          config: the algorithm's settings.
          reward_names: names of the reward functions, in their order.
          metric_fns: metric functions of the user, called every step.
          watched: metrics of the progress line.
          skipped: function that returns the number of prompts left out so far because they were too long.
          curriculum: curriculum of the prompts; None without one.
          groups: names of groups of prompts, by the prompts' field `group`; each group's rewards are also metrics.
        """
        self._config, self._names, self._metric_fns = config, reward_names, metric_fns
        self._watched, self._skipped, self._curriculum, self._groups = watched, skipped, curriculum, groups
        self._gate = MismatchGate(
            config.mismatch_bound,
            config.mismatch_patience,
            section=config.section,
            stale=config.max_staleness > 0,
        )

    def describe(self, experience: Experience) -> dict[str, float]:
        rollouts = experience.rollouts
        sampled_B, counted_B = rollouts.mask_BT.sum(axis=1), experience.rewarded()
        metrics = self._of_rewards(experience, counted_B) if counted_B.any() else {}
        metrics |= {
            "tokens/completion": float(sampled_B.sum()),
            "tokens/all": float(rollouts.length_B.sum()),
            "tokens/prompt": float(rollouts.prompts.length_P.sum()),
            "completion/length_mean": float(sampled_B.mean()),
            "completion/length_max": float(sampled_B.max()),
            "completion/truncated": float((rollouts.stop_B == STOP_LENGTH).mean()),
            "time/rollout": rollouts.seconds,
            "time/reward": experience.seconds,
            "rollout/tokens_per_s": float(sampled_B.sum() / max(rollouts.seconds, 1e-9)),
            "data/skipped_prompts": float(self._skipped()),
            "data/first_prompt": float(rollouts.prompts.index_P.min()),
            "data/last_prompt": float(rollouts.prompts.index_P.max()),
        }
        metrics |= episode_metrics(rollouts)
        if self._curriculum is not None:
            metrics |= {f"data/curriculum/{pool}": float(n) for pool, n in self._curriculum.sizes().items()}
        counts, tokens = dict(experience.counts), max(metrics["tokens/completion"], 1.0)
        if "rollout/kept_tokens" in counts:
            metrics["rollout/kept_mass"] = counts.pop("rollout/kept_tokens") / tokens
        if "rollout/age" in counts:
            metrics["rollout/staleness"] = counts.pop("rollout/age") / tokens
            metrics["rollout/mixed_samples"] = counts.pop("rollout/mixed_samples") / len(counted_B)
        return metrics | counts | self._of_the_user(experience)

    def _of_rewards(self, experience: Experience, counted_B: np.ndarray) -> dict[str, float]:
        reward_B, group_B = experience.reward_B[counted_B], experience.rollouts.group_B
        spread_P = groups.spread(reward_B, group_B[counted_B])[groups.first_of(group_B[counted_B])]
        each = dict(zip(self._names, experience.reward_FB, strict=True))
        metrics = {
            "reward/mean": float(reward_B.mean()),
            "reward/std": float(reward_B.std()),
            "reward/groups_without_signal": float((spread_P == 0).mean()),
            **{f"reward/{name}": float(each_B[counted_B].mean()) for name, each_B in each.items()},
            **{f"reward/zero/{name}": float((each_B[counted_B] == 0).mean()) for name, each_B in each.items()},
        }
        named_P = self._groups_of(experience.rollouts)
        for group in self._groups:
            if (own_B := counted_B & np.array([named == group for named in named_P])[group_B]).any():
                metrics[f"group/{group}/reward"] = float(experience.reward_B[own_B].mean())
                metrics[f"group/{group}/prompts"] = float(len(np.unique(group_B[own_B])))
                metrics |= {f"group/{group}/reward/{name}": float(r_B[own_B].mean()) for name, r_B in each.items()}
        return metrics

    def finished(self, values: dict[str, float]) -> dict[str, float]:
        """Replaces `sampler/moment_*` by measures made from them, and makes metrics by age means over the tokens of an
        age (`divided`)."""
        if "sampler/moment_x" not in values:
            return values
        values |= derived(values)
        return {name: value for name, value in divided(values).items() if not name.startswith("sampler/moment_")}

    def samples(self, experience: Experience) -> Sequence[LogRecord]:
        """Makes a record of each prompt's first sample, if the sample's rewards count: text, rewards, group, answer."""
        rollouts, rewarded_B, named_P = experience.rollouts, experience.rewarded(), self._groups_of(experience.rollouts)
        truth_P = rollouts.prompts.fields.get("answer", [None] * len(named_P))
        return [
            {
                "prompt": rollouts.prompts.text[p],
                "completion": rollouts.completions[b],
                **({} if truth_P[p] is None else {"truth": truth_P[p]}),
                **({"group": named_P[p]} if named_P[p] else {}),
                "reward": float(experience.reward_B[b]),
                **_turns(rollouts.episodes[b]),
                **{name: float(r_B[b]) for name, r_B in zip(self._names, experience.reward_FB, strict=True)},
            }
            for b, p in ((b, int(rollouts.group_B[b])) for b in groups.first_of(rollouts.group_B).tolist())
            if rewarded_B[b]
        ]

    def _groups_of(self, rollouts: Rollouts) -> Sequence[Any]:
        """Returns the field `group` of every prompt, which names a set of prompts with metrics of its own.

        None stands for a prompt without the field, and for every prompt if the report has no groups.
        """
        nobody = [None] * len(rollouts.prompts.length_P)
        return rollouts.prompts.fields.get("group", nobody) if self._groups else nobody

    def watched(self) -> Sequence[tuple[str, str]]:
        return self._watched

    def check(self, step: int, values: Mapping[str, float]) -> None:
        self._gate.check(step, values)

    def _of_the_user(self, experience: Experience) -> dict[str, float]:
        """Computes the user's metric functions on the samples of a batch whose rewards count."""
        if not self._metric_fns:
            return {}
        batch_prompts, counted = experience.rollouts.prompts, np.flatnonzero(experience.rewarded()).tolist()
        prompts, fields = repeated(batch_prompts.text, batch_prompts.fields, experience.rollouts.group_B)
        chosen = {name: [values[b] for b in counted] for name, values in fields.items()}
        named: dict[str, object] = {}
        for fn in self._metric_fns:
            completions = [experience.rollouts.completions[b] for b in counted]
            rewards = experience.reward_B[counted].tolist()
            named.update(fn([prompts[b] for b in counted], completions, rewards, **chosen))
        values = UserMetrics()
        values.add(named)
        return values.take()


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Computes the metrics of the episodes that have turns; none if no sample has an environment.

    episode/* are means of turns, calls and tokens from outside, percentiles of seconds, and numbers of episodes that a
    limit ended. tools/NAME/* are metrics of one tool. env/NAME and front/NAME are means of the metrics in the episodes'
    records.
    """
    episodes = [episode for episode in rollouts.episodes if episode["turns"]]
    if not episodes:  # no sample has a turn; samples that ran out of time are still reported
        lost = zip(rollouts.episodes, rollouts.stop_B, strict=True)
        episodes = [episode for episode, stop in lost if stop == STOP_DEADLINE]
    if not episodes:
        return {}
    by: dict[str, list[TurnRecord]] = {}
    for turn in (turn for episode in episodes for turn in episode["turns"]):
        known = turn.get("failed") not in ("no_call", "unknown_tool")  # else the model invented the name in `by`
        by.setdefault(turn["by"] if known else "unknown", []).append(turn)
    model, environment = by.pop("model", []), by.pop("environment", [])
    called = [turn for turns in by.values() for turn in turns]
    B = len(episodes)
    seconds = np.percentile([episode["seconds"] for episode in episodes], [50, 95])
    metrics = {
        "episode/turns": len(model) / B,
        "episode/calls": len(called) / B,
        "episode/failed_calls": sum(bool(turn.get("failed")) for turn in called) / B,
        "episode/given_tokens": sum(turn["tokens"] for turn in (*called, *environment)) / B,
        "episode/seconds_p50": float(seconds[0]),
        "episode/seconds_p95": float(seconds[1]),
        "episode/out_of_time": float((rollouts.stop_B == STOP_DEADLINE).sum()),
        "episode/out_of_calls": float((rollouts.stop_B == STOP_CALLS).sum()),
    }
    for name, turns in by.items():
        metrics |= {
            f"tools/{name}/calls": float(len(turns)),
            f"tools/{name}/failures": float(sum(bool(turn.get("failed")) for turn in turns)),
            f"tools/{name}/seconds_p95": float(np.percentile([turn.get("seconds", 0.0) for turn in turns], 95)),
            f"tools/{name}/output_tokens": sum(turn["tokens"] for turn in turns) / len(turns),
        }
    named: dict[str, list[float]] = {}
    for episode in rollouts.episodes:
        for name, value in episode["metrics"].items():
            named.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in named.items()}
    front = {name: mean for name, mean in means.items() if name.startswith("front/")}
    return metrics | front | {f"env/{name}": mean for name, mean in means.items() if name not in front}


def _turns(episode: EpisodeRecord) -> JsonObject:
    """Returns the turns for a sample's record, if its episode has turns."""
    return {"turns": episode["turns"]} if episode["turns"] else {}
