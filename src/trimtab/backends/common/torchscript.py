"""Convert a model to TorchScript by tracing or from its source, the only form that keeps data-dependent control flow."""

from __future__ import annotations

import contextlib
import math
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TracerWarning

from trimtab._internal.text import summary_line
from trimtab.backends.common.causes import first_line
from trimtab.backends.common.decisions import refuse_decisions
from trimtab.backends.common.exportable import exportable, plain_weights
from trimtab.backends.common.exported_program import (
    EXPORT_ERRORS,
    Call,
    disagreement,
    fewer_dims,
    frozen_signature,
    verified,
)
from trimtab.backends.common.process_lock import SHARED, quiet
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Signature
from trimtab.errors import CompileError, IntegrityError
from trimtab.safe_load.archives import check_torchscript, load_torchscript
from trimtab.tensors.structure import Structure

SCRIPT = "script.pt"

TRACE_PROBES = 4
"""Most calibration batches that a trace is compared on."""


def trace_or_script(candidate: Candidate) -> tuple[torch.jit.ScriptModule, list[str]]:
    """The candidate as TorchScript with flat inputs and outputs, not yet frozen, and notes.

    A trace follows one path through the model. It is used if there are no decisions on data and it agrees with the model on
    other inputs and sizes. Otherwise the source is compiled. If that fails too, a trace with tracer warnings or with fewer
    dynamic dimensions is accepted, unless the model decides on data or the workload states the dimensions.

    Raises:
        CompileError: neither the trace nor the compiled source computes the model's function.
    """
    module, doubts, wrong = _trace(candidate)
    if module is not None and not doubts and not wrong:
        return module, []
    try:
        return script_flat(candidate), [f"Compiled from source, because a trace was not safe: {wrong or doubts[0]}."]
    except CompileError as error:
        if module is None or (wrong and (candidate.all_sizes or _wrong_at_kept_sizes(candidate, module))):
            raise CompileError(f"TorchScript cannot take this model. Traced: {wrong}. From source: {error}") from error
    return module, [f"A trace of one path through the model, which the tracer warned about: {doubt}." for doubt in doubts[:1]]


def kept_signature(candidate: Candidate, module: Any) -> Signature:
    """The candidate's signature with the dynamic dimensions that ``module`` supports."""
    names = [dim.name for dim in candidate.signature.dims]
    for dims in (names, *fewer_dims(candidate.signature)):
        with contextlib.suppress(CompileError):
            return verified(candidate.keeping(dims), _flat_call(module))
    return frozen_signature(candidate, _flat_call(module))


def script_flat(candidate: Candidate) -> torch.jit.ScriptModule:
    """Compile the candidate's source to TorchScript with flat inputs and a tuple of tensors as output.

    Raises:
        CompileError: the source or the structure of inputs or outputs is not valid TorchScript, or autocast is set, which only
            the flat module applies.
    """
    if candidate.settings.precision.autocast is not None:
        raise CompileError("The model's source cannot be compiled under autocast.")
    holder = type("Flat", (nn.Module,), {})()  # a new class: scripts of one class share their methods
    holder.model = candidate.own_model()
    for part in holder.model.modules():
        plain_weights(part)
    try:
        with quiet():
            module: torch.jit.ScriptModule = torch.jit.script(holder.eval())
            module.define(_forward_source(candidate))
    except EXPORT_ERRORS as error:
        raise CompileError(f"torch.jit.script cannot take this model: {first_line(error)}.") from error
    if reason := disagreement(candidate, _flat_call(module), candidate.leaves):
        raise CompileError(f"torch.jit.script made something else of the model: {reason.rstrip('.')}.")
    return module


