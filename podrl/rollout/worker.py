"""RolloutWorker: samples completions of prompts from a policy."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podrl.engine.config import Ability, RolloutConfig, Sampling
from podrl.engine.device import Broadcast, Device, compile_all, no_broadcast
from podrl.engine.engine import Engine
from podrl.engine.keys import sample_keys
from podrl.engine.session import Session, Track
from podrl.engine.sizes import check_memory, engine_shape
from podrl.engine.state import STOP_IDS, DecodeState
from podrl.engine.stats import RolloutStats
from podrl.mappings import EpisodeRecord
from podrl.mesh.build import describe_mesh, spreads_copies
from podrl.mesh.rules import batch_shards
from podrl.models import moe
from podrl.models.config import ModelConfig
from podrl.rollout.episodes import EnvironmentClient, Episode, EpisodePlayer, RolloutRequest
from podrl.rollout.partial import PartialBatch
from podrl.rollout.players import Chosen, PlainPlayer, Player, play
from podrl.rollout.rows import SampleLengths, collect
from podrl.runtime.watchdog import announce_if_long
from podrl.types import DRAWN, BatchError, Mode, Policy, Prompts, PyTree, Rollouts

FAILED_SHARE = 0.1  # largest share of a call's samples that may fail before the call fails
_log = logging.getLogger(__name__)


class FailedSamplesError(BatchError):
    """Too many samples failed because the model's logits were NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class FinishedSample:
    """A finished sample; its lists have one entry per token of the completion, including the end token.

    Attributes:
      prompt: index of the sample's prompt among the request's prompts.
      sample: index of the sample in its group.
      tokens: ids of the sampled tokens and of the tokens that the environment appended.
      versions: version of the weights that sampled each token; -1 for an appended token.
      drawn: a list for each name of `podrl.types.DRAWN`.
      stop: reason why the sample ended, as in `Rollouts.stop_B`.
      completion: text of the completion.
      episode: record of the sample's episode, as in `Rollouts.episodes`.
    """

    prompt: int
    sample: int
    tokens: list[int]
    versions: list[int]
    drawn: Mapping[str, list[float]]
    stop: int
    completion: str
    episode: EpisodeRecord


class _Compiles:
    """Counts programs in this process: all of them, and those of them that were read from jax's compilation cache."""

    total = 0
    read = 0

    @classmethod
    def listen(cls, event: str, *_, **__) -> None:
        cls.total += event == "/jax/core/compile/backend_compile_duration"
        cls.read += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_duration_secs_listener(_Compiles.listen)
jax.monitoring.register_event_listener(_Compiles.listen)


