"""Signals that ask a run to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.train.trainer import Trainer


@contextlib.contextmanager
def interruptible(trainer: Trainer) -> Iterator[None]:
    """A block in which Ctrl-C and SIGTERM end the run after its update, or in a validation; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's affair
        yield
        return

    def end(number: int, frame: object) -> None:
        for known, handler in before.items():
            signal.signal(known, handler)
        if child is not None and callable(telling := signal.getsignal(child)):
            before[child] = telling  # torch's, which raises wherever we are if the signal has ended the loader's workers too
            signal.signal(child, lambda *_: None)
        trainer.interrupted = True
        trainer.stop(f"It was interrupted by {signal.Signals(number).name}.")

    child: signal.Signals | None = getattr(signal, "SIGCHLD", None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler is not None}  # not set from Python: leave it
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
