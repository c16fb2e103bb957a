"""Tune a training: find the fastest settings, and prove that the losses match."""

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
from trimtab._internal.validation import checked_call
from trimtab.api.optimize import Interrupt, checked_workload, confirm_s, write_results
from trimtab.core.limits import Limits
from trimtab.core.settings import Settings
from trimtab.core.workload import Workload
from trimtab.errors import UsageError
from trimtab.execution.fork_pool import Workers
from trimtab.study.options import Options
from trimtab.study.progress import Printed, Progress
from trimtab.study.record import Record
from trimtab.study.result import Result, speed_ups
from trimtab.study.run_folder import disk_errors, exclusive, run_folder, starting_afresh
from trimtab.study.storage import hide_password
from trimtab.study.study import Study
from trimtab.study.task import TrainingTask
from trimtab.study.training import finish, settings_of

SETTINGS_FILE = "settings.json"
UPDATES, FEWEST_UPDATES = 24, 8


@dataclasses.dataclass(frozen=True)
class TrainingLadder:
    """The ladder of a training: as written, best exact settings, best of all; ``str()`` gives a table."""

    rungs: tuple[Mapping[str, Any], ...]
    before: float | None = None
    """Final loss as written from the initial parameters of the confirmation, if that of the best is from them."""

    def __str__(self) -> str:
        speeds = speed_ups(self.rungs)
        lines = [f"{'rung':<11} {speeds[0]} {'update':>10} {'final loss':>11} {'rise (up to)':>20}  recipe"]
        lines += map(_line, self.rungs, speeds[1:])
        if self.before is not None:
            lines.append(f"The loss of best is from other parameters, where the settings as written reach {self.before:.6g}.")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned(Result):
    """The result of :func:`tune`: a :class:`~trimtab.study.result.Result` with the settings."""

    settings: Settings
    """For ``Trainer(settings=...)``: the settings of the winner. If nothing is proven faster, the settings as written, with
    ``"auto"`` turned off."""

    def ladder(self) -> TrainingLadder:  # type: ignore[override]
        """The ladder; a training has no rung ``tuned``."""
        whole = super().ladder()
        return TrainingLadder(tuple(rung for rung in whole.rungs if rung["rung"] != "tuned"), whole.before)

    def record(self) -> Record:
        """The record of the study with its result and settings."""
        return dataclasses.replace(super().record(), settings=self.spoken)

    def to_json(self) -> dict[str, Any]:
        """The result with its settings, as JSON."""
        return super().to_json() | {"settings": to_json(self.settings)}

    @property
    def spoken(self) -> str:
        """The settings as Python source, without defaults."""
        return _as_source(self.settings)

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.ladder()}\n\n{self.spoken}"


@checked_call("trimtab.tune")
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
    """Search for the settings under which ``workload`` trains fastest, and prove that its losses match those as written.

    Each trial trains in a process of its own, from the same parameters on the same batches. Exact settings must give the losses
    as written, up to rounding; the final loss of lossy ones must stay within the limit. The winner is checked and timed in
    new processes, from other parameters. Unless the lower end of its 95% interval is above 1, the settings as written stay.

    Example::

        import torch, trimtab
        data = [(torch.randn(32, 64), torch.randn(32, 8)) for _ in range(32)]
        training = trimtab.Training(data=data, optimizer=torch.optim.AdamW, loss=torch.nn.MSELoss())
        workload = trimtab.Workload(mode="train", model=torch.nn.Linear(64, 8), training=training)
        print(trimtab.tune(workload, budget="30s", out="runs/linear-tune"))

    Args:
        workload: a :class:`Workload` with ``training=...``, or a reference such as ``"train.py:workload"``.
        limits: ``max_drop``, the largest rise of the final loss in its units (default 1% of it), and ``memory_mb``.
        budget: time for the whole run, as ``"10m"`` or in seconds. ``None`` ends when the search has tried everything.
        trials, updates: most trials besides the training as written, and number of updates over which losses are compared.
        out: the run folder; default ``runs/NAME-tune``. A study in it is resumed.
        storage: URL of a database instead of an SQLite file.
        fresh: first delete the study in the run folder and in ``storage``.
        worker_memory_mb: memory limit of one worker process, in MB.
        trial_seconds, timing_seconds: time limits of one trial, and of its paired timing, which a narrow interval ends sooner.
        progress: progress callbacks; ``None`` prints lines to standard error, ``trimtab.Progress()`` prints nothing.

    Raises:
        UsageError: an argument, the workload's form, or the run folder is wrong; nothing was tried.
        WorkloadError, StorageError, KeyboardInterrupt: the training fails, the storage cannot be used, or Ctrl-C came twice.
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
    deadline = limit_s and began + limit_s
    workload = checked_workload(workload, "trimtab.tune")
    folder = run_folder(workload, out, "-tune")
    progress = Printed(budget_s=limit_s) if progress is None else progress
    with Interrupt(progress) as interrupt, disk_errors(folder), exclusive(folder), Workers() as workers:
        command = _python_call(workload, options, limits=limits, budget=budget, trials=trials, updates=updates, out=str(folder))
        with starting_afresh(folder) if fresh else contextlib.nullcontext():
            study = Study(
                workload,
                folder,
                options,
                task=TrainingTask(updates, prepare_by=deadline),
                progress=progress,
                interrupted=interrupt,
                command=command,
                workers=workers,
            )
        study.record().write(study.folder)
        study.search(deadline=deadline, reserve=lambda: confirm_s(study, limit_s or 0.0), most=study.besides_baseline(most))
        return _conclude(study, began, deadline)


def _conclude(study: Study, began: float, deadline: float | None) -> Tuned:
    """Confirm and report the result of the search."""
    status, sentence, best = finish(study, end=deadline)
    settings = settings_of(study, study.baseline if best is None else best.trial.recipe)
    write_json(study.folder / SETTINGS_FILE, settings)
    took = time.monotonic() - began
    return write_results(Tuned(study=study, status=status, sentence=sentence, best=best, seconds=took, settings=settings))


def _limits(limits: Limits | None) -> Limits:
    """Check that ``limits`` has only limits of loss and memory.

    Raises:
        UsageError: there is another limit.
    """
    found = limits or Limits()
    for name in ("latency_ms", "size_mb", "throughput"):
        if (given := getattr(found, name)) is not None:
            raise UsageError(
                f"Limits {name}={given:g} is for inference; a training takes max_drop, of its loss, and memory_mb."
            )
    return found


def _python_call(workload: Workload | str, options: Options, **asked: Any) -> str:
    """The Python call that resumes a study, without arguments at their defaults."""
    asked |= {"storage": options.storage and hide_password(options.storage), "worker_memory_mb": options.worker_mb}
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


def _as_source(settings: Any) -> str:
    """``settings``, or a group of settings, as Python source, without defaults."""
    default, given = type(settings)(), []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != getattr(default, field.name):
            given.append(f"{field.name}={_as_source(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(settings).__name__}({', '.join(given)})"
