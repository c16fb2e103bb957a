"""Progress output: a live view on a terminal, lines of text elsewhere, and a spinner for short waits."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trimtab._internal.text import clock
from trimtab._internal.text import plain as cleaned
from trimtab.cli._lazy import lazy_import
from trimtab.study.progress import INTERRUPTED, Printed, Progress, outcome, training_progress

if TYPE_CHECKING:  # these import torch, which takes seconds
    from trimtab.core.trial import Trial
    from trimtab.study.record import Record
    from trimtab.study.samplers.sampler import Ask

REFRESHES = 4
"""Refreshes per second. One takes about 1 ms of CPU time, which must not disturb the measurements."""
LONGEST_REASON = 240
"""Characters of a reason that the live view shows; the log and the report show all."""
MARKS = {"COMPLETE": "✓", "SKIPPED": "–", "FAILED": "✗", "MISMATCH": "≠", "STOPPED": "■"}
PLAIN_MARKS = {"COMPLETE": "+", "SKIPPED": "-", "FAILED": "x", "MISMATCH": "!", "STOPPED": "."}
STYLES = {"COMPLETE": "green", "SKIPPED": "dim", "FAILED": "red", "MISMATCH": "yellow", "STOPPED": "dim"}
STATES = {"COMPLETE": "measured", "SKIPPED": "skipped", "FAILED": "failed", "MISMATCH": "wrong outputs", "STOPPED": "given up"}
STAGES = {
    "as_written": "measuring the model as written",
    "tuned": "tuning PyTorch itself",
    "lossless": "trying runtimes that keep full precision",
    "precision": "trying less precision, within the accuracy limit",
    "compressed": "trying smaller networks, trained to follow the model",
    "knobs": "turning the knobs of the best so far",
    "tpe": "searching the whole space, guided by what was found",
}
"""Descriptions of the stages of the search."""


class View(Progress):
    """Base class of all progress views. A context, which ends the display on exit."""

    def __init__(self, console: Console, budget_s: float | None, trials: int | None) -> None:
        self.console = console
        self.budget_s = budget_s
        self.trials = trials
        """The largest number of new trials."""
        self.cut_short = False
        """Whether Ctrl-C was pressed."""
        self.remarks: set[str] = set()
        """The remarks shown so far."""
        self.began_at = self.since = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing."""

    def remark(self, sentence: str) -> None:
        """Record that ``sentence`` is shown."""
        self.remarks.add(sentence)
        super().remark(sentence)

    def interrupted(self) -> None:
        """Show that the study ends."""
        self.cut_short = True
        super().interrupted()


class Quiet(View):
    """Shows nothing."""

    def remark(self, sentence: str) -> None:
        """Show nothing: the remark is printed with the result."""


