"""Test vectors of an artifact: inputs, the original model's outputs, and tolerances."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from trimtab._internal.user_code import BY_HAND, user_code
from trimtab.artifact.parity import array_error, read_vectors, worst_errors
from trimtab.core.candidate import Candidate
from trimtab.core.dynamic_dims import resized
from trimtab.core.signature import Signature
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.comparison import NEAR_TIES, is_discrete

LIMIT_MB = 64.0
"""Most megabytes of test vectors; the first case is always kept."""
HEADROOM = 2.0
"""Tolerance as a multiple of the error that was measured when the artifact was written: other CPUs round differently."""
ROUNDING = {
    **{torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2},
    **{torch.complex128: 1e-9, torch.complex64: 1e-3},
}
"""Smallest tolerance by dtype, relative to the output's typical values."""
OUTLIER_FACTOR = 1e3
"""Values above this multiple of the median do not count as typical; masked logits are such values."""

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: flat inputs, and flat outputs of the original model."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def megabytes(self) -> float:
        """Size of all tensors in MB."""
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.outputs)) / 1e6


@dataclasses.dataclass(frozen=True)
class Golden:
    """Several cases. The first one is the workload's example."""

    cases: tuple[Case, ...]

    @classmethod
    def of(cls, candidate: Candidate, signature: Signature, rows: Sequence[Sequence[torch.Tensor]] = ()) -> Golden:
        """Run the original model of ``candidate`` on the example, on the example with every dynamic dimension of ``signature``
        at another size, and on ``rows`` (flat inputs of real calls). Dimensions that ``signature`` has frozen are repeated or
        cut to the frozen size. Inputs that the model refuses are skipped, except the example.

        Raises:
            UsageError: the model's output for the example contains NaN.
            WorkloadError: the model fails on the example.
        """
        model = candidate.flat()
        example = _freeze(candidate.leaves, candidate.signature, signature)
        calls = [example, *_other_sizes(example, signature), *(_freeze(row, candidate.signature, signature) for row in rows)]
        cases: list[Case] = []
        for inputs in calls:
            try:
                with user_code("The model failed on a test vector", BY_HAND):
                    case = _case(model, inputs)
            except (UsageError, WorkloadError):  # the model refuses these derived inputs
                if not cases:
                    raise
                continue
            if not cases or sum(item.megabytes for item in cases) + case.megabytes <= LIMIT_MB:
                cases.append(case)
        return cls(tuple(cases))

    def errors(self, run: Run) -> list[float]:
        """The largest error of each output over all cases: absolute, but scaled down for values above :meth:`scales`. For
        integers and booleans: the largest share of differing values. Infinite if shape or dtype differ or NaN appears."""
        pairs = [(case.inputs, case.outputs) for case in self.cases]
        return worst_errors(pairs, lambda inputs: run([tensor.clone() for tensor in inputs]), self.scales, output_error)

    @functools.cached_property
    def scales(self) -> tuple[float, ...]:
        """Root mean square of each output's typical values over all cases, above 0; 0 for integers and booleans."""
        return tuple(_scale([case.outputs[i] for case in self.cases]) for i in range(len(self.cases[0].outputs)))

    def tolerances(self, errors: Sequence[float]) -> tuple[float, ...]:
        """The tolerance of each output: :data:`HEADROOM` times its measured error, but at least :data:`ROUNDING`. Integers may
        differ in a few places too, because of near-ties."""
        return tuple(max(HEADROOM * error, self._rounding(i)) for i, error in enumerate(errors))

    def _rounding(self, index: int) -> float:
        dtype = self.cases[0].outputs[index].dtype
        return NEAR_TIES if is_discrete(dtype) else ROUNDING.get(dtype, 0.0) * self.scales[index]

    def save(self, path: pathlib.Path) -> None:
        """Write the tensors with the names ``<case>.inputs.<i>`` and ``<case>.outputs.<i>``."""
        tensors = {
            f"{number}.{kind}.{i}": tensor.detach().cpu().contiguous().clone()
            for number, case in enumerate(self.cases)
            for kind, found in (("inputs", case.inputs), ("outputs", case.outputs))
            for i, tensor in enumerate(found)
        }
        save_file(tensors, path)
        path.chmod(0o644)  # safetensors makes files readable for their owner only; another user may serve the model

    @classmethod
    def load(cls, path: pathlib.Path, cases: int, inputs: int, outputs: int) -> Golden:
        """Read ``cases`` cases with ``inputs`` input and ``outputs`` output tensors each.

        Raises:
            IntegrityError: the file is damaged or contains other tensors.
        """
        return cls(tuple(Case(*pair) for pair in read_vectors(path, load_file, cases, inputs, outputs)))


