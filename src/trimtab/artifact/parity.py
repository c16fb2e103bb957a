"""Compare outputs with test vectors. Without torch, so that a server's process can do it for a runtime that needs none."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from trimtab._internal.text import counted
from trimtab.artifact.manifest import GOLDEN, Manifest
from trimtab.errors import IntegrityError

T = TypeVar("T")
MAX_HEADER = 4 << 20
LOAD_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
    SyntaxError,
    MemoryError,
)
"""Errors of runtimes for invalid files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parities:
    """Errors on the test vectors. ``errors`` and ``tolerance`` are absolute, one per output."""

    ok: bool
    cases: int
    errors: tuple[float | None, ...]
    """``None`` if shape or dtype differ, or NaN appears."""
    tolerance: tuple[float, ...]
    reason: str | None = None

    @property
    def max_error(self) -> float | None:
        """The largest error; ``None`` if one of them is ``None``."""
        return None if None in self.errors else max((e for e in self.errors if e is not None), default=0.0)


def parities(measure: Callable[[], Sequence[float]], manifest: Manifest) -> Parities:
    """Compare the error of each output, which ``measure`` finds by running the model, with the tolerances of the manifest."""
    tolerance, cases = manifest.golden.tolerance, manifest.golden.cases
    try:
        errors = measure()
    except LOAD_ERRORS as error:
        why = f"The model failed on a test vector: {type(error).__name__}: {str(error)[:300]}"
        return Parities(ok=False, cases=cases, errors=(None,) * len(tolerance), tolerance=tolerance, reason=why)
    bad = [i for i, (error, most) in enumerate(zip(errors, tolerance, strict=True)) if not error <= most]
    reason = None
    if bad:
        spec = manifest.signature.outputs[bad[0]]
        found = (
            f"is off by {errors[bad[0]]:.3g}" if math.isfinite(errors[bad[0]]) else "has another shape or dtype, or holds NaN"
        )
        reason = f"The output {spec.name!r} {found} on the test vectors; {tolerance[bad[0]]:.3g} is allowed."
    figures = tuple(error if math.isfinite(error) else None for error in errors)
    return Parities(ok=not bad, cases=cases, errors=figures, tolerance=tolerance, reason=reason)


def worst_errors(
    cases: Iterable[tuple[Sequence[T], Sequence[T]]],
    run: Callable[[Sequence[T]], Sequence[T]],
    scales: Sequence[float],
    error: Callable[[T, T, float], float],
) -> list[float]:
    """The largest error of each output over ``cases`` of inputs and outputs; infinite if an output is missing."""
    worst = [0.0] * len(scales)
    for inputs, wanted in cases:
        outputs = run(inputs)
        for i, want in enumerate(wanted):
            worst[i] = max(worst[i], error(outputs[i], want, scales[i]) if i < len(outputs) else math.inf)
    return worst


def array_error(got: npt.NDArray[Any], want: npt.NDArray[Any], scale: float) -> float:
    """The largest error of one output: absolute, but scaled down for values above ``scale``. For integers and booleans: the
    share of differing values. Infinite if shape or dtype differ or a value of either is not finite."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not want.size:
        return 0.0
    if want.dtype.kind in "biu":
        return float((got != want).mean())
    wide = "c16" if want.dtype.kind == "c" else "f8"
    a, b = got.astype(wide), want.astype(wide)
    with np.errstate(all="ignore"):
        difference = np.abs(a - b) * (scale / np.maximum(np.abs(b), scale))
        worst = float(np.where(a == b, 0.0, difference).max())
    return worst if math.isfinite(worst) else math.inf


def read_vectors(
    path: pathlib.Path, load: Callable[[pathlib.Path], dict[str, T]], cases: int, inputs: int, outputs: int
) -> list[tuple[tuple[T, ...], tuple[T, ...]]]:
    """The test vectors in ``path``: ``cases`` pairs of ``inputs`` and ``outputs`` tensors. ``load`` reads a safetensors file.

    Raises:
        IntegrityError: the file is damaged or contains other tensors.
    """
    _check_header(path)
    try:
        found = load(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise IntegrityError(f"{path.name} is damaged: {error}.") from error
    counts = (("inputs", inputs), ("outputs", outputs))
    wanted = {f"{case}.{kind}.{i}" for case in range(cases) for kind, count in counts for i in range(count)}
    if set(found) != wanted:
        odd = sorted(set(found) ^ wanted)[0]
        raise IntegrityError(
            f"{path.name} does not hold the {counted(cases, 'case')} of the manifest: {odd[:80]!r} is missing or extra."
        )
    return [
        (
            tuple(found[f"{case}.inputs.{i}"] for i in range(inputs)),
            tuple(found[f"{case}.outputs.{i}"] for i in range(outputs)),
        )
        for case in range(cases)
    ]


def _check_header(path: pathlib.Path) -> None:
    size = os.path.getsize(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(size - 8, MAX_HEADER):
        raise IntegrityError(f"{path.name} has {size} bytes and claims a header of {header}; it is not read.")


def check_case(inputs: Sequence[Any], outputs: Sequence[Any], manifest: Manifest) -> None:
    """Refuse a test vector whose shapes or dtypes do not fit the signature; tensors or arrays.

    Raises:
        IntegrityError: it does not fit.
    """
    signature = manifest.signature
    odd = next((spec for spec, leaf in zip(signature.inputs, inputs, strict=True) if _dtype(leaf) != spec.dtype), None)
    if odd is not None or not signature.takes([tuple(leaf.shape) for leaf in inputs]):
        shapes = ", ".join(f"{_dtype(leaf)}{list(leaf.shape)}" for leaf in inputs)
        raise IntegrityError(f"{GOLDEN} does not fit the signature: it holds {shapes}, built for {signature.describe()}.")
    for spec, leaf in zip(signature.outputs, outputs, strict=True):
        fixed = all(isinstance(w, str) or w == got for w, got in zip(spec.shape, leaf.shape, strict=False))
        if len(spec.shape) != len(leaf.shape) or not fixed:
            raise IntegrityError(f"{GOLDEN} holds an output of shape {tuple(leaf.shape)}, but the signature says {spec}.")


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.")
