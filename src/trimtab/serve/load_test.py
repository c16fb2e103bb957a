"""Measure a server under open-loop load: arrivals follow a Poisson process and do not wait for answers.

A client that waits for an answer before it sends the next request makes a slow server look fast. Here the latency of a request
counts from its time of arrival, also if no connection was free then.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import math
import pathlib
import random
import ssl
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trimtab.errors import MeasurementError, UsageError
from trimtab.measure.quantiles import normal_quantile
from trimtab.serve.protocol import DATATYPES, HEADER_LENGTH

PORTS = {"http": 80, "https": 443}
QUANTILES = (0.5, 0.99, 0.999)
MOST_CONNECTIONS = 1000
TIMEOUT_S = 30.0
"""Seconds after which a request counts as an error."""
LATE_SHARE, STALL_S = 0.2, 0.25
"""The client is the bottleneck (``late``) if the median delay of sending exceeds this share of the median latency. Otherwise a
delay of ``STALL_S`` seconds means that the client or the whole machine stood still, as virtual machines do."""
FIRST_RATE, STEPS = 20.0, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantile:
    """A quantile of latency in milliseconds, with a 95% interval from order statistics."""

    q: float
    ms: float
    low: float
    high: float | None
    """``None`` if there are too few samples for a bound."""

    def __str__(self) -> str:
        bound = "?" if self.high is None else f"{self.high:.3g}"
        return f"p{self.q * 100:g} {self.ms:.3g} ms ({self.low:.3g} to {bound})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The result of one rate of arrivals: latencies, errors and goodput."""

    rate: float
    """Arrivals per second."""
    seconds: float
    sent: int
    ok: int
    errors: dict[str, int]
    """HTTP status or kind of failure -> how often."""
    quantiles: tuple[Quantile, ...]
    """Latencies of the requests that were answered with 200."""
    goodput: float
    """Answers with 200 per second, within the limit if there is one."""
    late: bool
    """Whether the client itself could not keep the rate."""
    latest_s: float
    """Longest delay between an arrival and its sending. Unless :attr:`late`, the client or the machine stood still so long."""

    def __str__(self) -> str:
        errors = ", ".join(f"{count} x {kind}" for kind, count in self.errors.items()) or "none"
        shown = "; ".join(map(str, self.quantiles)) or "no answer"
        text = f"{self.rate:,.4g}/s: {shown}; goodput {self.goodput:,.4g}/s; errors: {errors}"
        if self.late:
            return f"{text}; the client could not keep this rate"
        return f"{text}; the client stood still for {self.latest_s:.2f} s" if self.latest_s >= STALL_S else text

    def keeps(self, limit_s: float) -> bool:
        """Whether all were answered and the p99 is within ``limit_s``."""
        return not self.errors and not self.late and bool(self.quantiles) and self.quantiles[1].ms <= limit_s * 1e3


@dataclasses.dataclass(frozen=True)
class Access:
    """Credentials for a server: its token, and the certificates that are trusted."""

    token: str | None = None
    ca: pathlib.Path | None = None
    """File of the certificates that are trusted; ``None``: those of the system."""

    @property
    def header(self) -> str:
        """The line of a request that holds the token."""
        return "" if self.token is None else f"Authorization: Bearer {self.token}\r\n"

    def tls(self) -> ssl.SSLContext:
        """The TLS settings of connections. Raises ``UsageError`` if the certificates cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise UsageError(f"--ca: {str(self.ca)!r} cannot be read as certificates: {error}. Give a PEM file.") from error


NO_CREDENTIALS = Access()


@dataclasses.dataclass(frozen=True)
class Target:
    """Host and port of a server, the bytes of one HTTP request, and the TLS settings."""

    host: str
    port: int
    request: bytes
    tls: ssl.SSLContext | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection."""
        return await asyncio.open_connection(self.host, self.port, ssl=self.tls)


