"""What the model as written says on the data: the outputs and scores that every recipe is held against."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trimtab._batches import with_tensors
from trimtab._joined import example_counts, joined, spared
from trimtab._json import from_json, write_json
from trimtab._numbers import number, numbers, shown
from trimtab._ties import is_discrete
from trimtab._tree import Structure, classes, cloned, flatten, handed_on, unflatten
from trimtab._watched import unlooked
from trimtab.contracts import Executable
from trimtab.errors import CompileError, InputError, UsageError, WorkloadError
from trimtab.measure.stats import SEED, UNUSABLE, bootstrap_drop, paired_drop
from trimtab.measure.structures import unlike
from trimtab.measurement import Drop
from trimtab.signature import Dim, Signature, TensorSpec
from trimtab.splits import Batch
from trimtab.workload import BY_HAND, Evaluation, user_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The judgement of one set of outputs. ``each`` holds per-example scores, empty for a whole-set metric."""

    value: float
    n: int
    each: tuple[float, ...] = ()

    def is_share(self, higher_is_better: bool) -> bool:
        """Whether a drop reads best in percent: scores are right or wrong, or lie between 0 and 1 and more is better."""
        found = self.each or (self.value,)
        return set(found) <= {0.0, 1.0} or (higher_is_better and min(found) >= 0 and max(found) <= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Outputs of the model as written, a flat list of tensors and its structure per batch, and their scores."""

    schema: ClassVar[int] = 1

    outputs: list[list[torch.Tensor]]
    structures: list[Structure]
    """One per batch: numbers in them may follow its size."""
    scores: Scores | None = None
    unlooked: tuple[str, ...] = ()
    """The outputs, by name, that the score does not look at."""

    def nested(self) -> list[Any]:
        """The outputs in the model's own structure."""
        return [unflatten(structure, leaves) for structure, leaves in zip(self.structures, self.outputs, strict=True)]

    def save(self, folder: pathlib.Path) -> None:
        """Write it into ``folder``, for the workers of the trials to read."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = {f"{i}.{j}": t.contiguous().clone() for i, leaves in enumerate(self.outputs) for j, t in enumerate(leaves)}
        # copies, because outputs may share memory, which the format refuses
        save_file(flat, folder / "outputs.safetensors")
        kinds = {structure: number for number, structure in enumerate(dict.fromkeys(self.structures))}
        which = [kinds[structure] for structure in self.structures]
        facts = {"structures": list(kinds), "which": which, "scores": self.scores, "unlooked": self.unlooked}
        write_json(folder / "reference.json", facts)

    @classmethod
    def load(cls, folder: pathlib.Path) -> Reference:
        """Read what :meth:`save` wrote."""
        facts = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
        flat = load_file(folder / "outputs.safetensors")
        kinds = [from_json(Structure, structure) for structure in facts["structures"]]
        structures = [kinds[number] for number in facts["which"]]
        outputs = [[flat[f"{i}.{j}"] for j in range(structure.tensors)] for i, structure in enumerate(structures)]
        scores = None if facts["scores"] is None else from_json(Scores, facts["scores"])
        return cls(outputs=outputs, structures=structures, scores=scores, unlooked=tuple(facts["unlooked"]))


def refer(call: Callable[..., Any], batches: Sequence[Batch], evaluation: Evaluation | None) -> Reference:
    """Run ``call`` over ``batches`` and score what it says.

    Raises:
        WorkloadError: the outputs hold NaN, are not the same twice, or the score is not usable, or only with the model's own
            classes; says what and where.
    """
    try:
        with user_code("The model failed on the data", BY_HAND):
            nested = predict(call, batches, evaluation)
            again = predict(call, batches[:1], evaluation)
    except WorkloadError as error:
        if lost := _lost_classes(error, call, batches, evaluation):
            raise lost from error
        raise
    flat = [flatten(output, "the output") for output in nested]
    kept = [[leaf.clone() for leaf in leaves] for leaves, _ in flat]  # a score may work in place on what it is given
    structures = [structure for _, structure in flat]
    _check_outputs(kept, structures[0], *flatten(again[0], "the output"))
    try:
        scores = None if evaluation is None else score(evaluation, nested, batches)
    except WorkloadError as error:
        if lost := _lost_classes(error, call, batches, evaluation):
            raise lost from error
        raise
    found = Reference(outputs=kept, structures=structures, scores=scores)
    if evaluation is None or evaluation.run is not None:
        return found
    nested = found.nested()
    return dataclasses.replace(found, unlooked=unlooked(evaluation, nested, batches, _counts(nested, batches)))


def predict(call: Callable[..., Any], batches: Sequence[Batch], evaluation: Evaluation | None) -> list[Any]:
    """The outputs of ``call`` for every batch, through the evaluation's own ``run`` where it has one.

    A model may write to its inputs, and the batches serve again, so that it gets copies; it may give memory that its next call
    writes to, so that what it gives is copied. It is handed on as every runtime gives it, so that the model as written is
    judged by the same as all others.
    """

    def handed(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten(call(*args, **kwargs), "the output")
        return unflatten(structure, [leaf.clone() for leaf in leaves])

    return _predicted(handed, batches, evaluation)


def _predicted(call: Callable[..., Any], batches: Sequence[Batch], evaluation: Evaluation | None) -> list[Any]:
    run = evaluation.run if evaluation is not None else None
    outputs = []
    for batch in batches:
        if run is not None:
            outputs.append(_comparable(run(call, cloned(batch.inputs))))
            continue
        args, kwargs = cloned(batch.call)
        outputs.append(call(*args, **kwargs))
    return outputs


def _comparable(made: Any) -> Any:
    """What ``run`` made; with tensors where it holds arrays, as targets have them.

    Raises:
        UsageError: nothing could be held against it.
    """
    for value in (made, with_tensors(made)):
        with contextlib.suppress(UsageError):
            flatten(value, "the output")
            return value
    raise UsageError(
        f"Evaluation run returned {shown(made)}: return tensors, arrays, numbers, texts, or tuples, lists, dicts (their keys "
        "texts) and dataclasses of them, which can be held against what it makes of another form of the model."
    )


def _lost_classes(
    error: WorkloadError, call: Callable[..., Any], batches: Sequence[Batch], evaluation: Evaluation | None
) -> WorkloadError | None:
    """What explains ``error`` where the evaluation works with the classes of the model's own output, and only with these."""
    met: dict[str, tuple[str, ...]] = {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        met.update(classes(flatten(output, "the output")[1]))
        return output

    if evaluation is None:
        return None
    try:
        with user_code("The model failed on the data"):
            _judged(evaluation, _predicted(watched, batches, evaluation), batches)
    except (WorkloadError, UsageError):
        return None
    if not met:
        return None
    name, fields = next(iter(met.items()))
    return WorkloadError(
        f"The evaluation needs the methods of `{name}`, and no runtime gives those back, only its fields: {', '.join(fields)}. "
        f"Use these, in functions of your own. ({str(error).rstrip('.')}.)"
    )


def score(evaluation: Evaluation, outputs: Sequence[Any], batches: Sequence[Batch]) -> Scores:
    """Judge ``outputs`` against the batches' targets.

    Raises:
        WorkloadError: the score or metric raised, or returned something that is not numbers.
    """
    if evaluation.metric is not None:  # to which the reference comes from a file
        outputs = [handed_on(output) for output in outputs]
    return _judged(evaluation, outputs, batches)


def _judged(evaluation: Evaluation, outputs: Sequence[Any], batches: Sequence[Batch]) -> Scores:
    if evaluation.metric is not None:
        counts, targets = _counts(outputs, batches), [batch.target for batch in batches]
        whole = joined(outputs, counts)(None), joined(targets, counts)(None)
        with user_code("Evaluation metric raised", "Call it yourself with outputs and targets of several batches, joined."):
            value = evaluation.metric(*whole)
        return Scores(value=number(value, "metric"), n=_examples(counts, batches))
    each: list[float] = []
    assert evaluation.score is not None
    for output, batch in zip(outputs, batches, strict=True):
        with user_code("Evaluation score raised", "Call it yourself with the model's output for a batch, and its targets."):
            found = numbers(evaluation.score(output, spared(batch.target)), batch.rows)
        # those of what follows each other in one example are no evidence of their own
        each += [float(np.mean(found))] if batch.single and found and len(found) != batch.examples else found
    return Scores(value=float(np.mean(each)), n=len(each), each=tuple(each))


def drop(
    evaluation: Evaluation,
    reference: Reference,
    scores: Scores,
    outputs: Sequence[Any],
    batches: Sequence[Batch],
    limit: float | None,
) -> Drop:
    """How much score was lost against ``reference``, with bounds: paired per example, or resampled for a whole-set metric."""
    assert reference.scores is not None
    better = evaluation.higher_is_better
    share = reference.scores.is_share(better)
    if evaluation.metric is None:
        found = paired_drop(reference.scores.each, scores.each, limit=limit, higher_is_better=better)
        return dataclasses.replace(found, share=share)
    metric, nested = evaluation.metric, reference.nested()
    outputs, counts = [handed_on(output) for output in outputs], _counts(nested, batches)
    sides, targets = (joined(nested, counts), joined(outputs, counts)), joined([batch.target for batch in batches], counts)
    items = torch.split(torch.arange(sum(counts)), counts) if _single(batches) else None

    def at(indices: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.as_tensor(indices) if items is None else torch.cat([items[i] for i in indices])

    def metric_of(indices: np.ndarray[Any, np.dtype[np.int64]], which: int) -> float:
        index = at(indices)
        return float(metric(sides[which](index), targets(index)))

    n = reference.scores.n
    others = targets(at(np.random.default_rng(SEED).permutation(n)))
    failed = _of_failure(metric, sides[0](None), others)
    found = bootstrap_drop(metric_of, n, limit=limit, higher_is_better=better, failed=failed)
    return dataclasses.replace(found, share=share)


def _of_failure(metric: Callable[[Any, Any], float], outputs: Any, others: Any) -> float | None:
    """The metric of outputs that answer for other examples than theirs; ``None`` where it cannot judge these."""
    try:
        found = float(metric(outputs, others))
    except UNUSABLE:
        return None
    return found if math.isfinite(found) else None


def _examples(counts: Sequence[int], batches: Sequence[Batch]) -> int:
    """How many examples an interval can rest on: the parts that batches hold, unless a batch is one example itself."""
    return len(batches) if _single(batches) else sum(counts)


def _single(batches: Sequence[Batch]) -> bool:
    return any(batch.single for batch in batches)


def _counts(outputs: Sequence[Any], batches: Sequence[Batch]) -> list[int]:
    return example_counts(outputs, [batch.target for batch in batches], [batch.rows for batch in batches])


class Fitted:
    """An executable that takes any batch, by cutting and padding it to a size that the executable allows.

    A runtime may have frozen the batch to one size or need at least two rows, and a workload may state how many it has at most.
    ``full`` is the signature of the original model, which says which axis is the batch.
    """

    def __init__(self, executable: Executable, full: Signature) -> None:
        self._executable = executable
        self._full = full
        self._allowed = None if full.batch is None else _batch_of(executable.signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; raises ``InputError`` where another dimension than the batch does not fit."""
        if self._allowed is None or self._allowed == Dim(self._allowed.name):
            return self._executable(*args, **kwargs)
        try:
            leaves = self._full.bind(args, kwargs)
        except InputError:
            # eager takes more than the signature says, and the others say what is wrong
            return self._executable(*args, **kwargs)
        rows = self._rows(leaves)
        if not rows or rows in self._allowed:
            return self._executable(*args, **kwargs)
        most = self._allowed.max or self._allowed.holding(rows)
        sizes = [min(self._allowed.holding(rows - start), most) for start in range(0, rows, most)]
        parts = [self._part(leaves, number * most, size, rows) for number, size in enumerate(sizes)]
        pairs = zip(zip(*parts, strict=True), self._full.outputs, strict=True)
        return unflatten(self._full.output_structure, [self._join(pieces, spec, sizes, rows) for pieces, spec in pairs])

    def _rows(self, leaves: Sequence[Any]) -> int | None:
        """How many rows the inputs have; ``None`` where they do not agree, which is for the executable to refuse."""
        batched = [(leaf, spec) for leaf, spec in zip(leaves, self._full.inputs, strict=True) if self._full.batch in spec.shape]
        if any(not isinstance(leaf, torch.Tensor) or leaf.dim() != len(spec.shape) for leaf, spec in batched):
            return None
        found = {leaf.shape[spec.shape.index(str(self._full.batch))] for leaf, spec in batched}
        return found.pop() if len(found) == 1 else None

    def _part(self, leaves: Sequence[torch.Tensor], start: int, size: int, rows: int) -> Sequence[torch.Tensor]:
        """The outputs for ``size`` rows from ``start``; those after the last row are copies of it."""
        index, cut = torch.arange(start, start + size).clamp(max=rows - 1), []
        for leaf, spec in zip(leaves, self._full.inputs, strict=True):
            if self._full.batch in spec.shape:
                leaf = leaf.index_select(spec.shape.index(self._full.batch), index)
            cut.append(leaf)
        args, kwargs = unflatten(self._full.input_structure, cut)
        return flatten(self._executable(*args, **kwargs), "the output")[0]

    def _join(self, pieces: Sequence[torch.Tensor], spec: TensorSpec, sizes: Sequence[int], rows: int) -> torch.Tensor:
        """One output of all pieces, of ``sizes`` rows each, less what the rows behind the last one added to it.

        Where a size follows the rows in some other way, as batch times steps, every row must have added as much.
        """
        own = [axis for axis, size in enumerate(spec.shape) if size == self._full.batch]
        axes = own or [axis for axis, size in enumerate(spec.shape) if size == "?"]
        # an open size may follow another dimension
        others = not own and len(self._full.dims) > 1 and all(torch.equal(piece, pieces[0]) for piece in pieces)
        if not axes or others:
            return pieces[0]
        axis, padded = axes[0], sum(sizes) - rows
        each = pieces[0].shape[axis] // sizes[0]
        even = all(piece.shape[axis] == each * size for piece, size in zip(pieces, sizes, strict=True))
        if len(axes) > 1 or (padded and not even):
            raise CompileError(
                f"Its batch is fixed, and the output {spec} of several batches cannot be put together into that of one. Return "
                "it with one axis for the batch."
            )
        whole = torch.cat(list(pieces), dim=axis)
        return whole.narrow(axis, 0, whole.shape[axis] - each * padded)


def _batch_of(signature: Signature) -> Dim:
    """The sizes of the batch that ``signature`` allows, though it be only one."""
    lead = signature.inputs[0].shape[0]
    return Dim("batch", lead, lead) if isinstance(lead, int) else next(dim for dim in signature.dims if dim.name == lead)


def _check_outputs(
    outputs: list[list[torch.Tensor]], structure: Structure, again: list[torch.Tensor], structured: Structure
) -> None:
    for batch, leaves in enumerate(outputs):
        for position, leaf in enumerate(leaves):
            if not is_discrete(leaf.dtype) and torch.isnan(leaf).any():
                count = int(torch.isnan(leaf).sum())
                raise WorkloadError(
                    f"The model as written gives NaN: {count} of {leaf.numel()} values of output {position} on batch {batch}. "
                    "Mend the model or the data first; nothing can be held against NaN."
                )
    if [t.shape for t in again] != [t.shape for t in outputs[0]]:
        raise WorkloadError(
            f"The model gives outputs of {_shapes(outputs[0])} and then of {_shapes(again)} for the same input. A model whose "
            "shapes change from call to call cannot be compared with anything. Let them follow from the inputs alone."
        )
    if changed := unlike(structure, structured, False, "Asked again, the output"):
        raise WorkloadError(
            f"The model gives different values for the same input. {changed} Turn off what is random in it, or in the "
            "evaluation's run, and leave out what only measures time or counts calls."
        )
    for first, second in zip(outputs[0], again, strict=True):
        wide = torch.complex128 if first.is_complex() else torch.float64
        if not torch.allclose(first.to(wide), second.to(wide), rtol=1e-3, atol=1e-5, equal_nan=True):
            worst = float((first.to(wide) - second.to(wide)).abs().max())
            raise WorkloadError(
                f"The model gives different values for the same input (by up to {worst:.3g}). Turn off what is random in it, "
                "such as functional dropout without training=self.training, or what it keeps from call to call: make that an "
                "input and an output."
            )


def _shapes(leaves: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(leaf.shape)) for leaf in leaves)
