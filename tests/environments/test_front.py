"""Tests the front's process: keys, retries, clients that hang up, limits, and whole and streamed answers."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import pathlib
import socket
import threading

import pytest
from waits import PATIENCE_S, until

from podrl.environments.front import FrontSettings
from podrl.environments.wire.requests import Answer, AnswerPart, Choice, RefusedRequest
from podrl.serve import PolledFront
from podrl.workers.user_code import Limits

pytest.importorskip("httptools", reason="needs the extra [agents]")

from podrl.environments import front_http, front_worker

CHAT, IDS = "/v1/chat/completions", "/inference/v1/generate"
HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def nested(depth):
    """Makes the body of a request whose JSON nests `depth` arrays and objects."""
    body = HI | {"tools": [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]}
    deep = '{"properties":' * (depth - 5) + "{}" + "}" * (depth - 5)
    return json.dumps(body).replace('"DEEP"', deep).encode()


BODY = 1 << 16  # bytes; the longest body of a request that the fronts of these tests accept
# With this `grace_s` every retry of a client comes in time; PATIENCE_S only ends a test that hangs.
SETTINGS = FrontSettings(max_requests=3, body_bytes=BODY, grace_s=2 * PATIENCE_S, context_tokens=64, page=True)


@pytest.fixture
def front():
    """Yields a front that drops a request 50 ms after its client has hung up."""
    with PolledFront(dataclasses.replace(SETTINGS, grace_s=0.05), Limits()) as front:
        yield front


@pytest.fixture(scope="module")
def shared():
    """Yields a front that all tests share which leave no request open."""
    with PolledFront(SETTINGS, Limits()) as front:
        yield front


def place(front):
    """Returns host and port of a front."""
    host, _, port = front.address.removeprefix("http://").removesuffix("/v1").partition(":")
    return host, int(port)


class Client:
    """A request on its own connection, sent at once; `response` and `json` wait for the response."""

    def __init__(self, front, path=CHAT, body=None, key=None, retry=None, method=None):
        self._connection = http.client.HTTPConnection(*place(front), timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {front.key if key is None else key}"}
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


def events(front, count):
    """Waits for the next `count` events of a front: (number, request), or (number, None) if a request was dropped."""
    found = []
    until(lambda: found.extend(front.poll(0.0)) or len(found) >= count, f"{count} requests or drops")
    return found


def answer(*texts, id="a1"):
    return Answer(id, 5, [1, 2, 3], [Choice(text, [4, 5], [-0.5, -1.5], ["h", "o"], "eos") for text in texts])


def test_an_answer_whole_and_streamed(shared):
    client = Client(shared, body=HI | {"return_token_ids": True, "n": 2})
    ((number, request),) = events(shared, 1)
    assert request.model_request.messages == [{"role": "user", "content": "hi"}] and request.model_request.samples == 2
    shared.reply(number, answer("ho", "ha"))
    status, body = client.json()
    assert status == 200 and [choice["message"]["content"] for choice in body["choices"]] == ["ho", "ha"]
    assert body["prompt_token_ids"] == [1, 2, 3] and body["choices"][0]["token_ids"] == [4, 5]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}

    client = Client(shared, body=HI | {"stream": True, "stream_options": {"include_usage": True}})
    ((number, _),) = events(shared, 1)
    shared.reply(number, AnswerPart("a2", 5, 0, Choice("h", [4], [-0.5])))
    shared.reply(number, answer("ho", id="a2"))
    status, content = client.response()
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert status == 200 and lines[-1] == "[DONE]" and {chunk["id"] for chunk in chunks} == {"chatcmpl-a2"}
    contents = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert [text for text in contents if text] == ["h", "o"] and chunks[-1]["usage"]["completion_tokens"] == 2


def test_the_page_shows_answers_to_those_who_have_the_key(shared):
    client = Client(shared, body={"model": "policy", "messages": [{"role": "user", "content": "<i>page?"}]})
    ((number, _),) = events(shared, 1)
    shared.reply(number, answer("shown"))
    assert client.response()[0] == 200
    status, text = Client(shared, path=f"/?key={shared.key}").response()
    assert status == 200 and "&lt;i&gt;page?" in text and "shown" in text
    assert [Client(shared, path=path).response()[0] for path in ("/", "/?key=podrl-AAAAAAAAAAAAAAAAAAAAAA")] == [
        401,
        401,
    ]


def test_a_refusal_of_the_owner_has_its_status_also_for_streams(shared):
    for stream in (False, True):
        client = Client(shared, body=HI | {"stream": stream})
        ((number, _),) = events(shared, 1)
        shared.reply(
            number, RefusedRequest(400, "context_length_exceeded", "The maximum context length is 64.", "messages")
        )
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
        *(({"body": nested(depth)}, 400, "invalid_json") for depth in (65, 500, 960)),
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


def test_a_body_that_nests_64_deep_is_served(shared):
    client = Client(shared, body=nested(64))
    ((number, _),) = events(shared, 1)
    shared.reply(number, answer("ho"))
    assert client.json()[0] == 200


def test_a_body_of_chunks_is_bounded_too(shared):
    with socket.create_connection(place(shared), timeout=PATIENCE_S) as plain:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {shared.key}\r\n"
        head += "Transfer-Encoding: chunked\r\n\r\n"
        plain.sendall(head.encode() + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 3 + b"0\r\n\r\n")
        assert b" 413 " in plain.makefile("rb").readline()


@pytest.mark.parametrize("where", ["head", "trailers"])
def test_a_head_is_bounded_too(shared, where):
    """A head or trailers of megabytes are refused before the key is read: clients without a key could otherwise fill
    the server's memory."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += "\r\n1\r\n{\r\n0\r\n" if where == "trailers" else ""
    with socket.create_connection(place(shared), timeout=PATIENCE_S) as plain:
        with contextlib.suppress(OSError):  # the server has closed the connection
            plain.sendall(head.encode() + b"x: " + b"y" * (4 << 20))
        with contextlib.suppress(ConnectionResetError):
            assert b" 400 " in plain.makefile("rb").readline()