class RolloutWorker:
    """Samples from one model with the decode engine of one mesh.

    Attributes:
      model: architecture of the model.
      mesh: the rollout mesh.
      config: sampling defaults and engine sizes.
      stats: counters of the last finished `generate`, `stream` or `advance`.
      env_client: the environments of all samples; None if samples have no environments.
      several_hosts: True if the mesh has devices of other processes.
      broadcast: function that sends the engine's calls to the other processes of the mesh, which run the calls, too;
        None if the mesh has no other processes.
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
        """Stores the model and the settings.

        Args:
          model: the policy's architecture.
          mesh: the rollout mesh. If it has devices of several processes, one of them generates and sends its calls to
            the others (`broadcast`).
          config: sampling defaults and engine sizes.
          pad_id: id that fills the rows of the result.
          eos_ids: ids that end every sample.
          decode: function that turns token ids into text, without special tokens.
          seed: random seed of all samples, unless config.seed is set.

        Raises:
          ValueError: the sizes do not fit together, or an end token is refused (`check_eos`).
        """
        check_eos(eos_ids, model)
        self.model, self.mesh, self.config = model, mesh, config
        self.stats = RolloutStats()
        self.env_client: EnvironmentClient | None = None
        self.several_hosts = spreads_copies(mesh)
        self.broadcast: Broadcast | None = None
        self._pad_id, self._eos_ids, self._decode = pad_id, tuple(eos_ids), decode
        self._seed = seed if config.seed is None else config.seed
        shards = batch_shards(mesh)
        self._shape = engine_shape(config, shards, recurrent=model.recurrent)
        self._engine: Engine | None = None
        self._state: DecodeState | None = None
        self._session: Session | None = None
        self._refreshed: Policy | None = None
        self._lengths = SampleLengths()

    # Methods that compile the engine, and allocate or free its pools.

    def warm_up(self, params: PyTree, progress: Callable[[str], None] | None = None) -> None:
        """Compiles every program the engine will ever run, and allocates its pools.

        Args:
          params: weights as in `Policy.params`.
          progress: function that is called with one line of text before each program, while a program takes long, and
            at the end.
        """
        log, started = progress or (lambda line: None), time.perf_counter()
        total, read = _Compiles.total, _Compiles.read
        with contextlib.ExitStack() as program:

            def note(words: str) -> None:
                program.close()
                log(f"rollout: preparing program {words} ({time.perf_counter() - started:.1f} s)")
                program.enter_context(announce_if_long(f"rollout: preparing program {words}", log))

            self._state = compile_all(self._get_engine(params), params, self._take_state, note)
        read = _Compiles.read - read
        compiled = _Compiles.total - total - read
        log(f"rollout: ready after {time.perf_counter() - started:.1f} s ({compiled} compiled, {read} from the cache)")

    def sleep(self) -> None:
        """Frees the pools until `wake` or the next call, and keeps the compiled programs."""
        if self.broadcast is not None:
            self.broadcast("sleep", ())
        if self._state is not None:
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
        self._state = None

    def wake(self) -> None:
        """Allocates the pools again, empty."""
        if self._engine is not None and self._state is None:
            self._state = self._engine.init_state()

    def refresh(self, policy: Policy) -> None:
        """Makes a generation in progress use new weights from its next dispatch on.

        `version_BT` of the samples says which version of the weights sampled each token.
        """
        self._refreshed = policy

    def memory(self, params: PyTree) -> int:
        """Returns the peak bytes of one device in the compiled `generate`: weights, pools and temporaries."""
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
        ended: Callable[[FinishedSample], None] | None = None,
    ) -> Rollouts:
        """Samples `group_size` completions of every prompt.

        Args:
          policy: weights on the rollout mesh, with their version.
          prompts: P prompts.
          group_size: G, number of samples per prompt.
          step: training step; a part of every sample's random key.
          sampling: sampling settings; None for the configuration's.
          mode: 'train' or 'eval'; environments read it as `Task.mode`.
          ended: function that is called with each sample when it ends, between two steps of the engine.

        Returns:
          B = P * G samples, group-major. The length of a row is the width of the prompts plus `max_new`, or plus the
          most tokens after a prompt (`RolloutConfig.response_tokens`) if samples have environments.

        Raises:
          ValueError: the engine cannot serve the request; raised before anything runs.
          FailedSamplesError: more than a tenth of the samples met logits that are NaN or infinite.
          EnvironmentFailure: an environment raised an error.
          ServiceError: a service that an environment calls cannot be reached.
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
    ) -> Iterator[FinishedSample]:
        """Samples as `generate` does, and yields each sample when it ends."""
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
        partial: PartialBatch | None = None,
    ) -> Player:
        """Checks a request, and returns a player of its samples; no sample has started yet.

        `advance` plays the samples, and `rows` returns them once they have ended.

        Args:
          prompts, group_size, step, sampling, mode: arguments of `generate`.
          policy: policy whose version environments read as `Task.step` in mode 'eval'; not used in mode 'train'.
          partial: the samples' state when another process stopped playing them; None if they begin here.

        Raises:
          ValueError: the engine cannot serve the request.
        """
        version = policy.version if policy is not None else step
        request = self._request(version, prompts, group_size, step, sampling, mode)
        if self.env_client is None:
            return PlainPlayer(request, partial)
        return EpisodePlayer(self.env_client, request, partial)

    def advance(
        self, policy: Policy, players: Chosen, *, calls: int | None = None, halt: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Player, FinishedSample]]:
        """Plays requests until each sample has ended or drawn its quantum.

        Keys and values are computed anew by the weights of `policy`, so a sample's tokens depend on the sample alone.

        Args:
          policy: weights on the rollout mesh, with their version.
          players: players in the order in which their samples get lanes, each with the tokens that its samples may
            draw: a number, None for all, or a budget. The caller may append further players to the list between
            samples.
          calls: largest number of turns that a sample may end in this call, if its player has a quantum; None for any
            number.
          halt: function that is called between dispatches; True ends the call and leaves all samples in their present
            state.

        Yields:
          (player, sample) of every sample when it ends.

        Raises:
          Exception: the errors of `generate`. All requests are then cancelled.
        """
        session = self.session(policy)
        for player, b, sample in self._run(session, players, calls, halt):
            if len(player.done) == player.request.samples:
                session.finish_routes()  # done here, because `rows` may be called on another thread
            yield player, _finished(b, sample, player.request.group_size)

    def rows(self, player: Player, seconds: float) -> Rollouts:
        """Returns the samples of a request, all of which have ended.

        Args:
          player: player of the request.
          seconds: time that the request took.
        """
        request = player.request
        longest = request.response if self.env_client else request.sampling.max_new or 0
        has_environments, pad_id = bool(self.env_client), self._pad_id
        rollouts = collect(
            request, player.done, has_environments=has_environments, longest=longest, pad_id=pad_id, seconds=seconds
        )
        return self._lengths.remember(request, rollouts)

    def session(self, policy: Policy) -> Session:
        """Opens a session for callers that submit, pause and extend samples themselves; call `close` when done.

        Raises:
          ValueError: the worker is generating already, or its calls are not sent to the mesh's other processes.
        """
        if self._session is not None:
            raise ValueError("This worker is generating already: finish that call, or close its session, first.")
        if self.several_hosts and self.broadcast is None:
            raise ValueError(
                f"The rollout mesh {describe_mesh(self.mesh)} has devices of other processes, and this process cannot "
                "send them its calls. Give each process a rollout mesh of its own devices, or start the job with "
                "podrl.launch."
            )
        self._session = Session(
            self.device(policy, self.broadcast),
            policy.version,
            decode=self._decode,
            eos_ids=self._eos_ids,
            cache_tokens=self.config.kv_cache_size,
        )
        return self._session

    def close(self, session: Session) -> None:
        """Takes the pools back from a finished session."""
        assert session is self._session, "the session belongs to another worker, or is closed"
        self._session, self._refreshed = None, None
        self.put_back(session.device)

    def device(self, policy: Policy, broadcast: Broadcast | None = None) -> Device:
        """Lends the pools together with a policy's weights, until `put_back`.

        Args:
          policy: weights on the rollout mesh, with their version.
          broadcast: function that sends the calls of the device to the mesh's other processes; None if there are no
            other processes, or if this process carries out calls that another process sends.
        """
        if broadcast is not None:
            broadcast("open", (policy.version,))
        engine = self._get_engine(policy.params)
        return Device(engine, self._take_state(), engine.prepare(policy.params), broadcast or no_broadcast)

    def put_back(self, device: Device) -> None:
        """Takes back the pools that `device` handed out."""
        if self.broadcast is not None:
            self.broadcast("close", ())
        self._state = device.state

    def _request(
        self, version: int, prompts: Prompts, group_size: int, step: int, sampling: Sampling | None, mode: Mode
    ) -> RolloutRequest:
        """Checks the arguments of a call; returns a request with the missing settings taken from the configuration."""
        sampling = self._complete(sampling)
        prompts = prompts if self.env_client is None else self.env_client.opened(prompts)
        self.check(prompts, group_size, sampling)
        assert sampling.max_new is not None
        index_PG = np.repeat(np.asarray(prompts.index_P)[:, None], group_size, axis=1)
        sample_PG = np.broadcast_to(np.maximum(np.arange(group_size) - sampling.greedy, 0), index_PG.shape)
        keys_PG2 = sample_keys(self._seed, step, index_PG.ravel(), sample_PG.ravel()).reshape(*index_PG.shape, 2)
        # Even without router replay the first batch of a run records routes, because `GRPO` warns once how much closer
        # trainer and sampler would be with router replay. With clock='wall' a batch joins groups of several requests,
        # which must all have routes or all have none; so there the first batch has none either.
        records = self.config.router_replay or (step == 0 and self.config.clock == "tokens")
        return RolloutRequest(
            prompts,
            group_size,
            step,
            sampling,
            keys_PG2,
            pieces_per_prompt(len(prompts.length_P), group_size, batch_shards(self.mesh)),
            max(self.config.response_tokens, sampling.max_new),
            mode,
            step if mode == "train" else version,
            self._lengths.expected(prompts, keys_PG2) if mode == "eval" else {},
            moe.route_bytes(self.model) if mode == "train" and records else 0,
        )

    def _run(
        self, session: Session, players: Chosen, calls: int | None, halt: Callable[[], bool] | None
    ) -> Iterator[tuple[Player, int, Track | Episode]]:
        """Yields (player, b, sample) of every sample when it ends; closes the session at the end."""
        started, compiled = time.perf_counter(), _Compiles.total

        def between() -> None:
            if self._refreshed is not None:
                if self.broadcast is not None:
                    self.broadcast("use", (self._refreshed.version,))
                session.refresh(session.engine.prepare(self._refreshed.params), self._refreshed.version)
                self._refreshed = None
            self._bound_failures(session, sum(player.request.samples for player, _ in players))

        try:
            yield from play(session, players, calls=calls, env_client=self.env_client, between=between, halt=halt)
            session.finish_routes()
            between()
            if session.stats.failed:
                text = _failures(session, sum(player.request.samples for player, _ in players))
                _log.warning("%s. They and the other samples of their prompts are left out of the loss.", text)
        finally:
            self.close(session)
            if session.open or session.stats.failed:
                # Lanes of an abandoned generation may still be live, and caches of failed samples may hold NaN.
                self.sleep()
            took, compiles = time.perf_counter() - started, _Compiles.total - compiled
            self.stats = RolloutStats.of(session.stats, seconds=took, compiles=compiles)

    def _bound_failures(self, session: Session, samples: int) -> None:
        """Raises FailedSamplesError if too many of a call's samples failed."""
        if session.stats.failed.total() > FAILED_SHARE * samples:
            raise FailedSamplesError(
                f"{_failures(session, samples)}: at most {FAILED_SHARE:.0%} may fail. Weights or activations "
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
          ValueError: `group_size` is below 1, a prompt is empty or too long, a sample might not fit the cache, there
            are too many stop ids, or the model lacks one of them.
        """
        sampling = self._complete(sampling)
        assert sampling.max_new is not None
        if group_size < 1:
            raise ValueError(f"group_size={group_size} must be at least 1.")
        stop_ids = len(self._eos_ids) + len(sampling.stop_ids)
        if stop_ids > STOP_IDS:
            raise ValueError(
                f"{stop_ids} token ids end a sample (end tokens and Sampling.stop_ids): at most {STOP_IDS} are "
                "supported."
            )
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
            engine = Engine(self.model, self.mesh, self._shape, dtype, several_hosts=several_hosts, kernel=kernel)
            check_memory(engine.pool_bytes, self.mesh, self.config, self._shape)
            self._engine = engine
        return self._engine

    def _take_state(self) -> DecodeState:
        assert self._engine is not None
        self.wake()
        state, self._state = self._state, None
        assert state is not None
        return state


def _finished(b: int, sample: Track | Episode, group_size: int) -> FinishedSample:
    episode = sample if isinstance(sample, Episode) else Episode(sample, stop=sample.stop, text=sample.text)
    track = episode.track
    assert episode.stop is not None
    return FinishedSample(
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
    """Chooses the number of parts to cut each group into, so that few prompts still fill all shards.

    The number is 1 if the groups divide evenly over the shards or there are at least four groups per shard. A prompt is
    prefilled once on each shard that has one of its group's parts.

    Args:
      prompts: P, number of prompts.
      group_size: G, number of samples per prompt.
      shards: number of data-parallel shards of the mesh.
    """
    for pieces in range(1, group_size):
        if prompts * pieces % shards == 0 or prompts * pieces >= 4 * shards:
            return pieces
    return group_size


def check_eos(ids: Sequence[int], model: ModelConfig) -> None:
    """Checks the ids that end every sample.

    Raises:
      ValueError: there are too many ids, or the model cannot sample one of them; the message names rollout.eos_tokens.
    """
    if len(ids) > STOP_IDS:
        raise ValueError(f"rollout.eos_tokens has {len(ids)} ids: at most {STOP_IDS} are supported.")
    _check_ends(ids, model, "rollout.eos_tokens")


def _check_ends(ids: Sequence[int], model: ModelConfig, key: str) -> None:
    """Refuses stop ids that the model cannot sample.

    Args:
      ids: the stop ids.
      model: architecture of the model.
      key: configuration key of the ids, for the message.

    Raises:
      ValueError: the model has no embedding for one of the ids.
    """
    if beyond := [i for i in ids if not 0 <= i < model.vocab_size]:
        raise ValueError(
            f"{key} has the id {beyond[0]}, and the model has {model.vocab_size} embeddings: no sample could end with "
            "it. Give ids of the vocabulary."
        )
