"""Count the runs of each line of the script within one step, and the operators that each line calls, by Python's tracing. This
step comes after the timed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from trimtab.probe.inside import clock
from trimtab.probe.inside.sites import Place, caller, is_script, place_of, running

MOST = 3_000_000
"""Most lines that are counted: a step in pure Python would otherwise take too long."""

MOST_RESTARTS = 3
"""Steps with an evaluation that are counted anew, because the lines and operators of an evaluation belong to no usual step."""

found: dict[Place, int] = {}
operators: dict[tuple[str, str, Place], int] = {}
"""(Name, shape of the first tensor, line that calls it) -> calls, without those of backward passes."""
_lines = _restarts = 0
_most = MOST
Result = TypeVar("Result")


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that lines of the script call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _counting and clock.current() not in (clock.BACKWARD, clock.PROBE):
            place = caller(sys._getframe(1))
            if place is not None and is_script(place.code):
                first = args[0] if args else None
                key = func._schema.name, str(list(getattr(first, "shape", ()))), place
                operators[key] = operators.get(key, 0) + 1
        return func(*args, **(kwargs or {}))


_mode = _Operators()  # type: ignore[no-untyped-call]
_counting = False


def start(compiled: bool) -> bool:
    """Start counting, also in the running frames. Returns ``False`` if a debugger or a coverage tool traces already. Operators
    are not counted if code is ``compiled``, because a dispatch mode would change it."""
    global _counting
    _counting = not compiled
    if _counting:
        _mode.__enter__()  # type: ignore[no-untyped-call]
    if sys.gettrace() is not None:
        return False
    for frame in running():
        frame.f_trace = _line
    sys.settrace(_call)
    return True


def counted(function: Callable[[], Result], most: int) -> Result:
    """The result of ``function()``. At most ``most`` of the lines that run within it are counted in :data:`found`."""
    global _most
    _most = most
    found.clear()
    sys.settrace(_call)
    try:
        return function()
    finally:
        sys.settrace(None)


def restart() -> bool:
    """Count the next step in place of the current one. Returns ``False`` if that was done :data:`MOST_RESTARTS` times."""
    global _lines, _restarts
    if _restarts == MOST_RESTARTS:
        return False
    _restarts += 1
    _lines = 0
    found.clear()
    operators.clear()
    return True


def stop() -> None:
    """End counting."""
    global _counting
    if _counting and _get_current_dispatch_mode() is _mode:
        _mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _counting = False
    sys.settrace(None)
    for frame in running():
        frame.f_trace = None


def _call(frame: FrameType, event: str, argument: Any) -> Any:
    return _line if is_script(frame.f_code) else None


def _line(frame: FrameType, event: str, argument: Any) -> Any:
    global _lines
    if event == "line":
        key = place_of(frame.f_code, frame.f_lineno)
        found[key] = found.get(key, 0) + 1
        _lines += 1
        if _lines > _most:
            sys.settrace(None)
    return _line