def exchanged(front, *pieces):
    """Sends pieces of bytes, each after the first line of the answer to the piece before it; returns all bytes that
    came back."""
    with socket.create_connection(place(front), timeout=PATIENCE_S) as plain:
        reader, lines = plain.makefile("rb"), []
        for piece in pieces:
            plain.sendall(piece)
            lines.append(reader.readline())
        return b"".join([*lines, reader.read()])


def test_requests_in_one_piece_are_answered_in_turn(shared):
    health = b"GET /health HTTP/1.1\r\n\r\n"
    came = exchanged(shared, health * 2 + b"GET /health?x HTTP/1.0\r\n\r\n")
    assert came.count(b"HTTP/1.1 200 OK") == 3 and came.count(b"connection: close") == 1
    came = exchanged(shared, health * 200)  # without a limit, clients without a key could fill the server's memory
    assert b" 400 " in came and b"More than 64 requests wait" in came


def test_bytes_that_are_no_http_are_refused(shared):
    came = exchanged(shared, b"HELO x\r\n\r\n")
    assert came.startswith(b"HTTP/1.1 400 ") and b"The request is not HTTP/1.1: Invalid method" in came


def test_a_client_may_wait_before_it_sends_the_body(shared):
    head = f"POST {CHAT} HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n".encode()
    came = exchanged(shared, head, b"{}")
    assert came.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 401 ") and b"invalid_api_key" in came


def test_an_error_of_the_application_is_an_answer(capsys):
    async def run():
        async def app(client):
            raise ZeroDivisionError

        assert await LocalClient(app, HI).status() == 500

    asyncio.run(run())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_client_that_has_sent_a_large_body_can_hang_up():
    """The server must go on reading after a large body, because otherwise it would not notice that the client hangs
    up."""

    async def run():
        reading = []

        async def app(request):
            assert len(await request.read_body(1 << 20)) == 1 << 17
            reading.append(client.reading)
            await request.send_response(200, "text/plain", b"")

        client = LocalClient(app, b" " * (1 << 17))
        assert not client.reading
        assert await client.status() == 200 and reading == [True]

    asyncio.run(run())


