"""The rounds before a confirmation: the winner is timed in several sets of fresh processes, since no two run alike."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trimtab._json import from_json, to_json
from trimtab.errors import StorageError, TrimtabError
from trimtab.measure.pooled import MOST_ROUNDS, ROUNDS, settled, slow
from trimtab.measurement import Comparison
from trimtab.recipe import Recipe
from trimtab.study.process import Outcome
from trimtab.study.rivals import Rivals
from trimtab.study.study import Study
from trimtab.trial import Trial

FOLDER = "rounds"
LEAST_S = 1.5
"""Seconds of timing that a round needs; where there are fewer in all, there are fewer rounds."""

CONFIRMATION = 2.5
"""Rounds that the confirmation itself takes as long as: it judges the outputs and writes the artifact, too (2.4 were seen)."""

Earlier = dict[str, list[Comparison]]
"""For each rival, the comparisons of the rounds so far."""


def expected(study: Study, trial: Trial, seconds: float) -> int:
    """How many rounds, the confirmation's own included, ``seconds`` of timing are divided among; slow calls have one."""
    found = trial.comparison
    if found is None or not study.ships or slow(found.candidate.median / 1e3, found.rival.median / 1e3, seconds / ROUNDS):
        return 1
    return max(1, min(ROUNDS, int(seconds / LEAST_S)))


def earlier(
    study: Study, trial: Trial, wanted: Mapping[str, Recipe], job: Mapping[str, Any], count: int, end: float | None
) -> Earlier:
    """``count`` rounds that time ``trial`` against the recipes ``wanted``, and more where they differ.

    None begins that is likely to go on after ``end``, of ``time.monotonic``, nor once the study is interrupted.
    Every process of a round is an interpreter of its own. What fails here ends the rounds; the confirmation tells why.
    """
    found: Earlier = {name: [] for name in wanted}
    longest, most = study.startup_s, count
    while len(found["as_written"]) < most and not study.interrupted():
        begun = time.monotonic()
        if end is not None and begun + (1 + CONFIRMATION) * longest > end:
            break
        with Rivals(study.job(), study.folder / FOLDER) as rivals:
            told = beside(study, rivals, wanted, {**job, "kind": "round"}, study.folder / FOLDER / trial.recipe.hash).result
        if told is None:
            break
        for name in wanted:
            found[name].append(from_json(Comparison, told[name]))
        longest = time.monotonic() - begun
        if len(found["as_written"]) == count and not all(settled(rounds) for rounds in found.values()):
            most = MOST_ROUNDS - 1
    return found


def beside(study: Study, rivals: Rivals, wanted: Mapping[str, Recipe], job: Mapping[str, Any], folder: Any) -> Outcome:
    """Run ``job``, which times something against the recipes ``wanted``; those that do not run are started with it.

    The rivals and what is timed are interpreters of their own, which import and load side by side. Where a rival cannot be
    had, the outcome says why, as it does of the job itself.
    """
    begun = time.monotonic()
    absent = [name for name in wanted if not rivals.alive(name)]
    for name in absent:
        rivals.start(name, wanted[name], fresh=True)
    with study.worker({**job, "rivals": rivals.addresses}, folder, anew=True, warm=False) as worker:
        try:
            for name in absent:
                rivals.assure(name, wanted[name], fresh=True, seconds=study.options.trial_s)
        except StorageError:
            raise  # which is no reason to ship anything else
        except TrimtabError as error:
            return Outcome(reason=str(error), seconds=time.monotonic() - begun, error=type(error).__name__)
        return study.wait_for(worker, final=True)


def as_json(found: Earlier) -> dict[str, Any]:
    """For a job."""
    return {name: to_json(rounds) for name, rounds in found.items()}
