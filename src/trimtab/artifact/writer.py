"""Fill an artifact folder: the runtime's files, test vectors, evidence, generated texts, and the manifest."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.metadata
import math
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from trimtab._internal.serialization import to_json, write_json
from trimtab._internal.user_code import save_errors
from trimtab.artifact.manifest import (
    BASELINE,
    EVIDENCE,
    GOLDEN,
    MODEL,
    MODULE,
    README,
    RUN,
    BaselineFacts,
    GoldenFacts,
    Manifest,
    file_facts,
    write_manifest,
)
from trimtab.artifact.templates import readme, run_script
from trimtab.artifact.test_vectors import Case, Golden
from trimtab.core.backend import BACKENDS, Backend, Executable
from trimtab.core.limits import Limits
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Signature
from trimtab.core.technique import technique_from_json
from trimtab.errors import ArtifactError, CompileError, UsageError
from trimtab.hardware.environment import Environment

SUMMARY = (
    *(
        "objective",
        "inputs",
        "thread_limit",
        "speedup",
        "against_tuned",
        "comparison",
        "latency_ms",
        "throughput",
        "baseline_score",
        "score",
    ),
    *("drop", "parity", "size_mb", "peak_mb", "cold_s", "baseline_speedup"),
)
"""Entries of the evidence that the manifest and the README repeat."""
BASELINE_TIMES, BASELINE_MB = 8, 64
"""The baseline is left out if it exceeds both this multiple of the model's size and this size in MB."""


def fill(
    target: pathlib.Path,
    *,
    executable: Executable,
    recipe: Recipe,
    workload_name: str,
    golden: Golden,
    evidence: Mapping[str, Any],
    environment: Environment,
    limits: Limits | None,
    baseline: Executable | None,
    baseline_backend: Backend | None,
    module: Executable | None = None,
) -> None:
    """Write all files into the empty folder ``target``. Arguments as for :func:`trimtab.artifact.artifact.write_artifact`.

    Raises:
        CompileError: the executable cannot be saved, or its outputs cannot be compared with the model's.
        ArtifactError: the runtime cannot write its files.
        UsageError: no golden case fits the executable's signature.
    """
    _save(executable, target / MODEL)
    golden, errors = _comparable_vectors(executable, golden, exact=recipe.exact)
    facts, reason = _save_torch(target, BASELINE, baseline, baseline_backend)
    module_facts, module_reason = (None, None) if module is None else _save_torch(target, MODULE, module, None)
    golden.save(target / GOLDEN)
    write_json(target / EVIDENCE, evidence)
    manifest = Manifest(
        workload=workload_name,
        recipe=to_json(recipe),
        recipe_text=str(recipe),
        native_code=recipe.backend.native_code,
        packages=recipe.backend.packages,
        signature=_mark_data_dependent_sizes(executable.signature, golden),
        settings=executable.settings,
        golden=GoldenFacts(
            cases=len(golden.cases), scale=golden.scales, tolerance=golden.tolerances(errors), measured=tuple(errors)
        ),
        baseline=facts,
        baseline_reason=reason,
        module=module_facts,
        module_reason=module_reason,
        environment=environment,
        evidence={name: to_json(evidence[name]) for name in SUMMARY if name in evidence},
        limits=limits,
        notes=tuple(executable.notes),
        trimtab=importlib.metadata.version("trimtab"),
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        files={},
    )
    (target / RUN).write_text(run_script(manifest, recipe.backend), encoding="utf-8")
    (target / README).write_text(readme(manifest, file_facts(target)), encoding="utf-8")
    write_manifest(target, dataclasses.replace(manifest, files=file_facts(target)))


def _save(executable: Executable, folder: pathlib.Path) -> None:
    folder.mkdir()
    try:
        with save_errors():
            executable.save(folder)
    except RuntimeError as error:
        # torch and some runtimes raise RuntimeError if the disk is full; no other RuntimeError reaches this place
        raise ArtifactError(f"The model cannot be written: {error}. Nothing was left half-written. Make room.") from error


def _comparable_vectors(executable: Executable, golden: Golden, *, exact: bool) -> tuple[Golden, list[float]]:
    """The test vectors that fit the executable's signature, and the errors on them.

    Lossy recipes may find another number of items, such as boxes, than the original. Then no values can be compared, and these
    vectors are dropped if others remain.
    """
    kept = Golden(tuple(case for case in golden.cases if _fits(executable.signature, case)))
    if not kept.cases:
        raise UsageError("None of the golden cases fits the executable's signature; give its example inputs as the first one.")
    if not exact and (comparable := tuple(case for case in kept.cases if not _data_dependent_sizes_differ(executable, case))):
        kept = Golden(comparable)
    errors = kept.errors(executable.run)
    if bad := [i for i, error in enumerate(errors) if not math.isfinite(error)]:
        name = executable.signature.outputs[bad[0]].name
        raise CompileError(f"The output {name!r} has another shape or dtype than the model's, or holds NaN; it is not shipped.")
    return kept, errors


def _data_dependent_sizes_differ(executable: Executable, case: Case) -> bool:
    """Whether output sizes differ from the original's, and all differing sizes are data-dependent."""
    rows = zip(executable.signature.outputs, executable.run([leaf.clone() for leaf in case.inputs]), case.outputs, strict=False)
    differing = [
        size
        for spec, found, want in rows
        for size, one, other in zip(spec.shape, found.shape, want.shape, strict=False)
        if one != other
    ]
    return bool(differing) and all(size == "?" or isinstance(size, int) for size in differing)


def _mark_data_dependent_sizes(signature: Signature, golden: Golden) -> Signature:
    """``signature`` with those fixed output sizes marked ``"?"`` that differ between test vectors, such as the number of
    detected boxes: they depend on the data."""
    outputs = []
    for i, spec in enumerate(signature.outputs):
        sizes = zip(spec.shape, *(case.outputs[i].shape for case in golden.cases), strict=False)
        shape = tuple("?" if isinstance(size, int) and {size} != set(seen) else size for size, *seen in sizes)
        outputs.append(dataclasses.replace(spec, shape=shape))
    return dataclasses.replace(signature, outputs=tuple(outputs))


def _fits(signature: Signature, case: Case) -> bool:
    try:
        signature.check(case.inputs)
    except UsageError:
        return False
    return True


def _save_torch(
    target: pathlib.Path, name: str, model: Executable | None, backend: Backend | None
) -> tuple[BaselineFacts | None, str | None]:
    """Write ``model`` as an exported program into the folder ``name``. Returns its facts, or the reason why it is left out."""
    what = "original model" if name == BASELINE else "compressed network"
    if model is None:
        return None, "The original model was not given when the artifact was written."
    used = backend or technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "no_grad"})
    folder = target / name
    try:
        _save(model, folder)
    except CompileError as error:
        shutil.rmtree(folder)
        lost = "its speed cannot be compared" if name == BASELINE else "it cannot be trained further"
        return None, f"The {what} cannot be exported, so {lost} here: {error}"
    size, shipped = (sum(f.stat().st_size for f in part.rglob("*") if f.is_file()) for part in (folder, target / MODEL))
    if size > BASELINE_TIMES * shipped and size > BASELINE_MB * 1e6:
        shutil.rmtree(folder)
        return (
            None,
            f"The {what} has {size / 1e6:.0f} MB, far more than the artifact's {shipped / 1e6:.0f} MB; it was left out.",
        )
    return BaselineFacts(backend=to_json(used), signature=model.signature, settings=model.settings), None
