"""The HTTP interface, a raw ASGI application: the Open Inference Protocol v2, metrics, OpenAPI and the page."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hmac
import importlib.metadata
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import httptools
import orjson

from trimtab.serve.batcher import Answer
from trimtab.serve.connection import StartError
from trimtab.serve.deployment import Deployment
from trimtab.serve.http.openapi import document, page, sign_in
from trimtab.serve.metrics import MetricsCollector, exposition
from trimtab.serve.protocol import HEADER_LENGTH, Bytes, Refusal, RequestOptions, read_request, request_id, write_response
from trimtab.serve.repository import Repository
from trimtab.serve.traces import Record, Tracer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON, TEXT, HTML = b"application/json", b"text/plain; version=0.0.4; charset=utf-8", b"text/html; charset=utf-8"
BINARY = b"application/octet-stream"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
REQUEST_ID, LENGTH = b"x-request-id", HEADER_LENGTH.encode()
POLICY = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
"""Header of pages: they load nothing from elsewhere, and no other page frames them."""
FAILED = "The server failed on this request; its log has the reason."
MOST_JSON = 1 << 20
"""Most bytes of a body that holds no tensors."""
ASGI_HEADERS = frozenset([b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"])
"""Headers that the fast path for infer requests does not handle; such requests go through ASGI."""
LONGEST_ROUTE = 512
"""Longest URL in bytes for the fast path of infer requests. The parsed words of shorter URLs are cached."""


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class WrongMethod(Refusal):
    """A method that a route does not take."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(405, f"This route takes {' and '.join(allowed)}, not {method}.")
        self.allowed = allowed


@dataclasses.dataclass(slots=True)
class Reply:
    """An HTTP answer: status, content type, further headers, and the parts of its body."""

    status: int
    kind: bytes
    headers: list[Header]
    parts: Sequence[Bytes]

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(map(len, self.parts))

    def head(self) -> bytes:
        """The lines of all headers."""
        text = b"content-type: %b\r\ncontent-length: %d\r\n" % (self.kind, self.size)
        for header in self.headers:
            text += b"%b: %b\r\n" % header
        return text


@dataclasses.dataclass(slots=True)
class Inference:
    """The head of an infer request: words of the path after ``/v2/models``, and headers."""

    words: Sequence[str]
    headers: Mapping[bytes, bytes]


@dataclasses.dataclass(slots=True)
class Accepted:
    """An infer request in the queue of a model."""

    model: str
    deployment: Deployment
    options: RequestOptions
    start: float
    answer: asyncio.Future[Answer]


