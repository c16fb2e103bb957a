"""Metrics of a server: counted in plain integers, exported as Prometheus metrics and as statistics of the protocol."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab.serve.batcher import Answer
from trimtab.serve.canary import CanaryStats
from trimtab.serve.drift import LABELS, InputDrift, OutputDrift, drift_metrics

SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1.0, 2.5, 5.0))
"""Upper bounds of the latency histograms: 0.1 ms to 50 s."""
ROWS = tuple(2.0**power for power in range(11))
OUTCOMES = {200: "ok", 400: "bad_request", 500: "failed", 503: "refused", 504: "deadline"}
MOST_BUFFERED = 512
"""Requests whose times are buffered. Histograms are updated for the whole buffer at once, outside of the hot path."""


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.sum, self.count = bounds, 0.0, 0
        self.counts = np.zeros(len(bounds) + 1, np.int64)

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count values."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.sum += float(values.sum())
        self.count += len(values)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus has them."""
        totals = self.counts.cumsum().tolist()
        return list(zip((*map(str, self.bounds), "+Inf"), totals, strict=True))


class ModelMetrics:
    """The figures of one version of a model."""

    def __init__(self, model: str, version: str) -> None:
        self.model, self.version = model, version
        self.requests: collections.Counter[str] = collections.Counter()
        self.total, self.queue, self.wait, self.compute, self.rest = (Histogram(SECONDS) for _ in range(5))
        self.rows, self.batch_compute, self.batch_cpu_s = Histogram(ROWS), Histogram(SECONDS), 0.0
        self.sizes = collections.defaultdict[int, list[float]](lambda: [0, 0.0])
        """Rows of a batch, if there are not more than in the last bucket -> number of such batches, and their compute time."""
        self._times, self._batches = list[tuple[float, float, float, float]](), list[tuple[int, float]]()
        self.outputs: OutputDrift | None = None
        """Errors against the reference, with ``--shadow``."""
        self.inputs: InputDrift | None = None
        self.canary: CanaryStats | None = None
        """Requests since the start of a canary."""
        self.restarts = 0
        self.last_ms = 0

    def count_answer(self, total_s: float, answer: Answer) -> None:
        """Count a request that was answered."""
        self.requests["ok"] += 1
        self._times.append((total_s, answer.queue_s, answer.wait_s, answer.compute_s))
        self.last_ms = int(time.time() * 1000)
        if self.canary is not None:
            self.canary.add(total_s)
        if len(self._times) >= MOST_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Add the buffered times to the histograms."""
        if self._times:
            total, queue, wait, compute = np.array(self._times).T
            self._times.clear()
            rest = np.maximum(total - queue - wait - compute, 0.0)
            pairs = ((self.total, total), (self.queue, queue), (self.wait, wait), (self.compute, compute), (self.rest, rest))
            for histogram, values in pairs:
                histogram.add(values)
        if self._batches:
            rows, seconds = np.array(self._batches).T
            self.rows.add(rows)
            self.batch_compute.add(seconds)
            for size, took in self._batches:
                if size <= ROWS[-1]:
                    self.sizes[size][0] += 1
                    self.sizes[size][1] += took
            self._batches.clear()

    def count_refusal(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self.requests[OUTCOMES.get(status, "bad_request")] += 1
        if self.canary is not None and status >= 500:
            self.canary.failed += 1

    def count_batch(self, rows: int, compute_s: float, cpu_s: float) -> None:
        """Count a batch that an instance has computed; ``cpu_s`` is the CPU time of all its threads meanwhile."""
        self.batch_cpu_s += cpu_s
        self._batches.append((rows, compute_s))
        if len(self._batches) >= MOST_BUFFERED:
            self.flush()

    def statistics(self) -> dict[str, Any]:
        """The figures as the protocol's statistics extension has them; times in nanoseconds."""

        def of(*histograms: Histogram) -> dict[str, int]:
            return {"count": histograms[0].count, "ns": round(sum(one.sum for one in histograms) * 1e9)}

        self.flush()
        failed = sum(count for outcome, count in self.requests.items() if outcome != "ok")
        nothing = {"count": 0, "ns": 0}
        return {
            "name": self.model,
            "version": self.version,
            "last_inference": self.last_ms,
            "inference_count": round(self.rows.sum),
            "execution_count": self.rows.count,
            "inference_stats": {
                "success": of(self.total),
                "fail": {"count": failed, "ns": 0},
                "queue": of(self.queue, self.wait),
                "compute_input": nothing,
                "compute_infer": of(self.compute),
                "compute_output": of(self.rest),
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": nothing,
                    "compute_infer": {"count": round(count), "ns": round(seconds * 1e9)},
                    "compute_output": nothing,
                }
                for size, (count, seconds) in sorted(self.sizes.items())
            ],
            **({} if self.outputs is None else {"shadow": self.outputs.statistics()}),
            **({} if self.inputs is None else {"input_drift": self.inputs.statistics()}),
        }


