"""Verify an artifact where it is deployed: files, outputs, environment, and speed against the original that travels with it."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from trimtab._internal.units import positive
from trimtab.api.compare import in_turns
from trimtab.artifact import artifact
from trimtab.artifact.artifact import Verification
from trimtab.errors import ArtifactError, CompileError, MeasurementError, MissingPackageError, StorageError, UsageError
from trimtab.evaluation.evaluate import Objective


def verify(path: str | os.PathLike[str], *, trust: bool = False, speed: bool = True, seconds: float = 10.0) -> Verification:
    """Replay what the artifact in ``path`` claims, here and now.

    With ``speed``, its model and the original are timed in turns, each in a process of its own, for up to ``seconds``: call by
    call, or several requests at once where throughput was what it was made for.

    Raises:
        UsageError: ``path`` is no path, or ``seconds`` no number above zero.
        ArtifactError: there is no artifact that could be verified.
        UntrustedError: verifying would run machine code from the artifact, and ``trust`` is not given.
    """
    positive(seconds, "seconds")
    found = artifact.verify(path, trust=trust)
    manifest = artifact.open_artifact(path).manifest
    if not (speed and found.ok) or manifest.baseline is None:
        return found
    objective: Objective = "throughput" if manifest.evidence.get("objective") == "throughput" else "latency"
    folder = str(pathlib.Path(path).resolve())
    jobs = {
        "subject": {"artifact": folder, "trust": trust, "baseline": False},
        "rival": {"artifact": folder, "trust": trust, "baseline": True},
    }
    try:
        here, _ = in_turns(jobs, objective=objective, seconds=seconds, width=0.02)
    except (ArtifactError, CompileError, MeasurementError, MissingPackageError, StorageError, UsageError) as error:
        return dataclasses.replace(found, speed_reason=f"It could not be compared here: {error}")
    return dataclasses.replace(found, speed=here, speed_reason=None)
