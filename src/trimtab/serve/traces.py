"""Records of requests for the log, and spans for OpenTelemetry if its SDK and an exporter are configured."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Mapping
from typing import Any

from trimtab.errors import MissingPackageError
from trimtab.serve.batcher import Answer

ENABLING_VARIABLES = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables. Tracing is on if one of them is set."""


@dataclasses.dataclass
class Record:
    """Facts and times of one request. Times are nanoseconds since 1970."""

    started: int = dataclasses.field(default_factory=time.time_ns)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    queued: int = 0
    answered: int = 0
    answer: Answer | None = None

    def mark_queued(self) -> None:
        """Record the time at which the checked request enters the queue."""
        self.queued = time.time_ns()

    def mark_computed(self, answer: Answer) -> None:
        """Record the time of the answer."""
        self.answered, self.answer = time.time_ns(), answer

    def all_facts(self) -> dict[str, Any]:
        """The facts, with those of the answer."""
        return self.facts if self.answer is None else self.facts | self.answer.facts()

    @property
    def ms(self) -> float:
        """Milliseconds since the start."""
        return round((time.time_ns() - self.started) / 1e6, 3)


class Tracer:
    """Spans of requests. Exporter, sampling, resource and propagation are set by the standard variables ``OTEL_*``."""

    def __init__(self, exporter: Any) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "trimtab"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trimtab.serve")
        self._extract, self._trace = propagate.extract, trace

    def add(self, name: str, status: int, record: Record, carrier: Mapping[str, str], attributes: Mapping[str, Any]) -> None:
        """A span for a request that has been answered, below the span that the client's ``carrier`` names.

        Its children are queue, batch and compute. The instance measures only the duration of compute, so its span is centred
        within that of the batch.
        """
        found, trace = self._extract(dict(carrier)), self._trace
        facts = {f"trimtab.{name}": value for name, value in record.all_facts().items()}
        span = self._tracer.start_span(
            name, found, trace.SpanKind.SERVER, attributes={**attributes, **facts}, start_time=record.started
        )
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR, record.facts.get("error"))
        if record.answer is not None:
            taken = min(record.queued + round(record.answer.queue_s * 1e9), record.answered)
            sent = min(taken + round(record.answer.wait_s * 1e9), record.answered)
            self._child("queue", span, record.queued, taken)
            batch = self._child("batch", span, taken, record.answered)
            rest = max(record.answered - sent - round(record.answer.compute_s * 1e9), 0) // 2
            self._child("compute", batch, sent + rest, record.answered - rest)
        span.end()

    def _child(self, name: str, parent: Any, start: int, end: int) -> Any:
        span = self._tracer.start_span(name, self._trace.set_span_in_context(parent), start_time=start)
        span.end(end)
        return span

    def close(self) -> None:
        """Export the remaining spans and stop."""
        self._provider.shutdown()


def tracer() -> Tracer | None:
    """The tracer; ``None`` without ``opentelemetry-sdk``, or where the environment names no exporter.

    Raises:
        MissingPackageError: the exporter is not installed.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or not any(os.environ.get(name) for name in ENABLING_VARIABLES) or _missing("opentelemetry.sdk"):
        return None
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "none":
        return None
    if name == "otlp":
        http = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc").startswith("http")
        name = f"otlp_proto_{'http' if http else 'grpc'}"
    for entry in importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=name):
        return Tracer(entry.load()())
    raise MissingPackageError(
        f"The exporter {name!r} of OTEL_TRACES_EXPORTER is not installed. pip install opentelemetry-exporter-otlp, or set the "
        "variable to none."
    )


def _missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True
