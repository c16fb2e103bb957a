"""The HTTP interface, a raw ASGI application: the Open Inference Protocol v2, metrics, OpenAPI and the page."""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

from trimtab.serve.connection import StartError
from trimtab.serve.http.openapi import document, page, sign_in
from trimtab.serve.metrics import Figures, exposition
from trimtab.serve.protocol import HEADER_LENGTH, Bytes, Refusal, read_request, request_id, write_response
from trimtab.serve.repository import Repository
from trimtab.serve.traces import Record, Tracer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON, TEXT, HTML = b"application/json", b"text/plain; version=0.0.4; charset=utf-8", b"text/html; charset=utf-8"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
REQUEST_ID = b"x-request-id"
POLICY = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
"""Header of pages: they load nothing from elsewhere, and no other page frames them."""
SMALL = 1 << 20
"""Most bytes of a body that holds no tensors."""


class Gone(Exception):
    """The client has closed the connection."""


class WrongMethod(Refusal):
    """A method that a route does not take."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(405, f"This route takes {' and '.join(allowed)}, not {method}.")
        self.allowed = allowed


class Application:
    """The ASGI application."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository, self._tracer = repository, tracer
        self._figures = Figures(repository.figures)
        options = repository.options
        self._most = int(options.max_body_mb * 1e6)
        self._token = None if options.token is None else f"Bearer {options.token}".encode()
        self._version = importlib.metadata.version("trimtab")

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
            said = {
                "http.request.method": scope["method"],
                "url.path": scope["path"][:200],
                "http.response.status_code": status,
            }
            self._tracer.add(f"HTTP {scope['method']}", status, record, carrier, said | {"trimtab.request_id": request})

    async def _respond(self, scope: Scope, receive: Receive, send: Send, record: Record, tag: Header) -> int:
        """Answer a request, with the header ``tag``. Returns the status, and adds to ``record`` what a log and a trace tell."""
        try:
            words = scope["path"].split("/")[1:]
            self._authorize(scope, words)
            if words[-1] == "infer" and words[:2] == ["v2", "models"]:
                await self._infer(words[2:-1], scope, receive, send, record, tag)
                return 200
            status, body, kind = await self._other(words, scope, receive)
            await _answer(send, status, [body], kind, [tag, POLICY] if kind is HTML else [tag])
            return status
        except Refusal as refusal:
            extra = [tag] if refusal.retry_after is None else [tag, (b"retry-after", str(refusal.retry_after).encode())]
            if refusal.status == 401:
                extra.append((b"www-authenticate", b"Bearer"))
            if isinstance(refusal, WrongMethod):
                extra.append((b"allow", ", ".join(refusal.allowed).encode()))
            if refusal.status == 401 and scope["path"] == "/" and b"text/html" in (_header(scope, b"accept") or b""):
                await _answer(send, 401, [sign_in().encode()], HTML, [*extra, POLICY])
            else:
                await _answer(send, refusal.status, [orjson.dumps({"error": refusal.sentence})], JSON, extra)
            record.facts["error"] = refusal.sentence
            return refusal.status
        except Gone:
            return 499

    def _authorize(self, scope: Scope, words: list[str]) -> None:
        if self._token is None or words[:2] == ["v2", "health"]:
            return
        if not hmac.compare_digest(_header(scope, b"authorization") or b"", self._token):
            raise Refusal(401, "This server wants a token. Send the header Authorization: Bearer TOKEN.")

    async def _infer(self, words: list[str], scope: Scope, receive: Receive, send: Send, record: Record, tag: Header) -> None:
        _only(scope, "POST")
        if self._repository.draining:
            raise Refusal(503, "The server is stopping and takes no further requests.", 1)
        model = self._repository.model(words[0])
        deployment = model.taking(_version_in(words[1:]))
        assert deployment.interface is not None
        record.facts |= {"model": model.name, "version": deployment.metrics.version}
        try:
            if encoding := _header(scope, b"content-encoding"):
                raise Refusal(
                    400, f"The content encoding {encoding.decode('latin-1')!r:.50} is not supported. Send the body as it is."
                )
            body = await _body(scope, receive, self._most)
            start = time.perf_counter()
            length = _header(scope, HEADER_LENGTH.encode())
            call, asked = read_request(body, None if length is None else length.decode("latin-1"), deployment.interface)
            most = self._repository.options.deadline_s
            record.enters_queue()
            answer = await deployment.infer(call, most if asked.timeout_s is None else min(asked.timeout_s, most))
            record.computed(answer)
        except Refusal as refusal:
            deployment.metrics.refused(refusal.status)
            raise
        head = {"model_name": model.name, "model_version": deployment.metrics.version}
        parts, json_length = write_response(head, asked, deployment.interface.outputs, answer.tensors, answer.shapes)
        deployment.metrics.answered(time.perf_counter() - start, answer.queue_s, answer.compute_s)
        if json_length is None:
            await _answer(send, 200, parts, JSON, [tag])
        else:
            length_header = (HEADER_LENGTH.encode(), str(json_length).encode())
            await _answer(send, 200, parts, b"application/octet-stream", [tag, length_header])

    async def _other(self, words: list[str], scope: Scope, receive: Receive) -> tuple[int, bytes, bytes]:
        """Status, body and content type of every route but infer."""
        if words[:1] == ["v2"]:
            status, answer = await self._protocol(words[1:], scope, receive)
            return status, orjson.dumps(answer), JSON
        route = "/".join(words)
        if route not in ("", "metrics", "openapi.json"):
            raise Refusal(404, f"There is no route /{route[:200]}. See /openapi.json.")
        _only(scope, "GET", "HEAD")
        if route == "metrics":
            return 200, exposition(self._figures), TEXT
        if route == "openapi.json":
            return 200, orjson.dumps(document(self._repository)), JSON
        return 200, page(self._repository).encode(), HTML

    async def _protocol(self, words: list[str], scope: Scope, receive: Receive) -> tuple[int, Any]:
        if words[:1] == ["repository"]:
            _only(scope, "POST")
            _own_site(scope)
            return await self._change(words[1:], await _json(scope, receive))
        _only(scope, "GET", "HEAD")
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

    async def _change(self, words: list[str], request: dict[str, Any]) -> tuple[int, Any]:
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


def _version_in(words: list[str]) -> str | None:
    """The version in ``[]`` or ``["versions", V]``."""
    if not words:
        return None
    if len(words) != 2 or words[0] != "versions":
        raise Refusal(404, f"There is no route {'/'.join(words)[:200]!r} of a model. See /openapi.json.")
    return words[1]


def _only(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise WrongMethod(scope["method"], methods)


def _own_site(scope: Scope) -> None:
    """Refuse what a browser sends for a page of another site: such a page could unload models of a local server."""
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
    body = await _body(scope, receive, SMALL)
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
    raise Gone


async def _answer(send: Send, status: int, parts: list[Bytes], kind: bytes, extra: Iterable[Header]) -> None:
    body = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
