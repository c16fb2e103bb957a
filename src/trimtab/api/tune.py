"""Find the settings that make a training fastest, prove that it learns the same, and say so."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from trimtab._internal.serialization import to_json, write_json
from trimtab._internal.units import positive, seconds
from trimtab.api.optimize import Interrupt, confirm_s, reported, taken
from trimtab.core.settings import Settings
from trimtab.core.workload import Limits, Workload
from trimtab.errors import UsageError
from trimtab.execution.fork_pool import Workers
from trimtab.study.options import Options
from trimtab.study.progress import Printed, Progress
from trimtab.study.record import Record
from trimtab.study.result import Result, speed_ups
from trimtab.study.run_folder import disk_errors, exclusive, run_folder, starting_afresh
from trimtab.study.storage import shown
from trimtab.study.study import Study
from trimtab.study.task import TrainingTask
from trimtab.study.training import finish, settings_of

SETTINGS_FILE = "settings.json"
UPDATES, FEWEST_UPDATES = 24, 8


@dataclasses.dataclass(frozen=True)
class TrainingLadder:
    """As written, the best exact settings, the best of all; ``str()`` of it is a table."""

    rungs: tuple[Mapping[str, Any], ...]
    before: float | None = None
    """The loss as written from the parameters of the confirmation, where that of the best is from these."""

    def __str__(self) -> str:
        speeds = speed_ups(self.rungs)
        lines = [f"{'rung':<11} {speeds[0]} {'update':>10} {'final loss':>11} {'rise (up to)':>20}  recipe"]
        lines += map(_line, self.rungs, speeds[1:])
        if self.before is not None:
            lines.append(f"The loss of best is from other parameters, where the settings as written reach {self.before:.6g}.")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned(Result):
    """The answer to :func:`tune`: a :class:`~trimtab.study.result.Result` with the settings in it."""

    settings: Settings
    """For ``Trainer(settings=...)``: those of the winner, or those as written, with what was ``"auto"`` off, where nothing was
    proven to be faster."""

    def ladder(self) -> TrainingLadder:  # type: ignore[override]
        """As written, the best exact settings, the best of all; a training has no tuned form beside these."""
        whole = super().ladder()
        return TrainingLadder(tuple(rung for rung in whole.rungs if rung["rung"] != "tuned"), whole.before)

    def record(self) -> Record:
        """All that a report shows, the settings included."""
        return dataclasses.replace(super().record(), settings=self.spoken)

    def to_json(self) -> dict[str, Any]:
        """The answer with its settings."""
        return super().to_json() | {"settings": to_json(self.settings)}

    @property
    def spoken(self) -> str:
        """The settings as Python writes them, without what is at its default."""
        return _call(self.settings)

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.ladder()}\n\n{self.spoken}"


def tune(
    workload: Workload | str | os.PathLike[str],
    *,
    limits: Limits | None = None,
    budget: str | float | None = None,
    trials: int | None = None,
    updates: int = UPDATES,
    out: str | pathlib.Path | None = None,
    storage: str | None = None,
    fresh: bool = False,
    worker_memory_mb: float | None = None,
    trial_seconds: float = 600.0,
    timing_seconds: float = 5.0,
    progress: Progress | None = None,
) -> Tuned:
    """Search for the settings under which ``workload`` trains fastest, and prove that it learns the same.

    Every trial is a process of its own that trains from the same parameters on the same batches. Exact settings must give the
    losses as written, update by update, within what rounding explains on this very workload; others, such as bfloat16, must not
    end up above the limit of the loss. Speed is measured in turns with the settings as written, at the same examples per
    update, and the winner is judged and measured again in fresh processes, from other parameters and in another order of the
    data: the lower end of its 95% interval must be above 1, or the settings as written stay.

    Args:
        workload: a :class:`Workload` with ``training=...``, or a reference such as ``"train.py:workload"``.
        limits: ``max_drop`` is how much higher the loss may end up, in its own units; one percent of the loss as written if
            nothing is said. ``memory_mb`` bounds the peak memory.
        budget: time for everything, as ``"10m"`` or in seconds; ``None`` ends when there is nothing left to try.
        trials: at most so many new trials.
        updates: over how many the losses are compared.
        out: the run folder; ``runs/NAME-tune`` if not said. A study found there goes on.
        storage: URL of a database instead of an SQLite file in the run folder.
        fresh: delete what is in the run folder, and this very study in ``storage``, first.
        worker_memory_mb: memory limit of one worker process, in megabytes; ``trial_seconds`` is the time limit of one trial.
        timing_seconds: most time for the paired timing of one trial; it ends sooner where the interval is narrow.
        progress: told what happens; if ``None`` it stands on standard error, in lines. ``trimtab.Progress()`` keeps silent.

    Raises:
        UsageError: an argument, the workload's form, or the run folder is wrong; nothing was tried.
        WorkloadError: the training itself fails.
        StorageError: the storage cannot be used; finished trials are kept.
        KeyboardInterrupt: on the second Ctrl-C, or on the first where no trial was finished yet; finished trials are kept.
    """
    began = time.monotonic()
    options = Options(
        objective="throughput",
        limits=_limits(limits),
        storage=storage,
        trial_s=positive(trial_seconds, "trial_seconds"),
        timing_s=positive(timing_seconds, "timing_seconds"),
        worker_mb=None if worker_memory_mb is None else positive(worker_memory_mb, "worker_memory_mb"),
        fresh=fresh,
    )
    if not isinstance(updates, int) or updates < FEWEST_UPDATES:
        raise UsageError(f"updates is {updates!r}; losses are compared over a whole number of at least {FEWEST_UPDATES}.")
    most = None if trials is None else positive(trials, "trials")
    limit_s = None if budget is None else seconds(budget, "budget")
    workload = taken(workload, "trimtab.tune")
    folder = run_folder(workload, out, "-tune")
    progress = Printed(budget_s=limit_s) if progress is None else progress
    with Interrupt(progress) as interrupt, disk_errors(folder), exclusive(folder), Workers() as workers:
        asked = {"limits": limits, "budget": budget, "trials": trials, "updates": updates}
        command = _spoken(workload, options, **asked, out=str(folder))
        with starting_afresh(folder) if fresh else contextlib.nullcontext():
            study = Study(
                workload,
                folder,
                options,
                task=TrainingTask(updates, prepare_by=limit_s and began + limit_s),
                progress=progress,
                interrupted=interrupt,
                command=command,
                workers=workers,
            )
        study.record().write(study.folder)
        study.search(deadline=limit_s and began + limit_s, reserve=lambda: confirm_s(study, limit_s or 0.0), most=most)
        return _answer(study, began)


def _answer(study: Study, began: float) -> Tuned:
    """Confirm and report what the search found."""
    status, sentence, best = finish(study)
    settings = settings_of(study, study.baseline if best is None else best.trial.recipe)
    write_json(study.folder / SETTINGS_FILE, settings)
    took = time.monotonic() - began
    return reported(Tuned(study=study, status=status, sentence=sentence, best=best, seconds=took, settings=settings))


def _limits(limits: Limits | None) -> Limits:
    """The limits, of which only those of the loss and of the memory mean something here.

    Raises:
        UsageError: another one is given.
    """
    found = limits or Limits()
    for name in ("latency_ms", "size_mb"):
        if (given := getattr(found, name)) is not None:
            raise UsageError(
                f"Limits {name}={given:g} is for inference; a training takes max_drop, of its loss, and memory_mb."
            )
    return found


def _spoken(workload: Workload | str, options: Options, **asked: Any) -> str:
    """The call that goes on with a study; what it leaves out is at its default."""
    asked |= {"storage": options.storage and shown(options.storage), "worker_memory_mb": options.worker_mb}
    asked |= {"trial_seconds": options.trial_s, "timing_seconds": options.timing_s}
    defaults = inspect.signature(tune).parameters
    given = [f"{name}={value!r}" for name, value in asked.items() if value != defaults[name].default]
    what = repr(workload) if isinstance(workload, str) else "workload"
    return f"trimtab.tune({', '.join([what, *given])})"


def _line(rung: Mapping[str, Any], times: str) -> str:
    update, drop, loss = rung["latency_ms"]["median"], rung["drop"], rung["score"]["value"]
    ms = "-" if update is None else f"{update:.3g} ms"
    score = "-" if loss is None else f"{loss:.4g}"
    rise = "-" if drop["value"] is None else f"{drop['value']:+.2g} ({drop['upper']:+.2g})"
    return f"{rung['rung']:<11} {times} {ms:>10} {score:>11} {rise:>20}  {rung['recipe']}"


def _call(settings: Any) -> str:
    """``settings``, or a group of them, as Python writes them, without what is at its default."""
    default, given = type(settings)(), []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != getattr(default, field.name):
            given.append(f"{field.name}={_call(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(settings).__name__}({', '.join(given)})"
