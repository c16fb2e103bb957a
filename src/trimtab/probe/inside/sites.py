"""Lines of the script: which frames are the script's own, and their sites such as ``train.py:35``."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

from trimtab.probe.inside.plan import PLAN

FOLDER = os.path.join(os.path.abspath(PLAN.get("folder") or "."), "")
_LIBRARIES = tuple(
    sorted(
        {os.path.join(os.path.realpath(path), "") for name, path in sysconfig.get_paths().items() if "lib" in name},
        reverse=True,
    )
)
"""Folders of the standard library and of installed packages, inner folders first."""
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
_PROBE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NEITHER, _LIBRARY, _SCRIPT = range(3)
"""Kinds of code: torch and the probe, other libraries, the script's own."""


class Place:
    """A line of code. There is one object per line, so that places are compared and hashed by their identity."""

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code, self.line = code, line


_known: dict[int, tuple[CodeType, int]] = {}
"""Id of a code object -> the object, which keeps it alive, and its kind. The key is the id, because Python does not cache the
hash of a code object, which covers all constants and inner functions."""
_places: dict[tuple[int, int], Place] = {}
_at_instruction: dict[tuple[int, int], Place] = {}
"""Id of a code object that ``_known`` keeps alive, and offset of an instruction -> its line. ``frame.f_lineno`` decodes the
line table from the start of the code, which takes long in a script without functions."""
_files: dict[str, tuple[str, int]] = {}
"""Site -> file and line, of every site that :func:`site` returned."""


def is_script(code: CodeType) -> bool:
    """Whether ``code`` belongs to the script: not to the standard library, an installed package or trimtab."""
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


def is_script_file(path: str) -> bool:
    """Whether the file ``path`` belongs to the script."""
    return _kind_of(path) == _SCRIPT


def place_of(code: CodeType, line: int) -> Place:
    """The :class:`Place` of a line, always the same object."""
    key = id(code), line
    found = _places.get(key)
    if found is None:
        _places[key] = found = Place(code, line)
    return found


def _place_at(frame: FrameType) -> Place:
    """The current line of a frame of the script."""
    place = place_of(frame.f_code, frame.f_lineno)
    _at_instruction[id(frame.f_code), frame.f_lasti] = place
    return place


def caller(frame: FrameType | None) -> Place | None:
    """The innermost line of the script at or above ``frame``; without one, the innermost outside torch and the probe."""
    here, fallback = frame, None
    while here is not None:
        found = _at_instruction.get((id(here.f_code), here.f_lasti))
        if found is not None:
            return found
        kind = _kind(here.f_code)
        if kind == _SCRIPT:
            return _place_at(here)
        if kind == _LIBRARY and fallback is None:
            fallback = here
        here = here.f_back
    return None if fallback is None else place_of(fallback.f_code, fallback.f_lineno)


def stack(frame: FrameType | None) -> tuple[Place, ...]:
    """The lines of the script at and above ``frame``, the innermost first."""
    found = []
    while frame is not None:
        place = _at_instruction.get((id(frame.f_code), frame.f_lasti))
        if place is not None:
            found.append(place)
        elif _kind(frame.f_code) == _SCRIPT and frame.f_lineno is not None:  # none between two lines
            found.append(_place_at(frame))
        frame = frame.f_back
    return tuple(found)


def running() -> list[FrameType]:
    """The frames of this thread that are the script's, from the innermost out."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if is_script(frame.f_code):
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def site(place: Place | None) -> str:
    """The site, such as ``train.py:35``; relative to the script's folder if it is in there; empty for ``None``."""
    return "" if place is None else site_at(place.code.co_filename, place.line)


def site_at(path: str, line: int) -> str:
    """The site of a line of the file ``path``."""
    name = f"{short_path(path)}:{line}"
    _files[name] = path, line
    return name


def short_path(path: str) -> str:
    """``path`` relative to the script's folder or to the folder of the installed packages, if it is in one of them."""
    path = os.path.abspath(path)
    return next((path[len(folder) :] for folder in (FOLDER, *_LIBRARIES) if path.startswith(folder)), path)


def sources() -> list[str]:
    """The script's own files among those that this process has imported, as :func:`short_path` names them: those below its
    folder or the current one, without installed packages."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    below = tuple(os.path.join(os.path.realpath(folder), "") for folder in (FOLDER, os.getcwd()))
    paths = {path: os.path.realpath(path) for path in files if isinstance(path, str) and os.path.isabs(path)}
    own = [path for path, real in paths.items() if real.startswith(below) and not real.startswith(_LIBRARIES)]
    return sorted(short_path(path) for path in own if path.endswith(".py") and is_script_file(path))


def texts() -> dict[str, str]:
    """Site -> text of the line with its indentation, for every site that :func:`site` returned."""
    found = {name: linecache.getline(file, number).rstrip("\n") for name, (file, number) in _files.items()}
    return {name: text for name, text in found.items() if text}


def counters() -> dict[str, str]:
    """Site -> variable that counts the innermost loop around the line, for lines in loops over ``range`` or ``enumerate``."""
    loops: dict[str, list[tuple[int, int, str | None]]] = {}
    found = {}
    for name, (file, line) in _files.items():
        if file not in loops:
            loops[file] = _loops("".join(linecache.getlines(file)))
        around = [loop for loop in loops[file] if loop[0] < line <= loop[1]]
        counter = max(around)[2] if around else None
        if counter is not None:
            found[name] = counter
    return found


def _loops(text: str) -> list[tuple[int, int, str | None]]:
    """First and last line of each loop, and the variable that counts it."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno, _counter(node)) for node in nodes if isinstance(node, ast.For | ast.While)
    ]


def _counter(loop: ast.For | ast.While) -> str | None:
    if isinstance(loop, ast.While) or not isinstance(loop.iter, ast.Call):
        return None
    over, target = ast.unparse(loop.iter.func), loop.target
    if over == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif over not in ("range", "trange"):
        return None
    return target.id if isinstance(target, ast.Name) else None


def here() -> str:
    """The site of the script's line that is being executed."""
    return site(caller(sys._getframe(1)))


def text_at(place: Place) -> str:
    """Text of the line, with its indentation."""
    return linecache.getline(place.code.co_filename, place.line).rstrip("\n")


def function_of(place: Place) -> str:
    """Name of the function that the line is in; empty at the top of the script."""
    return place.code.co_name.strip("<>").replace("module", "")
