"""Rollout hosts join and leave: each prompt is trained on once, sampled by the same versions as with constant hosts."""

import contextlib
import functools
import itertools
import json
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from endpoints import joined
from waits import PATIENCE_S, until

from podrl.data.curriculum import ChosenStream
from podrl.data.pools import Curriculum, CurriculumConfig
from podrl.data.stream import Limit
from podrl.engine.config import RolloutConfig
from podrl.learner.loop import Schedule, Start, train
from podrl.learner.pods.dispatch import order, parts_of
from podrl.learner.pods.host import HostRollouts
from podrl.learner.pods.trainer import RemoteRollouts
from podrl.learner.recorder import HostRecorder
from podrl.rollout.clock import TokenClock
from podrl.rollout.partial import PartialBatch
from podrl.rollout.token_budget import TokenBudget
from podrl.rundir.leases import Lease, LeaseClient, LeaseServer, cut, evaluation
from podrl.rundir.profiler import Profiler
from podrl.rundir.step_barrier import StepBarrier
from podrl.runtime import channel, joining
from podrl.runtime import pod as pod_of
from podrl.runtime.channel import ChannelError, LateError
from podrl.runtime.message import Message
from podrl.runtime.pod import Pod, Seat
from podrl.runtime.roles import Hosts
from podrl.transfer.pull.fetch import VersionGoneError
from podrl.types import (
    NO_EPISODE,
    STOP_EOS,
    TOKENS,
    BatchError,
    Experience,
    Policy,
    Prompts,
    Rollouts,
    blank_columns,
)

P, G, T, STEPS, QUANTUM = 6, 2, 40, 30, 8
DEADLINE_S = 60.0
HOSTS = Hosts((0,), (1, 2))


def fields_of(first: int) -> dict[str, list[Any]]:
    """Returns the fields of a batch: as in a mixture, some batches have a field that others lack."""
    return {"place": list(range(P))} | ({"tests": ["1"] * P} if first % (2 * P) else {})


class Stream:
    """A data stream that yields P numbered prompts at a time."""

    prompts_per_step = P

    def __init__(self):
        self._next = 0

    def __next__(self) -> Prompts:
        first, self._next = self._next, self._next + P
        ones, state = np.ones(P, np.int32), json.dumps(self._next).encode()
        return Prompts(ones[:, None], ones, np.arange(first, first + P), [""] * P, fields_of(first), state)

    def restore(self, state: bytes) -> None:
        self._next = json.loads(state)


class Chosen(Stream):
    """A data stream of numbered prompts, of which a curriculum chooses P at a time."""

    def __init__(self, staleness: int):
        config = CurriculumConfig(retire_after=1, postpone_after=1, postpone_steps=3, hard_share=0.25)
        self.curriculum = Curriculum(config, 300)
        self.curriculum.begin(lag=staleness, names=[])
        more = {"curriculum": self.curriculum}
        self._stream = ChosenStream(range(300), lambda i, record: record, 0, Limit(1, "none", "error"), **more)

    def __next__(self) -> Prompts:
        first, ones = self._stream.emitted, np.ones(P, np.int32)
        self._stream.take(P)
        return Prompts(ones[:, None], ones, np.arange(first, first + P), [""] * P, {}, self._stream.state())

    def restore(self, state: bytes) -> None:
        self._stream.restore(state)


def stream_of(staleness: int, chosen: bool) -> tuple[Stream, dict]:
    stream = Chosen(staleness) if chosen else Stream()
    return stream, {"curriculum": stream.curriculum} if isinstance(stream, Chosen) else {}


