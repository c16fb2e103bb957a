"""The job that trains: it runs once for all recipes that begin with the same passes, in a process of its own."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from trimtab.core.recipe import Recipe
from trimtab.evaluation.evaluate import apply_passes, stage
from trimtab.execution.jobs.inference import Job, prepared


def train_job(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Apply the passes of the recipe, of which some train. Their weights lie in the scratch folder of the study afterwards.

    Raises:
        CompileError: a pass cannot be applied, or the training came to nothing.
    """
    with stage("the workload"):
        subject = prepared(job)
    recipe = Recipe.from_json(job["recipe"])
    if reason := recipe.why_not(subject.candidate):
        return {"skipped": reason}
    return {"trained": list(apply_passes(recipe, subject.candidate).trained)}


JOBS: dict[str, Callable[[Job, pathlib.Path], Any]] = {"train": train_job}
