"""Shared code of the backends outside of PyTorch: conversion attempts, modified inputs, calibration, and graph verification."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trimtab._internal.serialization import from_json, write_json
from trimtab._internal.text import counted, summary_line
from trimtab.backends.common.causes import CONVERSION_ERRORS, known_cause
from trimtab.backends.common.exported_program import NOT_FROZEN, fewer_dims, lost_dims
from trimtab.backends.common.other_sizes import at_sizes, largest_inputs, reference_run
from trimtab.core.candidate import Candidate, call_model
from trimtab.core.dynamic_dims import resized
from trimtab.core.signature import Signature
from trimtab.errors import CompileError, UsageError
from trimtab.passes.common.quantized import is_quantized, without_rounding
from trimtab.tensors.comparison import difference, errors, is_discrete, is_sorted, repeat_sorted
from trimtab.tensors.structure import TENSOR, Structure, flatten
from trimtab.tensors.weights import tolerance

FACTS = "conversion.json"
Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
OpenRun = Callable[[pathlib.Path, Signature], Run]
Row = list[torch.Tensor]
Probe = tuple[str, Row, Sequence[torch.Tensor]]
"""Description, inputs, and the model's outputs."""

TOLERANCE = 1e-3
"""Largest error of a float32 conversion, relative to the largest output. Rounding is far below, wrong graphs are far above."""

ROUNDED_TOLERANCE = 0.05
"""Smallest tolerance for a quantized model, in which several layers may each round a value to the neighbouring step."""


