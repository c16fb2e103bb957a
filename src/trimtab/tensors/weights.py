"""The weights of a model: their tensors, bytes and rounding tolerance."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

HALVES = (torch.float16, torch.bfloat16)
ROUNDINGS = 32
"""Allowed relative error of a half-precision model, in machine epsilons of its weights."""


def weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters of ``model``, with those of TorchScript modules held as plain attributes."""
    yield from model.parameters()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.jit.ScriptModule):
                yield from value.parameters()


def is_composed(tensor: torch.Tensor) -> bool:
    """True for a wrapper subclass made of other tensors, such as the quantized weights of torchao."""
    return is_traceable_wrapper_subclass(tensor)


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that ``tensor`` is made of: itself, or the inner tensors of a wrapper subclass."""
    if not is_composed(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(getattr(tensor, name))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in row-major order, shape (bytes,), uint8; lazy conjugation and negation are applied."""
    return in_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, shape (bytes,), uint8. ``as_strided`` is for tensors of one element, which are
    contiguous with any stride and cannot be viewed otherwise."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tolerance(model: nn.Module, least: float) -> float:
    """Allowed difference of two correct forms of ``model``, relative to the largest value: ``least`` for float32, and
    :data:`ROUNDINGS` machine epsilons for half-precision weights."""
    return max((ROUNDINGS * torch.finfo(w.dtype).eps for w in weights(model) if w.dtype in HALVES), default=least)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, buffers and packed quantized weights; shared memory counts once."""
    spans: dict[int, set[tuple[int, int]]] = {}
    sizes: dict[int, int] = {}
    others = 0
    for tensor in _stored(model):
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            others += tensor.numel() * tensor.element_size()
            continue
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        start = tensor.storage_offset() * tensor.element_size()
        spans.setdefault(storage.data_ptr(), set()).add((int(start), tensor.numel() * tensor.element_size()))
    # views may overlap: never more than the whole storage
    return others + sum(min(sum(size for _, size in found), sizes[key]) for key, found in spans.items())


def _stored(model: nn.Module) -> Iterator[torch.Tensor]:
    """All tensors that hold weights, with those inside tensor subclasses and packed quantized modules."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield from parts(tensor)
    for module in model.modules():
        yield from _packed(module)


def _packed(module: nn.Module) -> list[torch.Tensor]:
    """Weight and bias of a module of torch.ao.nn.quantized, where they are methods."""
    methods = [getattr(module, name, None) for name in ("weight", "bias")]
    if not type(module).__module__.startswith("torch.ao.nn.") or not callable(methods[0]):
        return []
    values = [method() for method in methods if callable(method)]
    return [value for value in values if isinstance(value, torch.Tensor)]