def frozen(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """A frozen copy of ``module``: weights become constants, and batch norms are folded.

    Raises:
        CompileError: freezing failed.
    """
    try:
        with quiet():
            result: torch.jit.ScriptModule = torch.jit.freeze(module.eval())
    except EXPORT_ERRORS as error:
        raise CompileError(f"torch.jit.freeze failed: {first_line(error)}.") from error
    return result


def save_script(module: torch.jit.ScriptModule, folder: pathlib.Path, name: str = SCRIPT) -> list[str]:
    """Write the frozen form of ``module``. The module must not have been through ``optimize_for_inference``.

    That pass turns weights into opaque constants of oneDNN; the file would be small and could not be loaded.

    Raises:
        CompileError: the module calls Python, as traces of custom autograd functions do, or contains something that
            :func:`load_script` refuses, such as a custom operator.
    """
    whole = frozen(module)
    try:
        with quiet():
            whole.save(str(folder / name))
    except RuntimeError as error:
        raise CompileError(f"Its TorchScript cannot be written: {first_line(error)}.") from error
    try:
        check_torchscript(folder / name)
    except IntegrityError as error:
        (folder / name).unlink()
        raise CompileError(f"Its TorchScript could not be loaded again: {error}") from error
    return [name]


def load_script(folder: pathlib.Path, name: str = SCRIPT) -> torch.jit.ScriptModule:
    """Load what :func:`save_script` wrote."""
    with SHARED, warnings.catch_warnings(action="ignore"):
        return load_torchscript(folder / name)


def _trace(candidate: Candidate) -> tuple[torch.jit.ScriptModule | None, list[str], str | None]:
    """The traced module (``None`` if tracing failed), the tracer's warnings, and how the result differs from the model."""
    try:
        refuse_decisions(candidate, candidate.leaves)
    except CompileError as error:
        return None, [], str(error).rstrip(".")
    flat = exportable(candidate, traced=True)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", TracerWarning)
        try:
            module = torch.jit.trace(flat, tuple(candidate.own_leaves()), check_trace=False)  # type: ignore[no-untyped-call]
        except EXPORT_ERRORS as error:
            return None, [], first_line(error)
    doubts = [summary_line(str(w.message)) for w in caught if isinstance(w.message, TracerWarning)]
    return module, doubts, _wrong(candidate, _flat_call(module))


def _wrong_at_kept_sizes(candidate: Candidate, module: Any) -> str | None:
    """How a trace differs from the model at the sizes that it supports, with other dynamic dimensions frozen."""
    kept = candidate.keeping([dim.name for dim in kept_signature(candidate, module).dims])
    return _wrong(kept, _flat_call(module))


def _wrong(candidate: Candidate, call: Call) -> str | None:
    found = [disagreement(candidate, call, leaves) for leaves in (candidate.leaves, _negated(candidate.leaves))]
    fitting = [leaves for leaves in candidate.flat_calibration() if candidate.signature.fits(leaves)]
    found += [disagreement(candidate, call, leaves) for leaves in fitting[:TRACE_PROBES]]
    return next((reason for reason in found if reason), None) or _wrong_at_other_sizes(candidate, call)


def _wrong_at_other_sizes(candidate: Candidate, call: Call) -> str | None:
    try:
        kept = verified(candidate, call)
    except CompileError as error:
        return str(error).rstrip(".")
    pairs = zip(candidate.signature.dims, kept.dims, strict=True)
    return next((f"it takes {dim.name} up to {dim.max} only" for whole, dim in pairs if dim.max != whole.max), None)


def _negated(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs that take another branch in most decisions: floats negated; integers, which are often indices, unchanged."""
    return [-leaf if leaf.dtype.is_floating_point else leaf for leaf in leaves]


def _flat_call(module: Any) -> Call:
    return lambda leaves: module(*leaves)


def _forward_source(candidate: Candidate) -> str:
    """TorchScript source of a flat ``forward`` around ``self.model``, which keeps its own structure of inputs and outputs."""
    signature = candidate.signature
    inputs = [f"x{i}" for i in range(len(signature.inputs))]
    lasts = candidate.settings.memory_format == "channels_last"
    laid = [f"{n}.contiguous(memory_format=torch.channels_last)" if lasts and len(s.shape) == 4 else n
            for n, s in zip(inputs, signature.inputs, strict=True)]  # fmt: skip
    rest = iter(laid)
    args, kwargs = signature.input_structure.items
    given = [_input_expression(item, rest) for item in args.items]
    given += [f"{key}={_input_expression(item, rest)}" for key, item in zip(kwargs.keys, kwargs.items, strict=True)]
    taken = _output_expressions(signature.output_structure, "out")
    head = ", ".join(["self", *(f"{name}: Tensor" for name in inputs)])
    return f"def forward({head}):\n    out = self.model.forward({', '.join(given)})\n    return ({', '.join(taken)},)\n"


def _input_expression(structure: Structure, names: Any) -> str:
    """An expression that builds a value of ``structure`` from the next of ``names``."""
    if structure.kind == "tensor":
        return str(next(names))
    if structure.kind == "constant":
        odd = isinstance(structure.value, float) and not math.isfinite(structure.value)
        return f"float('{structure.value}')" if odd else repr(structure.value)
    items = [_input_expression(item, names) for item in structure.items]
    if structure.kind == "tuple":
        return f"({', '.join(items)},)"
    if structure.kind == "list":
        return f"[{', '.join(items)}]"
    if structure.kind == "dict":
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in zip(structure.keys, items, strict=True)) + "}"
    raise TypeError(f"an input of kind {structure.kind} has no word in TorchScript")


def _output_expressions(structure: Structure, place: str) -> list[str]:
    """Expressions for the tensors in the value ``place``, in flat order."""
    if structure.kind == "tensor":
        return [place]
    if structure.kind in ("tuple", "list", "namedtuple"):  # a named tuple annotated as tuple has no fields in TorchScript
        places = [f"{place}[{i}]" for i in range(len(structure.items))]
    elif structure.kind == "dict":
        places = [f"{place}[{key!r}]" for key in structure.keys]
    else:
        places = [f"{place}.{key}" for key in structure.keys]
    return [leaf for item, where in zip(structure.items, places, strict=True) for leaf in _output_expressions(item, where)]