@contextlib.asynccontextmanager
async def served(app):
    """Serves an application on the running event loop, and yields a function that connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        async with front_http.serving(app, listening):
            yield lambda: asyncio.open_connection(*address)


def test_a_client_that_sends_or_reads_nothing_loses_its_connection(monkeypatch):
    monkeypatch.setattr(front_http, "_IDLE_S", 6.0)

    async def run():
        lost = asyncio.Event()

        async def app(client):
            monkeypatch.setattr(front_http, "_IDLE_S", 0.0)
            with contextlib.suppress(ConnectionError):
                while True:
                    await client.send_events("x" * (1 << 20))
            lost.set()

        async with asyncio.timeout(PATIENCE_S), served(app) as connect:
            reader, half = await connect()
            half.write(b"GET / HTTP/1.1\r\nx")
            _, whole = await connect()
            whole.write(b"GET / HTTP/1.1\r\n\r\n")
            await lost.wait()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            half.close()
            whole.close()

    asyncio.run(run())


def test_an_open_request_is_answered_before_the_server_ends():
    async def run():
        began, release, answered = asyncio.Event(), asyncio.Event(), []

        async def app(client):
            began.set()
            await release.wait()
            await client.send_response(200, "text/plain", b"ho")
            answered.append(client)

        async with asyncio.timeout(PATIENCE_S):
            async with served(app) as connect:
                reader, writer = await connect()
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                await began.wait()
                release.set()
            assert answered and (await reader.read()).endswith(b"\r\n\r\nho")
            writer.close()

    asyncio.run(run())


def test_no_retry_joins_a_request_that_never_reached_the_owner(capsys):
    def tell(frame):
        raise RecursionError

    async def run():
        endpoint = front_worker.Endpoint(dataclasses.asdict(SETTINGS), tell)
        endpoint.receive({"open": "e", "key": "k"})
        for retry in range(2):
            assert await LocalClient(endpoint, HI, retry).status() == 500

    asyncio.run(run())
    assert "RecursionError" in capsys.readouterr().err


def test_an_event_of_a_stream_is_one_line():
    """An event has no character that Unicode calls the end of a line, because many clients split a stream at each of
    these characters."""
    event = {"text": "a\x85b\u2028c\u2029d\x0b\x0c\x1c\r\né"}
    line, empty = front_worker._event(event).splitlines()
    assert not empty and json.loads(line.removeprefix("data: ")) == event


def test_a_request_that_offers_another_protocol_is_answered(shared):
    """A first request that offers HTTP/2, as Java's client sends it, is answered in HTTP/1.1."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    connection = http.client.HTTPConnection(*place(shared), timeout=PATIENCE_S)
    connection.request("POST", CHAT, json.dumps(HI), {"Authorization": f"Bearer {shared.key}", **upgrade})
    ((number, _),) = events(shared, 1)
    shared.reply(number, answer("ho"))
    response = connection.getresponse()
    assert response.status == 200 and json.loads(response.read())["id"] == "chatcmpl-a1"
    connection.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 20000, b'{"a": NaN}', b'{"a": -Infinity}', b'"\\ud800"', b'"\xff"', b'{"a": "\\uDFFF x"}'],
)
def test_a_body_that_is_no_json_is_refused(body):
    with pytest.raises(RefusedRequest, match="not JSON"):
        front_http.parse(body)
    # Integers stay exact: if a model wrote them into a call, they are compared with the text that the model wrote.
    assert front_http.parse(b'["\\ud83d\\ude00", 123456789012345678901]') == ["\U0001f600", 123456789012345678901]


def test_half_of_a_surrogate_pair_is_written():
    """JSON that the front writes is read back equal, even if a model wrote half of a surrogate pair into a call."""
    assert json.loads(front_http.to_json({"arguments": "\ud800", "é": 2**70})) == {"arguments": "\ud800", "é": 2**70}


def test_models_are_listed_with_their_context(shared):
    status, body = Client(shared, "/v1/models").json()
    assert status == 200 and [one["id"] for one in body["data"]] == ["policy", "policy:aside"]
    assert body["data"][0]["max_model_len"] == 64
    assert Client(shared, "/v1/models", key="x").response()[0] == 401
    assert Client(shared, "/health", key="x").response()[0] == 200


