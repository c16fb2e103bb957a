"""HTTP connections with timeouts and a limit on their number, so that one slow client cannot block the others.

Infer requests do not go through ASGI: a connection hands a request over when its body has arrived, and writes the answer in one
call. No task, no coroutine and no second buffer is made for it, which halves the CPU time that a small request takes.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from trimtab.serve.http.application import Application, Inference, Reply

REQUEST_S = 30.0
"""Seconds within which a request must arrive in full: from the start of a connection, or from its first byte."""
READ_S = 30.0
"""Seconds that a client may leave an answer unread."""
KEEP_ALIVE_S = 75.0
"""Seconds that a connection may stay open between requests: longer than clients and load balancers keep theirs, so that none of
them sends a request into a connection that is being closed."""
RESERVED_FILES = 256
"""Open files that are left for the gRPC server and the sockets of instances."""


def most_connections() -> int:
    """Raise the number of files that this process may open to what the system allows. The most connections within it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 20 if hard == resource.RLIM_INFINITY else max(hard - RESERVED_FILES, 16)


class JoinedWrites:
    """A transport that sends the head of a response together with what is written next: one system call instead of two."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep ``data`` if it is the head of a final response, else send it after the head that is kept."""
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
        else:
            self.flush(data)

    def flush(self, data: bytes = b"") -> None:
        """Send the head that is kept, and ``data``."""
        head, self._head = self._head, b""
        if head or data:
            self._transport.write(head + data)

    def close(self) -> None:
        """Send what is kept, and close."""
        self.flush()
        self._transport.close()


class Exchange(RequestResponseCycle):
    """An infer request on the fast path without ASGI, and its answer. It takes the place of uvicorn's request cycle."""

    message_event = asyncio.Event()
    """uvicorn sets it; nothing waits for it."""
    more_body, keep_alive = True, True
    disconnected = response_started = response_complete = False

    def __init__(self, connection: Connection, application: Application, inference: Inference) -> None:
        self._connection, self._application, self._inference = connection, application, inference
        self._chunks = list[bytes]()

    def receive_chunk(self, chunk: bytes) -> None:
        """Keep a part of the body."""
        self._chunks.append(chunk)

    def received(self) -> None:
        """The body has arrived."""
        self.more_body = False
        chunks = self._chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        # after the parser returns: it would report an error in here as a bad request
        self._connection.loop.call_soon(self._application.infer, self._inference, body, self.reply)

    def reply(self, reply: Reply) -> None:
        """Write the answer, if the client is still there."""
        connection = self._connection
        self.response_started = self.response_complete = True
        if self.disconnected or connection.direct.is_closing():
            return
        head = b"".join(b"%b: %b\r\n" % header for header in connection.server_state.default_headers) + reply.head()
        head += b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        connection.direct.writelines([STATUS_LINE[reply.status] + head, *reply.parts])
        if not self.keep_alive:
            connection.direct.close()
        connection.on_exchange_complete()


class Connection(HttpToolsProtocol):
    """HTTP/1.1 connection of uvicorn with timeouts and a limit on connections. Errors are sentences in JSON."""

    most: int | None = None
    """Most connections of the server; ``None``: any number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = self.app if isinstance(self.app, Application) else None
        self._arriving = False
        """Whether a part of a request has arrived, and not yet all of it."""
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        """Time of the last answer of the fast path. One timer per connection checks it, instead of a timer per request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        self.transport: Any
        self.direct = transport
        super().connection_made(cast(asyncio.Transport, JoinedWrites(transport)))
        if self.most is not None and len(self.connections) > self.most:
            self._send_error(503, f"The server has {self.most} connections and takes no further ones. Try again later.")
        else:
            self._request_timer = self.loop.call_later(REQUEST_S, self._on_request_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._cancel_request_timer()
        for timer in (self._read_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand the bytes to the parser."""
        super().data_received(data)
        if not self._arriving:
            self._cancel_request_timer()
        elif self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_S, self._on_request_timeout)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._arriving = True
        self._cancel_request_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Choose the fast path for an ordinary infer request, and ASGI for all other requests."""
        cycle = self.cycle
        if (
            self._application is not None
            and (cycle is None or cycle.response_complete)
            and not self.flow.write_paused
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and (inference := self._application.inference(self.url, self.headers)) is not None
        ):
            self.cycle = Exchange(self, self._application, inference)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body has arrived."""
        if type(self.cycle) is Exchange:
            self.cycle.receive_chunk(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has arrived in full."""
        self._arriving = False
        if type(self.cycle) is Exchange:
            self.cycle.received()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response has been written; one to HEAD consists of its head."""
        self.transport.flush()
        super().on_response_complete()

    def on_exchange_complete(self) -> None:
        """Continue after an answer of the fast path."""
        if self.pipeline:
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _close_if_idle(self) -> None:
        """Close a connection that had no request for ``timeout_keep_alive`` seconds."""
        self._idle_timer = None
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._arriving or not self.cycle.response_complete or self.timeout_keep_alive_task is not None:
            return  # in use; the end of the response starts a timer
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._close_if_idle)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read as fast as the server writes."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def shutdown(self) -> None:
        """Close a connection whose request has not arrived in full; others are closed after their answer."""
        if self._arriving:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to bytes that are not an HTTP request."""
        self._send_error(400, msg)

    def _cancel_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _on_request_timeout(self) -> None:
        """Answer 408, or close an idle connection, if no complete request arrived within :data:`REQUEST_S`."""
        self._request_timer, cycle = None, self.cycle
        if self.pipeline or (cycle is not None and not cycle.response_complete and not cycle.more_body):
            self._request_timer = self.loop.call_later(REQUEST_S, self._on_request_timeout)  # an earlier one is being answered
        elif self._arriving and (cycle is None or not cycle.response_started or cycle.response_complete):
            self._send_error(408, f"The request did not arrive within {REQUEST_S:g} s.")
        else:
            self.transport.close()

    def _send_error(self, status: int, sentence: str) -> None:
        """Write an error response without the application, and close the connection."""
        body = orjson.dumps({"error": sentence})
        head = [STATUS_LINE[status], b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)]
        head += [b"retry-after: 1\r\n"] if status == 503 else []
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", body]))
        self.transport.close()
