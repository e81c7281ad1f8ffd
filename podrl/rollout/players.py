"""Plays samples on a session: those that nobody answers, and the loop that steps the engine for these and for others.

A player holds the samples of one request from their first token to their last, over one session or several: in each it
enters, its samples draw at most a quantum of tokens, or all of theirs, and then rest.
"""

import collections
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from podrl.engine.session import Session, Track
from podrl.rollout.episodes import Episode, Partner, Request
from podrl.rollout.partial import Partial, fill
from podrl.rollout.points import Points, points

_POLL_S = 1.0  # the longest silence before it is looked who is waited for
_HALT_S = 0.02  # the same where somebody may halt all
_RARELY = 6  # trials of `Pace` that fail in a row before they become no rarer
_BUNCH_S = 0.002  # answers less than this apart go on together, where no sample runs


class Player(Protocol):
    """The samples of a request.

    Attributes:
      request: what was asked.
      rows: the samples' rows b, group-major, by their records.
      done: samples that have ended, by their rows.
    """

    request: Request
    rows: dict[Track, int]
    done: dict[int, Any]

    def enter(self, session: Session, points: Points, calls: int | None = None) -> None:
        """Submits what is open.

        Args:
          session: which samples these are played on until all rest.
          points: tokens that each sample may draw there.
          calls: turns that each may end there, where there is a quantum; None for any number.
        """
        ...

    def hear(self) -> None:
        """Acts on what environments have said."""
        ...

    def owed(self) -> int:
        """Counts the samples whose environments have the word, and are waited for on this session."""
        ...

    def event(self, track: Track) -> None:
        """A sample has ended, paused, or drawn its quantum."""
        ...

    def take(self) -> list[tuple[int, Any]]:
        """Moves samples that have ended to `done`: (b, sample) of each."""
        ...

    def resting(self) -> bool:
        """True when none of the samples has anything to do on this session."""
        ...

    def abandon(self) -> None:
        """Gives up what is open."""
        ...

    def state(self) -> list[tuple[dict[str, Any], Track | None]]:
        """Returns what a checkpoint must hold of each sample: values as JSON, and its record, if it is begun."""
        ...


Chosen = Sequence[tuple[Player, int | Points | None]]  # requests, and what their samples may draw


