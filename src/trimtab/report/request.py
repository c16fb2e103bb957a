"""The request of a study, and the code that uses its result."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from trimtab._internal.text import plain
from trimtab.report import formatting as words
from trimtab.study.record import Record

OBJECTIVES = {
    "latency": "the shortest time of a call",
    "throughput": "the most examples a second",
    "memory": "the least peak memory",
    "size": "the smallest files",
}
NAME = re.compile(r"(?:^|, )([A-Za-z_]\w*): ")
"""The name of an input in the text of the inputs, such as ``images: float32[1, 3, 224, 224]``."""


def asked(record: Record) -> list[tuple[str, str]]:
    """Objective, budget, limits and the user's note, as names and values."""
    return list(_asked(record))


def _asked(record: Record) -> Iterator[tuple[str, str]]:
    yield "asked for", "the shortest time of an update" if record.mode == "train" else OBJECTIVES[record.objective]
    if budget := option(record.command, "--budget"):
        yield "budget", budget
    yield "limits", "; ".join(f"{name} {value}" for name, value in words.limits(record))
    if record.note:
        yield "note", plain(record.note)


def use(record: Record, run_folder: str) -> str:
    """The two lines of Python, after ``import trimtab``, that load what ships and call it; empty without an artifact.

    Args:
        run_folder: the run folder, if the command of the study does not name it.
    """
    if record.artifact is None or record.status is None:
        return ""
    folder = (option(record.command, "--out") or run_folder).rstrip("/")
    native = record.winner is not None and record.winner.recipe.backend.native_code
    names = NAME.findall(record.prepared.inputs)
    call = (
        f"model({names[0]})"
        if len(names) == 1
        else f"model(...)  # called like the original: {words.clipped(', '.join(names), 80)}"
    )
    load = f"trimtab.load({plain(f'{folder}/{record.artifact}')!r}{', trust=True' * native})"
    return f"model = {load}\noutputs = {call}"


def option(command: str, name: str) -> str | None:
    """The value of option ``name`` in a command line; ``None`` if it has none, or is a line of Python."""
    try:
        parts = shlex.split(command)
    except ValueError:
        return None
    return plain(parts[parts.index(name) + 1]) if name in parts[:-1] else None
