"""An executable of a bounded batch, called with any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.core.backend import Executable
from trimtab.core.signature import Dim, Signature, TensorSpec
from trimtab.errors import CompileError, InputError
from trimtab.tensors.structure import flatten, unflatten


class PaddedExecutable:
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
