"""How often each line of the script runs within one step, by Python's tracing. It is a step after those that are timed."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from trimtab.probe.inside.sites import is_script

MOST = 3_000_000
"""Lines after which counting ends: a step of pure Python would take too long."""

found: dict[tuple[CodeType, int], int] = {}
_lines = 0


def start() -> bool:
    """Count from now on, in the frames that are running too. ``False`` if a debugger or coverage traces already."""
    if sys.gettrace() is not None:
        return False
    for frame in _running():
        frame.f_trace = _line
    sys.settrace(_call)
    return True


def stop() -> None:
    """End counting."""
    sys.settrace(None)
    for frame in _running():
        frame.f_trace = None


def _running() -> list[FrameType]:
    """The script's frames of this thread."""
    frames, here = [], sys._getframe(1)
    while here is not None:
        if is_script(here.f_code):
            frames.append(here)
        here = here.f_back  # type: ignore[assignment]
    return frames


def _call(frame: FrameType, event: str, argument: Any) -> Any:
    return _line if is_script(frame.f_code) else None


def _line(frame: FrameType, event: str, argument: Any) -> Any:
    global _lines
    if event == "line":
        key = frame.f_code, frame.f_lineno
        found[key] = found.get(key, 0) + 1
        _lines += 1
        if _lines > MOST:
            sys.settrace(None)
    return _line
