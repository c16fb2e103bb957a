"""Progress callbacks of a study: a silent base class, and one that prints lines, the default in Python."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
import typing

from trimtab._internal.text import counted, plain

if typing.TYPE_CHECKING:  # these import torch, which takes seconds
    from trimtab.core.trial import Trial
    from trimtab.study.record import Record
    from trimtab.study.samplers.sampler import Ask

TRAINING_LINE_S = 10.0
"""Seconds between two lines about a training."""
INTERRUPTED = "interrupted: finishing with the best so far; press Ctrl-C again to stop at once"


class Progress:
    """Callbacks for the progress of a study, which do nothing. Override those whose events you want to show.

    The thread of the study calls them; a signal handler calls :meth:`interrupted`.
    """

    began_at: float | None = None
    """When the budget begins (``time.monotonic``); ``None`` if that is when :func:`trimtab.optimize` is called."""

    def stage(self, words: str) -> None:
        """Another stage of the study begins, described by ``words``."""

    def opened(self, record: Record) -> None:
        """The workload was checked and the search begins. ``record`` may have trials of an earlier run."""

    def remark(self, sentence: str) -> None:
        """A note for the user during the study."""

    def began(self, ask: Ask, finished: int) -> None:
        """A trial begins; ``finished`` trials have ended."""

    def ended(self, trial: Trial, record: Record) -> None:
        """A trial has ended and is stored."""

    def training(self, update: int, updates: int, spent_s: float, budget_s: float | None) -> None:
        """A smaller network is being trained, and has made ``update`` of ``updates``; all trainings took ``spent_s`` seconds of
        ``budget_s``."""

    def interrupted(self) -> None:
        """The first Ctrl-C: the study ends with the best trial so far."""
        self.stage(INTERRUPTED)


class Printed(Progress):
    """Print a line per event, with the elapsed time."""

    def __init__(self, stream: typing.TextIO | None = None, budget_s: float | None = None) -> None:
        self.budget_s = budget_s
        self.since = time.monotonic()
        self._stream = stream
        self._stage = ""
        self._waiting: collections.deque[str] = collections.deque()
        self._printing = False
        self._training_printed = self.since

    def write(self, line: str) -> None:
        """Print one line to the given stream, or to standard error. A closed stream does not end the search."""
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr if self._stream is None else self._stream, flush=True)

    def stage(self, words: str) -> None:
        """Print ``words``, once each."""
        if words != self._stage:
            self._stage = words
            self._print(f"{self._clock()} {words}")

    def opened(self, record: Record) -> None:
        """Print the number of trials of earlier runs."""
        if record.trials:
            self._print(f"{self._clock()} going on from {counted(len(record.trials), 'trial')} of an earlier run")

    def remark(self, sentence: str) -> None:
        """Print the note."""
        self._print(f"note: {sentence}")

    def began(self, ask: Ask, finished: int) -> None:
        """Print the recipe that is tried now."""
        self._print(f"{self._clock()} trial {finished}: {ask.stage}: {ask.recipe}")

    def ended(self, trial: Trial, record: Record) -> None:
        """Print the result of the trial."""
        if trial.state == "SKIPPED":
            self._print(f"{self._clock()} trial {trial.number}: {trial.recipe}: skipped: {trial.reason}")
            return
        words = ": ".join(part for part in (outcome(trial), trial.reason) if part)
        self._print(f"           {trial.state.lower()} {words} [{trial.seconds:.0f} s]")

    def training(self, update: int, updates: int, spent_s: float, budget_s: float | None) -> None:
        """Print the progress of the training every ten seconds."""
        if time.monotonic() - self._training_printed >= TRAINING_LINE_S:
            self._training_printed = time.monotonic()
            self._print(f"{self._clock()} {training_progress(update, updates, spent_s, budget_s)}")

    def _clock(self) -> str:
        passed = time.monotonic() - self.since
        left = "" if self.budget_s is None else f"/{self.budget_s:.0f}"
        return f"[{passed:4.0f}{left} s]"

    def _print(self, text: str) -> None:
        self._waiting.append(plain(text))
        if self._printing:  # called by a signal handler during a write, which streams do not allow
            return
        self._printing = True
        try:
            while self._waiting:
                self.write(self._waiting.popleft())
        finally:
            self._printing = False


def training_progress(update: int, updates: int, spent_s: float, budget_s: float | None) -> str:
    """The progress of a training as text."""
    of = "" if budget_s is None else f" of {budget_s:.0f} s"
    return f"training: update {update} of {updates}; all trainings so far {spent_s:.0f} s{of}"


def outcome(trial: Trial) -> str:
    """The figures of a trial: speed-up, change of the score, and size if known."""
    parts = [trial.speedup.times()] if trial.speedup else []
    if trial.drop:
        parts.append(trial.drop.short(2))
    if trial.size_mb is not None:
        parts.append(f"{trial.size_mb:.3g} MB")
    return ", ".join(parts)