async def _get(target: Target, path: str, access: Access) -> Any:
    reader, writer = await target.connect()
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {target.host}\r\n{access.header}Connection: close\r\n\r\n".encode())
        status, body = await _response(reader)
    finally:
        writer.close()
    if status != 200:
        raise UsageError(f"{path} was answered with {status}: {body[:300].decode(errors='replace')}.")
    return json.loads(body)


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status, length = int(head.split(" ", 2)[1]), 0
    for line in head.split("\r\n"):
        if line.startswith("content-length:"):
            length = int(line.partition(":")[2])
        elif line.startswith("transfer-encoding:"):
            raise MeasurementError("The server answers in chunks, which the load test does not read.")
    return status, await reader.readexactly(length)


async def make_target(url: str, model: str | None, rows: int, body: bytes | None, access: Access) -> Target:
    """Read a server's metadata and make a request for it: ``body`` (JSON), or random values in binary.

    Raises:
        UsageError: the address is no http address, nothing answers there, or the model must be named.
    """
    parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in PORTS or parts.hostname is None:
        raise UsageError(f"{url!r} is no address of an HTTP server. Give one like http://127.0.0.1:8000.")
    target = Target(parts.hostname, parts.port or PORTS[parts.scheme], b"", access.tls() if parts.scheme == "https" else None)
    try:
        if model is None:
            models = (await _get(target, "/v2/models", access)).get("models", [])
            if len(models) != 1:
                raise UsageError(f"{url} serves {', '.join(models) or 'no model'}. Name one with --model.")
            model = models[0]
        path = f"/v2/models/{urllib.parse.quote(str(model))}"
        found = await _get(target, path, access) if body is None else {}
    except ssl.SSLCertVerificationError as error:
        raise UsageError(f"{url} shows a certificate that is not trusted: {error}. Give it with --ca.") from error
    except ssl.SSLError as error:
        raise UsageError(f"{url} does not speak TLS: {error}. Without TLS its address begins with http://.") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise UsageError(f"No server answers at {url}: {error}. Start one with trimtab serve.") from error
    headers = f"POST {path}/infer HTTP/1.1\r\nHost: {target.host}\r\n{access.header}"
    if body is None:
        head, tensors = _random(found["inputs"], rows)
        headers += f"{HEADER_LENGTH}: {len(head)}\r\n"
        body = head + tensors
    request = f"{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return dataclasses.replace(target, request=request)


def _random(inputs: Sequence[dict[str, Any]], rows: int) -> tuple[bytes, bytes]:
    """A request with ``rows`` for each size that varies: normal values, or zeros for integers."""
    codes, generator = dict(DATATYPES.values()), np.random.default_rng(0)
    described, tensors = [], []
    for tensor in inputs:
        if tensor["datatype"] not in codes:
            raise UsageError(f"The model takes {tensor['datatype']}; give a request as a JSON file with --request.")
        shape = [rows if size == -1 else size for size in tensor["shape"]]
        values = generator.normal(size=shape) if tensor["datatype"].startswith("FP") else np.zeros(shape)
        tensors.append(values.astype(codes[tensor["datatype"]]).tobytes())
        size = {"binary_data_size": len(tensors[-1])}
        described.append({"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"], "parameters": size})
    request = {"inputs": described, "parameters": {"binary_data_output": True}}
    return json.dumps(request).encode(), b"".join(tensors)


