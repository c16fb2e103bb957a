"""The record of a study: all that a report shows, as one JSON file in the run folder."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from trimtab._internal.serialization import dumps, from_json, to_json, write_json
from trimtab._internal.text import counted, shortened, with_fix
from trimtab.artifact.verified import Verified, read_record
from trimtab.core.finding import Finding
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop
from trimtab.core.recipe import Recipe
from trimtab.core.technique import Mode, Technique
from trimtab.core.trained import Trained
from trimtab.core.trial import Trial
from trimtab.errors import StorageError, UsageError
from trimtab.evaluation.code_fingerprint import MODEL
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.evaluate import Objective
from trimtab.evaluation.explain import Explanation
from trimtab.hardware.environment import Environment
from trimtab.hardware.peaks import Peaks
from trimtab.measure.energy import Energy
from trimtab.study.ranking import Status
from trimtab.study.waterfall import Step

RECORD, OWNER = "record.json", "workload.json"
SEED_IT = " If you changed nothing, something in it is random: seed torch, numpy and random before the model and data are made."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Results of the dry run of the workload."""

    name: str
    fingerprint: str
    """Hash of weights, inputs, data and outputs on this machine. A resumed study must have the same."""
    identity: str
    """Hash of weights and example inputs, the same on every machine."""
    score: float | None
    n: int | None
    blocked: Mapping[str, str]
    """Technique as canonical JSON -> why this workload cannot use it on this machine."""
    notes: tuple[str, ...]
    """Assumptions and findings of the checks, in sentences."""
    inputs: str
    threads: int
    splits: Mapping[str, int]
    """Number of examples in calibration, selection and test."""
    share: bool = False
    """Whether the score is a share, such as an accuracy, whose drops are shown in percent."""
    least: Mapping[str, Drop] = dataclasses.field(default_factory=dict)
    """Smallest drop that can be proven on the selection data and on the test data: the model as written against itself."""
    convolves: bool = False
    """Whether most weights belong to convolutions."""
    findings: tuple[Finding, ...] = ()
    """Findings of the checks about the workload as written."""
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Hashes of the parameters and of the buffers, which must be the same in all processes."""
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Hashes of the user's code by file name (:mod:`trimtab.evaluation.code_fingerprint`): code may change speed
    without outputs."""

    def why_not(self, recipe: Recipe) -> str | None:
        """The first reason in :attr:`blocked` against ``recipe``; ``None`` if there is none."""
        steps: Sequence[Technique] = (*recipe.passes, recipe.backend)
        return next((why for step in steps if (why := self.blocked.get(dumps(step, indent=None)))), None)


class Bounds(TypedDict):
    """A speed-up with its interval."""

    value: float | None
    low: float | None
    high: float | None


class Times(TypedDict):
    """A latency in milliseconds."""

    median: float | None
    p90: float | None


class Score(TypedDict):
    """The score on the data by which a rung was judged."""

    value: float | None


class Lost(TypedDict):
    """A drop of the score."""

    value: float | None
    upper: float | None


class Rung(TypedDict):
    """A rung of the ladder, written by :func:`trimtab.study.ranking.entry`; unmeasured figures are ``None``."""

    rung: str
    recipe: str
    state: str
    reason: str | None
    speedup: Bounds
    latency_ms: Times
    score: Score
    drop: Lost
    size_mb: float | None
    peak_mb: float | None
    cold_s: float | None


SHORT = 40
"""A note of fewer characters is dropped only if the verdict contains all of it."""
KEPT_SPEEDUP = "the original, 1.00x"
"""The speed-up of the rung ``best`` if the original ships."""


