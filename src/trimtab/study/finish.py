"""The end of a study: confirm the winner, or ship the original, say so, and explain it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab._json import dumps, from_json, to_json
from trimtab.artifact import Artifact, open_artifact
from trimtab.confirm import LEAST_GAIN, Confirmation
from trimtab.environment import Peaks
from trimtab.errors import ArtifactError, StorageError, UsageError, WorkloadError
from trimtab.evaluate import BUILT, Objective
from trimtab.explain import Explanation
from trimtab.measurement import Interval
from trimtab.study import rounds, verdict
from trimtab.study.result import ARTIFACT, TRIED, Best
from trimtab.study.rivals import Rivals
from trimtab.study.runoff import run_off
from trimtab.study.sampler import as_written
from trimtab.study.study import KEEP, RIVALS, Study
from trimtab.trial import State, Trial

CONFIRM = 2
"""Each paired timing of the confirmation may take this many times as long as that of a trial."""
CONFIRM_FOLDER, ORIGINAL, EXPLAIN = "confirm", "original", "explain"


def ahead(study: Study) -> list[Trial]:
    """The trials that keep the limits and seem to beat the tuned original, best first; the model as written is none of them."""
    options, eager = study.options, study.to_beat
    found = verdict.ahead(study.trials, options.limits, options.objective, eager)
    others = [trial for trial in found if trial.recipe != study.original]
    if eager is None or not verdict.feasible(eager, options.limits):  # an original that misses a limit is no alternative
        return others if eager is not None else []
    return [trial for trial in others if pays(trial, eager, options.objective)]


def finish(study: Study, *, until: float | None = None, end: float | None = None) -> tuple[verdict.Status, str, Best | None]:
    """Confirm the winner, or the next best, or ship the original; a runoff is held where there is time ``until`` then, and
    the winner is timed in so many rounds as are over by ``end``."""
    limits, eager = study.options.limits, study.to_beat
    if eager is None and study.interrupted():
        raise KeyboardInterrupt
    if eager is None and not study.trials:
        raise UsageError("No trial was finished, not even of the model as written. Run it again with a longer --budget.")
    if eager is None:
        raise WorkloadError(no_baseline(study))
    must_win = verdict.feasible(eager, limits)
    if not must_win and not verdict.ranked(study.trials, limits, study.options.objective):
        return "limits_not_met", verdict.unmet(study.trials, limits), None
    before = run_off(study, ahead(study), until=until)
    study.progress.stage("confirming the winner in fresh processes, on the test data")
    # three that may lose accuracy can all fail on the test data, and the best lossless one deserves its turn
    tried = [*before[:KEEP], *[trial for trial in before[KEEP:] if trial.recipe.exact][:1]]
    lost: list[str] = []
    again: dict[str, Trial] = {}
    with Rivals(study.job(), study.folder / RIVALS) as rivals:
        for trial in tried:
            found = confirm(study, trial, eager, rivals, must_win=must_win, end=end)
            if found.confirmation.ok:
                return "improved", _improved(study, found, lost), found
            lost.append(f"{trial.recipe}: {found.confirmation.reason}")
            again[trial.recipe.hash] = verdict.seen_again(trial, found.confirmation)
        surely = [verdict.surely_ahead(trial, eager, study.options.objective) for trial in tried]
        said = ("It seemed faster in the search", "It won the search")
        study.notes += [f"{said[won]} but was not confirmed: {line}" for won, line in zip(surely, lost, strict=True)]
        if not must_win:
            return "limits_not_met", _unmet(study, again), None
        kept = confirm(study, eager, eager, rivals, must_win=False)
    again[eager.recipe.hash] = verdict.seen_again(eager, kept.confirmation)
    if not kept.confirmation.ok and verdict.misses(again[eager.recipe.hash], limits):
        return "limits_not_met", _unmet(study, again), None
    if not kept.confirmation.ok:
        return "kept_original", f"Nothing better was confirmed, and the original cannot ship: {kept.confirmation.reason}", kept
    why = " ".join(lost).rstrip(".") or _nothing_won(study.trials, study.options.objective)
    alone = ""
    ratio = kept.confirmation.speedup
    if kept.artifact is not None and ratio is not None and ratio.high < 1:
        alone = (
            f" In the form that stands alone it runs at {_multiple(ratio)} of the model "
            "as written; where its class is at hand, go on using the model itself."
        )
    elif kept.artifact is not None and ratio is not None and ratio.low > 1 and not eager.recipe.passes:
        alone = (
            f" In the form that stands alone it ran at {_multiple(ratio)} of the model "
            "as written, and computes the same: so far do two processes of one program differ here. No tuning is behind it."
        )
    return "kept_original", f"The original ships: {why}.{alone}", kept


def _single(ratio: Interval) -> str:
    """One number, or both bounds where one would mislead."""
    return f"{ratio.low:.2f}x to {ratio.high:.2f}x" if ratio.vague else f"{ratio.value:.2f}x"


def _multiple(ratio: Interval) -> str:
    return _single(ratio) if ratio.vague else ratio.times()


def _unmet(study: Study, again: Mapping[str, Trial]) -> str:
    """Why nothing keeps the limits: what was measured ``again`` is known better, or failed for another reason than a limit."""
    limits = study.options.limits
    refused = {name for name, trial in again.items() if not verdict.misses(trial, limits)}
    return verdict.unmet([again.get(t.recipe.hash, t) for t in study.trials if t.recipe.hash not in refused], limits)


def _nothing_won(trials: Sequence[Trial], objective: Objective) -> str:
    others = [t for t in trials if t.state is not State.SKIPPED and t.recipe.backend.name != "eager"]
    if not others:
        return "no other runtime was tried; where the time was too short for that, the same command goes on from here"
    better = "faster" if objective in ("latency", "throughput") else f"better in {objective}"
    return f"none of {len(trials)} trials was {better} than the tuned original within the limits"


def pays(trial: Trial, eager: Trial, objective: Objective) -> bool:
    """Whether the confirmation is worth its time. Memory and size are single figures without an interval, so that a gain has to
    be larger than what they differ by from one process to the next."""
    one, other = verdict.value(trial, objective), verdict.value(eager, objective)
    if objective in ("latency", "throughput") or one is None or other is None:
        return True
    return -one <= (1 - LEAST_GAIN) * -other


def confirm(
    study: Study,
    trial: Trial,
    eager: Trial,
    rivals: Rivals,
    *,
    must_win: bool,
    end: float | None = None,
    once_more: bool = True,
) -> Best:
    """Measure ``trial`` again and write the artifact; what an earlier run of this study confirmed is not done twice.

    Where neighbours disturbed it so much that it proves nothing in either direction, it is done ``once_more``: they pass, and
    the next best should not win because of them.

    Raises:
        StorageError: the disk is full, which is no reason to ship anything else.
    """
    key = f"confirmed {trial.recipe.hash} {eager.recipe.hash} {dumps(study.options.limits, indent=None)}"
    known = study.storage.noted(key)
    if known is not None and not (known["ok"] and study.ships):
        return Best(trial=trial, confirmation=from_json(Confirmation, known), artifact=None)  # no second throw of the dice
    if known is not None and (artifact := _shipped(study, trial)) is not None:
        return Best(trial=trial, confirmation=from_json(Confirmation, known), artifact=artifact)
    wanted = {"as_written": study.original} | ({} if eager.recipe == study.original else {"tuned": eager.recipe})
    timing_s = (0.5 if trial is eager else CONFIRM) * study.options.timing_s
    count = rounds.expected(study, trial, timing_s)
    each_s = timing_s / count
    common = study.job() | {
        "recipe": trial.recipe.to_json(),
        "files": str(study.files(trial)),
        "plan": to_json(study.plan(seconds=each_s, width=0.02)),
        "seconds": study.options.trial_s,
    }
    earlier = rounds.earlier(study, trial, wanted, common, count - 1, end)
    left_s = timing_s - each_s * len(earlier["as_written"])  # rounds that the budget had no time for leave theirs
    job = common | {
        "kind": "confirm",
        "plan": to_json(study.plan(seconds=max(each_s, left_s), width=0.02)),
        "earlier": rounds.as_json(earlier),
        "weights": study.prepared.weights,
        "threads": study.prepared.threads,
        "must_win": must_win,
        "original_mb": _original_mb(study, eager) if must_win and study.options.objective == "memory" else None,
        "ships": trial.size_mb is not None,
        "artifact": str(study.folder.absolute() / ARTIFACT),
        "trial": to_json(trial),
        "environment": to_json(study.environment),
    }
    outcome = rounds.beside(study, rivals, wanted, job, study.folder / CONFIRM_FOLDER / trial.recipe.hash)
    if outcome.result is None and trial is eager and outcome.error == WorkloadError.__name__:
        raise WorkloadError(str(outcome.reason))
    if outcome.result is None:
        reason = f"The confirmation failed: {outcome.reason}"
        return Best(trial=trial, confirmation=Confirmation(recipe=trial.recipe, ok=False, reason=reason), artifact=None)
    at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    found = dataclasses.replace(from_json(Confirmation, outcome.result), measured_at=at)
    _note_tried(study, trial)
    if found.undecided and once_more and not study.interrupted():
        return confirm(study, trial, eager, rivals, must_win=must_win, end=end, once_more=False)
    if not found.undecided:
        study.storage.note(key, to_json(found))
    return Best(trial=trial, confirmation=found, artifact=_shipped(study, trial))


def _note_tried(study: Study, trial: Trial) -> None:
    known, name = study.storage.noted(TRIED) or [], str(trial.recipe)
    if name not in known:
        study.storage.note(TRIED, [*known, name])


def _original_mb(study: Study, eager: Trial) -> float | None:
    """Peak memory of the tuned original: measured anew as that of the winner will be, or as the search saw it where it has no
    files."""
    files = study.files(eager)
    if not (files / BUILT).exists():
        return eager.peak_mb
    job = study.job() | {"kind": "peak", "recipe": eager.recipe.to_json(), "files": str(files)}
    outcome = study.run_job(job, study.folder / CONFIRM_FOLDER / ORIGINAL, final=True, anew=True, warm=False)
    found: float | None = outcome.result
    return eager.peak_mb if found is None else found


def explain(study: Study, best: Best | None) -> tuple[Peaks | None, dict[str, Explanation]]:
    """Where the time of the model as written and of what ships goes. It explains the answer and decides nothing, so where it
    fails the study has a note more, and where the user wants to stop it is left out."""
    first = next((trial for trial in study.trials if trial.recipe == as_written()), None)
    if first is None or first.comparison is None:
        return None, {}
    found = best.confirmation.comparison if best is not None else None
    times = found if found is not None else first.comparison
    asked: dict[str, dict[str, Any]] = {
        "as_written": {"recipe": as_written().to_json(), "files": None, "seconds": times.rival.median / 1e3}
    }
    if best is not None and found is not None:
        files, seconds = str(study.files(best.trial)), found.candidate.median / 1e3
        asked["best"] = {"recipe": best.trial.recipe.to_json(), "files": files, "seconds": seconds}
    key = f"explained {hashlib.sha256(dumps(asked, indent=None).encode()).hexdigest()[:16]}"  # databases bound its length
    known = study.storage.noted(key)
    if known is None and study.interrupted():
        return None, {}
    if known is None:
        study.progress.stage("looking where the time goes")
        try:
            outcome = study.run_job(study.job() | {"kind": "explain", "recipes": asked}, study.folder / EXPLAIN)
            known, reason = outcome.result, outcome.reason
        except StorageError as error:
            reason = str(error)
        if known is None:
            study.notes.append(f"Where the time goes is not known: {reason}")
            return None, {}
        study.storage.note(key, known)
    explanations = {name: from_json(Explanation, value) for name, value in known["explanations"].items()}
    return from_json(Peaks, known["peaks"]), explanations


def _shipped(study: Study, trial: Trial) -> Artifact | None:
    """The artifact in the run folder, if it is that of ``trial``."""
    try:
        artifact = open_artifact(study.folder / ARTIFACT)
    except ArtifactError:
        return None
    return artifact if artifact.manifest.recipe == trial.recipe.to_json() else None


def _improved(study: Study, found: Best, lost: list[str]) -> str:
    confirmation = found.confirmation
    ratio = confirmation.speedup
    assert ratio is not None
    bounds = "95% interval, too wide for one number" if ratio.vague else f"95% interval {ratio.low:.2f} to {ratio.high:.2f}"
    limits, eager = study.options.limits, study.to_beat
    missed = verdict.misses(eager, limits) if eager is not None and not verdict.feasible(eager, limits) else []
    words = (
        f"The original misses a limit ({missed[0].words.rstrip('.')}), which {found.trial.recipe} keeps. It" if missed else ""
    )
    words = f"{words or found.trial.recipe} is {_single(ratio)} as fast as written ({bounds})"
    if confirmation.against_tuned is not None:
        tuned = confirmation.against_tuned
        words += f" and {_single(tuned)} the tuned original" + (
            "" if tuned.vague else f" ({tuned.low:.2f} to {tuned.high:.2f})"
        )
    if confirmation.drop is not None:
        lost_score = confirmation.drop
        words += f"; its score drops by {lost_score.show(lost_score.value)}, at most {lost_score.show(lost_score.upper)}"
    first = next((trial for trial in study.trials if trial.recipe == as_written()), None)
    if study.options.objective == "size" and first is not None and first.size_mb and found.trial.size_mb:
        words += f"; it has {found.trial.size_mb:.3g} MB, where the original has {first.size_mb:.3g} MB"
    if study.options.objective == "memory" and confirmation.peak_mb is not None:
        words += f"; it needs {confirmation.peak_mb:.3g} MB of memory"
        if confirmation.original_mb is not None:
            words += f", where the tuned original needs {confirmation.original_mb:.3g} MB"
    return words + "." + (f" Faster in the search, but not confirmed: {' '.join(lost)}" if lost else "")


def no_baseline(study: Study) -> str:
    """Why there is nothing to measure anything against."""
    first = next((trial for trial in study.trials if trial.recipe == study.original), None)
    if first is None:
        return "The model as written was not among the finished trials. Start again with --fresh (in Python, fresh=True)."
    again = f"Once that is mended, start again with {study.record().options[0]}. Log: {study.folder / str(first.log)}"
    return f"The model as written could not be measured ({first.state}): {first.reason} {again}"
