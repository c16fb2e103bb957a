"""Show the progress of a run: a live line in a terminal or a notebook, lines of text elsewhere."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from trimtab._internal.terminal import Console, Live, Text
from trimtab._internal.text import clock
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.step_clock import PHASES
from trimtab.train.telemetry.events import Ended, Event, Progressed, Remarked, Validated

REFRESHES = 4
"""Refreshes of the live line per second, in a thread of its own, so that they cost a step nothing."""
LINE_S = 1.0
"""Least seconds between two lines of text."""


@contextlib.contextmanager
def shown(context: RunContext, wanted: bool | None, console: Console | None = None) -> Iterator[None]:
    """A block whose run is shown on ``console``, standard error by default.

    Without a terminal, lines of text are shown only if ``wanted`` is true. Of several processes only the first shows anything.
    """
    console = console or Console(stderr=True, highlight=False)
    live: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    notebook = _display()
    if wanted is not False and context.world.leads and (wanted or console.is_terminal or notebook):
        view = View(context, console) if notebook is None else NotebookView(context, console, notebook)
        context.watchers.append(view)
        if console.is_terminal and notebook is None:
            printed = sys.stdout.isatty()  # else what callbacks print goes to the file that it is
            live = Live(console=console, get_renderable=view.line, refresh_per_second=REFRESHES, redirect_stdout=printed)
    try:
        with live:
            yield
    finally:
        context.watchers.clear()


class View:
    """A callback that prints events and makes the line of progress."""

    def __init__(self, context: RunContext, console: Console) -> None:
        self.context, self.console = context, console
        self._last: Progressed | None = None
        self._first, self._since = context.position.update, time.monotonic()
        self._printed_at = 0.0

    def __call__(self, context: RunContext, event: Event) -> None:
        """Print ``event`` if it has a line of its own."""
        if isinstance(event, Progressed):
            if self._last is None:  # the first window includes warm-up
                self._first, self._since = event.update, time.monotonic()
            self._last = event
            if not self.console.is_terminal and time.monotonic() - self._printed_at >= LINE_S:
                self._printed_at = time.monotonic()
                self.console.print(self.line(), soft_wrap=True)
        elif text := line_of(event, self.epoch):
            self.console.print(text, soft_wrap=True, markup=False)

    @property
    def epoch(self) -> int:
        """The epoch of the last update, counted from 1."""
        position = self.context.position
        return max(position.epoch + bool(position.batch), 1)

    def line(self) -> Text:
        """The line of progress: epoch, update, loss, speed, time left and phases."""
        position, last, updates = self.context.position, self._last, self.context.fit.planned
        of = "" if updates is None else f" of {updates:,}"
        parts = [_epoch(self.epoch, self.context.fit.epochs), f"update {position.update:,}{of}"]
        if last is not None:
            parts += [f"loss {last.loss:.4g}", f"{last.examples_per_s:,.0f} examples/s"]
            if (left := self._left()) is not None:
                parts.append(f"{clock(left)} left")
            parts.append(main_phases(last.shares))
        return Text(" · ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis")

    def _left(self) -> float | None:
        """Estimated seconds to the end."""
        position, now, updates = self.context.position, time.monotonic(), self.context.fit.planned
        made = position.update - self._first
        if updates is None or made < 1:
            return None
        return max(updates - position.update, 0) * (now - self._since) / made


class NotebookView(View):
    """A view below the cell of a notebook, which changes in place: the lines so far, and the line of progress."""

    def __init__(self, context: RunContext, console: Console, display: Any) -> None:
        super().__init__(context, console)
        self._display = display
        self._lines: list[str] = []
        self._handle: Any = None

    def __call__(self, context: RunContext, event: Event) -> None:
        """Show ``event``."""
        if isinstance(event, Progressed):
            if self._last is None:
                self._first, self._since = event.update, time.monotonic()
            self._last = event
        elif text := line_of(event, self.epoch):
            self._lines.append(text)
        if isinstance(event, Ended) or time.monotonic() - self._printed_at >= 1 / REFRESHES:
            self._printed_at = time.monotonic()
            self._show()

    def _show(self) -> None:
        page = self._display.HTML(f"<pre>{html.escape(chr(10).join([*self._lines, self.line().plain]))}</pre>")
        if self._handle is None:
            self._handle = self._display.display(page, display_id=True)
        else:
            self._handle.update(page)


def _display() -> Any:
    """IPython's module ``display`` in the kernel of a notebook, else ``None``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.modules.get("IPython.display") if shell is not None and getattr(shell, "kernel", None) is not None else None


def _epoch(now: int, epochs: int | None) -> str:
    """``epoch 3 of 5``; a run that is complete is in its last epoch."""
    return f"epoch {now}" if epochs is None else f"epoch {min(now, epochs)} of {epochs}"


def line_of(event: Event, epoch: int) -> str | None:
    """``event``, in ``epoch`` (counted from 1), as a line of text; ``None`` if it has no line."""
    if isinstance(event, Validated):
        figures = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
        return f"epoch {epoch}, update {event.update:,}: validation {figures}{' (best so far)' if event.best else ''}"
    if isinstance(event, Remarked):
        return f"note: {event.text}"
    return None  # an adjustment has a remark of its own, and the caller has the summary


def main_phases(shares: Mapping[str, float]) -> str:
    """The phases that take a tenth of the time or more: ``forward 34%, backward 41%``."""
    return ", ".join(f"{phase} {shares[phase]:.0%}" for phase in PHASES if shares.get(phase, 0.0) >= 0.095)
