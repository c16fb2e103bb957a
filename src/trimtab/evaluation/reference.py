"""The reference: outputs and scores of the baseline, which every recipe is compared with."""

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

from trimtab._internal.serialization import from_json, write_json
from trimtab._internal.user_code import BY_HAND, user_code
from trimtab.core.measurement import Drop
from trimtab.core.workload import Evaluation
from trimtab.data.batches import Batch, arrays_to_tensors
from trimtab.data.joining import defensive_copy, example_counts, joined
from trimtab.data.scores import number, numbers, shown
from trimtab.errors import UsageError, WorkloadError
from trimtab.measure.stats import SEED, UNUSABLE, bootstrap_drop, paired_drop, refuse_stateful
from trimtab.measure.structures import structure_difference
from trimtab.tensors.comparison import is_discrete
from trimtab.tensors.structure import Structure, classes, cloned, flatten, in_plain_containers, names, unflatten

FEW_RESAMPLES = 100
"""Resamples if only the spread of a metric is needed, and no interval."""
SIDES = ("outputs", "targets")
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one set of outputs. ``each`` holds per-example scores; empty for a whole-set metric."""

    value: float
    n: int
    each: tuple[float, ...] = ()

    def is_share(self, higher_is_better: bool) -> bool:
        """Whether a drop reads best in percent: scores are right or wrong, or between 0 and 1 with more being better."""
        found = self.each or (self.value,)
        if higher_is_better:
            return min(found) >= 0 and max(found) <= 1
        return 1.0 in self.each and set(found) <= {0.0, 1.0}  # an error of 0 alone may be one in pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Outputs of the model as written, a flat list of tensors and its structure per batch, and their scores."""

    schema: ClassVar[int] = 1

    outputs: list[list[torch.Tensor]]
    structures: list[Structure]
    """One per batch, because numbers in them may depend on its size."""
    scores: Scores | None = None

    def nested(self) -> list[Any]:
        """The outputs in the model's own structure."""
        return [unflatten(structure, leaves) for structure, leaves in zip(self.structures, self.outputs, strict=True)]

    def save(self, folder: pathlib.Path) -> None:
        """Write the reference into ``folder``, from which the trials' workers read it."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = {f"{i}.{j}": t.contiguous().clone() for i, leaves in enumerate(self.outputs) for j, t in enumerate(leaves)}
        # copies, because outputs may share memory, which the format refuses
        save_file(flat, folder / "outputs.safetensors")
        kinds = {structure: number for number, structure in enumerate(dict.fromkeys(self.structures))}
        which = [kinds[structure] for structure in self.structures]
        facts = {"structures": list(kinds), "which": which, "scores": self.scores}
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
        return cls(outputs=outputs, structures=structures, scores=scores)


def reference_of(call: Callable[..., Any], batches: Sequence[Batch], evaluation: Evaluation | None) -> Reference:
    """Run ``call`` over ``batches`` and score the outputs.

    Raises:
        WorkloadError: outputs hold NaN or differ between two calls, or the score is not usable, or works only with the
            model's own output classes; names the place.
        UsageError: the evaluation names outputs that do not exist.
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
    kept = [[leaf.clone() for leaf in leaves] for leaves, _ in flat]  # a score may change its arguments in place
    structures = [structure for _, structure in flat]
    _check_outputs(kept, structures[0], *flatten(again[0], "the output"))
    if evaluation is not None and evaluation.outputs is not None:
        _check_names(evaluation.outputs, kept, structures)
    try:
        scores = None if evaluation is None else score(evaluation, nested, batches)
    except WorkloadError as error:
        if lost := _lost_classes(error, call, batches, evaluation):
            raise lost from error
        raise
    found = Reference(outputs=kept, structures=structures, scores=scores)
    if evaluation is not None and evaluation.metric is not None:
        _refuse_stateful_metric(evaluation, found, batches)
    elif evaluation is not None and all(map(torch.equal, flatten(again, "the output")[0], kept[0])):
        _refuse_stateful_score(evaluation, found, again, batches)
    return found


