"""A workload made ready to be worked on: its model in evaluation mode, its candidate, its data split."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab._tree import flatten, unflatten
from trimtab.candidate import Candidate, call_model
from trimtab.errors import InputError, UsageError, WorkloadError
from trimtab.signature import Dim, input_names, parameter_names
from trimtab.splits import MOST_CALIBRATION, Batch, Splits, split
from trimtab.workload import Workload, as_call, user_code

RESAMPLED = 7
"""Copies of the example with resampled values that stand in for data where a workload has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What evaluation works on. ``notes`` tell, in sentences, what was assumed."""

    workload: Workload
    candidate: Candidate
    splits: Splits
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The original model, in evaluation mode."""
        return self.candidate.model


def prepare(workload: Workload, scratch: pathlib.Path | None = None) -> Subject:
    """Build the model, learn its signature on the example inputs, split the data.

    Raises:
        UsageError: inputs or data are not what a workload can hold.
        WorkloadError: the user's own code raised, or the model's output is unusable; says what and where.
    """
    notes: list[str] = []
    with user_code("The workload's model could not be built"):
        model = workload.build_model()
    if model.training:
        notes.append("The model came in training mode; it is measured, and ships, in evaluation mode.")
    model.eval()
    splits = split(workload)
    args, kwargs = as_call(workload.inputs)
    dynamic = _dims(workload, model, splits, notes)
    calibration = _calibration(workload, model, splits)
    try:
        with user_code("The model failed on the example inputs"):
            candidate = Candidate.of(model, args, kwargs, dynamic=dynamic, calibration=calibration, scratch=scratch)
    except WorkloadError:
        if workload.dynamic is not None or not dynamic:
            raise
        notes.append("The data shows varying sizes, but the model takes only the example's: no dimension is dynamic.")
        with user_code("The model failed on the example inputs"):
            candidate = Candidate.of(model, args, kwargs, calibration=calibration, scratch=scratch)
    if not splits.selection:
        stand_ins = _stand_ins(candidate)
        splits = dataclasses.replace(splits, selection=stand_ins, test=stand_ins)
    return Subject(workload=workload, candidate=candidate, splits=splits, notes=(*notes, *splits.notes))


def _calibration(workload: Workload, model: nn.Module, splits: Splits) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inputs of the model itself; where ``run`` calls it, those are recorded while it runs over the calibration items."""
    if _is_plain(workload):
        return [batch.call for batch in splits.calibration]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        with torch.no_grad():
            return model(*args, **kwargs)

    assert workload.evaluation is not None
    assert workload.evaluation.run is not None
    with user_code("Evaluation run failed on the calibration data"):
        for batch in splits.calibration:
            workload.evaluation.run(record, batch.inputs)
    step = -(-len(calls) // MOST_CALIBRATION) or 1
    return calls[::step]


def _is_plain(workload: Workload) -> bool:
    """Whether items of the calibration data are the model's own inputs, which they are not where ``run`` calls it."""
    return workload.calibration is not None or workload.evaluation is None or workload.evaluation.run is None


def _dims(workload: Workload, model: nn.Module, splits: Splits, notes: list[str]) -> dict[str, dict[int, Dim]]:
    """The dynamic dimensions: as stated, else the sizes that differ between the example and the data."""
    if workload.dynamic is not None:
        return workload.stated_dims or {}
    batches = (*splits.calibration, *splits.selection, *splits.test)
    if not batches or not _is_plain(workload):
        return {}
    args, kwargs = as_call(workload.inputs)
    example, structure = flatten((args, dict(kwargs)), "inputs")
    seen: dict[tuple[str, int], list[int]] = {}
    leaf_names = input_names(parameter_names(model.forward, len(args)), structure)
    for batch in batches:
        call = batch.call
        leaves, other = flatten((call[0], dict(call[1])), "inputs of the data")
        if other != structure:
            raise UsageError("The data's inputs are structured differently from the example inputs. Make them alike.")
        for name, leaf, first in zip(leaf_names, leaves, example, strict=True):
            _compare(name, leaf, first, seen)
    dims = _named(seen)
    if dims:
        listed = sorted({dim.name for axes in dims.values() for dim in axes.values()})
        notes.append(f"Dynamic dimensions, as the data shows them: {', '.join(listed)}.")
    return dims


