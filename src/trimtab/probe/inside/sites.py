"""Lines of the script: which frames are the script's own, and how they are told."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

from trimtab.probe.inside.plan import PLAN

FOLDER = os.path.join(os.path.abspath(PLAN.get("folder") or "."), "")
_LIBRARIES = tuple(
    sorted({os.path.join(os.path.realpath(path), "") for name, path in sysconfig.get_paths().items() if "lib" in name})
)
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
_PROBE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NEITHER, _LIBRARY, _SCRIPT = range(3)
"""Kinds of code: torch and the probe, another library, the person's own."""


class Place:
    """A line of code. There is one object per line, so that places are compared and hashed by their identity."""

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code, self.line = code, line


_known: dict[int, tuple[CodeType, int]] = {}
"""Id of a code object -> it, which so stays alive, and its kind. The hash of a code object itself takes microseconds: Python
computes it anew each time, over all constants, and for a whole script over all of its functions."""
_places: dict[tuple[int, int], Place] = {}
_files: dict[str, tuple[str, int]] = {}
"""Site -> file and line, of every site that was told."""


def is_script(code: CodeType) -> bool:
    """Whether ``code`` is the person's: neither of the standard library, nor of an installed package, nor of trimtab."""
    return _kind(code) == _SCRIPT


def _kind(code: CodeType) -> int:
    known = _known.get(id(code))
    if known is None:
        if code.co_filename.startswith("<"):  # made while the script runs, perhaps on every step
            return _NEITHER
        _known[id(code)] = known = code, _kind_of(code.co_filename)
    return known[1]


def _kind_of(name: str) -> int:
    path = os.path.realpath(name)
    ours = path.startswith(_PROBE) or (path.startswith(_OURS) and not FOLDER.startswith(_OURS))
    if not ours and not any(path.startswith(library) and not FOLDER.startswith(library) for library in _LIBRARIES):
        return _SCRIPT
    return _NEITHER if name.startswith(_PROBE) or "/torch/" in name else _LIBRARY


def place_of(code: CodeType, line: int) -> Place:
    """The one object for a line."""
    key = id(code), line
    found = _places.get(key)
    if found is None:
        _places[key] = found = Place(code, line)
    return found


def caller(frame: FrameType | None) -> Place | None:
    """The innermost line of the script at or above ``frame``; without one, the innermost outside torch and the probe."""
    here, fallback = frame, None
    while here is not None:
        code = here.f_code
        kind = _kind(code)
        if kind == _SCRIPT:
            return place_of(code, here.f_lineno)
        if kind == _LIBRARY and fallback is None:
            fallback = here
        here = here.f_back
    return None if fallback is None else place_of(fallback.f_code, fallback.f_lineno)


def running() -> list[FrameType]:
    """The frames of this thread that are the script's, from the innermost out."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if is_script(frame.f_code):
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def site(place: Place | None) -> str:
    """``train.py:35``, relative to the script's folder where it lies in it; empty for no place."""
    if place is None:
        return ""
    path = os.path.abspath(place.code.co_filename)
    if path.startswith(FOLDER):
        path = path[len(FOLDER) :]
    else:
        for library in _LIBRARIES:
            if path.startswith(library):
                path = path[len(library) :]
                break
    told = f"{path}:{place.line}"
    _files[told] = place.code.co_filename, place.line
    return told


def texts() -> dict[str, str]:
    """The text of the line of every site that was told, with its indentation."""
    found = {told: linecache.getline(file, number).rstrip("\n") for told, (file, number) in _files.items()}
    return {told: text for told, text in found.items() if text}


def here() -> str:
    """The site of the script's line that is being executed."""
    return site(caller(sys._getframe(1)))


def text_at(place: Place) -> str:
    """Text of the line, with its indentation."""
    return linecache.getline(place.code.co_filename, place.line).rstrip("\n")


def function_of(place: Place) -> str:
    """Name of the function that the line is in; empty at the top of the script."""
    return place.code.co_name.strip("<>").replace("module", "")
