"""Export a model as a program, and check that a compiled form still computes the same function. Used by the torch backends."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram
from torch.jit.frontend import FrontendError

from trimtab._internal.text import counted
from trimtab.backends.common.causes import first_line, known_cause
from trimtab.backends.common.exportable import exportable
from trimtab.backends.common.graph_call import graph_call
from trimtab.backends.common.other_sizes import ReferenceRun, at_sizes, largest_inputs, other_size, reference_run, shuffled
from trimtab.backends.common.process_lock import quiet
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.signature import Dim, Signature
from trimtab.errors import CompileError, IntegrityError
from trimtab.passes.common.quantized import fake_quantize_meta_kernels
from trimtab.safe_load.archives import save_program as write_program
from trimtab.tensors.comparison import NEAR_TIES, difference
from trimtab.tensors.weights import HALVES, weights

PROGRAM = "program.pt2"
SPECIALIZED_SIZES = (0, 1)
"""Sizes that tracers and exporters take for constants."""
RAISES = "it raises"
NOT_FROZEN = "The example's sizes alone were not tried, because the workload states others."
"""Added to a reason where :attr:`~trimtab.core.candidate.Candidate.all_sizes` excludes what usually comes next."""

EXPORT_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, FrontendError, subprocess.SubprocessError)
"""Errors of exporters and compilers. The list is broad because they run the user's model."""

Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

TOLERANCE = 0.02
REDUCED_TOLERANCE = 0.1
"""Largest errors, relative to the largest output, of the same function. Accuracy is judged later, on real data."""


def export_program(candidate: Candidate, *, plain: bool = False) -> tuple[ExportedProgram, Signature]:
    """Export the candidate as a program with flat inputs and outputs. Returns it and the signature that it supports.

    Dynamic dimensions are kept if the export allows them and the program agrees with the model at other sizes. Otherwise some
    of them (see :func:`fewer_dims`) or all are frozen to the example's sizes, unless the workload states them. Autocast is
    exported as a region, which torch.compile refuses; ``plain=True`` exports the casts instead.

    Raises:
        CompileError: the model cannot be exported, for example because of data-dependent control flow, or not for all sizes
            that the workload states.
    """
    if not candidate.signature.dims:
        return export_static(candidate, plain=plain)
    try:
        return export_dynamic(candidate, plain=plain)
    except CompileError as error:
        if candidate.all_sizes:
            raise CompileError(f"{error} {NOT_FROZEN}") from error
    static = export_static(candidate, plain=plain)  # a model with fixed shapes can still be exported for one shape
    for dims in fewer_dims(candidate.signature):
        with contextlib.suppress(CompileError):
            return export_dynamic(candidate.keeping(dims), plain=plain)
    return static


def export_dynamic(candidate: Candidate, *, plain: bool = False) -> tuple[ExportedProgram, Signature]:
    """Export the candidate with all dynamic dimensions, of which there is at least one; otherwise as :func:`export_program`.

    Raises:
        CompileError: the model cannot be exported so, or the program does something else at other sizes.
    """

    def exported(*, stated: bool) -> tuple[ExportedProgram, Signature]:
        shapes = dynamic_shapes(candidate.signature, stated=stated)
        program = _export(candidate, candidate.dynamic_leaves(), shapes, plain)
        return program, verified(candidate, program_call(program))

    with contextlib.suppress(CompileError):
        return exported(stated=True)
    return exported(stated=False)


def fewer_dims(signature: Signature) -> list[list[str]]:
    """Subsets of the dynamic dimensions to try if not all can be kept: all but the batch (for models that loop over it in
    Python), and the batch alone (for models that loop over a length)."""
    names = [dim.name for dim in signature.dims]
    parts = [name for name in names if name != signature.batch], [name for name in names if name == signature.batch]
    return list(parts) if all(parts) else []


