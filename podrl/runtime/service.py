"""Requests to network services: sent only to the given address; recognises services that are away."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message as Headers
from typing import IO, Any

_AGAIN = (408, 409, 425, 429)  # and every 5xx: worth another try
_MOST_BYTES = 64 << 20
# Of these modules comes a TimeoutError that means the network; others raise it for reasons of their own.
_NETWORK = {"socket", "ssl", "http", "urllib", "anyio", "httpcore"}


class ServiceError(Exception):
    """A service that the run needs does not answer: the same command resumes once it does (exit code 42)."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, with which urllib would send the request, token and all, to another address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Headers, newurl: str
    ) -> None:
        raise urllib.error.HTTPError(
            req.full_url, code, f"it points to {newurl}, and requests follow no redirects", headers, fp
        )


_opener = urllib.request.build_opener(_NoRedirects)


def ask(request: urllib.request.Request, *, timeout_s: float) -> bytes:
    """Sends an HTTP request to the given address and nowhere else; returns the body of the answer.

    Args:
      request: the request with all its headers.
      timeout_s: the longest silence of the connection.

    Raises:
      HTTPError: the service refused, or answered with a redirect; its text says where to.
      OSError: no connection, no answer in time, or one of more than 64 MiB.
    """
    with _opener.open(request, timeout=timeout_s) as response:
        body = response.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise OSError(f"the answer of {request.full_url} has more than {_MOST_BYTES} bytes")
    return body


def is_away(error: BaseException) -> bool:
    """True if an error says that a service is unreachable or overloaded, so that asking again later may help.

    Libraries wrap such errors in their own; the errors they were made from are looked at too. A plain error of Python,
    as a KeyError raised while one of these was handled, is a mistake of the program and not the network's.
    """
    return any(_is_network(one) for one in _causes(error))


def _is_network(error: BaseException) -> bool:
    import socket

    if isinstance(error, ServiceError | ConnectionError | socket.gaierror):
        return True
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _AGAIN or error.code >= 500
    return isinstance(error, TimeoutError) and not _NETWORK.isdisjoint(_modules(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, urllib.error.HTTPError):
            return  # an answer: whatever led to it was no failure of the network
        reason: Any = getattr(error, "reason", None)  # urllib's
        wrapped = reason if isinstance(reason, BaseException) else error.__cause__
        if wrapped is None and not error.__suppress_context__:
            plain = type(error).__module__ == "builtins" and not isinstance(error, OSError)
            wrapped = None if plain else error.__context__
        error = wrapped


def _modules(error: BaseException) -> set[str]:
    """Lists the top-level modules that an error came through."""
    found, at = set(), error.__traceback__
    while at is not None:
        found.add(str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        at = at.tb_next
    return found
