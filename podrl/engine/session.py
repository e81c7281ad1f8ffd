"""Runs samples to their end: carries out the scheduler's plans on the device and records the sampled tokens."""

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import UInt8

from podrl.engine.config import Sampling
from podrl.engine.device import Device
from podrl.engine.prefill import cut_chunks, run_chunks
from podrl.engine.records import DispatchPlan, Feed, Fill, PoolShape
from podrl.engine.routes import RouteReader
from podrl.engine.scheduler import Scheduler
from podrl.engine.state import FREE, SEAT, LaneUpdates, PrefillChunk, SampledTokens
from podrl.engine.stats import Stats
from podrl.engine.stops import StopFinder
from podrl.types import DRAWN, STOP_EOS, STOP_FAILED, STOP_LENGTH, STOP_STRING, PyTree


@dataclasses.dataclass(frozen=True)
class Opening:
    """Tells the engine which tokens to append to a sample without sampling them, and when to stop sampling after them.

    Attributes:
      tokens: token ids to append ("appended tokens": text of tools, environments and requests).
      stop_strings, stop_ids: texts and ids that pause the sample, besides the ids that end every sample.
      max_new: largest number of tokens to sample before the sample pauses; None for all its remaining tokens.
    """

    tokens: Sequence[int] = ()
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    max_new: int | None = None


@dataclasses.dataclass(eq=False)
class Track:
    """Host record of one sample; its lists have one entry per token of the completion.

    Attributes:
      handle: number of the sample in its session, in order of submission; -1 before its first session.
      prompt: token ids of the prompt.
      sampling: settings of the sample, with `max_new` set.
      stop_ids: every id that ends or pauses the sample.
      key: random key, uint32 (2,); it may change while the sample is paused.
      pauses: True if the sample pauses where other samples end; its caller then extends or ends it.
      finder: search for stop strings in the completion; None without stop strings.
      expected: estimate of how many tokens the sample will sample; None without an estimate.
      tokens: ids of the sampled and the appended tokens (`Opening.tokens`).
      versions: version of the weights that sampled each token; -1 for an appended token.
      drawn: a list over the tokens for each name of `podrl.types.DRAWN`; an appended token has the column's fill.
      sampled: number of tokens sampled so far.
      limit: value of `sampled` at which the sample ends or pauses.
      hold: value of `sampled` at which the sample leaves the session, to continue in another; None for never.
      held: True if the sample is outside of a session: it has left its session, or has not entered one yet.
      recorded: True if `hold` repeats an interruption from the journal of a run with `rollout.clock='wall'`. The first
        time, the run did not know of the interruption beforehand, so pages are laid out as if there was none.
      stop: reason why the sample ended, one of the STOP_* codes of `podrl.types`; None as long as it has not ended.
      paused: reason why the sample paused, with the values of `stop`; None while it runs.
      first: index of the first token after the tokens that were appended last (`Session.extend`).
      text: text of the completion without end tokens, cut after a stop string; while paused, the part of it
        from token `first` on.
      epoch: number of pauses so far. A dispatch that was launched before a pause may have decoded tokens after the
        pause. Results of such a dispatch are dropped: the epoch at its launch is smaller than the present epoch.
      breaks: numbers of sampled tokens at which the sample continued in another session under the same weights. There,
        prefill computed the keys and values of its tokens anew, and prefill's results differ from decoding's in the
        last bits, so a repetition must break at the same points.
      recording: True to record the experts that the sample's tokens take.
      routes: experts of the tokens of prompt and completion, as in `Rollouts.route_BTX`, when the sample last left a
        session. Every session computes all tokens anew, so each token has the experts of its newest computation. None
        until the sample has left a session, or if experts are not recorded.
    """

    handle: int
    prompt: np.ndarray
    sampling: Sampling
    stop_ids: tuple[int, ...]
    key: np.ndarray
    pauses: bool
    finder: StopFinder | None
    expected: float | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    drawn: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {name: [] for name in DRAWN})
    sampled: int = 0
    limit: int = 0
    hold: int | None = None
    held: bool = True
    recorded: bool = False
    stop: int | None = None
    paused: int | None = None
    first: int = 0
    text: str = ""
    epoch: int = 0
    breaks: list[int] = dataclasses.field(default_factory=list)
    recording: bool = False
    routes: UInt8[np.ndarray, "T X"] | None = None

    def leave_at(self, hold: int | None, *, recorded: bool) -> None:
        """Sets the value of `hold` for the session that the sample is about to enter."""
        self.hold, self.recorded = hold, recorded

    @property
    def until(self) -> int:
        """Value of `sampled` at which the sample ends, pauses or leaves the session."""
        return self.limit if self.hold is None else min(self.limit, self.hold)


