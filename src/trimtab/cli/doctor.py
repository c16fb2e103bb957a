"""``trimtab doctor``."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trimtab._internal.files import typed
from trimtab._internal.serialization import dumps
from trimtab._internal.text import plain
from trimtab._internal.units import positive, seconds
from trimtab.cli._lazy import lazy_import
from trimtab.cli._script import Module, Words, command_of, progress_lines
from trimtab.errors import UsageError


def doctor_command(
    script: Words = None,
    module: Module = None,
    budget: Annotated[str, typer.Option(help="Most time for everything.")] = "3m",
    steps: Annotated[int, typer.Option(help="Steps to watch.")] = 40,
    in_place: Annotated[bool, typer.Option("--in-place", help="Run where it is, not in a copy of its folder.")] = False,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("runs/doctor"), metavar="FOLDER", help="Write report.html, doctor.json and trace.json."),
    ] = None,
    write: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("patch.diff"), metavar="FILE", help="Write the edits of the findings as a patch."),
    ] = None,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("traces"), metavar="FOLDER", help="Write traces for TensorBoard, Chrome and Perfetto."),
    ] = None,
    schedule: Annotated[str, typer.Option(help="Steps of a trace: wait,warm-up,active,repeat.")] = "1,1,3,1",
    nvtx: Annotated[bool, typer.Option("--nvtx", help="NVTX ranges of steps and modules, for Nsight.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Say why a script is slow, and what each remedy brings on it.

    The script runs unmodified, in processes of its own and in a copy of its folder, for a few steps. Each remedy that can be
    applied from outside is measured against the script as written, with the losses beside.

    \b
    Examples:
      trimtab doctor train.py -- --epochs 1
      trimtab doctor -m package.train --out runs/doctor
      trimtab doctor -- torchrun --nproc_per_node 2 train.py
      trimtab doctor workload.py:workload --write patch.diff
    """
    given, limit = tuple(script or ()), positive(seconds(budget, "--budget"), "--budget")
    api = lazy_import("api.doctor")
    if module is None and given and api.is_workload(given[0]):
        if given[1:]:
            raise UsageError(f"{given[0]} is a workload, which takes no arguments, but {' '.join(given[1:])!r} was given.")
        opened, typed_again = api.workload_steps(given[0]), given
    else:
        opened, typed_again = contextlib.nullcontext(command_of(given, module)), typed_words(given, module)
    with opened as command:
        request = api.Request(
            command=command,
            words=typed_again,
            seconds=limit,
            steps=api.checked_steps(steps, "--steps"),
            in_place=in_place,
            out=out,
            patch=write,
            trace=trace,
            schedule=lazy_import("probe.tracing").Schedule.parse(schedule),
            nvtx=nvtx,
        )
        found = api.examine(request, progress_lines(limit))
    if write is not None and found.patch is None:
        typer.echo("note: No finding has an edit that is complete, so no patch was written.", err=True)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(dumps(found) if json else plain(lazy_import("report.doctor_text").text(found, columns)))
    return 0


def typed_words(words: Sequence[str], module: str | None) -> tuple[str, ...]:
    """The words for the same command line, with ``--`` before the arguments of a script and before a launcher."""
    if module is not None:
        return ("-m", module, *(("--", *words) if words else ()))
    if words[0].endswith(".py"):
        return (words[0], *(("--", *words[1:]) if words[1:] else ()))
    return ("--", *words)
