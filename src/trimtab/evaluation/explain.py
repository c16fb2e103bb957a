"""Profile a recipe: operators of one call, and its place under the roofline of the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import typing
from typing import ClassVar

import torch

from trimtab._internal.text import counted
from trimtab.core.backend import Executable
from trimtab.core.candidate import Candidate
from trimtab.core.measurement import OperatorTime
from trimtab.core.recipe import Recipe
from trimtab.evaluation.confirm import load
from trimtab.evaluation.evaluate import BUILT, MODEL, apply_passes, build, rows
from trimtab.evaluation.prepared_workload import Subject
from trimtab.hardware.peaks import Peaks
from trimtab.measure.flops import count_flops
from trimtab.measure.profile import operator_times
from trimtab.measure.roofline import Dtype, Roofline, roofline
from trimtab.tensors.weights import weight_bytes

REPEATS, PROFILED_S = 10, 10.0
"""Calls that are profiled, and about how many seconds they may take; slow calls are fewer."""
TORCH = "torch's profiler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Profile of one recipe. Missing figures have their reason in ``notes``."""

    schema: ClassVar[int] = 1

    recipe: str
    source: str
    """The profiler that named the operators."""
    operators: tuple[OperatorTime, ...] = ()
    """The slowest first; empty if the profiler saw none."""
    dtype: Dtype = "float32"
    """Type of the matrix products."""
    threads: int | None = None
    seconds: float | None = None
    """Duration of one call, timed in turns; profiled calls take longer."""
    flops: int | None = None
    """Operations of one call of the original, whatever the recipe changed."""
    uncounted: tuple[str, ...] = ()
    """Operators without a formula; with any, ``flops`` is a lower bound."""
    bytes_moved: int | None = None
    """Lower bound: weights, inputs and outputs, once each."""
    roofline: Roofline | None = None
    notes: tuple[str, ...] = ()


def explain(
    recipe: Recipe, files: pathlib.Path | None, subject: Subject, peaks: Peaks, *, seconds: float | None = None
) -> Explanation:
    """Profile ``recipe`` in this process, from its saved ``files`` if there are any, and place it under the roof.

    ``seconds`` is the measured duration of the examples of one call of the original. The result is for the recipe's own calls,
    which may have more examples. The process must end afterwards, as for :func:`trimtab.evaluation.evaluate.evaluate`.

    Raises:
        CompileError: or whatever else the recipe raises when it is built and run.
    """
    if files is not None and (files / BUILT).exists():
        executable, candidate = load(recipe, files, subject.candidate)
        weights = sum(path.stat().st_size for path in (files / MODEL).rglob("*") if path.is_file())
    else:
        candidate = apply_passes(recipe, subject.candidate)
        executable = build(recipe, candidate)[0]
        weights = weight_bytes(candidate.model)
    if seconds is not None:  # per call of the recipe, which reads the weights once for all its examples
        ran, asked = (rows(each.leaves, subject.candidate.signature) for each in (candidate, subject.candidate))
        seconds *= ran / asked
    repeats = REPEATS if not seconds else max(1, min(REPEATS, int(PROFILED_S / seconds)))
    source, operators, notes = _profiled(recipe, executable, candidate, repeats)
    counted = count_flops(subject.model, *candidate.own_inputs())
    leaves = candidate.own_leaves()
    moved = weights + _bytes(leaves) + _bytes(executable.run(leaves))
    dtype = _dtype(recipe, executable)
    threads = executable.settings.threads or torch.get_num_threads()
    roof = None if seconds is None else roofline(counted.total, moved, seconds, peaks, dtype=dtype, threads=threads)
    if roof is None:
        notes += (_no_roof(counted.total, seconds, peaks, dtype, threads),)
    return Explanation(
        recipe=str(recipe),
        source=source,
        operators=tuple(operators),
        dtype=dtype,
        threads=threads,
        seconds=seconds,
        flops=counted.total,
        uncounted=counted.uncounted,
        bytes_moved=moved,
        roofline=roof,
        notes=notes,
    )


def _profiled(
    recipe: Recipe, executable: Executable, candidate: Candidate, repeats: int
) -> tuple[str, list[OperatorTime], tuple[str, ...]]:
    leaves = candidate.own_leaves()  # copies, because a call may write to them
    with contextlib.suppress(NotImplementedError):
        native = executable.operator_times(leaves, repeats)
        if native is not None:
            return f"{recipe.backend.name}'s own profiler", native, ()
    found = operator_times(lambda: executable.run(leaves), repeats=repeats)
    return TORCH, found, () if found else ("torch's profiler saw no operator: the runtime keeps them to itself.",)


def _dtype(recipe: Recipe, executable: Executable) -> Dtype:
    """The data type of the matrix products: that of autocast, else that of the backend."""
    named = executable.settings.precision.autocast or recipe.backend.arithmetic
    return typing.cast(Dtype, named) if named in typing.get_args(Dtype) else "float32"


def _bytes(tensors: typing.Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _no_roof(flops: int, seconds: float | None, peaks: Peaks, dtype: Dtype, threads: int) -> str:
    if seconds is None:
        return "Not placed under the roofline: its time was not measured."
    if not flops:
        return "Not placed under the roofline: no operation of the model has a formula to count by."
    missing = next((kind for kind in (dtype, "memory") if not peaks.find(typing.cast(Dtype, kind), "cpu", threads)), dtype)
    return (
        f"Not placed under the roofline: the {missing} peak at {counted(threads, 'thread')} was not measured on this machine."
    )
