"""The prepared workload on disk: the dry run writes it once, and every later process of the study reads it.

Two files: the model with its example inputs, which a process reads into memory of its own because their pages are timed, and
the data, which is mapped into memory. Both are pickles that trimtab wrote a moment before, in torch's zip format: targets may
be any object, and a model is one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import cloudpickle
import torch
from torch import nn

from trimtab._internal.files import out_of_space
from trimtab._internal.serialization import write_json
from trimtab._internal.text import error_text, summary_line
from trimtab.core.candidate import MODEL_ERRORS, Candidate, call_model
from trimtab.core.workload import Workload
from trimtab.data.batches import Batch
from trimtab.data.splits import Splits
from trimtab.evaluation import reproducibility
from trimtab.evaluation.prepared_workload import Subject
from trimtab.tensors.structure import flatten, map_tensors, tensors_of
from trimtab.tensors.weights import weight_bytes

MODEL, DATA, FACTS = "model.pt", "data.pt", "materialized.json"
MOST_OF_DISK = 0.5
"""Maximum share of the free disk space that the model or the data may take."""
LEAST_NOTED_S = 0.5
"""Seconds of reading from which on a note states them."""
CLOSE = 1e-3
"""Relative and absolute tolerance between outputs of the model and of its copy from disk, whose weights are bit-identical."""


def materialize(subject: Subject, folder: pathlib.Path, reading_s: float = 0.0) -> list[str]:
    """Write the model and the data of ``subject`` into ``folder``. Returns a note for each that cannot be written.

    A process that lacks the model builds it, and a process that lacks the data reads it and builds the model, which took the
    dry run ``reading_s`` seconds.

    Raises:
        OSError: the disk is full.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reasons = {"model": _write_model(subject, folder / MODEL), "data": _write_data(subject, folder / DATA)}
    write_json(folder / FACTS, {"notes": list(subject.notes), **{name: reason is None for name, reason in reasons.items()}})
    each_s = f" ({reading_s:.0f} s each time)" if reading_s >= LEAST_NOTED_S else ""
    rereads = {"model": "builds the model again", "data": f"reads the data again{each_s}"}
    return [f"Every process of the study {rereads[name]}: {why}." for name, why in reasons.items() if why is not None]


def materialized(workload: Workload, folder: pathlib.Path, scratch: pathlib.Path | None = None) -> Subject | None:
    """The prepared ``workload`` that :func:`materialize` wrote into ``folder``; ``None`` if its data is not there."""
    if not (folder / FACTS).exists():
        return None
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if not facts["data"]:
        return None
    splits, candidate = _read(folder / DATA, mapped=True)
    if facts["model"]:
        model, args, kwargs = _read(folder / MODEL, mapped=False)
        candidate = dataclasses.replace(candidate, args=args, kwargs=kwargs)
    else:
        model = workload.build_model()
        model.eval()
    teacher = None if candidate.training is None else model
    candidate = dataclasses.replace(candidate, model=model, teacher=teacher, scratch=scratch)
    return Subject(workload=workload, candidate=candidate, splits=splits, notes=tuple(facts["notes"]))


def _write_model(subject: Subject, path: pathlib.Path) -> str | None:
    """Write the model and read it again. Returns why that failed; ``None`` if it did not."""
    candidate = subject.candidate
    if (reason := _too_large(weight_bytes(candidate.model), path)) is not None:
        return reason
    try:
        kept = (candidate.model, *_compact((candidate.args, dict(candidate.kwargs))))
        torch.save(kept, path, pickle_module=cloudpickle)
        model = _read(path, mapped=False)[0]
    except MODEL_ERRORS as error:
        if out_of_space(error):
            raise
        return f"it cannot be pickled ({_cause(error)})"
    return _difference(candidate, model)


def _difference(candidate: Candidate, model: nn.Module) -> str | None:
    """How ``model``, read from disk, differs from the candidate's; ``None`` if it does not."""
    if reproducibility.weights_of(model) != reproducibility.weights_of(candidate.model):
        return "its copy from disk has other weights"
    try:
        found = [_outputs(each, candidate) for each in (candidate.model, model)]
    except MODEL_ERRORS as error:
        return f"its copy from disk fails ({_cause(error)})"
    alike = all(
        a.shape == b.shape and torch.allclose(a, b, rtol=CLOSE, atol=CLOSE, equal_nan=True) for a, b in zip(*found, strict=True)
    )
    return None if alike else "its copy from disk gives other outputs"


def _outputs(model: nn.Module, candidate: Candidate) -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same draws for both models
        return flatten(call_model(model, candidate.signature.input_structure, candidate.leaves), "output")[0]


def _write_data(subject: Subject, path: pathlib.Path) -> str | None:
    """Write the data. Returns why that failed; ``None`` if it did not."""
    candidate = dataclasses.replace(subject.candidate, model=nn.Identity(), teacher=None, scratch=None)
    splits, calls = _compact_splits(subject.splits), _compact(list(candidate.calibration))
    batches = {id(batch): batch for part in (splits.calibration, splits.selection, splits.test) for batch in part}
    pairs = [(batch.inputs, batch.target) for batch in batches.values()]
    if (training := candidate.training) is not None:
        pairs += [*training.batches, *training.held_out]
    size = sum(tensor.nbytes for tensor in tensors_of([calls, pairs]))
    if (reason := _too_large(size, path)) is not None:
        return reason
    try:
        torch.save((splits, dataclasses.replace(candidate, calibration=tuple(calls))), path, pickle_module=cloudpickle)
    except MODEL_ERRORS as error:
        if out_of_space(error):
            raise
        return f"it cannot be pickled ({_cause(error)})"
    return None


def _too_large(size: int, path: pathlib.Path) -> str | None:
    """Why ``size`` bytes are not written to ``path``; ``None`` if they are few enough."""
    free = shutil.disk_usage(path.parent).free
    if size <= MOST_OF_DISK * free:
        return None
    fewer = ", or read fewer examples, Evaluation(max_examples=...)" if path.name == DATA else ""
    return (
        f"it has {size / 1e6:.0f} MB, more than half of the {free / 1e6:.0f} MB that are free in {path.parent}. Use a run "
        f"folder on a larger disk, --out FOLDER (in Python, out=...){fewer}"
    )


def _compact_splits(splits: Splits) -> Splits:
    calibration, selection = (tuple(map(_compact_batch, part)) for part in (splits.calibration, splits.selection))
    # that both are one object says that there is no test data
    test = selection if splits.test is splits.selection else tuple(map(_compact_batch, splits.test))
    return dataclasses.replace(splits, calibration=calibration, selection=selection, test=test)


def _compact_batch(batch: Batch) -> Batch:
    return dataclasses.replace(batch, inputs=_compact(batch.inputs), target=_compact(batch.target))


def _compact(value: Any) -> Any:
    """``value`` with copies of small views of large tensors, because a pickle holds the whole storage of a view."""
    return map_tensors(value, lambda tensor: tensor.clone() if _is_small_view(tensor) else tensor)


def _is_small_view(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.untyped_storage().nbytes() > 2 * tensor.nbytes


def _read(path: pathlib.Path, *, mapped: bool) -> Any:
    # a private mapping: a process that writes to its data changes neither the file nor another process
    return torch.load(os.fspath(path), weights_only=False, mmap=mapped)


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {summary_line(error_text(error))}"
