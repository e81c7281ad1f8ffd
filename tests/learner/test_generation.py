"""The rollout side of a step: groups are kept, replaced and compared with a greedy completion."""

import types
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from podrl.engine.config import RolloutConfig
from podrl.learner.generation import Generator
from podrl.learner.settings import GRPOConfig
from podrl.rewards.batch import OpenBatch, RewardError, Scorer
from podrl.rollout.partial import take_prompts
from podrl.rollout.worker import FinishedSample
from podrl.types import NO_EPISODE, STOP_EOS, STOP_FAILED, STOP_LENGTH, Policy, Prompts, Rollouts, blank_columns

LIMIT, G = 6, 2


def prompts(count):
    return Prompts(
        np.arange(count, dtype=np.int32)[:, None],
        np.ones(count, np.int32),
        100 + np.arange(count),
        [f"prompt {p}" for p in range(count)],
        {"p": list(range(count))},
        b"after all of them",
    )


class Engine:
    """An engine whose samples have three tokens and the text 'PROMPT MEMBER sampled' or 'PROMPT MEMBER greedy'; it
    records its requests."""

    reward_model = env_client = None

    def __init__(self, failed=()):
        self.asked: list[tuple[list[int], int]] = []
        rollout = lambda: RolloutConfig(max_tokens_to_generate=LIMIT, top_k=5)  # noqa: E731
        self.config = types.SimpleNamespace(rollout=rollout, rollout_engine=Engine)
        self._failed = failed

    def generate(self, batch, policy, *, group_size, step, sampling=None, ended=None):
        self.asked.append((batch.index_P.tolist(), group_size))
        B, T = len(batch.length_P) * group_size, 1 + LIMIT
        mask_BT = np.tile((np.arange(T) >= 1) & (np.arange(T) <= 3), (B, 1)).astype(np.float32)
        greedy = sampling is not None and sampling.temperature == 0
        members = [(int(p), g) for p in batch.tokens_PT[:, 0] for g in range(group_size)]
        tokens_BT = np.array([[p, *[p * 10 + g] * LIMIT] for p, g in members], np.int32)
        version_BT = np.where(mask_BT > 0, step, -1)
        stops = [STOP_LENGTH if g == 1 else STOP_EOS for _, g in members]
        stop_B = np.array(
            [STOP_FAILED if row in self._failed else stop for row, stop in zip(members, stops, strict=True)]
        )
        texts = [f"{p} {g} {'greedy' if greedy else 'sampled'}" for p, g in members]
        floats_BT = np.zeros((B, T), np.float32)
        rows = blank_columns((B, T), pad_id=0) | {"tokens_BT": tokens_BT, "version_BT": version_BT}
        rows |= {"kept_BT": floats_BT + 0.5, "turn_reward_BT": floats_BT, "length_B": np.full(B, 4), "mask_BT": mask_BT}
        rows["group_B"] = np.arange(B) // group_size
        told = {"stop_B": stop_B, "completions": texts, "episodes": [NO_EPISODE] * B, "seconds": 1.0}
        return Rollouts(prompts=batch, **rows, **told)


class Telling(Engine):
    """An engine that reports samples when they end, in a random order, mixed with samples of later requests."""

    def __init__(self, seed):
        super().__init__()
        self.config.rollout_engine, self.rollout, self._random = "podrl", self, np.random.default_rng(seed)
        self.meanwhile, self.stats = 0, types.SimpleNamespace(metrics=dict)

    def player(self, asked, *, group_size, step, sampling, partial):
        return types.SimpleNamespace(request=types.SimpleNamespace(prompts=asked))

    def advance(self, policy, players):
        entered, left = 0, []
        while entered < len(players) or left:
            for player, _ in players[entered:]:
                left += [(player, p, g) for p in range(len(player.request.prompts.length_P)) for g in range(G)]
            self.meanwhile += entered > 0 and len(players) > entered and len(left) > G * (len(players) - entered)
            entered = len(players)
            player, p, g = left.pop(self._random.integers(len(left)))
            text = f"{player.request.prompts.tokens_PT[p, 0]} {g} sampled"
            yield player, FinishedSample(p, g, [1], [7], {}, STOP_EOS, text, NO_EPISODE)

    def rows(self, player, seconds):
        return self.generate(player.request.prompts, None, group_size=G, step=7)


