"""Cold start and peak memory as a deployment sees them: a fresh process loads what a trial saved, or builds the original."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from trimtab.core.measurement import Interval
from trimtab.core.trial import State, Trial
from trimtab.evaluation.evaluate import BUILT
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.jobs.inference import EXAMPLE
from trimtab.execution.process import Outcome

if TYPE_CHECKING:
    from trimtab.study.study import Study


def probed(study: Study, trial: Trial, folder: pathlib.Path, rivals: BaselineServers) -> Trial | None:
    """``trial``, whose files are in ``folder``, with its cold start and peak memory; ``None`` if the study had to end.

    The model as written starts cold as its user starts it. Its peak memory is that of its saved form, like that of all others,
    unless it has none.
    """
    if trial.recipe == study.original:
        one = Interval(1.0, 1.0, 1.0)  # by definition; what it measured of itself is noise, and stays in the comparison
        costs = study.costs_as_written(rivals)
        if costs is None:
            return None
        trial = dataclasses.replace(trial, speedup=one, cold_s=costs.get("cold_s"), peak_mb=costs.get("peak_mb"))
    if trial.state is not State.COMPLETE or trial.size_mb is None:
        return trial
    outcome = _probe(study, trial, folder, folder / "probe")
    if outcome.cut_off:
        return None
    if outcome.result is None:
        reason = f"What it saved cannot be used in a fresh process: {outcome.reason}"
        how = {name: getattr(outcome, name) for name in ("traceback", "ended_by", "limit")}
        return dataclasses.replace(trial, state=State.FAILED, reason=reason, **how)
    cold = trial.cold_s if trial.recipe == study.original else outcome.result["cold_s"]
    return dataclasses.replace(trial, cold_s=cold, peak_mb=outcome.result["peak_mb"])


def costs(study: Study, trial: Trial, place: pathlib.Path) -> tuple[float | None, float | None]:
    """``cold_s`` and ``peak_mb`` of ``trial``, measured anew as :func:`probed` does; or as it did, where the files are gone.

    The worker's own files are in ``place``."""
    files = study.files(trial)
    outcome = _probe(study, trial, files, place, final=True) if (files / BUILT).exists() else None
    if outcome is None or outcome.result is None:
        return trial.cold_s, trial.peak_mb
    return trial.cold_s if trial.recipe == study.original else outcome.result["cold_s"], outcome.result["peak_mb"]


def _probe(study: Study, trial: Trial, files: pathlib.Path, place: pathlib.Path, *, final: bool = False) -> Outcome:
    inputs = str(pathlib.Path(study.job()["reference"]) / EXAMPLE)
    job = {"kind": "probe", "recipe": trial.recipe.to_json(), "files": str(files), "inputs": inputs}
    return study.run_job(job, place, final=final, warm=False)
