"""Speed of the baseline as an exported program, which an artifact carries; it may differ from that of the original module."""

from __future__ import annotations

import pathlib
import tempfile

from trimtab._internal.user_code import save_errors
from trimtab.core.backend import Backend
from trimtab.core.measurement import Comparison, Interval
from trimtab.errors import ArtifactError, CompileError
from trimtab.evaluation.evaluate import Plan, runner_for
from trimtab.evaluation.prepared_workload import Subject
from trimtab.measure.pairs import compare

SECONDS = 2.0
"""Maximum seconds for the comparison; less if the study times its trials for less."""
SLOW_MS = 500.0
"""Milliseconds. Longer calls spend their time in kernels, which are the same in both forms."""


def baseline_speedup(
    subject: Subject, backend: Backend, found: Comparison | None, *, plan: Plan, folder: pathlib.Path
) -> Interval | None:
    """How many times faster the exported baseline is than the module as written, both timed in this process.

    With it, speed-ups over one form can be converted to speed-ups over the other. ``folder`` holds the export meanwhile.
    Returns ``None`` if the baseline cannot be exported and loaded, or if its calls in the comparison ``found`` are slow.
    """
    if found is None or found.rival.median > SLOW_MS:
        return None
    baseline = backend.compile(subject.candidate)
    runner = runner_for(baseline, subject.candidate, subject, plan.objective)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        try:
            with save_errors():
                baseline.save(pathlib.Path(name))
            exported = backend.load(pathlib.Path(name), baseline.signature, baseline.settings)
        except (CompileError, ArtifactError):  # the artifact reports these itself
            return None
        other = runner_for(exported, subject.candidate, subject, plan.objective)
        return compare(other, runner, width=0.02, seconds=min(SECONDS, plan.seconds), process_noise=0.0).ratio
