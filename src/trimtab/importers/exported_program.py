"""Workloads from ``.pt2`` files, which :func:`torch.export.save` writes."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from trimtab.core.candidate import MODEL_ERRORS
from trimtab.core.dynamic_dims import name_groups
from trimtab.core.signature import Dim, input_names, parameter_names
from trimtab.core.workload import as_call
from trimtab.errors import UsageError
from trimtab.importers.input_spec import InputSpec, keep_working_sizes
from trimtab.safe_load.archives import load_program
from trimtab.tensors.structure import flatten, unflatten
from trimtab.tensors.torchscript_modules import allow_modes


@dataclasses.dataclass(frozen=True)
class ProgramFile:
    """Factory of the module of an exported program."""

    path: str

    def __call__(self) -> nn.Module:
        """The module, with the file's weights."""
        return _module(load_program(self.path))

    def input_spec(self) -> InputSpec:
        """Names, dtypes and shapes of the program's inputs.

        Raises:
            IntegrityError: the file is damaged, or contains something that models do not need.
            UsageError: the program was exported in training mode, or has inputs that are not tensors.
        """
        program = load_program(self.path)
        module = _module(program)
        if any(_trains(node) for node in program.graph.nodes if node.op == "call_function"):
            raise UsageError(
                f"{self.path} was exported in training mode: it drops out values or updates statistics. Export it again after "
                "model.eval()."
            )
        return _input_spec(program, module, pathlib.Path(self.path).name)

    def verified_spec(self, spec: InputSpec, example: Any) -> tuple[InputSpec, tuple[str, ...]]:
        """``spec`` with only those dynamic sizes that the program accepts, and notes. The program's guards, which state its
        requirements, are not read; sizes are tried instead."""
        program = load_program(self.path)
        module = _module(program)
        args, kwargs = as_call(example)
        leaves = flatten((args, kwargs), "the example inputs")[0]

        def takes(changed: list[torch.Tensor]) -> bool:
            args, kwargs = unflatten(spec.structure, [leaf.clone() for leaf in changed])
            try:
                with torch.no_grad():
                    module(*args, **kwargs)
            except MODEL_ERRORS:
                return False
            return True

        found, notes = keep_working_sizes(spec, leaves, takes)
        if tied := [f"{name} (axis {axis})" for name, axis in _tied(program, spec)]:
            notes += (f"{spec.source} computes sizes of {', '.join(tied)} from others; they are fixed at the example's.",)
        return found, notes


def _module(program: ExportedProgram) -> fx.GraphModule:
    """The program as a module on the CPU in evaluation mode, which allows ``train()`` and ``eval()``."""
    values = (*program.state_dict.values(), *program.constants.values())
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        program = move_to_device_pass(program, "cpu")  # exported on a GPU, or with GPU constants in the graph
    module: fx.GraphModule = program.module(check_guards=False)
    module._forward_pre_hooks.clear()  # input guards; executables check their inputs
    allow_modes(module)
    return module.eval()


def _trains(node: fx.Node) -> bool:
    """Whether it is dropout or batch normalization in training mode."""
    name = str(node.target)
    if name.startswith(("aten.dropout", "aten.native_dropout", "aten.feature_dropout")):
        return bool(node.args[-1])
    return name.startswith("aten.batch_norm") and bool(node.args[5])


def _input_spec(program: ExportedProgram, module: nn.Module, source: str) -> InputSpec:
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    given = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = [arg.value if isinstance(arg, ConstantArgument) else nodes[arg.name] for arg in given]
    args, kwargs = pytree.tree_unflatten([_stand_in(value) for value in values], program.call_spec.in_spec)
    leaves, structure = flatten((tuple(args), dict(kwargs)), f"The input of {source}")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    names = input_names(parameter_names(module.forward, len(args)), structure)
    shapes, hints = _shapes(program, names, tensors)
    return InputSpec(
        source=source,
        names=tuple(names),
        dtypes=tuple(leaf.dtype for leaf in leaves),
        shapes=shapes,
        structure=structure,
        hints=hints,
        bounds=_bounds(program, names),
    )


def _user_inputs(program: ExportedProgram) -> Iterator[fx.Node]:
    """The placeholders of tensor inputs. Constants such as ``None`` have placeholders too, which are skipped."""
    signature = program.graph_signature
    wanted = {s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)}
    return (node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted)


def _tied(program: ExportedProgram, spec: InputSpec) -> Iterator[tuple[str, int]]:
    """The axes that are dynamic in the program and fixed in ``spec``."""
    found = (node.meta["val"] for node in _user_inputs(program) if isinstance(node.meta.get("val"), torch.Tensor))
    for name, tensor, shape in zip(spec.names, found, spec.shapes, strict=True):
        yield from (
            (name, axis)
            for axis, size in enumerate(tensor.shape)
            if isinstance(size, torch.SymInt) and isinstance(shape[axis], int)
        )


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([1] * value.dim(), dtype=value.dtype, device="meta")
    return value


def _shapes(
    program: ExportedProgram, names: list[str], tensors: list[torch.Tensor]
) -> tuple[tuple[tuple[int | Dim, ...], ...], dict[str, int]]:
    """Shapes of the inputs with a dimension for each symbol, or multiple of a symbol, that occurs in one size only. Other
    symbolic sizes are fixed at their value in the export."""
    places: dict[str, list[tuple[str, int]]] = {}
    sizes: dict[str, Any] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(str(size.node.expr), []).append((name, axis))
                sizes[str(size.node.expr)] = size.node
    uses = collections.Counter(str(symbol) for node in sizes.values() for symbol in node.expr.free_symbols)
    free = {
        text: where
        for text, where in places.items()
        if _multiple(sizes[text].expr) and all(uses[str(symbol)] == 1 for symbol in sizes[text].expr.free_symbols)
    }
    dims = dict(zip(free, name_groups(list(free.values())), strict=True))
    bounded = {text: _dim(program, sizes[text].expr, name) for text, name in dims.items()}

    def size_of(size: int | torch.SymInt) -> int | Dim:
        if isinstance(size, int):
            return size
        found = bounded.get(str(size.node.expr))
        return found if found is not None else int(size.node.hint)

    hints = {dim.name: int(sizes[text].hint) for text, dim in bounded.items() if sizes[text].has_hint()}
    return tuple(tuple(size_of(size) for size in tensor.shape) for tensor in tensors), hints


def _multiple(expression: Any) -> int:
    """The factor, if ``expression`` is a positive multiple of one symbol; else 0."""
    times, rest = expression.as_coeff_Mul()
    return int(times) if rest.is_Symbol and times.is_Integer and times > 0 else 0


def _dim(program: ExportedProgram, expression: Any, name: str) -> Dim:
    step, (symbol,) = _multiple(expression), expression.free_symbols
    found = program.range_constraints.get(symbol)
    if found is None:
        return Dim(name, step=step)
    upper = int(found.upper) * step if found.upper.is_number and found.upper < 2**31 else None
    return Dim(name, max(int(found.lower), 1) * step, upper, step)


def _bounds(program: ExportedProgram, names: list[str]) -> dict[str, int]:
    """The number of rows of the embedding tables that integer inputs index directly."""
    found: dict[str, int] = {}
    for name, node in zip(
        names, (n for n in _user_inputs(program) if isinstance(n.meta.get("val"), torch.Tensor)), strict=True
    ):
        for user in node.users:
            if str(user.target).startswith("aten.embedding") and user.args[1] is node and isinstance(user.args[0], fx.Node):
                rows = int(user.args[0].meta["val"].shape[0])
                found[name] = min(rows, found.get(name, rows))
    return found
