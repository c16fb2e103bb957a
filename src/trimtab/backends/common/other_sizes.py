"""Make inputs of other sizes than the example's, and run the model on them, to verify compiled forms."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from trimtab._internal.user_code import user_code
from trimtab.core.candidate import Candidate
from trimtab.core.dynamic_dims import resized
from trimtab.core.signature import Dim
from trimtab.errors import UsageError, WorkloadError
from trimtab.hardware.system import free_mb, peak_rss_mb
from trimtab.tensors.comparison import is_sorted

MULTIPLE_UNBOUNDED, MULTIPLE_BOUNDED = 8, 32
"""Largest multiple of the example's size that is tried for a dimension, without and with an upper bound."""
MAX_ELEMENTS = 1 << 22
"""Most elements of all inputs and outputs together at such a size."""
MAX_CALL_S, MAX_MEMORY_SHARE = 2.0, 1 / 8
"""Larger sizes are not tried after a call that took more seconds, or a larger share of the free memory. Doubling a size may
take four times as much, as in attention."""

ReferenceRun = tuple[list[torch.Tensor], Sequence[torch.Tensor]]
"""The inputs after the call, which may have modified them, and the outputs."""


@dataclasses.dataclass(frozen=True)
class LargeInputs:
    """Inputs with a size far above the example's, and the model's outputs."""

    sizes: Mapping[str, int]
    leaves: list[torch.Tensor]
    reference: ReferenceRun


def reference_run(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> ReferenceRun | None:
    """Run the model on copies of ``leaves``. Returns ``None`` if it raises an error."""
    own = [leaf.clone() for leaf in leaves]
    try:
        with torch.no_grad(), user_code("The model does not take these inputs"):
            return own, candidate.flat(copied=False)(*own)
    except (UsageError, WorkloadError):
        return None


def at_sizes(candidate: Candidate, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """The example tensors with dimensions repeated or cut to ``sizes``."""
    leaves = list(candidate.leaves)
    for name, size in sizes.items():
        leaves = [resized(leaf, spec.shape, name, size) for leaf, spec in zip(leaves, candidate.signature.inputs, strict=True)]
    return leaves


def shuffled(candidate: Candidate, sizes: Mapping[str, int], name: str) -> list[torch.Tensor]:
    """Like :func:`at_sizes`, with the values along dimension ``name`` permuted: otherwise a mean over a part of repeated values
    would equal the mean over all. Sorted values stay sorted."""
    order = torch.randperm(sizes[name], generator=torch.Generator().manual_seed(0), device="cpu")
    leaves = at_sizes(candidate, sizes)
    for i, spec in enumerate(candidate.signature.inputs):
        for axis in (axis for axis, size in enumerate(spec.shape) if size == name and not is_sorted(leaves[i])):
            leaves[i] = leaves[i].index_select(axis, order.to(leaves[i].device))
    return leaves


def other_size(candidate: Candidate, name: str, step: int = 1) -> int:
    """An allowed size of dimension ``name`` that is neither the example's nor 1, if possible."""
    dim = next(dim for dim in candidate.signature.dims if dim.name == name)
    now = candidate.signature.sizes(candidate.leaves)[name]
    wanted = (now + step * dim.step, *(now + dim.step * way for way in (1, 2, -1, -2)), now)
    return next(size for size in wanted if size in dim and (size > 1 or size == now or dim.max == 1))


def largest_inputs(candidate: Candidate, dim: Dim, near: Mapping[str, int]) -> LargeInputs | None:
    """Inputs in which ``dim`` is as large as the model and the limits allow; ``None`` if no larger size works.

    A compiled form may keep one branch of a decision such as ``if x.shape[1] > 64``, which sizes near the example's do not
    show. The other dimensions have their smallest size above 1; if the model refuses that, their size in ``near``.
    """
    found = None
    least = {other.name: min(size := other.holding(2), other.max or size) for other in candidate.signature.dims}
    for size in _doubled(dim, near[dim.name]):
        for others in (least, near):
            sizes = {**near, **others, dim.name: size}
            if _elements(candidate, sizes) > MAX_ELEMENTS:
                continue
            leaves = shuffled(candidate, sizes, dim.name)
            free, peak, begun = free_mb(), peak_rss_mb(), time.perf_counter()
            reference = reference_run(candidate, leaves)
            found = found if reference is None else LargeInputs(sizes, leaves, reference)
            if time.perf_counter() - begun > MAX_CALL_S or peak_rss_mb() - peak > MAX_MEMORY_SHARE * free:
                return found
            if reference is not None:
                break
    return found


def _doubled(dim: Dim, now: int) -> Iterator[int]:
    """Sizes above ``now`` up to the largest, each about twice the one before."""
    sizes, size = list[int](), min(dim.max or MULTIPLE_UNBOUNDED * now, MULTIPLE_BOUNDED * now)
    while (size := size // dim.step * dim.step) > now:
        sizes.append(size)
        size //= 2
    return reversed(sizes)


def _elements(candidate: Candidate, sizes: Mapping[str, int]) -> int:
    specs = (*candidate.signature.inputs, *candidate.signature.outputs)
    return sum(math.prod(sizes.get(s, 1) if isinstance(s, str) else s for s in spec.shape) for spec in specs)
