"""Peak memory and slowest operators of one model, in a process of its own, for ``trimtab measure``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from trimtab._internal.serialization import from_json, to_json
from trimtab._internal.user_code import user_code
from trimtab.artifact.artifact import open_artifact
from trimtab.core.measurement import OperatorTime
from trimtab.core.workload import Workload, as_call
from trimtab.errors import MeasurementError
from trimtab.evaluation.explain import PROFILED_S, REPEATS, TORCH
from trimtab.execution.jobs.inference import read_workload
from trimtab.execution.process import WorkerProcess
from trimtab.execution.workload_transfer import workload_source
from trimtab.measure.memory import PeakMemory
from trimtab.measure.profile import operator_times
from trimtab.tensors.structure import cloned
from trimtab.tensors.weights import weight_bytes

MORE_CALLS, SHOWN = 2, 10
"""Further calls until the memory is stable; and operators that are printed, while the JSON has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Memory and operators of one model on its example inputs."""

    schema: ClassVar[int] = 1

    subject: str
    peak_mb: float | None = None
    """Peak memory in MB (10**6 bytes) of a fresh process that loads and calls the model, above its memory after importing
    torch; ``None`` if it was not asked for."""
    first_call_s: float | None = None
    """Seconds from the start of loading to the first answer, without imports."""
    method: str | None = None
    """Method of the measurement of the peak."""
    operators: tuple[OperatorTime, ...] | None = None
    """The slowest first; empty if the runtime does not name them, ``None`` if they were not asked for."""
    source: str | None = None
    """The profiler that named the operators."""

    def __str__(self) -> str:
        lines = []
        if self.peak_mb is not None:
            first = "" if self.first_call_s is None else f"; {self.first_call_s:.3g} s to load it and answer for the first time"
            lines.append(f"memory of {self.subject}: peak {self.peak_mb:.4g} MB above an idle process{first} ({self.method})")
        if self.operators is not None:
            lines.append(f"operators of {self.subject} in one call, as {self.source} names them:")
            lines += [
                f"  {each.self_ms:>10.4f} ms {each.share:>6.1%}  {each.name}  x {each.calls:.3g}"
                for each in self.operators[:SHOWN]
            ]
            if not self.operators:
                lines.append("  none: the runtime keeps them to itself")
            if (rest := self.operators[SHOWN:]) != ():
                time_ms, part = sum(each.self_ms for each in rest), sum(each.share for each in rest)
                lines.append(f"  {time_ms:>10.4f} ms {part:>6.1%}  {len(rest)} others")
        return "\n".join(lines)


def profile_model(subject: Workload | str, *, memory: bool, operators: bool, trust: bool) -> ModelProfile:
    """The profile of an artifact's folder or of a workload as written, from a new process.

    Raises:
        MeasurementError: the process failed; the message has its reason and the end of its log.
    """
    name = subject if isinstance(subject, str) else subject.reference[0] if subject.reference else subject.name
    with tempfile.TemporaryDirectory(prefix="trimtab-profile-") as place:
        folder = pathlib.Path(place)
        job: dict[str, Any] = {"kind": "profile", "jobs": __name__, "memory": memory, "operators": operators, "name": name}
        if isinstance(subject, str) and os.path.isdir(subject):
            job |= {"artifact": os.path.abspath(subject), "trust": trust}
        else:
            job["workload"] = workload_source(subject, folder)
        worker = WorkerProcess(job, folder / "job")
        try:
            outcome = worker.wait(seconds=None, memory_mb=None)
            if outcome.result is None:
                raise MeasurementError(f"{name} could not be profiled: {outcome.reason}\n{worker.log_tail(8)}".rstrip())
        finally:
            worker.kill()
    return from_json(ModelProfile, outcome.result)


def profile_job(job: Mapping[str, Any], folder: pathlib.Path) -> Any:
    """Load a model as its user does, call it, and profile its calls."""
    found = ModelProfile(subject=job["name"])
    prepare = _prepare_artifact if "artifact" in job else _prepare_workload
    load, weighs_mb = prepare(job)
    start = time.perf_counter()
    with PeakMemory() as peak, user_code("The model failed on the example inputs"), torch.no_grad():
        call, own_profiler = load()
        call()
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(MORE_CALLS):
            call()
        call_s = (time.perf_counter() - start) / MORE_CALLS
    if job["memory"]:
        first, peak_mb = None if weighs_mb else first_s, peak.result.host_mb + weighs_mb  # weights at hand were loaded before
        found = dataclasses.replace(found, peak_mb=peak_mb, first_call_s=first, method=peak.result.method)
    if job["operators"]:
        repeats = max(1, min(REPEATS, int(PROFILED_S / max(call_s, 1e-9))))
        source, rows = _operators(call, own_profiler, repeats)
        found = dataclasses.replace(found, operators=tuple(rows), source=source)
    return to_json(found)


Call = Callable[[], object]
Load = Callable[[], tuple[Call, Callable[[int], Sequence[OperatorTime] | None]]]


def _operators(
    call: Call, own_profiler: Callable[[int], Sequence[OperatorTime] | None], repeats: int
) -> tuple[str, Sequence[OperatorTime]]:
    with contextlib.suppress(NotImplementedError):
        native = own_profiler(repeats)
        if native is not None:
            return "the runtime's own profiler", native
    with torch.no_grad():
        return TORCH, operator_times(call, repeats=repeats)


def _prepare_artifact(job: Mapping[str, Any]) -> tuple[Load, float]:
    """A function that loads the artifact, for calls with its first test vector; and no megabytes."""
    artifact = open_artifact(job["artifact"])
    leaves = artifact.golden().cases[0].inputs

    def load() -> tuple[Call, Callable[[int], Sequence[OperatorTime] | None]]:
        executable = artifact.load(trust=job["trust"])

        def call() -> None:
            executable.run(leaves)
            executable.synchronize()

        return call, lambda repeats: executable.operator_times(leaves, repeats)

    return load, 0.0


def _prepare_workload(job: Mapping[str, Any]) -> tuple[Load, float]:
    """A function that builds the model of the workload, and the MB of weights that exist before that."""
    workload = read_workload(job["workload"])
    args, kwargs = cloned(as_call(workload.inputs))  # copies, because the model may write to them

    def load() -> tuple[Call, Callable[[int], Sequence[OperatorTime] | None]]:
        model = workload.build_model()
        model.eval()  # not chained, because not every train() of a user's model returns the model
        return lambda: model(*args, **kwargs), lambda repeats: None

    return load, weight_bytes(workload.model) / 1e6 if isinstance(workload.model, nn.Module) else 0.0


JOBS = {"profile": profile_job}