class Unanswered:
    """Plays samples that have no environment; those of no tokens are left out. Implements Player."""

    def __init__(self, request: Request, partial: Partial | None = None):
        """Nothing starts yet; `partial` is what the samples were in another process."""
        self.request, self.rows, self.done = request, {}, {}
        self._partial, self._open = partial, {}
        self._ended: list[int] = []
        self._entered = False

    def enter(self, session: Session, points: Points, calls: int | None = None) -> None:
        del calls
        if not self._entered:
            self._make(session)
        groups: dict[int, list[Track]] = {}
        for b, track in self._open.items():
            if track.stop is None:
                track.leave_at(points.hold(b, track.sampled), recorded=b in points.recorded)
                if track.sampled < track.until:
                    groups.setdefault(b // self.request.group_size, []).append(track)
        for tracks in groups.values():
            session.seat(tracks, pieces=self.request.pieces, urgent=points.urgent)

    def _make(self, session: Session) -> None:
        self._entered, asked = True, self.request
        samplings = [asked.sampling.of(g) for g in range(asked.group_size)]
        for b in range(asked.samples) if asked.sampling.max_new else ():
            p, g = divmod(b, asked.group_size)
            track = session.track(asked.tokens(p), asked.keys_PG2[p, g], samplings[g], recording=asked.route_bytes > 0)
            track.expected = asked.expected.get(b)
            if self._partial is not None and self._partial.samples[b]["track"] is not None:
                fill(track, self._partial, b)
            self._open[b], self.rows[track] = track, b
            if track.stop is not None:
                self._ended.append(b)

    def hear(self) -> None:
        return

    def owed(self) -> int:
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

    def state(self) -> list[tuple[dict[str, Any], Track | None]]:
        return [({}, self.done.get(b) or self._open.get(b)) for b in range(self.request.samples)]


def play(
    session: Session,
    players: Chosen,
    *,
    calls: int | None = None,
    partner: Partner | None,
    between: Callable[[], None],
    halt: Callable[[], bool] | None = None,
) -> Iterator[tuple[Player, int, Track | Episode]]:
    """Plays until all rest, or until told; yields (player, b, sample) of every sample as it ends.

    Args:
      session: to play on.
      players: in the order in which they get lanes, with the quantum, or the points, of their samples. Those that the
        caller appends meanwhile are played, too.
      calls: see Player.enter.
      partner: of players whose samples have environments.
      between: called before each step of the engine.
      halt: True once all is to rest where it is; None where nobody will say so.
    """
    pace, every = Pace(session), list[Player]()

    def enter() -> None:
        for player, given in players[len(every) :]:
            every.append(player)
            player.enter(session, points(given), calls)

    try:
        enter()
        while session.busy or not all(player.resting() for player in every):
            between()
            halted = halt is not None and halt()
            if partner is not None and not halted:
                _listen(session, partner, every, _POLL_S if halt is None else _HALT_S)
            samples, answers = session.flying, partner is not None and not halted and pace.read_first()
            first = answers or (not halted and pace.refills())
            step = session.suspend if halted else session.read if first else session.step
            tracks = step() if halted or session.busy else []
            if samples:
                pace.read(samples, sum(track.paused is not None for track in tracks), len(tracks))
            for track in tracks:
                next(player for player in every if track in player.rows).event(track)
            if answers and partner is not None:
                pace.wait(partner, every)
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
        if partner is not None:
            partner.waits_for = ""


class Pace:
    """Decides whether the next dispatch is launched before the one in flight is read, or after.

    Launched before, it runs with the lanes of samples that pause in the one in flight, and decodes nothing in them.
    Launched after, it may have them answered and decoding, but the device is idle until then. That pays where answers
    come sooner than those lanes are worth, which is tried, and the less often the more often it did not pay. What
    samples are does not depend on it.

    So have the lanes of samples that end there, where others wait for them: those are seated at once.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.perf_counter):
        self._session, self._clock = session, clock
        self._samples, self._paused, self._since = 1, 0, 0.0  # of the dispatch that was read last, and when
        self._shares = collections.deque([0.25], maxlen=8)  # of the samples of dispatches, those that left their lanes
        self._failed = self._rest = 0  # trials in a row that did not pay; dispatches until the next one

    def read_first(self) -> bool:
        """True where the dispatch in flight is read before the next one is launched."""
        if not self._session.flying or not self._paused:
            return False
        self._rest = max(self._rest - 1, 0)
        return not self._rest

    def refills(self) -> bool:
        """True if waiting for this dispatch's lanes pays: those freed on average are worth more than the idle time."""
        if not self._session.flying or not self._session.crowded or not self._session.took:
            return False
        return _mean(self._shares) * min(self._session.took) > 2 * _mean(self._session.planned)

    def read(self, samples: int, paused: int, left: int) -> None:
        """Records that a dispatch was read, how many samples it had, how many of them paused, and left their lanes."""
        self._samples, self._paused, self._since = samples, paused, self._clock()
        self._shares.append(left / samples)

    def wait(self, partner: Partner, players: Sequence[Player]) -> None:
        """Waits for answers while the device is idle, not longer than they are worth."""
        lane_s = min(self._session.took, default=0.0) / self._samples  # what a lane is worth, in seconds of the device
        since = self._since - 2 * max(self._session.planned, default=0.0)  # idle from the read to the next launch
        asked = left = _owed(players)
        while left and (rest := since + lane_s * self._paused - self._clock()) > 0:
            if not _hear(partner, players, min(rest, lane_s * left)):
                break
            left = _owed(players)
        if asked:
            paid = lane_s * (asked - left) > self._clock() - since
            self._failed = 0 if paid else min(self._failed + 1, _RARELY)
            self._rest = 2**self._failed // 2  # one failure alone changes nothing


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _owed(players: Sequence[Player]) -> int:
    return sum(player.owed() for player in players)


def _hear(partner: Partner, players: Sequence[Player], wait_s: float) -> int:
    """Has players act on what environments say first within so many seconds, and counts it."""
    heard = partner.poll(wait_s)
    for player in players:
        player.hear()
    return heard


def _listen(session: Session, partner: Partner, players: Sequence[Player], most_s: float) -> None:
    """Takes what environments say: while the device has work, or until the first of them and those right behind."""
    idle = not session.busy
    heard = _hear(partner, players, most_s if idle else 0.0)
    partner.waits_for = ", ".join(partner.host.waiting()[:3]) if idle and not heard else ""
    while _owed(players) and (heard or not idle):
        if (wait := _BUNCH_S if idle else session.slack_s) <= 0:
            break
        heard = _hear(partner, players, wait)
