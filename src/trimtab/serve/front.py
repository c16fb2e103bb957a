"""The front process: it parses, checks, queues, batches and answers. It never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from trimtab import errors
from trimtab.errors import TrimtabError, UsageError
from trimtab.serve.connection import StartError
from trimtab.serve.grpc_api import start as start_grpc
from trimtab.serve.http.application import Application
from trimtab.serve.http.connections import KEEP_ALIVE_S, Connection, most_connections
from trimtab.serve.options import Options
from trimtab.serve.repository import Repository
from trimtab.serve.traces import tracer

BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the front process."""
        yield


def log(event: str, **facts: object) -> None:
    """Write one line of JSON to standard error."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"time": now, "event": event, **facts}), file=sys.stderr, flush=True)


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT: then take no further requests, answer the accepted ones, and end.

    Raises:
        UsageError: the port is taken.
        TrimtabError: a model cannot be served.
    """
    listening = _listen(options.host, options.port)
    uvloop.run(_serve(options, listening))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{host}:{port} cannot be used: {error.strerror}. Choose another with --host or --port.") from error


async def _serve(options: Options, listening: socket.socket) -> None:
    repository = Repository(options, log)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads = set[asyncio.Task[None]]()
    loop.add_signal_handler(signal.SIGHUP, lambda: reloads.add(loop.create_task(repository.reload())))
    certificate, key = options.tls or (None, None)
    Connection.most, tracing = most_connections(), tracer()
    config = uvicorn.Config(
        Application(repository, tracing),
        loop="none",
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",
        timeout_keep_alive=round(KEEP_ALIVE_S),
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=10,
        backlog=BACKLOG,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    grpc_server, grpc_port = (None, 0) if options.grpc_port is None else await start_grpc(repository, tracing)
    server = HttpServer(config)
    serving = loop.create_task(server.serve(sockets=[listening]))
    address = f"{'http' if options.tls is None else 'https'}://{_address(listening)}"
    loading = loop.create_task(_load(repository, f"{address}{f', gRPC on port {grpc_port}' if grpc_port else ''}"))
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait([loading, stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            if options.watch_s is not None:
                reloads.add(loop.create_task(repository.watch(options.watch_s)))
            await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        await asyncio.wait([loading])
        log("draining")
        await repository.drain()
    finally:
        server.should_exit = True
        await serving
        if grpc_server is not None:
            await grpc_server.stop(1.0)
        for task in reloads:
            task.cancel()
        await repository.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        log("ended")


async def _load(repository: Repository, address: str) -> None:
    try:
        await repository.load_all()
    except StartError as error:
        kind: type[TrimtabError] = getattr(errors, error.kind, TrimtabError)
        raise kind(str(error)) from error
    for model in repository.models.values():
        deployment = model.serving()
        layout, interface = deployment.layout, deployment.interface
        threads = deployment.description["threads"]
        if model.tuning is not None:
            print("\n".join([f"{model.name}:", *model.tuning.lines()]))
        print(
            f"{model.name}: {'' if interface is None else interface.describe()}; {layout.instances} instance"
            f"{'' if layout.instances == 1 else 's'}, {threads or 'all'} thread{'' if threads == 1 else 's'} each, "
            f"batches of up to {layout.rows} rows"
        )
    print(f"ready at {address}", flush=True)


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
