"""Time two artifacts or workloads against each other, each in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from trimtab._internal.files import path_of
from trimtab._internal.units import positive
from trimtab._internal.user_code import refuse_in_worker
from trimtab._internal.validation import checked_call
from trimtab.artifact.manifest import MANIFEST
from trimtab.core.measurement import Comparison, Interval, Measurement
from trimtab.core.workload import Workload
from trimtab.errors import ArtifactError, StorageError, UsageError
from trimtab.evaluation.evaluate import Objective, per_second
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.fork_pool import Workers
from trimtab.execution.workload_transfer import workload_source
from trimtab.importers.load import FORMS
from trimtab.measure import pairs
from trimtab.measure.energy import Energy, Power, energy_meter
from trimtab.measure.host import busy_note
from trimtab.measure.pooled import LEAST_START_S, MOST_STARTS, STARTS, narrow, number_of_starts, pooled, start_timing
from trimtab.measure.remote import RemoteRunner
from trimtab.study.samplers.ladder import as_written

TIMED: tuple[Objective, ...] = ("latency", "throughput")
"""Objectives that :func:`compare` can time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The result of :func:`compare`. Without a rival the subject is timed against itself, and the ratio shows the noise."""

    schema: ClassVar[int] = 1

    subject: str
    rival: str | None
    comparison: Comparison
    note: str | None = None
    """Why the two are not comparable; ``None`` if they are."""
    energy: Energy | None = None
    """Energy per call; ``None`` if it was not measured."""
    throughput: Measurement | None = None
    """Examples per second of the subject, if throughput was asked for. The times in ``comparison`` are then those of as many
    examples as the example inputs have, with several requests at once."""
    rival_throughput: Measurement | None = None
    """Examples per second of the rival, if throughput was asked for."""

    def __str__(self) -> str:
        found = self.comparison
        shown = f"{self.subject}: {_figures(found.candidate, self.throughput)}"
        if self.rival is None:
            noise = f"noise: it measures {_ratio(found)} of itself, over {found.pairs} pairs"
            return f"{shown}\n{noise}{self._measured}{self._advice}"
        verdict = f"speed-up {_ratio(found)} over {found.pairs} pairs: {_verdict(found.ratio)}"
        note = "" if self.note is None else f"\n{self.note}"
        rival = _figures(found.rival, self.rival_throughput)
        return f"{shown}\n{self.rival}: {rival}\n{verdict}{note}{self._measured}{self._advice}"

    @property
    def _measured(self) -> str:
        """The conditions, and the energy of a call or why it is unknown."""
        lines = f"\nconditions: {self.comparison.conditions}"
        if self.energy is None:
            return lines
        if self.energy.reason is not None:
            return f"{lines}\n{self.energy.reason}"
        rival = "" if self.energy.rival_j is None else f", {self.rival} {self.energy.rival_j:.3g} J"
        return f"{lines}\nenergy of a call: {self.energy.subject_j:.3g} J{rival} ({self.energy.scope})"

    @property
    def _advice(self) -> str:
        doubt = self.comparison.doubt
        return "" if doubt is None else f"\n{doubt} Measure longer (--time 60s), or when the machine is quiet."


@checked_call("trimtab.compare")
def compare(
    subject: Workload | str | os.PathLike[str],
    rival: Workload | str | os.PathLike[str] | None = None,
    *,
    seconds: float = 10.0,
    width: float = 0.02,
    objective: Objective = "latency",
    trust: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Timing:
    """Time ``subject`` against ``rival`` in the order A B B A.

    Both are artifact folders, workloads or references to workloads. An artifact runs on its first test vector, the model
    of a workload as written on its example inputs.

    Args:
        subject: what is timed.
        rival: what it is compared with; ``None`` compares ``subject`` with itself, which shows the noise.
        seconds: longest timing.
        width: timing ends once the 95% interval of the ratio is this narrow, relative to the ratio.
        objective: ``latency`` or ``throughput``.
        trust: allow artifacts with native code.
        on_progress: called first with a sentence if other processes make this machine busy.

    Raises:
        UsageError: a reference or an argument is wrong.
        ArtifactError: a folder is no artifact.
        MeasurementError: a process died; the message has the end of its log.
        StorageError: temporary files cannot be written.
    """
    refuse_in_worker("trimtab.compare")
    if objective not in TIMED:
        raise UsageError(f"objective is {objective!r}; what is timed can be {' or '.join(TIMED)}.")
    positive(seconds, "seconds")
    positive(width, "width")
    if on_progress is not None and (note := busy_note()) is not None:
        on_progress(note)
    other = subject if rival is None else rival
    with _scratch() as place:
        sides = {"subject": subject, "rival": other}
        jobs = {name: _serve_job(what, trust, place / name) for name, what in sides.items()}
        power = Power(energy_meter())
        found, facts = time_in_turns(jobs, objective=objective, seconds=seconds, width=width, power=power)
    energy = power.energy(found.candidate.median / 1e3, None if rival is None else found.rival.median / 1e3)
    note, sizes = None, {name: told["sizes"] for name, told in facts.items()}
    if sizes["subject"] != sizes["rival"]:
        note = (
            f"They ran on inputs of different sizes, {_sizes(sizes['subject'])} and {_sizes(sizes['rival'])}, so this compares "
            "more than two models. --shape NAME=1x3x224x224 gives a model file the other's sizes."
        )
    timed = Timing(
        subject=_name(subject), rival=None if rival is None else _name(rival), comparison=found, note=note, energy=energy
    )
    if objective == "latency":
        return timed
    here = per_second(found.candidate, facts["subject"]["examples"])
    other_here = None if rival is None else per_second(found.rival, facts["rival"]["examples"])
    return dataclasses.replace(timed, throughput=here, rival_throughput=other_here)


def _name(what: Workload | str | os.PathLike[str]) -> str:
    return (what.reference[0] if what.reference else what.name) if isinstance(what, Workload) else os.fspath(what)


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, size)) or "a number" for size in sizes) or "nothing"


def time_in_turns(
    jobs: Mapping[str, Mapping[str, Any]], *, objective: Objective, seconds: float, width: float, power: Power | None = None
) -> tuple[Comparison, dict[str, Any]]:
    """Serve ``jobs["subject"]`` and ``jobs["rival"]`` in processes of their own and compare them.

    Both are started several times in new processes, or once if calls are slow or ``seconds`` are few.

    Returns:
        The comparison, and what each side states: ``sizes`` of its input tensors, and ``examples`` in them.

    Raises:
        StorageError: temporary files cannot be written.
    """
    found, facts = list[Comparison](), dict[str, Any]()
    planned = most = max(1, min(STARTS, int(seconds / LEAST_START_S)))
    with Workers() as workers:
        while len(found) < most:
            timed, facts, count = _start(
                jobs, workers, objective=objective, seconds=seconds, count=planned, width=width, power=power
            )
            found.append(timed)
            if len(found) == 1:
                planned, most = count, MOST_STARTS if count > 1 else 1
            spent = len(found) * start_timing(seconds, planned).seconds
            if len(found) >= planned and (narrow(found) or spent >= seconds):
                break
    return pooled(found), facts


def _start(
    jobs: Mapping[str, Mapping[str, Any]],
    workers: Workers,
    *,
    objective: Objective,
    seconds: float,
    count: int,
    width: float,
    power: Power | None,
) -> tuple[Comparison, dict[str, Any], int]:
    """One of ``count`` starts that share ``seconds`` of timing. Returns the comparison, what the sides state, and the number of
    starts, which is lower if calls are slow."""
    with _scratch() as folder, BaselineServers({"objective": objective}, folder, workers) as sides:
        for name, job in jobs.items():
            sides.start_job(name, job)
        facts = {name: sides.ready(name, seconds=600.0) for name in jobs}
        runners = {name: RemoteRunner(address, sides.authkey) for name, address in sides.addresses.items()}
        subject, rival = runners["subject"], runners["rival"]
        calls = [runner.block(1)[0] / 1e9 for runner in (subject, rival)]
        count = min(count, number_of_starts(calls[0], calls[1], seconds))
        found = pairs.compare(subject, rival, width=width, **start_timing(seconds, count)._asdict(), process_noise=0.0)
        if power is not None:
            for (name, runner), call_s in zip(runners.items(), calls, strict=True):
                power.measure(name, runner, call_s)
        return found, facts, count


@contextlib.contextmanager
def _scratch() -> Iterator[pathlib.Path]:
    """A temporary folder for logs, sockets and results of the processes."""
    try:
        with tempfile.TemporaryDirectory(prefix="trimtab-compare-") as place:
            yield pathlib.Path(place)
    except OSError as error:
        raise StorageError(
            f"What two processes are timed with needs temporary files, which cannot be written: {error.strerror or error}. "
            "Make room, or name a folder that can be written with TMPDIR."
        ) from error


def _serve_job(what: Workload | str | os.PathLike[str], trust: bool, folder: pathlib.Path) -> dict[str, Any]:
    """The job that serves ``what``; ``folder`` is for files that the worker reads."""
    job = {"recipe": as_written().to_json(), "fresh": False, "prepared": str(folder / "prepared")}
    folder.mkdir()
    if isinstance(what, Workload):
        return {**job, "workload": workload_source(what, folder)}
    path = path_of(what, "What is timed", "model.py:workload")
    if os.path.exists(path / MANIFEST):  # pathlib raises for some paths
        return {"artifact": os.fspath(what), "trust": trust, "baseline": False}
    if os.path.isdir(what):
        raise ArtifactError(f"{os.fspath(what)!r} is no artifact: it has no {MANIFEST}. Give the folder that has one.")
    if not path.suffix and ":" not in os.fspath(what):
        raise ArtifactError(f"There is no artifact folder {os.fspath(what)!r}. A workload is written {FORMS}.")
    return {**job, "workload": {"reference": os.fspath(what)}}


def _figures(measured: Measurement, throughput: Measurement | None) -> str:
    if throughput is not None:
        return f"{throughput.median:.4g} examples/s ({throughput.interval.low:.4g} to {throughput.interval.high:.4g})"
    p90 = "" if measured.p90 is None else f", p90 {measured.p90:.4g} ms"
    return f"median {measured.median:.4g} ms ({measured.interval.low:.4g} to {measured.interval.high:.4g}){p90}, n {measured.n}"


def _ratio(found: Comparison) -> str:
    return f"{found.ratio.quoted(3)} (95% interval {found.ratio.low:.3f} to {found.ratio.high:.3f})"


def _verdict(ratio: Interval) -> str:
    """Words for the outcome. If load makes the bounds doubtful, a claim needs a clearer difference."""
    if ratio.faster and not ratio.doubtful:
        return "faster"
    if ratio.slower and not (ratio.vague and ratio.high * ratio.high > ratio.value):
        return "slower"
    return "no difference that can be proven"