class Client:
    """A pool of keep-alive connections, which grows with the number of concurrent requests."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._limit = asyncio.Semaphore(MOST_CONNECTIONS)

    async def send(self) -> int:
        """Send one request; the status of its answer. Raises ``OSError`` and ``asyncio.IncompleteReadError``."""
        async with self._limit:
            pair = self._free.pop() if self._free else await self._target.connect()
            pair[1].write(self._target.request)
            try:
                status, _ = await _response(pair[0])
            except BaseException:
                pair[1].close()
                raise
            self._free.append(pair)
            return status

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._free:
            writer.close()


async def offer_load(target: Target, rate: float, seconds: float, limit_s: float | None = None, seed: int = 0) -> Load:
    """Offer ``rate`` arrivals per second for ``seconds``, then wait for the answers."""
    client, draw, loop = Client(target), random.Random(seed), asyncio.get_running_loop()
    latencies, lags, errors = list[float](), list[float](), collections.Counter[str]()

    async def one(arrival: float) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await client.send()
        except TimeoutError:
            errors["timeout"] += 1
        except (OSError, asyncio.IncompleteReadError) as error:
            errors[type(error).__name__] += 1
        else:
            if status == 200:
                latencies.append(loop.time() - arrival)
            else:
                errors[str(status)] += 1

    start = arrival = loop.time()
    tasks = set[asyncio.Task[None]]()
    sent = 0
    while True:
        arrival += draw.expovariate(rate)
        if arrival > start + seconds:
            break
        if (wait := arrival - loop.time()) > 0:
            await asyncio.sleep(wait)
        lags.append(loop.time() - arrival)
        sent += 1
        task = loop.create_task(one(arrival))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    client.close()
    latencies.sort()
    good = [latency for latency in latencies if limit_s is None or latency <= limit_s]
    late = bool(latencies) and sorted(lags)[len(lags) // 2] > max(LATE_SHARE * latencies[len(latencies) // 2], 1e-3)
    found = tuple(_quantile(latencies, q) for q in QUANTILES) if latencies else ()
    return Load(
        rate=rate,
        seconds=seconds,
        sent=sent,
        ok=len(latencies),
        errors=dict(errors),
        quantiles=found,
        goodput=len(good) / seconds,
        late=late,
        latest_s=max(lags, default=0.0),
    )


def _quantile(ordered: Sequence[float], q: float) -> Quantile:
    n = len(ordered)
    spread = normal_quantile(0.975) * math.sqrt(n * q * (1 - q))
    low, high = max(math.floor(n * q - spread), 0), math.ceil(n * q + spread)
    bound = ordered[high] * 1e3 if high < n else None
    return Quantile(q=q, ms=ordered[min(int(n * q), n - 1)] * 1e3, low=ordered[low] * 1e3, high=bound)


async def find_rate(target: Target, limit_s: float, seconds: float, on_load: Callable[[Load], None]) -> Load | None:
    """The highest rate without errors whose p99 is within ``limit_s``: doubled until it fails, then bisected.

    ``on_load`` gets the result of every rate. Returns ``None`` if the first rate already exceeds the limit.
    """
    rate, best, over = FIRST_RATE, None, math.inf
    steps = 0
    while steps < STEPS:
        tried = await offer_load(target, rate, seconds, limit_s)
        on_load(tried)
        if tried.keeps(limit_s):
            best = tried
        else:
            over = rate
        if best is None:
            return None
        steps += over < math.inf
        rate = 2 * best.rate if math.isinf(over) else math.sqrt(best.rate * over)
    return best


def load_test(
    url: str,
    *,
    model: str | None = None,
    rate: float | None = None,
    p99_s: float | None = None,
    seconds: float = 10.0,
    rows: int = 1,
    body: bytes | None = None,
    access: Access = NO_CREDENTIALS,
    on_load: Callable[[Load], None] = lambda load: None,
) -> Load | None:
    """Offer ``rate`` requests per second to the server at ``url``. Without a rate, find the highest one that keeps ``p99_s``.

    Raises:
        UsageError: nothing answers at ``url``, or the model must be named.
    """

    async def main() -> Load | None:
        target = await make_target(url, model, rows, body, access)
        if rate is not None:
            done = await offer_load(target, rate, seconds, p99_s)
            on_load(done)
            return done
        return await find_rate(target, p99_s or 0.02, seconds, on_load)

    return asyncio.run(main())
