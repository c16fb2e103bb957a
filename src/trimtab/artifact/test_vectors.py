"""Test vectors that travel with an artifact: inputs, what the original model made of them, and how far off is still right."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trimtab._internal.text import counted
from trimtab._internal.user_code import BY_HAND, user_code
from trimtab.core.candidate import Candidate, resized
from trimtab.core.signature import Signature
from trimtab.errors import IntegrityError, UsageError, WorkloadError
from trimtab.tensors.comparison import NEAR_TIES, is_discrete

GOLDEN = "golden.safetensors"
MAX_HEADER = 4 << 20
LIMIT_MB = 64.0
"""Test vectors beyond this are left out, the first case excepted."""
HEADROOM = 2.0
"""Times the error that was measured when the artifact was written: another CPU rounds in another order."""
ROUNDING = {
    **{torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2},
    **{torch.complex128: 1e-9, torch.complex64: 1e-3},
}
"""Least tolerance of an output by its dtype, relative to its usual values."""
FAR = 1e3
"""Values so many times the median are none of the usual ones, as those with which logits are masked."""

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: flat inputs and the original model's flat outputs."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def megabytes(self) -> float:
        """Size of all its tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.outputs)) / 1e6


@dataclasses.dataclass(frozen=True)
class Golden:
    """Several cases, the first of which is the example that the workload names."""

    cases: tuple[Case, ...]

    @classmethod
    def of(cls, candidate: Candidate, signature: Signature, rows: Sequence[Sequence[torch.Tensor]] = ()) -> Golden:
        """Cases of the model of ``candidate``, as it was before any pass: its example, the example at another size of every
        dynamic dimension that ``signature`` keeps, and ``rows``, flat inputs of real calls. Where ``signature`` has frozen a
        dimension, inputs are repeated or cut to the size that it was frozen to. What the model refuses is left out, the example
        excepted.

        Raises:
            UsageError: the model gives NaN for its example, which no test could hold on to.
            WorkloadError: it fails on its example.
        """
        model = candidate.flat()
        example = _fitted(candidate.leaves, candidate.signature, signature)
        calls = [example, *_other_sizes(example, signature), *(_fitted(row, candidate.signature, signature) for row in rows)]
        cases: list[Case] = []
        for inputs in calls:
            try:
                with user_code("The model failed on a test vector", BY_HAND):
                    case = _case(model, inputs)
            except (UsageError, WorkloadError):  # inputs that are none of its own, whatever it raises on these
                if not cases:
                    raise
                continue
            if not cases or sum(item.megabytes for item in cases) + case.megabytes <= LIMIT_MB:
                cases.append(case)
        return cls(tuple(cases))

    def errors(self, run: Run) -> list[float]:
        """The largest absolute error of each output over all cases, at its :meth:`scales`: a value beyond these may be off by
        as much more. Of integers and booleans, the largest share that differs. Infinite where shape or dtype differ or a NaN
        appears."""
        worst = [0.0] * len(self.cases[0].outputs)
        for case in self.cases:
            outputs = run([tensor.clone() for tensor in case.inputs])
            for i, want in enumerate(case.outputs):
                worst[i] = max(worst[i], _error(outputs[i], want, self.scales[i]) if i < len(outputs) else math.inf)
        return worst

    @functools.cached_property
    def scales(self) -> tuple[float, ...]:
        """The root mean square of each output's usual values over all cases, never 0; 0 for integers and booleans."""
        return tuple(_scale([case.outputs[i] for case in self.cases]) for i in range(len(self.cases[0].outputs)))

    def tolerances(self, errors: Sequence[float]) -> tuple[float, ...]:
        """What each output may be off by, from what it was off by when it was built: twice that, and never below rounding,
        which turns some integers over too."""
        return tuple(max(HEADROOM * error, self._rounding(i)) for i, error in enumerate(errors))

    def _rounding(self, index: int) -> float:
        dtype = self.cases[0].outputs[index].dtype
        return NEAR_TIES if is_discrete(dtype) else ROUNDING.get(dtype, 0.0) * self.scales[index]

    def save(self, path: pathlib.Path) -> None:
        """Write the tensors as ``<case>.inputs.<i>`` and ``<case>.outputs.<i>``."""
        tensors = {
            f"{number}.{kind}.{i}": tensor.detach().cpu().contiguous().clone()
            for number, case in enumerate(self.cases)
            for kind, found in (("inputs", case.inputs), ("outputs", case.outputs))
            for i, tensor in enumerate(found)
        }
        save_file(tensors, path)
        path.chmod(0o644)  # safetensors writes files for their owner only, and those who serve a model may be others

    @classmethod
    def load(cls, path: pathlib.Path, cases: int, inputs: int, outputs: int) -> Golden:
        """Read ``cases`` cases of ``inputs`` and ``outputs`` tensors each.

        Raises:
            IntegrityError: the file is damaged, or holds other tensors than these.
        """
        _check_header(path)
        try:
            found = load_file(path)
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            raise IntegrityError(f"{path.name} is damaged: {error}.") from error
        wanted = {
            f"{case}.{kind}.{i}"
            for case in range(cases)
            for kind, n in (("inputs", inputs), ("outputs", outputs))
            for i in range(n)
        }
        if set(found) != wanted:
            odd = sorted(set(found) ^ wanted)[0]
            raise IntegrityError(
                f"{path.name} does not hold the {counted(cases, 'case')} of the manifest: {odd[:80]!r} is missing or extra."
            )
        return cls(
            tuple(
                Case(
                    tuple(found[f"{case}.inputs.{i}"] for i in range(inputs)),
                    tuple(found[f"{case}.outputs.{i}"] for i in range(outputs)),
                )
                for case in range(cases)
            )
        )


