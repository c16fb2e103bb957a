"""``trimtab init``."""

from __future__ import annotations

import pathlib
import shlex
from typing import Annotated

import typer

from trimtab._internal.files import typed
from trimtab.importers.starter import write_starter


def init_command(
    kind: Annotated[
        str, typer.Argument(help="model, image, text, tabular, custom, or a folder with a transformers model")
    ] = "model",
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", parser=typed("workload.py"), metavar="FILE", help="Where to write [workload.py]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> int:
    """Write a commented workload file to start from. It runs as it is.

    \b
    Examples:
      trimtab init image -o classifier.py
      trimtab init ./my-bert
    """
    path = write_starter(kind, output, force=force)
    command = shlex.join(["trimtab", "optimize", str(path), "--trials", "3"])
    typer.echo(f"Wrote {path}. It runs as it is; what to replace is marked REPLACE. Try: {command}")
    return 0
