"""Redirect the writes of a watched script to an overlay of its folders, if the kernel allows it.

Linux lets a process of any user see a folder through an overlay: reads come from the folder, writes land in a scratch folder,
paths stay the same. Overlaid are every folder at the root of the file system, except those of the system and for temporary
files, and the folders of the script and of the command. Where the kernel refuses it (Docker's default profile, macOS) the
script runs in place *guarded*: ``torch.save`` writes nothing, and the first write to a file that existed ends the run.
"""

from __future__ import annotations

import os
import pathlib
import stat
import sys
import tempfile

from trimtab.probe.command import Command

SYSTEM_FOLDERS = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "lost+found", "opt", "proc", "run", "sbin", "snap", "sys"}
    | {"tmp", "usr", "var"}
)


def overlay_folders(command: Command) -> list[str]:
    """The folders that get an overlay; none is within another."""
    if sys.platform != "linux":
        return [str(command.folder)]
    top = [f"/{name}" for name in sorted(os.listdir("/")) if name not in SYSTEM_FOLDERS]
    wanted = [path for path in top if os.path.isdir(path) and not os.path.islink(path)]
    for path in (os.getcwd(), str(command.folder), os.path.expanduser("~")):
        real = os.path.realpath(path)
        if real.count("/") > 1 or real not in ("/", *(f"/{name}" for name in SYSTEM_FOLDERS)):
            wanted.append(real)
    found: list[str] = []
    for path in sorted(set(wanted), key=len):
        if not any(path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def scratch_folder(kept: list[str]) -> str:
    """A new temporary folder outside of ``kept``, for output files and the upper layers of the overlays."""
    for root in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        real = os.path.realpath(root)
        outside = not any((real + "/").startswith(path + "/") for path in kept)
        if outside and os.access(real, os.W_OK):
            return tempfile.mkdtemp(prefix="trimtab-probe-", dir=real)
    return tempfile.mkdtemp(prefix="trimtab-probe-")


def written_files(scratch: pathlib.Path, layers: dict[str, str]) -> list[str]:
    """Files that were written below overlaid folders, and files and folders that were removed there, as paths relative to the
    current folder where they lie in it."""
    found = []
    here = os.getcwd()
    for number, folder in layers.items():
        upper = scratch / "upper" / number
        for place, names, files in os.walk(upper, onerror=None):
            names[:] = [name for name in names if name != "__pycache__"]
            for name in files:
                path = os.path.join(place, name)
                target = os.path.join(folder, os.path.relpath(path, upper))
                shown = os.path.relpath(target, here) if target.startswith(here + "/") else target
                gone = stat.S_ISCHR(os.lstat(path).st_mode)
                found.append(f"{shown} (removed)" if gone else shown)
    return sorted(found)
