"""jax.experimental.transfer made safe: an offer is pulled once and kept until acknowledged, a pull ends or is given up.

What the library does by itself (jax 0.10.2): it serves arrays of this process only, pairing shard with shard, so
offers here are single-device arrays; one registration answers one pull; a pull of an unknown number, or from an
address where nobody listens, never ends, and its own timeouts do not fire. The sockets have no authentication: they
are bound to one interface, and an offer's number is a 62-bit secret that only the authenticated channel tells.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.experimental import transfer
from jaxtyping import Array

_POLL_S = (0.0002, 0.01)


class TransferTimeoutError(RuntimeError):
    """A peer did not do its part in time; the message names it and the stage."""


class Peer:
    """This process's end of all transfers, for offering and for pulling.

    Attributes:
      address: where others pull from.
    """

    def __init__(self, host: str, *, sockets: int = 4):
        """Opens the sockets.

        Args:
          host: address of the interface that peers reach.
          sockets: data connections per peer; several are faster than one between hosts.

        Raises:
          ValueError: an address that stands for every interface.
        """
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"Weights are not served on every interface (host {host!r}): name the address of the one that the "
                "rollout hosts reach."
            )
        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server = transfer.start_transfer_server(jax.local_devices()[0].client, bind, [bind] * sockets)
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}
        self._offers: dict[int, tuple[Sequence[Array], float]] = {}
        self._lock = threading.Lock()

    def offer(self, arrays: Sequence[Array], *, seconds: float) -> int:
        """The number under which another process can pull these single-device arrays, once, within `seconds`."""
        number = secrets.randbits(62)
        self._server.await_pull(number, list(arrays))
        with self._lock:
            self._offers[number] = (arrays, time.monotonic() + seconds)
        return number

    def acknowledge(self, numbers: Sequence[int]) -> None:
        """Lets go of offers that were pulled; unknown numbers are ignored."""
        with self._lock:
            for number in numbers:
                self._offers.pop(number, None)

    def expire(self) -> int:
        """Takes back offers that nobody acknowledged in time; returns how many there were.

        A registration cannot be withdrawn, only pulled: this process pulls it itself and drops the result.
        """
        now = time.monotonic()
        with self._lock:
            late = {number: arrays for number, (arrays, until) in self._offers.items() if until < now}
            for number in late:
                del self._offers[number]
        for number, arrays in late.items():
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]
            self._connection(self.address).pull(number, shapes)
        return len(late)

    @property
    def offers(self) -> int:
        """Offers that are neither acknowledged nor taken back."""
        return len(self._offers)

    def pull(self, address: str, number: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
        """Starts pulling an offer; `wait` says when it is there."""
        return self._connection(address).pull(number, list(shapes))

    def wait(self, arrays: Sequence[Array], deadline: float, what: str) -> None:
        """Returns once pulled arrays are there.

        Args:
          arrays: of one or several pulls.
          deadline: on time.monotonic's clock.
          what: the stage and the peer, for the message.

        Raises:
          TransferTimeoutError: not in time; the arrays must not be used, for whatever waits for them waits forever.
          OSError: the connection broke.
        """
        pause = _POLL_S[0]
        for array in cast(Sequence[Any], arrays):  # is_ready is missing in the type
            while not array.is_ready():
                if time.monotonic() > deadline:
                    raise TransferTimeoutError(f"{what}: no data in time.")
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            raise ConnectionError(f"{what}: {error}") from error

    def forget(self, address: str) -> None:
        """Drops the connection to a peer; the next pull makes a new one."""
        with self._lock:
            self._connections.pop(address, None)

    def _connection(self, address: str) -> Any:
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            return self._connections[address]
