"""Copy outputs that callers cannot modify safely, and give them the layout of the model's own outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trimtab.tensors.weights import parts

T = TypeVar("T")


def owned(outputs: T, held: Collection[int] = (), *, inference: bool = False) -> T:
    """``outputs``, in any nested structure. Tensors are copied that the caller could not modify, or that share ``held`` memory
    (see :func:`held_addresses`), so that later calls would see the change.

    A tensor that was made in inference mode cannot be modified outside of it, for example by ``boxes[:, 2:] += boxes[:, :2]``;
    neither can a view that was made there (``inference``). A copy that is made outside can, so call this function outside. If
    the caller is in inference mode itself, only ``held`` memory needs copies. Containers keep their class: tuples are rebuilt,
    others are modified in place.
    """
    inside = torch.is_inference_mode_enabled()
    if inside and not held:
        return outputs
    found: T = _owned(outputs, held, inside, inference)
    return found


def held_addresses(module: nn.Module) -> frozenset[int]:
    """Addresses of the memory that ``module`` keeps between calls: parameters, buffers, attributes, constants."""
    kept = (part for tensor in _held_tensors(module) for part in parts(tensor) if part.layout is torch.strided)
    return frozenset({_storage_address(part) for part in kept} - {0})


def held_outputs(outputs: Sequence[torch.Tensor], held: Collection[int]) -> tuple[int, ...]:
    """Indices of the ``outputs`` that lie in ``held`` memory."""
    return tuple(i for i, value in enumerate(outputs) if _storage_address(value) in held)


def reused_outputs(outputs: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Indices of the outputs that two calls on different inputs return in the same memory: they do not belong to the caller."""
    pairs = enumerate(zip(outputs, again, strict=True))
    return tuple(i for i, (a, b) in pairs if a is b or _storage_address(a) == _storage_address(b) != 0)


def with_copies(outputs: Sequence[torch.Tensor], which: Collection[int]) -> Sequence[torch.Tensor]:
    """``outputs`` with copies at the indices ``which``."""
    return [value.clone() if i in which else value for i, value in enumerate(outputs)] if which else outputs


def contiguous(outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``outputs`` of an NHWC model as contiguous tensors, as the original returns them, so that ``view`` works."""
    return [value.contiguous() if value.dim() == 4 else value for value in outputs]


def has_control_flow(module: torch.jit.ScriptModule) -> bool:
    """Whether ``module`` contains control flow."""
    return any(True for node in module.graph.nodes() for _ in node.blocks())


def _owned(value: Any, held: Collection[int], inside: bool, inference: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if not inside and (value.is_inference() or (inference and value._is_view())):
            return value.clone()
        return value.detach().clone() if held and _shares_memory(value, held) else value
    if isinstance(value, tuple):
        items = [_owned(item, held, inside, inference) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [_owned(item, held, inside, inference) for item in value]
    elif isinstance(value, MutableMapping):
        for key in list(value):  # not items(): an item may be called "items"; not update(): transformers' outputs refuse it
            value[key] = _owned(value[key], held, inside, inference)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            item = _owned(getattr(value, field.name), held, inside, inference)
            object.__setattr__(value, field.name, item)  # the dataclass may be frozen
    return value


def _shares_memory(value: torch.Tensor, held: Collection[int]) -> bool:
    """Whether ``value`` lies in ``held`` memory: as a view, or from its start.

    The cheap checks come first: reading a storage takes as long as a small operation, and most outputs are no views.
    """
    try:
        return value.data_ptr() in held or (value._is_view() and _storage_address(value) in held)
    except (RuntimeError, NotImplementedError):
        return False  # no memory of its own, for example a sparse tensor


def _storage_address(tensor: torch.Tensor) -> int:
    """The address of the storage of ``tensor``; 0 without a storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _held_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    seen = dict[int, Any]()  # id -> object; holding the object keeps its id from being reused

    def again(value: Any) -> bool:
        """Whether ``value`` was visited before, as in recursive structures."""
        known = id(value) in seen
        seen[id(value)] = value
        return known

    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            for name in part._c._method_names():  # a ModuleList has no forward
                yield from _constants(part._c._get_method(name).graph)
        else:
            yield from (leaf for leaf in tree_leaves(vars(part), again) if isinstance(leaf, torch.Tensor))


def _constants(block: Any) -> Iterator[torch.Tensor]:
    for node in block.nodes():
        if node.kind() == "prim::Constant" and node.output().type().kind() != "NoneType":
            yield from (leaf for leaf in tree_leaves(node.output().toIValue()) if isinstance(leaf, torch.Tensor))
        for inner in node.blocks():
            yield from _constants(inner)
