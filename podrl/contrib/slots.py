"""The decode engine with slots that the caller chooses: prefill a prompt, insert it, generate, free the slot.

The methods have the names and arguments of JetStream's Engine, whose public repository was archived in February 2026.
The engine does not run under JetStream's orchestrator, which needs methods for padding, tokenizing and scheduling that
this engine does not have.
"""

import dataclasses
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from podrl.contrib.slot_types import Prefix, ResultTokens
from podrl.engine.config import RolloutConfig, Sampling
from podrl.engine.device import Device
from podrl.engine.engine import Engine
from podrl.engine.keys import sample_keys
from podrl.engine.prefill import cut_chunks, run_chunks
from podrl.engine.reads import LaneReads, Page
from podrl.engine.sizes import engine_shape
from podrl.engine.state import FREE, SEAT, STOP_IDS, DecodeState, EngineShape, LaneUpdates, SampledTokens
from podrl.mesh.rules import batch_shards
from podrl.models.config import ModelConfig
from podrl.types import PyTree

PREFILL_LANES = 8  # number of first tokens that are drawn at once


class _Prompt(NamedTuple):
    """An inserted prefix on one shard: its number, its pages, and the slots that read it."""

    number: int  # unique: a slot is filled again while others may still read the prompt that it was filled with before
    pages: list[Page]
    slots: set[int]


@dataclasses.dataclass
class _Slot:
    """A filled slot.

    Attributes:
      prompt: the prompt, which other slots may share.
      pages: pages that only this slot reads; they hold its sampled tokens.
      position: position of the token that the slot feeds to the model next.
      left: number of tokens that the slot may still sample.
    """

    prompt: _Prompt
    pages: list[Page]
    position: int
    left: int


