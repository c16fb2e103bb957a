"""Find out why a script is slow, and what each remedy brings on it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from trimtab._internal import units
from trimtab._internal.files import path_of
from trimtab._internal.serialization import write_json, write_text
from trimtab._internal.text import of_type
from trimtab._internal.user_code import refuse_in_worker
from trimtab._internal.validation import checked_call
from trimtab.core.diagnosis import Diagnosis
from trimtab.core.workload import Training, Workload
from trimtab.errors import UsageError
from trimtab.execution.temporary_folders import remove_temporary_folder, temporary_folder
from trimtab.importers.load import load_workload
from trimtab.probe.command import Command
from trimtab.probe.diagnosis import BUDGET_S, diagnose
from trimtab.probe.tracing import Schedule, record_traces
from trimtab.probe.workload_script import script_of
from trimtab.report.doctor_page import html
from trimtab.report.doctor_trace import trace
from trimtab.report.write import save_text
from trimtab.train.loss.adapter import is_pair

REPORT, RECORD, TIMELINE = "report.html", "doctor.json", "trace.json"
FEWEST_STEPS = 10
TRACE_SHARE = 0.2
"""Share of the budget for the run under torch's profiler, where one is asked for."""
_MODEL_FILES = re.compile(r"\.(pt2|pt|onnx)$|^hf:")
_NAMED = re.compile(r"\.py:[A-Za-z_]\w*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a diagnosis."""

    command: Command
    words: tuple[str, ...]
    """The words of the command line that name the subject."""
    seconds: float = BUDGET_S
    steps: int = 40
    in_place: bool = False
    out: pathlib.Path | None = None
    """Folder for the report, the JSON and the timeline; ``None`` writes nothing."""
    patch: pathlib.Path | None = None
    """File for the edits of the findings, as a unified diff."""
    trace: pathlib.Path | None = None
    """Folder for traces of torch's profiler."""
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    nvtx: bool = False


@checked_call("trimtab.doctor")
def doctor(
    subject: Workload | nn.Module | str | os.PathLike[str],
    loader: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    args: Sequence[str] = (),
    budget: str | float = BUDGET_S,
    steps: int = 40,
    in_place: bool = False,
    out: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Find out why ``subject`` is slow: watch its steps, and measure what each remedy brings on it, with its losses beside.

    Everything runs in processes of its own. What a script writes goes to a copy of its folder where the system allows that.

    Args:
        subject: a script, ``"train.py"``; a workload, or a reference to one, ``"model.py:workload"``; or a model with its
            ``loader``.
        loader: batches for the model: ``(inputs, targets)``, or inputs.
        loss: with a model: the loss, as :class:`~trimtab.train.trainer.Trainer` takes it; ``None`` if the model returns it.
        optimizer: with a model: ``optimizer(parameters)``, which makes the steps those of a training. Without it the model is
            called on the batches.
        args: the command-line arguments of a script.
        budget: most time for everything, as ``"3m"`` or in seconds.
        steps: steps to watch, at least 10.
        in_place: let the script write where it writes, instead of to a copy.
        out: folder for the report, the JSON and the timeline; ``None`` writes nothing.
        on_progress: called with a sentence at each stage.

    Returns:
        The :class:`~trimtab.core.diagnosis.Diagnosis`.

    Raises:
        UsageError: an argument is wrong, or the script cannot be started.
        WorkloadError: the script failed, or made no step that could be seen.

    Example::

        import torch, trimtab
        from torch.utils.data import DataLoader, TensorDataset

        if __name__ == "__main__":
            data = TensorDataset(torch.randn(2048, 64), torch.randint(10, (2048,)))
            model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
            found = trimtab.doctor(
                model,
                DataLoader(data, batch_size=32),
                loss=torch.nn.CrossEntropyLoss(),
                optimizer=torch.optim.Adam,
                budget="1m",
            )
            print(found.score.sentence)
    """
    refuse_in_worker("trimtab.doctor")
    seconds = units.positive(units.seconds(budget, "budget"), "budget")
    with contextlib.ExitStack() as stack:
        if isinstance(subject, (Workload, nn.Module)):
            if args:
                raise UsageError(f"args is {args!r}; only a script takes arguments.")
            workload, name = _workload(subject, loader, loss, optimizer)
            command = stack.enter_context(_steps_of(workload, loader=None if workload.mode == "train" else loader))
            words: tuple[str, ...] = (name,)
        else:
            if loader is not None or loss is not None or optimizer is not None:
                raise UsageError("loader=, loss= and optimizer= belong to a model; a script brings its own.")
            command, words = _command_of(stack, os.fspath(path_of(subject, "What is examined", "train.py")), [*map(str, args)])
        request = Request(
            command=command,
            words=words,
            seconds=seconds,
            steps=checked_steps(steps, "steps"),
            in_place=in_place,
            out=None if out is None else path_of(out, "out", "runs/doctor"),
        )
        return examine(request, on_progress)


def _command_of(stack: contextlib.ExitStack, name: str, args: list[str]) -> tuple[Command, tuple[str, ...]]:
    """The command of a script or of a reference to a workload, and its words on the command line."""
    if not is_workload(name):
        return Command.of(name, args=args), (name, *(("--", *args) if args else ()))
    if args:
        raise UsageError(f"args is {args!r}; only a script takes arguments, and {name} is a workload.")
    return stack.enter_context(workload_steps(name)), (name,)


def checked_steps(steps: int, name: str) -> int:
    """``steps``, if they are enough to tell anything.

    Raises:
        UsageError: they are not.
    """
    if not isinstance(steps, int) or steps < FEWEST_STEPS:
        raise UsageError(f"{name} is {steps!r}; a diagnosis needs at least {FEWEST_STEPS} steps.")
    return steps


@contextlib.contextmanager
def workload_steps(reference: str) -> Iterator[Command]:
    """A command that makes the steps of the workload that ``reference`` names, for the time of the block.

    Raises:
        UsageError: there is no such workload.
        WorkloadError: its file failed.
    """
    with _steps_of(load_workload(reference), reference=reference) as command:
        yield command


def is_workload(word: str) -> bool:
    """Whether ``word`` names a workload and not a script: ``FILE.py:NAME``, a model file, or a file that defines ``workload``
    as a :class:`~trimtab.core.workload.Workload` and imports trimtab."""
    if _NAMED.search(word) or _MODEL_FILES.search(word):
        return True
    try:
        tree = ast.parse(pathlib.Path(word).read_text(encoding="utf-8")) if word.endswith(".py") else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "workload":
            return True
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = ast.unparse(node.value.func).rpartition(".")[2]
            if made in ("Workload", "load_workload", "capture"):
                return True
    return False


@contextlib.contextmanager
def _steps_of(workload: Workload, *, reference: str | None = None, loader: Any = None) -> Iterator[Command]:
    folder = temporary_folder()
    try:
        script = script_of(workload, pathlib.Path(folder), reference=reference, loader=loader)
        yield Command.of(script)
    finally:
        remove_temporary_folder(folder)


def _workload(subject: Workload | nn.Module, loader: Any, loss: Any, optimizer: Any) -> tuple[Workload, str]:
    """The workload that ``subject`` is, or that a model and a loader make, and its name."""
    if isinstance(subject, Workload):
        if loader is not None or loss is not None or optimizer is not None:
            raise UsageError("loader=, loss= and optimizer= belong to a model; a workload brings its own.")
        return subject, subject.name
    name = type(subject).__name__
    if loader is None:
        raise UsageError(f"trimtab.doctor({name}) needs batches: trimtab.doctor(model, loader).")
    if optimizer is not None:
        training = Training(data=loader, loss=loss, optimizer=optimizer)
        return Workload(model=subject, name=name, mode="train", training=training), name
    if loss is not None:
        raise UsageError(f"loss is {of_type(loss)}, but there is no optimizer=; give both for a training, or none.")
    batch = next(iter(loader), None)
    if batch is None:
        raise UsageError("The loader gives no batch.")
    return Workload(model=subject, name=name, inputs=batch[0] if is_pair(batch) else batch), name


def examine(request: Request, on_progress: Callable[[str], None] | None = None) -> Diagnosis:
    """Diagnose what ``request`` names and write the files that it asks for.

    Raises:
        UsageError: a file cannot be written, or the script cannot be started.
        WorkloadError: the script failed, or made no step that could be seen.
    """
    if request.out is not None:
        _make_folder(request.out)
    traced, start = request.trace is not None or request.nvtx, time.monotonic()
    found = diagnose(
        request.command,
        words=request.words,
        seconds=(1 - TRACE_SHARE * traced) * request.seconds,
        steps=request.steps,
        in_place=request.in_place,
        patch=request.patch is not None,
        on_progress=on_progress,
    )
    files, notes = list[str](), list[str]()
    if traced:
        if on_progress is not None:
            on_progress("running once more for the traces")
        made, note = record_traces(
            request.command,
            found.record,
            schedule=None if request.trace is None else request.schedule,
            folder=request.trace,
            nvtx=request.nvtx,
            in_place=request.in_place,
            seconds=request.seconds - (time.monotonic() - start),
        )
        files += map(str, made)
        notes += [note] if note else []
    if request.patch is not None and found.patch is not None:
        files.append(str(save_text(found.patch.text, request.patch)))
    if request.out is not None:
        files += [str(request.out / name) for name in (REPORT, RECORD, TIMELINE)]
    found = dataclasses.replace(found, files=tuple(files), notes=(*found.notes, *notes))
    if request.out is not None:
        write_json(request.out / RECORD, found)
        write_json(request.out / TIMELINE, trace(found.record))
        write_text(request.out / REPORT, html(found))
    return found


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be made: {error.strerror or error}. Name another with --out.") from error
