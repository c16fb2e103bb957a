"""Two things timed against each other, each in a process of its own: artifacts or workloads, in any mixture."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

from trimtab._manifest import MANIFEST
from trimtab.errors import ArtifactError
from trimtab.evaluate import Objective
from trimtab.measure import pairs
from trimtab.measure.remote import RemoteRunner
from trimtab.measurement import Comparison
from trimtab.study.jobs import authkey
from trimtab.study.rivals import Rivals
from trimtab.study.sampler import as_written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What :func:`compare` found. Without a rival the subject was timed against itself, and the ratio shows the noise."""

    schema: ClassVar[int] = 1

    subject: str
    rival: str | None
    comparison: Comparison

    def __str__(self) -> str:
        found = self.comparison
        shown = f"{self.subject}: {_ms(found.candidate)}"
        if self.rival is None:
            return f"{shown}\nnoise: it measures {_ratio(found)} of itself, over {found.pairs} pairs"
        verdict = "faster" if found.ratio.low > 1 else "slower" if found.ratio.high < 1 else "no difference that can be proven"
        return f"{shown}\n{self.rival}: {_ms(found.rival)}\nspeed-up {_ratio(found)} over {found.pairs} pairs: {verdict}"


def compare(
    subject: str | os.PathLike[str],
    rival: str | os.PathLike[str] | None = None,
    *,
    seconds: float = 10.0,
    width: float = 0.02,
    objective: Objective = "latency",
    trust: bool = False,
) -> Timing:
    """Time ``subject`` against ``rival`` in turns, A B B A, until the ratio is known to ``width`` or ``seconds`` are over.

    Each is the folder of an artifact, or a reference to a workload, whose model is run as written. ``trust`` allows
    artifacts that carry native code.

    Raises:
        UsageError: a reference or folder is wrong.
        MeasurementError: one of the processes ended; says its last words.
    """
    jobs = {"subject": _serve(subject, trust), "rival": _serve(subject if rival is None else rival, trust)}
    found = in_turns(jobs, objective=objective, seconds=seconds, width=width)
    return Timing(subject=os.fspath(subject), rival=None if rival is None else os.fspath(rival), comparison=found)


def in_turns(jobs: Mapping[str, Mapping[str, Any]], *, objective: Objective, seconds: float, width: float) -> Comparison:
    """Serve ``jobs["subject"]`` and ``jobs["rival"]``, each in a process of its own, and compare them."""
    with (
        tempfile.TemporaryDirectory(prefix="trimtab-compare-") as folder,
        Rivals({"objective": objective}, pathlib.Path(folder)) as sides,
    ):
        for name, job in jobs.items():
            sides.begin(name, job)
        for name in jobs:
            sides.ready(name, seconds=600.0)
        runners = {name: RemoteRunner(address, authkey()) for name, address in sides.addresses.items()}
        return pairs.compare(runners["subject"], runners["rival"], width=width, seconds=seconds)


def _serve(what: str | os.PathLike[str], trust: bool) -> dict[str, Any]:
    if (pathlib.Path(what) / MANIFEST).exists():
        return {"artifact": os.fspath(what), "trust": trust, "baseline": False}
    if pathlib.Path(what).is_dir():
        raise ArtifactError(f"{os.fspath(what)!r} is no artifact: it has no {MANIFEST}. Give the folder that has one.")
    if not pathlib.Path(what).suffix and ":" not in os.fspath(what):
        raise ArtifactError(
            f"There is no artifact folder {os.fspath(what)!r}. A workload is written file.py, file.py:name or "
            "package.module:name."
        )
    return {"workload": {"reference": os.fspath(what)}, "recipe": as_written().to_json(), "fresh": False}


def _ms(measured: Any) -> str:
    p90 = "" if measured.p90 is None else f", p90 {measured.p90:.4g} ms"
    return f"median {measured.median:.4g} ms ({measured.interval.low:.4g} to {measured.interval.high:.4g}){p90}, n {measured.n}"


def _ratio(found: Comparison) -> str:
    return f"{found.ratio.value:.3f}x (95% interval {found.ratio.low:.3f} to {found.ratio.high:.3f})"
