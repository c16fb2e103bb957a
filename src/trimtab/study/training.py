"""The end of a training study: confirm the best settings, or keep those as written."""

from __future__ import annotations

import time

from trimtab._internal.serialization import from_json
from trimtab._internal.text import counted
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.trial import State
from trimtab.errors import UsageError, WorkloadError
from trimtab.evaluation.confirm import Confirmation
from trimtab.execution.trial_runner import RIVALS
from trimtab.study import conclusions, ranking
from trimtab.study.confirmation import confirm
from trimtab.study.final_selection import no_baseline
from trimtab.study.result import Best
from trimtab.study.study import Study

SETTINGS_FOLDER = "settings"


def settings_of(study: Study, recipe: Recipe) -> Settings:
    """The settings as written with the changes of ``recipe``, computed by a worker, which has the model.

    Raises:
        WorkloadError: the worker failed.
    """
    key = f"settings {recipe.hash}"
    known = study.storage.get(key)
    if known is None:
        job = study.runner.job() | {"kind": "settings", "recipe": recipe.to_json()}
        outcome = study.runner.run_job(job, study.folder / SETTINGS_FOLDER, final=True)
        if outcome.result is None:
            raise WorkloadError(f"The settings of {recipe} cannot be found out: {outcome.reason}")
        known = outcome.result
        study.storage.put(key, known)
    return from_json(Settings, known)


def finish(study: Study, *, end: float | None = None) -> tuple[ranking.Status, str, Best | None]:
    """Confirm the winner or the next best; else keep the settings as written.

    Args:
        study: whose search has ended.
        end: when the budget is over, of ``time.monotonic``: from then on nothing is measured twice.
    """
    limits, original = study.options.limits, study.to_beat
    if original is None and study.interrupted():
        raise KeyboardInterrupt
    if original is None:
        raise UsageError("No trial was finished, not even of the training as written. Run it again with a longer budget.")
    if original.comparison is None:
        raise WorkloadError(no_baseline(study))
    ahead = ranking.ahead(study.trials, limits, study.options.objective, original, tuned=False)
    if ahead:
        study.progress.stage("confirming the winner in fresh processes, from other parameters")
    lost: list[str] = []
    must_win = ranking.feasible(original, limits)
    with study.runner.servers(RIVALS) as rivals:
        for trial in ranking.to_confirm(ahead):
            more = end is None or time.monotonic() < end
            found = confirm(study, trial, original, rivals, must_win=must_win, once_more=more)
            if found.confirmation.ok:
                return "improved", _improved(found, lost), found
            lost.append(f"{trial.recipe}: {found.confirmation.reason}")
            study.refused.append(found.confirmation)
    study.notes += [f"It won the search but was not confirmed: {line}" for line in lost]
    if not must_win:
        return "limits_not_met", ranking.unmet(study.trials, limits), None
    measured = sum(trial.state is State.COMPLETE and trial.recipe != original.recipe for trial in study.trials)
    # the figures of the search stand: the baseline was not selected
    shared = ("speedup", "latency_ms", "throughput", "score", "drop", "peak_mb")
    figures = {name: getattr(original, name) for name in shared} | {"baseline_score": original.score}
    kept = Confirmation(recipe=original.recipe, ok=True, loaded=False, again=False, **figures)
    return "kept_original", why_settings_stay(lost, measured), Best(trial=original, confirmation=kept, artifact=None)


def why_settings_stay(lost: list[str], measured: int) -> str:
    """Why the settings as written stay: the reasons in ``lost``, or that none of ``measured`` others won."""
    if lost:
        return f"The settings as written stay. {' '.join(lost)}"
    if not measured:
        return "The settings as written stay: no others were measured within the budget."
    were = "was" if measured == 1 else "were"
    reason = f"of {counted(measured, 'other')} that {were} measured, none was surely faster within the limits"
    return f"The settings as written stay: {reason}."


def _improved(found: Best, lost: list[str]) -> str:
    confirmation, ratio = found.confirmation, found.confirmation.speedup
    assert ratio is not None
    words = f"{found.trial.recipe} trains {conclusions.speed(ratio)}"
    over = "" if confirmation.parity is None else f", over the first {confirmation.parity.n} updates"
    if found.trial.recipe.exact:
        still = ", with dropout and the like off" if confirmation.parity is not None and confirmation.parity.still else ""
        words += f"; its losses{still} are those as written, within rounding{over}"
    elif confirmation.drop is not None:
        rise = confirmation.drop
        words += f"; its loss {rise.change()} ({rise.bound()}), compared with the loss as written{over}"
    return words + "." + (f" Faster in the search, but not confirmed: {' '.join(lost)}" if lost else "")
