"""Find instances, threads and batch size of a model by measurement when a server starts, and remember them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from trimtab._internal.serialization import from_json, to_json
from trimtab.errors import UsageError
from trimtab.hardware import system
from trimtab.serve.connection import Instance, StartError
from trimtab.serve.deployment import Layout
from trimtab.serve.options import Options

Make = Callable[[Layout, int], Instance]
"""Makes instance number i of a layout."""
BUDGET_S, SAMPLE_S = 30.0, 0.2
"""Most seconds for all measurements of a model, and seconds for each."""
MOST_ROWS = 256
GAIN, WORSE = 1.05, 0.9
"""A larger batch must give this many times the rows per second; the sweep ends below the second factor of the best."""
SLOWEST_S = 0.25
"""Longest computation of one batch without a stated p99: a request waits for up to one batch before its own."""
DEFAULT_ROWS = 16
LONGER = 2.0
"""For the objective latency, a batch takes at most this many times as long as one row: a request may wait for one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: rows per second of all instances together, and seconds for one batch."""

    instances: int
    threads: int | None
    rows: int
    rows_per_s: float
    batch_s: float
    pinned: bool = False
    """Whether each instance ran on cores of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured and chosen."""

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
        found = [f"  rows/s by rows of a batch, {where}:"]
        for kind in dict.fromkeys((point.instances, point.threads, point.pinned) for point in self.curve):
            points = [point for point in self.curve if (point.instances, point.threads, point.pinned) == kind]
            cells = "  ".join(f"{point.rows}: {point.rows_per_s:,.0f}" for point in points)
            found.append(f"  {kind[0]} x {kind[1] or 'all'} threads{', pinned' if kind[2] else ''}   {cells}")
        return found


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
    if options.batch is not None:
        return [options.batch]
    if not joinable or batch is None:
        return [1]
    most = min(dims[batch][1] or MOST_ROWS, MOST_ROWS)
    powers = [1 << power for power in range(MOST_ROWS.bit_length()) if 1 << power <= most]
    return powers if powers[-1] == most else [*powers, most]


def can_be_pinned(instances: int, threads: int | None, cores: int) -> bool:
    """Whether each of several instances can have cores of its own."""
    return instances > 1 and instances * (threads or cores) <= cores


async def tuned(path: pathlib.Path, options: Options, make: Make, log: Callable[..., None]) -> Tuning:
    """Measure, or read what was measured at an earlier start of the same artifact, options and machine.

    Raises:
        StartError: the artifact cannot be served, or no layout fits into the memory.
    """
    cores = system.usable_cores()
    file = _cache_folder() / "serving" / f"{_fingerprint(path, options, cores)}.json"
    try:
        kept = from_json(Tuning, json.loads(file.read_text(encoding="utf-8")))
        return dataclasses.replace(kept, cached=True)
    except (OSError, ValueError, UsageError):
        pass
    start = time.monotonic()
    curve = list[Point]()
    for layout in layouts(options, cores):
        if curve and time.monotonic() - start > BUDGET_S / 2:
            break
        curve += await _measured(layout, options, make, start + BUDGET_S, log)
    if not curve:
        raise StartError("UsageError", f"{path}: no layout fits into --memory {options.memory_mb} MB. Allow more.")
    chosen = choice(curve, options.p99_s, options.objective)
    if can_be_pinned(chosen.instances, chosen.threads, cores):
        layout = Layout(chosen.instances, chosen.threads, pinned=True)
        pinned = await _measured(layout, dataclasses.replace(options, batch=chosen.rows), make, start + BUDGET_S, log)
        curve += pinned
        chosen = next((point for point in pinned if point.rows_per_s >= GAIN * chosen.rows_per_s), chosen)
    found = Tuning(chosen=chosen, curve=tuple(curve), seconds=time.monotonic() - start)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(to_json(found)), encoding="utf-8")
    except OSError as error:
        log("tuning not remembered", reason=str(error))
    return found


async def _measured(layout: Layout, options: Options, make: Make, until: float, log: Callable[..., None]) -> list[Point]:
    """The curve of one layout: all its instances compute at the same time."""
    instances = [make(layout, number) for number in range(layout.instances)]
    curve = list[Point]()
    try:
        started = await asyncio.gather(*[instance.start() for instance in instances], return_exceptions=True)
        if failed := [error for error in started if error is not None]:
            raise failed[0]
        used = sum(psutil.Process(instance.pid).memory_info().rss for instance in instances) / 1e6
        if options.memory_mb is not None and used > options.memory_mb:
            log("layout left out", instances=layout.instances, memory_mb=round(used), limit_mb=options.memory_mb)
            return []
        facts = instances[0].description
        for rows in sizes(options, facts["dims"], facts["batch"], facts["joinable"]):
            try:
                rates = await asyncio.gather(*[instance.rate(rows, SAMPLE_S) for instance in instances])
            except StartError:
                if not curve:
                    raise
                break  # this batch does not fit
            slowest = rows / min(rates)
            point = Point(
                instances=layout.instances,
                threads=layout.threads,
                rows=rows,
                rows_per_s=sum(rates),
                batch_s=slowest,
                pinned=layout.pinned,
            )
            curve.append(point)
            best = max(point.rows_per_s for point in curve)
            if curve[-1].rows_per_s < WORSE * best or slowest > SLOWEST_S or time.monotonic() > until:
                break
    finally:
        await asyncio.gather(*[instance.stop() for instance in instances])
    return curve


def choice(curve: Sequence[Point], p99_s: float | None, objective: str = "throughput") -> Point:
    """The most rows per second whose batches are fast enough; the smallest batch among those that are about as good.

    A request waits for at most one batch before its own, so that two batches must fit into ``p99_s``. For the objective
    ``latency``, the layout that computes its smallest batch fastest, with the largest batch that takes about as long.
    """
    if objective == "latency":
        smallest = min(point.rows for point in curve)
        first = min((point for point in curve if point.rows == smallest), key=lambda point: point.batch_s)
        layout = (first.instances, first.threads, first.pinned)
        alike = [point for point in curve if (point.instances, point.threads, point.pinned) == layout]
        return max((point for point in alike if point.batch_s <= LONGER * first.batch_s), key=lambda point: point.rows)
    limit = SLOWEST_S if p99_s is None else p99_s / 2
    allowed = [point for point in curve if point.batch_s <= limit] or [min(curve, key=lambda point: point.batch_s)]
    best = max(point.rows_per_s for point in allowed)
    good = [point for point in allowed if point.rows_per_s * GAIN >= best]
    return min(good, key=lambda point: (point.rows, -point.rows_per_s))


def _cache_folder() -> pathlib.Path:
    """As :func:`trimtab.hardware.environment.cache_folder`, whose module imports torch."""
    if folder := os.environ.get("TRIMTAB_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "trimtab"


def _fingerprint(path: pathlib.Path, options: Options, cores: int) -> str:
    """What the result depends on: the artifact, the options, the machine and the versions."""
    try:
        manifest = (path / "manifest.json").read_bytes()
    except OSError:
        manifest = b""  # the instance says what is wrong
    asked = (options.instances, options.threads, options.batch, options.objective, options.p99_s, options.memory_mb)
    versions = [_version(name) for name in ("trimtab", "torch", "onnxruntime", "openvino")]
    facts = json.dumps([asked, cores, system.cpu_name(), versions, os.environ.get("OMP_WAIT_POLICY")])
    return hashlib.sha256(manifest + facts.encode()).hexdigest()[:32]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
