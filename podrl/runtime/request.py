"""A request to another endpoint of the channel while it is in flight: its answer, its deadline, its errors."""

from collections.abc import Sequence
from concurrent import futures
from typing import Any

from podrl.runtime.message import Frames, Message, MessageError, decode, encode, from_pieces, in_pieces


class ChannelError(RuntimeError):
    """A peer did not answer in time, refused, or answered wrongly; the message names it and the request."""


class LateError(ChannelError):
    """No answer within the deadline."""


class Request:
    """A request in flight.

    Attributes:
      place: the endpoint asked, and which connection to it.
    """

    def __init__(self, number: int, place: tuple[str, int], head: bytes, frames: Frames):
        self.number, self.place, self.head, self.frames = number, place, head, frames
        self._future: futures.Future[tuple[bytes, Sequence[Any]]] = futures.Future()
        self.done = False

    def answer(self, status: bytes, pieces: Sequence[Any]) -> None:
        """Takes the answer, in the pieces that arrived."""
        if not self.done:
            self.done = True
            self._future.set_result((status, pieces))

    def fail(self, text: str) -> None:
        """Makes `wait` raise ChannelError, unless the answer has arrived."""
        self.answer(b"error", in_pieces(encode(Message(text))))

    def arrived(self, seconds: float) -> bool:
        """Waits for so long for the answer; returns whether it is there."""
        return bool(futures.wait([self._future], seconds).done)

    def forget(self) -> None:
        """Gives the request up: it is not sent again, and its answer is dropped."""
        self.done = True

    def wait(self, deadline_s: float, what: str) -> Message:
        """Waits for the answer.

        Args:
          deadline_s: the longest wait.
          what: the endpoint and what it was asked for, for messages.

        Raises:
          LateError: it did not come in time.
          ChannelError: the endpoint refused, or the answer arrived damaged.
        """
        try:
            status, pieces = self._future.result(deadline_s)
        except TimeoutError:
            self.forget()
            raise LateError(f"No answer within {deadline_s:g} s from {what}.") from None
        try:
            message = decode(from_pieces(pieces))
        except MessageError as error:
            raise ChannelError(f"{what}: {error}") from error
        if status == b"error":
            raise ChannelError(f"{what} was refused: {message.value}")
        return message
