"""Batch size of inference calls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from trimtab.core.candidate import Candidate
from trimtab.core.dynamic_dims import resized
from trimtab.core.technique import Choice, Pass
from trimtab.errors import CompileError
from trimtab.tensors.structure import unflatten


@dataclass(frozen=True, kw_only=True)
class Batch(Pass):
    """Run this many examples per call.

    Pays off for throughput: weights are read once per call instead of once per example, and larger matrix products use
    the whole processor. Latency grows, so it is tried for the throughput objective only.
    Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-fully-connected/index.html#batch-size
    """

    sets = frozenset({"data.batch"})

    size: Annotated[int, Choice(1, 2, 4, 8, 16, 32, 64)] = 16
    """Examples per call."""

    def describe(self) -> str:
        """Names the batch size."""
        return f"{self.size} example{'s' if self.size != 1 else ''} per call"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a dynamic batch that allows this size."""
        name = candidate.signature.batch
        if name is None:
            return "batch needs a model whose first input has a dynamic batch dimension; say so with the workload's dynamic=..."
        dim = next(dim for dim in candidate.signature.dims if dim.name == name)
        if self.size not in dim:
            return f"batch asks for {self.size} examples, and {name!r} goes from {dim.bounds}."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model, with the example inputs repeated or cut to the batch size."""
        if reason := self.why_not(candidate):
            raise CompileError(reason)
        name = str(candidate.signature.batch)
        pairs = zip(candidate.leaves, candidate.signature.inputs, strict=True)
        leaves = [resized(leaf, spec.shape, name, self.size) for leaf, spec in pairs]
        args, kwargs = unflatten(candidate.signature.input_structure, leaves)
        settings = candidate.settings.replaced({"data.batch": self.size})
        return dataclasses.replace(candidate, args=args, kwargs=kwargs, settings=settings)
