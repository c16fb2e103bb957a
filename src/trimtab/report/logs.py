"""The ends of logs, cut so that a report has a bounded size."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from trimtab._internal.serialization import to_json
from trimtab._internal.text import plain
from trimtab.core.trial import State, Trial

MAX_LOG_BYTES, MIN_LOG_BYTES, MAX_BYTES_PER_LOG = 600_000, 120_000, 12_000
"""Bytes of the report for all logs with few trials and with many trials, and for one log."""
ROW_BYTES = 2_200
"""Bytes of the report for a trial without its log."""
FAILED_WEIGHT = 4
"""Weight of a failed trial's log; others have 1."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """The end of a log. ``whole`` is the size of the log in bytes, ``cut`` whether the beginning is missing."""

    text: str
    whole: int
    cut: bool


def embedded(value: Any) -> str:
    """``value`` as JSON for an HTML ``script`` element: nothing in it can end the element or open another."""
    text = json.dumps(to_json(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def allowances(trials: Sequence[Trial], refused: Collection[str] = ()) -> list[int]:
    """Bytes of the report for the log of each trial. Failed trials, and recipes whose hash is in ``refused``, get more."""
    failed = [trial.state in (State.FAILED, State.MISMATCH) or trial.recipe.hash in refused for trial in trials]
    weights = [FAILED_WEIGHT if each else 1 for each in failed]
    total = max(MIN_LOG_BYTES, MAX_LOG_BYTES - ROW_BYTES * max(0, len(trials) - 200))
    return [min(MAX_BYTES_PER_LOG, total * weight // sum(weights)) for weight in weights]


def tail(folder: pathlib.Path, log: str | None, most: int) -> Tail | None:
    """The end of ``log`` in run folder ``folder``, in at most ``most`` bytes of JSON.

    ``None`` if there is no log, or if it is outside the folder: a report is shared, and must not contain a file that a forged
    record points to.
    """
    if log is None:
        return None
    try:
        root = pathlib.Path(os.path.realpath(folder))
        path = pathlib.Path(os.path.realpath(root / log))
        if not path.is_relative_to(root) or not path.is_file():
            return None
        with path.open("rb") as file:
            whole = file.seek(0, os.SEEK_END)
            file.seek(max(0, whole - most))
            data = file.read(most)
    except (OSError, ValueError):  # unreadable, or not a path
        return None
    text = plain(data.decode("utf-8", "replace")).strip("\n")
    shown = fitted(text, most)
    return Tail(shown, whole, cut=whole > len(data) or len(shown) < len(text))


def fitted(text: str, most: int) -> str:
    """The end of ``text`` that takes at most ``most`` bytes as JSON."""
    text = text[-most:] if most > 0 else ""
    while text and (size := len(embedded(text).encode())) > most:
        text = text[-int(len(text) * most / size * 0.95) :] if most > 20 else ""
    return text