class Application:
    """The ASGI application."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository, self._tracer = repository, tracer
        self._collector = MetricsCollector(repository.metrics)
        options = repository.options
        self._most_body = int(options.max_body_mb * 1e6)
        self._token = None if options.token is None else f"Bearer {options.token}".encode()
        self._version = importlib.metadata.version("trimtab")
        self._logs_requests = options.log_requests or tracer is not None

    def inference(self, url: bytes, headers: Iterable[Header]) -> Inference | None:
        """The head of an infer request for the fast path, :meth:`infer`. ``None`` for requests that go through ASGI: those that
        are refused by their head, have one of :data:`ASGI_HEADERS`, or are logged or traced."""
        words = _words_of_inference(url)
        if words is None or self._logs_requests:
            return None
        found = dict(headers)
        length = found.get(b"content-length")
        if length is None or int(length) > self._most_body or not ASGI_HEADERS.isdisjoint(found):
            return None
        if self._token is not None and not self._token_matches(found.get(b"authorization")):
            return None
        return Inference(words, found)

    def infer(self, inference: Inference, body: Bytes, reply: Callable[[Reply], None]) -> None:
        """Compute, and give the answer or the refusal to ``reply``, once."""
        headers = inference.headers
        given = headers.get(REQUEST_ID)
        tag = (REQUEST_ID, request_id(None if given is None else given.decode("latin-1")).encode())

        deployment: Deployment | None = None

        def refuse(refusal: Refusal) -> None:
            if deployment is not None:
                deployment.metrics.count_refusal(refusal.status)
            reply(_refusal_reply(refusal, tag))

        def on_answer(answer: asyncio.Future[Answer]) -> None:
            try:
                found = _answer_reply(accepted, answer.result(), tag)
            except Refusal as refusal:
                refuse(refusal)
            except Exception:
                refuse(Refusal(500, FAILED))
                raise  # to the event loop, which logs it
            else:
                reply(found)

        try:
            model, deployment = self._route(inference.words)
            accepted = self._accept(model, deployment, headers.get(LENGTH), body)
        except Refusal as refusal:
            refuse(refusal)
        except Exception:
            refuse(Refusal(500, FAILED))
            raise
        else:
            accepted.answer.add_done_callback(on_answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError("Only HTTP is served here.")
        given, record = _header(scope, REQUEST_ID), Record()
        request = request_id(None if given is None else given.decode("latin-1"))
        status = await self._respond(scope, receive, send, record, (REQUEST_ID, request.encode()))
        if status == 200 and scope["method"] != "POST":
            return
        if self._repository.options.log_requests:
            facts = {"method": scope["method"], "path": scope["path"][:200], "status": status, "ms": record.ms}
            self._repository.log("request", request_id=request, **facts, **record.all_facts())
        if self._tracer is not None:
            carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            attributes = {
                "http.request.method": scope["method"],
                "url.path": scope["path"][:200],
                "http.response.status_code": status,
            }
            self._tracer.add(f"HTTP {scope['method']}", status, record, carrier, attributes | {"trimtab.request_id": request})

    async def _respond(self, scope: Scope, receive: Receive, send: Send, record: Record, tag: Header) -> int:
        """Answer a request, with the header ``tag``. Returns the status, and adds facts for log and trace to ``record``."""
        try:
            words = scope["path"].split("/")[1:]
            self._authorize(scope, words)
            if _is_inference(words):
                reply = await self._infer(words[2:-1], scope, receive, record, tag)
            else:
                status, body, kind = await self._non_inference(words, scope, receive)
                reply = Reply(status, kind, [tag, POLICY] if kind is HTML else [tag], [body])
        except Refusal as refusal:
            reply = _refusal_reply(refusal, tag)
            if refusal.status == 401 and scope["path"] == "/" and b"text/html" in (_header(scope, b"accept") or b""):
                reply = dataclasses.replace(reply, kind=HTML, headers=[*reply.headers, POLICY], parts=[sign_in().encode()])
            record.facts["error"] = refusal.sentence
        except ClientDisconnected:
            return 499
        headers = [(b"content-type", reply.kind), (b"content-length", b"%d" % reply.size), *reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(reply.parts)})
        return reply.status

    def _authorize(self, scope: Scope, words: list[str]) -> None:
        if self._token is None or words[:2] == ["v2", "health"] or self._token_matches(_header(scope, b"authorization")):
            return
        raise Refusal(401, "This server wants a token. Send the header Authorization: Bearer TOKEN.")

    def _token_matches(self, given: bytes | None) -> bool:
        return self._token is not None and hmac.compare_digest(given or b"", self._token)

    async def _infer(self, words: list[str], scope: Scope, receive: Receive, record: Record, tag: Header) -> Reply:
        _check_method(scope, "POST")
        model, deployment = self._route(words)
        record.facts |= {"model": model, "version": deployment.metrics.version}
        try:
            if encoding := _header(scope, b"content-encoding"):
                raise Refusal(
                    400, f"The content encoding {encoding.decode('latin-1')!r:.50} is not supported. Send the body as it is."
                )
            body = await _body(scope, receive, self._most_body)
            accepted = self._accept(model, deployment, _header(scope, LENGTH), body, record)
            answer = await accepted.answer
            record.mark_computed(answer)
        except Refusal as refusal:
            deployment.metrics.count_refusal(refusal.status)
            raise
        return _answer_reply(accepted, answer, tag)

    def _route(self, words: Sequence[str]) -> tuple[str, Deployment]:
        """The name of a model, and its version that gets the next request."""
        if self._repository.draining:
            raise Refusal(503, "The server is stopping and takes no further requests.", 1)
        model = self._repository.model(words[0])
        return model.name, model.route(_version_in(words[1:]))

    def _accept(
        self, model: str, deployment: Deployment, length: bytes | None, body: Bytes, record: Record | None = None
    ) -> Accepted:
        """Read an infer request, and queue it. ``length``: bytes of JSON at the start of the body, from the header."""
        assert deployment.interface is not None
        start, most = time.perf_counter(), self._repository.options.deadline_s
        call, options = read_request(body, None if length is None else length.decode("latin-1"), deployment.interface)
        if record is not None:
            record.mark_queued()
        answer = deployment.submit(call, most if options.timeout_s is None else min(options.timeout_s, most))
        return Accepted(model, deployment, options, start, answer)

    async def _non_inference(self, words: list[str], scope: Scope, receive: Receive) -> tuple[int, bytes, bytes]:
        """Status, body and content type of every route but infer."""
        if words[:1] == ["v2"]:
            status, answer = await self._protocol(words[1:], scope, receive)
            return status, orjson.dumps(answer), JSON
        route = "/".join(words)
        if route not in ("", "metrics", "openapi.json"):
            raise Refusal(404, f"There is no route /{route[:200]}. See /openapi.json.")
        _check_method(scope, "GET", "HEAD")
        if route == "metrics":
            return 200, exposition(self._collector), TEXT
        if route == "openapi.json":
            return 200, orjson.dumps(document(self._repository)), JSON
        return 200, page(self._repository).encode(), HTML

    async def _protocol(self, words: list[str], scope: Scope, receive: Receive) -> tuple[int, Any]:
        if words[:1] == ["repository"]:
            _check_method(scope, "POST")
            _refuse_cross_site(scope)
            return await self._repository_call(words[1:], await _json(scope, receive))
        _check_method(scope, "GET", "HEAD")
        match words:
            case [] | [""]:
                return 200, {"name": "trimtab", "version": self._version, "extensions": EXTENSIONS}
            case ["health", "live"]:
                return 200, {"live": True}
            case ["health", "ready"]:
                ready = self._repository.ready
                return 200 if ready else 503, {"ready": ready}
            case ["models"]:
                return 200, {"models": list(self._repository.models)}
            case ["models", "stats"]:
                return 200, {"model_stats": [one.metrics.statistics() for one in self._repository.deployments()]}
            case ["models", name, *rest]:
                return self._model(name, rest)
        raise Refusal(404, f"There is no route /v2/{'/'.join(words)[:200]}. See /openapi.json.")

    def _model(self, name: str, words: list[str]) -> tuple[int, Any]:
        model = self._repository.model(name)
        version = _version_in(words[:2]) if words[:1] == ["versions"] else None
        match words[2:] if words[:1] == ["versions"] else words:
            case []:
                return 200, metadata(self._repository, name, version)
            case ["ready"]:
                ready = model.serving(version).ready and not self._repository.draining
                return 200 if ready else 503, {"name": name, "ready": ready}
            case ["stats"]:
                return 200, {"model_stats": [model.serving(version).metrics.statistics()]}
            case ["config"]:
                return 200, configuration(self._repository, name, version)
        raise Refusal(404, f"There is no route {'/'.join(words)[:200]!r} of a model. See /openapi.json.")

    async def _repository_call(self, words: list[str], request: dict[str, Any]) -> tuple[int, Any]:
        """Repository index, load and unload."""
        match words:
            case ["index"]:
                return 200, self._repository.index(request.get("ready") is True)
            case ["models", name, "load"]:
                if request.get("parameters"):
                    raise Refusal(
                        400, "A model is loaded from the folder that the server was started with; it takes no parameters."
                    )
                await load(self._repository, name)
                return 200, {}
            case ["models", name, "unload"]:
                await unload(self._repository, name)
                return 200, {}
        raise Refusal(404, f"There is no route /v2/repository/{'/'.join(words)[:200]}. See /openapi.json.")


async def load(repository: Repository, name: str) -> None:
    """Load a new version of ``name``. Raises ``Refusal`` 404 for an unknown name, 400 with the reason if it fails."""
    try:
        await asyncio.shield(repository.model(name).load())  # also if the client does not wait for it
    except StartError as error:
        raise Refusal(400, f"The new version of {name} was not loaded: {error}") from error


async def unload(repository: Repository, name: str) -> None:
    """Stop serving ``name``, after its queue. Raises ``Refusal`` 404 for an unknown name."""
    await asyncio.shield(repository.model(name).unload())


def metadata(repository: Repository, name: str, version: str | None = None) -> dict[str, Any]:
    """The metadata of a model: name, versions, platform, inputs and outputs."""
    deployment = repository.model(name).serving(version)
    assert deployment.interface is not None
    return {
        "name": name,
        "versions": [deployment.metrics.version],
        "platform": deployment.description["platform"],
        "inputs": [tensor.metadata() for tensor in deployment.interface.inputs],
        "outputs": [tensor.metadata() for tensor in deployment.interface.outputs],
    }


def configuration(repository: Repository, name: str, version: str | None = None) -> dict[str, Any]:
    """The configuration of a model, in the words of the model configuration extension, and the artifact's card."""
    deployment = repository.model(name).serving(version)
    assert deployment.interface is not None
    joined = deployment.interface.joinable

    def tensors(formats: Iterable[Any]) -> list[dict[str, Any]]:
        rows = [form.metadata() for form in formats]
        return [
            {"name": row["name"], "data_type": f"TYPE_{row['datatype']}", "dims": row["shape"][1:] if joined else row["shape"]}
            for row in rows
        ]

    return {
        "name": name,
        "platform": deployment.description["platform"],
        "max_batch_size": deployment.layout.rows if joined else 0,
        "input": tensors(deployment.interface.inputs),
        "output": tensors(deployment.interface.outputs),
        "dynamic_batching": {"max_queue_delay_microseconds": round(deployment.batcher.max_wait_s * 1e6)},
        "instance_group": [{"count": deployment.layout.instances, "kind": "KIND_CPU"}],
        "parameters": {"card": deployment.description["card"], "threads": deployment.description["threads"]},
    }