class Weights:
    """Stands in for a cluster's weights: the trainer holds the newest 2 + staleness versions, as in a job; older
    versions are gone."""

    tokenizer = types.SimpleNamespace(pad_id=0)

    def __init__(self, staleness: int):
        self._keep, self._held, self.weights = 2 + staleness, [], self

    def offers(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(tokenizer=self.tokenizer, sync_weights=self._offer)

    def _offer(self, version: int, *, in_place: bool) -> Policy:
        self._held = [*self._held, version][-self._keep :]
        return Policy({}, version)

    def await_version(self, version: int) -> None:
        while not self._held or version > self._held[-1]:
            threading.Event().wait(0.001)

    def sync_weights(self, version: int, *, in_place: bool) -> Policy:
        self.await_version(version)
        if version not in self._held:  # this host paused for so long that the job went on without it
            raise VersionGoneError(f"The trainer holds versions {self._held}, not {version}.")
        return Policy({}, version)


def length(step: int, prompt: int, sample: int) -> int:
    """Returns the number of tokens of a sample, which depends on the sample alone."""
    return random.Random(f"{step} {prompt} {sample}").randint(1, T - 1)


class Sampler:
    """Stands in for Generator: each token is 2 plus the version that drew it; samples whole batches or windows."""

    def __call__(self, prompts: Prompts, policy: Policy, step: int) -> Experience:
        making = self.begin(prompts, step)
        self.play([(making, TokenBudget())], policy)
        return self.finish(making, policy)

    def begin(self, prompts, step, partial=None):
        drawn = {(int(p), g): [] for p in prompts.index_P for g in range(G)}
        player = types.SimpleNamespace(request=types.SimpleNamespace(prompts=prompts), state=list)
        return types.SimpleNamespace(prompts=prompts, step=step, player=player, drawn=drawn)

    def play(self, makings, policy, *, halt=None, on_ended=lambda: None):
        for making, budget in makings:
            for (p, g), versions in making.drawn.items():
                left = length(making.step, p, g) - len(versions)
                versions += [policy.version] * (left if budget.quantum is None else min(left, budget.quantum))

    def finish(self, making, policy):
        versions = list(making.drawn.values())
        length_B = np.asarray([1 + len(v) for v in versions], np.int32)
        version_BT = np.full((len(versions), T), -1, np.int32)
        for b, drawn in enumerate(versions):
            version_BT[b, 1 : 1 + len(drawn)] = drawn
        return experience_of(making.prompts, version_BT + 2, version_BT, (length_B % 2).astype(float))

    def give_up(self, making):
        return


def experience_of(prompts, tokens_BT, version_BT, reward_B, seconds=0.0) -> Experience:
    """Makes a batch without log-probabilities; version_BT is the version that drew each token, -1 on other tokens."""
    B, zeros_BT = len(version_BT), np.zeros(version_BT.shape, np.float32)
    rollouts = Rollouts(
        prompts=prompts,
        group_B=np.arange(B) // (B // len(prompts.length_P)),
        length_B=1 + (version_BT >= 0).sum(axis=1).astype(np.int32),
        mask_BT=(version_BT >= 0).astype(np.float32),
        turn_reward_BT=zeros_BT,
        stop_B=np.full(B, STOP_EOS, np.int32),
        completions=[""] * B,
        episodes=[NO_EPISODE] * B,
        seconds=seconds,
        **blank_columns(version_BT.shape, pad_id=0) | {"tokens_BT": tokens_BT, "version_BT": version_BT},
    )
    return Experience(rollouts, np.zeros((1, B)), reward_B, np.zeros(B), 0.0, {}, np.zeros(B, np.int32))


def run() -> types.SimpleNamespace:
    watchdog = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext())
    spans = types.SimpleNamespace(pass_on=lambda step, last=False: None)
    return types.SimpleNamespace(
        workdir=None,
        watchdog=watchdog,
        profiler=Profiler(""),
        spans=spans,
        traced=None,
        stopping=lambda: False,
        begin=lambda: None,
        notify_saved=lambda step: None,
        notify_takeover=lambda: None,
    )


class Member:
    """A rollout host on threads of this process; the threads end when the host's channel is closed."""

    def __init__(self, pod: Pod, weights: Weights, schedule: Schedule, chosen: bool):
        self.pod, self._weights, self._schedule, self._chosen = pod, weights, schedule, chosen
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        here, barrier = run(), StepBarrier(self.pod, run(), DEADLINE_S)
        mode = "windows" if self._schedule.max_staleness > 1 else "whole"
        makes = {"generate": Sampler(), "evaluator": None, "deadline_s": DEADLINE_S, "mode": mode}
        host = HostRollouts(self._weights, here, self.pod, barrier, **makes)
        of_host = {"enter": host.enter, "evaluate": None, "stopping": barrier.stopping}
        seen = HostRecorder(here, self._schedule, **of_host)
        nothing = types.SimpleNamespace(
            score=lambda *_: None, rewards=lambda *_: (None, {}), advantages=lambda *_: (None, {}),
            pack=lambda *_: (), update=lambda *_: {},
        )  # fmt: skip
        with contextlib.suppress(ChannelError):
            train(host, nothing, seen, self._schedule)

    def die(self) -> None:
        self.pod.channel.close()


