"""The device side of generation: pools, lanes and weights, and the calls that change them."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from podrl.engine.engine import Engine
from podrl.engine.state import DecodeState, LaneUpdates, SampledTokens
from podrl.types import PyTree

Broadcast = Callable[[str, Sequence[object]], None]
Call = TypeVar("Call", bound=Callable[..., object])
CALLS: dict[str, Callable[..., object]] = {}  # the methods of Device that are sent to other hosts, by name


def no_broadcast(name: str, args: Sequence[object]) -> None:
    """Does nothing: the `Broadcast` of a mesh on one host, which has no other hosts to send calls to."""


def _on_all_hosts(call: Call) -> Call:
    """Makes a method send its name and arguments to the other hosts of the mesh before it runs here."""

    @functools.wraps(call)
    def run(self: "Device", *args: object) -> object:
        self._broadcast(call.__name__, args)
        return call(self, *args)

    CALLS[call.__name__] = call
    return cast(Call, run)


class Device:
    """Holds an engine's state and prepared weights.

    If the mesh spans several hosts, one host decides which calls are made. It sends each call with its arguments
    (numbers, texts and numpy arrays) to the other hosts, so that all hosts run the same programs on the same values in
    the same order (`CALLS`).

    Attributes:
      engine: programs of the engine.
      state: pools and lanes.
      spilled: copies of caches that were moved to the host, by the name of their store.
    """

    def __init__(self, engine: Engine, state: DecodeState, params: PyTree, broadcast: Broadcast = no_broadcast):
        """Stores the state and the weights.

        Args:
          engine: programs of the engine.
          state: pools and lanes.
          params: weights in the form that `Engine.prepare` returns.
          broadcast: function that sends the name and the arguments of every call to the other hosts of the mesh.
        """
        self.engine, self.state, self._params, self._broadcast = engine, state, params, broadcast
        self.spilled: dict[str, tuple[np.ndarray, ...]] = {}

    def use(self, params: PyTree) -> None:
        """Uses other weights, prepared by the engine, in all calls from now on; cached keys and values are kept."""
        self._params = params

    @_on_all_hosts
    def insert(self, packed_RI: np.ndarray) -> None:
        """Seats samples in lanes and frees lanes; `packed_RI` is a result of `LaneUpdates.packed`."""
        self.state = self.engine.bulk_insert(self.state, self.engine.put_rows(packed_RI))

    @_on_all_hosts
    def prefill(self, bucket: int, flat_BI: np.ndarray, wait: bool) -> None:
        """Computes the keys and values of one call's chunks.

        Args:
          bucket: length of the call's rows, tokens.
          flat_BI: the chunks, as `EngineShape.pack_chunks` makes them.
          wait: True to wait until the call is done, so that calls do not pile up.
        """
        self.state = self.engine.prefills[bucket](self._params, self.state, self.engine.put_rows(flat_BI))
        # A podrl.mesh.backlog.Backlog bounds queued calls by waiting for their results later. That is impossible here,
        # because the next call donates the state.
        if wait:
            jax.block_until_ready(self.state.token_R)

    @_on_all_hosts
    def generate(self, flat_XI: np.ndarray) -> SampledTokens:
        """Launches a dispatch and starts the copy of its results to the host; `flat_XI` is the read list per shard."""
        self.state, emitted = self.engine.generate(self._params, self.state, self.engine.put_rows(flat_XI))
        for leaf in jax.tree.leaves(emitted):
            leaf.copy_to_host_async()
        return emitted

    @_on_all_hosts
    def spill(self, store: str, shard: int, pages: Sequence[int], place: int) -> None:
        """Copies a store, the cache of a prompt or sample, to the host.

        A store has at most J pages. For models with linear attention, the store's memory at `place` is copied, too.
        """
        at = shard * self.engine.shape.max_pages
        copies = jax.device_get(self.engine.read_blocks(self.state, self._page_rows(shard, pages)))
        self.spilled[store] = tuple(copy[:, at : at + len(pages)].copy() for copy in copies)
        if self.engine.shape.slots:
            memories = jax.device_get(self.engine.read_memories(self.state, self._places(shard, place)))
            self.spilled[store] += tuple(memory[:, shard : shard + 1].copy() for memory in memories)

    @_on_all_hosts
    def restore(self, store: str, shard: int, pages: Sequence[int], place: int) -> None:
        """Writes a spilled store to new pages; for models with linear attention also its memory, to `place`."""
        engine, copies = self.engine, self.spilled.pop(store)
        pools = len(engine.pools())
        self._write(shard, pages, copies[:pools])
        if engine.shape.slots:
            blocks = []
            for copy, like in zip(copies[pools:], engine.memories(1), strict=True):
                block = np.zeros(like.shape, like.dtype)
                block[:, shard : shard + 1] = copy
                blocks.append(engine.put(block, cast(NamedSharding, like.sharding)))
            self.state = engine.write_memories(self.state, self._places(shard, place), *blocks)

    @_on_all_hosts
    def share(self, store: str, source: str) -> None:
        """Gives a store the host copy of the spilled store `source`, which keeps it; the copies never change."""
        self.spilled[store] = self.spilled[source]

    @_on_all_hosts
    def copy(self, copies_XI: np.ndarray) -> None:
        """Copies memories of linear attention from prompts to lanes; `EngineShape.pack_copies` makes `copies_XI`."""
        self.state = self.engine.copy_memories(self.state, copies_XI)

    @_on_all_hosts
    def forget(self, store: str) -> None:
        """Drops the host copy of a spilled store."""
        del self.spilled[store]

    @_on_all_hosts
    def clear(self, shard: int, pages: Sequence[int]) -> None:
        """Writes zeros into at most J pages of a shard."""
        self._write(shard, pages, tuple(np.zeros(block.shape, block.dtype) for block in self.engine.blocks(len(pages))))

    @_on_all_hosts
    def routes(self, page_XJ: np.ndarray) -> Array:
        """Copies the routes (experts of each token) in J pages of each shard, and starts to send them to the host."""
        copy = self.engine.read_routes(self.state, page_XJ)
        copy.copy_to_host_async()
        return copy

    def _places(self, shard: int, place: int) -> np.ndarray:
        """Lists a place for each shard: `place` for shard number `shard`, `nowhere` for the other shards."""
        place_X = np.full(self.engine.shards, self.engine.shape.nowhere, np.int32)
        place_X[shard] = place
        return place_X

    def _page_rows(self, shard: int, pages: Sequence[int]) -> np.ndarray:
        """Lists J pages for each shard, padded with the last page, whose content is never used."""
        shape = self.engine.shape
        rows_XJ = np.full((self.engine.shards, shape.max_pages), shape.pages - 1, np.int32)
        rows_XJ[shard, : len(pages)] = pages
        return rows_XJ

    def _write(self, shard: int, pages: Sequence[int], copies: tuple[np.ndarray, ...]) -> None:
        """Writes host copies, (L, at least len(pages), K, C, H) of each pool, into pages of a shard."""
        engine, blocks = self.engine, []
        at, J = shard * engine.shape.max_pages, engine.shape.max_pages
        for copy, like in zip(copies, engine.blocks(J), strict=True):
            block = np.zeros(like.shape, like.dtype)
            block[:, at : at + len(pages)] = copy[:, : len(pages)]
            blocks.append(engine.put(block, cast(NamedSharding, like.sharding)))
        self.state = engine.write_blocks(self.state, self._page_rows(shard, pages), *blocks)


def compile_all(
    engine: Engine, params: PyTree, state: Callable[[], DecodeState], note: Callable[[str], None]
) -> DecodeState:
    """Compiles every program of an engine by running it once.

    Args:
      engine: engine to compile.
      params: weights as in `Policy.params`.
      state: function that returns the engine's state, newly made or existing.
      note: function that is called with a text such as '2/7 insert' before each program.

    Returns:
      The state after these runs, ready on the device.
    """
    shape = engine.shape
    programs = len(engine.prefills) + 4 + engine.routes + bool(shape.slots)
    note(f"1/{programs} weights")
    device = Device(engine, state(), engine.prepare(params))
    note(f"2/{programs} insert")
    device.insert(LaneUpdates.empty(engine.shards * engine.shape.lanes, engine.shape.stop_ids).packed())
    for number, bucket in enumerate(engine.shape.buckets, 3):
        note(f"{number}/{programs} prefill of {bucket} tokens")
        device.prefill(bucket, engine.shape.pack_chunks(engine.shards, bucket, []), False)
    number = len(engine.prefills) + 3
    note(f"{number}/{programs} generate")
    device.generate(np.zeros((engine.shards, engine.read_shape.size), np.int32))
    note(f"{number + 1}/{programs} spill and restore")
    device.spill("", 0, [], shape.nowhere)
    device.restore("", 0, [], shape.nowhere)
    if shape.slots:
        note(f"{number + 2}/{programs} copy")
        device.copy(shape.pack_copies(engine.shards, []))
    if engine.routes:
        note(f"{programs}/{programs} routes")
        device.routes(np.zeros((engine.shards, engine.shape.max_pages), np.int32))
    return jax.block_until_ready(device.state)