class Grader:
    """Rewards member 1 of a prompt in `differ` with 1, other samples with 0, greedy ones with the prompt's number."""

    def __init__(self, differ):
        self._differ = differ
        self.asked: list[tuple[int, int]] = []

    def open(self, texts, fields, *, group_B):
        return OpenBatch([Scorer("group", 1, self._submit)], texts, fields, group_B)

    def _submit(self, part):
        rewards = []
        for text, completion, number in zip(part.prompts, part.completions, part.fields["p"], strict=True):
            p, g, how = completion.split()
            self.asked.append((int(p), int(g)))
            assert text == f"prompt {p}" and number == int(p)
            rewards.append(float(p) if how == "greedy" else float(g == "1" and int(p) in self._differ))
        job = Future()
        job.set_result(rewards)
        return job

    def take_late(self):
        return 0

    def combine(self, reward_FB):
        return 2.0 * reward_FB[0]


def generated(config, differ, count, failed=()) -> tuple[Any, Engine]:
    engine: Any = Engine(failed)
    grader: Any = Grader(differ)
    return Generator(engine, grader, config)(prompts(count), None, 7), engine  # pyright: ignore[reportArgumentType]


def kept(experience):
    return [int(text.split()[0]) for text in experience.rollouts.completions[::G]]


def test_groups_without_signal_are_replaced_in_the_order_of_the_data():
    config = GRPOConfig(num_generations=G, dynamic_sampling=True)
    experience, engine = generated(config, {1, 2, 4, 6, 8, 11}, 12)
    assert kept(experience) == [1, 2, 4, 6]
    # Half of the first four groups had a signal, so four more were requested for the two open places of the batch.
    assert [[p - 100 for p in asked] for asked, _ in engine.asked] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert experience.counts == {
        "dynamic_sampling/groups_drawn": 7.0,
        "dynamic_sampling/groups_replaced": 2.0,
        "dynamic_sampling/groups_left_without_signal": 0.0,
        "loss/left_out/dynamic_sampling": 3.0 * G,
        "rollout/kept_tokens": 0.5 * 3 * 8,
    }
    asked = experience.rollouts.prompts
    assert asked.index_P.tolist() == [101, 102, 104, 106] and asked.text[2] == "prompt 4" and asked.fields["p"][3] == 6
    assert asked.data_state == b"after all of them"
    np.testing.assert_array_equal(experience.rollouts.tokens_BT[:, 1], [10, 11, 20, 21, 40, 41, 60, 61])
    np.testing.assert_array_equal(experience.reward_FB, [[0, 1] * 4])
    np.testing.assert_array_equal(experience.reward_B, [0, 2] * 4)
    assert experience.rollouts.seconds == 2.0


@pytest.mark.parametrize("differ", [{1, 2, 4, 6, 8, 11}, {5}, set(range(12)), {8, 9, 10, 11}])
def test_the_groups_kept_do_not_depend_on_when_others_are_found_without_signal(differ):
    """Open places of the batch are filled while other groups are still sampled. Groups and counts must equal those of
    an engine that samples whole batches."""
    config = GRPOConfig(num_generations=G, dynamic_sampling=True)
    expected, _ = generated(config, differ, 12)
    early = 0
    for seed in range(20):
        engine: Any = Telling(seed)
        found = Generator(engine, Grader(differ), config)(prompts(12), None, 7)  # pyright: ignore[reportArgumentType]
        assert kept(found) == kept(expected) and found.counts == expected.counts
        np.testing.assert_array_equal(found.rollouts.tokens_BT, expected.rollouts.tokens_BT)
        np.testing.assert_array_equal(found.reward_FB, expected.reward_FB)
        asked = [p - 100 for part, _ in engine.asked for p in part]
        assert asked == list(range(len(asked))) and engine.asked[0][0] == [100, 101, 102, 103]
        early += engine.meanwhile
    assert (early > 0) == (len(differ) < 12)


class Windowed(Telling):
    """An engine that ends its samples one after the other, and asks before each sample whether it must stop."""

    def player(self, asked, *, group_size, step, sampling, partial):
        request = types.SimpleNamespace(prompts=asked, samples=len(asked.length_P) * group_size)
        return types.SimpleNamespace(request=request, done={})

    def advance(self, policy, players, *, calls, halt):
        for player, _ in players:  # the caller appends further players
            for b in range(player.request.samples):
                assert not halt()
                player.done[b] = b
                text = f"{player.request.prompts.tokens_PT[0, 0]} {b} sampled"
                yield player, FinishedSample(0, b, [1], [7], {}, STOP_EOS, text, NO_EPISODE)