class Pods:
    """The rollout hosts of a job; tests add, pause and kill them, and a host that is told to end is replaced.

    Attributes:
      told: number, exit code and reason of each host that was told to end and was replaced.
    """

    def __init__(self, pods: list[Pod], weights: Weights, schedule: Schedule, chosen: bool):
        self.leader, self._weights, self._schedule, self._chosen = pods[0], weights, schedule, chosen
        self.told: list[tuple[int, int, str]] = []
        self._pause: tuple[int, threading.Event] | None = None  # message at which the next host pauses
        self._awaited: threading.Event | None = None  # set when the host that `pause_next` pauses has paused
        self._joining: set[Pod] = set()
        self._over = False
        for pod in pods[1:]:
            self._start_again(pod)
        self.there = [Member(pod, weights, schedule, chosen) for pod in pods[1:]]

    def _start_again(self, pod: Pod) -> None:
        """Arranges that the host is started again when it is told to end, as a launcher does after exit code 42."""

        def ended(code: int, text: str, **_: object) -> None:
            if pod._ended.is_set():
                return
            pod._ended.set()
            self.told.append((pod.seat.process, code, text))
            # `ended` runs on the channel's thread and must not wait.
            threading.Thread(target=replace, daemon=True).start()

        def replace() -> None:
            _leave(pod)
            self.there = [member for member in self.there if member.pod is not pod]
            self.add(pod.seat.process)

        pod._end = ended  # pyright: ignore[reportAttributeAccessIssue]

    def pause_leader(self, message: int) -> threading.Event:
        """Pauses the leader's network at the `message`-th request (from 1) until the hosts have given the leader up."""
        receive, count, paused = self.leader.channel._receive_request, itertools.count(1), threading.Event()

        def hold() -> None:
            if next(count) == message:
                for member in self.there:
                    member.pod._on_leader_lost()
                paused.set()
            receive()

        self.leader.channel._sockets[self.leader.channel._server] = hold
        return paused

    def pause_next(self, message: int) -> threading.Event:
        """Pauses the host that is added next, as `pause` does."""
        self._pause = message, threading.Event()
        self._awaited = self._pause[1]
        return self._awaited

    def await_next(self) -> None:
        """Waits until the host that `pause_next` pauses has joined, or has paused and was told to end.

        Without this wait, another host might make all batches before the new host gets a message.
        """
        if (paused := self._awaited) is not None:
            told = lambda: any("goes on without this process" in text for _, _, text in self.told)  # noqa: E731
            count = self.leader.seat.hosts.count - 1
            until(lambda: told() if paused.is_set() else self._pause is None and len(self.there) == count)

    def pause(self, pod: Pod, message: int, paused: threading.Event | None = None) -> threading.Event:
        """Pauses a host's network at the `message`-th answer to it (from 1) until the leader has given the host up."""
        answered, count, paused = pod.channel._on_answer, itertools.count(1), paused or threading.Event()

        def hold(*args: Any) -> None:
            if next(count) == message:
                given_up = threading.Event()
                lost = functools.partial(self.leader._on_broken, pod.seat.process, pod.channel.address)
                self.leader.channel._do(lambda: (lost(), given_up.set()))
                assert given_up.wait(DEADLINE_S)
                paused.set()
            answered(*args)

        pod.channel._on_answer = hold
        return paused

    def kill(self, rng: random.Random) -> int:
        member = self.there.pop(rng.randrange(len(self.there)))
        member.die()
        return member.pod.seat.process

    def add(self, number: int | None = None) -> None:
        """Adds a host, under a new number or a number that was used before."""
        address, secret = self.leader.channel.address, {"PODRL_SECRET": "s"}
        hosts = self.leader.seat.hosts
        seat = Seat(number, hosts, address, "s", True) if number else joining.late_seat(address, secret, 30.0)
        pod = Pod(seat, host="127.0.0.1")
        self._joining.add(pod)
        self._start_again(pod)
        if self._pause is not None:
            self.pause(pod, *self._pause)
            self._pause = None
        try:
            pod.join(PATIENCE_S, lambda reached, waited_s: "")
        except ChannelError as error:  # the process of a real host would exit with code 42
            if self._over or pod._ended.is_set():  # another host was started in its place, if one is needed
                return _leave(pod)
            assert "the connection broke" in str(error)
            self.told.append((pod.seat.process, 42, "goes on without this process, which joins"))
            pod.channel.close()
            return self.add(number)
        finally:
            self._joining.discard(pod)
        self.there.append(Member(pod, self._weights, self._schedule, self._chosen))

    def end(self) -> None:
        """Ends all hosts, also hosts that are still joining: their threads would wait for the leader after the test."""
        self._over = True
        for member in self.there:
            member.die()
        for pod in list(self._joining):
            _leave(pod)


