"""Paths as they are given, by a person or by a script that may mean something else."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

from trimtab._said import of_type
from trimtab.errors import UsageError


def path_of(value: object, name: str, example: str) -> pathlib.Path:
    """``value``, which was given as ``name``, as a path.

    Raises:
        UsageError: it is no path, or empty, as a variable that was never set is, or holds a character that no path can.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name} is {of_type(value)}; give a path, such as {example!r}.")
    text = os.fsdecode(value)
    if not text:
        raise UsageError(f"{name} is empty; give a path, such as {example!r}. '.' is the folder this runs in.")
    if "\0" in text:
        raise UsageError(f"{name} is {text!r}, and no path can hold the character NUL. Give another.")
    return pathlib.Path(text)


def typed(example: str) -> Callable[[str], pathlib.Path]:
    """What reads a path off the command line, which says itself what it was given for."""

    def path(text: str) -> pathlib.Path:
        return path_of(text, "it", example)

    return path