def export_static(candidate: Candidate, *, plain: bool = False) -> tuple[ExportedProgram, Signature]:
    """Export the candidate for the example's sizes only. Returns the program and the signature without dynamic dimensions.

    Raises:
        CompileError: the model cannot be exported, or the program computes something else.
    """
    program = _export(candidate, candidate.own_leaves(), None, plain)  # copies: one tensor given twice would become one input
    call = program_call(program)
    if reason := disagreement(candidate, call, candidate.leaves):
        raise CompileError(f"torch.export made a program that does something else than the model: {reason}.")
    return program, frozen_signature(candidate, call)


def program_call(program: ExportedProgram) -> Call:
    """``program`` as a function of a list of tensors, without its input checks."""
    call = graph_call(bare_module(program))
    return lambda leaves: call(*leaves)


def bare_module(program: ExportedProgram) -> torch.fx.GraphModule:
    """The module of ``program`` without its input guards, because the executable checks its inputs itself.

    The guards cost 40 microseconds per call, and torch.compile would compile them too.
    """
    module: torch.fx.GraphModule = program.module(check_guards=False)
    module._forward_pre_hooks.clear()
    return module


def frozen_signature(candidate: Candidate, call: Call) -> Signature:
    """The candidate's signature with all dynamic dimensions frozen to the example's sizes."""
    if not candidate.signature.dims:
        return candidate.signature
    with torch.no_grad():
        return candidate.signature.without_dims(candidate.leaves, call(candidate.own_leaves()))


def lost_dims(whole: Signature, kept: Signature) -> list[str]:
    """Names of the dynamic dimensions of ``whole`` that are not in ``kept``."""
    there = {dim.name for dim in kept.dims}
    return [dim.name for dim in whole.dims if dim.name not in there]


def frozen_note(lost: Sequence[str]) -> list[str]:
    """A note about dimensions that were frozen while saving, if there are any."""
    note = f"What is saved takes the example's {', '.join(lost)} only, because the model does not export for others."
    return [note] if lost else []


def dynamic_shapes(signature: Signature, *, stated: bool = True) -> Any:
    """The ``dynamic_shapes`` argument of :func:`torch.export.export` for a :class:`~trimtab.core.candidate.FlatModel`.

    With ``stated=True`` torch enforces the bounds, and refuses dimensions for which an inner size may become 1, as after a
    strided convolution. With ``stated=False`` the bounds are hints, and the result must be verified. Dimensions with one
    allowed size are left out.
    """
    whole = _export_dim if stated else lambda dim: ExportDim.DYNAMIC(min=dim.min, max=dim.max)
    dims: dict[int | str, Any] = {dim.name: whole(dim) for dim in signature.dims if dim.min != dim.max}
    return (tuple({i: dims[s] for i, s in enumerate(spec.shape) if s in dims} or None for spec in signature.inputs),)


