"""Call an executable with a bounded batch size on batches of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.core.backend import Executable
from trimtab.core.signature import Dim, Signature, TensorSpec
from trimtab.errors import CompileError, InputError
from trimtab.tensors.structure import flatten, unflatten

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch


def piece_sizes(rows: int, allowed: Dim) -> list[int]:
    """The sizes of the batches that ``rows`` rows are computed in, all ``allowed``; the last one may need padding."""
    most = allowed.max or allowed.holding(rows)
    return [min(allowed.holding(rows - start), most) for start in range(0, rows, most)]


class PaddedExecutable:
    """Accepts any batch size: batches are split and padded to sizes that the executable supports.

    A runtime may have frozen the batch size or need at least two rows, and a workload may limit it. ``full`` is the signature
    of the original model, which names the batch axis.
    """

    def __init__(self, executable: Executable, full: Signature) -> None:
        self._executable = executable
        self._full = full
        self._allowed = None if full.batch is None else batch_of(executable.signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the executable. Raises ``InputError`` if a dimension other than the batch does not fit."""
        if self._allowed is None or self._allowed == Dim(self._allowed.name):
            return self._executable(*args, **kwargs)
        try:
            leaves = self._full.bind(args, kwargs)
        except InputError:
            # the executable raises the error, or accepts more than its signature, as eager does
            return self._executable(*args, **kwargs)
        rows = self._rows(leaves)
        if not rows or rows in self._allowed:
            return self._executable(*args, **kwargs)
        sizes = piece_sizes(rows, self._allowed)
        parts = [self._part(leaves, number * sizes[0], size, rows) for number, size in enumerate(sizes)]
        pairs = zip(zip(*parts, strict=True), self._full.outputs, strict=True)
        return unflatten(self._full.output_structure, [self._join(pieces, spec, sizes, rows) for pieces, spec in pairs])

    def _rows(self, leaves: Sequence[Any]) -> int | None:
        """The number of rows; ``None`` if the inputs disagree, in which case the executable raises the error."""
        batched = [(leaf, spec) for leaf, spec in zip(leaves, self._full.inputs, strict=True) if self._full.batch in spec.shape]
        if any(not isinstance(leaf, torch.Tensor) or leaf.dim() != len(spec.shape) for leaf, spec in batched):
            return None
        found = {leaf.shape[spec.shape.index(str(self._full.batch))] for leaf, spec in batched}
        return found.pop() if len(found) == 1 else None

    def _part(self, leaves: Sequence[torch.Tensor], start: int, size: int, rows: int) -> Sequence[torch.Tensor]:
        """The outputs for ``size`` rows from row ``start``. Rows beyond the last one repeat the last one."""
        index, cut = torch.arange(start, start + size).clamp(max=rows - 1), []
        for leaf, spec in zip(leaves, self._full.inputs, strict=True):
            if self._full.batch in spec.shape:
                leaf = leaf.index_select(spec.shape.index(self._full.batch), index)
            cut.append(leaf)
        args, kwargs = unflatten(self._full.input_structure, cut)
        return flatten(self._executable(*args, **kwargs), "the output")[0]

    def _join(self, pieces: Sequence[torch.Tensor], spec: TensorSpec, sizes: Sequence[int], rows: int) -> torch.Tensor:
        """Concatenate the pieces of one output, whose inputs had ``sizes`` rows, and cut off the padding.

        If an output's size is not the batch size but depends on it, such as batch * steps, it must be proportional to the rows.
        """
        own = [axis for axis, size in enumerate(spec.shape) if size == self._full.batch]
        axes = own or [axis for axis, size in enumerate(spec.shape) if size == "?"]
        # a size marked "?" may depend on another dimension than the batch
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


def batch_of(signature: Signature) -> Dim:
    """The batch sizes that ``signature`` allows, as a dimension; possibly only one size."""
    lead = signature.inputs[0].shape[0]
    return Dim("batch", lead, lead) if isinstance(lead, int) else next(dim for dim in signature.dims if dim.name == lead)
