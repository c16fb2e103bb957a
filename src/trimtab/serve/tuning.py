"""Find the number of instances, threads and batch size of a model by measurement when a server starts, and cache the result.

Each layout runs as a :class:`~trimtab.serve.deployment.Deployment`. One-row requests always fill the next batch of every
instance, so rows per second include the cost of queue, frames, sockets, copies and splitting. A large batch spreads this cost
over more requests, which decides the batch size of a small model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from trimtab._internal.serialization import from_json, to_json
from trimtab.errors import UsageError
from trimtab.hardware import system
from trimtab.serve.batcher import Answer, Batcher
from trimtab.serve.connection import StartError
from trimtab.serve.deployment import Deployment, Layout
from trimtab.serve.frames import unpack
from trimtab.serve.options import Options
from trimtab.serve.protocol import Call, Refusal

MakeDeployment = Callable[[Layout], Deployment]
"""Makes a deployment to measure, which is not started yet."""
BUDGET_S = 30.0
"""Time limit in seconds for all measurements of a model."""
SAMPLE_S, LEAST_BATCHES, PASSES = 0.1, 2, 3
"""Least seconds and batches per instance of a measurement, and measurements of each batch size. The best one counts, because
disturbances only make a measurement slower."""
MOST_ROWS = 256
GAIN, STOP_BELOW = 1.03, 0.9
"""A larger batch must increase rows per second by ``GAIN``. The sweep ends at ``STOP_BELOW`` times the best rows per second."""
PINNED_GAIN = 1.05
"""Pinned instances must give this many times the rows per second of the same instances measured before and after them."""
SLOWEST_S = 0.25
"""Longest time of one batch if no p99 is given. A request waits for up to one batch before its own."""
DEFAULT_ROWS = 16
LATENCY_FACTOR = 2.0
"""Objective latency: longest time of a batch, as a multiple of the time of one row. A request may wait for one batch."""
REQUEST_TIMEOUT_S = 60.0
"""Timeout of a request of the measurement, in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: rows per second of all instances together, and seconds of one batch."""

    instances: int
    threads: int | None
    rows: int
    rows_per_s: float
    batch_s: float
    dispatch_s: float
    """Part of ``batch_s`` that is not computation: queue, frames, sockets, copies, splitting, and waiting for a CPU."""
    pinned: bool = False
    """Whether each instance ran on cores of its own."""

    @property
    def kind(self) -> tuple[int, int | None, bool]:
        """The layout without the batch size: instances, threads, pinned."""
        return self.instances, self.threads, self.pinned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """All measured points, and the chosen one."""

    chosen: Point
    curve: tuple[Point, ...]
    seconds: float
    cached: bool = False

    @property
    def layout(self) -> Layout:
        """The chosen layout."""
        chosen = self.chosen
        return Layout(chosen.instances, chosen.threads, chosen.rows, chosen.pinned)

    def lines(self) -> list[str]:
        """The curve and the choice, as text."""
        where = "remembered from an earlier start" if self.cached else f"measured in {self.seconds:.1f} s"
        found = [f"  rows/s by rows of a batch, through the server's queue and frames, {where}:"]
        for kind in dict.fromkeys(point.kind for point in self.curve):
            cells = "  ".join(f"{point.rows}: {point.rows_per_s:,.0f}" for point in self.curve if point.kind == kind)
            found.append(f"  {kind[0]} x {kind[1] or 'all'} threads{', pinned' if kind[2] else ''}   {cells}")
        chosen = self.chosen
        first = next(point for point in self.curve if point.kind == chosen.kind)
        shown = [_dispatch(point) for point in dict.fromkeys((first, chosen))]
        return [*found, f"  dispatch takes {', '.join(shown)}"]


def _dispatch(point: Point) -> str:
    rows = f"{point.rows} row{'' if point.rows == 1 else 's'}"
    return f"{point.dispatch_s * 1e3:.2f} of the {point.batch_s * 1e3:.3g} ms of {rows}"


def layouts(options: Options, cores: int) -> list[Layout]:
    """The layouts to measure: many instances with one thread, one instance with all threads, and one between on many cores."""
    if options.instances is not None and options.threads is not None:
        pairs = [(options.instances, options.threads)]
    elif options.instances is not None:
        pairs = [(options.instances, max(cores // options.instances, 1))]
    elif options.threads is not None:
        pairs = [(max(cores // options.threads, 1), options.threads), (1, options.threads)]
    else:
        pairs = [(cores, 1), (1, cores), (cores // 4, 4)] if cores >= 8 else [(cores, 1), (1, cores)]
    return [Layout(instances, threads) for instances, threads in dict.fromkeys(pairs)]


def sizes(options: Options, dims: Mapping[str, Sequence[Any]], batch: str | None, joinable: bool) -> list[int]:
    """The batch sizes to measure: powers of two up to the limits of the model and of :data:`MOST_ROWS`."""
    if not joinable or batch is None:
        return [1]
    if options.batch is not None:
        return [options.batch]
    most = min(dims[batch][1] or MOST_ROWS, MOST_ROWS)
    powers = [1 << power for power in range(MOST_ROWS.bit_length()) if 1 << power <= most]
    return powers if powers[-1] == most else [*powers, most]


def can_be_pinned(instances: int, threads: int | None, cores: int) -> bool:
    """Whether there are several instances, and cores enough for each to have its own."""
    return instances > 1 and instances * (threads or cores) <= cores


async def tune_layout(path: pathlib.Path, options: Options, make: MakeDeployment, log: Callable[..., None]) -> Tuning:
    """Measure the layouts and choose one, or read the cached result for this artifact, these options and this machine.

    Raises:
        StartError: the artifact cannot be served, or no layout fits into the memory.
    """
    cores = system.usable_cores()
    file = system.cache_folder() / "serving" / f"{_fingerprint(path, options, cores)}.json"
    try:
        kept = from_json(Tuning, json.loads(file.read_text(encoding="utf-8")))
        return dataclasses.replace(kept, cached=True)
    except (OSError, ValueError, UsageError):
        pass
    start = time.monotonic()
    curve, candidates = list[Point](), layouts(options, cores)
    for number, layout in enumerate(candidates, 1):
        if curve and time.monotonic() - start > BUDGET_S / 2:
            break
        share = start + BUDGET_S * number / (len(candidates) + 1)
        curve += await _measure_layout(layout, options, make, (share, start + BUDGET_S), log)
    if not curve:
        raise StartError("UsageError", f"{path}: no layout fits into --memory {options.memory_mb} MB. Allow more.")
    chosen = choose(curve, options.p99_s, options.objective)
    if can_be_pinned(chosen.instances, chosen.threads, cores) and time.monotonic() - start < BUDGET_S:
        fixed, until = dataclasses.replace(options, batch=chosen.rows), (start + BUDGET_S, start + BUDGET_S)
        layout = Layout(chosen.instances, chosen.threads)
        try:
            pinned = await _measure_layout(dataclasses.replace(layout, pinned=True), fixed, make, until, log)
            curve += pinned
            if _faster(pinned, chosen):  # measured once more without, so that a machine that became faster does not decide
                again = await _measure_layout(layout, fixed, make, until, log)
                chosen = pinned[0] if again and _faster(pinned, again[0]) else chosen
        except StartError as error:
            log("pinned instances left out", reason=str(error))
    found = Tuning(chosen=chosen, curve=tuple(curve), seconds=time.monotonic() - start)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(to_json(found)), encoding="utf-8")
    except OSError as error:
        log("tuning not remembered", reason=str(error))
    return found


def _faster(pinned: Sequence[Point], point: Point) -> bool:
    return any(one.rows_per_s >= PINNED_GAIN * point.rows_per_s for one in pinned)


async def _measure_layout(
    layout: Layout, options: Options, make: MakeDeployment, until: tuple[float, float], log: Callable[..., None]
) -> list[Point]:
    """The points of one layout. ``until``: times after which repetitions, and larger batches, are skipped."""
    deployment, curve = make(layout), dict[int, Point]()
    try:
        await deployment.start()
        facts, call = deployment.description, _example(deployment)
        for rows in sizes(options, facts["dims"], facts["batch"], facts["joinable"]):
            point = await _try_point(deployment, layout, call, rows, log, needed=not curve)
            best = max([one.rows_per_s for one in curve.values()], default=0.0)
            if point is not None and point.rows_per_s < STOP_BELOW * best:
                point = _better(point, await _try_point(deployment, layout, call, rows, log))
            if point is None and not curve:
                raise StartError("WorkloadError", f"The model fails on a batch of {rows} rows. Give a smaller --batch.")
            if point is None:
                break  # this batch does not fit
            used = _resident_mb(deployment)
            if options.memory_mb is not None and used > options.memory_mb:
                log("batch left out", instances=layout.instances, rows=rows, memory_mb=round(used), limit_mb=options.memory_mb)
                break
            curve[rows] = point
            if point.rows_per_s < STOP_BELOW * best or point.batch_s > SLOWEST_S or time.monotonic() > until[1]:
                break
        for rows in [*curve] * (PASSES - 1):
            if time.monotonic() > until[0]:
                break
            curve[rows] = _better(curve[rows], await _try_point(deployment, layout, call, rows, log))
    finally:
        await deployment.stop()
    return list(curve.values())


def _resident_mb(deployment: Deployment) -> float:
    """Resident memory of the instances in MB, without those that have just ended."""
    total = 0
    for instance in deployment.instances:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(instance.pid).memory_info().rss
    return total / 1e6


async def _try_point(
    deployment: Deployment, layout: Layout, call: Call, rows: int, log: Callable[..., None], *, needed: bool = False
) -> Point | None:
    """:func:`_measure_point`. If it fails and is not ``needed``, log the reason and return ``None``: other points exist.

    Raises:
        StartError: the model fails on a single request, and the point is ``needed``.
    """
    try:
        return await _measure_point(deployment, layout, call, rows)
    except StartError as error:
        if needed:
            raise
        log("batch left out", instances=layout.instances, rows=rows, reason=str(error))
        return None


def _better(one: Point, other: Point | None) -> Point:
    return one if other is None or one.rows_per_s >= other.rows_per_s else other


def _example(deployment: Deployment) -> Call:
    """A request with the first row of the artifact's first test vector; all of it if its requests cannot be joined."""
    assert deployment.interface is not None
    shapes, forms = deployment.description["example"]["shapes"], deployment.interface.inputs
    counts = [math.prod(shape) * form.itemsize for shape, form in zip(shapes, forms, strict=True)]
    tensors = unpack(memoryview(deployment.instances[0].example), counts)
    described = zip(forms, shapes, tensors, strict=True)
    return deployment.interface.call({form.name: (form.datatype, shape, tensor) for form, shape, tensor in described})


