"""The words after ``trimtab doctor``, ``tune`` and ``run``: a script, a module or a launcher, with its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from trimtab.errors import UsageError
from trimtab.probe.command import Command
from trimtab.study.progress import Printed

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [-- ARGUMENTS] | -- LAUNCHER ... SCRIPT", help="What you run, such as train.py -- --epochs 1."
    ),
]
Module = Annotated[str | None, typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does.")]
_WORKLOAD = re.compile(r"\.py:[^:/\\]+$")


def is_workload(words: Sequence[str], module: str | None) -> bool:
    """Whether ``words`` name a workload: ``FILE.py:NAME``."""
    return module is None and bool(words) and _WORKLOAD.search(words[0]) is not None


def command_of(words: Sequence[str], module: str | None) -> Command:
    """The command that runs the script.

    Raises:
        UsageError: there is no such script, module or program.
    """
    if module is not None:
        return Command.of(module=module, args=words)
    if not words:
        raise UsageError("Give a script, such as train.py, a module with -m, or a launcher after --.")
    if words[0].endswith(".py"):
        return Command.of(words[0], args=words[1:])
    return Command.of(launcher=words)


def progress_lines(budget_s: float | None) -> Callable[[str], None]:
    """A function that prints each stage with the elapsed time on standard error."""
    return Printed(budget_s=budget_s).stage
