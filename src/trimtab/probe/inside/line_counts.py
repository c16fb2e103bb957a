"""How often each line of the script runs within one step, by Python's tracing, and which operators it calls. It is a step after
those that are timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from trimtab.probe.inside import clock
from trimtab.probe.inside.sites import Place, caller, is_script, place_of, running

MOST = 3_000_000
"""Lines after which counting ends: a step of pure Python would take too long."""

found: dict[Place, int] = {}
operators: dict[tuple[str, str, Place], int] = {}
"""(Name, shape of the first tensor, line that calls it) -> calls, without those of backward passes."""
_lines = 0
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
    """Count from now on, in the frames that are running too. ``False`` if a debugger or coverage traces already. Operators are
    not counted where code is ``compiled``, which a dispatch mode would change."""
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
    """The result of ``function()``, with the lines that run within it in :data:`found`, of which ``most`` are counted."""
    global _most
    _most = most
    found.clear()
    sys.settrace(_call)
    try:
        return function()
    finally:
        sys.settrace(None)


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