class Lines(View, Printed):
    """Lines of text, for pipes, logs and plain terminals."""

    def __init__(self, console: Console, budget_s: float | None, trials: int | None) -> None:
        View.__init__(self, console, budget_s, trials)
        Printed.__init__(self, budget_s=budget_s)

    def write(self, line: str) -> None:
        """Print one line, unwrapped and without markup."""
        self.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Reflowing(Live):
    """A live display that also clears its lines after the terminal was made narrower, which wraps them.

    Text printed meanwhile appears above the display, unless standard output is redirected.
    """

    def __init__(self, renderable: RenderableType, **options: Any) -> None:
        super().__init__(renderable, redirect_stdout=sys.stdout.isatty(), **options)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Correct the number of lines that rich clears: it counts the lines written, not the wrapped ones."""
        render = getattr(self, "_live_render", None)
        shape = getattr(render, "_shape", None)
        if render is not None and shape is not None and self.console.width < shape[0]:
            render._shape = (self.console.width, shape[1] * math.ceil(shape[0] / self.console.width))
        return super().process_renderables(renderables)


class Board(View):
    """A live view of the running trial, the best trial and the remaining time; finished trials scroll above it."""

    def __init__(self, console: Console, budget_s: float | None, trials: int | None) -> None:
        super().__init__(console, budget_s, trials)
        self._marks = MARKS if _unicode(console) else PLAIN_MARKS
        self._spinner = Spinner("dots" if _unicode(console) else "line")
        self._words = "starting"
        self._running: tuple[int, str, float] | None = None
        self._best: Text | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._earlier = 0
        self._live = Reflowing(self, console=console, refresh_per_second=REFRESHES, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def stage(self, words: str) -> None:
        """Show ``words`` at the next refresh. Draws nothing itself: a signal handler may call this."""
        if not self.cut_short or words == INTERRUPTED:
            self._words = words
        if words != "searching":
            self._running = None

    def interrupted(self) -> None:
        """Show that the study ends, and keep showing what runs."""
        self.cut_short, self._words = True, INTERRUPTED

    def opened(self, record: Record) -> None:
        """Show the best trial of an earlier run."""
        self._earlier = len(record.trials)
        self._count_trials(record)

    def remark(self, sentence: str) -> None:
        """Print the remark above the view."""
        super().remark(sentence)
        self.console.print(Text(cleaned(f"note: {sentence}"), style="yellow"))

    def began(self, ask: Ask, finished: int) -> None:
        """Show the recipe that is tried now."""
        if not self.cut_short:
            self._words = STAGES.get(ask.stage, ask.stage)
        self._running = (finished, str(ask.recipe), time.monotonic())

    def training(self, update: int, updates: int, spent_s: float, budget_s: float | None) -> None:
        """Show the progress of the training."""
        if not self.cut_short:
            self._words = training_progress(update, updates, spent_s, budget_s)

    def ended(self, trial: Trial, record: Record) -> None:
        """Print the finished trial above the view."""
        self._running = None
        self._count_trials(record)
        self.console.print(self._row(trial))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.monotonic()
        grid = _grid(console)
        words = Text(self._words, style="bold", no_wrap=False, overflow="fold")
        grid.add_row(self._spinner.render(now), words, Text(self._time(now), style="bold"))
        if self._running is not None:
            number, recipe, since = self._running
            grid.add_row("", Text.assemble(("now   ", "dim"), f"trial {number}: {recipe}"), f"{now - since:.0f} s")
        if self._best is not None:
            grid.add_row("", Text.assemble(("best  ", "dim"), self._best), "")
        if self._counts:
            grid.add_row("", Text.assemble(("done  ", "dim"), self._counts_text()), "")
        yield grid

    def _row(self, trial: Trial) -> Table:
        style = STYLES[trial.state]
        reason = cleaned(trial.reason or "")
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON].rstrip()} ..."
        figures = outcome(trial) if trial.state == "COMPLETE" else ""
        words = "; ".join(part for part in (figures, reason) if part)
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(style=style, width=1)
        grid.add_column(justify="right", style="dim")
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(justify="right", style="dim", no_wrap=True)
        state = "" if trial.state == "COMPLETE" else f"{STATES[trial.state]}: "
        quiet = "dim" if style == "dim" else ""
        text = Text.assemble((f"{trial.recipe}  ", quiet), (state, style), (words, "dim" if state else ""))
        took = f"{trial.seconds:.0f} s" if trial.state != "SKIPPED" else ""
        grid.add_row(self._marks[trial.state], str(trial.number), text, took)
        return grid

    def _count_trials(self, record: Record) -> None:
        self._counts = collections.Counter(str(trial.state) for trial in record.trials)
        ranked = lazy_import("study.ranking").ranked(record.trials, record.limits, record.objective)
        if best := next(iter(ranked), None):
            self._best = Text.assemble((outcome(best), "green"), f"  {best.recipe}")

    def _counts_text(self) -> str:
        total = sum(self._counts.values())
        of = "" if self.trials is None else f" of {self.trials + self._earlier}"
        parts = [f"{self._counts[state]} {word}" for state, word in STATES.items() if self._counts[state]]
        return f"{total}{of} trials: {', '.join(parts)}"

    def _time(self, now: float) -> str:
        passed = now - self.since
        if self.budget_s is None:
            return clock(passed)
        return f"{clock(passed)}, {clock(self.budget_s - passed)} left"


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _grid(console: Console) -> Table:
    """A table of one-line cells: a mark, text that is cut to the width, and a time."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=1)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis" if _unicode(console) else "crop")
    grid.add_column(justify="right", no_wrap=True)
    return grid


def on_terminal(stream: TextIO | None) -> bool:
    """Whether ``stream`` is a terminal, whatever ``FORCE_COLOR`` says, which makes rich treat files as terminals."""
    return stream is not None and stream.isatty()


def view(console: Console, *, plain: bool, quiet: bool, budget_s: float | None, trials: int | None) -> View:
    """The progress view for ``console``: live only on a terminal that can move its cursor."""
    live = console.is_terminal and not console.is_dumb_terminal and not plain
    kind = Quiet if quiet else Board if live else Lines
    return kind(console, budget_s, trials)


@contextlib.contextmanager
def waiting(words: str) -> Iterator[None]:
    """A context that shows a spinner, ``words`` and the elapsed seconds on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not on_terminal(sys.stderr) or not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with Reflowing(_Wait(words, console), console=console, refresh_per_second=REFRESHES, transient=True):
        yield


class _Wait:
    def __init__(self, words: str, console: Console) -> None:
        self._words, self._since = Text(cleaned(words)), time.monotonic()
        self._spinner = Spinner("dots" if _unicode(console) else "line")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.monotonic()
        grid = _grid(console)
        grid.add_row(self._spinner.render(now), self._words, f"{now - self._since:.0f} s")
        yield grid
