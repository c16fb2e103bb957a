"""Gradients cross as products of two thin matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from trimtab.train.distributed.exchange import Errors, Exchange


@dataclasses.dataclass
class _Matrix:
    """One gradient of the bucket as a matrix, (rows, columns)."""

    parameter: torch.Tensor
    start: int
    shape: tuple[int, int]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.shape[0] * self.shape[1]].view(self.shape)


class PowerSgd(Exchange):
    """Each matrix of gradients crosses as ``p @ q.T`` of rank ``rank``, found by one step of power iteration.

    The iteration begins where that of the update before ended, and what the product misses is added to the next gradient.
    Matrices that the product would not make at least twice as small, biases and norms cross as they are. Pays on slow networks
    and for wide layers; it costs two products with each gradient, and one wait per bucket.

    torch's own hook sends from the callbacks of its futures, whose order differs between processes as soon as there are two
    buckets: over gloo it crashes or hangs. This one sends only while it is called.

    Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    """

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.rank, self.errors = rank, Errors()
        self._bases: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, torch.Tensor] = {}

    def reset(self) -> None:
        """Forget what was left out, too, which holds a part of the update that is made again, and where iterations ended."""
        super().reset()
        self.errors = Errors()
        self._bases.clear()

    def state_dict(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What was left out, and where iterations ended."""
        bases = {name: self._bases[id(value)].cpu() for name, value in parameters.items() if id(value) in self._bases}
        return {"errors": self.errors.state_dict(parameters), "bases": bases}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]) -> bool:
        """Take up what an earlier run left out; its bases, which all processes have alike, where the rank is still the same."""
        self.errors.load_state_dict([state.get("errors", {}) for state in states], parameters)
        bases = states[0].get("bases", {})
        fitting = {name: base for name, base in bases.items() if name in parameters and base.shape[1] == self.rank}
        self._bases = {id(parameters[name]): base.to(parameters[name].device) for name, base in fitting.items()}
        return True

    def add_up(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> Future[torch.Tensor]:
        """The sum of the products, and of what is not worth one."""
        matrices, plain = self._sorted(parameters)
        errors = self.errors.of(parameters, flat)
        errors += flat  # of what crosses as it is, only what another kind of compression left out before a resumption
        if not matrices:
            flat.copy_(errors)
            errors.zero_()
            return self.summed(flat)
        rest = torch.cat([errors[start:end] for start, end in plain]) if plain else flat.new_empty(0)
        bases = [self._basis(matrix) for matrix in matrices]
        _used_here(bases)
        tall = [matrix.of(errors) @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        tall = _unpacked(self.summed(torch.cat([rest, *(p.flatten() for p in tall)])).wait(), tall, rest)
        tall = [torch.linalg.qr(p.float())[0].to(p.dtype) for p in tall]
        wide = [matrix.of(errors).T @ p for matrix, p in zip(matrices, tall, strict=True)]
        for matrix, p, q in zip(matrices, tall, wide, strict=True):
            matrix.of(errors).addmm_(p, q.T, alpha=-1)  # what this process's own product misses
        for start, end in plain:
            errors[start:end] = 0
        errors.nan_to_num_(0.0, 0.0, 0.0)  # what is no number spoils this update, as p is of all processes, and none after it
        future = self.summed(torch.cat([q.flatten() for q in wide]))

        def multiplied(done: Future[torch.Tensor]) -> torch.Tensor:
            _used_here([*tall, rest])
            for (start, end), values in zip(plain, torch.split(rest, [end - start for start, end in plain]), strict=True):
                flat[start:end] = values
            for matrix, p, q in zip(matrices, tall, _unpacked(done.value(), wide), strict=True):
                self._bases[id(matrix.parameter)] = torch.where(q.isfinite().all(), q, self._begun(matrix))
                torch.mm(p, q.T, out=matrix.of(flat))
            return flat

        return future.then(multiplied)

    def _sorted(self, parameters: Sequence[torch.Tensor]) -> tuple[list[_Matrix], list[tuple[int, int]]]:
        """The bucket's matrices that are worth a product, and where the others lie."""
        matrices, plain, start = [], [], 0
        for parameter in parameters:
            end = start + parameter.numel()
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            columns = parameter.numel() // max(rows, 1)
            if 0 < 2 * self.rank * (rows + columns) <= rows * columns:
                matrices.append(_Matrix(parameter, start, (rows, columns)))
            else:
                plain.append((start, end))
            start = end
        return matrices, plain

    def _basis(self, matrix: _Matrix) -> torch.Tensor:
        """The thin matrix that the iteration begins with: the last one, if there is one."""
        found = self._bases.get(id(matrix.parameter))
        return self._begun(matrix) if found is None else found

    def _begun(self, matrix: _Matrix) -> torch.Tensor:
        """A thin matrix to begin with at first, random, which all processes draw alike."""
        key = id(matrix.parameter)
        if key not in self._fresh:
            random = torch.Generator().manual_seed(matrix.shape[0] * 1_000_003 + matrix.shape[1])
            drawn = torch.randn(matrix.shape[1], self.rank, generator=random)
            self._fresh[key] = drawn.to(matrix.parameter.device, matrix.parameter.dtype)
        return self._fresh[key]


def _used_here(tensors: Sequence[torch.Tensor]) -> None:
    """Keep the memory of ``tensors``, made on another stream, from being given away before this one is done with them.

    On a GPU the callback of a future has a stream of its own, which nobody who frees memory waits for.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _unpacked(packed: torch.Tensor, like: Sequence[torch.Tensor], rest: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The tensors that were put in a row; what lies before them goes to ``rest``."""
    start = 0
    if rest is not None:
        start = rest.numel()
        rest.copy_(packed[:start])
    parts = torch.split(packed[start:], [value.numel() for value in like])
    return [part.view(value.shape) for part, value in zip(parts, like, strict=True)]
