"""``trimtab tune``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from trimtab._internal.files import typed
from trimtab._internal.serialization import dumps, write_text
from trimtab._internal.units import seconds
from trimtab.cli._lazy import lazy_import
from trimtab.cli._script import Module, Words, command_of, is_workload, progress_lines
from trimtab.errors import UsageError


def tune_command(
    script: Words = None,
    module: Module = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="About how long the whole takes [3m].")] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(
            parser=typed("trimtab.toml"),
            metavar="PATH",
            help="File for the settings [trimtab.toml beside the script]; run folder of a workload.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a trimtab.toml that is there.")] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="Let the script write where it writes.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier runs measured.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Find the settings that make a script faster with its losses unchanged.

    They are written to trimtab.toml, which `trimtab run` applies. What is measured is stored in
    runs/NAME-tune, and the same command goes on from there. FILE.py:NAME names a Workload(mode="train")
    instead of a script.

    \b
    Examples:
      trimtab tune train.py -- --epochs 1
      trimtab tune -m package.train -- --epochs 1
      trimtab tune -- torchrun --nproc_per_node 2 train.py
      trimtab tune workload.py:training --budget 2m
    """
    words = script or []
    limit_s = None if budget is None else seconds(budget, "--budget")
    if is_workload(words, module):
        if len(words) > 1 or overwrite or in_place:
            raise UsageError("A workload takes no arguments, and neither --overwrite nor --in-place; those are for scripts.")
        tuned = lazy_import("api.tune").tune(words[0], budget=limit_s, out=out, fresh=fresh)
        typer.echo(dumps(tuned) if json else tuned)
        return 0
    command = command_of(words, module)
    tuning = lazy_import("probe.tuning")
    limit_s = tuning.BUDGET_S if limit_s is None else limit_s
    found = tuning.tune_script(
        command,
        budget_s=limit_s,
        path=out,
        fresh=fresh,
        overwrite=overwrite,
        in_place=in_place,
        on_progress=progress_lines(limit_s),
    )
    report = found.folder / "report.html"
    write_text(report, lazy_import("report.doctor_page").tuned_html(found))
    typer.echo(dumps(found) if json else f"{found}\nreport: {report}")
    return 0
