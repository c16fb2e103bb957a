"""``trimtab measure`` and ``trimtab verify``."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

from trimtab._json import dumps
from trimtab._units import fraction, seconds
from trimtab.artifact import Verification
from trimtab.study.compare import compare
from trimtab.study.verify import verify

EXIT_NOT_VERIFIED = 1
Trust = Annotated[bool, typer.Option("--trust", help="allow an artifact that carries native code")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


def measure_command(
    subject: Annotated[str, typer.Argument(help="an artifact's folder, or a workload: file.py[:name], package.module:name")],
    vs: Annotated[str | None, typer.Option(help="what to take turns with: another artifact or workload")] = None,
    time: Annotated[str, typer.Option(help="most time for sampling")] = "10s",
    width: Annotated[str, typer.Option(help="stop when the ratio's interval is this narrow")] = "2%",
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Time one thing, or two in turns with a confidence interval.

    Example: trimtab measure runs/digits/artifact --vs examples/digits.py
    """
    found = compare(subject, vs, seconds=seconds(time, "--time"), width=fraction(width, "--width"), trust=trust)
    typer.echo(dumps(found) if json else str(found))
    return 0


def verify_command(
    artifact: Annotated[pathlib.Path, typer.Argument(help="the folder of an artifact")],
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Check an artifact here and now: files, outputs, environment, speed.

    Example: trimtab verify runs/digits/artifact
    """
    found = verify(artifact, trust=trust)
    typer.echo(dumps(found) if json else "\n".join(_lines(found)))
    return 0 if found.ok else EXIT_NOT_VERIFIED


def _lines(found: Verification) -> Iterator[str]:
    """What was verified, for reading; every finding is a sentence of its own."""
    yield "files:       " + ("as written, every hash checked" if not found.integrity else found.integrity[0])
    yield from (f"             {sentence}" for sentence in found.integrity[1:])
    if found.parity is not None:
        worst = "no number" if found.parity.max_error is None else f"{found.parity.max_error:.3g}"
        cases = f"{found.parity.cases} test vector{'s' if found.parity.cases != 1 else ''}"
        yield "outputs:     " + (found.parity.reason or f"within tolerance on {cases}, off by {worst} at most")
    for number, sentence in enumerate(found.differences or ("The same as where the artifact was proven.",)):
        yield f"{'environment: ' if number == 0 else '             '}{sentence}"
    if found.speed is None:
        yield f"speed:       not compared. {found.speed_reason}"
    else:
        ratio = found.speed.ratio
        promised = f"; {found.promised['value']:.2f}x was measured when it was written" if found.promised else ""
        yield f"speed:       {ratio.value:.2f}x the original here ({ratio.low:.2f} to {ratio.high:.2f}){promised}"
    yield "verified" if found.ok else "NOT verified"
