"""A request to another endpoint of the channel while it is in flight: its answer, its deadline, its errors."""

import contextlib
from collections.abc import Sequence
from concurrent import futures

from podrl.runtime.message import Frames, Message, MessageError, decode, encode, from_pieces, in_pieces


class ChannelError(RuntimeError):
    """A peer did not answer in time, refused, or answered wrongly; the message names the peer and the request."""


class LateError(ChannelError):
    """A peer did not answer within the deadline."""


class Request:
    """A request in flight.

    Attributes:
      number: number of the request, unique in the process that sends it.
      place: (address of the other endpoint, number of the connection to it).
      head: kind and key of the request, as JSON.
      frames: the encoded message.
      done: True once an answer has arrived or the request was abandoned.
    """

    def __init__(self, number: int, place: tuple[str, int], head: bytes, frames: Frames):
        self.number, self.place, self.head, self.frames = number, place, head, frames
        self._future: futures.Future[tuple[bytes, Sequence[object]]] = futures.Future()
        self.done = False

    def answer(self, status: bytes, pieces: Sequence[object]) -> None:
        """Takes the answer: its status, and its pieces as they arrived."""
        if not self.done:
            self.done = True
            with contextlib.suppress(futures.InvalidStateError):  # another thread's answer was first
                self._future.set_result((status, pieces))

    def fail(self, text: str) -> None:
        """Makes `wait` raise ChannelError with `text`, unless the answer has arrived."""
        self.answer(b"error", in_pieces(encode(Message(text))))

    def arrived(self, seconds: float) -> bool:
        """Waits at most `seconds` for the answer; returns whether it has arrived."""
        return bool(futures.wait([self._future], seconds).done)

    def forget(self) -> None:
        """Abandons the request: it is not sent again, and its answer is dropped."""
        self.done = True

    def wait(self, deadline_s: float, what: str) -> Message:
        """Waits for the answer.

        Args:
          deadline_s: the longest wait, in seconds.
          what: description of the endpoint and the request, for messages.

        Returns:
          The decoded answer.

        Raises:
          LateError: the answer did not arrive in time; the request is then abandoned.
          ChannelError: the endpoint refused, the answer arrived damaged, or `fail` was called.
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
            raise ChannelError(f"{what} failed: {message.value}")
        return message
