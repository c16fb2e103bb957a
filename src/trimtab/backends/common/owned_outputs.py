"""Outputs that their caller may write to, laid out as the model's own."""

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
    """``outputs``, in whatever the model nests them, with copies of those tensors that their caller could not change, or whose
    change a later call would see, because they lie in memory that is ``held`` (:func:`held_by`).

    A tensor that was made in inference mode refuses to be changed in place outside of it, as post-processing such as
    ``boxes[:, 2:] += boxes[:, :2]`` does, and so does a view that was taken there (``inference``). A copy that is made outside
    does not, so call this there; where the caller is in inference mode too, everything can be changed and only what is held is
    copied. Containers keep their class: tuples are made anew, the others filled in place.
    """
    inside = torch.is_inference_mode_enabled()
    if inside and not held:
        return outputs
    found: T = _owned(outputs, held, inside, inference)
    return found


def held_by(module: nn.Module) -> frozenset[int]:
    """Where the memory of all tensors begins that ``module`` keeps from call to call: parameters, buffers, plain attributes,
    and the constants of TorchScript."""
    kept = (part for tensor in _kept(module) for part in parts(tensor) if part.layout is torch.strided)
    return frozenset({_start(part) for part in kept} - {0})


def lent(outputs: Sequence[torch.Tensor], held: Collection[int]) -> tuple[int, ...]:
    """Which of ``outputs`` lie in memory that is ``held``."""
    return tuple(i for i, value in enumerate(outputs) if _start(value) in held)


def lent_twice(outputs: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Which outputs of two calls on different memory lie in the same, so that it can be none of the caller's."""
    pairs = enumerate(zip(outputs, again, strict=True))
    return tuple(i for i, (a, b) in pairs if a is b or _start(a) == _start(b) != 0)


def copied(outputs: Sequence[torch.Tensor], which: Collection[int]) -> Sequence[torch.Tensor]:
    """``outputs`` with copies of those in the places ``which``."""
    return [value.clone() if i in which else value for i, value in enumerate(outputs)] if which else outputs


def in_order(outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``outputs`` of a model that computes in NHWC, laid out as they are where it does not, so that ``view`` takes them."""
    return [value.contiguous() if value.dim() == 4 else value for value in outputs]


def branches(module: torch.jit.ScriptModule) -> bool:
    """Whether calls of ``module`` may take different paths."""
    return any(True for node in module.graph.nodes() for _ in node.blocks())


def _owned(value: Any, held: Collection[int], inside: bool, inference: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if not inside and (value.is_inference() or (inference and value._is_view())):
            return value.clone()
        return value.detach().clone() if held and _lies_in(value, held) else value
    if isinstance(value, tuple):
        items = [_owned(item, held, inside, inference) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [_owned(item, held, inside, inference) for item in value]
    elif isinstance(value, MutableMapping):
        for key in list(value):  # an item may be called items, and the outputs of transformers refuse update()
            value[key] = _owned(value[key], held, inside, inference)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            item = _owned(getattr(value, field.name), held, inside, inference)
            object.__setattr__(value, field.name, item)  # it may be frozen
    return value


def _lies_in(value: torch.Tensor, held: Collection[int]) -> bool:
    """Whether ``value`` lies in memory that is ``held``: as a view, or from where that begins.

    Its storage alone would tell, but asking for it takes as long as a small operation, and most outputs are neither.
    """
    try:
        return value.data_ptr() in held or (value._is_view() and _start(value) in held)
    except (RuntimeError, NotImplementedError):
        return False  # it has no memory of its own, such as a sparse one


def _start(tensor: torch.Tensor) -> int:
    """Where the memory begins that ``tensor`` lies in; 0 for one that has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _kept(module: nn.Module) -> Iterator[torch.Tensor]:
    seen = dict[int, Any]()  # what was looked at, held so that nothing else takes its place

    def again(value: Any) -> bool:
        """Whether it was looked at before, as what contains itself is."""
        known = id(value) in seen
        seen[id(value)] = value
        return known

    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            for name in part._c._method_names():  # a list of modules has no forward
                yield from _constants(part._c._get_method(name).graph)
        else:
            yield from (leaf for leaf in tree_leaves(vars(part), again) if isinstance(leaf, torch.Tensor))


def _constants(block: Any) -> Iterator[torch.Tensor]:
    for node in block.nodes():
        if node.kind() == "prim::Constant" and node.output().type().kind() != "NoneType":
            yield from (leaf for leaf in tree_leaves(node.output().toIValue()) if isinstance(leaf, torch.Tensor))
        for inner in node.blocks():
            yield from _constants(inner)
