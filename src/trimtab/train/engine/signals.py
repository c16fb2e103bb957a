"""Signals that ask a run to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from trimtab.train.run_context import RunContext

_CHILD: signal.Signals | None = getattr(signal, "SIGCHLD", None)


@contextlib.contextmanager
def interruptible(context: RunContext) -> Iterator[None]:
    """A block in which Ctrl-C and SIGTERM end the run after its update, or in validation; a second signal ends it at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    end = _Ending(context)
    for number in end.before:
        signal.signal(number, end)
    try:
        yield
    finally:
        end.over = True
        for number, handler in end.before.items():
            if number == _CHILD or signal.getsignal(number) is end:  # else a later run has set its own, and goes on
                signal.signal(number, _lasting(number, handler))


class _Ending:
    """The signal handler of one run."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.over = context, False
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.before = {number: handler for number, handler in found.items() if handler is not None}
        """The previous handlers; a handler that was not set from Python stays."""

    def __call__(self, number: int, frame: object) -> None:
        for known, handler in self.before.items():
            signal.signal(known, _lasting(known, handler))
        if _CHILD is not None and callable(telling := signal.getsignal(_CHILD)):
            self.before[_CHILD] = telling  # torch's raises in any line if the signal also ended loader workers
            signal.signal(_CHILD, lambda *_: None)
        self.context.fit.interrupted = True
        self.context.stop(f"It was interrupted by {signal.Signals(number).name}.")


def _lasting(number: signal.Signals, handler: Any) -> Any:
    """``handler``; if it belongs to a run that is over, the one before it. Runs may end in any order."""
    while isinstance(handler, _Ending) and handler.over:
        handler = handler.before[number]
    return handler
