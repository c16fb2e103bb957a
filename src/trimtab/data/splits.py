"""Split a workload's data into calibration, selection and test data, which have no example in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from trimtab._internal.text import counted
from trimtab.core.dynamic_dims import BATCHES
from trimtab.core.workload import Workload
from trimtab.data.batch_independence import Judge, Verdict
from trimtab.data.batches import Batch, count, divide, pieces
from trimtab.data.readers import MOST_CALIBRATION, Data, labelled, unlabelled
from trimtab.errors import UsageError
from trimtab.tensors.structure import tensors_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """Calibration data for quantizers, selection data for the search, test data for the winner; notes about the split."""

    calibration: tuple[Batch, ...] = ()
    selection: tuple[Batch, ...] = ()
    test: tuple[Batch, ...] = ()
    labelled: bool = False
    notes: tuple[str, ...] = ()

    def examples(self) -> dict[str, int]:
        """Examples in each part."""
        parts = {"calibration": self.calibration, "selection": self.selection, "test": self.test}
        return {name: count(batches) for name, batches in parts.items()}


def split(workload: Workload, rows: int | None = None, judge: Judge | None = None) -> Splits:
    """Read and split the data of ``workload``, deterministically.

    With ``rows``, the only batch size that the model takes, batches stay whole and those of another size are left out.
    Otherwise batches are cut to the largest size that the workload states. ``judge`` tells whether rows of a batch are
    examples; without a judge they are.

    Raises:
        UsageError: the data is not made of ``(inputs, target)`` pairs, is empty, has NaN, or has no batch that the model takes.
        WorkloadError: the dataset raised.
    """
    return _Splitting(workload, rows, judge).splits()


class _Splitting:
    def __init__(self, workload: Workload, rows: int | None, judge: Judge | None) -> None:
        self.workload, self.rows, self.judge = workload, rows, judge
        self.whole, self.most = rows is not None, rows or _most_rows(workload)
        self.generator = torch.Generator().manual_seed(workload.seed)
        self.notes: list[str] = []
        self.verdict: Verdict | None = None

    def splits(self) -> Splits:
        workload, evaluation, notes = self.workload, self.workload.evaluation, self.notes
        judge = self.judge if self.rows is None else None  # a model of a fixed batch size takes no fewer rows
        read = unlabelled(workload, self.rows or _at_most(32, self.most), self.generator, notes, judge)
        calibration = self._fitting(read, "calibration")
        if evaluation is None:
            return self._without_labels(calibration)
        size = self.rows or _at_most(evaluation.batch_size, self.most)
        data = self._fitting(labelled(evaluation.data, evaluation, self.generator, size, notes, judge), "evaluation")
        given = count(data)
        if not calibration:
            share = min(0.2, MOST_CALIBRATION / max(count(data), 1))
            first, data = self._divide(data, share)
            calibration = [Batch(batch.inputs, None, batch.rows) for batch in first]
            notes.append(
                f"No calibration data was given: {_count_text(first)} with labels were set aside for it and are not scored."
            )
        if evaluation.test is not None:
            selection, read = data, labelled(evaluation.test, evaluation, self.generator, size, notes, judge)
            test = self._fitting(read, "test")
        else:
            selection, test = self._divide(data, 0.5)
            notes.append(
                f"One labelled set was given: {_count_text(selection)} select and {count(test)} test, so each verdict "
                "rests on half of them. Give Evaluation(test=...) to use all."
            )
        if not selection or not test:
            raise self._too_few(given)
        parts = {"calibration": tuple(calibration), "selection": tuple(selection), "test": tuple(test)}
        return Splits(**parts, labelled=True, notes=tuple(notes))

    def _fitting(self, data: Data, what: str) -> list[Batch]:
        """The batches of the model's fixed size; without a fixed size, all batches, cut to the stated maximum."""
        batches, rows, notes = self._apply_verdict(data, what), self.rows, self.notes
        if rows is None:
            cut = self.verdict is None or self.verdict.kind == "own" or data.stacked
            return [piece for batch in batches for piece in pieces(batch, _at_most(batch.rows, self.most if cut else None))]
        kept = [batch for batch in batches if batch.rows in (0, rows)]
        if batches and not kept:
            found = ", ".join(map(str, sorted({batch.rows for batch in batches})))
            raise UsageError(
                f"The model takes {rows} examples at a time, but the batches of the {what} data have {found}. Give batches of "
                f"{rows}, or let the batch be dynamic."
            )
        if left := count(batches) - count(kept):
            notes.append(
                f"{left} examples of the {what} data are left out: they do not fill a batch of {rows}, which is fixed."
            )
        return kept

    def _apply_verdict(self, data: Data, what: str) -> list[Batch]:
        """The batches of ``data``, with 0 rows if the judge finds that rows are no examples."""
        first = next((batch for batch in data.batches if batch.rows > 1), None)
        self.whole = self.rows is not None
        if self.judge is None or first is None or (self.whole and not data.stacked):
            return data.batches
        new, self.verdict = self.verdict is None, self.judge(first)
        if data.stacked:
            return self._check_stacked(data.batches, self.verdict, what, new=new)
        if self.verdict.kind == "own":
            return data.batches
        self.whole = True
        if new:
            self.notes.append(
                "Items of the data are never taken apart, because the model gives no row an answer of its own: "
                f"{self.verdict.reason}."
            )
        if self.verdict.independent:
            return data.batches
        given = ((batch, _stated_examples(self.workload, batch)) for batch in data.batches)
        return [dataclasses.replace(batch, rows=0, single=True, examples=found) for batch, found in given]

    def _check_stacked(self, batches: list[Batch], verdict: Verdict, what: str, *, new: bool) -> list[Batch]:
        """Batches that were collated from single examples; refused if the model depends on the order of rows."""
        if verdict.kind == "ordered":
            raise UsageError(
                f"The rows of the {what} data are no examples to this model: {verdict.reason}. Axis 0 of its inputs counts "
                "something else, such as time or points. Give items in the layout that the model takes, one call each: a list "
                "of them, or a DataLoader with your own collate_fn."
            )
        if verdict.kind == "shared" and new:
            self.notes.append(f"The model's answers depend on which examples are in one call: {verdict.reason}.")
        return batches

    def _divide(self, batches: Sequence[Batch], share: float) -> tuple[list[Batch], list[Batch]]:
        return divide(batches, share, self.generator, whole=self.whole)

    def _without_labels(self, calibration: list[Batch]) -> Splits:
        if not calibration:
            note = "No data was given: outputs are compared on the example inputs and on resampled copies of them only."
            return Splits(notes=(note,))
        kept, rest = self._divide(calibration, 0.5)
        selection, test = self._divide(rest, 0.5)
        note = (
            "No labels were given: lossy recipes are judged by how far their outputs are from the original's, not by a score."
        )
        return Splits(calibration=tuple(kept), selection=tuple(selection), test=tuple(test), notes=(note, *self.notes))

    def _too_few(self, given: int) -> UsageError:
        least = "a dozen" if self.rows is None else f"three batches of {self.rows}, better a dozen"
        if self.rows is None and self.whole and self.verdict is not None:
            return UsageError(
                f"The evaluation data has {counted(given, 'item')}, too few to split, and none can be taken apart, because "
                "the model "
                f"gives no row an answer of its own: {self.verdict.reason}. Give at least {least}."
            )
        return UsageError(f"The evaluation data holds {counted(given, 'example')}, too few to split. Give at least {least}.")


def _most_rows(workload: Workload) -> int | None:
    """The largest batch size that the workload states for axis 0; ``None`` if it states none."""
    stated = (axes[0].max for axes in (workload.stated_dims or {}).values() if 0 in axes)
    return min((most for most in stated if most is not None), default=None)


def _stated_examples(workload: Workload, batch: Batch) -> int:
    """Examples along the axis that the workload names as the batch; 0 if it names none, or if sizes differ."""
    stated = (place for axes in (workload.stated_dims or {}).values() for place in axes.items())
    axes = {axis for axis, dim in stated if dim.name.lower() in BATCHES}
    sizes = {tensor.shape[axis] for axis in axes for tensor in tensors_of(batch.inputs) if tensor.dim() > axis}
    return sizes.pop() if len(sizes) == 1 else 0


def _at_most(size: int, most: int | None) -> int:
    return size if most is None else min(size, most)


def _count_text(batches: Sequence[Batch]) -> str:
    """``400 examples``, or ``22 items`` if batches must stay whole."""
    return f"{count(batches)} {'examples' if all(batch.rows for batch in batches) else 'items'}"