def is_kept_original(rung: Mapping[str, Any]) -> bool:
    """Whether ``rung`` is the original, which ships because nothing is faster. Its speed-up is exactly 1."""
    return bool(rung["rung"] == "best" and rung["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The state of a study; unknown fields are ``None`` or empty. It round-trips through JSON."""

    schema: ClassVar[int] = 1

    workload: str
    command: str
    """The command that resumes the study, or repeats it elsewhere."""
    started: str
    """Start of the last run, in UTC, ISO 8601."""
    seconds: float
    """Duration of the last run."""
    objective: Objective
    sampler: str
    limits: Limits
    prepared: Prepared
    environment: Environment
    trials: tuple[Trial, ...]
    mode: Mode = "infer"
    """Whether a model was optimized or a training tuned."""
    status: Status | None = None
    """``None`` while the study runs, or if it was killed."""
    sentence: str = ""
    """The verdict."""
    ladder: tuple[Rung, ...] = ()
    best: str | None = None
    """Hash of the recipe that ships."""
    confirmation: Confirmation | None = None
    artifact: str | None = None
    """Folder of the artifact, relative to the run folder."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Files of the artifact -> SHA-256."""
    peaks: Peaks | None = None
    explanations: Mapping[str, Explanation] = dataclasses.field(default_factory=dict)
    """``as_written`` and ``best``."""
    notes: tuple[str, ...] = ()
    settings: str | None = None
    """The settings for a tuned training, as Python source."""
    tried: tuple[str, ...] = ()
    """Recipes that were confirmed, and so have seen the test data, in order."""
    refused: tuple[Confirmation, ...] = ()
    """Confirmations that failed, in order."""
    steps: tuple[Step, ...] = ()
    """Gain of each step of the recipe that ships, from the trials of the search."""
    note: str | None = None
    """The user's own note on the study."""
    trainings: tuple[Trained, ...] = ()
    """The trainings of smaller networks, in order."""
    compress: tuple[str, ...] = ()
    """The ``compress`` option of the study."""
    train_s: float | None = None
    """Time budget of all trainings in seconds; ``None`` without one."""
    untried: tuple[str, ...] = ()
    """Recipes that the budget left no time for in the last run, in the order of the search."""
    energy: Energy | None = None
    """Energy of a call of what ships and of the original, or the reason why it is unknown."""
    verified: Verified | None = None
    """Latest record of ``trimtab verify`` beside the artifact; set by :meth:`read`."""

    @property
    def winner(self) -> Trial | None:
        """The trial whose recipe ships; ``None`` if no recipe was confirmed."""
        if self.confirmation is not None and not self.confirmation.ok:
            return None
        return next((trial for trial in self.trials if trial.recipe.hash == self.best), None)

    @property
    def options(self) -> tuple[str, str]:
        """The options or arguments that begin the study again, and those that also lengthen each timing."""
        if self.mode == "train":
            return "fresh=True", "timing_seconds=60, fresh=True"
        return "--fresh", "--timing 60s --fresh"

    def write(self, folder: pathlib.Path) -> None:
        """Write the record to run folder ``folder``."""
        write_json(folder / RECORD, self)

    @classmethod
    def read(cls, folder: pathlib.Path) -> Record:
        """The record in run folder ``folder``.

        Raises:
            UsageError: ``folder`` has no study.
            StorageError: the record is damaged, or of another version.
        """
        path = folder / RECORD
        try:
            found = from_json(cls, json.loads(path.read_text(encoding="utf-8")))
            later = None if found.artifact is None else read_record(folder / found.artifact)
            return dataclasses.replace(found, verified=later)
        except PermissionError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}. Let this user read it.") from error
        except (OSError, ValueError, RecursionError) as error:  # a UsageError is a ValueError
            if not os.path.isfile(path):
                what = "is not a folder" if not os.path.isdir(folder) else f"holds no {RECORD}"
                raise UsageError(
                    f"{folder} {what}. Give the run folder of a study, such as runs/digits; optimize prints it."
                ) from error
            reason = with_fix(shortened(str(error), 400), "The same optimize command writes it anew.")
            raise StorageError(f"{path} cannot be read: {reason}") from error


def report_name(workload: str) -> str:
    """File name of the report of a study of the workload named ``workload``."""
    return re.sub(r"[^\w.-]+", "-", workload) + "-report.html"


def without_repeats(sentence: str, notes: Sequence[str]) -> list[str]:
    """``notes`` without repetitions, and without those that the verdict's ``sentence`` says, after a lead-in or not."""
    bare = {note: note.partition(": ")[2] or note for note in notes}
    return [
        note for note, said in bare.items() if note not in sentence and (len(said) < SHORT or said.rstrip(".") not in sentence)
    ]


def claim(folder: pathlib.Path, prepared: Prepared, environment: Environment, identity: Mapping[str, Any]) -> None:
    """Mark the run folder as that of the study with ``identity``, so that no two studies share trials and artifact.

    Raises:
        UsageError: the folder belongs to another study.
        StorageError: the mark cannot be read.
    """
    python = ".".join(environment.python.split(".")[:2])
    owner = {
        "name": prepared.name,
        "fingerprint": prepared.fingerprint,
        "identity": prepared.identity,
        "environment": f"{environment.fingerprint} with Python {python}",
        "threads": prepared.threads,
        "code": dict(prepared.code),
        "study": to_json(identity),
    }
    path = folder / OWNER
    known = owner | (_read(path, owner) if path.exists() else {})
    if known != owner and (difference := _difference(known, owner)):
        what, hint = difference
        raise UsageError(
            f"The run folder {folder} was made {what}. Use --out FOLDER (in Python, out=...) for this one, or --fresh "
            f"(fresh=True) to forget the other.{hint}"
        )
    write_json(path, owner)


def _read(path: pathlib.Path, owner: Mapping[str, Any]) -> dict[str, Any]:
    """The mark in ``path``, whose values must have the types of those of ``owner``."""
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
        if odd := [name for name in owner if name in known and type(known[name]) is not type(owner[name])]:
            raise TypeError(f"{odd[0]!r} is {shortened(repr(known[odd[0]]), 200)}")
        return known
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{path}, which says what the run folder is for, cannot be read: {error}. Use another folder with --out (in "
            "Python, out=...), or --fresh (fresh=True) to begin anew."
        ) from error


def _difference(known: Mapping[str, Any], owner: Mapping[str, Any]) -> tuple[str, str] | None:
    """The difference that is named, as the end of a sentence, and a hint; ``None`` without one. Causes come before effects."""
    same = {key for key in owner if known[key] == owner[key]}
    another = f"for another workload ({known['name']}, {known['fingerprint']}; this is {owner['name']}, {owner['fingerprint']})"
    if not {"name", "identity"} <= same:
        return another, SEED_IT * ("name" in same)
    if "environment" not in same:  # another environment also changes the last bits of outputs
        there, here = known["environment"], owner["environment"]
        return f"on another machine, or with other versions of Python, trimtab or a runtime ({there}; this is {here})", ""
    if "threads" not in same:
        return f"with torch on {counted(known['threads'], 'thread')}, which now has {owner['threads']}", ""
    changed = [name for name in {**known["code"], **owner["code"]} if known["code"].get(name) != owner["code"].get(name)]
    if changed:
        names = [name for name in changed if name != MODEL] or changed
        return f"for other code (changed since: {', '.join(names[:3])}), whose figures may not hold for this", ""
    if "fingerprint" not in same:
        return another, SEED_IT
    asked = [key for key, value in owner["study"].items() if known["study"].get(key) != value]
    if not asked:
        return None
    return f"for another {asked[0]}: {known['study'].get(asked[0])!r} there, {owner['study'][asked[0]]!r} now", ""
