"""``trimtab report`` and ``trimtab compare``."""

from __future__ import annotations

import pathlib
import webbrowser
from typing import Annotated

import typer

from trimtab._json import dumps
from trimtab.report import side_by_side, text, write
from trimtab.report._write import keep
from trimtab.study.record import Record

Run = Annotated[pathlib.Path, typer.Argument(metavar="RUN", help="run folder of a study, such as runs/digits")]


def report_command(
    run: Run,
    open_it: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    output: Annotated[pathlib.Path | None, typer.Option("--output", "-o", help="file to write [report.html in RUN]")] = None,
    as_text: Annotated[bool, typer.Option("--text", help="print the same in 40 lines")] = False,
    json: Annotated[bool, typer.Option("--json", help="print all that the report is made from as JSON")] = False,
) -> int:
    """Render a study as one HTML file that needs no network, or as text.

    Example: trimtab report runs/digits --open
    """
    if as_text or json:
        record = Record.read(run)
        found = dumps(record) if json else text(record)
        typer.echo(found if output is None else keep(f"{found}\n", output))
        return 0
    path = write(run, output)
    typer.echo(path)
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        typer.echo(f"No browser could be started here. Open {path.resolve()} yourself; it needs no network.", err=True)
    return 0


def compare_command(
    left: Run,
    right: Annotated[pathlib.Path, typer.Argument(metavar="RUN", help="run folder of the other study")],
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Two studies side by side: two machines, two versions, two limits.

    Example: trimtab compare runs/digits runs/digits-server
    """
    found = side_by_side(Record.read(left), Record.read(right))
    typer.echo(dumps(found) if json else str(found))
    return 0
