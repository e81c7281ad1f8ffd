"""RolloutWorker: prompts and a policy in, finished samples out."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podrl.models.config import ModelConfig
from podrl.rollout.config import RolloutConfig, Sampling
from podrl.rollout.engine import Engine
from podrl.rollout.keys import sample_keys
from podrl.rollout.session import Session, Track
from podrl.rollout.state import DecodeState, EngineShape, Seats
from podrl.types import STOP_LENGTH, Policy, Prompts, PyTree, Rollouts

STOP_IDS = 8  # ids that may end a sample, the tokenizer's included


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """What the last call did.

    Attributes:
      tokens: sampled tokens, end tokens included.
      seconds: wall time.
      decode_steps: steps of the busiest shard, summed over dispatches.
      lane_utilisation: tokens over lane places of all decode steps.
      prefill_tokens: prompt (and given) tokens computed.
      dispatches: device calls of `generate`.
      spills: caches moved to the host because the pool ran dry.
      compiles: programs compiled during the call; 0 after `warm_up`.
      host_seconds: time in which the device had nothing queued: from reading the results of the last dispatch in
        flight to the next launch. Where the host keeps up it is next to nothing.
    """

    tokens: int = 0
    seconds: float = 0.0
    decode_steps: int = 0
    lane_utilisation: float = 0.0
    prefill_tokens: int = 0
    dispatches: int = 0
    spills: int = 0
    compiles: int = 0
    host_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Finished:
    """A sample as `stream` yields it; the lists run over its completion, end token included.

    `prompt` is the row of the prompts it belongs to and `sample` its place in the group; see `Rollouts` for the rest.
    """

    prompt: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    versions: list[int]
    stop: int
    completion: str


class _Compiles:
    """Counts compilations in this process."""

    total = 0

    @classmethod
    def listen(cls, event: str, *_, **__) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            cls.total += 1


jax.monitoring.register_event_duration_secs_listener(_Compiles.listen)


class RolloutWorker:
    """The decode engine of one mesh, for one model and one configuration.

    Attributes:
      stats: of the last finished `generate` or `stream`.
      config: as given.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        config: RolloutConfig,
        *,
        pad_id: int,
        eos_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        seed: int,
    ):
        """Allocates nothing yet.

        Args:
          model: the policy's architecture.
          mesh: the rollout mesh; all of its devices belong to this process.
          config: sampling defaults and engine sizes.
          pad_id: fills rows of the result.
          eos_ids: ids that end every sample.
          decode: token ids to text, special tokens left out.
          seed: of all samples, unless config.seed is set.

        Raises:
          ValueError: sizes that do not fit together, or a mesh with devices of other processes.
        """
        if any(d.process_index != jax.process_index() for d in mesh.devices.flat):
            raise ValueError(
                "The rollout mesh has devices of other processes: give each process's worker its own local mesh."
            )
        if len(eos_ids) > STOP_IDS:
            raise ValueError(f"rollout.eos_tokens has {len(eos_ids)} ids: at most {STOP_IDS} are supported.")
        self.model, self.mesh, self.config = model, mesh, config
        self.stats = RolloutStats()
        self._pad_id, self._eos_ids, self._decode = pad_id, tuple(eos_ids), decode
        self._seed = seed if config.seed is None else config.seed
        self._shape = engine_shape(config, mesh.shape["data"] * mesh.shape["fsdp"])
        self._engine: Engine | None = None
        self._state: DecodeState | None = None
        self._session: Session | None = None
        self._refreshed: Policy | None = None

    # Life of the engine.

    def warm_up(self, params: PyTree, progress: Callable[[str], None] | None = None) -> None:
        """Compiles every program the engine will ever run, and allocates its pools.

        Args:
          params: weights as in `Policy.params`.
          progress: called with one line before each program.
        """
        say = progress or (lambda line: None)
        started = time.perf_counter()
        engine = self._get_engine(params)
        programs = len(engine.prefills) + 4

        def note(number: int, name: str) -> None:
            say(f"rollout: compiling {number}/{programs} {name} ({time.perf_counter() - started:.1f} s)")

        note(1, "weights")
        prepared = engine.prepare(params)
        state = self._take_state()
        R = engine.shards * engine.shape.lanes
        note(2, "insert")
        seats = Seats.empty(R, engine.shape.stop_ids)
        state = engine.bulk_insert(state, engine.put_rows(seats.packed()))
        for number, bucket in enumerate(engine.shape.buckets):
            note(3 + number, f"prefill of {bucket} tokens")
            state = engine.prefills[bucket](prepared, state, engine.put_rows(engine.pack_chunks(bucket, [])))
        note(programs - 1, "generate")
        idle = np.zeros((engine.shards, engine.visit_shape.size), np.int32)
        state, _ = engine.generate(prepared, state, engine.put_rows(idle))
        note(programs, "spill and restore")
        state = engine.write_store(state, 0, [], engine.read_store(state, 0, []))
        self._state = jax.block_until_ready(state)

    def sleep(self) -> None:
        """Frees the pools; the compiled programs stay. Until `wake`, or the next call, the worker holds no memory."""
        if self._state is not None:
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
        self._state = None

    def wake(self) -> None:
        """Allocates the pools again, empty."""
        if self._engine is not None and self._state is None:
            self._state = self._engine.init_state()

    def refresh(self, policy: Policy) -> None:
        """New weights for a generation in progress, from its next dispatch on; versions are recorded per token."""
        self._refreshed = policy

    def memory(self, params: PyTree) -> int:
        """Peak bytes of one device in the compiled `generate`: weights, pools and temporaries."""
        generate = next(p for p in self._get_engine(params).programs(params) if p.name == "generate")
        compiled = generate.jitted.lower(*generate.args).compile()
        m = compiled.memory_analysis()
        return m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes

    # Generation.

    def generate(
        self, policy: Policy, prompts: Prompts, *, group_size: int, step: int, sampling: Sampling | None = None
    ) -> Rollouts:
        """`group_size` samples of every prompt.

        Args:
          policy: weights on the rollout mesh, with their version.
          prompts: P prompts.
          group_size: G.
          step: part of every sample's random key.
          sampling: settings; the configuration's by default.

        Returns:
          B = P * G samples, group-major, in rows as long as the longest prompt and `max_new`.

        Raises:
          ValueError: a request that cannot be served: named before anything runs.
        """
        started = time.perf_counter()
        sampling = self._complete(sampling)
        P, G = len(prompts.length_P), group_size
        tracks: list[Track | None] = [None] * (P * G)
        session = self._open(policy, prompts, G, sampling)
        for b, track in self._run(session, prompts, G, step, sampling):
            tracks[b] = track
        return self._collect(prompts, G, tracks, sampling, time.perf_counter() - started)

    def stream(
        self, policy: Policy, prompts: Prompts, *, group_size: int, step: int, sampling: Sampling | None = None
    ) -> Iterator[Finished]:
        """Like `generate`, yielding each sample when it ends."""
        sampling = self._complete(sampling)
        session = self._open(policy, prompts, group_size, sampling)
        for b, track in self._run(session, prompts, group_size, step, sampling):
            yield Finished(
                prompt=b // group_size,
                sample=b % group_size,
                tokens=track.tokens,
                logprobs=track.logprobs,
                raw_logprobs=track.raw_logprobs,
                versions=track.versions,
                stop=STOP_LENGTH if track.stop is None else track.stop,
                completion=track.text,
            )

    def session(self, policy: Policy) -> Session:
        """An empty session for callers that submit, pause and extend samples themselves; call `close` when done."""
        if self._session is not None:
            raise ValueError("This worker is generating already: finish that call, or close its session, first.")
        engine = self._get_engine(policy.params)
        self._session = Session(
            engine,
            self._take_state(),
            engine.prepare(policy.params),
            policy.version,
            decode=self._decode,
            eos_ids=self._eos_ids,
            cache_tokens=self.config.kv_cache_size,
        )
        return self._session

    def close(self, session: Session) -> None:
        """Takes the pools back from a session."""
        assert session is self._session, "not this worker's session"
        self._state, self._session, self._refreshed = session.state, None, None

    def _open(self, policy: Policy, prompts: Prompts, group_size: int, sampling: Sampling) -> Session:
        self.check(prompts, group_size, sampling)
        return self.session(policy)

    def _run(
        self, session: Session, prompts: Prompts, group_size: int, step: int, sampling: Sampling
    ) -> Iterator[tuple[int, Track]]:
        """(b, track) of every sample as it ends; samples of no tokens have none."""
        started, compiled = time.perf_counter(), _Compiles.total
        rows = {}
        pieces = pieces_per_prompt(len(prompts.length_P), group_size, session.engine.shards)
        try:
            for p, length in enumerate(prompts.length_P) if sampling.max_new else ():
                sample_G = np.arange(group_size)
                keys_G2 = sample_keys(self._seed, step, prompts.index_P[p], sample_G)
                tokens = np.asarray(prompts.tokens_PT[p, :length], np.int32)
                for g, track in enumerate(session.add(tokens, keys_G2, sampling, pieces=pieces)):
                    rows[track.handle] = p * group_size + g
            while session.busy:
                if self._refreshed is not None:
                    session.refresh(session.engine.prepare(self._refreshed.params), self._refreshed.version)
                    self._refreshed = None
                for track in session.step():
                    yield rows[track.handle], track
        finally:
            self.close(session)
            if session.open:
                self.sleep()  # an abandoned generation: lanes may be live
            self.stats = self._count(session, time.perf_counter() - started, _Compiles.total - compiled)

    def _count(self, session: Session, seconds: float, compiles: int) -> RolloutStats:
        s = session.stats
        return RolloutStats(
            tokens=s.tokens,
            seconds=seconds,
            decode_steps=s.decode_steps,
            lane_utilisation=s.tokens / max(s.lane_steps, 1),
            prefill_tokens=s.prefill_tokens,
            dispatches=s.dispatches,
            spills=s.spills,
            compiles=compiles,
            host_seconds=s.host_seconds,
        )

    def _collect(
        self, prompts: Prompts, G: int, tracks: Sequence[Track | None], sampling: Sampling, seconds: float
    ) -> Rollouts:
        P, longest = prompts.tokens_PT.shape
        B, T = P * G, longest + (sampling.max_new or 0)
        tokens_BT = np.full((B, T), self._pad_id, np.int32)
        mask_BT, logprob_BT, raw_BT = (np.zeros((B, T), np.float32) for _ in range(3))
        version_BT = np.full((B, T), -1, np.int32)
        length_B = np.repeat(np.asarray(prompts.length_P, np.int32), G)
        stop_B = np.full(B, STOP_LENGTH, np.int32)
        for b, track in enumerate(tracks):
            n = length_B[b]
            tokens_BT[b, :n] = prompts.tokens_PT[b // G, :n]
            if track is None:
                continue
            assert track.stop is not None, track.handle
            end = n + len(track.tokens)
            tokens_BT[b, n:end], version_BT[b, n:end] = track.tokens, track.versions
            logprob_BT[b, n:end], raw_BT[b, n:end] = track.logprobs, track.raw_logprobs
            mask_BT[b, n:end] = np.asarray(track.versions) >= 0
            length_B[b], stop_B[b] = end, track.stop
        return Rollouts(
            prompts=prompts,
            tokens_BT=tokens_BT,
            length_B=length_B,
            mask_BT=mask_BT,
            logprob_BT=logprob_BT,
            raw_logprob_BT=raw_BT,
            version_BT=version_BT,
            stop_B=stop_B,
            completions=["" if track is None else track.text for track in tracks],
            seconds=seconds,
        )

    # Limits.

    def _complete(self, sampling: Sampling | None) -> Sampling:
        if sampling is None:
            return self.config.sampling()
        if sampling.max_new is None:
            return dataclasses.replace(sampling, max_new=self.config.max_tokens_to_generate)
        return sampling

    def check(self, prompts: Prompts, group_size: int, sampling: Sampling | None = None) -> None:
        """Refuses what the engine cannot serve.

        Raises:
          ValueError: an empty or too long prompt, a request over the cache or the pool, too many stop ids.
        """
        sampling = self._complete(sampling)
        assert sampling.max_new is not None
        if group_size < 1:
            raise ValueError(f"group_size={group_size} must be at least 1.")
        stop_ids = len(self._eos_ids) + len(sampling.stop_ids)
        if stop_ids > STOP_IDS:
            raise ValueError(f"{stop_ids} ids end a sample (eos and Sampling.stop_ids): at most {STOP_IDS} may.")
        for p, length in enumerate(int(n) for n in prompts.length_P):
            if length < 1:
                raise ValueError(f"Prompt {p} is empty: give at least one token, for example the start token.")
            if length > self.config.max_prompt_length:
                raise ValueError(
                    f"Prompt {p} has {length} tokens: rollout.max_prompt_length={self.config.max_prompt_length} must "
                    "be at least that."
                )
            if length + sampling.max_new > self.config.kv_cache_size:
                raise ValueError(
                    f"Prompt {p} has {length} tokens and may get {sampling.max_new} new ones, more than "
                    f"rollout.kv_cache_size={self.config.kv_cache_size}: raise it or lower Sampling.max_new."
                )

    def _get_engine(self, params: PyTree) -> Engine:
        if self._engine is None:
            dtype = jnp.dtype(self.config.data_type or params["embed"].dtype)
            self._engine = Engine(self.model, self.mesh, self._shape, dtype)
        return self._engine

    def _take_state(self) -> DecodeState:
        assert self._engine is not None
        self.wake()
        state, self._state = self._state, None
        assert state is not None
        return state


def pieces_per_prompt(prompts: int, group_size: int, shards: int) -> int:
    """Into how many pieces to cut each group so that few prompts still fill all shards.

    One where the groups divide evenly over the shards or there are many; every further piece prefills its prompt again.
    """
    for pieces in range(1, group_size):
        if prompts * pieces % shards == 0 or prompts * pieces >= 4 * shards:
            return pieces
    return group_size


def engine_shape(config: RolloutConfig, shards: int) -> EngineShape:
    """Sizes of each shard's programs.

    Raises:
      ValueError: a pool too small for the longest request.
    """
    C = config.segment_tokens
    lanes = -(-config.lanes // shards)
    prompt = -(-max(config.max_prompt_length - 1, 1) // C)
    # The prompt's segments, the sample's, and one more for each end that is not filled.
    longest = prompt + -(-config.kv_cache_size // C) + 1
    segments = lanes * (prompt + -(-config.max_tokens_to_generate // C))
    if config.pool_tokens is not None:
        segments = config.pool_tokens // C
        if segments < longest:
            raise ValueError(
                f"rollout.pool_tokens={config.pool_tokens} is {segments} segments of {C} tokens, fewer than the "
                f"{longest} the longest request may need: raise it to {longest * C}, or lower rollout.kv_cache_size="
                f"{config.kv_cache_size}."
            )
    largest = max(C, min(prompt * C, config.prefill_tokens // C * C))
    buckets = [C]
    while buckets[-1] < largest:
        buckets.append(min(2 * buckets[-1], largest))
    return EngineShape(
        lanes=lanes,
        segments=max(segments, longest) + 1,
        segment_tokens=C,
        steps=config.steps_per_dispatch,
        prompt_segments=prompt,
        max_segments=2 * longest,
        members=config.members_per_visit,
        stop_ids=STOP_IDS,
        buckets=tuple(buckets),
        prefill_tokens=config.prefill_tokens,
    )
