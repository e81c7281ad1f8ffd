"""The front's process: keys, retries, clients that hang up, limits, and the two forms of answers."""

import contextlib
import http.client
import json
import pathlib
import socket
import threading
import time

import pytest

from podrl.environments.front import FrontSettings
from podrl.environments.wire.asks import Answer, Choice, Part, Refused
from podrl.runtime.user_code import Limits
from podrl.serve import Desk

pytest.importorskip("uvicorn", reason="needs the extra [agents]")

CHAT, IDS = "/v1/chat/completions", "/inference/v1/generate"
HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
BODY = 1 << 16  # bytes, at most, of a body in these tests


SETTINGS = FrontSettings(max_requests=3, body_bytes=BODY, grace_s=0.3, context_tokens=64)


@pytest.fixture
def desk():
    with Desk(SETTINGS, Limits()) as desk:
        yield desk


@pytest.fixture(scope="module")
def shared():
    """A desk for tests that leave nothing open."""
    with Desk(SETTINGS, Limits()) as desk:
        yield desk


class Client:
    """A request on a connection of its own, sent at once; `status` and `body` wait for the response."""

    def __init__(self, desk, path=CHAT, body=None, key=None, retry=None, method=None):
        host, _, port = desk.address.removeprefix("http://").removesuffix("/v1").partition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        headers = {"Authorization": f"Bearer {desk.key if key is None else key}"}
        headers |= {"x-stainless-retry-count": str(retry)} if retry is not None else {}
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        self._connection.request(method or ("POST" if content is not None else "GET"), path, content, headers)

    def response(self):
        response = self._connection.getresponse()
        content = response.read().decode()
        self._connection.close()
        return response.status, content

    def json(self):
        status, content = self.response()
        return status, json.loads(content)

    def hang_up(self):
        self._connection.close()


def events(desk, count, seconds=30.0):
    """The next `count` requests, or drops, of a desk."""
    found, end = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        found += desk.poll(0.05)
    return found


def answer(*texts, id="a1"):
    return Answer(id, 5, [1, 2, 3], [Choice(text, [4, 5], [-0.5, -1.5], ["h", "o"], "eos") for text in texts])


def test_an_answer_whole_and_streamed(shared):
    client = Client(shared, body=HI | {"return_token_ids": True, "n": 2})
    ((number, wanted),) = events(shared, 1)
    assert wanted.ask.messages == [{"role": "user", "content": "hi"}] and wanted.ask.samples == 2
    shared.tell(number, answer("ho", "ha"))
    status, body = client.json()
    assert status == 200 and [choice["message"]["content"] for choice in body["choices"]] == ["ho", "ha"]
    assert body["prompt_token_ids"] == [1, 2, 3] and body["choices"][0]["token_ids"] == [4, 5]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}

    client = Client(shared, body=HI | {"stream": True, "stream_options": {"include_usage": True}})
    ((number, _),) = events(shared, 1)
    shared.tell(number, Part("a2", 5, 0, Choice("h", [4], [-0.5])))
    shared.tell(number, answer("ho", id="a2"))
    status, content = client.response()
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert status == 200 and lines[-1] == "[DONE]" and {chunk["id"] for chunk in chunks} == {"chatcmpl-a2"}
    said = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert [text for text in said if text] == ["h", "o"] and chunks[-1]["usage"]["completion_tokens"] == 2


def test_a_refusal_of_the_owner_has_its_status_also_for_streams(shared):
    for stream in (False, True):
        client = Client(shared, body=HI | {"stream": stream})
        ((number, _),) = events(shared, 1)
        shared.tell(number, Refused(400, "context_length_exceeded", "The maximum context length is 64.", "messages"))
        status, body = client.json()
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"body": HI, "key": "podrl-AAAAAAAAAAAAAAAAAAAAAA"}, 401, "invalid_api_key"),
        ({"body": HI, "key": ""}, 401, "invalid_api_key"),
        ({"path": "/v1/embeddings", "body": HI}, 404, "not_found"),
        ({"method": "GET"}, 405, "method_not_allowed"),
        ({"body": b"{"}, 400, "invalid_json"),
        ({"body": b"[" * 20000}, 400, "invalid_json"),
        ({"body": [1]}, 400, "invalid_type"),
        ({"body": b" " * (BODY + 1)}, 413, "request_too_large"),
        ({"body": HI | {"model": "gpt-5"}}, 404, "model_not_found"),
        ({"body": HI | {"response_format": {"type": "json_object"}}}, 400, "unsupported_parameter"),
        (
            {"body": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}},
            400,
            "unsupported_parameter",
        ),
    ],
)
def test_a_request_that_is_not_served_is_told_why(shared, request_, status, code):
    got, body = Client(shared, **request_).json()
    assert (got, body["error"]["code"]) == (status, code) and body["error"]["message"].endswith(".")
    assert not shared.poll(0.0)