class Late(Grader):
    """A grader whose rewards become known, or fail, only when `release` is called."""

    def __init__(self, differ):
        super().__init__(differ)
        self._waiting = []

    def _submit(self, part):
        known, job = super()._submit(part), Future()
        self._waiting.append((job, known.result()))
        return job

    def release(self, error=None):
        for job, rewards in self._waiting:
            job.set_result(rewards) if error is None else job.set_exception(error)
        self._waiting = []


def test_by_the_wall_clock_a_group_has_a_signal_once_its_rewards_are_known():
    engine: Any = Windowed(0)
    engine.config.rollout = lambda: RolloutConfig(max_tokens_to_generate=LIMIT, clock="wall")
    grader: Any = Late({1})
    config = GRPOConfig(num_generations=G, dynamic_sampling=True, max_staleness=1)
    generator = Generator(engine, grader, config)
    flying: Any = [(generator.begin(take_prompts(prompts(3), np.array([p])), 7), None) for p in range(3)]
    groups, playing = [group for group, _ in flying], flying[:1]

    def ended():
        # Adds the next group, as the queue does in place of a dropped group.
        playing.extend(flying[len(playing) : len(playing) + 1])

    generator.play(playing, Policy({}, 7), halt=lambda: False, on_ended=ended)
    assert [group.scored_count for group in groups] == [G] * 3 and playing == flying
    assert [generator.signal(group) for group in groups] == [None] * 3
    grader.release()
    assert [generator.signal(group) for group in groups] == [False, True, False]
    found = generator.gather(groups[1:2], 7, 0.0)
    np.testing.assert_array_equal(found.reward_B, [0, 2])
    assert not any(name.startswith("dynamic_sampling/") for name in found.counts), (
        "the clock counts replaced groups, not gather()"
    )
    failing = generator.begin(take_prompts(prompts(1), np.array([0])), 7)
    generator.play([(failing, None)], Policy({}, 7), halt=lambda: False)
    grader.release(RewardError("no reward"))
    with pytest.raises(RewardError, match="no reward"):
        generator.signal(failing)


def test_the_search_is_bounded_and_open_places_are_filled():
    config = GRPOConfig(num_generations=G, dynamic_sampling=True)
    experience, engine = generated(config, {5}, 12)
    assert sum(len(asked) for asked, _ in engine.asked) == 12
    assert kept(experience) == [0, 1, 2, 5]
    assert experience.counts["dynamic_sampling/groups_left_without_signal"] == 3.0
    assert experience.counts["dynamic_sampling/groups_replaced"] == 1.0


def test_nothing_more_is_asked_where_all_groups_have_a_signal():
    config = GRPOConfig(num_generations=G, dynamic_sampling=True, dynamic_sampling_batches=2)
    experience, engine = generated(config, {0, 1, 2, 3, 4}, 8)
    assert kept(experience) == [0, 1, 2, 3] and len(engine.asked) == 1