def _compare(name: str, leaf: torch.Tensor, example: torch.Tensor, seen: dict[tuple[str, int], list[int]]) -> None:
    if leaf.dim() != example.dim() or leaf.dtype != example.dtype:
        got, want = f"{leaf.dtype} with {leaf.dim()} axes", f"{example.dtype} with {example.dim()}"
        raise UsageError(f"The data's {name!r} is {got}, the example's is {want}. Make them alike.")
    for axis, (size, first) in enumerate(zip(leaf.shape, example.shape, strict=True)):
        seen.setdefault((name, axis), [first]).append(size)


def _named(seen: dict[tuple[str, int], list[int]]) -> dict[str, dict[int, Dim]]:
    """Axes that vary, those that always vary together under one name; the leading one is called ``batch``."""
    groups: dict[tuple[int, ...], str] = {}
    dims: dict[str, dict[int, Dim]] = {}
    for (name, axis), sizes in seen.items():
        if len(set(sizes)) == 1:
            continue
        default = "batch" if axis == 0 and "batch" not in groups.values() else f"{name.replace('.', '_')}_{axis}"
        dims.setdefault(name, {})[axis] = Dim(groups.setdefault(tuple(sizes), default))
    return dims


def _stand_ins(candidate: Candidate) -> tuple[Batch, ...]:
    """The example, and copies whose values are drawn from the example's own, as far as the model accepts them."""
    generator = torch.Generator().manual_seed(0)
    structure = candidate.signature.input_structure
    batches = [Batch(_inputs(structure, candidate.leaves))]
    for _ in range(RESAMPLED):
        leaves = [_resample(leaf, generator) for leaf in candidate.leaves]
        try:
            call_model(candidate.model, structure, leaves)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            break  # this model wants inputs of a form that resampling destroys; the example itself remains
        batches.append(Batch(_inputs(structure, leaves)))
    return tuple(batches)


def fresh(subject: Subject, seed: int = 1) -> Candidate:
    """The candidate with inputs of the same shapes that the search has not seen: from the test data, else resampled."""
    candidate = subject.candidate
    unseen = subject.splits.test if subject.splits.test is not subject.splits.selection else ()
    found = next((leaves for batch in unseen if (leaves := _like(candidate, batch)) is not None), None)
    generator = torch.Generator().manual_seed(seed)
    leaves = found if found is not None else [_resample(leaf, generator) for leaf in candidate.leaves]
    try:
        call_model(candidate.model, candidate.signature.input_structure, leaves)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return candidate
    args, kwargs = unflatten(candidate.signature.input_structure, leaves)
    return dataclasses.replace(candidate, args=args, kwargs=kwargs)


def _like(candidate: Candidate, batch: Batch) -> list[torch.Tensor] | None:
    """The first rows of ``batch`` in the shapes of the example; ``None`` if they cannot be cut from it."""
    args, kwargs = batch.call
    try:
        leaves = [leaf.clone() for leaf in candidate.signature.bind(args, kwargs)]
    except UsageError:
        return None
    for i, (leaf, example) in enumerate(zip(leaves, candidate.leaves, strict=True)):
        if leaf.dim() and example.dim() and leaf.shape[0] > example.shape[0]:
            leaves[i] = leaf[: example.shape[0]]
    same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(leaves, candidate.leaves, strict=True))
    return leaves if same else None


def _inputs(structure: Any, leaves: Sequence[torch.Tensor]) -> Any:
    args, kwargs = unflatten(structure, leaves)
    if args and kwargs:
        raise InputError("Example inputs that mix positional and keyword arguments need calibration or evaluation data.")
    return kwargs or args


def _resample(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = leaf.flatten()
    if values.numel() == 0:
        return leaf
    return values[torch.randint(values.numel(), (values.numel(),), generator=generator)].reshape(leaf.shape)