def test_a_body_of_chunks_is_bounded_too(shared):
    host, _, port = shared.address.removeprefix("http://").removesuffix("/v1").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as plain:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {shared.key}\r\n"
        head += "Transfer-Encoding: chunked\r\n\r\n"
        plain.sendall(head.encode() + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 3 + b"0\r\n\r\n")
        assert b" 413 " in plain.recv(100)


def test_models_are_listed_with_their_context(shared):
    status, body = Client(shared, "/v1/models").json()
    assert status == 200 and [one["id"] for one in body["data"]] == ["policy", "policy:aside"]
    assert body["data"][0]["max_model_len"] == 64
    assert Client(shared, "/v1/models", key="x").response()[0] == 401
    assert Client(shared, "/health", key="x").response()[0] == 200


def test_a_key_ends_with_its_episode(desk):
    client = Client(desk, body=HI)
    events(desk, 1)
    desk.end_key()
    assert client.json()[1]["error"]["code"] == "episode_ended"
    assert Client(desk, body=HI).response()[0] == 401


def test_a_retry_joins_the_request_under_way_and_the_last_answer(desk):
    first = Client(desk, body=HI)
    ((number, _),) = events(desk, 1)
    again = Client(desk, body=HI, retry=1)
    twin = Client(desk, body=HI | {"seed": 1}, retry=1)  # another body
    ((other, _),) = events(desk, 1)
    desk.tell(other, answer("other"))
    desk.tell(number, answer("ho"))
    assert [client.json()[1]["choices"][0]["message"]["content"] for client in (first, again, twin)] == [
        *("ho", "ho"),
        "other",
    ]
    assert Client(desk, body=HI, retry=2).json()[1]["id"] == "chatcmpl-a1"
    assert not desk.poll(0.0)
    own = Client(desk, body=HI)  # no retry: a request of its own
    assert len(events(desk, 1)) == 1
    own.hang_up()


def test_a_retry_joins_a_stream_from_its_beginning(desk):
    body = HI | {"stream": True}
    first = Client(desk, body=body)
    ((number, _),) = events(desk, 1)
    desk.tell(number, Part("a1", 5, 0, Choice("h", [4], [-0.5])))
    first.hang_up()
    again = Client(desk, body=body, retry=1)
    desk.tell(number, answer("ho"))
    content = again.response()[1]
    assert '"content": "h"' in content and '"content": "o"' in content


def test_a_client_that_hangs_up_drops_its_request_unless_it_comes_back(desk):
    client = Client(desk, body=HI)
    ((number, _),) = events(desk, 1)
    client.hang_up()
    back = Client(desk, body=HI, retry=1)
    time.sleep(0.5)  # longer than the grace
    assert not desk.poll(0.0)
    back.hang_up()
    assert events(desk, 1) == [(number, None)]
    late = Client(desk, body=HI, retry=2)  # a new request
    ((newer, wanted),) = events(desk, 1)
    late.hang_up()
    assert newer != number and wanted is not None


def test_an_answer_that_reached_nobody_is_dropped(desk):
    client = Client(desk, body=HI)
    ((number, _),) = events(desk, 1)
    client.hang_up()
    time.sleep(0.1)
    desk.tell(number, answer("ho"))
    assert events(desk, 1) == [(number, None)]


def test_requests_beyond_the_most_of_a_key_wait(desk):
    clients = [Client(desk, body=HI | {"seed": i}) for i in range(4)]
    first = events(desk, 3)
    time.sleep(0.2)
    assert not desk.poll(0.0)
    desk.tell(first[0][0], answer("ho"))
    ((third, _),) = events(desk, 1)
    for number in (first[1][0], first[2][0], third):
        desk.tell(number, answer("ho"))
    assert [client.response()[0] for client in clients] == [200] * 4


def test_many_requests_of_a_connection(shared):
    """Keep-alive: a client's connection is good for its next request."""
    host, _, port = shared.address.removeprefix("http://").removesuffix("/v1").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for _ in range(3):
        connection.request("POST", IDS, json.dumps({"token_ids": [1]}), {"Authorization": f"Bearer {shared.key}"})
        ((number, wanted),) = events(shared, 1)
        assert wanted.ask.ids == [1]
        shared.tell(number, answer("ho"))
        assert json.loads(connection.getresponse().read())["choices"][0]["token_ids"] == [4, 5]
    connection.close()


def test_the_address_must_be_free(shared):
    port = int(shared.address.removesuffix("/v1").rpartition(":")[2])
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
        Desk(FrontSettings(port=port), Limits())


def test_no_secret_is_in_the_process_list(shared):
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            assert shared.key.encode() not in path.read_bytes()


def test_bodies_of_many_clients_at_once(shared):
    """Requests that wait for their turn are read one by one and none is lost."""
    clients = [Client(shared, body=HI | {"user": "x" * 1000, "seed": i}) for i in range(12)]
    stop = threading.Event()

    def owner():
        while not stop.is_set():
            for number, _ in shared.poll(0.05):
                shared.tell(number, answer("ho"))

    thread = threading.Thread(target=owner)
    thread.start()
    try:
        assert [client.response()[0] for client in clients] == [200] * 12
    finally:
        stop.set()
        thread.join()
