"""How fast the original is as it travels with an artifact: an exported program, which need not be as fast as the module was."""

from __future__ import annotations

import pathlib
import tempfile

from trimtab._internal.user_code import writing
from trimtab.core.backend import Backend
from trimtab.core.measurement import Comparison, Interval
from trimtab.errors import ArtifactError, CompileError
from trimtab.evaluation.evaluate import Plan, runner_for
from trimtab.evaluation.prepared_workload import Subject
from trimtab.measure.pairs import compare

SECONDS = 2.0
"""Most time for the comparison; less where the study was given less for each of its own."""
SLOW_MS = 500.0
"""Calls that take longer spend their time in kernels, which are the same in both forms."""


def baseline_speedup(
    subject: Subject, original: Backend, found: Comparison | None, *, plan: Plan, folder: pathlib.Path
) -> Interval | None:
    """How many times faster the original is in its saved form than as written, both in this process, so that speed-ups over the
    one can be held against those over the other. ``folder`` is where it is saved meanwhile.

    ``None`` where it has no saved form that loads, or where ``found``, what was measured against it, says that its calls are
    slow.
    """
    if found is None or found.rival.median > SLOW_MS:
        return None
    written = original.compile(subject.candidate)
    runner = runner_for(written, subject.candidate, subject, plan.objective)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        try:
            with writing():
                written.save(pathlib.Path(name))
            travels = original.load(pathlib.Path(name), written.signature, written.settings)
        except (CompileError, ArtifactError):  # of which the artifact has its own words
            return None
        other = runner_for(travels, subject.candidate, subject, plan.objective)
        return compare(other, runner, width=0.02, seconds=min(SECONDS, plan.seconds), process_noise=0.0).ratio
