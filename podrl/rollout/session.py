"""Runs samples to their end: carries out the scheduler's plans on the engine and turns its output into records."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from podrl.rollout.config import Sampling
from podrl.rollout.engine import Engine
from podrl.rollout.prefill import cut_chunks, run_chunks
from podrl.rollout.scheduler import Plan, PoolShape, Scheduler, Store
from podrl.rollout.state import FREE, SEAT, Chunk, DecodeState, Emitted, Seats
from podrl.rollout.stops import StopFinder
from podrl.types import STOP_EOS, STOP_LENGTH, STOP_STRING, PyTree


@dataclasses.dataclass(eq=False)
class Track:
    """What is known of one sample; the lists run over its completion.

    Attributes:
      handle: its number in the session, in order of submission.
      prompt: the prompt's tokens.
      sampling: its settings, `max_new` filled in.
      stop_ids: every id that ends it.
      key: its random key, uint32 (2,).
      pauses: a stop string pauses it instead of ending it.
      tokens, logprobs, raw_logprobs, versions: sampled and given tokens; a given token has version -1 and zeros.
      sampled, limit: tokens sampled so far, and at most.
      stop: why it ended; None while it has not.
      text: the completion without end tokens, cut after a stop string; set when it ends or pauses.
      epoch: counts pauses, so that results of a dispatch that overran one are told apart.
    """

    handle: int
    prompt: np.ndarray
    sampling: Sampling
    stop_ids: tuple[int, ...]
    key: np.ndarray
    pauses: bool
    finder: StopFinder | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    sampled: int = 0
    limit: int = 0
    stop: int | None = None
    paused: bool = False
    text: str = ""
    epoch: int = 0


@dataclasses.dataclass
class Stats:
    """Counters of a session.

    Attributes:
      tokens: sampled tokens kept.
      dispatches: calls of `generate`.
      decode_steps: steps of the busiest shard, summed over dispatches.
      lane_steps: lane places of all steps of all shards, live or not.
      prefill_tokens: prompt and given tokens computed, padding excluded.
      spills: stores moved to the host.
      host_seconds: time without a dispatch in flight, from the last read to the next launch.
    """

    tokens: int = 0
    dispatches: int = 0
    decode_steps: int = 0
    lane_steps: int = 0
    prefill_tokens: int = 0
    spills: int = 0
    host_seconds: float = 0.0


@dataclasses.dataclass
class _Flight:
    """A dispatch whose results have not been read: who was in which lane, at which epoch."""

    emitted: Emitted
    lanes: list[tuple[Track, int, int]]
    version: int


class Session:
    """Samples in progress on one engine. Not thread-safe; one session at a time owns the state.

    Attributes:
      state: pools and lanes, to be handed to the next session.
      stats: counters so far.
    """

    def __init__(
        self,
        engine: Engine,
        state: DecodeState,
        params: PyTree,
        version: int,
        *,
        decode: Callable[[list[int]], str],
        eos_ids: Sequence[int],
        cache_tokens: int,
    ):
        """Args as of RolloutWorker; `params` prepared by the engine, `cache_tokens` the most a sample may hold."""
        s = engine.shape
        self.engine, self.state, self.stats = engine, state, Stats()
        self._params, self._version = params, version
        self._decode, self._eos_ids, self._cache_tokens = decode, tuple(eos_ids), cache_tokens
        self._scheduler = Scheduler(
            PoolShape(engine.shards, s.lanes, s.segments - 1, s.segment_tokens, s.steps, s.members)
        )
        self._tracks: dict[int, Track] = {}
        self._prompts: dict[int, np.ndarray] = {}
        self._spilled: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._flights: list[_Flight] = []
        self._given: list[tuple[Track, list[int], int]] = []  # extended samples, their tokens, what they may sample
        self._count = 0
        self._idle_since = time.perf_counter()

    def add(
        self,
        prompt: np.ndarray,
        keys_G2: np.ndarray,
        sampling: Sampling,
        *,
        expected: float | None = None,
        pieces: int = 1,
        pauses: bool = False,
    ) -> list[Track]:
        """Submits samples of one prompt, already checked against the engine's limits.

        Args:
          prompt: tokens, at least 1.
          keys_G2: a random key per sample.
          sampling: `max_new` must be set.
          expected: guess of the new tokens, where there is one.
          pieces: see `Scheduler.add`.
          pauses: stop strings pause the samples.
        """
        assert sampling.max_new is not None and sampling.max_new > 0, sampling
        stop_ids = (*self._eos_ids, *sampling.stop_ids)
        tracks = []
        for key in keys_G2:
            finder = StopFinder(sampling.stop_strings, self._decode) if sampling.stop_strings else None
            limit = min(sampling.max_new, self._cache_tokens - len(prompt))
            tracks.append(Track(self._count, prompt, sampling, stop_ids, key, pauses, finder, limit=limit))
            self._count += 1
        self._tracks.update((t.handle, t) for t in tracks)
        handle = tracks[0].handle
        self._prompts[handle] = prompt
        self._scheduler.add(handle, len(prompt), [(t.handle, t.limit, expected) for t in tracks], pieces)
        return tracks

    def refresh(self, params: PyTree, version: int) -> None:
        """New weights (prepared by the engine) from the next dispatch on; caches are kept."""
        self._params, self._version = params, version

    @property
    def open(self) -> int:
        """Samples not ended, paused ones included."""
        return len(self._tracks)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do: false also when every open sample is paused."""
        return bool(self._flights or self._given) or self._scheduler.busy

    def step(self) -> list[Track]:
        """Launches a dispatch if there is one, reads the one before; returns samples that ended or paused."""
        self._resume_extended()
        plan = self._scheduler.plan()
        self._carry_out(plan)
        if plan.running:
            self._launch(plan)
            if len(self._flights) < 2:
                return []
        return self._read(self._flights.pop(0)) if self._flights else []

    def extend(self, track: Track, tokens: Sequence[int]) -> None:
        """Appends given tokens to a paused sample and lets it go on; ends it when no room is left.

        Raises:
          ValueError: the sample is not paused.
        """
        if not track.paused:
            raise ValueError(f"Sample {track.handle} is not paused: only a sample that paused can be extended.")
        room = self._cache_tokens - len(track.prompt) - len(track.tokens) - len(tokens)
        # Each pause may leave two segments that are not full.
        shape = self.engine.shape
        segments = min(shape.max_segments, shape.segments - 1) - self._scheduler.held(track.handle)
        room = min(room, (segments - -(-len(tokens) // shape.segment_tokens)) * shape.segment_tokens)
        assert track.sampling.max_new is not None
        left = min(track.sampling.max_new - track.sampled, room)
        if left <= 0:
            self.end(track, STOP_LENGTH)
            return
        track.paused = False
        self._given.append((track, [int(t) for t in tokens], left))

    def _resume_extended(self) -> None:
        """Samples whose given tokens found room wait for a lane again."""
        waiting = []
        for track, tokens, left in self._given:
            # The last token is fed when the sample is seated, like the last token of a prompt.
            if not self._feed(track, [track.tokens[-1], *tokens[:-1]] if tokens else []):
                waiting.append((track, tokens, left))
                continue
            track.tokens.extend(tokens)
            track.logprobs.extend([0.0] * len(tokens))
            track.raw_logprobs.extend([0.0] * len(tokens))
            track.versions.extend([-1] * len(tokens))
            if track.finder:
                track.finder.restart(len(track.tokens))
            track.limit = track.sampled + left
            self._scheduler.resume(track.handle, left=left)
        self._given = waiting

    def end(self, track: Track, stop: int = STOP_STRING) -> None:
        """Ends a paused sample."""
        track.paused, track.stop = False, stop
        self._close(track, live=False)

    # Device work of a plan.

    def _carry_out(self, plan: Plan) -> None:
        for store, shard, segments in plan.spills:
            self._spill(store, shard, segments)
        for store, shard, segments in plan.restores:
            self._restore(store, shard, segments)
        self._prefill(
            [self._prompt_chunks(shard, self._prompts[prompt], segments) for prompt, shard, segments in plan.prefills]
        )
        if plan.seats or plan.frees:
            self.state = self.engine.bulk_insert(self.state, self.engine.put_rows(self._seats(plan).packed()))

    def _launch(self, plan: Plan) -> None:
        engine = self.engine
        flat_XI = self._scheduler.visits(engine.visit_shape, engine.shape.segments - 1)
        if not self._flights:
            self.stats.host_seconds += time.perf_counter() - self._idle_since
        self.state, emitted = engine.generate(self._params, self.state, engine.put_rows(flat_XI))
        for leaf in jax.tree.leaves(emitted):
            leaf.copy_to_host_async()
        lanes = [
            (self._tracks[sample.id], shard * engine.shape.lanes + lane, self._tracks[sample.id].epoch)
            for sample, shard, lane in plan.running
        ]
        self._flights.append(_Flight(emitted, lanes, self._version))
        self._scheduler.advance()
        self.stats.dispatches += 1

    def _seats(self, plan: Plan) -> Seats:
        R, E = self.engine.shape.lanes, self.engine.shape.stop_ids
        seats = Seats.empty(self.engine.shards * R, E)
        for shard, lane in plan.frees:
            seats.action_R[shard * R + lane] = FREE
        for sample in plan.seats:
            track, r = self._tracks[sample.id], sample.shard * R + sample.lane
            sampling = track.sampling
            seats.action_R[r] = SEAT
            seats.token_R[r] = track.tokens[-1] if track.tokens else track.prompt[-1]
            seats.position_R[r] = len(track.prompt) + len(track.tokens) - 1
            assert seats.position_R[r] == sample.position, (track.handle, seats.position_R[r], sample)
            seats.left_R[r] = track.limit - track.sampled
            seats.top_k_R[r] = sampling.top_k or 0
            seats.key_R2[r] = track.key
            seats.stop_RE[r, : len(track.stop_ids)] = track.stop_ids
            seats.temperature_R[r] = sampling.temperature
            seats.top_p_R[r], seats.min_p_R[r] = sampling.top_p, sampling.min_p
        return seats

    def _prompt_chunks(self, shard: int, prompt: np.ndarray, segments: list[int]) -> list[Chunk]:
        """All tokens but the last, which each sample feeds itself."""
        return cut_chunks(self.engine.shape, shard, prompt[:-1], 0, [], segments)

    def _prefill(self, sequences: list[list[Chunk]]) -> None:
        self.state = run_chunks(self.engine, self._params, self.state, sequences)
        self.stats.prefill_tokens += sum(len(chunk.tokens) for chunks in sequences for chunk in chunks)

    def _feed(self, track: Track, tokens: list[int]) -> bool:
        """Prefills a paused sample's new tokens; False while the pool has no room."""
        room = self._scheduler.extend(track.handle, len(tokens)) if tokens else None
        if room is None:
            return not tokens
        for store, shard, segments in room.spills:
            self._spill(store, shard, segments)
        for store, shard, segments in room.restores:
            self._restore(store, shard, segments)
        start = len(track.prompt) + len(track.tokens) - 1
        self._prefill([cut_chunks(self.engine.shape, room.shard, tokens, start, room.prior, room.targets)])
        return True

    def _spill(self, store: Store, shard: int, segments: list[int]) -> None:
        self._spilled[store.key] = self.engine.read_store(self.state, shard, segments)
        self.stats.spills += 1

    def _restore(self, store: Store, shard: int, segments: list[int]) -> None:
        self.state = self.engine.write_store(self.state, shard, segments, self._spilled.pop(store.key))

    # Results.

    def _read(self, flight: _Flight) -> list[Track]:
        out = jax.device_get(flight.emitted)
        self._idle_since = time.perf_counter()
        steps_X = out.steps_X
        self.stats.decode_steps += int(steps_X.max())
        self.stats.lane_steps += int(steps_X.sum()) * self.engine.shape.lanes
        events = []
        for track, r, epoch in flight.lanes:
            if track.epoch != epoch or track.stop is not None or track.paused:
                continue
            count = int(out.count_R[r])
            track.tokens.extend(out.tokens_RT[r, :count].tolist())
            track.logprobs.extend(out.logprob_RT[r, :count].tolist())
            track.raw_logprobs.extend(out.raw_logprob_RT[r, :count].tolist())
            track.versions.extend([flight.version] * count)
            track.sampled += count
            self.stats.tokens += count
            if self._settle(track, bool(out.live_R[r])):
                events.append(track)
        return events

    def _settle(self, track: Track, live: bool) -> bool:
        """Ends or pauses a sample whose new tokens are in; whether it did."""
        found = track.finder.find(track.tokens) if track.finder else None
        if found is not None:
            self._cut(track, found)
            if track.pauses:
                track.paused, track.epoch = True, track.epoch + 1
                track.text = self._text(track)
                self._scheduler.pause(track.handle, position=len(track.prompt) + len(track.tokens) - 1)
            else:
                track.stop = STOP_STRING
                self._close(track, live=True)
            return True
        if live:
            return False
        track.stop = STOP_EOS if track.tokens and track.tokens[-1] in track.stop_ids else STOP_LENGTH
        self._close(track, live=False)
        return True

    def _cut(self, track: Track, length: int) -> None:
        dropped = len(track.tokens) - length
        for values in (track.tokens, track.logprobs, track.raw_logprobs, track.versions):
            del values[length:]
        track.sampled -= dropped
        self.stats.tokens -= dropped

    def _close(self, track: Track, live: bool) -> None:
        track.text = self._text(track)
        for store in self._scheduler.finish(track.handle, grown=track.sampled, live=live):
            self._spilled.pop(store.key, None)
        del self._tracks[track.handle]

    def _text(self, track: Track) -> str:
        ended = track.stop == STOP_EOS
        text = self._decode(track.tokens[:-1] if ended else track.tokens)
        return track.finder.cut(text) if track.finder and (track.stop == STOP_STRING or track.paused) else text
