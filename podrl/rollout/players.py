"""The loop that steps the engine until requests are done, and the player of samples without environments.

A player has the samples of one request from their first token to their last, over one or several sessions. In each
session its samples draw all their tokens, or at most a quantum of tokens, and then wait for the next session.
"""

import collections
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from podrl.engine.session import Session, Track
from podrl.mappings import SavedState
from podrl.rollout.episodes import EnvironmentClient, Episode, RolloutRequest
from podrl.rollout.partial import PartialBatch, fill
from podrl.rollout.token_budget import TokenBudget, as_budget

_POLL_S = 1.0  # the longest wait for environments before `EnvironmentClient.waits_for` names them
_HALT_S = 0.02  # the longest wait if the caller may halt the samples: a halt is noticed only between two waits
_RARELY = 6  # number of failed trials of `Pace` in a row after which the pauses between trials stop growing
_BUNCH_S = 0.002  # while no sample runs, answers that come within this time are handled together


class Player(Protocol):
    """Generates the samples of one request.

    Attributes:
      request: request whose samples are generated.
      rows: row b of each sample, group-major, by the sample's track.
      done: samples that have ended, by row.
    """

    request: RolloutRequest
    rows: dict[Track, int]
    done: dict[int, Any]

    def enter(self, session: Session, budget: TokenBudget, calls: int | None = None) -> None:
        """Submits the open samples to a session.

        Args:
          session: session of the engine.
          budget: number of tokens that each sample may draw in the session.
          calls: number of turns that each sample may end in the session, if `budget` has a quantum; None for no limit.
        """
        ...

    def handle_messages(self) -> None:
        """Handles the messages of environments."""
        ...

    def count_waiting(self) -> int:
        """Counts the samples that wait in this session for an answer of their environment."""
        ...

    def event(self, track: Track) -> None:
        """Handles a sample that has ended, paused, or drawn its quantum."""
        ...

    def take(self) -> list[tuple[int, Any]]:
        """Moves the samples that have ended to `done`; returns (b, sample) of each."""
        ...

    def resting(self) -> bool:
        """Returns True if no sample has anything left to do in this session."""
        ...

    def abandon(self) -> None:
        """Cancels the open samples."""
        ...

    def state(self) -> list[tuple[SavedState, Track | None]]:
        """Returns each sample's part of a checkpoint: (values for JSON, the sample's track or None if it has none)."""
        ...


Chosen = Sequence[tuple[Player, int | TokenBudget | None]]  # players, and the tokens that their samples may draw