def test_a_key_ends_with_its_episode(front):
    client = Client(front, body=HI)
    events(front, 1)
    front.end_key()
    assert client.json()[1]["error"]["code"] == "episode_ended"
    assert Client(front, body=HI).response()[0] == 401


def test_a_retry_joins_the_request_under_way_and_the_last_answer(shared):
    first = Client(shared, body=HI)
    ((number, _),) = events(shared, 1)
    again = Client(shared, body=HI, retry=1)
    twin = Client(shared, body=HI | {"seed": 1}, retry=1)  # with another body it is a new request
    ((other, _),) = events(shared, 1)
    shared.reply(other, answer("other"))
    shared.reply(number, answer("ho"))
    assert [client.json()[1]["choices"][0]["message"]["content"] for client in (first, again, twin)] == [
        *("ho", "ho"),
        "other",
    ]
    assert Client(shared, body=HI, retry=2).json()[1]["id"] == "chatcmpl-a1"
    assert not shared.poll(0.0)
    own = Client(shared, body=HI)  # without a retry count it is a new request
    ((number, _),) = events(shared, 1)
    shared.reply(number, answer("ho", id="a2"))
    assert own.json()[1]["id"] == "chatcmpl-a2"


def test_a_retry_joins_a_stream_from_its_beginning(shared):
    body = HI | {"stream": True}
    first = Client(shared, body=body)
    ((number, _),) = events(shared, 1)
    shared.reply(number, AnswerPart("a1", 5, 0, Choice("h", [4], [-0.5])))
    first.hang_up()
    again = Client(shared, body=body, retry=1)
    shared.reply(number, answer("ho"))
    content = again.response()[1]
    assert '"content":"h"' in content and '"content":"o"' in content
    assert not shared.poll(0.0)


def test_a_client_that_hangs_up_drops_its_request(front):
    client = Client(front, body=HI)
    ((number, _),) = events(front, 1)
    client.hang_up()
    assert events(front, 1) == [(number, None)]
    late = Client(front, body=HI, retry=2)  # the first request was dropped, so this retry is a new request
    ((newer, request),) = events(front, 1)
    late.hang_up()
    assert newer != number and request is not None


# In the tests below the application runs in this process, where a test can see what the server has noticed.


class LocalFront:
    """The front's application on the running event loop.

    `graces` holds the callbacks that cancel a request when its client has hung up and `grace_s` is over; the tests call
    them instead of waiting.
    """

    def __init__(self, monkeypatch):
        self.frames, self.graces = [], []
        self.delivered = []
        self.endpoint = front_worker.Endpoint(dataclasses.asdict(SETTINGS), self._on_frame)
        self.endpoint.receive({"open": "e", "key": "k"})
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda _, call: self.graces.append(call))

    def _on_frame(self, frame):
        if "delivered" in frame:
            self.delivered.append(frame["delivered"])
        else:
            self.frames.append(frame)

    def client(self, body, retry=0):
        return LocalClient(self.endpoint, body, retry)

    async def settled(self, count):
        """Waits until `count` frames have come and no task can go on."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.frames) < count:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        return self.frames

    async def left(self):
        """Makes a request whose client hangs up; returns the request's number."""
        client = self.client(HI)
        ((number,),) = [[frame["request"] for frame in await self.settled(1)]]
        await client.hang_up()
        return number

    def end_graces(self):
        while self.graces:
            self.graces.pop()()


class LocalClient(asyncio.Transport):
    """A connection that sends the application one request.

    Attributes:
      received: bytes of the response.
      reading: True while the server reads.
    """

    def __init__(self, app, body, retry=0):
        super().__init__()
        self.received, self.reading, self._closed = b"", True, False
        self._connection = front_http.Connection(app, set())
        self._connection.connection_made(self)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer k\r\nx-stainless-retry-count: {retry}\r\n"
        self._connection.data_received(f"{head}Content-Length: {max(len(content), 2)}\r\n\r\n".encode() + content)

    def write(self, data):
        self.received += data

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self._closed

    def close(self):
        self._closed = True

    async def status(self):
        async with asyncio.timeout(PATIENCE_S):
            while not self.received:
                await asyncio.sleep(0)
        return int(self.received.split(b" ")[1])

    async def hang_up(self):
        """Hangs up, and waits until the application has noticed."""
        self._closed = True
        self._connection.connection_lost(None)
        async with asyncio.timeout(PATIENCE_S):
            await self._connection.work
        assert not self.received


