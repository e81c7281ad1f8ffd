"""The view command: `python -m podrl.view RUN [RUN2 ...]` serves a page over run directories on this machine."""

import argparse
import ipaddress
import json
import pathlib
import secrets
import socket
import sys
from collections.abc import Sequence

from podrl.config import install
from podrl.rundir.spans import chrome_trace
from podrl.runtime.arguments import Parser, as_sentence
from podrl.storage.storage import StorageError
from podrl.view.listing import listing
from podrl.view.report import report
from podrl.view.runs import RunFiles

_LOOPBACK = "127.0.0.1"


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.view", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, local or gs://")
    parser.add_argument("--port", type=int, default=8777, help="0 takes any free port")
    parser.add_argument("--host", default=_LOOPBACK, help="address to listen at; any but loopback asks for a token")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="print the N samples of lowest reward, and serve nothing"
    )
    parser.add_argument("--html", metavar="FILE", help="write the page as one file, and serve nothing")
    parser.add_argument(
        "--chrome", metavar="FILE", help="write the spans of the first run for Perfetto, and serve nothing"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command: serves the page until it is interrupted, or prints samples and writes files as arguments say.

    Returns:
      The exit code: 0, or 1 after an error that was printed.
    """
    args = _parser().parse_args(argv[1:])
    try:
        runs = [RunFiles(place) for place in args.runs]
        if args.samples is not None:
            if args.samples < 1:
                raise ValueError(f"--samples={args.samples} must be 1 or more.")
            print("\n\n".join(listing(run, args.samples) for run in runs))
        if args.html:
            pathlib.Path(args.html).write_text(report(runs))
        if args.chrome:
            pathlib.Path(args.chrome).write_text(json.dumps(chrome_trace(runs[0].spans())))
        if args.html or args.chrome or args.samples:
            return 0
        return _serve(runs, args.host, args.port)
    except (ValueError, OSError, StorageError) as error:
        print(f"podrl.view: error: {as_sentence(error)}", file=sys.stderr)
        return 1


def _serve(runs: Sequence[RunFiles], host: str, port: int) -> int:
    try:
        import uvicorn

        from podrl.view.server import application
    except ImportError as error:
        raise ValueError(f"podrl.view needs {error.name}: {install('view')}, or give --html=FILE.") from None
    token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
    if not 0 <= port <= 65535:
        raise ValueError(f"--port={port} is no port: it must lie in [0, 65535].")
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    with listening:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
        print(f"{', '.join(run.name for run in runs)}: {address}  (Ctrl-C ends)", flush=True)
        hosts = ["*"] if token else ["127.0.0.1", "localhost", "[::1]"]
        app = application(runs, token=token, hosts=hosts)
        # uvicorn would choose httptools if it is installed, and would then set no bound on the head of a request.
        config = uvicorn.Config(app, http="h11", log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv))
