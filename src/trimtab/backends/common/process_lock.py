"""A lock for temporary changes of process-wide state, and the suppression of output."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator

SHARED = threading.RLock()
"""Lock for temporary changes of process-wide state; without it, threads could restore such state in the wrong order."""


@contextlib.contextmanager
def quiet(*, stream: bool = True) -> Iterator[None]:
    """Suppress warnings, log messages and, with ``stream``, standard error of exporters and converters in the block."""
    hidden = contextlib.redirect_stderr(io.StringIO()) if stream else contextlib.nullcontext()
    with SHARED, warnings.catch_warnings(), hidden:
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)
