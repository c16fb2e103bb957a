"""What a model learned, wherever it keeps it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

HALVES = (torch.float16, torch.bfloat16)
ROUNDINGS = 32
"""Times the machine epsilon of its weights that a right form of a half-precision model may be off by."""


def weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters of ``model``, those of TorchScript that a module holds beside its registers too."""
    yield from model.parameters()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.jit.ScriptModule):
                yield from value.parameters()


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is made of other tensors and has no memory of its own, as the quantized weights of torchao are."""
    return is_traceable_wrapper_subclass(tensor)


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that ``tensor`` is made of: itself, or what stands inside of one that is composed."""
    if not is_composed(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(getattr(tensor, name))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain dense tensor, row by row; of its values as they are read, which may be conjugates of those kept."""
    return in_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes. One value counts as contiguous whatever its stride is, as where it was cut
    from a column, and torch then has no bytes of it."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tolerance(model: nn.Module, least: float) -> float:
    """What two right forms of ``model`` may differ by, relative to the largest value: ``least``, which is for float32, or what
    some roundings of its half-precision weights come to."""
    return max((ROUNDINGS * torch.finfo(w.dtype).eps for w in weights(model) if w.dtype in HALVES), default=least)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; memory that several of them share counts once, packed quantized weights too."""
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
    # A transposed view is another span of the same bytes, hence never more than the whole storage.
    return others + sum(min(sum(size for _, size in found), sizes[key]) for key, found in spans.items())


def _stored(model: nn.Module) -> Iterator[torch.Tensor]:
    """All tensors that hold weights, down to those inside tensor subclasses and packed quantized modules."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield from parts(tensor)
    for module in model.modules():
        yield from _packed(module)


def _packed(module: nn.Module) -> list[torch.Tensor]:
    """Weight and bias of a module of torch.ao.nn.quantized, which gives them through methods."""
    methods = [getattr(module, name, None) for name in ("weight", "bias")]
    if not type(module).__module__.startswith("torch.ao.nn.") or not callable(methods[0]):
        return []
    values = [method() for method in methods if callable(method)]
    return [value for value in values if isinstance(value, torch.Tensor)]
