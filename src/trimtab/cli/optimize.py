"""``trimtab optimize``."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated, Literal

import typer
from rich.console import Console

from trimtab._json import dumps
from trimtab._units import megabytes, seconds
from trimtab.study.optimize import optimize
from trimtab.study.progress import Progress
from trimtab.study.result import Result, busy
from trimtab.study.sampler import Ask
from trimtab.study.study import Study
from trimtab.trial import State, Trial
from trimtab.workload import Limits

EXIT_LIMITS = 1


class Lines(Progress):
    """Progress as lines of text: what runs, what came out, the best so far, the time that is left."""

    def __init__(self, console: Console, budget_s: float | None) -> None:
        self._console = console
        self._began = time.monotonic()
        self._budget_s = budget_s
        self._stage = ""

    def stage(self, words: str) -> None:
        """Say it once."""
        if words != self._stage:
            self._stage = words
            self._say(f"{self._clock()} {words}")

    def began(self, ask: Ask, finished: int) -> None:
        """Which recipe is tried now."""
        self._say(f"{self._clock()} trial {finished}: {ask.stage}: {ask.recipe}")

    def ended(self, trial: Trial, study: Study) -> None:
        """How it came out."""
        if trial.state is State.SKIPPED:
            self._say(f"{self._clock()} trial {trial.number}: {trial.recipe}: skipped: {trial.reason}")
            return
        speed = f" {trial.speedup.value:.2f}x ({trial.speedup.low:.2f} to {trial.speedup.high:.2f})" if trial.speedup else ""
        lost = f", drop {trial.drop.value:.2%} (up to {trial.drop.upper:.2%})" if trial.drop else ""
        reason = f": {trial.reason}" if trial.reason else ""
        self._say(f"           {trial.state.lower()}{speed}{lost}{reason} [{trial.seconds:.0f} s]")

    def _clock(self) -> str:
        passed = time.monotonic() - self._began
        left = "" if self._budget_s is None else f"/{self._budget_s:.0f}"
        return f"[{passed:4.0f}{left} s]"

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def optimize_command(
    workload: Annotated[str, typer.Argument(help="file.py, file.py:name or package.module:name")],
    max_drop: Annotated[str | None, typer.Option(help="largest drop of the score: 0.5%, 0.005, mlperf-99, mlperf-99.9")] = None,
    max_error: Annotated[str | None, typer.Option(help="largest output error of lossy recipes without labels: 5%")] = None,
    latency: Annotated[str | None, typer.Option(help="largest median latency: 4ms")] = None,
    memory: Annotated[str | None, typer.Option(help="largest peak memory: 500MB")] = None,
    size: Annotated[str | None, typer.Option(help="largest size on disk: 5MB")] = None,
    objective: Annotated[
        Literal["latency", "throughput", "memory", "size"], typer.Option(help="what to make better")
    ] = "latency",
    budget: Annotated[str | None, typer.Option(help="time for everything: 90s, 10m, 2h")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="at most so many new trials")] = None,
    sampler: Annotated[Literal["ladder", "tpe"], typer.Option(help="ladder, or tpe for long budgets")] = "ladder",
    out: Annotated[pathlib.Path | None, typer.Option(help="run folder; a study found there goes on [runs/NAME]")] = None,
    storage: Annotated[str | None, typer.Option(help="database URL [SQLite in the run folder]")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget what is in the run folder")] = False,
    worker_memory: Annotated[str | None, typer.Option(help="memory limit of one worker: 4GB [80% of what is free]")] = None,
    trial_time: Annotated[str, typer.Option(help="time limit of one trial")] = "10m",
    timing: Annotated[str, typer.Option(help="most time for the paired timing of one trial")] = "5s",
    seed: Annotated[int, typer.Option(help="of the tpe sampler")] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="print the result as JSON, and nothing else, on standard output")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress")] = False,
) -> int:
    """Search, prove, and write the artifact.

    Example: trimtab optimize examples/digits.py --max-drop 2% --budget 3m
    """
    limits = Limits.parse(max_drop=max_drop, max_error=max_error, latency=latency, memory=memory, size=size)
    budget_s = None if budget is None else seconds(budget, "--budget")
    progress = Progress() if quiet else Lines(Console(stderr=json), budget_s)
    result = optimize(
        workload,
        limits=limits,
        budget=budget_s,
        trials=trials,
        objective=objective,
        sampler=sampler,
        out=out,
        storage=storage,
        fresh=fresh,
        worker_memory_mb=None if worker_memory is None else megabytes(worker_memory, "--worker-memory"),
        trial_seconds=seconds(trial_time, "--trial-time"),
        timing_seconds=seconds(timing, "--timing"),
        seed=seed,
        progress=progress,
    )
    if json:
        typer.echo(dumps(result))
    else:
        show(result)
    return EXIT_LIMITS if result.status == "limits_not_met" else 0


def show(result: Result) -> None:
    """The answer, for reading."""
    console = Console(highlight=False, soft_wrap=True)
    console.print()
    console.print(str(result.ladder()), markup=False)
    console.print()
    console.print(result.sentence, markup=False)
    for note in (*result.study.prepared.notes, *result.study.notes, *busy(result.trials)):
        console.print(f"note: {note}", markup=False)
    artifact = result.best.artifact if result.best is not None else None
    if artifact is not None:
        console.print(f"artifact: {artifact.path}  (python {artifact.path}/run.py runs it without trimtab)", markup=False)
    elif result.best is not None:
        why = result.best.confirmation.reason or result.best.trial.reason or "see the log of its confirmation"
        console.print(f"artifact: none; {why}", markup=False)
    console.print(f"study:    {result.study.folder}  ({len(result.trials)} trials, {result.seconds:.0f} s)", markup=False)