async def _measure_point(deployment: Deployment, layout: Layout, call: Call, rows: int) -> Point | None:
    """Measure batches of ``rows`` requests in all instances. ``None`` if such a batch fails or ends the process.

    Raises:
        StartError: the model fails on a single request.
    """
    sample = await _Sample(deployment, call, rows, layout.instances).run()
    if sample.rows < rows * sample.batches:  # batches that fail are tried again, each request alone
        return None
    batch_s = layout.instances * sample.time / sample.batches
    return Point(
        instances=layout.instances,
        threads=layout.threads,
        rows=rows,
        rows_per_s=sample.rows / sample.time,
        batch_s=batch_s,
        dispatch_s=max(batch_s - sample.compute_s / sample.batches, 0.0),
        pinned=layout.pinned,
    )


class _Count(NamedTuple):
    """Time, rows, batches and compute time of a deployment: totals, or the difference of two totals."""

    time: float
    rows: float
    batches: int
    compute_s: float


class _Sample:
    """Keeps the next batch of every instance full until enough batches are counted."""

    def __init__(self, deployment: Deployment, call: Call, rows: int, instances: int) -> None:
        self._deployment, self._call, self._full = deployment, call, rows * instances
        deployment.batcher = Batcher(rows=rows, limit=2 * self._full)
        self._answered, self._until = 0, math.inf
        self._begin: _Count | None = None
        self._result: asyncio.Future[_Count] = asyncio.get_running_loop().create_future()

    async def run(self) -> _Count:
        """The totals after the first batch of each instance, which warms up.

        Raises:
            StartError: the model fails on a single request.
        """
        for _ in range(2 * self._full):  # one batch is computed, and the next one waits
            self._submit()
        found = await self._result
        await self._deployment.drain()
        return found

    def _submit(self) -> None:
        self._deployment.submit(self._call, REQUEST_TIMEOUT_S).add_done_callback(self._on_answer)

    def _on_answer(self, answer: asyncio.Future[Answer]) -> None:
        """Submit another request, or end. All answers of a batch arrive together, so both totals end with a whole batch."""
        error = answer.exception()
        if self._result.done():
            return
        if error is not None:
            sentence = error.sentence if isinstance(error, Refusal) else str(error)
            self._result.set_exception(StartError("WorkloadError", sentence))
            return
        self._answered += 1
        if self._answered == self._full:
            self._begin, self._until = self._count(), time.perf_counter() + SAMPLE_S
        elif time.perf_counter() >= self._until and self._answered >= (1 + LEAST_BATCHES) * self._full:
            begin, end = self._begin, self._count()
            assert begin is not None
            counts = end.batches - begin.batches, end.compute_s - begin.compute_s
            self._result.set_result(_Count(end.time - begin.time, end.rows - begin.rows, *counts))
            return
        self._submit()

    def _count(self) -> _Count:
        metrics = self._deployment.metrics
        metrics.flush()
        return _Count(time.perf_counter(), metrics.rows.sum, metrics.batch_compute.count, metrics.batch_compute.sum)