def test_remax_compares_with_the_greedy_completion_of_the_prompt():
    config = GRPOConfig(num_generations=G, advantage_estimator="remax")
    experience, engine = generated(config, {1}, 3)
    assert [size for _, size in engine.asked] == [2, 1]
    np.testing.assert_array_equal(experience.greedy_reward_B, [0, 0, 2, 2, 4, 4])
    np.testing.assert_array_equal(experience.reward_B, [0, 0, 0, 2, 0, 0])
    reward_BT: Any = np.zeros((6, 7)) + experience.reward_B[:, None] * (np.arange(7) == 3)
    arrays: Any = reward_BT, experience.greedy_reward_B, experience.rollouts.mask_BT
    advantage_BT = config.estimator()(*arrays, group_B=np.arange(len(arrays[0])) // G)
    np.testing.assert_array_equal(advantage_BT[:, 2], [0, 0, -2, 0, -4, -4])


class Beside(Engine):
    """An engine that draws a greedy sample of each prompt before the other samples."""

    abilities = frozenset({"greedy_members"})

    def __init__(self, failed=()):
        super().__init__(failed)
        self.config.rollout_engine = Beside

    def generate(self, batch, policy, *, group_size, step, sampling=None, ended=None):
        assert sampling.greedy == 1 and sampling.temperature > 0
        made = super().generate(batch, policy, group_size=group_size, step=step)
        names = [[int(n) for n in text.split()[:2]] for text in made.completions]
        made.completions[:] = [f"{p} {max(g - 1, 0)} {'sampled' if g else 'greedy'}" for p, g in names]
        return made


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_greedy_sample_drawn_with_the_others_is_no_part_of_the_group(dynamic):
    config = GRPOConfig(num_generations=G, advantage_estimator="remax", dynamic_sampling=dynamic)
    engine: Any = Beside()
    grader: Any = Grader({1, 2, 4, 6})
    experience = Generator(engine, grader, config)(prompts(12 if dynamic else 3), None, 7)  # pyright: ignore[reportArgumentType]
    assert {size for _, size in engine.asked} == {1 + G}
    chosen = [1, 2, 4, 6] if dynamic else [0, 1, 2]
    assert experience.rollouts.completions == [f"{p} {g} sampled" for p in chosen for g in range(G)]
    np.testing.assert_array_equal(experience.rollouts.group_B, np.arange(len(chosen)).repeat(G))
    np.testing.assert_array_equal(experience.greedy_reward_B, np.repeat(chosen, G) * 2.0)
    np.testing.assert_array_equal(experience.reward_B, [2.0 * (g == 1 and p > 0) for p in chosen for g in range(G)])
    assert experience.reward_FB.shape == (1, len(chosen) * G)


def test_a_failed_greedy_sample_takes_its_group_along_where_it_is_drawn_with_it():
    config = GRPOConfig(num_generations=G, advantage_estimator="remax")
    engine: Any = Beside(failed={(2, 0)})
    grader: Any = Grader({1})
    experience = Generator(engine, grader, config)(prompts(3), None, 7)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(experience.rollouts.mask_BT.any(axis=1), [1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(experience.greedy_reward_B, [0, 0, 2, 2, 0, 0])


def test_shaping_comes_after_the_weighted_sum_and_before_the_advantage():
    config = GRPOConfig(num_generations=G, overlong_shaping=True, overlong_buffer=4, no_stop_reward=-5.0)
    experience, _ = generated(config, {0}, 1)
    # A sample has 3 of at most 6 tokens, and the buffer is 4: it gets a quarter of the penalty. Member 1 was cut off,
    # so it also gets `no_stop_reward`.
    np.testing.assert_allclose(experience.reward_B, [-0.25, -5.25])
    assert experience.counts == {"rollout/kept_tokens": 0.5 * 3 * 2}
    with pytest.raises(ValueError, match="overlong_buffer=9"):
        generated(GRPOConfig(num_generations=G, overlong_shaping=True, overlong_buffer=9), {0}, 1)


def test_the_group_of_a_failed_sample_leaves_the_loss_and_moves_no_baseline():
    config = GRPOConfig(num_generations=G)
    whole, _ = generated(config, {0, 1, 2}, 3)
    engine: Any = Engine(failed={(1, 0)})
    grader: Any = Grader({0, 1, 2})
    experience = Generator(engine, grader, config)(prompts(3), None, 7)  # pyright: ignore[reportArgumentType]
    assert (1, 0) not in grader.asked and len(grader.asked) == 5, "a failed sample has no reward, not one of 0"
    np.testing.assert_array_equal(experience.reward_FB, [[0, 1, np.nan, 1, 0, 1]])
    np.testing.assert_array_equal(experience.rollouts.mask_BT[2:4], 0)
    rest = [0, 1, 4, 5]
    np.testing.assert_array_equal(experience.rollouts.mask_BT[rest], whole.rollouts.mask_BT[rest])
    assert experience.counts == {"rollout/failed": 1.0, "rollout/kept_tokens": 0.5 * 3 * 4}
    advantages = []
    for batch in (whole, experience):
        reward_BT = batch.reward_B[:, None] * (np.arange(7) == 3) * batch.rollouts.mask_BT
        arrays: Any = reward_BT, batch.greedy_reward_B, batch.rollouts.mask_BT
        advantages.append(config.estimator()(*arrays, group_B=np.arange(len(arrays[0])) // G))
    np.testing.assert_array_equal(advantages[1][rest], advantages[0][rest])
    np.testing.assert_array_equal(advantages[1][2:4], 0)


def test_a_failed_greedy_completion_takes_its_group_along():
    config = GRPOConfig(num_generations=G, advantage_estimator="remax")
    engine: Any = Engine(failed={(2, 0)})
    grader: Any = Grader({1})
    experience = Generator(engine, grader, config)(prompts(3), None, 7)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(experience.rollouts.mask_BT.any(axis=1), [1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(experience.greedy_reward_B, [0, 0, 2, 2, 0, 0])


def test_dynamic_sampling_replaces_the_group_of_a_failed_sample():
    config = GRPOConfig(num_generations=G, dynamic_sampling=True)
    experience, _ = generated(config, set(range(12)), 12, failed={(1, 1)})
    assert kept(experience) == [0, 2, 3, 4] and "rollout/failed" not in experience.counts
