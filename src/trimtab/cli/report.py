"""``trimtab report`` and ``trimtab compare``."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import webbrowser
from typing import Annotated

import typer

from trimtab._internal.files import typed
from trimtab._internal.serialization import dumps
from trimtab.cli._lazy import lazy_import
from trimtab.errors import UsageError

RUN = typed("runs/digits")
Run = Annotated[pathlib.Path, typer.Argument(parser=RUN, metavar="RUN", help="Run folder of a study, such as runs/digits.")]


def report_command(
    run: Run,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=typed("report.html"),
            metavar="FILE",
            help="File to write [NAME-report.html in RUN].",
        ),
    ] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print the same in 40 lines.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print all that the report is made from as JSON.")] = False,
) -> int:
    """Render a study as one HTML file that needs no network, or as text.

    Example: trimtab report runs/digits --open
    """
    if as_text + json + open_it > 1:
        raise UsageError("--text, --json and --open each ask for another form of the report. Give one of them.")
    if os.path.isfile(run / lazy_import("probe.configuration").TUNED):
        return _report_tuned(run, output, open_it, as_text, json)
    if as_text or json:
        record = lazy_import("study.record").Record.read(run)
        found = dumps(record) if json else lazy_import("report").text(record, _columns() if output is None else None)
        typer.echo(found if output is None else lazy_import("report").save_text(f"{found}\n", output))
        return 0
    _announce(lazy_import("report").write(run, output), open_it)
    return 0


def _report_tuned(run: pathlib.Path, output: pathlib.Path | None, open_it: bool, as_text: bool, json: bool) -> int:
    """The report on a script that ``trimtab tune`` measured."""
    found = lazy_import("probe.tuning").TunedScript.read(run)
    if as_text or json:
        text = dumps(found) if json else str(found)
        typer.echo(text if output is None else lazy_import("report").save_text(f"{text}\n", output))
        return 0
    page = lazy_import("report.doctor_page").tuned_html(found)
    _announce(lazy_import("report").save_text(page, output or run / "report.html"), open_it)
    return 0


def _announce(path: pathlib.Path, open_it: bool) -> None:
    typer.echo(path)
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        typer.echo(f"No browser could be started here. Open {path.resolve()} yourself; it needs no network.", err=True)


def compare_command(
    left: Run,
    right: Annotated[pathlib.Path, typer.Argument(parser=RUN, metavar="RUN", help="Run folder of the other study.")],
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Two studies side by side: two machines, two versions, two limits.

    Example: trimtab compare runs/digits runs/digits-server
    """
    if os.path.realpath(left) == os.path.realpath(right):
        raise UsageError(f"Both folders are {left}: a study has nothing to be compared with but another one. Give two.")
    read = lazy_import("study.record").Record.read
    found = lazy_import("report").side_by_side(read(left), read(right), (str(left), str(right)))
    typer.echo(dumps(found) if json else found.shown(_columns()))
    return 0


def _columns() -> int | None:
    """The width of the terminal in columns; ``None`` if standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