class MetricsCollector(Collector):
    """Prometheus metrics of all versions. ``served`` gives (metrics, queue depth, process ids of the instances) of each."""

    def __init__(self, served: Callable[[], Iterable[tuple[ModelMetrics, int, list[int]]]]) -> None:
        self._served = served
        self._processes = dict[int, psutil.Process]()

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        found = list(self._served())
        requests = CounterMetricFamily("trimtab_requests", "Requests by outcome.", labels=[*LABELS, "outcome"])
        restarts = CounterMetricFamily("trimtab_restarts", "Instances that ended and were restarted.", labels=LABELS)
        depth = GaugeMetricFamily("trimtab_queue_depth", "Requests in the queue.", labels=LABELS)
        cpu = CounterMetricFamily("trimtab_batch_cpu_seconds", "CPU time of computing batches.", labels=LABELS)
        ready = GaugeMetricFamily("trimtab_instances", "Instances of the version.", labels=LABELS)
        histograms = {
            name: HistogramMetricFamily(f"trimtab_{name}", text, labels=LABELS)
            for name, text in (
                ("request_seconds", "Time of a request, from its last byte to its answer."),
                ("queue_seconds", "Part of a request's time that it spent in the queue while all instances were busy."),
                ("batch_wait_seconds", "Part of a request's time that a free instance waited for a fuller batch."),
                ("compute_seconds", "Part of a request's time that its batch was computed."),
                ("overhead_seconds", "Part of a request's time for sockets, copies and formats."),
                ("batch_rows", "Rows of each computed batch."),
                ("batch_seconds", "Compute time of each batch."),
            )
        }
        for metrics, waiting, pids in found:
            metrics.flush()
            labels = [metrics.model, metrics.version]
            for outcome in OUTCOMES.values():
                requests.add_metric([*labels, outcome], metrics.requests[outcome])
            restarts.add_metric(labels, metrics.restarts)
            cpu.add_metric(labels, metrics.batch_cpu_s)
            depth.add_metric(labels, waiting)
            ready.add_metric(labels, len(pids))
            parts = (metrics.total, metrics.queue, metrics.wait, metrics.compute, metrics.rest)
            for family, histogram in zip(histograms.values(), (*parts, metrics.rows, metrics.batch_compute), strict=True):
                family.add_metric(labels, histogram.buckets(), histogram.sum)
        yield from (requests, restarts, cpu, depth, ready, *histograms.values())
        yield from drift_metrics([(one.model, one.version, one.outputs, one.inputs) for one, _, _ in found])
        yield from self._of_processes(found)

    def _of_processes(self, found: list[tuple[ModelMetrics, int, list[int]]]) -> Iterator[Metric]:
        labels = [*LABELS, "instance"]
        cpu = CounterMetricFamily("trimtab_instance_cpu_seconds", "CPU time of an instance.", labels=labels)
        memory = GaugeMetricFamily("trimtab_instance_resident_bytes", "Resident memory of an instance.", labels=labels)
        known = {pid for _, _, pids in found for pid in pids}
        self._processes = {pid: process for pid, process in self._processes.items() if pid in known}
        for metrics, _, pids in found:
            for number, pid in enumerate(pids):
                try:
                    process = self._processes.setdefault(pid, psutil.Process(pid))
                    times, resident = process.cpu_times(), process.memory_info().rss
                except psutil.Error:
                    continue
                cpu.add_metric([metrics.model, metrics.version, str(number)], times.user + times.system)
                memory.add_metric([metrics.model, metrics.version, str(number)], resident)
        yield from (cpu, memory)


def exposition(collector: MetricsCollector) -> bytes:
    """The metrics in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
