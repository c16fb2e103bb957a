"""Starts before a confirmation: time the winner in several pairs of new processes, because speed differs between processes.

The first start checks the outputs on the test data before any timing, so that a refused recipe costs no timing.
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
from trimtab.measure.pooled import MOST_STARTS, START_S, STARTS, narrow, number_of_starts, start_timing, usual_starts
from trimtab.study.study import Study

FOLDER = "starts"
LOAD_S = 1.0
"""Expected seconds of loading saved files in a forked worker, unless half of the cold start is longer."""
SHORT_STARTS, SHORT_SHARE = 24, 0.25
"""Starts that are planned where they are short, and the maximum share of the budget for more than
:data:`~trimtab.measure.pooled.STARTS`: a small network on two threads has intervals of up to 32% from 12 of them."""
SLOW_STARTS = 2
"""Starts that are made while threads meet slowly, in multiples of the planned ones."""
CONFIRM_RUNS = 1.0
"""Duration of a confirmation without its timing, in dry runs of the workload. It starts processes, judges outputs on the test
data and writes the artifact."""


@dataclasses.dataclass(frozen=True)
class EarlierStarts:
    """Results of the starts before the confirmation."""

    comparisons: Mapping[str, list[Comparison]]
    """Comparisons with each rival, one per start."""

    judged: Confirmation | None = None
    """Verdict of the first start on the outputs for the test data. No start follows a refusal."""


def expected(study: Study, trial: Trial, seconds: float) -> int:
    """The number of starts, the confirmation included, that share ``seconds`` of timing; slow calls have one."""
    found = trial.comparison
    if found is None or not study.task.ships:
        return 1
    return number_of_starts(found.candidate.median / 1e3, found.rival.median / 1e3, seconds)


def expected_s(study: Study, trial: Trial | None, seconds: float, budget_s: float) -> float:
    """Expected duration in seconds of a confirmation of ``trial`` with ``seconds`` of timing, in a study of ``budget_s``;
    ``None`` stands for any trial.

    Saved files load in less than the cold start of the trial, because forked workers have imported most already. If most blocks
    of the trial were discarded because of load on the CPU, timing takes its full time.
    """
    count = STARTS if trial is None else expected(study, trial, seconds)
    load_s = START_S if trial is None or trial.cold_s is None else trial.cold_s
    if trial is not None and trial.size_mb is not None:
        load_s = min(load_s, max(LOAD_S, load_s / 2))
    rivals = 1 + (study.to_beat is not None and study.to_beat.recipe != study.baseline)
    found = None if trial is None else trial.comparison
    patience = PATIENCE if found is not None and found.discarded > 2 * found.pairs else 1.0
    start_s = study.runner.load_s + load_s + rivals * start_timing(seconds, count).seconds * patience
    starts_s = count * start_s
    if count == STARTS:
        starts_s = max(starts_s, min(SHORT_STARTS * start_s, SHORT_SHARE * budget_s))
    return starts_s + CONFIRM_RUNS * study.runner.startup_s


def run_earlier_starts(
    study: Study, trial: Trial, wanted: Mapping[str, Recipe], job: Mapping[str, Any], count: int, end: float | None
) -> EarlierStarts:
    """Time ``trial`` against the recipes ``wanted`` in ``count`` starts, and in more while the interval is wide.

    Starts in which threads met slowly (:func:`~trimtab.measure.pooled.usual_starts`) are not among the ``count``.

    No start begins that is expected to last beyond ``end`` (``time.monotonic``), or after an interrupt. Processes are forked
    with shifted memory (:mod:`trimtab.execution.forkserver`). A failure ends the starts; the confirmation then reports the
    reason.
    """
    found = EarlierStarts({name: [] for name in wanted})
    longest, timed = study.runner.load_s + START_S, found.comparisons["as_written"]
    seen = [each.comparison for each in study.trials if each.comparison is not None]
    most = MOST_STARTS - 1 if count > 1 else count
    while len(timed) < most and not study.interrupted():
        begun = time.monotonic()
        counted = {**found.comparisons, "as_written": usual_starts(timed, seen)}
        enough = len(counted["as_written"]) >= count or len(timed) >= SLOW_STARTS * count
        if enough and all(map(narrow, filter(None, counted.values()))):
            break
        if end is not None and begun + longest + CONFIRM_RUNS * study.runner.startup_s > end:
            break
        start_job = {**job, "kind": "start", "judges": found.judged is None}
        with study.runner.servers(FOLDER) as rivals:
            result = run_with_rivals(study, rivals, wanted, start_job, study.folder / FOLDER / trial.recipe.hash).result
        if result is None:
            break
        if result["judged"] is not None:
            found = dataclasses.replace(found, judged=from_json(Confirmation, result["judged"]))
            if found.judged is not None and not found.judged.ok:
                break
        for name, comparison in result["comparisons"].items():
            found.comparisons[name].append(from_json(Comparison, comparison))
        longest = time.monotonic() - begun - result["judging_s"]
    return found


def run_with_rivals(
    study: Study,
    rivals: BaselineServers,
    wanted: Mapping[str, Recipe],
    job: Mapping[str, Any],
    folder: pathlib.Path,
) -> Outcome:
    """Run ``job``, which times a recipe against the recipes ``wanted``, and start the rivals that are not running.

    Job and rivals start in parallel. If the job or a rival fails, the outcome has the reason.
    """
    begun = time.monotonic()
    absent = [name for name in wanted if not rivals.alive(name)]
    for name in absent:
        rivals.start(name, wanted[name], fresh=True)
    addresses = {name: address for name, address in rivals.addresses.items() if name in wanted}
    with study.runner.worker({**job, "rivals": addresses}, folder) as worker:
        try:
            for name in absent:
                rivals.ensure(name, wanted[name], fresh=True, seconds=study.options.trial_s)
        except StorageError:
            raise  # no other recipe ships for that
        except TrimtabError as error:
            return Outcome(reason=str(error), seconds=time.monotonic() - begun, error=type(error).__name__)
        return study.runner.wait_for(worker, final=True)
