"""The speed that ``verify`` measured, in a file beside the artifact. The files of the artifact are not changed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import pathlib
from typing import ClassVar

from trimtab._internal.files import sha256
from trimtab._internal.serialization import from_json, write_json
from trimtab.artifact.manifest import MANIFEST, Manifest
from trimtab.core.measurement import Comparison, Interval
from trimtab.errors import UsageError
from trimtab.hardware.environment import Environment

SUFFIX = ".verified.json"
MAX_FOREIGN_SHARE = 0.1
"""Largest share of the CPUs that other processes may use during a measurement that is recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """The speed of an artifact against the original in it, with its conditions."""

    schema: ClassVar[int] = 1

    manifest: str
    """SHA-256 of the artifact's manifest, which names the hashes of all other files."""
    at: str
    """Date and time in UTC, ISO 8601."""
    speed: Comparison
    baseline_speedup: Interval | None
    """Speed-up of the original in the artifact over the model as written, measured when the artifact was made."""
    threads: int | None
    """Number of threads of the artifact; ``None`` is the runtime's default."""
    environment: Environment

    def __str__(self) -> str:
        threads = "the runtime's number of threads" if self.threads is None else f"threads: {self.threads}"
        where = f"{self.speed.conditions}; {self.environment.cpu}; {self.at}"
        return f"{self.speed.ratio.times()} the original in the artifact ({threads}; {where})"


def record_path(folder: pathlib.Path) -> pathlib.Path:
    """The file for the artifact in ``folder``: ``runs/net/artifact.verified.json``."""
    whole = folder.absolute()
    return whole.with_name(whole.name + SUFFIX)


def why_not_recorded(found: Comparison) -> str | None:
    """Why ``found`` is too uncertain to be recorded, as a sentence; ``None`` if it is not."""
    used = found.foreign + found.stolen
    if used > MAX_FOREIGN_SHARE:
        return f"Other processes used {used:.0%} of the CPUs meanwhile. Verify again when the machine is quiet."
    if found.ratio.vague:
        return f"The ratio lies between {found.ratio.bounds(' and ')}, which is no figure. Verify longer: --time 60s."
    return None


def write_record(folder: pathlib.Path, manifest: Manifest, speed: Comparison) -> pathlib.Path:
    """Write ``speed``, measured now on this machine, beside the artifact in ``folder``. Returns the file.

    Raises:
        OSError: the file cannot be written.
    """
    claim = manifest.evidence.get("baseline_speedup")
    target = record_path(folder)
    write_json(
        target,
        Verified(
            manifest=sha256(folder / MANIFEST),
            at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            speed=speed,
            baseline_speedup=None if claim is None else from_json(Interval, claim),
            threads=manifest.settings.threads,
            environment=Environment.capture(),
        ),
    )
    return target


def read_record(folder: pathlib.Path) -> Verified | None:
    """The record of the artifact in ``folder``; ``None`` if there is none, or if it belongs to another artifact."""
    try:
        found = from_json(Verified, json.loads(record_path(folder).read_text(encoding="utf-8")))
        return found if found.manifest == sha256(folder / MANIFEST) else None
    except (OSError, ValueError, RecursionError, UsageError):
        return None  # a damaged file states nothing; the next verification replaces it