def _export_dim(dim: Dim) -> Any:
    """torch's form of ``dim``. A dimension with a step is a multiple of another dimension."""
    if dim.step == 1:
        return ExportDim(dim.name, min=dim.min, max=dim.max)
    most = None if dim.max is None else dim.max // dim.step
    return dim.step * ExportDim(f"{dim.name}_of_{dim.step}", min=dim.min // dim.step, max=most)


def verified(candidate: Candidate, call: Call, *, smallest: bool = True) -> Signature:
    """The candidate's signature as far as ``call`` supports it, found by comparing ``call`` with the model at other sizes.

    Sizes far above the example's are tried too (see :func:`largest_inputs`). With ``smallest``, sizes 0 and 1 are also tried,
    because tracers tend to specialize them; if one fails, the dimension's lower bound becomes the next size.

    Raises:
        CompileError: ``call`` fails or differs at another size; the message says how.
    """
    signature = candidate.signature
    if reason := disagreement(candidate, call, candidate.leaves):
        raise CompileError(f"The result does something else than the model: {reason}.")
    if not signature.dims:
        return signature
    others = {dim.name: other_size(candidate, dim.name, step) for step, dim in enumerate(signature.dims, start=1)}
    if reason := disagreement(candidate, call, at_sizes(candidate, others)):
        raise CompileError(f"The result does something else than the model at the sizes {others}: {reason}.")
    bounded = [_bounded(candidate, call, dim, others) for dim in signature.dims]
    signature = dataclasses.replace(signature, dims=tuple(bounded))
    if not smallest:
        return signature
    now = signature.sizes(candidate.leaves)
    dims = []
    for dim in signature.dims:
        kept = dim
        for size in (size for size in SPECIALIZED_SIZES if size in dim and size != dim.max):
            reason = disagreement(candidate, call, at_sizes(candidate, {**others, dim.name: size}))
            if reason and now[dim.name] == size:
                raise CompileError(f"The result does something else than the model where {dim.name!r} is {size}: {reason}.")
            kept = dataclasses.replace(kept, min=size + 1) if reason else kept
        dims.append(kept)
    return dataclasses.replace(signature, dims=tuple(dims))


def _bounded(candidate: Candidate, call: Call, dim: Dim, near: Mapping[str, int]) -> Dim:
    """``dim`` with an upper bound, if ``call`` refuses larger sizes, as packages of torch's compiler may do.

    Raises:
        CompileError: ``call`` gives wrong outputs at larger sizes, or refuses them because of another dimension.
    """
    far = largest_inputs(candidate, dim, near)
    if far is None or not (reason := _disagreement(candidate, call, far.leaves, far.reference)):
        return dim
    low, high = near[dim.name], far.sizes[dim.name]

    def refused(size: int) -> str | None:
        return disagreement(candidate, call, shuffled(candidate, {**far.sizes, dim.name: size}, dim.name))

    if not reason.startswith(RAISES) or refused(low):
        raise CompileError(f"The result does something else than the model at the sizes {dict(far.sizes)}: {reason}.")
    while (middle := (low + high) // 2 // dim.step * dim.step) > low:
        low, high = (low, middle) if refused(middle) else (middle, high)
    return dataclasses.replace(dim, max=low)


def disagreement(candidate: Candidate, call: Call, leaves: Sequence[torch.Tensor]) -> str | None:
    """How ``call`` differs from the model on ``leaves``, as text; ``None`` if it agrees or the model refuses ``leaves``."""
    found = reference_run(candidate, leaves)
    return None if found is None else _disagreement(candidate, call, leaves, found)


def _disagreement(candidate: Candidate, call: Call, leaves: Sequence[torch.Tensor], found: ReferenceRun) -> str | None:
    own, reference = found
    given = [leaf.clone() for leaf in leaves]
    try:
        with torch.no_grad(), quiet():
            outputs = call(list(given))
    except EXPORT_ERRORS as error:
        return f"{RAISES} {first_line(error)}"
    if len(outputs) != len(reference):
        return f"it gives {counted(len(outputs), 'tensor')} instead of {len(reference)}"
    reduced = candidate.settings.precision.autocast is not None or any(w.dtype in HALVES for w in weights(candidate.model))
    limit, turned = (REDUCED_TOLERANCE, REDUCED_TOLERANCE) if reduced else (TOLERANCE, NEAR_TIES)
    signature = candidate.signature
    rows = [(spec.name, a, b) for spec, a, b in zip(signature.outputs, reference, outputs, strict=True)]
    rows += [(f"what it writes to {signature.inputs[i].name}", own[i], given[i]) for i in signature.written]
    wrong = next((wrong for row in rows if (wrong := difference(*row, limit, near_ties=turned))), None)
    return None if wrong is None else wrong + known_cause(candidate.model)


def dense(leaves: Sequence[torch.Tensor], formats: Sequence[torch.memory_format]) -> list[torch.Tensor]:
    """``leaves`` in the memory formats ``formats``; tensors that already have theirs are not copied."""
    return [leaf.contiguous(memory_format=layout) for leaf, layout in zip(leaves, formats, strict=True)]


def copy_back(leaves: Sequence[torch.Tensor], converted: Sequence[torch.Tensor], written: Sequence[int]) -> None:
    """Copy the inputs at the indices ``written`` from ``converted``, which a call modified, back to ``leaves``."""
    with torch.no_grad():
        for i in written:
            if converted[i].data_ptr() != leaves[i].data_ptr():
                leaves[i].copy_(converted[i])


def memory_formats(signature: Signature, memory_format: str) -> list[torch.memory_format]:
    """The memory format of each input. The setting applies to 4-D inputs only."""
    lasts = memory_format == "channels_last"
    return [torch.channels_last if lasts and len(s.shape) == 4 else torch.contiguous_format for s in signature.inputs]


def save_program(program: ExportedProgram, folder: pathlib.Path) -> list[str]:
    """Write ``program`` into ``folder`` without pickles, and return the file's name.

    Raises:
        CompileError: the program contains something that cannot be written.
    """
    try:
        with quiet():
            write_program(program, folder / PROGRAM)
    except IntegrityError as error:
        raise CompileError(f"The model has no form that stands alone: {error}") from error
    return [PROGRAM]


def write_exported(candidate: Candidate, folder: pathlib.Path, *, plain: bool = False) -> Signature:
    """Export the candidate with :func:`export_program`, write it into ``folder``, and return the signature that it supports.

    A program with dynamic sizes that cannot be written, for example because it halves a size and rounds up, is exported again
    for the example's sizes, unless the workload states others.

    Raises:
        CompileError: the model cannot be exported, or its program cannot be written.
    """
    program, signature = export_program(candidate, plain=plain)
    _widen(program, signature)
    try:
        _write(program, folder)
    except CompileError:
        if not signature.dims or candidate.all_sizes:
            raise
        program, signature = export_static(candidate, plain=plain)
        _write(program, folder)
    return signature


def _widen(program: ExportedProgram, signature: Signature) -> None:
    """Widen the range constraints of ``program`` to the sizes in ``signature``, which were verified.

    torch narrows them if an operator computes small sizes differently, as ``cdist`` does. They would bind users who load the
    program without trimtab.
    """
    from torch.utils._sympy.numbers import int_oo  # imported late: sympy takes half a second
    from torch.utils._sympy.value_ranges import ValueRanges

    dims, names = {dim.name: dim for dim in signature.dims}, program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec, name in zip(signature.inputs, names, strict=True):
        for axis, size in zip(spec.shape, nodes[str(name)].meta["val"].shape, strict=True):
            if axis in dims and isinstance(size, torch.SymInt) and (symbol := size.node.expr) in program.range_constraints:
                known, dim = program.range_constraints[symbol], dims[str(axis)]
                upper = known.upper if dim.max is not None and dim.max <= known.upper else dim.max or int_oo
                program.range_constraints[symbol] = ValueRanges(min(known.lower, dim.min), upper)


def _write(program: ExportedProgram, folder: pathlib.Path) -> None:
    """Write ``program``; if it contains operators of the exporter only, as for ``torch.vmap``, decompose it first."""
    try:
        save_program(program, folder)
    except CompileError as error:
        try:
            with torch.no_grad(), quiet():
                program = program.run_decompositions({})
        except EXPORT_ERRORS:
            raise error from None
        save_program(program, folder)


def _export(candidate: Candidate, leaves: Sequence[torch.Tensor], shapes: Any, plain: bool) -> ExportedProgram:
    converted = dense(leaves, memory_formats(candidate.signature, candidate.settings.memory_format))
    try:
        with torch.no_grad(), quiet(), fake_quantize_meta_kernels():
            program = torch.export.export(exportable(candidate), tuple(converted), dynamic_shapes=shapes)
            return program.run_decompositions({}) if plain and candidate.settings.precision.autocast else program
    except EXPORT_ERRORS as error:
        raise CompileError(f"torch.export cannot take this model: {first_line(error)}.") from error
