"""A server with those parts of the Hugging Face hub's API that podrl needs; it can break off a download half-way."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator


class Hub:
    """The repositories of the test's hub, and the requests that the hub received.

    Attributes:
      url: address, the value for HF_ENDPOINT.
      files: content by path for each repository, 'models/ORG/NAME' or 'datasets/ORG/NAME'.
      gated: repositories that need the token 'secret'.
      cuts: paths whose next download breaks off half-way.
      asked: (method, path, Range header) of every request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, dict[str, bytes]] = {}
        self.history: dict[tuple[str, str], dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cuts: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []

    def commit(self, repo: str) -> str:
        """Returns the commit of a repository's only branch; old commits stay when the branch moves."""
        made = hashlib.sha1(json.dumps({k: _etag(v) for k, v in self.files[repo].items()}).encode()).hexdigest()
        self.history[repo, made] = dict(self.files[repo])
        return made

    def at(self, repo: str, revision: str) -> dict[str, bytes] | None:
        """Returns the files of a branch or commit; None if there is no such branch or commit."""
        commit = self.commit(repo)
        return self.history.get((repo, commit if revision == "main" else revision))


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """Runs a hub on a port of this machine."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        self._note()
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+)|/tree/([^/]+)/?)?", path):
            kind, name, revision, tree = found.groups()
            repo = f"{kind}/{name}"
            if not self._allowed(repo, listing=True):
                return
            asked = revision or tree or "main"
            commit = self.state.commit(repo) if asked == "main" else asked
            if (files := self.state.at(repo, asked)) is None:
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            if tree:
                rows = [{"type": "file", "path": p, "size": len(c), "oid": _etag(c)} for p, c in files.items()]
                self._answer(200, json.dumps(rows).encode())
            else:
                siblings = [{"rfilename": p} for p in files]
                self._answer(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
            return
        self._file(body=True)

    def do_POST(self) -> None:
        self._note()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != "Bearer secret":
            self._answer(401, b'{"error": "Invalid credentials"}')
        elif self.path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.state.files.setdefault(f"models/{name}", {})
            self._answer(200, json.dumps({"url": f"{self.state.url}/{name}", "id": name}).encode())
        elif self.path == "/api/validate-yaml":
            self._answer(200, b'{"errors": [], "warnings": []}')
        elif "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(content)["files"]
            ]
            self._answer(200, json.dumps({"files": files}).encode())
        else:
            repo = re.fullmatch(r"/api/(models/[^/]+/[^/]+)/commit/main", self.path.partition("?")[0])
            assert repo is not None, self.path
            for line in content.splitlines():
                if (item := json.loads(line))["key"] == "file":
                    self.state.files[repo[1]][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            told = {"commitUrl": f"{self.state.url}/{repo[1].removeprefix('models/')}/commit/{'0' * 40}"}
            self._answer(200, json.dumps(told | {"commitOid": "0" * 40}).encode())

    def _note(self) -> None:
        self.state.asked.append((self.command, self.path, self.headers.get("Range", "")))

    def _allowed(self, repo: str, *, listing: bool = False) -> bool:
        if repo not in self.state.files:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return False
        if repo in self.state.gated and self.headers.get("Authorization") != "Bearer secret":
            self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
            return False
        return True

    def _file(self, *, body: bool) -> None:
        found = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path.partition("?")[0])
        repo = f"{'datasets' if found and found[1] else 'models'}/{found[2]}" if found else ""
        if not self._allowed(repo):
            return
        assert found is not None
        content = (self.state.at(repo, found[3]) or {}).get(found[4])
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        more = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": found[3], "Accept-Ranges": "bytes"}
        start = int(re.findall(r"bytes=(\d+)-", self.headers.get("Range", ""))[0]) if self.headers.get("Range") else 0
        if start:
            more["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = body and found[4] in self.state.cuts
        if body:
            self.state.cuts.discard(found[4])
        self._answer(206 if start else 200, content[start:], more, body=body, cut=cut)

    def _answer(
        self, code: int, content: bytes, more: dict[str, str] | None = None, *, body: bool = True, cut: bool = False
    ) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
