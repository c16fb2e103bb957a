"""A study of a training: the same trials, storage and processes as for inference, other work in them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from trimtab._internal.serialization import from_json
from trimtab._internal.text import counted
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.trial import State, Trial
from trimtab.errors import UsageError, WorkloadError
from trimtab.evaluation.confirm import Confirmation
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.jobs.training import WRITTEN
from trimtab.execution.process import Outcome
from trimtab.study import conclusions, ranking
from trimtab.study.confirmation import confirm
from trimtab.study.final_selection import no_baseline
from trimtab.study.record import Prepared, Record
from trimtab.study.result import Best
from trimtab.study.samplers.greedy import GreedySampler, trained_as_written
from trimtab.study.samplers.ladder import Sampler
from trimtab.study.study import KEEP, PREPARE, RIVALS, Study

SETTINGS_FOLDER = "settings"


class TrainingStudy(Study):
    """A study whose trials train: the objective is the throughput of updates, the guard is what their losses become."""

    def __init__(self, *arguments: Any, updates: int = 24, prepare_by: float | None = None, **options: Any) -> None:
        self.updates, self.prepare_by = updates, prepare_by
        """Over how many the losses are compared, and when, of ``time.monotonic``, the dry run has to be over."""
        super().__init__(*arguments, **options)

    @property
    def original(self) -> Recipe:
        """The training as written."""
        return trained_as_written()

    @property
    def stored_as(self) -> str:
        """A workload may be optimized and trained."""
        return f"{super().stored_as}-tune"

    @property
    def ships(self) -> bool:
        """Settings are the answer; there are no files."""
        return False

    @property
    def to_beat(self) -> Trial | None:
        """The training as written: there is no other original."""
        return next((trial for trial in self.trials if trial.recipe == self.original), None)

    @property
    def lost(self) -> bool:
        """Whether the training as written was tried in vain."""
        return self.to_beat is not None and self.to_beat.comparison is None

    def costs_as_written(self, rivals: BaselineServers) -> dict[str, float | None]:
        """What the process that trains as written found out about itself."""
        return rivals.ready("as_written", seconds=60)

    def make_sampler(self) -> Sampler:
        """The one for trainings."""
        return GreedySampler()

    def record(self) -> Record:
        """What is known so far."""
        return dataclasses.replace(super().record(), mode="train")

    def job(self) -> dict[str, Any]:
        """What every job of this study has in common."""
        own = {"mode": "train", "updates": self.updates, "written": str(self.folder.absolute() / PREPARE / WRITTEN)}
        return super().job() | own

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"number of updates": self.updates}

    def run_job(self, job: Mapping[str, Any], folder: pathlib.Path, **how: Any) -> Outcome:
        """As for any study; the dry run has a deadline."""
        if job["kind"] == "prepare":
            how["deadline"] = self.prepare_by
        return super().run_job(job, folder, **how)

    def _prepare(self) -> Prepared:
        try:
            return super()._prepare()
        except KeyboardInterrupt:
            if self.interrupted():
                raise
            raise UsageError(
                f"The budget was over before the dry run was, which makes {self.updates} updates as written three times, and "
                "as often without dropout where there is any. Give a longer budget, or compare fewer losses, with updates=8."
            ) from None

    def settings(self, recipe: Recipe) -> Settings:
        """What ``recipe`` makes of the settings as written; a worker that has the model finds out.

        Raises:
            WorkloadError: it failed.
        """
        key = f"settings {recipe.hash}"
        known = self.storage.noted(key)
        if known is None:
            job = self.job() | {"kind": "settings", "recipe": recipe.to_json()}
            outcome = self.run_job(job, self.folder / SETTINGS_FOLDER, final=True)
            if outcome.result is None:
                raise WorkloadError(f"The settings of {recipe} cannot be found out: {outcome.reason}")
            known = outcome.result
            self.storage.note(key, known)
        return from_json(Settings, known)


def finish(study: TrainingStudy) -> tuple[ranking.Status, str, Best | None]:
    """Confirm the winner, or the next best; else the settings as written stay."""
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
    with BaselineServers(study.job(), study.folder / RIVALS) as rivals:
        for trial in [*ahead[:KEEP], *[t for t in ahead[KEEP:] if t.recipe.exact][:1]]:
            found = confirm(study, trial, original, rivals, must_win=ranking.feasible(original, limits))
            if found.confirmation.ok:
                return "improved", _improved(found, lost), found
            lost.append(f"{trial.recipe}: {found.confirmation.reason}")
            study.refused.append(found.confirmation)
    study.notes += [f"It won the search but was not confirmed: {line}" for line in lost]
    if not ranking.feasible(original, limits):
        return "limits_not_met", ranking.unmet(study.trials, limits), None
    measured = sum(trial.state is State.COMPLETE and trial.recipe != original.recipe for trial in study.trials)
    # what the search found out about it stands: there is nothing that it was picked from by luck
    shared = ("speedup", "latency_ms", "throughput", "score", "drop", "peak_mb")
    figures = {name: getattr(original, name) for name in shared} | {"baseline_score": original.score}
    kept = Confirmation(recipe=original.recipe, ok=True, loaded=False, again=False, **figures)
    return "kept_original", stay(lost, measured), Best(trial=original, confirmation=kept, artifact=None)


def stay(lost: list[str], measured: int) -> str:
    """Why the settings as written do: what ``lost`` when it was confirmed, or none of so many others that were measured won."""
    if lost:
        return f"The settings as written stay. {' '.join(lost)}"
    if not measured:
        return "The settings as written stay: no others were measured within the budget."
    were = "was" if measured == 1 else "were"
    told = f"of {counted(measured, 'other')} that {were} measured, none was surely faster within the limits"
    return f"The settings as written stay: {told}."


def _improved(found: Best, lost: list[str]) -> str:
    confirmation, ratio = found.confirmation, found.confirmation.speedup
    assert ratio is not None
    words = f"{found.trial.recipe} trains {conclusions.speed(ratio)}"
    over = "" if confirmation.parity is None else f", over the first {confirmation.parity.n} updates"
    if found.trial.recipe.exact:
        still = ", with dropout and the like off" if confirmation.parity is not None and confirmation.parity.still else ""
        words += f"; its losses{still} are those as written, within rounding{over}"
    elif confirmation.drop is not None:
        words += (
            f"; its loss ends up {confirmation.drop.value:+.2g} beside that as written, {confirmation.drop.upper:+.2g} at most"
            f"{over}"
        )
    return words + "." + (f" Faster in the search, but not confirmed: {' '.join(lost)}" if lost else "")
