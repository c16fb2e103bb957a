"""The ``trimtab`` command.

Exit codes: 0 success, 1 limits not met or not verified, 2 wrong usage, 3 the workload fails, 70 a bug in trimtab, 130
interrupted (143 by SIGTERM, 129 by SIGHUP).
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from trimtab.cli import _streams
from trimtab.cli._boundary import EXIT_INTERRUPTED, Boundary, TerminationSignals, check_working_directory, interruption_sentence
from trimtab.cli._lazy import group

COMMANDS = {
    "init": ("trimtab.cli.init:init_command", "Write a commented workload file to start from. It runs as it is."),
    "optimize": ("trimtab.cli.optimize:optimize_command", "Search, prove, and write the artifact."),
    "measure": ("trimtab.cli.measure:measure_command", "Time one thing, or two in turns with a confidence interval."),
    "doctor": ("trimtab.cli.doctor:doctor_command", "Say why a script is slow, and what each remedy brings on it."),
    "verify": ("trimtab.cli.measure:verify_command", "Check an artifact here and now: files, outputs, environment, speed."),
    "tune": (
        "trimtab.cli.script_tune:tune_command",
        "Find the settings that make a script faster with its losses unchanged.",
    ),
    "run": ("trimtab.cli.script_run:run_command", "Run an unmodified script with the settings that `trimtab tune` found."),
    "serve": ("trimtab.cli.serve:serve_command", "Serve artifacts over HTTP with the Open Inference Protocol v2."),
    "load-test": (
        "trimtab.cli.load_test:load_test_command",
        "Measure a server under load that does not wait for its answers.",
    ),
    "report": ("trimtab.cli.report:report_command", "Render a study as one HTML file that needs no network, or as text."),
    "compare": ("trimtab.cli.report:compare_command", "Two studies side by side: two machines, two versions, two limits."),
    "env": ("trimtab.cli.environment:env_command", "What this machine can do, and what is installed."),
    "list": ("trimtab.cli.environment:list_command", "What there is, and why one cannot run here."),
}
"""Name -> the function of the command, imported on use, and the first line of its docstring."""

FIRST_STEPS = """\
trimtab makes a PyTorch model fast, proves that it is still right, and ships it.

Good to see you. From your model to a proven faster one in three steps:

  trimtab init                          write workload.py; put your model in
  trimtab optimize workload.py          search, prove, write the artifact
  trimtab report runs/workload --open   the verdict, and why all others lost

`trimtab init --help` has templates for images, text and tables.
`trimtab --help` lists every command, `trimtab env` says what this machine has.
"""

app = typer.Typer(
    name="trimtab",
    cls=group(COMMANDS),
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def first(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Makes a PyTorch model fast, proves that it is still right, and ships it.

    Example: trimtab optimize model.py --max-drop 1% --budget 10m
    """
    if show_version:
        typer.echo(f"trimtab {version('trimtab')} (torch {_version('torch')}, Python {platform.python_version()})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS, nl=False)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Run the command line; each error becomes one sentence and an exit code."""
    _streams.prepare()
    with TerminationSignals() as signals, Boundary() as boundary:
        check_working_directory()
        code = app(prog_name="trimtab", standalone_mode=False)
        boundary.code = code if isinstance(code, int) else 0
        if not boundary.code:
            _streams.check()
    if boundary.code == EXIT_INTERRUPTED:  # typer's code for KeyboardInterrupt
        print(f"\n{interruption_sentence(sys.argv[1:])}", file=sys.stderr)
        boundary.code = signals.code
    sys.exit(boundary.code)
