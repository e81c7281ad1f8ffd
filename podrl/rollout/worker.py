"""RolloutWorker: samples completions of prompts from a policy."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podrl.engine.config import Ability, RolloutConfig, Sampling
from podrl.engine.device import Device, Tell, compile_all, tell_nobody
from podrl.engine.engine import Engine
from podrl.engine.keys import sample_keys
from podrl.engine.session import Session, Track
from podrl.engine.sizes import check_memory, engine_shape
from podrl.engine.state import STOP_IDS, DecodeState
from podrl.engine.stats import RolloutStats
from podrl.mesh.build import describe_mesh, spreads_copies
from podrl.models import moe
from podrl.models.config import ModelConfig
from podrl.rollout.episodes import Episode, Partner, Pump, Request
from podrl.rollout.partial import Partial
from podrl.rollout.players import Chosen, Player, Unanswered, play
from podrl.rollout.rows import Lengths, collect
from podrl.types import DRAWN, BatchError, Mode, Policy, Prompts, PyTree, Rollouts

FAILED_SHARE = 0.1  # of a call's samples that may fail before the call does
_log = logging.getLogger(__name__)


class FailedSamplesError(BatchError):
    """Too many samples failed because the model's logits were NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished sample, yielded by `stream`; the lists run over its completion, end token included.

    `prompt` is the row of the prompts it belongs to and `sample` its place in the group; `drawn` has a list for each
    name of `podrl.types.DRAWN`; see `Rollouts` for the rest.
    """

    prompt: int
    sample: int
    tokens: list[int]
    versions: list[int]
    drawn: Mapping[str, list[float]]
    stop: int
    completion: str
    episode: Mapping[str, Any]


class _Compiles:
    """Counts compilations in this process."""

    total = 0

    @classmethod
    def listen(cls, event: str, *_, **__) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            cls.total += 1


jax.monitoring.register_event_duration_secs_listener(_Compiles.listen)


class RolloutWorker:
    """Samples from one model with the decode engine of one mesh.

    Attributes:
      stats: of the last finished `generate` or `stream`.
      config: as given.
      partner: the environments of all samples; None where they have none.
      several_hosts: the mesh has devices of other processes.
      tell: tells these what to run.
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset(get_args(Ability))

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
          mesh: the rollout mesh. Where it has devices of several processes, one of them generates and tells the others
            what to run (`tell`).
          config: sampling defaults and engine sizes.
          pad_id: fills rows of the result.
          eos_ids: ids that end every sample.
          decode: token ids to text, special tokens left out.
          seed: of all samples, unless config.seed is set.

        Raises:
          ValueError: sizes that do not fit together.
        """
        if len(eos_ids) > STOP_IDS:
            raise ValueError(f"rollout.eos_tokens has {len(eos_ids)} ids: at most {STOP_IDS} are supported.")
        _check_ends(eos_ids, model, "rollout.eos_tokens")
        self.model, self.mesh, self.config = model, mesh, config
        self.stats = RolloutStats()
        self.partner: Partner | None = None
        self.several_hosts = spreads_copies(mesh)
        self.tell: Tell | None = None
        self._pad_id, self._eos_ids, self._decode = pad_id, tuple(eos_ids), decode
        self._seed = seed if config.seed is None else config.seed
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self._shape = engine_shape(config, shards, recurrent=model.recurrent)
        self._engine: Engine | None = None
        self._state: DecodeState | None = None
        self._session: Session | None = None
        self._refreshed: Policy | None = None
        self._lengths = Lengths()

    # Life of the engine.

    def warm_up(self, params: PyTree, progress: Callable[[str], None] | None = None) -> None:
        """Compiles every program the engine will ever run, and allocates its pools.

        Args:
          params: weights as in `Policy.params`.
          progress: called with one line before each program.
        """
        say, started = progress or (lambda line: None), time.perf_counter()

        def note(words: str) -> None:
            say(f"rollout: compiling {words} ({time.perf_counter() - started:.1f} s)")

        self._state = compile_all(self._get_engine(params), params, self._take_state, note)

    def sleep(self) -> None:
        """Frees the pools; the compiled programs stay. Until `wake`, or the next call, the worker holds no memory."""
        if self.tell is not None:
            self.tell("sleep", ())
        if self._state is not None:
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
        self._state = None

    def wake(self) -> None:
        """Allocates the pools again, empty."""
        if self._engine is not None and self._state is None:
            self._state = self._engine.init_state()

    def refresh(self, policy: Policy) -> None:
        """Gives new weights to a generation in progress, from its next dispatch on; versions are recorded per token."""
        self._refreshed = policy

    def memory(self, params: PyTree) -> int:
        """Peak bytes of one device in the compiled `generate`: weights, pools and temporaries."""
        generate = next(p for p in self._get_engine(params).programs(params) if p.name == "generate")
        compiled = generate.jitted.lower(*generate.args).compile()
        m = compiled.memory_analysis()
        return m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes

    # Generation.

    def generate(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        step: int,
        sampling: Sampling | None = None,
        mode: Mode = "train",
        ended: Callable[[Finished], None] | None = None,
    ) -> Rollouts:
        """Samples `group_size` completions of every prompt.

        Args:
          policy: weights on the rollout mesh, with their version.
          prompts: P prompts.
          group_size: G.
          step: part of every sample's random key.
          sampling: settings; the configuration's by default.
          mode: what the samples' environments are told they are for.
          ended: called with each sample when it ends, between two steps of the engine.

        Returns:
          B = P * G samples, group-major, in rows as long as the longest prompt and `max_new`, or what a sample with an
          environment may hold.

        Raises:
          ValueError: a request that cannot be served: named before anything runs.
          FailedSamplesError: more than a tenth of the samples met logits that are NaN or infinite.
          EnvironmentFailure, ServiceError: an environment raised, or what it asks is away.
        """
        started = time.perf_counter()
        player = self.player(prompts, group_size=group_size, step=step, sampling=sampling, mode=mode, policy=policy)
        for _, sample in self.advance(policy, [(player, None)]):
            if ended is not None:
                ended(sample)
        return self.rows(player, time.perf_counter() - started)

    def stream(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        step: int,
        sampling: Sampling | None = None,
        mode: Mode = "train",
    ) -> Iterator[Finished]:
        """Like `generate`, yielding each sample when it ends."""
        player = self.player(prompts, group_size=group_size, step=step, sampling=sampling, mode=mode, policy=policy)
        for _, sample in self.advance(policy, [(player, None)]):
            yield sample

    # Generation over several versions of the weights.

    def player(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        step: int,
        sampling: Sampling | None = None,
        mode: Mode = "train",
        policy: Policy | None = None,
        partial: Partial | None = None,
    ) -> Player:
        """Checks a request, and holds its samples, none of which is begun: `advance` plays them, `rows` takes them.

        Args:
          prompts, group_size, step, sampling, mode: see `generate`.
          policy: of an evaluation, whose version environments are told.
          partial: what the samples were in another process.
        """
        version = policy.version if policy is not None else step
        asked = self._request(version, prompts, group_size, step, sampling, mode)
        return Unanswered(asked, partial) if self.partner is None else Pump(self.partner, asked, partial)

    def advance(
        self, policy: Policy, players: Chosen, *, calls: int | None = None, halt: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Player, Finished]]:
        """Plays requests until each sample has ended or drawn its quantum; yields those that end.

        Keys and values are computed anew by the weights of `policy`: what a sample draws depends on the sample alone.

        Args:
          policy: weights on the rollout mesh, with their version.
          players: requests, the one to get lanes first at the front, with the tokens that each of their samples may
            draw, None for all, or with points. A list that the caller appends further ones to, while it takes samples.
          calls: turns that samples may end, where they draw a quantum; None for any number.
          halt: asked between dispatches: True ends the call, with all samples as they are then.

        Raises:
          As `generate`; all requests are then given up.
        """
        session = self.session(policy)
        for player, b, sample in self._run(session, players, calls, halt):
            if len(player.done) == player.request.samples:
                session.finish_routes()  # here, as `rows` may be called on another thread
            yield player, _finished(b, sample, player.request.group_size)

    def rows(self, player: Player, seconds: float) -> Rollouts:
        """The samples of a request, all of which have ended; `seconds` are those that it took."""
        asked = player.request
        longest = asked.response if self.partner else asked.sampling.max_new or 0
        answered, pad_id = bool(self.partner), self._pad_id
        made = collect(asked, player.done, answered=answered, longest=longest, pad_id=pad_id, seconds=seconds)
        return self._lengths.noted(asked, made)

    def session(self, policy: Policy) -> Session:
        """Opens a session for callers that submit, pause and extend samples themselves; call `close` when done."""
        if self._session is not None:
            raise ValueError("This worker is generating already: finish that call, or close its session, first.")
        if self.several_hosts and self.tell is None:
            raise ValueError(
                f"The rollout mesh {describe_mesh(self.mesh)} has devices of other processes, which nobody tells what "
                "to run: make each process's rollout mesh of its own devices, or start the job by podrl.launch."
            )
        self._session = Session(
            self.device(policy, self.tell),
            policy.version,
            decode=self._decode,
            eos_ids=self._eos_ids,
            cache_tokens=self.config.kv_cache_size,
        )
        return self._session

    def close(self, session: Session) -> None:
        """Takes the pools back from a session."""
        assert session is self._session, "not this worker's session"
        self._session, self._refreshed = None, None
        self.put_back(session.device)

    def device(self, policy: Policy, tell: Tell | None = None) -> Device:
        """Hands out the pools with a policy's weights, to who tells of it and calls `put_back`, or is told so."""
        if tell is not None:
            tell("open", (policy.version,))
        engine = self._get_engine(policy.params)
        return Device(engine, self._take_state(), engine.prepare(policy.params), tell or tell_nobody)

    def put_back(self, device: Device) -> None:
        """Takes the pools back."""
        if self.tell is not None:
            self.tell("close", ())
        self._state = device.state

    def _request(
        self, version: int, prompts: Prompts, group_size: int, step: int, sampling: Sampling | None, mode: Mode
    ) -> Request:
        """A call's arguments, completed and checked."""
        sampling = self._complete(sampling)
        self.check(prompts, group_size, sampling)
        assert sampling.max_new is not None
        index_PG = np.repeat(np.asarray(prompts.index_P)[:, None], group_size, axis=1)
        sample_PG = np.broadcast_to(np.maximum(np.arange(group_size) - sampling.greedy, 0), index_PG.shape)
        keys_PG2 = sample_keys(self._seed, step, index_PG.ravel(), sample_PG.ravel()).reshape(*index_PG.shape, 2)
        return Request(
            prompts,
            group_size,
            step,
            sampling,
            keys_PG2,
            pieces_per_prompt(len(prompts.length_P), group_size, self.mesh.shape["data"] * self.mesh.shape["fsdp"]),
            max(self.config.response_tokens, sampling.max_new),
            mode,
            step if mode == "train" else version,
            self._lengths.expected(prompts, keys_PG2) if mode == "eval" else {},
            moe.route_bytes(self.model) if mode == "train" and self.config.router_replay else 0,
        )

    def _run(
        self, session: Session, players: Chosen, calls: int | None, halt: Callable[[], bool] | None
    ) -> Iterator[tuple[Player, int, Track | Episode]]:
        """(player, b, sample) of every sample as it ends."""
        started, compiled = time.perf_counter(), _Compiles.total

        def between() -> None:
            if self._refreshed is not None:
                if self.tell is not None:
                    self.tell("use", (self._refreshed.version,))
                session.refresh(session.engine.prepare(self._refreshed.params), self._refreshed.version)
                self._refreshed = None
            self._bound_failures(session, sum(player.request.samples for player, _ in players))

        try:
            yield from play(session, players, calls=calls, partner=self.partner, between=between, halt=halt)
            session.finish_routes()
            between()
            if session.stats.failed:
                text = _failures(session, sum(player.request.samples for player, _ in players))
                _log.warning("%s. They and the other samples of their prompts leave the loss.", text)
        finally:
            self.close(session)
            if session.open or session.stats.failed:
                self.sleep()  # lanes of an abandoned generation may be live, caches of failed samples not finite
            took, compiles = time.perf_counter() - started, _Compiles.total - compiled
            self.stats = RolloutStats.of(session.stats, seconds=took, compiles=compiles)

    def _bound_failures(self, session: Session, samples: int) -> None:
        """Raises when too many of a call's samples failed."""
        if session.stats.failed.total() > FAILED_SHARE * samples:
            raise FailedSamplesError(
                f"{_failures(session, samples)}: at most {FAILED_SHARE:.0%} may. Weights or activations "
                f"overflow in rollout.data_type={session.engine.dtype.name}: use float32 or bfloat16, look for "
                "NaN in the model or adapters that were loaded, and if it happens only after some steps "
                "lower trainer.learning_rate."
            )

    # Limits.

    def _complete(self, sampling: Sampling | None) -> Sampling:
        if sampling is None:
            return self.config.sampling()
        if sampling.max_new is None:
            return dataclasses.replace(sampling, max_new=self.config.max_tokens_to_generate)
        return sampling

    def check(self, prompts: Prompts, group_size: int, sampling: Sampling | None = None) -> None:
        """Refuses requests that the engine cannot serve.

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
        _check_ends(sampling.stop_ids, self.model, "Sampling.stop_ids")
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
            kernel, several_hosts = self.config.page_kernel, self.several_hosts
            of = {"several_hosts": several_hosts, "kernel": kernel, "routes": self.config.router_replay}
            engine = Engine(self.model, self.mesh, self._shape, dtype, **of)
            check_memory(engine.pool_bytes, self.mesh, self.config, self._shape)
            self._engine = engine
        return self._engine

    def _take_state(self) -> DecodeState:
        assert self._engine is not None
        self.wake()
        state, self._state = self._state, None
        assert state is not None
        return state


def _finished(b: int, sample: Track | Episode, group_size: int) -> Finished:
    """The sample of a row."""
    episode = sample if isinstance(sample, Episode) else Episode(sample, stop=sample.stop, text=sample.text)
    track = episode.track
    assert episode.stop is not None
    return Finished(
        prompt=b // group_size,
        sample=b % group_size,
        tokens=track.tokens if track else [],
        versions=track.versions if track else [],
        drawn=track.drawn if track else {name: [] for name in DRAWN},
        stop=episode.stop,
        completion=episode.text,
        episode=episode.record(),
    )


def _failures(session: Session, samples: int) -> str:
    failed = session.stats.failed
    return (
        f"{failed.total()} of {samples} samples ended as failed, because the model's logits were NaN or infinite, "
        f"under the weights of version {', '.join(map(str, sorted(failed)))}"
    )


def pieces_per_prompt(prompts: int, group_size: int, shards: int) -> int:
    """Chooses into how many pieces to cut each group, so that few prompts still fill all shards.

    One where the groups divide evenly over the shards or there are many; every further piece prefills its prompt again.
    """
    for pieces in range(1, group_size):
        if prompts * pieces % shards == 0 or prompts * pieces >= 4 * shards:
            return pieces
    return group_size


def _check_ends(ids: Sequence[int], model: ModelConfig, key: str) -> None:
    """Refuses ids that no sample can end with.

    Raises:
      ValueError: an id that the model has no embedding for; names the key.
    """
    if beyond := [i for i in ids if not 0 <= i < model.vocab_size]:
        raise ValueError(
            f"{key} has the id {beyond[0]}, and the model has {model.vocab_size} embeddings: no sample could end with "
            "it. Give ids of the vocabulary."
        )