def _check_header(path: pathlib.Path) -> None:
    size = os.path.getsize(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(size - 8, MAX_HEADER):
        raise IntegrityError(f"{path.name} has {size} bytes and claims a header of {header}; it is not read.")


def _case(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Case:
    with torch.no_grad():
        outputs = model(*[tensor.clone() for tensor in inputs])
    if any(not is_discrete(out.dtype) and out.isnan().any() for out in outputs):
        raise UsageError(
            "The original model gives NaN on its own inputs; an artifact needs inputs whose outputs can be compared. Give such "
            "inputs."
        )
    return Case(tuple(inputs), tuple(out.clone() for out in outputs))  # it may be memory that the next call writes to


def _fitted(leaves: Sequence[torch.Tensor], whole: Signature, kept: Signature) -> list[torch.Tensor]:
    """``leaves`` at the sizes that ``kept`` has frozen, of the dimensions that ``whole`` leaves open."""
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
    """The example with every dynamic dimension at another size, if there is one within its bounds."""
    changed = list(leaves)
    for name, now in signature.sizes(leaves).items():
        dim = next(dim for dim in signature.dims if dim.name == name)
        size = dim.near(now, 2, 1, -1)
        changed = [resized(leaf, spec.shape, name, size) for leaf, spec in zip(changed, signature.inputs, strict=True)]
    # a repeated example would hide a runtime that mixes up its rows
    led = [bool(spec.shape) and isinstance(spec.shape[0], str) for spec in signature.inputs]
    varied = [torch.flip(leaf, (0,)) if turn else leaf for leaf, turn in zip(changed, led, strict=True)]
    return [varied] if signature.dims else []


def _scale(outputs: Sequence[torch.Tensor]) -> float:
    dtype = outputs[0].dtype
    if is_discrete(dtype):
        return 0.0
    sizes = torch.cat([out.flatten().to(_wide(dtype)).abs() for out in outputs])
    usual = sizes[sizes.isfinite() & (sizes > 0)]
    if usual.numel():
        usual = usual[usual <= FAR * usual.median()]
    return max(float(usual.square().mean().sqrt()) if usual.numel() else 0.0, torch.finfo(dtype).tiny)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _error(got: torch.Tensor, want: torch.Tensor, scale: float) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not want.numel():
        return 0.0
    if is_discrete(want.dtype):
        return float((got.cpu() != want).double().mean())
    a, b = got.detach().cpu().to(_wide(want.dtype)), want.to(_wide(want.dtype))
    apart = (a - b).abs() * (scale / b.abs().clamp(min=scale))
    worst = torch.where(a == b, torch.zeros_like(apart), apart).max().item()
    return worst if math.isfinite(worst) else math.inf
