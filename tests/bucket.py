"""A bucket of a local storage emulator: tests write and read objects in it."""

import contextlib
import http
import json
import pathlib
import urllib.error
import urllib.parse
import urllib.request

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

from podrl.runtime.local_pod import free_ports


def _with_generation(download):
    """Adds the headers with an object's generation to its downloads, as Google Cloud Storage does; without them
    tensorstore cannot overwrite an object."""

    def answer(request, response, storage, *args, **kwargs):
        with contextlib.suppress(NotFound):
            found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
            response["x-goog-generation"] = found["generation"]
            response["x-goog-metageneration"] = found["metageneration"]
        return download(request, response, storage, *args, **kwargs)

    return answer


def _with_precondition(insert):
    """Answers 412 to a write whose ifGenerationMatch is not the object's generation, as Google Cloud Storage does."""

    def answer(request, response, storage, *args, **kwargs):
        wanted = request.query.get("ifGenerationMatch")
        if wanted:
            name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
            try:
                there = storage.get_file_obj(request.params["bucket_name"], name)["generation"]
            except NotFound:
                there = "0"
            if wanted[0] != there:
                response.status = http.HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": 412, "message": f"{name} is of generation {there}."}})
                return None
        return insert(request, response, storage, *args, **kwargs)

    return answer


def _with_refusals(insert):
    """Answers 503 to writes of objects below `Bucket.refused`, as an overloaded service does; the clients then try
    again."""

    def answer(request, response, storage, *args, **kwargs):
        meta = (request.data or {}).get("meta", {}) if isinstance(request.data, dict) else {}
        name = request.query["name"][0] if "name" in request.query else meta.get("name", "")
        if Bucket.refused and name.startswith(Bucket.refused):
            Bucket.refusals += 1
            response.status = http.HTTPStatus.SERVICE_UNAVAILABLE
            return None
        return insert(request, response, storage, *args, **kwargs)

    return answer


objects.download = _with_generation(objects.download)
objects.insert = _with_refusals(_with_precondition(objects.insert))


class Bucket:
    """A bucket served over the JSON API of Google Cloud Storage from this process; used as a `with` block.

    Attributes:
      refused: prefix of object names whose writes are refused; '' for none.
      refusals: number of refused requests.
    """

    NAME = "bucket"
    refused = ""
    refusals = 0

    def __init__(self):
        # The server reads its handlers when it is imported, so the handlers above must be set before this import.
        from gcp_storage_emulator.server import create_server

        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._server = create_server("127.0.0.1", port, in_memory=True, default_bucket=self.NAME)

    def __enter__(self) -> "Bucket":
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop()

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that make gcsfs, Google's client and tensorstore use this server."""
        return {
            "STORAGE_EMULATOR_HOST": self._url,
            "TENSORSTORE_GCS_HTTP_URL": self._url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # "true" needs gRPC, which this server does not speak
            "NO_GCE_CHECK": "true",
        }

    def names(self, prefix: str = "") -> list[str]:
        """Lists names of the objects below a prefix."""
        query = urllib.parse.urlencode({"prefix": prefix})
        listed = json.loads(self._get(f"/storage/v1/b/{self.NAME}/o?{query}"))
        assert "nextPageToken" not in listed
        return sorted(item["name"] for item in listed.get("items", []))

    def read(self, name: str) -> bytes:
        """Reads the content of an object; b'' when there is none."""
        try:
            return self._get(f"/storage/v1/b/{self.NAME}/o/{urllib.parse.quote(name, safe='')}?alt=media")
        except urllib.error.HTTPError as error:
            assert error.code == 404, error
            return b""

    def put(self, name: str, content: bytes) -> str:
        """Writes an object; returns its gs:// URL."""
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        url = f"{self._url}/upload/storage/v1/b/{self.NAME}/o?{query}"
        urllib.request.urlopen(urllib.request.Request(url, content, method="POST"), timeout=30).close()
        return f"gs://{self.NAME}/{name}"

    def download(self, prefix: str, target: pathlib.Path) -> pathlib.Path:
        """Writes the objects below `prefix` as files below `target`."""
        for name in self.names(prefix + "/"):
            file = target / name.removeprefix(prefix + "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                file.write_bytes(self.read(name))
        return target

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            return answer.read()