@dataclasses.dataclass
class _Flight:
    """A launched dispatch whose results have not been read.

    Attributes:
      emitted: results of the dispatch, on the device.
      lanes: (sample, lane over all shards, the sample's epoch at the launch) of each lane in use.
      version: version of the weights.
      launched: time of the launch, seconds of `time.perf_counter`.
    """

    emitted: SampledTokens
    lanes: list[tuple[Track, int, int]]
    version: int
    launched: float


class Session:
    """Holds the samples in progress on one engine; not thread-safe. One session at a time owns the engine's state.

    Attributes:
      device: pools, lanes and weights; the next session takes over its state.
      engine: the device's programs.
      stats: counters so far.
      took: seconds that each of the last four dispatches took.
      planned: seconds that each of the last four plans took.
    """

    def __init__(
        self,
        device: Device,
        version: int,
        *,
        decode: Callable[[list[int]], str],
        eos_ids: Sequence[int],
        cache_tokens: int,
    ):
        """Makes a session without samples.

        Args:
          device: pools, lanes and weights.
          version: version of the weights.
          decode: function that turns token ids into text, without special tokens.
          eos_ids: ids that end every sample.
          cache_tokens: largest number of tokens of a sample, prompt included.
        """
        engine, s = device.engine, device.engine.shape
        self.device, self.engine, self.stats = device, engine, Stats()
        self._version = version
        self._decode, self._eos_ids, self._cache_tokens = decode, tuple(eos_ids), cache_tokens
        sample_pages = min(s.max_pages, s.pages - 1)
        self._scheduler = Scheduler(
            PoolShape(
                engine.shards,
                s.lanes,
                s.pages - 1,
                s.page_tokens,
                s.steps,
                s.members,
                sample_pages,
                s.prefill_calls,
                s.slots,
            )
        )
        self._routes = RouteReader(device) if engine.routes else None
        self._tracks: dict[int, Track] = {}
        self._prompts: dict[int, np.ndarray] = {}
        self._shared: dict[bytes, int] = {}  # handles of the prompts that further samples may share, by their digests
        self._flights: list[_Flight] = []
        self._count = 0
        self._idle_since = time.perf_counter()
        self.took: deque[float] = deque(maxlen=4)
        self.planned: deque[float] = deque(maxlen=4)

    def add(
        self,
        prompt: np.ndarray,
        keys_G2: np.ndarray,
        sampling: Sampling,
        *,
        pieces: int = 1,
        openings: Sequence[Opening] = (),
    ) -> list[Track]:
        """Submits samples of one prompt; the caller has checked them against the engine's limits.

        Args:
          prompt: token ids of the prompt, at least 1.
          keys_G2: a random key per sample, uint32.
          sampling: settings with `max_new` set; an opening's stop strings replace the stop strings of these settings.
          pieces: number of groups of samples that may run on different shards (`Scheduler.add`).
          openings: Opening of each sample, whose tokens must fit the cache; empty if there are none. A sample with an
            opening pauses where a sample without one ends.

        Returns:
          The samples' records.
        """
        opening_G = openings or [None] * len(keys_G2)
        tracks = [self.track(prompt, key, sampling, opening) for key, opening in zip(keys_G2, opening_G, strict=True)]
        self.seat(tracks, pieces=pieces)
        return tracks

    def track(
        self,
        prompt: np.ndarray,
        key: np.ndarray,
        sampling: Sampling,
        opening: Opening | None = None,
        *,
        recording: bool = False,
    ) -> Track:
        """Makes the record of a sample that is not in a session yet; for the arguments see `add` and `Track`."""
        assert sampling.max_new is not None and sampling.max_new > 0, sampling
        stop_ids = (*self._eos_ids, *sampling.stop_ids)
        finder = StopFinder(sampling.stop_strings, self._decode) if sampling.stop_strings else None
        limit = min(sampling.max_new, self._cache_tokens - len(prompt))
        track = Track(
            -1, prompt, sampling, stop_ids, key, opening is not None, finder, limit=limit, recording=recording
        )
        if opening is not None:
            self._open(track, opening)
        return track

    def seat(self, tracks: Sequence[Track], *, pieces: int = 1, urgent: bool = False, shared: bool = False) -> None:
        """Submits samples of one prompt: new samples, or samples that have left another session.

        Args:
          tracks: records of the samples.
          pieces: number of groups of samples that may run on different shards (`Scheduler.add`).
          urgent: True if these samples get lanes before samples that are not urgent.
          shared: True if these samples share their prompt's pages with earlier samples that were also submitted as
            `shared`, as long as these pages exist. If False, the prompt is prefilled for these samples alone.
        """
        for track in tracks:
            track.handle, track.held = self._count, False
            self._count += 1
            newest = next((version for version in reversed(track.versions) if version >= 0), None)
            # If the sample continues under the weights that drew its last token, this is a break (`Track.breaks`).
            if newest == self._version and track.breaks[-1:] != [track.sampled]:
                track.breaks.append(track.sampled)
        self._tracks.update((t.handle, t) for t in tracks)
        handle, prompt = tracks[0].handle, tracks[0].prompt
        if shared:
            handle = self._shared.setdefault(hashlib.blake2b(prompt.tobytes(), digest_size=16).digest(), handle)
        self._prompts[handle] = prompt
        rows = [(t.handle, t.until - t.sampled, t.expected) for t in tracks]
        self._scheduler.add(handle, len(prompt), rows, pieces, urgent=urgent, joins=shared)
        for track in tracks:
            self._scheduler.give(track.handle, len(track.tokens))

    def refresh(self, params: PyTree, version: int) -> None:
        """Uses new weights, prepared by the engine, from the next dispatch on; cached keys and values are kept."""
        self.device.use(params)
        self._version = version

    @property
    def open(self) -> int:
        """Number of samples that have not ended, including paused samples."""
        return len(self._tracks)

    @property
    def busy(self) -> bool:
        """Returns True while `step` has work; False if every open sample is paused."""
        return bool(self._flights) or self._scheduler.busy

    @property
    def crowded(self) -> bool:
        """True while samples wait for lanes."""
        return self._scheduler.crowded

    @property
    def flying(self) -> int:
        """Number of samples in the dispatch in flight; 0 without one."""
        return len(self._flights[0].lanes) if self._flights else 0

    @property
    def slack_s(self) -> float:
        """Seconds for which the device still has work and `step` need not be called; 0 if the device may be idle.

        A sample that is extended within this time runs in the next dispatch, and need not wait for a later dispatch.
        """
        if not self._flights or not self.took:
            return 0.0
        # A cautious estimate: the dispatch in flight may be shorter than earlier dispatches, and the next dispatch must
        # be planned and launched before it ends.
        began = max(self._flights[0].launched, self._idle_since)
        return max(began + 0.9 * min(self.took) - 2 * max(self.planned) - time.perf_counter(), 0.0)

    def step(self) -> list[Track]:
        """Launches the next dispatch, if there is work for it, and reads the previous dispatch.

        Returns:
          The samples that ended, paused or left the session in the dispatch that was read.
        """
        started = time.perf_counter()
        plan = self._scheduler.plan()
        self.planned.append(time.perf_counter() - started)
        self.stats.plan_seconds += self.planned[-1]
        self._carry_out(plan)
        if plan.running:
            self._launch(plan)
            if len(self._flights) < 2:
                return []
        return self.read()

    def read(self) -> list[Track]:
        """Reads the oldest dispatch in flight, if there is one, and launches none.

        If no other dispatch was in flight, the device is idle afterwards.

        Returns:
          The samples that ended, paused or left the session, as `step` does.
        """
        return self._read(self._flights.pop(0)) if self._flights else []

    def extend(self, track: Track, opening: Opening) -> None:
        """Appends tokens to a paused sample and lets it go on; ends the sample if it may sample no more tokens.

        If the sample has drawn all tokens that it may draw in this session, it leaves the session. If it had left the
        session before the tokens to append arrived, it is seated again.

        Raises:
          ValueError: the sample is not paused, or it has no room for that many tokens.
        """
        if track.paused is None:
            raise ValueError(f"Sample {track.handle} is not paused: only a sample that paused can be extended.")
        if len(opening.tokens) > (room := self.room(track)):
            raise ValueError(f"{len(opening.tokens)} tokens do not fit sample {track.handle}: it has room for {room}.")
        self._open(track, opening)
        if not track.held:
            self._scheduler.give(track.handle, len(opening.tokens))
        if track.limit == track.sampled:
            self.end(track, STOP_LENGTH)
            return
        track.paused = None
        if track.until == track.sampled:
            self.hold(track)
        elif track.held:
            self.seat([track], urgent=track.hold is None)
        else:
            last = track.limit if track.recorded else track.until  # pages as in the first run (`Track.recorded`)
            self._scheduler.resume(track.handle, left=last - track.sampled)

    def fork(self, track: Track, count: int, *, held: bool = False) -> Track:
        """Makes a paused sample whose completion begins with the first `count` tokens of another sample's completion.

        If the other sample is in the session, the new one gets a copy of the keys and values of these tokens. So it
        goes on exactly as the other sample would have gone on from there, unless the other sample has moved these keys
        and values since (`Sample.compact`). Otherwise prefill computes them anew when the new sample is extended.

        Args:
          track: the other sample; it has not ended.
          count: number of tokens.
          held: True if the new sample stays out of the session.
        """
        versions = track.versions[:count]
        fork = dataclasses.replace(
            track,
            tokens=track.tokens[:count],
            versions=versions,
            drawn={name: values[:count] for name, values in track.drawn.items()},
            sampled=(sampled := sum(version >= 0 for version in versions)),
            held=True,
            paused=STOP_LENGTH,
            breaks=[place for place in track.breaks if place <= sampled],
            routes=None,
        )
        if track.held or held or self.engine.shape.slots:
            return fork
        fork.handle, fork.held = self._count, False
        self._count += 1
        self._tracks[fork.handle] = fork
        position = len(track.prompt) + count - 1
        store, source, shard = self._scheduler.fork(fork.handle, track.handle, position=position)
        if source.spilled:
            self.device.share(store.name, source.name)
        else:
            self.device.spill(store.name, shard, [page.index for page in store.pages], store.place)
        return fork

    def pause(self, track: Track, stop: int) -> None:
        """Pauses a sample outside of the session for the reason `stop`, after tokens were added to its record."""
        assert track.held, track.handle
        track.paused, track.text = stop, self._text(track, stop, track.first)

    def hold(self, track: Track) -> None:
        """Takes an open sample out of the session; another session can continue its record."""
        if not track.held:
            track.held = True
            self._release(track, live=track.paused is None and track.sampled < track.until)

    def suspend(self) -> list[Track]:
        """Ends the session: reads the dispatches in flight, then takes all open samples out of the session.

        Returns:
          The samples that ended or paused in these dispatches.
        """
        events = []
        while self._flights:
            events.extend(self._read(self._flights.pop(0)))
        for track in self._tracks.values():
            track.held = True
            self._record(track)
        self._tracks.clear()
        self._carry_out(self._scheduler.stop())
        return [track for track in events if track.stop is not None or track.paused is not None]

    def has_routes(self, track: Track) -> bool:
        """Returns True if `Track.routes` of a sample that has left the session is complete, or is not recorded."""
        return self._routes is None or not self._routes.pending(track)

    def finish_routes(self) -> None:
        """Completes `Track.routes` of all samples that have left the session."""
        if self._routes is not None:
            self._routes.finish()

    def spare_stop_ids(self, sampling: Sampling) -> int:
        """Returns how many stop ids an opening may have."""
        return self.engine.shape.stop_ids - len(self._eos_ids) - len(sampling.stop_ids)

    def room(self, track: Track) -> int:
        """Returns the number of further tokens of a sample for which the cache has room."""
        return self._cache_tokens - len(track.prompt) - len(track.tokens)

    def _open(self, track: Track, opening: Opening) -> None:
        """Appends the tokens of an opening, and sets limits and stops for the tokens that are sampled after them."""
        count = len(opening.tokens)
        track.tokens.extend(int(token) for token in opening.tokens)
        for name, column in DRAWN.items():
            track.drawn[name].extend([column.fill] * count)
        track.versions.extend([-1] * count)
        track.first = len(track.tokens)
        track.stop_ids = (*self._eos_ids, *track.sampling.stop_ids, *opening.stop_ids)
        track.finder = StopFinder(opening.stop_strings, self._decode) if opening.stop_strings else None
        if track.finder:
            track.finder.restart(track.first)
        assert track.sampling.max_new is not None
        left = min(track.sampling.max_new - track.sampled, self.room(track))
        track.limit = track.sampled + max(left if opening.max_new is None else min(left, opening.max_new), 0)

    def end(self, track: Track, stop: int = STOP_STRING) -> None:
        """Ends an open sample, paused or not, for the reason `stop`."""
        track.paused, track.stop = None, stop
        if track.held:
            track.text = self._text(track, stop)
        else:
            self._close(track, live=True)

    # The device's work for a plan.

    def _carry_out(self, plan: DispatchPlan) -> None:
        if self._routes is not None:
            self._routes.launch()
        for spill in plan.spills:
            self.device.spill(spill.store.name, spill.shard, spill.pages, spill.place)
            self.stats.spills += 1
        for restore in plan.restores:
            self.device.restore(restore.store.name, restore.shard, restore.pages, restore.place)
        self._prefill([self._prompt_chunks(fill) for fill in plan.prefills])
        self._prefill([self._given_chunks(feed) for feed in plan.feeds])
        if plan.copies:
            self.device.copy(self.engine.shape.pack_copies(self.engine.shards, plan.copies))
        if plan.seats or plan.frees:
            self.device.insert(self._lane_updates(plan).packed())

    def _launch(self, plan: DispatchPlan) -> None:
        engine = self.engine
        flat_XI = self._scheduler.reads(engine.read_shape, engine.shape.pages - 1)
        if not self._flights:
            self.stats.host_seconds += time.perf_counter() - self._idle_since
        if self.stats.meter.alone:  # wait for the prefill calls, so that they are timed without the dispatch
            jax.block_until_ready(self.device.state.token_R)
        self.stats.meter.launch()
        emitted = self.device.generate(flat_XI)
        lanes = [
            (self._tracks[sample.id], shard * engine.shape.lanes + lane, self._tracks[sample.id].epoch)
            for sample, shard, lane in plan.running
        ]
        self._flights.append(_Flight(emitted, lanes, self._version, time.perf_counter()))
        self._scheduler.advance()
        self.stats.dispatches += 1

    def _lane_updates(self, plan: DispatchPlan) -> LaneUpdates:
        R, E = self.engine.shape.lanes, self.engine.shape.stop_ids
        updates = LaneUpdates.empty(self.engine.shards * R, E)
        for shard, lane in plan.frees:
            updates.action_R[shard * R + lane] = FREE
        for sample in plan.seats:
            track, r = self._tracks[sample.id], sample.shard * R + sample.lane
            sampling = track.sampling
            updates.action_R[r] = SEAT
            updates.token_R[r] = track.tokens[-1] if track.tokens else track.prompt[-1]
            updates.position_R[r] = len(track.prompt) + len(track.tokens) - 1
            assert updates.position_R[r] == sample.position, (track.handle, updates.position_R[r], sample)
            updates.left_R[r] = track.until - track.sampled
            updates.top_k_R[r] = sampling.top_k or 0
            updates.key_R2[r] = track.key
            updates.stop_RE[r, : len(track.stop_ids)] = track.stop_ids
            updates.temperature_R[r] = sampling.temperature
            updates.top_p_R[r], updates.min_p_R[r] = sampling.nucleus, sampling.min_p
        return updates

    def _prompt_chunks(self, fill: Fill) -> list[PrefillChunk]:
        """Cuts a prompt into prefill chunks, without its last token, which each sample feeds in its own lane."""
        shape, prompt = self.engine.shape, self._prompts[fill.prompt]
        return cut_chunks(shape, fill.shard, prompt[:-1], 0, [], fill.pages, places=(shape.nowhere, fill.place))

    def _given_chunks(self, feed: Feed) -> list[PrefillChunk]:
        """Cuts a sample's tokens from `feed.start` on into prefill chunks; the sample's lane feeds its last token."""
        track, n = self._tracks[feed.sample.id], len(self._tracks[feed.sample.id].prompt)
        row = [*track.prompt[feed.start :], *track.tokens[max(feed.start - n, 0) :]]
        shape, shard = self.engine.shape, feed.sample.shard
        places = (feed.place, feed.sample.lane)
        return cut_chunks(shape, shard, row[:-1], feed.start, feed.prior, feed.targets, feed.offset, places)

    def _prefill(self, sequences: list[list[PrefillChunk]]) -> None:
        self.stats.meter.begin()
        self.stats.meter.prefilled(run_chunks(self.device, sequences))
        self.stats.prefill_tokens += sum(len(chunk.tokens) for chunks in sequences for chunk in chunks)

    # Results.

    def _read(self, flight: _Flight) -> list[Track]:
        out = jax.device_get(flight.emitted)
        self.stats.meter.read()
        if self._routes is not None:
            self._routes.settle()
        now = time.perf_counter()
        self.took.append(now - max(flight.launched, self._idle_since))
        self._idle_since = now
        steps_X = out.steps_X
        self.stats.decode_steps += int(steps_X.max())
        self.stats.lane_steps += int(steps_X.sum()) * self.engine.shape.lanes
        events = []
        count_R, live_R, failed_R = out.count_R.tolist(), out.live_R.tolist(), out.failed_R.tolist()
        tokens, drawn = out.tokens_RT.tolist(), {name: x_RT.tolist() for name, x_RT in out.drawn.items()}
        for track, r, epoch in flight.lanes:
            # The sample has ended, paused or left since the launch: its lane decoded beyond the end.
            if track.epoch != epoch or track.stop is not None or track.paused is not None or track.held:
                continue
            count = count_R[r]
            track.tokens.extend(tokens[r][:count])
            for name, values in drawn.items():
                track.drawn[name].extend(values[r][:count])
            track.versions.extend([flight.version] * count)
            track.sampled += count
            self.stats.tokens += count
            if failed_R[r]:
                self._fail(track, flight.version)
                events.append(track)
            elif self._settle(track, live_R[r]):
                events.append(track)
        return events

    def _settle(self, track: Track, live: bool) -> bool:
        """Ends a sample, pauses it, or takes it out of the session, if its new tokens require this.

        Returns:
          False if the sample goes on, True otherwise.
        """
        found = track.finder.find(track.tokens) if track.finder else None
        if found is None and live:
            return False
        if found is not None:
            self._cut(track, found)
            stop = STOP_STRING
        else:
            stop = STOP_EOS if track.tokens and track.tokens[-1] in track.stop_ids else STOP_LENGTH
        if stop == STOP_LENGTH and track.sampled < track.limit:  # the lane stopped at `hold`, not at the limit
            self.hold(track)
            return True
        if not track.pauses:
            track.stop = stop
            self._close(track, live=live)
            return True
        track.paused, track.epoch = stop, track.epoch + 1
        track.text = self._text(track, stop, track.first)
        if self.engine.shape.slots:
            self._record(track)  # the pause drops the sample's pages
        for store in self._scheduler.pause(track.handle, position=len(track.prompt) + len(track.tokens) - 1):
            self.device.forget(store.name)
        return True

    def _fail(self, track: Track, version: int) -> None:
        """Ends a sample as failed: its next-token logits were NaN or infinite."""
        track.stop = STOP_FAILED
        self.stats.failed[version] += 1
        self._close(track, live=False)

    def _cut(self, track: Track, length: int) -> None:
        dropped = len(track.tokens) - length
        for values in (track.tokens, track.versions, *track.drawn.values()):
            del values[length:]
        track.sampled -= dropped
        self.stats.tokens -= dropped

    def _close(self, track: Track, live: bool) -> None:
        assert track.stop is not None
        track.text = self._text(track, track.stop)
        self._release(track, live=live)

    def _record(self, track: Track) -> None:
        """Requests a read of the experts that a sample's tokens took, before other samples get the sample's pages."""
        if self._routes is None or not track.recording:
            return
        length = len(track.prompt) + len(track.tokens)
        stores = self._scheduler.stores(track.handle)
        self._routes.want(track, length, [(store.name, shard, store.pages) for store, shard in stores])

    def _release(self, track: Track, live: bool) -> None:
        self._record(track)
        for store, shard, pages in self._scheduler.finish(track.handle, grown=track.sampled, live=live):
            if store.name in self.device.spilled:
                self.device.forget(store.name)
            # Prefill stores even keys and values that are NaN or infinite, so that decoding notices them. The next
            # owner of the pages must not read them.
            if track.stop == STOP_FAILED and pages:
                self.device.clear(shard, pages)
        del self._tracks[track.handle]

    def _text(self, track: Track, stop: int, first: int = 0) -> str:
        """Decodes a completion from its token `first` on, without an end token; cuts it after a stop string."""
        tokens = track.tokens[first:]
        text = self._decode(tokens[:-1] if stop == STOP_EOS else tokens)
        return track.finder.cut(text) if track.finder and stop == STOP_STRING else text