def _version_in(words: Sequence[str]) -> str | None:
    """The version in ``[]`` or ``["versions", V]``."""
    if not words:
        return None
    if len(words) != 2 or words[0] != "versions":
        raise Refusal(404, f"There is no route {'/'.join(words)[:200]!r} of a model. See /openapi.json.")
    return words[1]


def _check_method(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise WrongMethod(scope["method"], methods)


def _refuse_cross_site(scope: Scope) -> None:
    """Refuse cross-site requests: a page of another site could otherwise unload models of a local server (CSRF)."""
    origin = _header(scope, b"origin")
    if origin is not None and origin.rpartition(b"://")[2] != _header(scope, b"host"):
        raise Refusal(
            403, f"A page of {origin.decode('latin-1')!r:.100} has sent this request. Send it from this server's page."
        )


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value  # type: ignore[no-any-return]
    return None


async def _json(scope: Scope, receive: Receive) -> dict[str, Any]:
    body = await _body(scope, receive, MOST_JSON)
    if not body:
        return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"The body is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise Refusal(400, "The body is no JSON object.")
    return found


async def _body(scope: Scope, receive: Receive, most: int) -> Bytes:
    """The body of a request. One that states too many bytes is refused before it is read."""
    stated = _header(scope, b"content-length")
    if stated is not None and stated.isdigit() and int(stated) > most:
        raise Refusal(413, f"The body has {int(stated)} bytes; at most {most} are taken. Raise --max-body, or send less.")
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message["body"]
        if len(body) > most:
            raise Refusal(413, f"The body has more than {most} bytes. Raise --max-body, or send less.")
        return body
    collected = bytearray()
    while message["type"] == "http.request":
        collected += message.get("body", b"")
        if len(collected) > most:
            raise Refusal(413, f"The body has more than {most} bytes. Raise --max-body, or send less.")
        if not message.get("more_body"):
            return collected
        message = await receive()
    raise ClientDisconnected


def _answer_reply(accepted: Accepted, answer: Answer, tag: Header) -> Reply:
    """The reply with the outputs of a model. The answer is counted in the metrics."""
    deployment, options = accepted.deployment, accepted.options
    assert deployment.interface is not None
    head = {"model_name": accepted.model, "model_version": deployment.metrics.version}
    parts, json_length = write_response(head, options, deployment.interface.outputs, answer.tensors, answer.shapes)
    deployment.metrics.count_answer(time.perf_counter() - accepted.start, answer)
    if json_length is None:
        return Reply(200, JSON, [tag], parts)
    return Reply(200, BINARY, [tag, (LENGTH, b"%d" % json_length)], parts)


def _refusal_reply(refusal: Refusal, tag: Header) -> Reply:
    """The answer to a request that is refused."""
    headers = [tag]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(refusal, WrongMethod):
        headers.append((b"allow", ", ".join(refusal.allowed).encode()))
    return Reply(refusal.status, JSON, headers, [orjson.dumps({"error": refusal.sentence})])


def _words_of_inference(url: bytes) -> Sequence[str] | None:
    """The words of a URL between ``/v2/models`` and ``/infer``: a model, and perhaps a version; ``None`` for other routes."""
    return _known_words(url) if len(url) <= LONGEST_ROUTE else None


@functools.lru_cache(maxsize=1024)
def _known_words(url: bytes) -> Sequence[str] | None:
    path = httptools.parse_url(url).path
    words = [] if path is None else urllib.parse.unquote(path.decode("ascii")).split("/")[1:]
    return words[2:-1] if _is_inference(words) else None


def _is_inference(words: Sequence[str]) -> bool:
    return len(words) > 3 and words[-1] == "infer" and words[0] == "v2" and words[1] == "models"
