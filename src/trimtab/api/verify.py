"""Verify an artifact on the machine that runs it: files, outputs, environment, and speed against the original in it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

from trimtab._internal.units import positive
from trimtab._internal.validation import checked_call
from trimtab.api.compare import time_in_turns
from trimtab.artifact import artifact, verified
from trimtab.artifact.artifact import Verification
from trimtab.errors import ArtifactError, CompileError, MeasurementError, MissingPackageError, StorageError, UsageError
from trimtab.evaluation.evaluate import Objective
from trimtab.measure.host import busy_note


@checked_call("trimtab.verify")
def verify(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    speed: bool = True,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] | None = None,
) -> Verification:
    """Check the claims of an artifact on this machine: hashes, outputs on its test vectors, environment and speed.

    Args:
        path: the folder of the artifact.
        trust: allow machine code from the artifact.
        speed: also time the model and the original in turns, each in a process of its own: single calls, or concurrent requests
            if the objective was throughput. A speed that was measured on a quiet machine is written into a file beside the
            artifact, such as ``runs/net/artifact.verified.json``, and shown in the report.
        seconds: longest timing.
        on_progress: called first with a sentence if the speed is measured and other processes make this machine busy.

    Raises:
        UsageError: ``path`` is no path, or ``seconds`` is not above 0.
        ArtifactError: ``path`` has no artifact that can be verified.
        UntrustedError: the artifact has machine code, and ``trust`` is not given.
    """
    positive(seconds, "seconds")
    if speed and on_progress is not None and (note := busy_note()) is not None:
        on_progress(note)
    found = artifact.verify(path, trust=trust)
    manifest = artifact.open_artifact(path).manifest
    if not (speed and found.ok) or manifest.baseline is None:
        return found
    if not manifest.recipe["passes"] and manifest.recipe["backend"] == manifest.baseline.backend:
        return dataclasses.replace(found, speed_reason="It is the original itself, and nothing is timed against itself.")
    objective: Objective = "throughput" if manifest.evidence.get("objective") == "throughput" else "latency"
    folder = str(pathlib.Path(path).resolve())
    jobs = {
        "subject": {"artifact": folder, "trust": trust, "baseline": False},
        "rival": {"artifact": folder, "trust": trust, "baseline": True},
    }
    try:
        here, _ = time_in_turns(jobs, objective=objective, seconds=seconds, width=0.02)
    except (ArtifactError, CompileError, MeasurementError, MissingPackageError, StorageError, UsageError) as error:
        return dataclasses.replace(found, speed_reason=f"It could not be compared here: {error}")
    found = dataclasses.replace(found, speed=here, speed_reason=None)
    if (reason := verified.why_not_recorded(here)) is not None:
        return dataclasses.replace(found, record_reason=reason)
    try:
        return dataclasses.replace(found, record=str(verified.write_record(pathlib.Path(path), manifest, here)))
    except OSError as error:
        why = f"{verified.record_path(pathlib.Path(path))} cannot be written: {error.strerror or error}."
        return dataclasses.replace(found, record_reason=why)
