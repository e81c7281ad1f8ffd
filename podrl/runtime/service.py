"""Sends HTTP requests to network services without following redirects, and recognises services that are unreachable."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message as Headers
from typing import IO, Any

_AGAIN = (408, 409, 425, 429)  # status codes, besides every 5xx, after which a request is worth repeating
_MOST_BYTES = 64 << 20
# A TimeoutError that one of these modules raises comes from the network; other modules raise it for their own reasons.
_NETWORK = {"socket", "ssl", "http", "urllib", "anyio", "httpcore"}


class ServiceError(Exception):
    """A service that the run needs does not answer; once it does, the same command resumes the run (exit code 42)."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would follow them and send the request, its token included, to another address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Headers, newurl: str
    ) -> None:
        raise urllib.error.HTTPError(
            req.full_url, code, f"it points to {newurl}, and requests follow no redirects", headers, fp
        )


_opener = urllib.request.build_opener(_NoRedirects)


def ask(request: urllib.request.Request, *, timeout_s: float) -> bytes:
    """Sends an HTTP request to its address and nowhere else; returns the body of the answer.

    Args:
      request: the request with all its headers.
      timeout_s: the longest silence of the connection, in seconds.

    Raises:
      HTTPError: the service refused, or answered with a redirect; the error names the redirect's target.
      OSError: there was no connection, no answer in time, or an answer of more than 64 MiB.
    """
    with _opener.open(request, timeout=timeout_s) as response:
        body = response.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise OSError(f"the answer of {request.full_url} has more than {_MOST_BYTES} bytes")
    return body


def is_away(error: BaseException) -> bool:
    """Returns True if an error says that a service is unreachable or overloaded, so that asking again later may help.

    Libraries wrap such errors in errors of their own, so the causes of an error are looked at too. A plain Python error
    that was raised while a network error was handled, such as a KeyError, is a mistake of the program and does not
    count.
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
            return  # the service answered, so the network did not fail
        reason: Any = getattr(error, "reason", None)  # urllib puts the original error into this attribute
        wrapped = reason if isinstance(reason, BaseException) else error.__cause__
        if wrapped is None and not error.__suppress_context__:
            plain = type(error).__module__ == "builtins" and not isinstance(error, OSError)
            wrapped = None if plain else error.__context__
        error = wrapped


def _modules(error: BaseException) -> set[str]:
    """Returns the top-level modules in an error's traceback."""
    found, at = set(), error.__traceback__
    while at is not None:
        found.add(str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        at = at.tb_next
    return found
