"""Two things timed against each other, each in a process of its own: artifacts or workloads, in any mixture."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from trimtab._internal.files import path_of
from trimtab._internal.units import positive
from trimtab._internal.user_code import outside_workers
from trimtab.artifact.manifest import MANIFEST
from trimtab.core.measurement import Comparison, Interval
from trimtab.core.workload import Workload
from trimtab.errors import ArtifactError, StorageError, UsageError
from trimtab.evaluation.evaluate import Objective
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.fork_pool import Workers
from trimtab.execution.workload_transfer import handed
from trimtab.importers.load import FORMS
from trimtab.measure import pairs
from trimtab.measure.energy import Energy, Power, energy_meter
from trimtab.measure.pooled import LEAST_START_S, MOST_STARTS, STARTS, narrow, number_of_starts, pooled
from trimtab.measure.remote import RemoteRunner
from trimtab.study.samplers.ladder import as_written

TIMED: tuple[Objective, ...] = ("latency", "throughput")
"""Objectives that are a matter of time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What :func:`compare` found. Without a rival the subject was timed against itself, and the ratio shows the noise."""

    schema: ClassVar[int] = 1

    subject: str
    rival: str | None
    comparison: Comparison
    note: str | None = None
    """Why the two should not be compared, if there is a reason."""
    energy: Energy | None = None
    """What a call takes of it, where the machine counts that."""

    def __str__(self) -> str:
        found = self.comparison
        shown = f"{self.subject}: {_ms(found.candidate)}"
        if self.rival is None:
            return f"{shown}\nnoise: it measures {_ratio(found)} of itself, over {found.pairs} pairs{self._spent}{self._advice}"
        verdict = f"speed-up {_ratio(found)} over {found.pairs} pairs: {_verdict(found.ratio)}"
        note = "" if self.note is None else f"\n{self.note}"
        return f"{shown}\n{self.rival}: {_ms(found.rival)}\n{verdict}{note}{self._spent}{self._advice}"

    @property
    def _spent(self) -> str:
        if self.energy is None:
            return ""
        if self.energy.reason is not None:
            return f"\n{self.energy.reason}"
        rival = "" if self.energy.rival_j is None else f", {self.rival} {self.energy.rival_j:.3g} J"
        return f"\nenergy of a call: {self.energy.subject_j:.3g} J{rival} ({self.energy.scope})"

    @property
    def _advice(self) -> str:
        doubt = self.comparison.doubt
        return "" if doubt is None else f"\n{doubt} Measure longer (--time 60s), or when the machine is quiet."


def compare(
    subject: Workload | str | os.PathLike[str],
    rival: Workload | str | os.PathLike[str] | None = None,
    *,
    seconds: float = 10.0,
    width: float = 0.02,
    objective: Objective = "latency",
    trust: bool = False,
) -> Timing:
    """Time ``subject`` against ``rival`` in turns, A B B A, until the ratio is known to ``width`` or ``seconds`` are over.

    Each is the folder of an artifact, which runs on its first test vector, or a workload or a reference to one, whose model is
    run as written on its example inputs. ``trust`` allows artifacts that carry native code.

    Raises:
        UsageError: a reference or folder is wrong.
        MeasurementError: one of the processes ended; says its last words.
        StorageError: there is no room for temporary files.
    """
    outside_workers("trimtab.compare")
    if objective not in TIMED:
        raise UsageError(f"objective is {objective!r}; what is timed can be {' or '.join(TIMED)}.")
    positive(seconds, "seconds")
    positive(width, "width")
    other = subject if rival is None else rival
    with _scratch() as place:
        sides = {"subject": subject, "rival": other}
        jobs = {name: _serve(what, trust, place / name) for name, what in sides.items()}
        power = Power(energy_meter())
        found, sizes = in_turns(jobs, objective=objective, seconds=seconds, width=width, power=power)
    energy = power.energy(found.candidate.median / 1e3, None if rival is None else found.rival.median / 1e3)
    note = None
    if sizes["subject"] != sizes["rival"]:
        note = (
            f"They ran on inputs of different sizes, {_words(sizes['subject'])} and {_words(sizes['rival'])}, so this compares "
            "more than two models. --shape NAME=1x3x224x224 gives a model file the other's sizes."
        )
    against = None if rival is None else _name(rival)
    return Timing(subject=_name(subject), rival=against, comparison=found, note=note, energy=energy)


def _name(what: Workload | str | os.PathLike[str]) -> str:
    return (what.reference[0] if what.reference else what.name) if isinstance(what, Workload) else os.fspath(what)


def _words(sizes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, size)) or "a number" for size in sizes) or "nothing"


def in_turns(
    jobs: Mapping[str, Mapping[str, Any]], *, objective: Objective, seconds: float, width: float, power: Power | None = None
) -> tuple[Comparison, dict[str, list[list[int]]]]:
    """Serve ``jobs["subject"]`` and ``jobs["rival"]``, each in its own process, and compare them; also says their sizes.

    Both are started several times, each time in new processes, unless calls are slow or ``seconds`` few.

    Raises:
        StorageError: there is no room for temporary files.
    """
    found, sizes = list[Comparison](), dict[str, list[list[int]]]()
    planned = most = max(1, min(STARTS, int(seconds / LEAST_START_S)))
    with Workers() as workers:
        while len(found) < most:
            timed, sizes, count = _start(
                jobs, workers, objective=objective, seconds=seconds, count=planned, width=width, power=power
            )
            found.append(timed)
            if len(found) == 1:
                planned, most = count, MOST_STARTS if count > 1 else 1
            if len(found) >= planned and narrow(found):
                break
    return pooled(found), sizes


def _start(
    jobs: Mapping[str, Mapping[str, Any]],
    workers: Workers,
    *,
    objective: Objective,
    seconds: float,
    count: int,
    width: float,
    power: Power | None,
) -> tuple[Comparison, dict[str, list[list[int]]], int]:
    """One of ``count`` starts of both sides that share ``seconds`` of timing; tells how many share it where calls are slow."""
    with _scratch() as folder, BaselineServers({"objective": objective}, folder, workers) as sides:
        for name, job in jobs.items():
            sides.begin(name, job)
        sizes = {name: sides.ready(name, seconds=600.0)["sizes"] for name in jobs}
        runners = {name: RemoteRunner(address, sides.authkey) for name, address in sides.addresses.items()}
        subject, rival = runners["subject"], runners["rival"]
        calls = [runner.block(1)[0] / 1e9 for runner in (subject, rival)]
        count = min(count, number_of_starts(calls[0], calls[1], seconds))
        found = pairs.compare(subject, rival, width=width, seconds=seconds / count, process_noise=0.0)
        if power is not None:
            for (name, runner), call_s in zip(runners.items(), calls, strict=True):
                power.look(name, runner, call_s)
        return found, sizes, count


@contextlib.contextmanager
def _scratch() -> Iterator[pathlib.Path]:
    """A folder for what the processes write: their logs, sockets and results."""
    try:
        with tempfile.TemporaryDirectory(prefix="trimtab-compare-") as place:
            yield pathlib.Path(place)
    except OSError as error:
        raise StorageError(
            f"What two processes are timed with needs temporary files, which cannot be written: {error.strerror or error}. "
            "Make room, or name a folder that can be written with TMPDIR."
        ) from error


def _serve(what: Workload | str | os.PathLike[str], trust: bool, folder: pathlib.Path) -> dict[str, Any]:
    """The job that serves ``what``; ``folder`` is for what a worker needs of it."""
    if isinstance(what, Workload):
        folder.mkdir()
        return {"workload": handed(what, folder), "recipe": as_written().to_json(), "fresh": False}
    path = path_of(what, "What is timed", "model.py:workload")
    if os.path.exists(path / MANIFEST):  # which says no where pathlib's raises
        return {"artifact": os.fspath(what), "trust": trust, "baseline": False}
    if os.path.isdir(what):
        raise ArtifactError(f"{os.fspath(what)!r} is no artifact: it has no {MANIFEST}. Give the folder that has one.")
    if not path.suffix and ":" not in os.fspath(what):
        raise ArtifactError(f"There is no artifact folder {os.fspath(what)!r}. A workload is written {FORMS}.")
    return {"workload": {"reference": os.fspath(what)}, "recipe": as_written().to_json(), "fresh": False}


def _ms(measured: Any) -> str:
    p90 = "" if measured.p90 is None else f", p90 {measured.p90:.4g} ms"
    return f"median {measured.median:.4g} ms ({measured.interval.low:.4g} to {measured.interval.high:.4g}){p90}, n {measured.n}"


def _ratio(found: Comparison) -> str:
    return f"{found.ratio.quoted(3)} (95% interval {found.ratio.low:.3f} to {found.ratio.high:.3f})"


def _verdict(ratio: Interval) -> str:
    """Which of the two is faster; of bounds that may not hold, as beside busy neighbours, only what wider ones say too."""
    if ratio.faster and not ratio.doubtful:
        return "faster"
    if ratio.slower and not (ratio.vague and ratio.high * ratio.high > ratio.value):
        return "slower"
    return "no difference that can be proven"
