"""The lock of what changes the state of the whole process for a while."""

from __future__ import annotations

import threading

SHARED = threading.RLock()
"""Lock for temporary changes of process-wide state; without it, threads could restore such state in the wrong order."""
