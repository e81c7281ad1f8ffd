"""The rollout side of a step: samples a batch, scores it, and replaces groups whose rewards are all equal."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from podrl import groups
from podrl.cluster.engines import able
from podrl.cluster.rl_cluster import RLCluster
from podrl.engine.config import Sampling
from podrl.environments.config import EnvironmentConfig
from podrl.learner.experience import join, places, select, take_prompts
from podrl.learner.scored_text import scored_text
from podrl.learner.settings import AlgorithmConfig
from podrl.mappings import EpisodeRecord, TaskColumns
from podrl.rewards.batch import OpenBatch
from podrl.rewards.compose import Rewards
from podrl.rollout.group_player import with_counts
from podrl.rollout.integrity import ages, beyond, faults
from podrl.rollout.partial import PartialBatch, join_prompts
from podrl.rollout.players import Player
from podrl.rollout.token_budget import TokenBudget
from podrl.rollout.worker import FinishedSample
from podrl.rundir.spans import Spans
from podrl.types import STOP_DEADLINE, STOP_FAILED, Experience, LeftOut, Policy, Prompts, Rollouts


@dataclasses.dataclass(eq=False)
class GroupInFlight:
    """The samples of some prompts, drawn and scored in windows.

    Attributes:
      prompts: prompts of the batch, including the prompts in reserve for dynamic sampling.
      step: step for which the prompts were submitted; with `rollout.clock='wall'` another step may train on them.
      player: draws the batch's samples with the engine.
      rewards: scores samples that have ended.
      scored_count: number of samples that have been passed to `rewards`.
      model_reward_B: the reward model's score of each sample; None until all samples have ended, or without a model.
      seconds: duration of the last window.
      worked: metrics of the engine's work in the last window.
    """

    prompts: Prompts
    step: int
    player: Player
    rewards: OpenBatch
    scored_count: int = 0
    model_reward_B: np.ndarray | None = None
    seconds: float = 0.0
    worked: Mapping[str, float] = dataclasses.field(default_factory=dict)


_LEAST_SHARE = 0.125  # smallest share of groups with a signal that `_further` assumes
_OF_TOKENS = ("mask_BT", "turn_reward_BT")  # arrays set to 0 for samples of the groups that `_left_out` leaves out


class Generator:
    """Turns prompts into experience on the hosts of the rollout mesh; one thread launches all of its programs."""

    def __init__(
        self,
        cluster: RLCluster,
        rewards: Rewards,
        config: AlgorithmConfig,
        environment: EnvironmentConfig | None = None,
        *,
        spans: Spans | None = None,
    ):
        """Stores the collaborators.

        Args:
          cluster: the cluster that samples.
          rewards: the reward functions.
          config: the algorithm's settings.
          environment: settings of the samples' environment; None for no environment.
          spans: records when sampling and scoring ran; None records nothing.
        """
        environment = environment or EnvironmentConfig()
        settings: Any = config
        self._cluster, self._rewards, self._config = cluster, rewards, config
        self._group_size: int = settings.num_generations
        # Groups without a signal (with equal rewards) are replaced here only with `rollout.clock='tokens'`. With
        # 'wall', WallClock drops these groups from the queue before it makes a batch.
        self._refills = config.dynamic_sampling and cluster.config.rollout().clock == "tokens"
        self._greedy = config.estimator().needs_greedy
        beside = self._greedy and able(cluster.config.rollout_engine, "greedy_members")
        self._beside = int(beside)  # number of greedy samples at the front of each group, drawn with the others
        self._sampling = dataclasses.replace(cluster.config.rollout().sampling(), greedy=1) if beside else None
        self._environment_weight, self._calls = environment.reward_weight, environment.calls_per_window
        self._spans = spans
        self._worked: dict[str, float] = {}  # metrics of the engine's work for the batch that is being made
        self._limit = cluster.config.rollout().max_tokens_to_generate

    def __call__(self, prompts: Prompts, policy: Policy, step: int) -> Experience:
        """Samples and scores every prompt; with dynamic sampling, keeps the first groups whose rewards differ.

        If rewards can be known early (`_sees_signals`), further prompts are sampled while the first groups still run.
        The groups that are kept do not depend on this timing: they are the first groups with a signal, in the order of
        the prompts.

        Args:
          prompts: prompts of `config.prompt_batches` batches; dynamic sampling skips prompts that it does not need.
          policy: weights on the rollout mesh.
          step: step that trains on the batch; a part of every sample's random key.

        Raises:
          BatchError: a reward function failed, or too many samples failed.
        """
        started, self._worked = time.monotonic(), {}
        prompts = self._opened(prompts)
        if self._sees_signals():
            first = self._sample_refilling(prompts, policy, step)
        else:
            first = self._sample_and_score(self._first_prompts(prompts), policy, step)
        experience = self._complete(prompts, policy, step, first)
        scoring = time.monotonic() - experience.seconds
        self._note("rollout", started, step, ended=scoring)
        self._note("reward", scoring, step)
        return experience

    def _note(self, name: str, started: float, step: int, *, ended: float | None = None) -> None:
        if self._spans is not None:
            ended = time.monotonic() if ended is None else ended
            self._spans.add(name, started, ended, lane="rollout", step=step + 1)

    # Sampling in windows.

    def begin(self, prompts: Prompts, step: int, partial: PartialBatch | None = None) -> GroupInFlight:
        """Opens a batch that is sampled under several policies.

        Args:
          prompts: prompts of `config.prompt_batches` batches; with `rollout.clock='wall'`, the prompt of one group.
          step: step for which the prompts are submitted; a part of every sample's random key.
          partial: samples that were begun before, by another host or before a restart; None if there are none.

        Raises:
          ValueError: `partial` has another number of samples than the settings ask for.
        """
        prompts = self._opened(prompts)
        first = self._first_prompts(prompts)
        samples = len(first.length_P) * (self._beside + self._group_size)
        if partial is not None and len(partial.samples) != samples:
            raise ValueError(
                f"The checkpoint holds {len(partial.samples)} samples of the batch of step {step}, and the settings "
                f"ask for {samples}: set rollout.prompts_per_step and {self._config.section}.num_generations to their "
                "values at the start of this run."
            )
        return self._open_group(prompts, first, step, partial)

    def _opened(self, prompts: Prompts) -> Prompts:
        """Cuts prompts that observations go on with. It is done here because the rows are joined to these prompts."""
        client = self._cluster.env_client
        return prompts if client is None else client.opened(prompts)

    def _open_group(
        self, prompts: Prompts, first: Prompts, step: int, partial: PartialBatch | None = None
    ) -> GroupInFlight:
        of = {"group_size": self._beside + self._group_size, "sampling": self._sampling}
        player = self._cluster.rollout.player(first, step=step, partial=partial, **of)
        return GroupInFlight(prompts, step, player, self._open(first, self._index(first), self._beside))

    def play(
        self,
        in_flight: Sequence[tuple[GroupInFlight, int | TokenBudget | None]],
        policy: Policy,
        *,
        halt: Callable[[], bool] | None = None,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Plays batches under one policy until each sample has ended or has drawn its tokens of this window.

        Args:
          in_flight: the batches, each with the number of tokens that a sample draws (None for all its remaining
            tokens), or with a budget. `halt` and `on_ended` may append further batches, which are played, too.
          policy: weights on the rollout mesh.
          halt: function called between dispatches; the call ends when it returns True. None never ends the call early.
          on_ended: function called when samples of a batch have ended and have been passed to the reward functions.
        """
        started = time.monotonic()
        players: list[tuple[Player, int | TokenBudget | None]] = []
        by_player: dict[int, GroupInFlight] = {}

        def add() -> None:
            new = in_flight[len(players) :]
            players.extend((group.player, quantum) for group, quantum in new)
            by_player.update((id(group.player), group) for group, _ in new)

        def halted() -> bool:
            stops = halt is not None and halt()
            add()
            return stops

        add()
        stop = None if halt is None else halted
        for player, sample in self._cluster.rollout.advance(policy, players, calls=self._calls, halt=stop):
            group = by_player[id(player)]
            self._take(group.rewards, sample, self._beside + self._group_size)
            group.scored_count += 1
            if group.scored_count == player.request.samples:
                self._score_by_model(group)
            # If several samples ended at the same time, `on_ended` is called only after the last of them.
            if group.scored_count == len(player.done):
                on_ended()
                add()
        for group, _ in in_flight:
            group.seconds, group.worked = time.monotonic() - started, self._cluster.rollout.stats.metrics()
        self._note("rollout", started, in_flight[0][0].step)

    def finish(self, group: GroupInFlight, policy: Policy) -> Experience:
        """Completes a batch whose samples have all ended; raises the errors of `__call__`."""
        experience = self._gather([group], group.prompts, policy, group.step, group.seconds, group.worked)
        return with_counts(experience, {"time/window": group.seconds})

    def gather(self, in_flight: Sequence[GroupInFlight], step: int, seconds: float) -> Experience:
        """Joins groups whose samples have all ended into one batch; raises the errors of `__call__`.

        Args:
          in_flight: the groups, each with the samples of one prompt, in the order of the batch.
          step: step that trains on the batch.
          seconds: wall time that sampling the batch took.
        """
        prompts = join_prompts([group.player.request.prompts for group in in_flight])
        # No weights are needed: `gather` is called only with `rollout.clock='wall'`, where podrl's engine has drawn the
        # greedy samples with the others.
        return self._gather(in_flight, prompts, Policy({}, step), step, seconds, {})

    def _gather(
        self,
        in_flight: Sequence[GroupInFlight],
        prompts: Prompts,
        policy: Policy,
        step: int,
        seconds: float,
        worked: Mapping[str, float],
    ) -> Experience:
        started, self._worked = time.monotonic(), dict(worked)
        scored = self._join_samples(in_flight, prompts, seconds)
        self._note("reward", started, step)
        return self._complete(prompts, policy, step, scored)

    def _join_samples(
        self, in_flight: Sequence[GroupInFlight], prompts: Prompts, seconds: float
    ) -> tuple[Rollouts, np.ndarray, float]:
        """Joins the samples of `in_flight`, which are of the first prompts of `prompts`, in order.

        Returns the same values as `_sample_and_score`.
        """
        started = time.monotonic()
        try:
            parts = [self._cluster.rollout.rows(group.player, 0.0) for group in in_flight]
            rewards = [
                self._scores(part, group.rewards, group.model_reward_B, beside=self._beside)
                for part, group in zip(parts, in_flight, strict=True)
            ]
        finally:
            for group in in_flight:
                group.rewards.cancel()
        rollouts = dataclasses.replace(join(parts, prompts), seconds=seconds)
        return rollouts, np.concatenate(rewards, axis=1), time.monotonic() - started

    def signal(self, group: GroupInFlight) -> bool | None:
        """Tells whether the rewards of one prompt's samples differ.

        Returns:
          True if they differ, or if the run has no dynamic sampling; False if all are equal; None as long as a sample
          has not ended or a reward is not known.

        Raises:
          BatchError: a reward function failed.
        """
        if not self._config.dynamic_sampling:
            return True
        if group.scored_count < group.player.request.samples or not group.rewards.settled():
            return None
        rollouts = self._cluster.rollout.rows(group.player, 0.0)
        reward_FB = self._scores(rollouts, group.rewards, group.model_reward_B, beside=self._beside)
        return bool(self._signal(reward_FB, rollouts.group_B)[0])

    def give_up(self, group: GroupInFlight) -> None:
        """Cancels the open samples of a batch, and the reward calls that have not begun."""
        group.player.abandon()
        group.rewards.cancel()

    def _index(self, prompts: Prompts, group_size: int = 0) -> np.ndarray:
        """Returns `group_B`, the row of each sample's prompt in `prompts`; all prompts have equally many samples."""
        return groups.complete(len(prompts.length_P), group_size or self._beside + self._group_size)

    def _first_prompts(self, prompts: Prompts) -> Prompts:
        """Returns the prompts of a batch that are sampled first; the others are in reserve for dynamic sampling."""
        batches = self._config.prompt_batches if self._refills else 1
        return take_prompts(prompts, np.arange(len(prompts.length_P) // batches))

    def _complete(
        self, prompts: Prompts, policy: Policy, step: int, first: tuple[Rollouts, np.ndarray, float]
    ) -> Experience:
        """Replaces groups without a signal, and computes the rewards that the algorithm sees.

        `first`: result of `_sample_and_score` for the prompts that were sampled first.
        """
        rollouts, reward_FB, seconds = first
        counts: dict[str, float] = {}
        if self._refills:
            rollouts, reward_FB, seconds, counts = self._refill(prompts, policy, step, first)
        rollouts, reward_FB, greedy_P = self._without_greedy(rollouts, reward_FB)
        counts |= self._worked
        counts |= faults(rollouts, step=step, max_staleness=self._config.max_staleness)
        if self._config.max_staleness:
            counts |= ages(rollouts, step=step)
        if late := self._rewards.take_late():
            counts["rollout/late_rewards"] = float(late)
        reward_B = self._config.shaped(self._rewards.combine(reward_FB), rollouts, self._limit)
        greedy_B = np.zeros_like(reward_B)
        if self._greedy:
            if greedy_P is None:
                greedy_P, more = self._greedy_rewards(rollouts.prompts, policy, step)
                seconds += more
            greedy_B = greedy_P[rollouts.group_B]
        reward_B = of_the_others(reward_B, rollouts.stop_B, rollouts.group_B)
        turn_reward_BT = np.float32(self._environment_weight) * rollouts.turn_reward_BT
        rollouts = dataclasses.replace(rollouts, turn_reward_BT=turn_reward_BT)
        lost_B = self._left_out(rollouts, reward_B, greedy_B)
        if (gone_B := lost_B != LeftOut.NOT).any():
            kept = {name: np.where(gone_B[:, None], np.float32(0), getattr(rollouts, name)) for name in _OF_TOKENS}
            rollouts = dataclasses.replace(rollouts, **kept)
            reward_B, greedy_B = (np.where(gone_B, 0.0, value_B) for value_B in (reward_B, greedy_B))
            if failed := (rollouts.stop_B == STOP_FAILED).sum():
                counts["rollout/failed"] = float(failed)
        if self._config.stale_bound is not None:
            # Stale samples keep their masks: their tokens still count in denominators, KL and entropy.
            lost_B = np.where(beyond(rollouts, step - self._config.stale_bound) & ~gone_B, LeftOut.STALE, lost_B)
        if self._cluster.config.rollout().filtered:
            counts["rollout/kept_tokens"] = float((rollouts.kept_BT * rollouts.mask_BT).sum())
        return Experience(rollouts, reward_FB, reward_B, greedy_B, seconds, counts, lost_B)

    def _without_greedy(
        self, rollouts: Rollouts, reward_FB: np.ndarray
    ) -> tuple[Rollouts, np.ndarray, np.ndarray | None]:
        """Takes the greedy samples out of the groups.

        Returns:
          The samples that are not greedy; their rewards; the reward of each prompt's greedy sample, or None if greedy
          samples are not in the groups.
        """
        if not self._beside:
            return rollouts, reward_FB, None
        greedy_B = groups.member_of(rollouts.group_B) < self._beside
        reward_P = self._rewards.combine(reward_FB[:, greedy_B])
        reward_P = self._config.shaped(reward_P, places(rollouts, slice(0, self._beside)), self._limit)
        return places(rollouts, slice(self._beside, None)), reward_FB[:, ~greedy_B], reward_P

    def _left_out(self, rollouts: Rollouts, reward_B: np.ndarray, greedy_B: np.ndarray) -> np.ndarray:
        """Returns each sample's LeftOut code: samples that failed or have no reward are left out of the loss, with
        their groups.

        A sample has no reward if its own reward, or the greedy reward of its prompt, is NaN.
        """
        unknown_B = np.isnan(reward_B) | np.isnan(greedy_B)
        found = {
            LeftOut.FAILED: rollouts.stop_B == STOP_FAILED,
            # A sample out of time has the mean reward of the other samples of its group, or NaN if there are none.
            LeftOut.OUT_OF_TIME: unknown_B & (rollouts.stop_B == STOP_DEADLINE),
            LeftOut.NO_REWARD: unknown_B,
        }
        own_B = np.select([*found.values()], [*found], LeftOut.NOT)
        with_them_B = groups.any_of(own_B != LeftOut.NOT, rollouts.group_B)
        return np.where(with_them_B & (own_B == LeftOut.NOT), LeftOut.GROUP, own_B).astype(np.int32)

    def _sample_and_score(
        self, prompts: Prompts, policy: Policy, step: int, *, group_size: int = 0, sampling: Sampling | None = None
    ) -> tuple[Rollouts, np.ndarray, float]:
        """Samples prompts, and scores samples that have ended while others are still sampled.

        Returns:
          The samples; each function's reward of each sample, (F, B), NaN for a failed sample; the seconds that scoring
          took after the last sample had ended.
        """
        beside = 0 if group_size else self._beside
        group_size, sampling = group_size or beside + self._group_size, sampling or self._sampling
        batch = self._open(prompts, self._index(prompts, group_size), beside)

        def ended(sample: FinishedSample) -> None:
            self._take(batch, sample, group_size)

        try:
            rollouts = self._cluster.generate(
                prompts, policy, group_size=group_size, step=step, sampling=sampling, ended=ended
            )
            self._count_work()
            started = time.monotonic()
            return rollouts, self._scores(rollouts, batch, beside=beside), time.monotonic() - started
        finally:
            batch.cancel()

    def _count_work(self) -> None:
        """Adds the engine's counts of its last call to the batch's metrics, if the engine keeps counts."""
        if able(self._cluster.config.rollout_engine, "tells"):
            added = self._cluster.rollout.stats.metrics()
            self._worked = {name: self._worked.get(name, 0.0) + value for name, value in added.items()}

    def judged(self, rollouts: Rollouts, *, at_once: int) -> dict[str, np.ndarray]:
        """Scores samples that are not trained on: 'reward' as in training, 'reward/NAME' of each function.

        Args:
          rollouts: the samples; a failed sample gets the reward NaN.
          at_once: number of prompts whose samples the reward functions get as one batch.
        """
        prompts_P = np.arange(len(rollouts.prompts.length_P))
        cuts = [select(rollouts, prompts_P[i : i + at_once]) for i in range(0, len(prompts_P), at_once)]
        reward_FB = np.concatenate([self._scores(cut, self._open(cut.prompts, cut.group_B)) for cut in cuts], axis=1)
        total_B = self._config.shaped(self._rewards.combine(reward_FB), rollouts, self._limit)
        named = zip(self._rewards.names, reward_FB, strict=True)
        return {"reward": total_B} | {f"reward/{name}": reward_B for name, reward_B in named}

    def _open(self, prompts: Prompts, group_B: np.ndarray, beside: int = 0) -> OpenBatch:
        texts, fields = repeated(prompts.text, prompts.fields, group_B)
        return self._rewards.open(texts, fields, group_B=apart(group_B, beside))

    def _take(self, batch: OpenBatch, sample: FinishedSample, group_size: int) -> None:
        own = [token for token, version in zip(sample.tokens, sample.versions, strict=True) if version >= 0]
        b = sample.prompt * group_size + sample.sample
        self._end(batch, b, sample.stop, sample.completion, sample.episode, own)

    def _end(
        self, batch: OpenBatch, b: int, stop: int, completion: str, episode: EpisodeRecord, own: Sequence[int]
    ) -> None:
        """Passes an ended sample to the reward functions; with an environment, also its turns and the model's own text.

        A failed sample is left out: no function scores it.

        Args:
          batch: the batch that the reward functions score.
          b: number of the sample in the batch.
          stop: reason why the sample ended.
          completion: text of the sample after the prompt.
          episode: record of the sample's episode.
          own: token ids that the model sampled.
        """
        fields, text = {}, completion
        if self._cluster.env_client is not None:
            text, words = scored_text(completion, episode), self._cluster.tokenizer.decode(own)
            fields = {"turns": list(episode["turns"]), "model_text": words, "sample_text": completion}
        if stop == STOP_FAILED:
            batch.leave_out(b)
        else:
            batch.add(b, text, fields)

    def _score_by_model(self, group: GroupInFlight) -> None:
        """Runs the reward model on a batch whose samples have all ended, on the thread that uses the rollout mesh.

        With `rollout.clock='wall'` another thread puts the batch together while the engine goes on. If both threads
        launched programs on the same devices, the programs could wait for each other.
        """
        if self._cluster.reward_model is not None:
            group.model_reward_B = self._model_rewards(self._cluster.rollout.rows(group.player, 0.0))

    def _model_rewards(self, rollouts: Rollouts) -> np.ndarray | None:
        if self._cluster.reward_model is None:
            return None
        fields = repeated(rollouts.prompts.text, rollouts.prompts.fields, rollouts.group_B)[1]
        return self._cluster.reward_model.score_samples(rollouts, fields)

    def _scores(
        self, rollouts: Rollouts, batch: OpenBatch, model_reward_B: np.ndarray | None = None, *, beside: int = 0
    ) -> np.ndarray:
        """Returns the rewards of samples, (F, B), by every function, the reward model and the samples' environments.

        A failed sample has NaN. A sample out of time has the mean of its group's other samples. The first `beside`
        samples of a group are greedy and do not count for this mean.
        """
        for b in batch.missing():  # samples without tokens, or all samples of an engine that does not report endings
            own = rollouts.tokens_BT[b, rollouts.mask_BT[b] > 0].tolist()
            self._end(batch, b, rollouts.stop_B[b], rollouts.completions[b], rollouts.episodes[b], own)
        model_reward_B = self._model_rewards(rollouts) if model_reward_B is None else model_reward_B
        more = [] if model_reward_B is None else [model_reward_B]
        if self._cluster.env_client is not None:
            more.append(rollouts.turn_reward_BT.sum(axis=1, dtype=np.float64))
        scored_FB = batch.result()
        failed_B = (rollouts.stop_B == STOP_FAILED) | np.isnan(scored_FB).any(axis=0)
        rows = [scored_FB, *(np.where(failed_B, np.nan, row_B)[None] for row_B in more)]
        return of_the_others(np.concatenate(rows), rollouts.stop_B, apart(rollouts.group_B, beside))

    def _sees_signals(self) -> bool:
        """True if groups are replaced here, and all rewards of a group can be known while others are still sampled."""
        if not self._refills or self._cluster.reward_model or self._cluster.env_client:
            return False
        return able(self._cluster.config.rollout_engine, "windows")

    def _sample_refilling(self, prompts: Prompts, policy: Policy, step: int) -> tuple[Rollouts, np.ndarray, float]:
        """Samples a batch, and adds further prompts before its end if groups turn out to have no signal."""
        started = time.perf_counter()
        count = wanted = len(self._first_prompts(prompts).length_P)
        in_flight = [self._open_group(prompts, self._first_prompts(prompts), step)]
        players: list[tuple[Player, None]] = [(in_flight[0].player, None)]
        try:
            for player, sample in self._cluster.rollout.advance(policy, players):
                group = next(group for group in in_flight if group.player is player)
                self._take(group.rewards, sample, self._beside + self._group_size)
                signal = np.concatenate([self._known_signals(group) for group in in_flight])
                # Prompts are added only once at least half the wanted number of groups is known: before, the share of
                # groups with a signal is too uncertain to tell how many prompts are missing.
                more = _further(signal, wanted, count) if 2 * len(signal) >= wanted else 0
                if (end := min(count + more, len(prompts.length_P))) > count:
                    in_flight.append(self._open_group(prompts, take_prompts(prompts, np.arange(count, end)), step))
                    players.append((in_flight[-1].player, None))
                    count = end
        except BaseException:
            for group in in_flight:
                group.rewards.cancel()
            raise
        self._count_work()
        return self._join_samples(in_flight, prompts, time.perf_counter() - started)

    def _known_signals(self, group: GroupInFlight) -> np.ndarray:
        """Marks the groups with unequal rewards; leaves out groups that are not fully scored yet."""
        reward_FB, known_B = group.rewards.known()
        group_B = self._index(group.player.request.prompts)
        whole_B = ~groups.any_of(~known_B, group_B)
        return self._signal(reward_FB[:, whole_B], group_B[whole_B])

    def _refill(
        self, prompts: Prompts, policy: Policy, step: int, first: tuple[Rollouts, np.ndarray, float]
    ) -> tuple[Rollouts, np.ndarray, float, dict[str, float]]:
        """Samples more prompts until enough groups have unequal rewards, or no prompt is left (DAPO, eq. 11).

        Each round samples as many prompts as are likely to be enough, by the share of groups with a signal so far. If
        too few groups have a signal, the first groups without a signal fill the batch.
        """
        wanted = len(self._first_prompts(prompts).length_P)
        parts, seconds = [first], first[2]
        signal = self._signal(first[1], first[0].group_B)
        count = len(signal)
        while signal.sum() < wanted and count < len(prompts.length_P):
            rows = np.arange(count, min(count + _further(signal, wanted, count), len(prompts.length_P)))
            parts.append(self._sample_and_score(take_prompts(prompts, rows), policy, step))
            signal = np.concatenate([signal, self._signal(parts[-1][1], parts[-1][0].group_B)])
            seconds += parts[-1][2]
            count += len(rows)
        rollouts = join([part[0] for part in parts], prompts)
        reward_FB = np.concatenate([part[1] for part in parts], axis=1)
        chosen = np.sort(np.concatenate([np.flatnonzero(signal)[:wanted], np.flatnonzero(~signal)])[:wanted])
        # Groups after the last kept group do not count, because their number depends on when rewards became known.
        drawn = int(chosen[-1]) + 1 if signal[chosen].all() else count
        counts = {
            "dynamic_sampling/groups_drawn": float(drawn),
            "dynamic_sampling/groups_replaced": float((~signal[:wanted]).sum() - (~signal[chosen]).sum()),
            "dynamic_sampling/groups_left_without_signal": float((~signal[chosen]).sum()),
        }
        if drawn > wanted:
            counts[f"loss/left_out/{LeftOut.DYNAMIC_SAMPLING.name.lower()}"] = float(
                (drawn - wanted) * self._group_size
            )
        rows_B = groups.rows_of(rollouts.group_B, chosen)
        return select(rollouts, chosen), reward_FB[:, rows_B], seconds, counts

    def _signal(self, reward_FB: np.ndarray, group_B: np.ndarray) -> np.ndarray:
        """Marks the groups with unequal rewards, in the order of the groups; greedy samples do not count."""
        own_B = groups.member_of(group_B) >= self._beside
        reward_B, group_B = self._rewards.combine(reward_FB[:, own_B]), group_B[own_B]
        return groups.spread(reward_B, group_B)[groups.first_of(group_B)] > 0

    def _greedy_rewards(self, prompts: Prompts, policy: Policy, step: int) -> tuple[np.ndarray, float]:
        """Samples each prompt greedily, for an engine that cannot draw greedy samples together with others.

        Returns:
          The reward of each prompt's greedy completion, and the seconds that sampling and scoring took.
        """
        sampling = Sampling(
            temperature=0.0, max_new=self._limit, stop_strings=self._cluster.config.rollout().stop_strings
        )
        rollouts, reward_FB, seconds = self._sample_and_score(prompts, policy, step, group_size=1, sampling=sampling)
        reward_P = self._config.shaped(self._rewards.combine(reward_FB), rollouts, self._limit)
        return reward_P, seconds + rollouts.seconds


def _further(signal: np.ndarray, wanted: int, count: int) -> int:
    """Estimates how many more groups to sample to get `wanted` groups with a signal.

    Args:
      signal: True if rewards are unequal, for each group whose rewards are known.
      wanted: number of groups with a signal to reach.
      count: number of groups that are sampled or being sampled, whether their rewards are known or not.
    """
    share = max(float(signal.mean()), _LEAST_SHARE) if len(signal) else 1.0
    lacking = wanted - int(signal.sum()) - share * (count - len(signal))
    return max(0, math.ceil(lacking / share))


def apart(group_B: np.ndarray, beside: int) -> np.ndarray:
    """Returns group numbers in which each group's first `beside` samples, the greedy ones, form a separate group."""
    if not beside:
        return group_B
    return np.where(groups.member_of(group_B) < beside, group_B.max(initial=0) + 1 + group_B, group_B)


def of_the_others(reward_XB: np.ndarray, stop_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Gives a sample out of time the mean reward of its group's other samples, so that it does not move the baseline.

    Args:
      reward_XB: rewards of B samples; X stands for any leading axes.
      stop_B: reason why each sample ended; STOP_DEADLINE marks a sample out of time.
      group_B: group of each sample.

    Returns:
      Rewards; NaN for a sample out of time whose whole group is out of time.
    """
    late_B = stop_B == STOP_DEADLINE
    if not late_B.any():
        return reward_XB
    replaced_XB = np.array(reward_XB, dtype=np.result_type(reward_XB, np.float64))
    for rows_PG in groups.by_size(group_B):
        late_PG, reward_XPG = late_B[rows_PG], reward_XB[..., rows_PG]
        count_P = (~late_PG).sum(axis=1)
        total_XP = np.where(late_PG, 0.0, reward_XPG).sum(axis=-1)
        mean_XP = np.where(count_P > 0, total_XP / np.maximum(count_P, 1), np.nan)
        replaced_XB[..., rows_PG] = np.where(late_PG, mean_XP[..., None], reward_XPG)
    return replaced_XB


def repeated(text: Sequence[str], fields: TaskColumns, group_B: np.ndarray) -> tuple[list[str], dict[str, list[Any]]]:
    """Returns the text and the fields of each sample's prompt, B values each, in the order of `group_B`."""
    of_samples = {name: groups.repeated(values, group_B) for name, values in fields.items()}
    return groups.repeated(text, group_B), of_samples
