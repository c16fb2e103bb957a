"""``trimtab measure`` and ``trimtab verify``."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import trimtab
from trimtab._internal.files import typed
from trimtab._internal.serialization import dumps, from_json, to_json
from trimtab._internal.text import plain
from trimtab._internal.units import fraction, positive, seconds
from trimtab.cli._lazy import lazy_import
from trimtab.cli._progress import waiting
from trimtab.cli.optimize import Inputs, Shape, Task, load_subject
from trimtab.core.measurement import Interval
from trimtab.measure.host import busy_note

if TYPE_CHECKING:
    from trimtab.artifact.artifact import Verification

EXIT_NOT_VERIFIED = 1
Trust = Annotated[bool, typer.Option("--trust", help="Allow an artifact that carries native code.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def measure_command(
    subject: Annotated[
        str,
        typer.Argument(help="An artifact's folder, file.py[:name], package.module:name, model.pt2, .pt, .onnx or hf:FOLDER"),
    ],
    vs: Annotated[str | None, typer.Option(help="What to take turns with: another artifact or workload.")] = None,
    time: Annotated[str, typer.Option(help="Most time for sampling.")] = "10s",
    width: Annotated[str, typer.Option(help="Stop when the ratio's interval is this narrow.")] = "2%",
    objective: Annotated[
        Literal["latency", "throughput"],
        typer.Option(metavar="WHAT", help="latency of one call, or throughput of several requests at once."),
    ] = "latency",
    memory: Annotated[bool, typer.Option("--memory", help="Also the peak memory of a fresh process.")] = False,
    operators: Annotated[bool, typer.Option("--operators", help="Also the slowest operators of one call.")] = False,
    inputs: Inputs = None,
    shape: Shape = None,
    task: Task = None,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Time one thing, or two in turns with a confidence interval.

    --memory and --operators also look at each in a fresh process.

    \b
    Examples:
      trimtab measure model.py
      trimtab measure model.py --memory --operators
      trimtab measure model.py --objective throughput
      trimtab measure runs/digits/artifact --vs examples/digits.py
      trimtab measure runs/net/artifact --vs net.onnx --shape images=1x3x224x224
      trimtab measure runs/old/artifact --vs runs/new/artifact --width 1%
    """
    most, narrow = seconds(time, "--time"), positive(fraction(width, "--width"), "--width", "2%")
    _note_busy_machine()
    with waiting(f"timing {subject} against {vs or 'itself'}, each in a process of its own"):
        given = [one for one in (subject, vs) if one is not None]
        is_python = lazy_import("importers.load").is_python  # imports torch
        loadable = [one for one in given if not _is_folder(one) and not is_python(one)] or given
        sides = [load_subject(one, inputs, shape, task) if one in loadable and not _is_folder(one) else one for one in given]
        how: dict[str, Any] = {"objective": objective, "seconds": most, "width": narrow, "trust": trust}
        found = trimtab.compare(sides[0], sides[1] if vs is not None else None, **how)
    profiles = []
    if memory or operators:
        with waiting(f"looking at the {' and the '.join(['memory'] * memory + ['operators'] * operators)}"):
            profile_model = lazy_import("cli._profile").profile_model
            profiles = [profile_model(side, memory=memory, operators=operators, trust=trust) for side in sides]
    typer.echo(
        dumps(to_json(found) | {"profiles": to_json(profiles)}) if json else plain("\n".join(map(str, (found, *profiles))))
    )
    return 0


def _note_busy_machine() -> None:
    """Print a note to standard error if other processes make this machine busy."""
    if (note := busy_note()) is not None:
        typer.echo(f"note: {note}", err=True)


def _is_folder(what: str) -> bool:
    """Whether ``what`` is a folder, that is, an artifact, which has inputs of its own."""
    return os.path.isdir(what)  # pathlib raises for some paths


def verify_command(
    artifact: Annotated[pathlib.Path, typer.Argument(parser=typed("runs/model/artifact"), help="The folder of an artifact.")],
    time: Annotated[str, typer.Option(help="Most time for sampling its speed.")] = "10s",
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Check an artifact here and now: files, outputs, environment, speed.

    \b
    Examples:
      trimtab verify runs/digits/artifact
      trimtab verify runs/digits/artifact --json
    """
    most = seconds(time, "--time")
    _note_busy_machine()
    with waiting(f"verifying {artifact}: files, outputs, environment, speed"):
        found = trimtab.verify(artifact, trust=trust, seconds=most)
    typer.echo(dumps(found) if json else "\n".join(plain(line) for line in _lines(found)))
    return 0 if found.ok else EXIT_NOT_VERIFIED


def _lines(found: Verification) -> Iterator[str]:
    """The lines of the verification for the terminal."""
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
        bounds = "95% interval" if ratio.unclear else ratio.bounds()
        yield f"speed:       {ratio.single()} the original that travels with it ({bounds}){_promised(found)}"
        yield f"             measured now: {found.speed.conditions}"
        if found.speed.doubt is not None:
            yield f"             {found.speed.doubt}"
    if found.record is not None or found.record_reason is not None:
        yield f"record:      {found.record or f'not written. {found.record_reason}'}"
    if found.ok:
        yield "verified"
    elif found.integrity:
        yield "NOT verified. Do not use it: copy it anew from where it was written."
    else:
        yield "NOT verified. Do not use it here: make one on this machine with trimtab optimize."


def _promised(found: Verification) -> str:
    """Words about the speed-up measured when the artifact was written; empty if it is unknown."""
    if not found.promised:
        return ""
    then = from_json(Interval, found.promised)
    words = f"; when it was written, {then.single()} the model as written"
    if not found.baseline_speedup:
        return words
    original = from_json(Interval, found.baseline_speedup)
    if then.vague or original.vague:
        return words
    return f"{words}, which is {then.value / original.value:.2f}x that original"
