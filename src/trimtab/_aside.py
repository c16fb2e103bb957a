"""What makes way for something new in its folder, and comes back where the new does not come about."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator, Sequence


@contextlib.contextmanager
def set_aside(folder: pathlib.Path, old: Sequence[str], aside: pathlib.Path, new: Collection[str]) -> Iterator[None]:
    """A block in which the entries ``old`` of ``folder`` lie in the empty folder ``aside``, where they stay if it ends well.

    Where it does not, or one of them cannot be moved, all are put back, and nothing is left of the names in ``new``, which are
    those that the block may write in ``folder``. Where that cannot be done either, what is missing is in ``aside``.
    """
    try:
        for name in old:
            os.replace(folder / name, aside / name)
        yield
    except BaseException:
        for name in set(new) - set(old):
            removed(folder / name)
        put_back(aside, folder)
        raise


def put_back(aside: pathlib.Path, folder: pathlib.Path) -> None:
    """Have everything in ``folder`` that was set aside from it, instead of what has its name there; ``aside`` is gone then."""
    for entry in list(aside.iterdir()):
        removed(folder / entry.name)
        os.replace(entry, folder / entry.name)
    aside.rmdir()


def removed(path: pathlib.Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