def _check_names(stated: Sequence[str], outputs: Sequence[Sequence[torch.Tensor]], structures: Sequence[Structure]) -> None:
    """Refuse an evaluation that names an output that does not exist, or one without an error, such as class numbers."""
    known = dict[str, None]()
    for leaves, structure in zip(outputs, structures, strict=True):
        every = zip(names(structure, "output"), leaves, strict=True)
        known |= dict.fromkeys(name for name, leaf in every if not is_discrete(leaf.dtype))
    if unknown := [name for name in stated if known.keys().isdisjoint((name, f"output.{name}"))]:
        raise UsageError(
            f"Evaluation outputs names {unknown[0]!r}, which is no floating-point output of the model. Those are: "
            f"{', '.join(repr(name.removeprefix('output.')) for name in known) or 'none'}."
        )


def predict(call: Callable[..., Any], batches: Sequence[Batch], evaluation: Evaluation | None) -> list[Any]:
    """The outputs of ``call`` for every batch, through the evaluation's own ``run`` if it has one.

    Inputs and outputs are copied: a model may write to its inputs, and may return memory that its next call overwrites.
    Outputs have the form that every runtime returns, so that the baseline is scored in the same way as all recipes.
    """

    def copied_call(*args: Any, **kwargs: Any) -> Any:
        return cloned(in_plain_containers(call(*args, **kwargs)))

    return _predicted(copied_call, batches, evaluation)


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
    """The result of ``run``, with arrays converted to tensors, as in targets.

    Raises:
        UsageError: it holds something that cannot be compared.
    """
    for value in (made, arrays_to_tensors(made)):
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
    """The explanation of ``error`` if the evaluation works only with the classes of the model's own output."""
    met: dict[str, tuple[str, ...]] = {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        met.update(classes(flatten(output, "the output")[1]))
        return output

    if evaluation is None:
        return None
    try:
        with user_code("The model failed on the data"):
            _scored(evaluation, _predicted(watched, batches, evaluation), batches)
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
    """Score ``outputs`` against the batches' targets.

    Raises:
        WorkloadError: the score or metric raised, or returned something that is not numbers.
    """
    if evaluation.metric is not None:  # the reference is read from a file, without classes
        outputs = [in_plain_containers(output) for output in outputs]
    return _scored(evaluation, outputs, batches)


def _scored(evaluation: Evaluation, outputs: Sequence[Any], batches: Sequence[Batch]) -> Scores:
    if evaluation.metric is not None:
        counts, targets = _counts(outputs, batches), [batch.target for batch in batches]
        whole = joined(outputs, counts)(None), joined(targets, counts)(None)
        fix = "Call it yourself with outputs and targets of several batches, joined."
        with user_code("Evaluation metric raised", fix, dict(zip(SIDES, whole, strict=True))):
            value = evaluation.metric(*whole)
        return Scores(value=number(value, "metric"), n=_examples(counts, batches))
    each: list[float] = []
    assert evaluation.score is not None
    for output, batch in zip(outputs, batches, strict=True):
        fix = "Call it yourself with the model's output for a batch, and its targets."
        with user_code("Evaluation score raised", fix, dict(zip(SIDES, (output, batch.target), strict=True))):
            found = numbers(evaluation.score(output, defensive_copy(batch.target)), batch.rows)
        # scores within one example are not independent
        each += [float(np.mean(found))] if batch.single and found and len(found) != batch.examples else found
    return Scores(value=float(np.mean(each)), n=len(each), each=tuple(each))


def drop(
    evaluation: Evaluation,
    reference: Reference,
    scores: Scores,
    outputs: Sequence[Any],
    batches: Sequence[Batch],
    limit: float | None,
    *,
    resamples: int = 2000,
) -> Drop:
    """The drop of the score against ``reference``, with bounds: paired per example, or bootstrapped for a whole-set metric."""
    assert reference.scores is not None
    better = evaluation.higher_is_better
    share = reference.scores.is_share(better)
    if evaluation.metric is None:
        found = paired_drop(reference.scores.each, scores.each, limit=limit, higher_is_better=better)
        return dataclasses.replace(found, share=share)
    metric, nested = evaluation.metric, reference.nested()
    outputs, counts = [in_plain_containers(output) for output in outputs], _counts(nested, batches)
    sides, targets = (joined(nested, counts), joined(outputs, counts)), joined([batch.target for batch in batches], counts)
    at = _rows_of(counts, batches)

    def metric_of(indices: Indices, which: int) -> float:
        index = at(indices)
        return float(metric(sides[which](index), targets(index)))

    n = reference.scores.n
    others = targets(at(np.random.default_rng(SEED).permutation(n)))
    failed = _metric_of_failure(metric, sides[0](None), others)
    found = bootstrap_drop(metric_of, n, limit=limit, higher_is_better=better, failed=failed, resamples=resamples)
    return dataclasses.replace(found, share=share)


def least_drop(evaluation: Evaluation, reference: Reference, batches: Sequence[Batch]) -> Drop | None:
    """The drop of the reference's own outputs. Its upper bound is the smallest drop that this data can prove."""
    if reference.scores is None:
        return None
    return drop(evaluation, reference, reference.scores, reference.nested(), batches, None, resamples=FEW_RESAMPLES)


def _refuse_stateful_metric(evaluation: Evaluation, found: Reference, batches: Sequence[Batch]) -> None:
    """Refuse a metric that keeps state between calls, in which other examples were scored."""
    assert evaluation.metric is not None
    assert found.scores is not None
    nested, first = found.nested(), found.scores.value
    counts = _counts(nested, batches)
    backwards = _rows_of(counts, batches)(np.arange(found.scores.n)[::-1].copy())
    others = joined([batch.target for batch in batches], counts)(backwards)
    _metric_of_failure(evaluation.metric, joined(nested, counts)(None), others)
    refuse_stateful(first, score(evaluation, nested, batches).value, abs(first) or 1.0)


def _refuse_stateful_score(evaluation: Evaluation, found: Reference, outputs: Sequence[Any], batches: Sequence[Batch]) -> None:
    """Refuse a score that is random or keeps state between batches: paired differences would be meaningless.

    ``outputs`` are those of the first batch, from a second call.
    """
    assert found.scores is not None
    again = score(evaluation, outputs, batches[:1]).each
    first = found.scores.each[: len(again)]
    most = max(map(abs, first), default=0.0)
    if changed := next((pair for pair in zip(first, again, strict=True) if abs(pair[0] - pair[1]) > 1e-3 * most), None):
        raise WorkloadError(
            f"Evaluation score gives {changed[0]:.6g} and then {changed[1]:.6g} for the same output and target. Leave out what "
            "is random in it, and have it keep nothing from call to call."
        )


def _metric_of_failure(metric: Callable[[Any, Any], float], outputs: Any, others: Any) -> float | None:
    """The metric of outputs that belong to other examples; ``None`` if it raises."""
    try:
        found = float(metric(outputs, others))
    except UNUSABLE:
        return None
    return found if math.isfinite(found) else None


def _rows_of(counts: Sequence[int], batches: Sequence[Batch]) -> Callable[[Indices], torch.Tensor]:
    """A function from indices of examples to rows of the joined batches."""
    if not _single(batches):
        return torch.as_tensor
    items = torch.split(torch.arange(sum(counts)), list(counts))
    return lambda indices: torch.cat([items[i] for i in indices])


def _examples(counts: Sequence[int], batches: Sequence[Batch]) -> int:
    """The number of independent examples: the parts of batches, unless a batch is one example."""
    return len(batches) if _single(batches) else sum(counts)


def _single(batches: Sequence[Batch]) -> bool:
    return any(batch.single for batch in batches)


def _counts(outputs: Sequence[Any], batches: Sequence[Batch]) -> list[int]:
    return example_counts(outputs, [batch.target for batch in batches], [batch.rows for batch in batches])


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
    if changed := structure_difference(structure, structured, False, "Asked again, the output"):
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
