"""Test vectors that travel with an artifact: inputs, what the original model made of them, and how far off is still right."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trimtab._ties import is_discrete
from trimtab.candidate import Candidate, resized
from trimtab.errors import IntegrityError, UsageError
from trimtab.signature import Signature

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
"""Least tolerance of an output by its dtype, relative to its largest value."""
REFUSALS = (RuntimeError, ValueError, LookupError, AssertionError)
"""What a model raises on inputs that are none of its own: a size, or an order of rows, that it does not take."""

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
        """
        model = candidate.flat()
        example = _fitted(candidate.leaves, candidate.signature, signature)
        calls = [example, *_other_sizes(example, signature), *(_fitted(row, candidate.signature, signature) for row in rows)]
        cases: list[Case] = []
        for inputs in calls:
            try:
                case = _case(model, inputs)
            except REFUSALS:
                if not cases:
                    raise
                continue
            if not cases or sum(item.megabytes for item in cases) + case.megabytes <= LIMIT_MB:
                cases.append(case)
        return cls(tuple(cases))

    def errors(self, run: Run) -> list[float]:
        """The largest absolute error of each output over all cases; infinite where shape or dtype differ or a NaN appears."""
        worst = [0.0] * len(self.cases[0].outputs)
        for case in self.cases:
            outputs = run([tensor.clone() for tensor in case.inputs])
            for i, want in enumerate(case.outputs):
                worst[i] = max(worst[i], _error(outputs[i], want) if i < len(outputs) else math.inf)
        return worst

    def tolerances(self, errors: Sequence[float]) -> tuple[float, ...]:
        """What each output may be off by, from what it was off by when it was built: twice that, and never below rounding."""
        return tuple(max(HEADROOM * error, self._rounding(i)) for i, error in enumerate(errors))

    def _rounding(self, index: int) -> float:
        outputs = [case.outputs[index] for case in self.cases]
        finite = [out[out.isfinite()].abs().max().item() for out in outputs if out.dtype in ROUNDING and out.isfinite().any()]
        return ROUNDING.get(outputs[0].dtype, 0.0) * max(finite, default=0.0)

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
                f"{path.name} does not hold the {cases} cases of the manifest: {odd[:80]!r} is missing or extra."
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
    return Case(tuple(inputs), tuple(outputs))


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


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not want.numel():
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = got.detach().cpu().to(wide), want.to(wide)
    difference = torch.where(a == b, torch.zeros_like(a).abs(), (a - b).abs())
    worst = difference.max().item()
    return worst if math.isfinite(worst) else math.inf
