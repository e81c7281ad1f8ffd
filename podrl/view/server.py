"""The page's server: answers only GET requests, with files of podrl/view/static and data of podrl.view.runs."""

import csv
import hmac
import io
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from podrl.view.assets import SCRIPTS, STATIC, STYLES, VIEWS, finite, page
from podrl.view.runs import RunFiles

_COOKIE = "podrl_view"
_POINTS, _MOST_POINTS = 1500, 200_000
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Pages:
    """The routes over some run directories; a request names a run by its number, and never gives a path."""

    def __init__(self, runs: Sequence[RunFiles]):
        self._runs = runs

    def routes(self) -> list[Route]:
        """Returns all routes; each answers GET only."""
        answers: dict[str, Callable[[Request], object]] = {
            "runs": self._describe,
            "metrics": self._metrics,
            "timeline": self._timeline,
            "group": self._group,
            "samples": self._samples,
            "config": self._config,
            "findings": self._findings,
        }
        routes = [Route("/", _first, methods=["GET"]), Route("/data/metrics.csv", self._csv, methods=["GET"])]
        routes += [Route("/favicon.ico", _no_icon, methods=["GET"])]  # browsers ask for it, and complain about a 404
        routes += [Route(f"/{view}", _page, methods=["GET"]) for view in VIEWS]
        routes += [Route(f"/static/{name}", _file(name), methods=["GET"]) for name in (*SCRIPTS, *STYLES)]
        return routes + [Route(f"/data/{name}", _answer(answer), methods=["GET"]) for name, answer in answers.items()]

    def _run(self, request: Request) -> RunFiles:
        number = _whole(request, "run", 0)
        if number is None or not 0 <= number < len(self._runs):
            raise ValueError(f"run={number}: there are runs 0 to {len(self._runs) - 1}.")
        return self._runs[number]

    def _describe(self, request: Request) -> object:
        return [run.describe() for run in self._runs]

    def _metrics(self, request: Request) -> object:
        run, names = self._run(request), request.query_params.getlist("name")
        most = min(max(_whole(request, "points", _POINTS) or _POINTS, 10), _MOST_POINTS)
        run.update()
        return {name: run.series.thinned(name, most) for name in names[:100]}

    def _timeline(self, request: Request) -> object:
        return self._run(request).timeline(*(_whole(request, name) for name in ("first", "last", "seconds")))

    def _group(self, request: Request) -> object:
        return self._run(request).group(_whole(request, "step") or 0, _whole(request, "group", -1))

    def _samples(self, request: Request) -> object:
        return self._run(request).samples(request.query_params)

    def _config(self, request: Request) -> object:
        return self._run(request).settings()

    def _findings(self, request: Request) -> object:
        return self._run(request).findings()

    def _csv(self, request: Request) -> Response:
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["run", "metric", "step", "value"])
        for run in self._runs:
            run.update()
            for name in request.query_params.getlist("name")[:100]:
                steps, values = run.series.columns.get(name, ([], []))
                writer.writerows([run.name, name, step, value] for step, value in zip(steps, values, strict=True))
        headers = {"Content-Disposition": 'attachment; filename="metrics.csv"'}
        return PlainTextResponse(text.getvalue(), headers=headers, media_type="text/csv")


class Guard:
    """ASGI middleware: adds headers to every answer, and refuses requests without the token if there is one."""

    def __init__(self, app: ASGIApp, token: str):
        """Wraps the application `app`; `token` is required in the address or a cookie, '' requires none."""
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        token = request.query_params.get("token") or request.cookies.get(_COOKIE) or ""
        refused = bool(self._token) and not hmac.compare_digest(token.encode(), self._token.encode())

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = dict(_HEADERS)
                if self._token and not refused and "token" in request.query_params:
                    more["Set-Cookie"] = f"{_COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        if refused:
            response = PlainTextResponse(
                "The address has no token or a wrong one: use the address that podrl.view printed.", 403
            )
            await response(scope, receive, answer)
        else:
            await self._app(scope, receive, answer)


def application(runs: Sequence[RunFiles], *, token: str = "", hosts: Sequence[str] = ()) -> ASGIApp:
    """Builds the ASGI application.

    Args:
      runs: the run directories to serve.
      token: text that a request must have in its address or cookie; '' requires none.
      hosts: host names that a request may use. Other names are refused, so that pages of other sites cannot send
        requests. () allows only the names of the local machine.
    """
    app: Any = Starlette(routes=Pages(runs).routes())
    app = TrustedHostMiddleware(app, allowed_hosts=list(hosts or ("127.0.0.1", "localhost", "testserver")))
    return Guard(app, token)


def _page(request: Request) -> Response:
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    scripts = "".join(f'<script src="/static/{name}"></script>' for name in SCRIPTS)
    return Response(page(styles, scripts), media_type="text/html")


def _no_icon(request: Request) -> Response:
    return Response(status_code=204)


def _first(request: Request) -> Response:
    return RedirectResponse("/curves" + (f"?{request.url.query}" if request.url.query else ""))


def _file(name: str) -> Callable[[Request], Response]:
    kind = "text/javascript" if name.endswith(".js") else "text/css"
    return lambda request: FileResponse(STATIC / name, media_type=kind)


def _answer(make: Callable[[Request], object]) -> Callable[[Request], Response]:
    """Returns an endpoint that answers with JSON; a ValueError becomes an answer with status 400 and one sentence.

    The endpoint is not a coroutine, so it runs in a thread of Starlette's pool.
    """

    def answer(request: Request) -> Response:
        try:
            return JSONResponse(finite(make(request)))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)

    return answer


def _whole(request: Request, name: str, default: int | None = None) -> int | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    if not text.lstrip("-").isdigit() or len(text) > 15:
        raise ValueError(f"{name}={text[:40]!r} is not a whole number.")
    return int(text)
