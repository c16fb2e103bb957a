"""The ``trimtab`` command. Exit codes: 0 done, 1 limits not met, 2 wrong use, 3 the workload itself fails, 130 interrupted."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from typer.exceptions import TyperException

from trimtab.cli.environment import env_command, list_command
from trimtab.cli.measure import measure_command, verify_command
from trimtab.cli.optimize import optimize_command
from trimtab.errors import TrimtabError

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="trimtab",
    help="Makes a PyTorch model fast, proves that it is still right, and ships it.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("optimize")(optimize_command)
app.command("measure")(measure_command)
app.command("verify")(verify_command)
app.command("env")(env_command)
app.command("list")(list_command)


def main() -> None:
    """Run the command line; errors of ours become one sentence and an exit code."""
    try:
        code = app(standalone_mode=False)
    except TrimtabError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        code = error.exit_code
    except TyperException as error:
        print(error.format_message(), file=sys.stderr)
        code = 2
    if code == EXIT_INTERRUPTED:  # typer turns the KeyboardInterrupt into this code
        print("\ninterrupted; what was finished is kept, and the same command goes on from it", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
