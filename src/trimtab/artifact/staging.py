"""Write an artifact folder atomically. Only an older artifact or an empty folder is replaced."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from trimtab._internal.files import set_aside
from trimtab.artifact.manifest import MANIFEST, read_manifest
from trimtab.errors import ArtifactError


@contextlib.contextmanager
def fresh_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary folder that replaces ``folder`` if the block succeeds, and is deleted otherwise."""
    try:
        check_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
        new, old = scratch / "new", scratch / "old"
        try:
            new.mkdir()
            yield new
            old.mkdir()
            with set_aside(folder.parent, [folder.name] if folder.exists() else [], old, [folder.name]):
                os.replace(new, folder)
        except BaseException:
            if not old.exists():  # otherwise it may hold files that could not be restored
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        # errors are ignored: some file systems keep files of the old artifact that other processes have open
        shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(
            f"The artifact cannot be written to {folder}: {error.strerror or error}. Nothing was left half-written. Make room, "
            "or choose a folder that can be written: one below it, where something is mounted."
        ) from error


def check_replaceable(folder: pathlib.Path) -> None:
    """Raise an error if ``folder`` contains anything but an artifact, which would be deleted, or is not writable. Python's
    cache folders are ignored."""
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        try:
            listed = {*read_manifest(folder).files, MANIFEST}
        except ArtifactError as error:
            raise ArtifactError(f"{folder} exists and is no artifact. Choose another folder or empty it.") from error
        paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
        names = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_symlink() or not path.is_dir())
        if strange := [name for name in names if name not in listed]:
            raise ArtifactError(f"{folder} holds {strange[0]!r} beside an artifact. Move it away, or choose another folder.")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ArtifactError(f"{folder} may not be written, so no artifact can take its place. Let this user write to it.")
