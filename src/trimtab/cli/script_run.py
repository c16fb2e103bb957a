"""``trimtab run``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from trimtab._internal.files import typed
from trimtab.cli._lazy import late
from trimtab.cli._script import Module, Words, command_of


def run_command(
    script: Words = None,
    module: Module = None,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("trimtab.toml"), metavar="FILE", help="Settings [trimtab.toml beside the script]."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Apply the settings although script, machine or torch have changed.")
    ] = False,
) -> int:
    """Run an unmodified script with the settings that `trimtab tune` found.

    If the script, the machine or torch are not what they were, one line on standard error says so, and
    the script runs as written. TRIMTAB=off runs it as written.

    \b
    Examples:
      trimtab run train.py -- --epochs 10
      trimtab run -- torchrun --nproc_per_node 2 train.py
    """
    late("probe.running").run(command_of(script or [], module), path=config, anyway=anyway)
    return 0