class PlainPlayer:
    """The Player of samples without environments; it makes no samples if `max_new` is 0."""

    def __init__(self, request: RolloutRequest, partial: PartialBatch | None = None):
        """Stores the request; `enter` starts its samples.

        Args:
          request: the request.
          partial: state of the samples in another process, which this process continues; None for new samples.
        """
        self.request, self.rows, self.done = request, {}, {}
        self._partial, self._open = partial, {}
        self._ended: list[int] = []
        self._entered = False

    def enter(self, session: Session, budget: TokenBudget, calls: int | None = None) -> None:
        del calls
        if not self._entered:
            self._make(session)
        groups: dict[int, list[Track]] = {}
        for b, track in self._open.items():
            if track.stop is None:
                track.leave_at(budget.limit(b, track.sampled), recorded=b in budget.recorded)
                if track.sampled < track.until:
                    groups.setdefault(b // self.request.group_size, []).append(track)
        for tracks in groups.values():
            session.seat(tracks, pieces=self.request.pieces, urgent=budget.urgent)

    def _make(self, session: Session) -> None:
        self._entered, request = True, self.request
        samplings = [request.sampling.of(g) for g in range(request.group_size)]
        for b in range(request.samples) if request.sampling.max_new else ():
            p, g = divmod(b, request.group_size)
            track = session.track(
                request.tokens(p), request.keys_PG2[p, g], samplings[g], recording=request.route_bytes > 0
            )
            track.expected = request.expected.get(b)
            if self._partial is not None and self._partial.samples[b]["track"] is not None:
                fill(track, self._partial, b)
            self._open[b], self.rows[track] = track, b
            if track.stop is not None:
                self._ended.append(b)

    def handle_messages(self) -> None:
        return

    def count_waiting(self) -> int:
        return 0

    def event(self, track: Track) -> None:
        if track.stop is not None:
            self._ended.append(self.rows[track])

    def take(self) -> list[tuple[int, Any]]:
        ended, self._ended = self._ended, []
        self.done.update((b, self._open.pop(b)) for b in ended)
        return [(b, self.done[b]) for b in ended]

    def resting(self) -> bool:
        return all(track.held and track.stop is None for track in self._open.values())

    def abandon(self) -> None:
        self._open.clear()

    def state(self) -> list[tuple[SavedState, Track | None]]:
        return [({}, self.done.get(b) or self._open.get(b)) for b in range(self.request.samples)]


def play(
    session: Session,
    players: Chosen,
    *,
    calls: int | None = None,
    env_client: EnvironmentClient | None,
    between: Callable[[], None],
    halt: Callable[[], bool] | None = None,
) -> Iterator[tuple[Player, int, Track | Episode]]:
    """Steps a session until all samples of the players rest, or until `halt` returns True.

    Args:
      session: the session.
      players: players in the order in which their samples get lanes, each with the quantum or the budget of its
        samples. The caller may append players while the loop runs.
      calls: number of turns that each sample may end in the session (`Player.enter`).
      env_client: client of the environments; None if samples have no environments.
      between: function that is called before each step of the engine.
      halt: function that returns True once all samples must stop where they are; None if they never must.

    Yields:
      (player, b, sample) of every sample when it ends.
    """
    pace, every = Pace(session), list[Player]()

    def enter() -> None:
        for player, quantum in players[len(every) :]:
            every.append(player)
            player.enter(session, as_budget(quantum), calls)

    try:
        enter()
        while session.busy or not all(player.resting() for player in every):
            between()
            halted = halt is not None and halt()
            if env_client is not None and not halted:
                _listen(session, env_client, every, _POLL_S if halt is None else _HALT_S)
            samples, answers = session.flying, env_client is not None and not halted and pace.read_first()
            first = answers or (not halted and pace.refills())
            step = session.suspend if halted else session.read if first else session.step
            tracks = step() if halted or session.busy else []
            if samples:
                pace.read(samples, sum(track.paused is not None for track in tracks), len(tracks))
            for track in tracks:
                next(player for player in every if track in player.rows).event(track)
            if answers and env_client is not None:
                pace.wait(env_client, every)
            for player in every:
                for b, sample in player.take():
                    yield player, b, sample
            if halted:
                break
            enter()
    except BaseException:
        for player, _ in players:
            player.abandon()
        raise
    finally:
        if env_client is not None:
            env_client.waits_for = ""


class Pace:
    """Decides whether the next dispatch is launched before the dispatch in flight is read, or after.

    If the launch comes before the read, the lanes of samples that pause or end in the dispatch in flight are idle
    during the whole next dispatch. If the launch comes after the read, paused samples may have their answers and
    continue, and waiting samples get the lanes of samples that ended; but the device is idle until the launch.

    For paused samples a later launch is worth its cost if answers come fast. `Pace` finds this out by trials, which
    become rarer while they fail. The tokens of samples do not depend on these decisions.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.perf_counter):
        self._session, self._clock = session, clock
        # Number of samples in the dispatch that was read last, number of them that paused, and time of the read.
        self._samples, self._paused, self._since = 1, 0, 0.0
        self._shares = collections.deque([0.25], maxlen=8)  # share of a dispatch's samples that left their lanes
        self._failed = self._rest = 0  # number of failed trials in a row; number of dispatches until the next trial

    def read_first(self) -> bool:
        """Returns True if the dispatch in flight should be read first, so that paused samples can be answered."""
        if not self._session.flying or not self._paused:
            return False
        self._rest = max(self._rest - 1, 0)
        return not self._rest

    def refills(self) -> bool:
        """Returns True if the dispatch in flight should be read first, so that waiting samples get the freed lanes.

        This pays if empty lanes would waste more device time, on average, than the device is idle until the launch.
        """
        if not self._session.flying or not self._session.crowded or not self._session.took:
            return False
        return _mean(self._shares) * min(self._session.took) > 2 * _mean(self._session.planned)

    def read(self, samples: int, paused: int, left: int) -> None:
        """Records that a dispatch was read.

        Args:
          samples: number of samples in the dispatch.
          paused: number of these samples that paused.
          left: number of these samples that left their lanes, for any reason.
        """
        self._samples, self._paused, self._since = samples, paused, self._clock()
        self._shares.append(left / samples)

    def wait(self, env_client: EnvironmentClient, players: Sequence[Player]) -> None:
        """Waits for answers while the device is idle, at most for the device time that the paused lanes would waste."""
        lane_s = min(self._session.took, default=0.0) / self._samples  # seconds of the device per sample in a dispatch
        since = self._since - 2 * max(self._session.planned, default=0.0)  # the launch costs idle time, too
        before = left = _waiting(players)
        while left and (rest := since + lane_s * self._paused - self._clock()) > 0:
            if not _poll(env_client, players, min(rest, lane_s * left)):
                break
            left = _waiting(players)
        if before:
            paid = lane_s * (before - left) > self._clock() - since
            self._failed = 0 if paid else min(self._failed + 1, _RARELY)
            self._rest = 2**self._failed // 2  # after one failure the next dispatch is another trial


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _waiting(players: Sequence[Player]) -> int:
    return sum(player.count_waiting() for player in players)


def _poll(env_client: EnvironmentClient, players: Sequence[Player], wait_s: float) -> int:
    """Waits at most `wait_s` seconds for messages of environments, and lets the players handle them.

    Returns:
      The number of messages.
    """
    count = env_client.poll(wait_s)
    for player in players:
        player.handle_messages()
    return count


def _listen(session: Session, env_client: EnvironmentClient, players: Sequence[Player], most_s: float) -> None:
    """Handles messages of environments, and waits for more while the device needs no new dispatch.

    If the device is idle, the wait for the first message takes at most `most_s` seconds, and each further wait at most
    `_BUNCH_S`. If the device stays idle, `env_client.waits_for` names the environments that the samples wait for.
    """
    idle = not session.busy
    count = _poll(env_client, players, most_s if idle else 0.0)
    env_client.waits_for = ", ".join(env_client.host.waiting()[:3]) if idle and not count else ""
    while _waiting(players) and (count or not idle):
        if (wait := _BUNCH_S if idle else session.slack_s) <= 0:
            break
        count = _poll(env_client, players, wait)
