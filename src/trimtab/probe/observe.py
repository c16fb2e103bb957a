"""Run a script once, unmodified, and record where its time goes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from trimtab.core.evidence import ProbeRecord
from trimtab.errors import UsageError, WorkloadError
from trimtab.measure.host import other_load
from trimtab.probe.analysis import record_of
from trimtab.probe.command import Command
from trimtab.probe.inside.plan import READING
from trimtab.probe.launch import ScriptProcess
from trimtab.probe.metering import Metering

GRACE_S = 45.0
"""Seconds beyond the time limit for the current step or the profiler to end."""
POLL_S = 0.05

Progress = Callable[[str], None]


def observe(
    command: Command,
    *,
    steps: int = 40,
    seconds: float = 60.0,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> ProbeRecord:
    """Run ``command`` until ``steps`` steps were measured, and return the record.

    The script's files are not touched: it runs in an overlay of its folders, or guarded, see :mod:`trimtab.probe.containment`;
    ``in_place`` lets it write. It is ended after the last step, without its own clean-up.

    Args:
        command: What to run.
        steps: Steps to measure after the warm-up; at most six times as many are run if most hold an evaluation, or if they
            take less than a second.
        seconds: Time limit from the start of the process on. What was seen by then is the record.
        in_place: Whether the script may write its files.
        on_progress: Called with a sentence at each stage.

    Raises:
        WorkloadError: If the script fails before a step was seen.
        UsageError: If no step was seen; the message tells what was.

    Example:
        >>> record = observe(Command.of("train.py", args=["--epochs", "1"]))  # doctest: +SKIP
        >>> record.phases["data"] / record.step_ms  # doctest: +SKIP
        0.62
    """
    if steps < 1 or seconds <= 0:
        raise UsageError(f"steps={steps}, seconds={seconds}: at least one step and a positive time are needed")
    plan: dict[str, Any] = {"mode": "observe", "anchor": None, "settings": {}, "steps": steps, "seconds": seconds}
    found = other_load()
    busy = found if found is not None and found.busy else None
    if busy is not None:  # otherwise waiting for cores would dominate the phases
        plan["settings"] = {"threads": 1}
    with ScriptProcess(command, plan, in_place=in_place) as process:
        progress = on_progress or (lambda _: None)
        progress(f"watching {command.name}")
        metering = Metering()
        limit = time.monotonic() + seconds + min(GRACE_S, max(5.0, seconds))
        code = None
        while code is None and not _complete(process.out) and time.monotonic() < limit:
            code = process.wait(POLL_S)
            metering.read()
        process.stop()
        code = process.poll() if code is None else code
        log = max(
            _read(process.out, "log-*.json") or _read(process.out, "early-*.json"),
            key=lambda found: (not found["finished"], len(found["marks"])),
            default=None,
        )
        refused = process.refused_write()
        if log is None:
            raise _no_record(command, process, code, seconds, refused)
        log["reading"] = _lines(process.out / READING)
        log["arrivals"] = [log["arrivals"], *(found["ns"] for found in _read(process.out, "arrivals-*.json"))]
        written = process.written()
        listed = dict.fromkeys([*written, *(path for path in log["writes"] if not _is_listed(path, written))])
        notes = [*process.notes(), *([f"The run ended early: {command.name} {refused}."] if refused else [])]
        if busy is not None and log["threads"] > 1:
            notes.append(f"Busy machine: {busy}, so the script was watched with one thread in place of {log['threads']}.")
        record = record_of(
            log,
            command=command.argv,
            exit_code=code if log["finished"] else None,
            writes=tuple(listed),
            network=tuple(log["network"]),
            children=tuple(log["children"]),
            contained=process.contained,
        )
        progress(f"{record.steps} steps of {record.step_ms:.3g} ms were measured; the first came after {record.start_s:.1f} s")
        if record.network:
            progress(f"each further run connects to {', '.join(record.network)}, as the script does")
        used = metering.used([mark[0] for mark in log["marks"]])
        return dataclasses.replace(record, notes=(*record.notes, *notes), **used)


def _complete(out: pathlib.Path) -> bool:
    return any('"finished": false' in path.read_text(encoding="utf-8")[:200] for path in out.glob("log-*.json"))


def _read(out: pathlib.Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(pattern))]


def _lines(path: pathlib.Path) -> list[Any]:
    """The JSON values of a file with one per line. Its last line may be cut off, because its process was killed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _is_listed(path: str, written: list[str]) -> bool:
    return os.path.relpath(path) in written or os.path.abspath(path) in written or os.path.isdir(path)


def _no_record(
    command: Command, process: ScriptProcess, code: int | None, seconds: float, refused: str | None
) -> UsageError | WorkloadError:
    """The error that says why there is no record."""
    printed = process.log().strip()
    shown = f"\n\n{printed}" if printed else ""
    if refused:
        return UsageError(
            f"{command.name} {refused}, before a step was seen, and its writes cannot be kept apart on this machine; let it "
            "write with --in-place"
        )
    failed = _read(process.out, "failed-*.json")
    if failed:
        return WorkloadError(f"the probe failed within {command.name}: {failed[0]['error']}{shown}")
    if code not in (None, 0, -signal.SIGKILL):
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return WorkloadError(f"{command.name} {how} before a step was seen{shown}")
    seen = _read(process.out, "seen-*.json")
    late = code in (None, -signal.SIGKILL) or any(not found["finished"] for found in seen)
    when = f"within {seconds:g} s" if late else "before it ended"
    if not seen:
        return UsageError(
            f"no step of {command.name} was seen {when}: no Python process imported torch with the probe. It does not reach "
            "python -I, -E or -S, a program that clears its environment, or a launcher that sets PYTHONPATH itself (conda run, "
            f"bazel); run the script's own command line{shown}"
        )
    events: dict[str, int] = defaultdict(int)
    for found in seen:
        for kind, _, _, count in found["counts"]:
            events[kind] += count
    names = {"optimizer": "optimizer steps", "backward": "backward passes", "batch": "batches", "forward": "model calls"}
    text = ", ".join(f"{events[kind]} {name}" for kind, name in names.items())
    return UsageError(
        f"no two steps of {command.name} were seen {when}, only {text}; give more time with --budget, or arguments with which "
        f"the script makes more steps. Training in a thread other than the one that imports torch is not seen{shown}"
    )
