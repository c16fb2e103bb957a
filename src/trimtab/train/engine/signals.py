"""Runs that end early: on a signal, or when the process exits."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import signal
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

from trimtab.train.run_context import RunContext

Run = TypeVar("Run", bound=Generator[Any, None, Any])
_CHILD: signal.Signals | None = getattr(signal, "SIGCHLD", None)
_RUNNING: list[RunContext] = []
"""The runs of this process that have begun and not ended, in all threads; a signal ends all of them."""


@contextlib.contextmanager
def interruptible(context: RunContext) -> Iterator[None]:
    """A block in which Ctrl-C and SIGTERM end the run after its update, or in validation; a second signal ends it at once.

    A signal that reaches one run ends all runs of the process, also those in other threads, which cannot catch any.
    """
    _RUNNING.append(context)
    try:
        with _signals_handled() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
            yield
    finally:
        _RUNNING[:] = [each for each in _RUNNING if each is not context]


@contextlib.contextmanager
def _signals_handled() -> Iterator[None]:
    """A block with handlers of signals, which only the main thread may set."""
    end = _StopHandler()
    for number in end.before:
        signal.signal(number, end)
    try:
        yield
    finally:
        end.ended = True
        for number, handler in end.before.items():
            if number == _CHILD or signal.getsignal(number) is end:  # else a later run, which continues, has set its own
                signal.signal(number, _active_handler(number, handler))


class _StopHandler:
    """The signal handler of one run."""

    def __init__(self) -> None:
        self.ended = False
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.before = {number: handler for number, handler in found.items() if handler is not None}
        """The previous handlers; a handler that was not set from Python stays."""

    def __call__(self, number: int, frame: object) -> None:
        for known, handler in self.before.items():
            signal.signal(known, _active_handler(known, handler, asked=True))
        if _CHILD is not None and callable(child_handler := signal.getsignal(_CHILD)):
            self.before[_CHILD] = child_handler  # torch's raises in any line if the signal also ended loader workers
            signal.signal(_CHILD, lambda *_: None)
        for context in list(_RUNNING):
            context.fit.interrupted = True
            context.stop(f"It was interrupted by {signal.Signals(number).name}.")


def _active_handler(number: signal.Signals, handler: Any, *, asked: bool = False) -> Any:
    """``handler``; if it belongs to a run that is over, or was ``asked`` to end, the one before it. Runs end in any order."""
    while isinstance(handler, _StopHandler) and (asked or handler.ended):
        handler = handler.before[number]
    return handler


def closed_at_exit(run: Run) -> Run:
    """``run``, which is closed as the process ends, if it is still suspended: an error keeps its frame until it is too late."""
    known = weakref.ref(run, lambda _: atexit.unregister(close))

    def close() -> None:
        found = known()
        if found is not None and inspect.getgeneratorstate(found) != inspect.GEN_RUNNING:
            found.close()

    atexit.register(close)
    return run