class SlotEngine:
    """Decodes in slots that the caller chooses: prefill -> insert or bulk_insert -> generate -> free_resource.

    A call of `generate` makes `config.steps_per_dispatch` tokens per slot. The device handles stop ids, lengths and
    sampling; the caller must handle stop strings, text and the choice of requests. The methods may be called from
    several threads, but only one call of `generate`, `insert` or `bulk_insert` at a time.

    Attributes:
      mesh: mesh of the engine.
      config: settings of the engine.
      max_concurrent_decodes: number of slots.
      max_prefill_length: longest prompt, tokens.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        config: RolloutConfig,
        *,
        dtype: jnp.dtype,
        eos_ids: Sequence[int],
        seed: int = 0,
    ):
        """Allocates the prefill pool; programs are compiled by the first calls.

        Args:
          model: configuration of the model, whose layers must all be of one kind.
          mesh: mesh of the engine.
          config: settings of the engine.
          dtype: dtype of activations and caches.
          eos_ids: token ids that end a sample.
          seed: random seed of samples for which the caller passes no key.

        Raises:
          ValueError: sizes do not fit together, there are too many end ids, or the model has layers of several kinds.
        """
        if len(eos_ids) > STOP_IDS:
            raise ValueError(f"rollout.eos_tokens has {len(eos_ids)} ids: at most {STOP_IDS} are supported.")
        if model.kinds:
            raise ValueError(
                f"A {model.family} model has layers of several kinds, and a Prefix has the keys and values of one: "
                "serve this model with podrl.serve."
            )
        shape = _slot_shape(config, batch_shards(mesh))
        first = dataclasses.replace(shape, lanes=PREFILL_LANES, steps=1, pages=shape.prompt_pages + 2)
        self.mesh, self.config = mesh, config
        self.max_prefill_length = config.max_prompt_length
        self._prefiller, self._engine = Engine(model, mesh, first, dtype), Engine(model, mesh, shape, dtype)
        self.max_concurrent_decodes = self._engine.shards * shape.lanes
        self._eos_ids, self._seed = tuple(eos_ids), seed
        self._prefill_state = self._prefiller.init_state()
        self._prefill_lock, self._lock = threading.Lock(), threading.Lock()
        self._requests, self._numbers = 0, itertools.count()
        self._result = jax.jit(_result)
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._stopped: set[int] = set()  # freed slots whose lanes the device has not stopped yet
        self._free = [list(range(self._engine.shape.pages - 1)) for _ in range(self._engine.shards)]
        self._start_R = np.zeros(self.max_concurrent_decodes, np.int32)

    # Parameters and state.

    def load_params(self, params: PyTree) -> PyTree:
        """Converts the model's parameters to the form `prefill` and `generate` take."""
        return self._engine.prepare(params)

    def init_decode_state(self) -> DecodeState:
        """Makes a state with empty slots; all slots of an earlier state are lost."""
        with self._lock:
            self._forget()
            return self._engine.init_state()

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Returns the sharding of a prefix's arrays."""
        return self._engine.pool_sharding

    # Methods of JetStream's Engine.

    def prefill(
        self,
        *,
        params: PyTree,
        existing_prefix: Any = None,
        padded_tokens: Int[Array, " T"],
        true_length: int,
        sampler: Callable | None = None,
        rng: Any = None,
        request_id: object = None,
        sampling: Sampling | None = None,
    ) -> tuple[Prefix, ResultTokens]:
        """Prefills a prompt and draws the first token of one sample; see `prefill_multisampling` for the arguments."""
        return self.prefill_multisampling(
            params=params,
            existing_prefix=existing_prefix,
            padded_tokens=padded_tokens,
            true_length=true_length,
            sampler=sampler,
            rng=rng,
            request_id=request_id,
            num_samples=1,
            sampling=sampling,
        )

    def prefill_multisampling(
        self,
        *,
        params: PyTree,
        existing_prefix: Any = None,
        padded_tokens: Int[Array, " T"],
        true_length: int,
        sampler: Callable | None = None,
        rng: Any = None,
        request_id: object = None,
        num_samples: int = 1,
        sampling: Sampling | None = None,
    ) -> tuple[Prefix, ResultTokens]:
        """Prefills a prompt once and draws the first token of `num_samples` samples.

        Args:
          params: parameters from `load_params`.
          existing_prefix: Prefix (or an object with a Prefix in `cache`) that the tokens continue; the first tokens
            sampled from this prefix are not part of the new prompt. None if the tokens are the whole prompt.
          padded_tokens: tokens of the prompt (T), possibly followed by padding.
          true_length: number of tokens in `padded_tokens` before the padding.
          sampler: unsupported, must be None; see `sampling`.
          rng: random keys, uint32 (num_samples, 2) or, for one sample, (2,). None derives keys from the engine's seed
            and the number of the request.
          request_id: ignored.
          num_samples: number of samples.
          sampling: sampling settings; None takes the configuration's settings.

        Returns:
          (the prefix, first tokens in one row per sample).

        Raises:
          ValueError: `sampler` or a stop string is set, the prompt is empty or too long, there are too many stop ids,
            the number of keys is wrong, or the model's logits are NaN or infinite.
        """
        del request_id
        if sampler is not None:
            raise ValueError("sampler is not supported: pass sampling=podrl.engine.config.Sampling(...) instead.")
        sampling = self._complete(sampling)
        tokens_T = np.asarray(padded_tokens)[:true_length].astype(np.int32)
        before: Prefix | None = getattr(existing_prefix, "cache", existing_prefix)
        blocks = [Page(j, *block) for j, block in enumerate(before.blocks)] if before else []
        start = before.length if before else 0
        self._check_prompt(len(tokens_T), start, len(blocks))
        with self._prefill_lock:
            keys_G2 = self._keys(rng, num_samples)
            state = self._prefill_state
            if before:
                state = self._prefiller.write_blocks(
                    state, _block_rows(self._prefiller, blocks), before.key_LMKCH, before.value_LMKCH
                )
            state, blocks = self._prefill(params, state, tokens_T, start, blocks)
            state, first, logprobs = self._first_tokens(params, state, int(tokens_T[-1]), blocks, keys_G2, sampling)
            key, value = self._prefiller.read_blocks(state, _block_rows(self._prefiller, blocks))
            self._prefill_state = state
        held = tuple((block.start, block.count) for block in blocks)
        keys = tuple((int(a), int(b)) for a, b in keys_G2)
        prefix = Prefix(key, value, held, start + len(tokens_T), tuple(first), keys, sampling)
        data = np.stack([first, np.ones(num_samples), np.zeros(num_samples)], axis=1).astype(np.int32)
        return prefix, ResultTokens(data, (0, 1), (1, 2), (2, 3), 1, np.asarray(logprobs, np.float32)[:, None])

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int, request_id: object = None) -> DecodeState:
        """Puts the first sample of a prefix into a slot; see `bulk_insert` for the arguments."""
        return self.bulk_insert(prefix, decode_state, [slot], request_id)

    def bulk_insert(
        self, prefix: Prefix, decode_state: DecodeState, slots: Sequence[int], request_id: object = None
    ) -> DecodeState:
        """Puts sample i of a prefix into `slots[i]`; slots of one data-parallel shard share the prompt's cache.

        Args:
          prefix: prefix from `prefill_multisampling`.
          decode_state: newest state of the engine, which the call donates.
          slots: numbers of the slots, which must differ; a filled slot is freed first.
          request_id: ignored.

        Returns:
          The new state.

        Raises:
          ValueError: there are more slots than samples, a slot does not exist or occurs twice, or the pool is full.
        """
        del request_id
        if len(slots) > len(prefix.tokens):
            raise ValueError(
                f"{len(slots)} slots for a prefix of {len(prefix.tokens)} samples: call prefill_multisampling "
                f"with num_samples={len(slots)} or more."
            )
        if len(set(slots)) < len(slots) or any(not 0 <= s < self.max_concurrent_decodes for s in slots):
            raise ValueError(f"slots={list(slots)} must differ and lie in [0, {self.max_concurrent_decodes}).")
        with self._lock:
            for slot in slots:
                self._release(slot)
            rows_XJ = _block_rows(self._engine, [])
            lanes = self._engine.shape.lanes
            for shard in sorted({slot // lanes for slot in slots}):
                mine = [slot for slot in slots if slot // lanes == shard]
                pages = [Page(self._take(shard), *block) for block in prefix.blocks]
                rows_XJ[shard, : len(pages)] = [page.index for page in pages]
                prompt = _Prompt(next(self._numbers), pages, set(mine))
                for slot in mine:
                    self._slots[slot] = _Slot(prompt, [], prefix.length, self._left(prefix, slots.index(slot)))
            decode_state = self._engine.write_blocks(decode_state, rows_XJ, prefix.key_LMKCH, prefix.value_LMKCH)
            updates = self._frees()
            for i, slot in enumerate(slots):
                self._start_R[slot] = prefix.length
                _seat(
                    updates,
                    slot,
                    prefix.tokens[i],
                    prefix.length,
                    self._slots[slot].left,
                    prefix.keys[i],
                    prefix.sampling,
                )
                self._set_stop_ids(updates, slot, prefix.sampling)
            return self._engine.bulk_insert(decode_state, self._engine.put_rows(updates.packed()))

    def generate(
        self, params: PyTree, decode_state: DecodeState, sampler: Callable | None = None, rng: Any = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Decodes the next tokens of every slot.

        Args:
          params: parameters from `load_params`.
          decode_state: newest state of the engine, which the call donates.
          sampler: unsupported, must be None: `prefill` takes the sampling settings.
          rng: ignored: `prefill` takes the random keys.

        Returns:
          (the new state, N tokens of every slot).

        Raises:
          ValueError: `sampler` is set, or the pool is full.
        """
        del rng
        if sampler is not None:
            raise ValueError("sampler is not supported: pass sampling to prefill instead.")
        engine, N = self._engine, self._engine.shape.steps
        with self._lock:
            if self._stopped:
                decode_state = engine.bulk_insert(decode_state, engine.put_rows(self._frees().packed()))
            running = {slot: s for slot, s in sorted(self._slots.items()) if s.left > 0}
            flat_XI = np.zeros((engine.shards, engine.read_shape.size), np.int32)
            for shard in range(engine.shards):
                seated = {}
                for slot, s in running.items():
                    if slot // engine.shape.lanes == shard:
                        self._grow(shard, s)
                        seated[slot % engine.shape.lanes] = LaneReads(s.prompt.number, s.prompt.pages, s.pages)
                engine.read_shape.fill(flat_XI[shard], seated, engine.shape.pages - 1)
            decode_state, emitted = engine.generate(params, decode_state, engine.put_rows(flat_XI))
            for s in running.values():
                s.pages[-1].count += N
                s.position, s.left = s.position + N, s.left - N
            data, logprob = self._result(emitted, decode_state.position_R, engine.put_rows(self._start_R))
        return decode_state, ResultTokens(data, (0, N), (N, 2 * N), (2 * N, 2 * N + 1), 1, logprob)

    def free_resource(self, slot: int) -> None:
        """Frees the pages of a slot; the next call with the decode state stops the slot's lane on the device."""
        with self._lock:
            self._release(slot)

    # Prefill.

    def _check_prompt(self, tokens: int, start: int, blocks: int) -> None:
        if tokens < 1:
            raise ValueError("The prompt is empty: true_length must be at least 1.")
        if start + tokens > self.max_prefill_length:
            raise ValueError(
                f"The prompt has {start + tokens} tokens: rollout.max_prompt_length={self.max_prefill_length} must be "
                "at least that."
            )
        C, most = self._engine.shape.page_tokens, self._engine.shape.prompt_pages
        if blocks + -(-tokens // C) > most:
            raise ValueError(
                f"The prompt continues {blocks} pages with {tokens} tokens, more than {most} pages of {C}: use "
                f"prefixes of multiples of {C} tokens, or raise rollout.max_prompt_length."
            )

    def _complete(self, sampling: Sampling | None) -> Sampling:
        sampling = sampling or self.config.sampling()
        if len(self._eos_ids) + len(sampling.stop_ids) > STOP_IDS:
            raise ValueError(f"{sampling.stop_ids=} and eos: at most {STOP_IDS} ids may end a sample.")
        if sampling.stop_strings:
            raise ValueError(f"{sampling.stop_strings=}: this interface returns tokens; look for texts in the caller.")
        limit = self.config.max_tokens_to_generate if sampling.max_new is None else sampling.max_new
        return dataclasses.replace(sampling, max_new=limit)

    def _keys(self, rng: Any, samples: int) -> np.ndarray:
        self._requests += 1
        if rng is None:
            return sample_keys(self._seed, 0, np.asarray(self._requests - 1), np.arange(samples))
        keys_G2 = np.asarray(rng, np.uint32).reshape(-1, 2)
        if len(keys_G2) != samples:
            raise ValueError(f"rng has {len(keys_G2)} keys for {samples} samples: give two uint32 words for each.")
        return keys_G2

    def _prefill(
        self, params: PyTree, state: DecodeState, tokens_T: np.ndarray, start: int, blocks: list[Page]
    ) -> tuple[DecodeState, list[Page]]:
        """Prefills all tokens but the last one on every shard, then makes room for the last token.

        Args:
          params: parameters from `load_params`.
          state: state of the prefill engine.
          tokens_T: new tokens of the prompt.
          start: number of tokens in `blocks`, which is the position of the first new token.
          blocks: pages of the existing prefix; empty for a whole prompt.

        Returns:
          (state, all pages of the prompt); the last page has room for one more token.
        """
        engine = self._prefiller
        C, context_T = engine.shape.page_tokens, tokens_T[:-1]
        prior = [(block.index, block.start, block.count) for block in blocks]
        new = [
            Page(len(blocks) + j, start + j * C, min(C, len(context_T) - j * C)) for j in range(-(-len(context_T) // C))
        ]
        targets = [page.index for page in new]
        chunks = [cut_chunks(engine.shape, x, context_T, start, prior, targets) for x in range(engine.shards)]
        blocks = [*blocks, *new]
        if not new or new[-1].count == C:
            blocks.append(Page(len(blocks), start + len(context_T), 0))
        device = Device(engine, state, params)
        run_chunks(device, chunks)
        return device.state, blocks

    def _first_tokens(
        self,
        params: PyTree,
        state: DecodeState,
        token: int,
        blocks: list[Page],
        keys_G2: np.ndarray,
        sampling: Sampling,
    ) -> tuple[DecodeState, list[int], list[float]]:
        """Feeds the last prompt token to the model, and draws the first token of every sample.

        Args:
          params: parameters from `load_params`.
          state: state of the prefill engine.
          token: last token of the prompt.
          blocks: pages of the prompt; the last one gets the keys and values of `token`.
          keys_G2: random key of each sample.
          sampling: sampling settings.

        Returns:
          (state, first tokens, their log-probabilities in nats).

        Raises:
          ValueError: the model's logits are NaN or infinite.
        """
        engine = self._prefiller
        R, trash, last = engine.shape.lanes, engine.shape.pages - 1, blocks[-1]
        position = last.start + last.count
        tokens, logprobs = [], []
        for at in range(0, len(keys_G2), R):
            wave = keys_G2[at : at + R]
            updates = LaneUpdates.empty(engine.shards * R, engine.shape.stop_ids)
            flat_XI = np.zeros((engine.shards, engine.read_shape.size), np.int32)
            for shard in range(engine.shards):
                seated = {}
                for lane, key in enumerate(wave):
                    _seat(updates, shard * R + lane, token, position, 1, key, sampling)
                    # All lanes compute the same keys and values. Only the first lane writes them to the prompt's page;
                    # the other lanes write to a page that is never read.
                    own = [last] if lane == 0 else [last, Page(trash, position, 0)]
                    seated[lane] = LaneReads(0, blocks[:-1], own)
                engine.read_shape.fill(flat_XI[shard], seated, trash)
            state = engine.bulk_insert(state, engine.put_rows(updates.packed()))
            state, emitted = engine.generate(params, state, engine.put_rows(flat_XI))
            token_R1, logprob_R1, failed_R = jax.device_get(
                (emitted.tokens_RT, emitted.drawn["logprob"], emitted.failed_R)
            )
            if failed_R[: len(wave)].any():
                self._prefill_state = engine.init_state()  # the keys and values in the old state are not finite
                raise ValueError(
                    "The model's logits after this prompt are NaN or infinite: look for NaN in its weights, or use "
                    "rollout.data_type='float32' or 'bfloat16'."
                )
            tokens += token_R1[: len(wave), 0].tolist()
            logprobs += logprob_R1[: len(wave), 0].tolist()
        last.count += 1
        return state, tokens, logprobs

    # Slots.

    def _left(self, prefix: Prefix, sample: int) -> int:
        """Computes how many tokens a sample may get after its first token."""
        if prefix.tokens[sample] in (*self._eos_ids, *prefix.sampling.stop_ids):
            return 0
        assert prefix.sampling.max_new is not None
        return max(0, min(prefix.sampling.max_new, self.config.kv_cache_size - prefix.length) - 1)

    def _set_stop_ids(self, updates: LaneUpdates, slot: int, sampling: Sampling) -> None:
        stop_ids = (*self._eos_ids, *sampling.stop_ids)
        updates.stop_RE[slot, : len(stop_ids)] = stop_ids

    def _take(self, shard: int) -> int:
        if not self._free[shard]:
            raise ValueError(
                f"No page of {self._engine.shape.page_tokens} tokens is free on shard {shard}: free a slot "
                "first, or raise rollout.pool_tokens."
            )
        return heapq.heappop(self._free[shard])

    def _grow(self, shard: int, slot: _Slot) -> None:
        if not slot.pages or slot.pages[-1].count >= self._engine.shape.page_tokens:
            slot.pages.append(Page(self._take(shard), slot.position, 0))

    def _release(self, slot: int) -> None:
        filled = self._slots.pop(slot, None)
        if filled is None:
            return
        self._stopped.add(slot)
        filled.prompt.slots.discard(slot)
        given_up = filled.pages if filled.prompt.slots else [*filled.pages, *filled.prompt.pages]
        for page in given_up:
            heapq.heappush(self._free[slot // self._engine.shape.lanes], page.index)

    def _frees(self) -> LaneUpdates:
        """Makes lane updates that stop the slots freed since the last call."""
        updates = LaneUpdates.empty(self.max_concurrent_decodes, self._engine.shape.stop_ids)
        updates.action_R[list(self._stopped)] = FREE
        self._stopped.clear()
        return updates


def _slot_shape(config: RolloutConfig, shards: int) -> EngineShape:
    """Derives sizes with room for the longest request in every slot; rollout.pool_tokens, if set, sizes the pool."""
    shape, C = engine_shape(config, shards), config.page_tokens
    prompt = -(-config.max_prompt_length // C)
    pages = shape.lanes * (prompt + -(-config.max_tokens_to_generate // C)) + 1
    return dataclasses.replace(
        shape, prompt_pages=prompt, pages=shape.pages if config.pool_tokens is not None else pages
    )


def _block_rows(engine: Engine, blocks: Sequence[Page]) -> np.ndarray:
    """Lists the pages of a prefix as (X, J), a row per shard, padded with the number of the page that is never read."""
    rows_XJ = np.full((engine.shards, engine.shape.max_pages), engine.shape.pages - 1, np.int32)
    rows_XJ[:, : len(blocks)] = [block.index for block in blocks]
    return rows_XJ


def _seat(
    updates: LaneUpdates, lane: int, token: int, position: int, left: int, key: Sequence[int], sampling: Sampling
) -> None:
    updates.action_R[lane] = SEAT
    updates.token_R[lane], updates.position_R[lane], updates.left_R[lane] = token, position, left
    updates.key_R2[lane] = key
    updates.temperature_R[lane], updates.top_k_R[lane] = sampling.temperature, sampling.top_k or 0
    updates.top_p_R[lane], updates.min_p_R[lane] = sampling.nucleus, sampling.min_p


def _result(emitted: SampledTokens, position_R: Array, start_R: Array) -> tuple[Array, Array]:
    """Packs the results of every slot: (tokens, validity flags and length side by side; log-probabilities)."""
    valid_RT = jnp.arange(emitted.tokens_RT.shape[1]) < emitted.count_R[:, None]
    tokens_RT = jnp.where(valid_RT, emitted.tokens_RT, 0)
    length_R1 = (position_R - start_R)[:, None]
    return jnp.concatenate([tokens_RT, valid_RT.astype(jnp.int32), length_R1], axis=1), emitted.drawn["logprob"]
