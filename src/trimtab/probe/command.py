"""The command of a person's script: what is executed, and where the script lies."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

from trimtab.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line that runs a script, as a person would type it."""

    argv: tuple[str, ...]
    """The executed command line; its first word is a path."""
    script: pathlib.Path | None
    """The script's file, where it is known."""
    folder: pathlib.Path
    """Folder that call sites are relative to."""
    name: str
    """Display name: ``train.py``, or the name of the module."""

    @classmethod
    def of(
        cls,
        script: str | os.PathLike[str] | None = None,
        *,
        module: str | None = None,
        args: Sequence[str] = (),
        launcher: Sequence[str] = (),
    ) -> Command:
        """One of ``python SCRIPT ARGS``, ``python -m MODULE ARGS``, or the words of ``launcher`` as they are, such as
        ``["torchrun", "--nproc_per_node", "2", "train.py"]``.

        Raises:
            UsageError: If there is no such file, module or program, or not exactly one of the three is given.
        """
        if (script is not None) + (module is not None) + bool(launcher) != 1:
            raise UsageError("give one of a script, a module (-m), or a launcher's whole command line after --")
        if launcher:
            return cls._launched(tuple(launcher) + tuple(args))
        if module is not None:
            path = _module(module)
            return cls((sys.executable, "-m", module, *args), path, _package_folder(path, module), module)
        path = pathlib.Path(os.path.abspath(os.fspath(script or "")))
        if path.is_dir() or not path.exists():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UsageError(f"{os.fspath(script or '')} {what}; give the Python file that you run, such as train.py")
        return cls((sys.executable, os.fspath(script or ""), *args), path, path.parent, path.name)

    @classmethod
    def _launched(cls, words: tuple[str, ...]) -> Command:
        beside = os.path.dirname(sys.executable)
        program = shutil.which(words[0]) or shutil.which(words[0], path=beside)
        if program is None:
            raise UsageError(f"there is no program {words[0]!r} on the PATH or in {beside}; give its path")
        script = next((pathlib.Path(w).absolute() for w in words[1:] if w.endswith(".py") and os.path.isfile(w)), None)
        if script is None and "-m" in words[1:-1]:
            name = words[words.index("-m", 1) + 1]
            script = _module(name, needed=False)
        folder = script.parent if script is not None else pathlib.Path.cwd()
        return cls((program, *words[1:]), script, folder, script.name if script is not None else os.path.basename(program))


def _module(name: str, needed: bool = True) -> pathlib.Path | None:
    """The file of a module, searched as ``python -m`` does: from the current folder on, and without importing its package."""
    parts = name.split(".")
    for folder in [os.getcwd(), *sys.path]:
        stem = pathlib.Path(folder or ".").joinpath(*parts)
        for path in (stem / "__main__.py", stem.with_name(stem.name + ".py")):
            if path.is_file():
                return path.absolute()
    if needed and (len(parts) > 1 or importlib.util.find_spec(name) is None):
        raise UsageError(f"there is no module {name!r} to run, from {os.getcwd()} on; give its name as python -m takes it")
    return None


def _package_folder(path: pathlib.Path | None, module: str) -> pathlib.Path:
    """The folder from which ``path`` is ``module``."""
    if path is None:
        return pathlib.Path.cwd()
    above = len(module.split(".")) - (path.name != "__main__.py")
    return path.parents[above]
