"""Examples for passes that train: from ``Workload.training``, else unlabelled inputs; none of the selection or test data."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from trimtab._internal.text import of_type
from trimtab._internal.user_code import user_code
from trimtab.core.signature import Signature
from trimtab.core.training_examples import TrainingExamples
from trimtab.core.workload import Training, Workload, as_call
from trimtab.data.batches import Batch, arrays_to_tensors, count, divide, rows_of
from trimtab.data.leakage import digest, digests
from trimtab.data.splits import Splits
from trimtab.errors import InputError, UsageError
from trimtab.tensors.structure import leaves_of, tensors_of

MAX_EXAMPLES, MAX_MB = 25_600, 1024.0
"""Most examples, and megabytes of inputs, that are read: 200 updates see 12,800 examples."""
HELD_OUT = 0.1
"""Share of the examples that is held out to choose the update that is kept."""
MIN_EXAMPLES = 16
"""Fewest examples to train on."""
FEW_EXAMPLES = 500
"""Examples below which a note warns: a digits network recovered to 0.94 of the images with 256 inputs, and to 0.98 with 800."""
MAX_OVERLAP = 0.5
"""Share of the training data found in the selection or test data from which on it is refused."""


def training_examples(workload: Workload, splits: Splits, signature: Signature) -> tuple[TrainingExamples | None, list[str]]:
    """The examples to train on, and notes about them; ``None`` if there are too few.

    Raises:
        UsageError: the batches are not what the model takes, or at least half of the examples are also selection or test data.
        WorkloadError: the loader raised.
    """
    notes: list[str] = []
    if workload.training is not None:
        source, loss = "training data", workload.training.loss
        batches = _read_batches(workload.training, workload.seed, signature, notes)
    else:
        source, loss, batches = "calibration inputs", None, list(splits.calibration)
    batches = _without_evaluation_data(batches, splits, source, notes)
    generator = torch.Generator().manual_seed(workload.seed)
    held_out, kept = divide(batches, HELD_OUT, generator, whole=False) if count(batches) >= MIN_EXAMPLES else ([], batches)
    if (found := count(kept)) < MIN_EXAMPLES:
        notes.append(
            f"Nothing can be trained on: there are {found} examples in the {source}. Give some thousands of inputs, with "
            "labels or without: Workload(training=Training(data=...))."
        )
        return None, notes
    if workload.training is None:
        notes.append(
            f"No training data was given: smaller networks are trained on {found} of the calibration inputs, without labels. "
            f"{_advice(found)}".rstrip()
        )
    elif found < FEW_EXAMPLES:
        notes.append(f"The training data holds {found} examples. {_advice(found)}")
    pairs, rest = (tuple((_as_call(batch.inputs, signature), batch.target) for batch in part) for part in (kept, held_out))
    return (
        TrainingExamples(
            batches=pairs, held_out=rest, loss=loss, examples=found, source=source, digest=_digest_of([*pairs, *rest])
        ),
        notes,
    )


def _advice(found: int) -> str:
    if found >= FEW_EXAMPLES:
        return ""
    return "So few seldom suffice: give Workload(training=Training(data=...)) more different inputs, which need no labels."


def _read_batches(training: Training, seed: int, signature: Signature, notes: list[str]) -> list[Batch]:
    batches: list[Batch] = []
    size = 0.0
    what = "The training data could not be read"
    with user_code(what, "Go through it yourself once."), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # a loader that shuffles gives the same order in every process
        data = training.data
        if callable(data) and not isinstance(data, (Dataset, Iterable)):
            data = data()
        for item in data:
            batches.append(_batch(arrays_to_tensors(item), signature, len(batches)))
            size += sum(tensor.nbytes for tensor in tensors_of(batches[-1].inputs)) / 1e6
            if (found := count(batches)) >= MAX_EXAMPLES or size >= MAX_MB:
                notes.append(f"The first {found} examples of the training data are used.")
                break
    if not batches:
        raise UsageError("The training data is empty. It must yield batches of inputs, with or without targets.")
    return batches


def _batch(item: Any, signature: Signature, number: int) -> Batch:
    inputs, target = item, None
    if isinstance(item, (tuple, list)) and len(item) == 2 and _is_call(item[0], signature):
        inputs, target = item
    elif isinstance(item, Mapping):  # as tokenizers and transformers' collators make them, with labels among the inputs
        inputs = {name: value for name, value in item.items() if name in signature.parameters}
    if not _is_call(inputs, signature):
        raise UsageError(
            f"Batch {number} of the training data is {of_type(item)}, and neither it nor its first half is what the model is "
            f"called with: {signature.describe()}. Give batches of (inputs, targets), or of inputs."
        )
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs
    return Batch(inputs, target, rows_of(inputs, target))


def _is_call(inputs: Any, signature: Signature) -> bool:
    """Whether the model can be called with ``inputs``, apart from their sizes."""
    try:
        leaves = list(signature.bind(*as_call(inputs)))
    except (InputError, UsageError):
        return False
    if len(leaves) != len(signature.inputs) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    pairs = zip(leaves, signature.inputs, strict=True)
    return all(leaf.dim() == len(spec.shape) and leaf.dtype == getattr(torch, spec.dtype) for leaf, spec in pairs)


def _as_call(inputs: Any, signature: Signature) -> Any:
    """``inputs`` as a tuple of positional or a dict of keyword arguments."""
    args, kwargs = as_call(inputs)
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs} if kwargs else args


def _without_evaluation_data(batches: Sequence[Batch], splits: Splits, source: str, notes: list[str]) -> list[Batch]:
    """``batches`` without examples of the selection and test data."""
    judging = {*digests(splits.selection), *digests(splits.test)} - {None}
    total, kept = count(batches), list[Batch]()
    for batch in batches:
        fresh = torch.tensor([each not in judging for each in digests([batch])], dtype=torch.bool)
        if fresh.all():
            kept.append(batch)
        elif len(fresh) == batch.rows and fresh.any():
            kept.append(batch.take(fresh.nonzero().flatten()))
    if not (both := total - count(kept)):
        return kept
    if both >= MAX_OVERLAP * total:
        raise UsageError(
            f"{both} of the {total} examples of the {source} are also in the selection or test data, so that a network would "
            "be judged by what it was trained on. Give others: Workload(training=Training(data=...))."
        )
    notes.append(f"{both} of the {total} examples of the {source} are also in the selection or test data: they are left out.")
    return kept


def _digest_of(pairs: Sequence[tuple[Any, Any]]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for pair in pairs:
        leaves = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves_of(pair)]
        found.update(digest(leaves) or b"unknown")
    return found.hexdigest()


def cached_only(examples: TrainingExamples | None) -> TrainingExamples | None:
    """``examples`` for a process in which nothing is trained."""
    return None if examples is None else dataclasses.replace(examples, cached_only=True)
