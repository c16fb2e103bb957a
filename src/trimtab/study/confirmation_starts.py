"""The starts before a confirmation: the winner is timed in several pairs of freshly started processes, since no two run alike.

The first of them judges its outputs for the test data before anything is timed: what these refuse costs no more time.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from trimtab._internal.serialization import from_json
from trimtab.core.measurement import Comparison
from trimtab.core.recipe import Recipe
from trimtab.core.trial import Trial
from trimtab.errors import StorageError, TrimtabError
from trimtab.evaluation.confirm import Confirmation
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.process import Outcome
from trimtab.measure.pairs import PATIENCE
from trimtab.measure.pooled import MOST_STARTS, START_S, STARTS, narrow, number_of_starts
from trimtab.study.study import Study

FOLDER = "starts"
FINAL = 2.5
"""Dry runs of the workload that the confirmation takes as long as, whose processes are new interpreters and which writes the
artifact (2.2 were seen)."""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What the starts before the confirmation found so far."""

    comparisons: Mapping[str, list[Comparison]]
    """Those with each rival, one of each start."""

    judged: Confirmation | None = None
    """What the first said of the outputs for the test data; where these refuse the recipe, it was the last."""


def expected(study: Study, trial: Trial, seconds: float) -> int:
    """How many starts, the confirmation's own included, ``seconds`` of timing are divided among; slow calls have one."""
    found = trial.comparison
    if found is None or not study.task.ships:
        return 1
    return number_of_starts(found.candidate.median / 1e3, found.rival.median / 1e3, seconds)


def expected_s(study: Study, trial: Trial | None, seconds: float) -> float:
    """Seconds that a confirmation of ``trial`` with ``seconds`` of timing is likely to take, or of any where none is known.

    Where most blocks of the trial were thrown away, because others had the CPU, timing takes as long as it may.
    """
    count = STARTS if trial is None else expected(study, trial, seconds)
    load_s = START_S if trial is None or trial.cold_s is None else trial.cold_s
    rivals = 1 + (study.to_beat is not None and study.to_beat.recipe != study.baseline)
    found = None if trial is None else trial.comparison
    timing_s = seconds * (PATIENCE if found is not None and found.discarded > 2 * found.pairs else 1.0)
    return count * (study.runner.load_s + load_s) + rivals * timing_s + FINAL * study.runner.startup_s


def earlier(
    study: Study, trial: Trial, wanted: Mapping[str, Recipe], job: Mapping[str, Any], count: int, end: float | None
) -> Earlier:
    """``count`` starts that time ``trial`` against the recipes ``wanted``, and more where their interval is still wide.

    None begins that is likely to go on after ``end``, of ``time.monotonic``, nor once the study is interrupted. Every process
    is forked with its memory shifted (:mod:`trimtab.execution.forkserver`); only the confirmation's own are new interpreters,
    whose imports take longer than all timing. What fails here ends the starts; the confirmation tells why.
    """
    found = Earlier({name: [] for name in wanted})
    longest, timed = study.runner.load_s + START_S, found.comparisons["as_written"]
    most = MOST_STARTS - 1 if count > 1 else count
    while len(timed) < most and not study.interrupted():
        begun = time.monotonic()
        if len(timed) >= count and all(map(narrow, found.comparisons.values())):
            break
        if end is not None and begun + longest + FINAL * study.runner.startup_s > end:
            break
        asked = {**job, "kind": "start", "judges": found.judged is None}
        with study.runner.servers(FOLDER) as rivals:
            told = beside(study, rivals, wanted, asked, study.folder / FOLDER / trial.recipe.hash, anew=False).result
        if told is None:
            break
        if told["judged"] is not None:
            found = dataclasses.replace(found, judged=from_json(Confirmation, told["judged"]))
            if found.judged is not None and not found.judged.ok:
                break
        for name, comparison in told["comparisons"].items():
            found.comparisons[name].append(from_json(Comparison, comparison))
        longest = time.monotonic() - begun - told["judging_s"]
    return found


def beside(
    study: Study,
    rivals: BaselineServers,
    wanted: Mapping[str, Recipe],
    job: Mapping[str, Any],
    folder: pathlib.Path,
    *,
    anew: bool,
) -> Outcome:
    """Run ``job``, which times something against the recipes ``wanted``; those that do not run are started with it.

    The rivals and what is timed start and load side by side; ``anew`` says that the job has an interpreter of its own. Where a
    rival cannot be had, the outcome says why, as it does of the job itself.
    """
    begun = time.monotonic()
    absent = [name for name in wanted if not rivals.alive(name)]
    for name in absent:
        rivals.start(name, wanted[name], fresh=True)
    with study.runner.worker({**job, "rivals": rivals.addresses}, folder, anew=anew, warm=not anew) as worker:
        try:
            for name in absent:
                rivals.assure(name, wanted[name], fresh=True, seconds=study.options.trial_s)
        except StorageError:
            raise  # which is no reason to ship anything else
        except TrimtabError as error:
            return Outcome(reason=str(error), seconds=time.monotonic() - begun, error=type(error).__name__)
        return study.runner.wait_for(worker, final=True)