def _leave(pod: Pod) -> None:
    """Ends a host's network and its waits for answers, as the end of its process would."""
    pod.channel.close()
    for request in list(pod.channel._answers.values()):
        request.fail("the connection broke")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(channel._Link, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(channel, "_SWEEP_S", 0.05)
    monkeypatch.setattr(pod_of, "_LOOK_S", 0.02)


def train_through(
    staleness: int,
    seed: int,
    kills: int,
    *,
    chosen: bool = False,
    steps: int = STEPS,
    roles: Hosts = HOSTS,
    began: Callable[[Pods], None] = lambda hosts: None,
) -> tuple[list[Experience], LeaseServer, dict[str, int]]:
    """Trains `steps` steps; after `kills` random steps it kills a host and adds one, under the lost number or a new
    one. Returns (batch of each step, lease server, sizes of the curriculum's pools)."""
    rng, seen = random.Random(seed), []
    deaths = {1, *rng.sample(range(2, steps - 2), kills - 1)} if kills else set()
    schedule, weights = Schedule(steps, staleness), Weights(staleness)
    with joined(roles, disposable=True) as pods:
        hosts = Pods(pods, weights, schedule, chosen)
        began(hosts)
        stream, curriculum = stream_of(staleness, chosen)
        clock = TokenClock(RolloutConfig(window_tokens=QUANTUM), staleness=staleness)
        needed = lambda step, experience: np.arange(len(experience.rollouts.length_B))  # noqa: E731
        more = {"deadline_s": DEADLINE_S, "clock": clock, "begun": schedule.begun, "prompts": P}
        barrier = StepBarrier(pods[0], run(), DEADLINE_S)
        leader = RemoteRollouts(weights.offers(), stream, run(), pods[0], barrier, needed=needed, **more)

        def score(step: int, experience: Experience) -> None:
            if chosen:
                curriculum["curriculum"].see(step, experience)

        def record(step: int, experience: Experience, metrics: dict) -> None:
            seen.append(experience)
            hosts.await_next()
            if step in deaths:
                number = hosts.kill(rng)
                hosts.add(number if number <= 2 and rng.random() < 0.5 else None)

        recorder = types.SimpleNamespace(
            restore=lambda: Start(0, b"", (), set()), stage=lambda name: contextlib.nullcontext(), record=record,
            save=lambda *_: None, evaluate=lambda *_: None, stopping=lambda: False,
        )  # fmt: skip
        algorithm = types.SimpleNamespace(
            score=score, rewards=lambda *_: (None, {}), advantages=lambda *_: (None, {}),
            pack=lambda *_: (), update=lambda *_: {},
        )  # fmt: skip
        assert train(leader, algorithm, recorder, schedule) == steps
        hosts.end()
        return seen, leader._lease_server, curriculum["curriculum"].sizes() if chosen else {}


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_ten_kills_in_thirty_steps_lose_no_prompt_and_change_no_version(staleness):
    seen, given, _ = train_through(staleness, seed=staleness, kills=10)
    assert given.reassigned >= 5, "at least 5 kills must have lost prompts of a host, or the test shows nothing"
    _is_whole(seen, staleness)


def _is_whole(seen: list[Experience], staleness: int) -> None:
    """Asserts that every prompt was trained on once, in order, and every token was drawn by the right version."""
    for step, experience in enumerate(seen):
        rollouts = experience.rollouts
        assert rollouts.prompts.index_P.tolist() == list(range(step * P, step * P + P))
        assert rollouts.prompts.fields == fields_of(step * P), step
        for b in range(P * G):
            p, g = divmod(b, G)
            last = max(step - 1, 0) if staleness else step
            windows = [i // QUANTUM if staleness > 1 else 0 for i in range(length(step, step * P + p, g))]
            expected = [min(max(step - staleness, 0) + w, last) for w in windows]
            drawn_T = rollouts.tokens_BT[b, 1 : rollouts.length_B[b]] - 2
            assert drawn_T.tolist() == expected, (step, b)


def _host_pauses(pods: Pods, message: int) -> threading.Event:
    return pods.pause(pods.there[0].pod, message)


def _next_host_pauses(pods: Pods, message: int) -> threading.Event:
    """Kills a host so that another joins, and pauses the new host at the `message`-th answer (from 1)."""
    paused = pods.pause_next(message)
    pods.there[0].pod._end(42, "killed")
    return paused


def _leader_pauses(pods: Pods, message: int) -> threading.Event:
    return pods.pause_leader(message)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("pause", [_host_pauses, _next_host_pauses, _leader_pauses])
def test_a_process_that_pauses_at_any_message_until_it_is_given_up_stops_nobody(pause, staleness, hosts):
    """The process pauses at its first message, in the next job at its second, and so on. A host that the leader has
    given up must learn this at its next message, or it would wait for ever. Hosts that have given the leader up are
    replaced."""
    roles, told = Hosts((0,), tuple(range(1, 1 + hosts))), []
    # The leader gets more messages than a host does, so the test pauses it only at every fourth message.
    for message in itertools.count(1, 4 if pause is _leader_pauses else 1):
        began: list[tuple[Pods, threading.Event]] = []
        begin = lambda pods, at=message, to=began: to.append((pods, pause(pods, at)))  # noqa: E731
        seen, _, _ = train_through(staleness, seed=0, kills=0, steps=4, roles=roles, began=begin)
        _is_whole(seen, staleness)
        pods, paused = began[0]
        if not paused.is_set():
            break
        assert all(code == 42 for _, code, _ in pods.told)
        told.append(any("goes on without this process" in text for _, _, text in pods.told))
    if pause is _leader_pauses:  # the number of requests depends on their timing
        assert told
    else:
        assert len(told) >= 8 and all(told[:8]), told  # after the last step no host is told to end


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_a_curriculum_chooses_depends_on_no_host(staleness):
    seen, given, sizes = train_through(staleness, seed=staleness, kills=10, chosen=True)
    assert given.reassigned >= 5 and sizes["retired"] > 10 and sizes["hard"] + sizes["postponed"] > 10, sizes
    undisturbed, _, same = train_through(staleness, seed=staleness, kills=0, chosen=True)
    assert [experience.data_state for experience in seen] == [experience.data_state for experience in undisturbed]
    assert sizes == same
    drawn = [json.loads(experience.data_state)["curriculum"]["ids"][-P:] for experience in seen]
    assert len({number for ids in drawn for number in ids}) < len(seen) * P, "some records must be drawn more than once"


@pytest.mark.parametrize("hosts", [1, 2, 3, 7])
def test_leases_cover_a_task_once_and_are_as_equal_as_can_be(hosts):
    leases = cut("evaluation/0", P, range(hosts))
    assert [(lease.first, lease.last) for lease in leases] == [(p, p + 1) for p in range(P)]
    sizes = [sum(lease.host == host for lease in leases) for host in range(hosts)]
    assert sum(sizes) == P and max(sizes) - min(sizes) <= 1


def test_a_job_below_one_host_waits_with_its_name_until_one_comes():
    with joined(HOSTS, disposable=True) as pods:
        leader, name = LeaseServer(pods[0], 1.0), evaluation(0)
        leader.serve(0, lambda: {"step": 0})
        leader.open_shares(name, 2, 0)
        assert leader.await_leases(name) == [Lease(name, 0, 1, 1), Lease(name, 1, 2, 2)]
        for host in (1, 2):
            pods[0].on_lost(host)
        with pytest.raises(
            LateError, match=r"trainer 0 waited 1 s for rollout hosts to get work: there is none in the job, .*\. Add"
        ):
            leader.await_leases(name)
        leader._deadline_s, held = 30.0, []
        waiting = threading.Thread(target=lambda: held.extend(leader.await_leases(name)))
        waiting.start()
        while "a rollout host for evaluation/0: none is in the job" not in pods[0].describe_waits():
            assert waiting.is_alive()
        late = joining.late_seat(pods[0].channel.address, {"PODRL_SECRET": "s"}, 30.0)
        assert late.late and late.process == 3 and late.hosts.name(3) == "rollout 2"
        pod = Pod(late, host="127.0.0.1").join(PATIENCE_S, lambda reached, waited_s: "")
        assert LeaseClient(pod, 30.0).enter()["step"] == 0
        waiting.join(PATIENCE_S)
        assert held == [Lease(name, 0, 1, 3), Lease(name, 1, 2, 3)] and pods[0].describe_waits() == ""
        pod.channel.close()


def test_a_share_of_an_evaluation_goes_to_a_host_that_was_there_when_it_began():
    """A host that joins later has no copy of the evaluated weights, and the trainers have dropped them. It gets a share
    only if no other host is left."""
    with joined(HOSTS, disposable=True) as pods:
        leader = LeaseServer(pods[0], DEADLINE_S)
        leader.serve(3, lambda: {"step": 3})
        leader.open_shares(evaluation(3), 2, 3)
        for step in (4, 5):
            leader.advance(step, lambda: {"step": 4}, wait=False)
        late = joining.late_seat(pods[0].channel.address, {"PODRL_SECRET": "s"}, 30.0)
        pod = Pod(late, host="127.0.0.1").join(PATIENCE_S, lambda reached, waited_s: "")
        LeaseClient(pod, DEADLINE_S).enter()
        for lost, others in ((2, [1, 1]), (1, [3, 3])):
            pods[0].on_lost(lost)
            assert [lease.host for lease in leader.await_leases(evaluation(3))] == others
        pod.channel.close()


def test_a_host_with_nothing_left_to_do_takes_over_a_share_of_the_last_evaluation():
    """Hosts leave when the leader has the whole evaluation, not when their own shares are done."""
    weights, start, last = Weights(0), Start(5, b"", (), set()), Policy({}, 5)
    scores: Any = types.SimpleNamespace(scores=lambda policy, step, part: ({"eval/x": np.full((1, 1), part[0])}, []))
    with joined(HOSTS, disposable=True) as pods:
        made: Any = {"needed": None, "deadline_s": DEADLINE_S, "prompts": P}
        leader = RemoteRollouts(weights.offers(), Stream(), run(), pods[0], StepBarrier(pods[0], run(), 30.0), **made)
        leader.resume(start)
        made = {"generate": Sampler(), "evaluator": scores, "deadline_s": DEADLINE_S, "last": 5}
        host = HostRollouts(weights, run(), pods[1], StepBarrier(pods[1], run(), 30.0), **made)  # pyright: ignore[reportArgumentType]
        host.enter()
        host.resume(start)
        weights.offers().sync_weights(5, in_place=True)
        leader.begin_evaluation(last, 5)

        def ends() -> None:
            host.evaluate(last, 5)
            host.close()

        found = []
        going = threading.Thread(target=ends, daemon=True)
        waiting = threading.Thread(target=lambda: found.append(leader.evaluated(wait=True)), daemon=True)
        going.start()
        going.join(0.5)
        pods[0].on_lost(2)
        waiting.start()
        waiting.join(PATIENCE_S)
        assert [(step, metrics["eval/x"]) for step, metrics, _ in found] == [(5, 0.5)]
        going.join(PATIENCE_S)
        assert not going.is_alive()
        leader.close()


def test_a_host_that_waits_for_weights_takes_over_the_samples_of_a_lost_host():
    """The trainers may need the lost host's samples before they can make the weights that this host waits for."""
    weights = Weights(0)
    with joined(HOSTS, disposable=True) as pods:
        made: Any = {"generate": Sampler(), "evaluator": None, "deadline_s": DEADLINE_S}
        host = HostRollouts(weights, run(), pods[1], StepBarrier(pods[1], run(), 30.0), **made)  # pyright: ignore[reportArgumentType]
        moved: list[Policy] = []
        moving = threading.Thread(target=lambda: moved.append(host.move(5, in_place=True)), daemon=True)
        moving.start()
        moving.join(0.3)
        assert host._thread.submit(lambda: "made").result(PATIENCE_S) == "made" and not moved
        weights.offers().sync_weights(5, in_place=True)
        moving.join(PATIENCE_S)
        assert moved == [Policy({}, 5)]
        host.close()


def test_a_host_that_is_asked_to_stop_leaves_unless_it_is_the_last_or_the_job_stops():
    asked: list[bool] = []
    with joined(HOSTS, disposable=True) as pods:
        leader, name = LeaseServer(pods[0], DEADLINE_S, ending=lambda: bool(asked)), evaluation(0)
        leader.serve(0, lambda: {"step": 0})
        leader.open_shares(name, 2, 0)
        first, second = (LeaseClient(pod, DEADLINE_S) for pod in pods[1:])
        asked.append(True)
        assert not first.leave() and leader.hosts == 2
        asked.clear()
        assert first.leave() and first.leave()  # the repeated request gets the same answer
        assert leader.await_leases(name) == [Lease(name, 0, 1, 2), Lease(name, 1, 2, 2)]
        assert not second.leave() and leader.hosts == 1
        pods[0].on_lost(2)
        assert first.leave(), "the permission to leave still holds, though no other host is left now"
        pods[1].channel.close()  # the leader has released this host, so its end is not a loss
        assert pods[0].is_lost(1) and not pods[0]._lost_processes


def test_the_last_host_that_is_stopped_before_training_ends_the_job(monkeypatch):
    with joined(HOSTS, disposable=True) as pods:
        ended, lost = threading.Event(), []
        monkeypatch.setattr(pods[0], "_end", lambda code, text, **_: ended.set())
        pods[0].on_lost = lost.append
        pods[1]._tell_leader(75, "SIGTERM before there was anything new to save")
        assert lost == [1] and not ended.is_set()
        pods[2]._tell_leader(75, "SIGTERM before there was anything new to save")
        assert ended.wait(PATIENCE_S) and lost == [1]


@pytest.mark.parametrize("staleness", [1, 2])
def test_what_fails_on_a_host_is_told_to_the_trainers(staleness, monkeypatch):
    finish = Sampler.finish

    def fails(self, making, policy):
        if making.step == 4 and making.prompts.index_P[0] == 4 * P:
            raise BatchError("no reward")
        return finish(self, making, policy)

    monkeypatch.setattr(Sampler, "finish", fails)
    with pytest.raises(BatchError, match="no reward"):
        train_through(staleness, seed=1, kills=0)


def test_hosts_are_given_the_batches_that_a_checkpoint_holds_in_part():
    """Each host gets a share of the prompts and of the prompts' samples, and goes on with these samples from the
    checkpoint's step."""
    with joined(HOSTS, disposable=True) as pods:
        rows = {f"{name}_X": np.zeros(0, column.dtype) for name, column in TOKENS.items()}
        rows |= {"count_B": np.zeros(P * G, np.int32), "asked_P": np.ones(P, bool)}
        partial = PartialBatch(
            next(Stream()), 2, QUANTUM, [], [{"track": None, "number": b} for b in range(P * G)], rows
        )
        clock = TokenClock(RolloutConfig(), staleness=2)
        more = {"needed": None, "deadline_s": DEADLINE_S, "clock": clock, "prompts": P}
        barrier, begun = StepBarrier(pods[0], run(), DEADLINE_S), Schedule(STEPS, 2).begun
        leader = RemoteRollouts(Weights(2).offers(), Stream(), run(), pods[0], barrier, begun=begun, **more)
        leader.resume(Start(2, b"", (partial,), set()))
        prompts, samples = [], []
        for pod in pods[1:]:
            message = pod.get(0, order(pod.channel.address, 0), DEADLINE_S)
            [said] = message.value["groups"]
            [part] = parts_of(Message(message.value["partial"], message.arrays), [said["prompts"]])
            assert (said["asked"], said["since"], said["quantum"]) == (2, 2, QUANTUM)
            prompts += part.prompts.index_P.tolist()
            samples += [sample["number"] for sample in part.samples]
        assert prompts == [*range(P)] and samples == [*range(P * G)]


def test_a_job_takes_in_whoever_asked_for_a_number_alone():
    with joined(HOSTS, disposable=True) as pods:
        address = pods[0].channel.address
        stranger = Pod(Seat(9, HOSTS, address, "s", True), host="127.0.0.1")
        with pytest.raises(
            ChannelError, match="host 9 does not belong to this job: a new host must ask for its number"
        ):
            stranger.join(PATIENCE_S, lambda reached, waited_s: "")
        stranger.channel.close()
        with pytest.raises(ValueError, match=r"--join=nowhere must be HOST:PORT"):
            joining.late_seat("nowhere", {"PODRL_SECRET": "s"}, 30.0)
    with joined(Hosts((0,), (1,))) as pods, pytest.raises(ChannelError, match=r"only with --topology=split"):
        joining.late_seat(pods[0].channel.address, {"PODRL_SECRET": "s"}, 30.0)