def answer_frame(number, *texts):
    fields, numbers = answer(*texts).to_frame()
    return {"answer": number, "fields": fields}, numbers


def test_a_retry_within_the_grace_keeps_its_request(monkeypatch):
    async def run():
        local = LocalFront(monkeypatch)
        number = await local.left()
        back = local.client(HI, retry=1)
        await local.settled(1)
        local.end_graces()
        assert len(await local.settled(1)) == 1  # the request was neither dropped nor sent again
        await back.hang_up()
        local.end_graces()
        assert (await local.settled(2))[1:] == [{"disconnect": number}] and not local.delivered
        late = local.client(HI, retry=2)  # the first request was dropped, so this retry is a new request
        frames = await local.settled(3)
        assert frames[2]["request"] != number
        await late.hang_up()

    asyncio.run(run())


def test_an_answer_that_reached_nobody_is_dropped(monkeypatch):
    async def run():
        local = LocalFront(monkeypatch)
        number = await local.left()
        local.endpoint.receive(*answer_frame(number, "ho"))
        local.end_graces()
        assert (await local.settled(2))[1:] == [{"disconnect": number}] and not local.delivered

    asyncio.run(run())


def test_requests_beyond_the_most_of_a_key_wait(monkeypatch):
    async def run():
        local = LocalFront(monkeypatch)
        clients = [local.client(HI | {"seed": i}) for i in range(4)]
        first = [frame["request"] for frame in await local.settled(3)]
        assert len(first) == 3
        local.endpoint.receive(*answer_frame(first[0], "ho"))
        fourth = (await local.settled(4))[3]["request"]
        for number in (*first[1:], fourth):
            local.endpoint.receive(*answer_frame(number, "ho"))
        assert [await client.status() for client in clients] == [200] * 4
        assert sorted(local.delivered) == sorted([*first, fourth])

    asyncio.run(run())


def test_a_client_that_stops_sending_is_refused(monkeypatch):
    """A client that sends no further piece of its body for `_SILENT_S` seconds gets status 408.

    Without this limit an unfinished request would be open for as long as its connection lasts.
    """
    monkeypatch.setattr(front_http, "_SILENT_S", 0.0)

    async def run():
        endpoint = front_worker.Endpoint(dataclasses.asdict(SETTINGS), print)
        endpoint.receive({"open": "e", "key": "k"})
        client = LocalClient(endpoint, b"{")
        assert await client.status() == 408 and b"No piece of the body came for 0 s" in client.received

    asyncio.run(run())


def test_many_requests_of_a_connection(shared):
    """A connection stays open for the client's next request (keep-alive)."""
    connection = http.client.HTTPConnection(*place(shared), timeout=PATIENCE_S)
    for _ in range(3):
        connection.request("POST", IDS, json.dumps({"token_ids": [1]}), {"Authorization": f"Bearer {shared.key}"})
        ((number, request),) = events(shared, 1)
        assert request.model_request.ids == [1]
        shared.reply(number, answer("ho"))
        assert json.loads(connection.getresponse().read())["choices"][0]["token_ids"] == [4, 5]
    connection.close()


def test_the_address_must_be_free(shared):
    _, port = place(shared)
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
        PolledFront(FrontSettings(port=port), Limits())


def test_no_secret_is_in_the_process_list(shared):
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            assert shared.key.encode() not in path.read_bytes()


def test_bodies_of_many_clients_at_once(shared):
    """Twelve requests on a key that allows three at once are all answered."""
    clients = [Client(shared, body=HI | {"user": "x" * 1000, "seed": i}) for i in range(12)]
    stop = threading.Event()

    def owner():
        while not stop.is_set():
            for number, _ in shared.poll(0.05):
                shared.reply(number, answer("ho"))

    thread = threading.Thread(target=owner)
    thread.start()
    try:
        assert [client.response()[0] for client in clients] == [200] * 12
    finally:
        stop.set()
        thread.join()
