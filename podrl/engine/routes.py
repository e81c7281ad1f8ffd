"""Reads the recorded routes (experts of each token) of samples that leave a session, from their pages to the host."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8

from podrl.engine.device import Device
from podrl.engine.reads import Page


class HasRoutes(Protocol):
    """A sample whose routes are read, such as podrl.engine.session.Track.

    Attributes:
      routes: experts of each token, as bytes, as in `Rollouts.route_BTX`; None before the first `RouteReader.want`.
    """

    routes: UInt8[np.ndarray, "T X"] | None


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A page to read.

    Attributes:
      owner: sample whose routes are read.
      shard: number of the page's shard.
      slot: index of the page among the pages of its shard in the call that copies them; of a store on the host, index
        of the page in the store.
      start: position of the first token whose routes are read.
      count: number of tokens whose routes are read.
    """

    owner: HasRoutes
    shard: int
    slot: int
    start: int
    count: int


class RouteReader:
    """Collects the pages to read, and reads the pages of many samples in one device call.

    A call copies J pages of each shard, as many as one sample and its prompt may hold together. It is launched before
    the device's next work, which may overwrite the pages. Its result is read together with the result of a later
    dispatch, so the device need not wait.
    """

    def __init__(self, device: Device):
        """Makes an empty collection."""
        self._device = device
        self._wanted: list[tuple[_Piece, int]] = []  # (piece to read, index of its page in the pool)
        self._used = [0] * device.engine.shards
        self._launched: list[tuple[list[_Piece], Any]] = []

    def want(self, owner: HasRoutes, length: int, stores: Sequence[tuple[str, int, Sequence[Page]]]) -> None:
        """Requests the routes of a sample's tokens; they are in `owner.routes` after the next `launch` and `settle`.

        A token that is in none of the pages keeps the routes that were read before, or gets 0 if none were read.

        Args:
          owner: sample whose routes are requested.
          length: number of tokens of prompt and completion.
          stores: (name, shard, pages) of the prompt's store and of the sample's own store. If a store is on the host,
            the name is its key in `Device.spilled`.
        """
        engine = self._device.engine
        *others, route = engine.pools()
        old, width = owner.routes, route.shape[0] * route.shape[4] * route.dtype.itemsize
        owner.routes = np.zeros((length, width), np.uint8)
        if old is not None:
            owner.routes[: min(len(old), length)] = old[:length]
        pages = sum(len(pages_of_store) for name, _, pages_of_store in stores if name not in self._device.spilled)
        if stores and self._used[stores[0][1]] + pages > engine.shape.max_pages:
            self.launch()
        for name, shard, pages_of_store in stores:
            for slot, page in enumerate(pages_of_store):
                # The last token has not been fed to the model, so it has no routes.
                count = min(page.count, length - 1 - page.start)
                if count <= 0:
                    continue
                if name in self._device.spilled:
                    _write(_Piece(owner, shard, slot, page.start, count), self._device.spilled[name][len(others)], 0)
                else:
                    self._wanted.append((_Piece(owner, shard, self._used[shard], page.start, count), page.index))
                    self._used[shard] += 1

    def launch(self) -> None:
        """Launches the copies of the requested pages; must be called before any program that may change the pages."""
        if not self._wanted:
            return
        shape = self._device.engine.shape
        page_XJ = np.full((self._device.engine.shards, shape.max_pages), shape.pages - 1, np.int32)
        for piece, page in self._wanted:
            page_XJ[piece.shard, piece.slot] = page
        self._launched.append(([piece for piece, _ in self._wanted], self._device.routes(page_XJ)))
        self._wanted, self._used = [], [0] * len(self._used)

    def settle(self) -> None:
        """Writes the routes of all launched copies into the samples' records."""
        launched, self._launched = self._launched, []
        for pieces, copy in launched:
            block = np.asarray(copy)
            for piece in pieces:
                _write(piece, block, piece.shard * self._device.engine.shape.max_pages)

    def pending(self, owner: HasRoutes) -> bool:
        """Returns True while a read of the sample's routes is requested and not complete."""
        launched = itertools.chain.from_iterable(pieces for pieces, _ in self._launched)
        return any(piece.owner is owner for piece in itertools.chain((piece for piece, _ in self._wanted), launched))

    def finish(self) -> None:
        """Reads the routes of all requests now; waits until the routes are on the host."""
        self.launch()
        self.settle()


def _write(piece: _Piece, route_LM1Ck: np.ndarray, first: int) -> None:
    """Writes one page's routes into the sample's record."""
    assert piece.owner.routes is not None
    route_TLk = np.ascontiguousarray(route_LM1Ck[:, first + piece.slot, 0, : piece.count].swapaxes(0, 1))
    rows = route_TLk.reshape(piece.count, -1).view(np.uint8)
    piece.owner.routes[piece.start : piece.start + piece.count] = rows
