"""``trimtab optimize``."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

import trimtab
from trimtab._internal.files import typed
from trimtab._internal.serialization import dumps
from trimtab._internal.text import counted, no_file
from trimtab._internal.text import plain as cleaned
from trimtab._internal.units import megabytes, seconds
from trimtab.cli._boundary import repeat_command
from trimtab.cli._progress import on_terminal, view
from trimtab.errors import UsageError

if TYPE_CHECKING:
    from trimtab.core.workload import Workload
    from trimtab.study.result import Result

EXIT_LIMITS = 1
Inputs = Annotated[
    pathlib.Path | None,
    typer.Option(
        parser=typed("rows.npz"),
        metavar="FILE",
        help="Real inputs of a model file: .npz, .npy, .safetensors [random].",
    ),
]
Shape = Annotated[
    list[str] | None, typer.Option(metavar="NAME=1x3x8", help="Size of an input of a model file; may be repeated.")
]
Task = Annotated[str | None, typer.Option(metavar="NAME", help="What the model of hf:FOLDER is for.")]


def optimize_command(
    workload: Annotated[
        str, typer.Argument(help="file.py[:name], package.module:name, model.pt2, model.pt, model.onnx or hf:FOLDER")
    ],
    max_drop: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Largest drop of the score: 0.5%, 0.005, mlperf-99, mlperf-99.9.")
    ] = None,
    max_error: Annotated[str | None, typer.Option(metavar="SHARE", help="Largest output error without labels: 5%.")] = None,
    latency: Annotated[str | None, typer.Option(metavar="TIME", help="Largest median latency: 4ms.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Largest memory above an idle process: 500MB.")] = None,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="Largest size on disk: 5MB.")] = None,
    throughput: Annotated[str | None, typer.Option(metavar="RATE", help="Least examples per second: 200/s.")] = None,
    objective: Annotated[
        Literal["latency", "throughput", "memory", "size"],
        typer.Option(metavar="WHAT", help="latency, throughput, memory or size."),
    ] = "latency",
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Time for everything: 90s, 10m, 2h.")] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", min=1, help="Most new trials besides the original.")] = None,
    sampler: Annotated[
        Literal["ladder", "tpe"], typer.Option(metavar="NAME", help="ladder, or tpe for long budgets.")
    ] = "ladder",
    compress: Annotated[
        str, typer.Option(metavar="HOW", help="Smaller networks: auto, or some of prune,quantize,distill,activations.")
    ] = "off",
    train_budget: Annotated[str | None, typer.Option(metavar="TIME", help="Time for their trainings: 20m.")] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("runs/model"), metavar="FOLDER", help="Run folder; a study there goes on [runs/NAME]."),
    ] = None,
    storage: Annotated[str | None, typer.Option(metavar="URL", help="Database [SQLite in the run folder].")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what is in the run folder.")] = False,
    worker_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of a worker: 4GB [80% of free].")] = None,
    trial_time: Annotated[str, typer.Option(metavar="TIME", help="Time limit of one trial.")] = "10m",
    timing: Annotated[str, typer.Option(metavar="TIME", help="Most time for timing one trial.")] = "5s",
    seed: Annotated[int, typer.Option(metavar="N", help="Of the tpe sampler.")] = 0,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Your own words, for the record and the report.")] = None,
    inputs: Inputs = None,
    shape: Shape = None,
    task: Task = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Progress as lines, as where stdout is no terminal.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> int:
    """Search, prove, and write the artifact.

    Ctrl-C ends with the best so far; the same command goes on from there.

    \b
    Examples:
      trimtab optimize model.py --max-drop 1%
      trimtab optimize model.py:workload --latency 4ms --size 5MB --budget 10m
      trimtab optimize model.py --objective throughput --json > result.json
    """
    _check_file(workload)
    budget_s = None if budget is None else seconds(budget, "--budget")
    options: dict[str, Any] = {"budget": budget_s, "trials": trials, "objective": objective, "sampler": sampler, "out": out}
    options |= {"compress": compress, "storage": storage, "fresh": fresh, "seed": seed}
    options |= {
        "train_budget": None if train_budget is None else seconds(train_budget, "--train-budget"),
        "worker_memory_mb": None if worker_memory is None else megabytes(worker_memory, "--worker-memory"),
        "trial_seconds": seconds(trial_time, "--trial-time"),
        "timing_seconds": seconds(timing, "--timing"),
    }
    console = Console(stderr=json, emoji=False)
    lines = plain or not on_terminal(sys.stderr if json else sys.stdout)
    with view(console, plain=lines, quiet=quiet, budget_s=budget_s, trials=trials) as progress:
        limit = {"max_drop": max_drop, "max_error": max_error, "latency": latency, "memory": memory, "size": size}
        limits = trimtab.Limits.parse(**limit, throughput=throughput)
        subject = load_subject(workload, inputs, shape, task)
        result = trimtab.optimize(subject, limits=limits, note=note, progress=progress, **options)
    if json:
        typer.echo(dumps(result))
    else:
        print_result(result, progress.remarks)
    if progress.cut_short and not quiet:
        command = repeat_command(sys.argv[1:])
        console.print(f"interrupted before the search was done. To go on: {command}", markup=False, soft_wrap=True)
    return EXIT_LIMITS if result.status == "limits_not_met" else 0


def load_subject(workload: str, inputs: pathlib.Path | None, shape: list[str] | None, task: str | None) -> Workload | str:
    """The loaded workload if there are options for it; otherwise its reference."""
    if inputs is None and not shape and task is None:
        return workload
    shapes: dict[str, str] = {}
    for item in shape or ():
        name, equals, sizes = item.rpartition("=")
        if not equals:
            raise UsageError(f"--shape {item!r} names no input; write it as --shape images=1x3x224x224.")
        shapes[name] = sizes
    return trimtab.load_workload(workload, inputs=inputs, shapes=shapes, task=task)


def _check_file(workload: str) -> None:
    """Check that the file of ``workload`` exists before torch is imported, which takes seconds.

    Raises:
        UsageError: the reference names a Python file that does not exist.
    """
    path = pathlib.Path(re.sub(r":[A-Za-z_]\w*$", "", workload))
    if path.suffix == ".py" and not os.path.isfile(path):  # pathlib raises for some paths
        raise no_file(path, "Check the path, or write a file to start from: trimtab init.")


def print_result(result: Result, shown: Collection[str] = ()) -> None:
    """Print the result, without the notes in ``shown``, which were printed before."""
    console, terminal = Console(highlight=False, emoji=False), on_terminal(sys.stdout)

    def say(line: str = "") -> None:
        console.print(cleaned(line), markup=False, soft_wrap=not terminal)

    say()
    for line in str(result.ladder()).splitlines():
        figures, _, recipe = line.rpartition("  ")
        wide = terminal and len(line) > console.width
        say(f"{figures.rstrip()}\n            {recipe}" if wide else line)
    say()
    say(result.sentence)
    for note in result.all_notes():
        if note not in shown:
            say(f"note: {note}")
    artifact = result.best.artifact if result.best is not None else None
    if artifact is not None:
        say(f"artifact: {artifact.path}  (python {artifact.path}/run.py runs it without trimtab)")
    elif result.best is not None:
        why = result.best.confirmation.reason or result.best.trial.reason or "see the log of its confirmation"
        say(f"artifact: none; {why}")
    for found in {each.recipe.hash: each for each in result.study.refused if each.log}.values():
        say(f"refused:  {result.study.folder}/{found.log}  (log of {found.recipe} when it was measured again)")
    if result.report is not None:
        say(f"report:   {result.report}  (opens in any browser, without a network)")
    say(f"study:    {result.study.folder}  ({counted(len(result.trials), 'trial')}, {result.seconds:.0f} s)")
