"""``trimtab run``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from trimtab._internal.files import typed
from trimtab._internal.units import seconds
from trimtab.cli._lazy import lazy_import
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
    watch: Annotated[
        bool, typer.Option("--watch", help="Measure the split of a step now and then, and tell when it shifts.")
    ] = False,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often --watch measures.")] = "1m",
) -> int:
    """Run an unmodified script with the settings that `trimtab tune` found.

    If the script, the machine or torch are not what they were, one line on standard error says so, and
    the script runs as written. TRIMTAB=off runs it as written.

    \b
    Examples:
      trimtab run train.py -- --epochs 10
      trimtab run --watch train.py -- --epochs 100
      trimtab run -- torchrun --nproc_per_node 2 train.py
    """
    watch_s = seconds(every, "--every") if watch else None
    lazy_import("probe.running").run(command_of(script or [], module), path=config, anyway=anyway, watch_s=watch_s)
    return 0
