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
_known: dict[CodeType, bool] = {}
_files: dict[str, tuple[str, int]] = {}
"""Site -> file and line, of every site that was told."""


def is_script(code: CodeType) -> bool:
    """Whether ``code`` is the person's: neither of the standard library, nor of an installed package, nor of trimtab."""
    known = _known.get(code)
    if known is None:
        _known[code] = known = _is_script(code.co_filename)
    return known


def _is_script(name: str) -> bool:
    if name.startswith("<"):
        return False
    path = os.path.realpath(name)
    if path.startswith(_PROBE) or (path.startswith(_OURS) and not FOLDER.startswith(_OURS)):
        return False
    return not any(path.startswith(library) and not FOLDER.startswith(library) for library in _LIBRARIES)


def caller(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The innermost line of the script at or above ``frame``; without one, the innermost outside torch and the probe."""
    here, fallback = frame, None
    while here is not None:
        code = here.f_code
        if is_script(code):
            return code, here.f_lineno
        if fallback is None and not code.co_filename.startswith((_PROBE, "<")) and "/torch/" not in code.co_filename:
            fallback = (code, here.f_lineno)
        here = here.f_back
    return fallback


def site(place: tuple[CodeType, int] | None) -> str:
    """``train.py:35``, relative to the script's folder where it lies in it; empty for no place."""
    if place is None:
        return ""
    path = os.path.abspath(place[0].co_filename)
    if path.startswith(FOLDER):
        path = path[len(FOLDER) :]
    else:
        for library in _LIBRARIES:
            if path.startswith(library):
                path = path[len(library) :]
                break
    told = f"{path}:{place[1]}"
    _files[told] = place[0].co_filename, place[1]
    return told


def texts() -> dict[str, str]:
    """The text of the line of every site that was told, with its indentation."""
    found = {told: linecache.getline(file, number).rstrip("\n") for told, (file, number) in _files.items()}
    return {told: text for told, text in found.items() if text}


def here() -> str:
    """The site of the script's line that is being executed."""
    return site(caller(sys._getframe(1)))


def line(place: tuple[CodeType, int]) -> str:
    """Text of the line, without its indentation."""
    return linecache.getline(place[0].co_filename, place[1]).strip()
