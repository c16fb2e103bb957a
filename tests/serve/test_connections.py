"""Connections that are slow, silent, unread or too many, with limits of a fraction of a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest
import uvicorn

from trimtab.serve.front import HttpServer
from trimtab.serve.http import connections
from trimtab.serve.http.application import JSON, Application, Inference, Reply
from trimtab.serve.http.connections import Connection, most_connections

LARGE = 30_000_000


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers as many bytes as the path says, after it has read the body."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    size = LARGE if scope["path"] == "/large" else 2
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(size).encode())]})
    await send({"type": "http.response.body", "body": b"x" * size})


class Beside(Application):
    """Answers around ASGI, a moment later, as many bytes as the path says."""

    def __init__(self) -> None:
        """Without a repository."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer what does not go around ASGI, such as a request that is sent before the last one was answered."""
        await application(scope, receive, send)

    def inference(self, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Inference | None:
        """Every request is one to infer."""
        return Inference([url.decode()], dict(headers))

    def infer(self, inference: Inference, body: Any, reply: Callable[[Reply], None]) -> None:
        """Answer."""
        size = LARGE if inference.words == ["/large"] else 2
        asyncio.get_running_loop().call_later(0.01, reply, Reply(200, JSON, [], [b"x" * size]))


WAYS = pytest.mark.parametrize(
    ("app", "asked"),
    [
        (application, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"),
        (Beside(), b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"),
    ],
    ids=["asgi", "beside"],
)
"""Requests through ASGI, and around it."""


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    config = uvicorn.Config(app, port=0, http=Connection, ws="none", lifespan="off", log_level="error", proxy_headers=False)
    server = HttpServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1], server
    server.should_exit = True
    async with asyncio.timeout(5):
        await task


def run(use: Callable[[int, uvicorn.Server], Awaitable[None]], app: Any = application) -> None:
    async def main() -> None:
        async with served(app) as (port, server), asyncio.timeout(20):
            await use(port, server)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits."""
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)
    monkeypatch.setattr(connections, "READ_S", 0.3)
    monkeypatch.setattr(Connection, "most", None)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"POST / HTTP/1.1\r\nHo", 408),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 408),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", 408),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", 408),
        (b"no HTTP at all\r\n\r\n", 400),
    ],
)
def test_a_request_that_does_not_arrive_is_answered_and_closed(sent: bytes, status: int | None) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await reader.read()  # until the server closes
        assert answer.startswith(b"" if status is None else b"HTTP/1.1 %d " % status)
        assert (b'{"error":"' in answer) == (status is not None)
        writer.close()

    run(use)


def test_a_client_that_dribbles_is_cut_off_and_a_slow_one_in_time_is_not() -> None:
    async def dribble(port: int, pause_s: float) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(pause_s)
            if writer.is_closing() or reader.at_eof():
                break
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b"reset"

    async def use(port: int, server: uvicorn.Server) -> None:
        slow, fast = await asyncio.gather(dribble(port, 0.05), dribble(port, 0.001))
        assert not slow.startswith(b"HTTP/1.1 200")
        assert fast.startswith(b"HTTP/1.1 200")

    run(use)


@WAYS
def test_a_client_that_does_not_read_its_answer_is_cut_off(app: Any, asked: bytes) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(asked % b"/large")
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        writer.close()
        reader, other = await asyncio.open_connection("127.0.0.1", port)
        other.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        other.close()

    run(use, app)


@WAYS
def test_pipelined_requests_are_answered_in_order_and_a_connection_lives_on(app: Any, asked: bytes) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = asked % b"/"
        writer.write(request * 3 + request[:9])
        for _ in range(3):
            assert (await reader.readuntil(b"\r\n\r\nxx")).startswith(b"HTTP/1.1 200")
        writer.write(request[9:])
        assert (await reader.readuntil(b"\r\n\r\nxx")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.5)  # longer than a request may take: it is idle between requests
        writer.write(request)
        last = await reader.readuntil(b"\r\n\r\nxx")
        assert last.startswith(b"HTTP/1.1 200")
        assert last.count(b"\r\ndate: ") == 1, "a server with a clock tells the time"
        writer.close()

    run(use, app)


def test_connections_beyond_the_limit_are_refused_and_taken_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 2)

    async def use(port: int, server: uvicorn.Server) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while len(server.server_state.connections) < 2:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        for _, one in [*held, (reader, writer)]:
            one.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200")
        writer.close()

    run(use)


def test_half_a_request_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 60.0)

    async def use(port: int, server: uvicorn.Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        await asyncio.sleep(0.1)
        assert server.server_state.connections

    run(use)  # within the five seconds of served()


@WAYS
def test_a_connection_on_which_nothing_is_asked_is_closed_in_time(app: Any, asked: bytes) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        server.config.timeout_keep_alive = 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(asked % b"/")
            await reader.readuntil(b"xx")
            await asyncio.sleep(0.6)  # twice as long as the limit together
        assert await reader.read() == b""
        writer.close()

    run(use, app)


def test_open_files_leave_room_for_instances() -> None:
    assert most_connections() >= 16