def no_numpy_form(signature: Signature, runtime: str) -> str | None:
    """Why a tensor of ``signature`` cannot be passed to the runtime through numpy, as a sentence; ``None`` if all can."""
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype.startswith(("bfloat", "complex", "float8", "q")):
            parts = spec.dtype.startswith("complex")
            fix = "Let the model take and give torch.view_as_real() of it" if parts else "Cast it to float32 in the model"
            return f"{runtime} cannot exchange {spec.dtype} tensors, and {spec.name!r} is one. {fix}."
    if not signature.inputs:
        return f"{runtime} needs at least one input tensor, and the model takes none."
    return None


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How a model was converted."""

    way: str
    dims: tuple[str, ...]
    """Names of the dynamic dimensions that the conversion supports."""
    notes: tuple[str, ...] = ()
    """The error of the first failed attempt, which explains a fallback or lost dimensions."""


def convert(
    candidate: Candidate, folder: pathlib.Path, methods: Iterable[str], attempt: Callable[[str, Candidate], None], failed: str
) -> None:
    """Call ``attempt`` for each of ``methods``, first with dynamic dimensions and then, unless the workload states them, with
    fixed sizes, until one succeeds. Write the facts into ``folder``. If fixed sizes succeed, subsets of the dynamic dimensions
    are tried with the same method.

    Raises:
        CompileError: all attempts failed. The message is ``failed`` and the error of each attempt.
    """
    attempts: dict[str, list[str]] = {}
    names = [dim.name for dim in candidate.signature.dims]
    stated = bool(names) and candidate.all_sizes
    for dims in (names, []) if names and not stated else (names,):
        wanted = candidate.keeping(dims)
        for method in methods:
            try:
                if is_quantized(wanted.model):  # verifies everything but the rounding, with the tolerance of float32
                    attempt(method, wanted.with_model(without_rounding(wanted.model)))
                attempt(method, wanted)
            except CompileError as error:
                attempts.setdefault(str(error), []).append(f"{method}{', dynamic sizes' if dims else ''}")
                continue
            if not dims and (fewer := fewer_dims(candidate.signature)):
                dims = _first_that_works(attempt, method, candidate, [*fewer, []])
            write_json(folder / FACTS, Conversion(method, tuple(dims), tuple(_reasons(attempts)[:1])))
            return
    raise CompileError(" ".join([failed, *_reasons(attempts), *([NOT_FROZEN] if stated else [])]))


def _reasons(attempts: Mapping[str, Sequence[str]]) -> list[str]:
    """Each distinct error once, after the names of the attempts that it ended."""
    return [f"{' and '.join(names)}: {error}" for error, names in attempts.items()]


def _first_that_works(
    attempt: Callable[[str, Candidate], None], method: str, candidate: Candidate, choices: Sequence[list[str]]
) -> list[str]:
    """The first of ``choices`` of dimensions for which ``attempt`` succeeds; the last one is known to work."""
    for dims in choices[:-1]:
        with contextlib.suppress(CompileError):
            attempt(method, candidate.keeping(dims))
            return dims
    attempt(method, candidate.keeping(choices[-1]))  # again, because failed attempts wrote to the same folder
    return choices[-1]


def read_conversion(folder: pathlib.Path) -> Conversion:
    """Read what :func:`convert` wrote beside the model."""
    return from_json(Conversion, json.loads((folder / FACTS).read_text(encoding="utf-8")))


class _ReturningWrites(nn.Module):
    """Wraps a model, and returns the inputs that it modified as additional outputs."""

    def __init__(self, model: nn.Module, written: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self._written = written

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        leaves = flatten((args, kwargs), "inputs")[0]
        output = self.model(*args, **kwargs)
        return output, [leaves[i].clone() for i in self._written]


def returning_writes(candidate: Candidate) -> Candidate:
    """``candidate``, with its model wrapped to return modified inputs as its last outputs, if it modifies any.

    Graphs of these runtimes cannot modify their inputs. The executable copies the values back with :func:`apply_writes`.
    """
    if not candidate.signature.writes:
        return candidate
    model = _ReturningWrites(candidate.model, candidate.signature.written).eval()
    return dataclasses.replace(candidate, model=model, signature=signature_with_writes(candidate.signature))


def signature_with_writes(signature: Signature) -> Signature:
    """The signature of the model from :func:`returning_writes`, for a model with ``signature``."""
    if not signature.writes:
        return signature
    written = tuple(signature.inputs[i] for i in signature.written)
    structure = Structure("tuple", items=(signature.output_structure, Structure("list", items=(TENSOR,) * len(written))))
    return dataclasses.replace(signature, outputs=(*signature.outputs, *written), output_structure=structure, writes=())


def apply_writes(
    leaves: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], written: Sequence[int]
) -> Sequence[torch.Tensor]:
    """Copy the last outputs to the inputs at the indices ``written``, and return the other outputs."""
    own = len(outputs) - len(written)
    with torch.no_grad():
        for place, value in zip(written, outputs[own:], strict=True):
            leaves[place].copy_(value)
    return outputs[:own]


def wrong_graph(run: Run, candidate: Candidate, signature: Signature) -> str | None:
    """How a float32 conversion differs from the model, as a sentence; ``None`` if it agrees. Compares the example, other
    values, and other sizes of the dynamic dimensions of ``signature``."""
    example_has_nan: bool | None = None
    allowed = _allowed(candidate)
    for alternatives in probes(candidate, signature):
        # skip probes with NaN unless the example has NaN: runtimes treat NaN differently
        usual = (form for form in alternatives if example_has_nan is not False or not _has_nan(form[2]))
        if (first := next(usual, None)) is None:
            continue
        what, leaves, expected = first
        if example_has_nan is None:  # the example comes first
            example_has_nan = _has_nan(expected)
        try:
            got = run(leaves)
        except CONVERSION_ERRORS as error:
            return f"it fails at {what} ({summary_line(str(error))[:200]})"
        if wrong := _difference(expected, got, allowed(leaves, expected)):
            return f"{wrong} at {what}{known_cause(candidate.model)}"
    return None


def _allowed(candidate: Candidate) -> Callable[[Row, Sequence[torch.Tensor]], float]:
    """The largest error of a conversion, relative to the largest output, for given inputs and expected outputs.

    A quantized model is verified exactly without rounding (see :func:`convert`). With rounding a runtime may round some values
    the other way, and each such step passes through all later layers, so the error may be as large as that of rounding itself.
    """
    usual = tolerance(candidate.model, TOLERANCE)
    if not is_quantized(candidate.model):
        return lambda leaves, expected: usual
    unrounded, structure = without_rounding(candidate.model), candidate.signature.input_structure

    def allowed(leaves: Row, expected: Sequence[torch.Tensor]) -> float:
        exact = flatten(call_model(unrounded, structure, leaves), "output")[0]
        pairs = [(a, b) for a, b in zip(exact, expected, strict=True) if not is_discrete(a.dtype)]
        return max([ROUNDED_TOLERANCE, *(2 * _error(a, b) for a, b in pairs)])

    return allowed


def probes(candidate: Candidate, signature: Signature) -> Iterator[Iterator[Probe]]:
    """Probes for a converted graph. Each is an iterator of alternatives, of which the first usable one counts. Inputs that the
    model refuses are left out."""
    yield _accepted(candidate, [("the example", list(candidate.leaves))])
    yield _accepted(candidate, [("other values", [_other_values(leaf, sign) for leaf in candidate.leaves]) for sign in (-1, 1)])
    if signature.dims:
        now = signature.sizes(candidate.leaves)
        other = {dim.name: dim.near(now[dim.name], 1 + i, 1, -1) for i, dim in enumerate(signature.dims)}
        least = {dim.name: dim.min for dim in signature.dims}
        # each minimum alone too, because the model may refuse all minimums together
        near = [other, least, *({**other, name: size} for name, size in least.items())]
        for sizes in (dict(found) for found in dict.fromkeys(tuple(sizes.items()) for sizes in near)):
            yield _accepted(candidate, [(_sizes_in_words(sizes), at_sizes(candidate, sizes))])
        for dim in signature.dims:
            if (far := largest_inputs(candidate, dim, other)) is not None:
                yield iter([(_sizes_in_words(far.sizes), far.leaves, far.reference[1])])


def _accepted(candidate: Candidate, inputs: Iterable[tuple[str, Row]]) -> Iterator[Probe]:
    found = ((what, row, reference_run(candidate, row)) for what, row in inputs)
    return ((what, row, each[1]) for what, row, each in found if each is not None)


def _sizes_in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _other_values(leaf: torch.Tensor, sign: int) -> torch.Tensor:
    """Other values of the same kind: in reverse order; floats times ``sign``."""
    if is_sorted(leaf):
        return repeat_sorted(leaf)
    turned = leaf.reshape(-1).flip(0).reshape(leaf.shape)
    return sign * turned if leaf.is_floating_point() else turned


def _has_nan(outputs: Sequence[torch.Tensor]) -> bool:
    return any(bool(out.isnan().any()) for out in outputs)


def _difference(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor], allowed: float) -> str | None:
    if len(expected) != len(got):
        return f"it gives {counted(len(got), 'output')} instead of {len(expected)}"
    pairs = enumerate(zip(expected, got, strict=True))
    wrong = (difference(f"output {i}", want, have, allowed, floor=allowed * 1e-6) for i, (want, have) in pairs)
    return next(filter(None, wrong), None)


def _error(want: torch.Tensor, have: torch.Tensor) -> float:
    found = errors(want, have)
    return float("inf") if found is None else max((error / max(size, 1e-6) for error, size in found), default=0.0)


def calibration_rows(candidate: Candidate, signature: Signature) -> list[Row]:
    """The calibration inputs in sizes that ``signature`` allows, without those with an empty tensor, which has no range. If the
    batch is frozen, larger batches are split.

    Raises:
        CompileError: no calibration input fits, or each has an empty tensor.
    """
    rows = [list(row) for row in candidate.flat_calibration()]
    if signature.dims != candidate.signature.dims:
        lost = lost_dims(candidate.signature, signature)
        rows = [piece for row in rows for piece in _pieces(row, candidate, lost)]
    fitting = [row for row in rows if signature.fits(row)]
    if not fitting:
        raise CompileError(f"No calibration input fits {signature.describe()}. Give calibration inputs of these sizes.")
    if not (filled := [row for row in fitting if all(leaf.numel() for leaf in row)]):
        empty = next(spec.name for spec, leaf in zip(signature.inputs, fitting[0], strict=True) if not leaf.numel())
        raise CompileError(
            f"Static int8 takes the ranges of activations from the calibration inputs, and in each of them a tensor is empty, "
            f"as {empty!r} in the first. Give calibration inputs in which no tensor has a size of 0."
        )
    return filled


def _pieces(row: Row, candidate: Candidate, lost: Sequence[str]) -> Iterator[Row]:
    """``row`` with the dimensions ``lost`` at the example's sizes: the batch is split, other dimensions are resized."""
    now, here = candidate.signature.sizes(candidate.leaves), candidate.signature.sizes(row)
    batch = candidate.signature.batch
    for name in (name for name in lost if name != batch):
        row = [resized(t, spec.shape, name, now[name]) for t, spec in zip(row, candidate.signature.inputs, strict=True)]
    if batch is None or batch not in lost:
        yield row
        return
    for start in range(0, here[batch] - now[batch] + 1, now[batch]):
        yield [
            t.narrow(spec.shape.index(batch), start, now[batch]) if batch in spec.shape else t
            for t, spec in zip(row, candidate.signature.inputs, strict=True)
        ]


def check_fields(backend: Any, about: Mapping[str, str]) -> None:
    """Check the fields that only int8 precisions use.

    Raises:
        UsageError: one is not at its default, and the precision is not the one that it is ``about``.
    """
    if backend.float_layers < 0:
        raise UsageError(f"{backend.name}: float_layers is {backend.float_layers}; it is 0 or more.")
    for name, what in about.items():
        value, default = getattr(backend, name), getattr(type(backend), name)
        if value != default and not (backend.quantizes if what == "int8" else backend.precision == what):
            raise UsageError(f"{backend.name}: {name}={value} is about {what}, not {backend.precision}. Leave it at {default}.")