def _case(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Case:
    with torch.no_grad():
        outputs = model(*[tensor.clone() for tensor in inputs])
    if any(not is_discrete(out.dtype) and out.isnan().any() for out in outputs):
        raise UsageError(
            "The original model gives NaN on its own inputs; an artifact needs inputs whose outputs can be compared. Give such "
            "inputs."
        )
    return Case(tuple(inputs), tuple(out.clone() for out in outputs))  # clone: the next call may overwrite the outputs


def _freeze(leaves: Sequence[torch.Tensor], whole: Signature, kept: Signature) -> list[torch.Tensor]:
    """``leaves`` with the dimensions that are dynamic in ``whole`` and fixed in ``kept`` at their fixed sizes."""
    frozen = {
        name: size
        for spec, now in zip(whole.inputs, kept.inputs, strict=True)
        for name, size in zip(spec.shape, now.shape, strict=True)
        if isinstance(name, str) and isinstance(size, int)
    }
    fitted = list(leaves)
    for name, size in frozen.items():
        fitted = [resized(leaf, spec.shape, name, size) for leaf, spec in zip(fitted, whole.inputs, strict=True)]
    return fitted


def _other_sizes(leaves: Sequence[torch.Tensor], signature: Signature) -> list[list[torch.Tensor]]:
    """The example with all dynamic dimensions at another size, if their bounds allow one."""
    changed = list(leaves)
    for name, now in signature.sizes(leaves).items():
        dim = next(dim for dim in signature.dims if dim.name == name)
        size = dim.near(now, 2, 1, -1)
        changed = [resized(leaf, spec.shape, name, size) for leaf, spec in zip(changed, signature.inputs, strict=True)]
    # reversed rows: a repeated example would not reveal a runtime that swaps rows
    batched = [bool(spec.shape) and isinstance(spec.shape[0], str) for spec in signature.inputs]
    varied = [torch.flip(leaf, (0,)) if reverse else leaf for leaf, reverse in zip(changed, batched, strict=True)]
    return [varied] if signature.dims else []


def _scale(outputs: Sequence[torch.Tensor]) -> float:
    dtype = outputs[0].dtype
    if is_discrete(dtype):
        return 0.0
    sizes = torch.cat([out.flatten().to(_wide(dtype)).abs() for out in outputs])
    usual = sizes[sizes.isfinite() & (sizes > 0)]
    if usual.numel():
        usual = usual[usual <= OUTLIER_FACTOR * usual.median()]
    return max(float(usual.square().mean().sqrt()) if usual.numel() else 0.0, torch.finfo(dtype).tiny)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def output_error(got: torch.Tensor, want: torch.Tensor, scale: float) -> float:
    """The largest error of one output: absolute, but scaled down for values above ``scale``. For integers and booleans: the
    share of differing values. Infinite if shape or dtype differ or a value of either is not finite."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    return array_error(_array(got), _array(want), scale)


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    plain = tensor.detach().cpu()
    return (plain if is_discrete(plain.dtype) else plain.to(_wide(plain.dtype))).resolve_conj().resolve_neg().numpy()
