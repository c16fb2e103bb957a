"""Record the effects of the script outside of its process: files, connections, child processes. Guard its files in place."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from trimtab.probe.inside.hooks import replace
from trimtab.probe.inside.plan import CREATED, PLAN
from trimtab.probe.inside.sites import FOLDER, here

writes: dict[str, None] = {}
network: dict[str, None] = {}
children: dict[str, None] = {}
opened = 0
"""Files opened for reading in this process, without Python's own modules."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REMOVING = {"os.remove": 0, "os.rename": 0, "os.mkdir": 0, "os.rmdir": 0, "shutil.rmtree": 0, "os.truncate": 0, "os.link": 1}
_MOST = 200


def _path(value: Any) -> str | None:
    if not isinstance(value, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(value)
    out = os.path.dirname(PLAN.get("out") or "/nowhere/out")
    if path.startswith(("/dev/", "/proc/", "/sys/", out)) or "__pycache__" in path:
        return None
    return path


def _written(event: str, arguments: tuple[Any, ...]) -> str | None:
    if event == "open":
        path, mode, flags = arguments
        writing = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        return _path(path) if writing else None
    place = _REMOVING.get(event)
    return _path(arguments[place]) if place is not None else None


_resolved: dict[Any, str] = {}
"""Port -> the host whose address was looked up last for it."""

_NETWORK = ("socket.getaddrinfo", "socket.connect")
_EVENTS = frozenset({"open", "subprocess.Popen", "os.posix_spawn", "os.exec", *_NETWORK, *_REMOVING})


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global opened
    if event not in _EVENTS:  # Python tells each id() too
        return
    if event == "open" or event in _REMOVING:
        path = _written(event, arguments)
        if path is not None and len(writes) < _MOST:
            writes[path] = None
        elif path is None and event == "open" and (read := _path(arguments[0])) and not read.endswith((".py", ".pyc", ".so")):
            opened += 1
    elif event == "socket.getaddrinfo":
        _resolved[arguments[1]] = arguments[0]
    elif event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and len(network) < _MOST:
            network[f"{_resolved.get(address[1]) or address[0]}:{address[1]}"] = None
    elif len(children) < _MOST:
        words = arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[0]]
        children[" ".join(os.fsdecode(word) for word in words if isinstance(word, str | bytes | os.PathLike))[:200]] = None


def watch() -> None:
    """Record files, connections and child processes from now on."""
    sys.addaudithook(_hook)


_NEW = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""Events -> place of the path that is made."""
_FOLDERS = {
    **{"os.remove": (1,), "os.rmdir": (1,), "os.mkdir": (2,), "shutil.rmtree": (1,)},
    **{"os.rename": (2, 3), "os.link": (2, 3), "os.symlink": (2, 2)},
}
"""Events -> places of the descriptors of the folders that their paths are relative to; -1 or ``None`` where none is."""


def _touched(event: str, arguments: tuple[Any, ...]) -> tuple[list[str], str | None]:
    """The paths that an event changes if they exist, and the one that it makes."""
    if event == "open":
        path, mode, flags = _written(event, arguments), arguments[1], arguments[2]
        makes = any(letter in mode for letter in "wax") if isinstance(mode, str) else bool((flags or 0) & os.O_CREAT)
        return [path] if path else [], path if makes else None
    places = sorted({found[event] for found in (_REMOVING, _NEW) if event in found})
    paths = {place: _path(_from_folder(event, arguments, place)) for place in places}
    new = paths[_NEW[event]] if event in _NEW else None
    return [path for path in paths.values() if path is not None and event != "os.mkdir"], new


def _from_folder(event: str, arguments: tuple[Any, ...], place: int) -> Any:
    """The path at ``place``, joined to the open folder that it is relative to; ``None`` if that is not known."""
    at = _FOLDERS.get(event, ())
    handle = arguments[at[place]] if place < len(at) and at[place] < len(arguments) else None
    if not isinstance(handle, int) or handle < 0:
        return arguments[place]
    with contextlib.suppress(OSError):
        return os.path.join(os.readlink(f"/proc/self/fd/{handle}"), os.fsdecode(arguments[place]))
    return None


def _made_by_another_run(path: str) -> bool:
    """Whether one of trimtab's own runs of the script, which may be under way beside this one, has made ``path``."""
    scratch = os.path.dirname(os.path.abspath(PLAN.get("out") or "."))
    for name in glob.glob(os.path.join(os.path.dirname(scratch), "trimtab-probe-*", "out", CREATED)):
        with contextlib.suppress(OSError), open(name, encoding="utf-8") as file:
            if f"{json.dumps(path)}\n" in file:
                return True
    return False


def guard() -> None:
    """Protect the files of a script that runs in place: ``torch.save`` writes nothing, created files are recorded, and a change
    of a file that existed before ends the process. Temporary files are exempt."""
    ours: set[str] = set()
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")
    out = PLAN.get("out") or "."

    def exempt(path: str) -> bool:
        return os.path.realpath(path).startswith(temporary) and not FOLDER.startswith(temporary)

    def made(path: str) -> None:
        ours.add(path)
        with open(os.path.join(out, CREATED), "a", encoding="utf-8") as file:
            file.write(json.dumps(path) + "\n")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" and event not in _REMOVING and event not in _NEW:
            return
        changed, new = _touched(event, arguments)
        for path in changed:
            where = os.path.abspath(path)
            if os.path.lexists(path) and not exempt(path) and where not in ours and not _made_by_another_run(where):
                with open(os.path.join(out, "guarded.json"), "w", encoding="utf-8") as file:
                    json.dump({"path": path, "site": here()}, file)
                os._exit(90)
        if new is not None and not os.path.lexists(new) and not exempt(new):
            made(os.path.abspath(new))
            if event == "os.rename" and changed:  # a folder goes with what was made in it
                before, after = os.path.abspath(changed[0]), os.path.abspath(new)
                for path in [path for path in ours if path.startswith(before + os.sep)]:
                    made(after + path[len(before) :])

    def nothing(original: Any) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, str) or hasattr(f, "__fspath__"):
                writes[str(f)] = None

        return save

    replace(torch, "save", nothing)
    sys.addaudithook(hook)
