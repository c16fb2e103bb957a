"""Cold start and peak memory as a deployment sees them: a fresh process loads what a trial saved, or builds the original."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from trimtab.measurement import Interval
from trimtab.study.jobs import EXAMPLE
from trimtab.study.rivals import Rivals
from trimtab.trial import State, Trial

if TYPE_CHECKING:
    from trimtab.study.study import Study


def probed(study: Study, trial: Trial, folder: pathlib.Path, rivals: Rivals) -> Trial | None:
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
    inputs = str(pathlib.Path(study.job()["reference"]) / EXAMPLE)
    job = {"kind": "probe", "recipe": trial.recipe.to_json(), "files": str(folder), "inputs": inputs}
    outcome = study.run_job(job, folder / "probe", warm=False)
    if outcome.cut_off:
        return None
    if outcome.result is None:
        reason = f"What it saved cannot be used in a fresh process: {outcome.reason}"
        how = {name: getattr(outcome, name) for name in ("traceback", "ended_by", "limit")}
        return dataclasses.replace(trial, state=State.FAILED, reason=reason, **how)
    cold = trial.cold_s if trial.recipe == study.original else outcome.result["cold_s"]
    return dataclasses.replace(trial, cold_s=cold, peak_mb=outcome.result["peak_mb"])