def choose(curve: Sequence[Point], p99_s: float | None, objective: str = "throughput") -> Point:
    """The point with the most rows per second among fast enough batches; of nearly equal ones the smallest batch.

    A request waits for at most one batch before its own, so that two batches must fit into ``p99_s``. For the objective
    ``latency``, the layout that computes its smallest batch fastest, with the largest batch that takes about as long.
    """
    if objective == "latency":
        smallest = min(point.rows for point in curve)
        first = min((point for point in curve if point.rows == smallest), key=lambda point: point.batch_s)
        fast = [point for point in curve if point.kind == first.kind and point.batch_s <= LATENCY_FACTOR * first.batch_s]
        return max(fast, key=lambda point: point.rows)
    limit = SLOWEST_S if p99_s is None else p99_s / 2
    allowed = [point for point in curve if point.batch_s <= limit] or [min(curve, key=lambda point: point.batch_s)]
    best = max(point.rows_per_s for point in allowed)
    good = [point for point in allowed if point.rows_per_s * GAIN >= best]
    return min(good, key=lambda point: (point.rows, -point.rows_per_s))


def _fingerprint(path: pathlib.Path, options: Options, cores: int) -> str:
    """Cache key: a hash of the artifact, the options, the machine and the versions."""
    try:
        manifest = (path / "manifest.json").read_bytes()
    except OSError:
        manifest = b""  # the instance says what is wrong
    choices = (options.instances, options.threads, options.batch, options.objective, options.p99_s, options.memory_mb)
    versions = [_version(name) for name in ("trimtab", "torch", "onnxruntime", "openvino")]
    facts = json.dumps([choices, cores, system.cpu_name(), versions, os.environ.get("OMP_WAIT_POLICY")])
    return hashlib.sha256(manifest + facts.encode()).hexdigest()[:32]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
