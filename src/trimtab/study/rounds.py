"""The rounds before a confirmation: the winner is timed in several sets of fresh processes, since no two run alike.

The first of them judges its outputs for the test data before anything is timed: what these refuse costs no more time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from trimtab._json import from_json
from trimtab.confirm import Confirmation
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
"""Rounds that the confirmation itself takes as long as: it writes the artifact, too (2.4 were seen)."""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What the rounds found so far."""

    comparisons: Mapping[str, list[Comparison]]
    """Those with each rival, one of each round."""

    judged: Confirmation | None = None
    """What the first said of the outputs for the test data; where these refuse the recipe, it was the last."""


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
    found = Earlier({name: [] for name in wanted})
    longest, most, ended = study.startup_s, count, found.comparisons["as_written"]
    while len(ended) < most and not study.interrupted():
        begun = time.monotonic()
        if end is not None and begun + (1 + CONFIRMATION) * longest > end:
            break
        asked = {**job, "kind": "round", "judges": found.judged is None}
        with Rivals(study.job(), study.folder / FOLDER) as rivals:
            told = beside(study, rivals, wanted, asked, study.folder / FOLDER / trial.recipe.hash).result
        if told is None:
            break
        if told["judged"] is not None:
            found = dataclasses.replace(found, judged=from_json(Confirmation, told["judged"]))
            if found.judged is not None and not found.judged.ok:
                break
        for name, comparison in told["comparisons"].items():
            found.comparisons[name].append(from_json(Comparison, comparison))
        longest = time.monotonic() - begun - told["judging_s"]
        if len(ended) == count and not all(settled(rounds) for rounds in found.comparisons.values()):
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
