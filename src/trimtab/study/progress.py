"""What a study tells about its progress. The base class keeps silent; lines of text are what a study in Python prints."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
import typing

from trimtab._internal.text import counted, plain

if typing.TYPE_CHECKING:  # which bring torch, and a command line that only prints does without
    from trimtab.core.trial import Trial
    from trimtab.study.record import Record
    from trimtab.study.samplers.ladder import Ask

INTERRUPTED = "interrupted: finishing with the best so far; press Ctrl-C again to stop at once"


class Progress:
    """Called by a study as it goes; override what you want to show. This one shows nothing.

    Calls come from the thread that runs the study, :meth:`interrupted` from within a signal handler.
    """

    def stage(self, words: str) -> None:
        """The study has come to another stage of its work, in plain words."""

    def opened(self, record: Record) -> None:
        """The workload is sound and the study can begin; it may hold trials of an earlier run."""

    def remark(self, sentence: str) -> None:
        """Something that the user should know before the end."""

    def began(self, ask: Ask, finished: int) -> None:
        """A trial began after ``finished`` others."""

    def ended(self, trial: Trial, record: Record) -> None:
        """A trial ended and is kept."""

    def interrupted(self) -> None:
        """The first Ctrl-C came: the study ends cleanly with the best so far."""
        self.stage(INTERRUPTED)


class Printed(Progress):
    """Lines of text: what runs, what came out, the time that has passed."""

    def __init__(self, stream: typing.TextIO | None = None, budget_s: float | None = None) -> None:
        self.budget_s = budget_s
        self.since = time.monotonic()
        self._stream = stream
        self._stage = ""
        self._waiting: collections.deque[str] = collections.deque()
        self._printing = False

    def write(self, line: str) -> None:
        """Print one line, on standard error if no stream was given; that nobody reads it any more ends no search."""
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr if self._stream is None else self._stream, flush=True)

    def stage(self, words: str) -> None:
        """Say it once."""
        if words != self._stage:
            self._stage = words
            self._say(f"{self._clock()} {words}")

    def opened(self, record: Record) -> None:
        """What is there already."""
        if record.trials:
            self._say(f"{self._clock()} going on from {counted(len(record.trials), 'trial')} of an earlier run")

    def remark(self, sentence: str) -> None:
        """A line of its own."""
        self._say(f"note: {sentence}")

    def began(self, ask: Ask, finished: int) -> None:
        """Which recipe is tried now."""
        self._say(f"{self._clock()} trial {finished}: {ask.stage}: {ask.recipe}")

    def ended(self, trial: Trial, record: Record) -> None:
        """How it came out."""
        if trial.state == "SKIPPED":
            self._say(f"{self._clock()} trial {trial.number}: {trial.recipe}: skipped: {trial.reason}")
            return
        words = ": ".join(part for part in (outcome(trial), trial.reason) if part)
        self._say(f"           {trial.state.lower()} {words} [{trial.seconds:.0f} s]")

    def _clock(self) -> str:
        passed = time.monotonic() - self.since
        left = "" if self.budget_s is None else f"/{self.budget_s:.0f}"
        return f"[{passed:4.0f}{left} s]"

    def _say(self, text: str) -> None:
        self._waiting.append(plain(text))
        if self._printing:  # a signal handler spoke while a line was being printed; streams do not take that
            return
        self._printing = True
        try:
            while self._waiting:
                self.write(self._waiting.popleft())
        finally:
            self._printing = False


def outcome(trial: Trial) -> str:
    """The figures of a trial: speed-up, change of the score, and size where it is known."""
    parts = [trial.speedup.times()] if trial.speedup else []
    if trial.drop:
        parts.append(trial.drop.short(2))
    if trial.size_mb is not None:
        parts.append(f"{trial.size_mb:.3g} MB")
    return ", ".join(parts)
