"""ONNX operators that rearrange values: shapes, slices, gathering, padding."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch.nn import functional

from trimtab.importers.onnx.operators import op
from trimtab.importers.onnx.values import Host, ints, tensor, unsupported

END_OF_AXIS = 2**31
"""ONNX writes "to the end of the axis" as a huge number; from here on numbers count as such."""
MAX_AXES = 8
"""Integer vectors of at most this length are assumed to be shapes."""


@op("Shape")
def shape(x: Any, *, start: int = 0, end: int | None = None) -> Host:
    sizes = list(x.shape) if isinstance(x, torch.Tensor) else [] if x.scalar else [len(x.values)]
    return Host(sizes[start:end], False)


@op("Size")
def size(x: Any) -> Host:
    return Host([len(x.values) if isinstance(x, Host) else x.numel()], True)


@op("Reshape")
def reshape(x: Any, sizes: Any, *, allowzero: int = 0) -> Any:
    wanted = ints(sizes)
    if isinstance(x, Host):
        return Host(x.values, not wanted) if wanted in ([], [-1], [len(x.values)]) else torch.reshape(tensor(x), wanted)
    if not allowzero:
        wanted = [x.shape[i] if isinstance(s, int) and s == 0 else s for i, s in enumerate(wanted)]
    return torch.reshape(x, wanted)


@op("Flatten")
def flatten(x: torch.Tensor, *, axis: int = 1) -> torch.Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 1:
        return torch.flatten(x, 1) if x.dim() > 1 else x[:, None]
    return (
        torch.reshape(x, (1, -1))
        if axis == 0
        else torch.flatten(torch.flatten(x, axis) if axis < x.dim() else x[..., None], 0, axis - 1)
    )


@op("Squeeze")
def squeeze(x: Any, axes: Any = None) -> Any:
    if isinstance(x, Host):
        return Host(x.values, True)
    return torch.squeeze(x) if axes is None else torch.squeeze(x, tuple(ints(axes)))


@op("Unsqueeze")
def unsqueeze(x: Any, axes: Any) -> Any:
    where = ints(axes)
    if isinstance(x, Host) and x.scalar and len(where) == 1:
        return Host(x.values, False)
    x = tensor(x)
    rank = x.dim() + len(where)
    for axis in sorted(a % rank for a in where):
        x = torch.unsqueeze(x, axis)
    return x


@op("Transpose")
def transpose(x: torch.Tensor, *, perm: list[int] | None = None) -> torch.Tensor:
    return torch.permute(x, tuple(perm) if perm is not None else tuple(reversed(range(x.dim()))))


@op("Concat")
def concat(*parts: Any, axis: int) -> Any:
    if all(isinstance(part, Host) for part in parts):
        return Host([value for part in parts for value in part.values], False)
    return torch.cat([tensor(part) for part in parts], axis)


@op("Split")
def split(x: Any, sizes: Any = None, *, axis: int = 0, num_outputs: int | None = None) -> tuple[Any, ...]:
    x = tensor(x)
    if sizes is not None:
        return tuple(torch.split(x, ints(sizes), axis))
    if num_outputs is None:
        raise unsupported("a Split in it says neither sizes nor a count")
    return tuple(torch.split(x, -(-x.shape[axis] // num_outputs), axis))


@op("Slice")
def slice_(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    first, last = ints(starts), ints(ends)
    where = ints(axes) if axes is not None else list(range(len(first)))
    step = ints(steps) if steps is not None else [1] * len(first)
    if isinstance(x, Host):
        return Host(x.values[first[0] : last[0] if abs(last[0]) < END_OF_AXIS else None : step[0]], False)
    for axis, begin, end, by in zip(where, first, last, step, strict=True):
        if isinstance(by, int) and by < 0:
            x = _backwards(x, axis, begin, end, by)
            continue
        index: list[Any] = [builtins.slice(None)] * x.dim()
        far = isinstance(end, int) and end >= END_OF_AXIS
        index[axis] = builtins.slice(begin, None if far else end, by)
        x = x[tuple(index)]
    return x


def _backwards(x: torch.Tensor, axis: int, begin: int, end: int, by: int) -> torch.Tensor:
    """A slice with a negative step, which torch lacks. Only step -1 over the whole axis is supported, as a flip."""
    if (begin not in (-1,) and begin < END_OF_AXIS) or end > -END_OF_AXIS or by != -1:
        raise unsupported("a Slice in it runs backwards over a part of an axis")
    return torch.flip(x, [axis])


@op("Gather")
def gather(x: Any, indices: Any, *, axis: int = 0) -> Any:
    if isinstance(x, Host) and isinstance(indices, Host):
        return Host([x.values[int(i)] for i in indices.values], indices.scalar)
    x = tensor(x)
    if isinstance(indices, Host) and indices.scalar:
        return torch.select(x, axis, indices.values[0])
    index = tensor(indices).to(torch.int64)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return functional.embedding(torch.where(index < 0, index + x.shape[0], index), x)
    axis = axis % x.dim()
    index = torch.where(index < 0, index + x.shape[axis], index)
    found = torch.index_select(x, axis, index.flatten())
    return torch.reshape(found, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@op("GatherElements")
def gather_elements(x: torch.Tensor, indices: Any, *, axis: int = 0) -> torch.Tensor:
    index = tensor(indices).to(torch.int64)
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))


@op("GatherND")
def gather_nd(x: torch.Tensor, indices: Any, *, batch_dims: int = 0) -> torch.Tensor:
    if batch_dims:
        raise unsupported("a GatherND in it has batch dimensions")
    return tensor(x)[tuple(torch.unbind(tensor(indices), -1))]


@op("ScatterND")
def scatter_nd(x: torch.Tensor, indices: Any, updates: torch.Tensor, *, reduction: str = "none") -> torch.Tensor:
    if reduction not in ("none", "add"):
        raise unsupported(f"a ScatterND in it reduces by {reduction!r}")
    return tensor(x).index_put(tuple(torch.unbind(tensor(indices), -1)), tensor(updates), accumulate=reduction == "add")


@op("ScatterElements")
def scatter_elements(
    x: torch.Tensor, indices: Any, updates: torch.Tensor, *, axis: int = 0, reduction: str = "none"
) -> torch.Tensor:
    if reduction not in ("none", "add"):
        raise unsupported(f"a ScatterElements in it reduces by {reduction!r}")
    found = torch.scatter if reduction == "none" else torch.scatter_add
    index = tensor(indices).to(torch.int64)
    return found(x, axis, torch.where(index < 0, index + x.shape[axis], index), updates)


@op("Expand")
def expand(x: Any, sizes: Any) -> torch.Tensor:
    value, wanted = tensor(x), ints(sizes)
    rank = max(value.dim(), len(wanted))
    own = [1] * (rank - value.dim()) + list(value.shape)
    asked = [1] * (rank - len(wanted)) + wanted
    return value.expand([a if isinstance(s, int) and s == 1 else s for s, a in zip(own, asked, strict=True)])


@op("Tile")
def tile(x: Any, repeats: Any) -> torch.Tensor:
    return tensor(x).repeat(ints(repeats))


@op("Pad")
def pad(x: torch.Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> torch.Tensor:
    amounts = ints(pads)
    half = len(amounts) // 2
    where = [axis % x.dim() for axis in ints(axes)] if axes is not None else list(range(half))
    by_axis = {axis: (amounts[i], amounts[i + half]) for i, axis in enumerate(where)}
    if mode == "constant":
        flat = [n for axis in reversed(range(x.dim())) for n in by_axis.get(axis, (0, 0))]
        fill = value[0] if isinstance(value, list) else 0.0 if value is None else float(tensor(value))
        return functional.pad(x, flat, "constant", fill)
    modes = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    for axis, amount in by_axis.items():  # torch supports these modes for the last axes only; pad one axis at a time
        if any(amount):
            rows = x.movedim(axis, -1)
            padded = functional.pad(rows.reshape(1, -1, rows.shape[-1]), amount, modes[mode])
            x = padded.reshape(*rows.shape[:-1], padded.shape[-1]).movedim(-1, axis)
    return x


@op("Range")
def range_(start: Any, limit: Any, delta: Any) -> torch.Tensor:
    if all(isinstance(part, Host) for part in (start, limit, delta)):
        return torch.arange(start.values[0], limit.values[0], delta.values[0])
    first, last, by = (tensor(part) for part in (start, limit, delta))
    return torch.arange(first.item(), last.item(), by.item(), dtype=first.dtype)


@op("ConstantOfShape")
def constant_of_shape(sizes: Any, *, value: Any = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    wanted = ints(sizes)
    if dtype == torch.int64 and len(wanted) == 1 and isinstance(wanted[0], int) and wanted[0] <= MAX_AXES:
        return Host([int(value)] * wanted[0], False)
    return torch.full(wanted, value, dtype=dtype)


@op("OneHot")
def one_hot(indices: Any, depth: Any, values: Any, *, axis: int = -1) -> torch.Tensor:
    off, on = tensor(values)
    count = ints(depth)[0]
    index = tensor(indices).to(torch.int64)[..., None]
    hot = (torch.where(index < 0, index + count, index) == torch.arange(count)).to(tensor(values).dtype)
    return torch.movedim(hot * (on - off) + off, -1, axis)


@op("Trilu")
def trilu(x: torch.Tensor, k: Any = None, *, upper: int = 1) -> torch.Tensor:
    diagonal = 0 if k is None else ints(k)[0]
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@op("DepthToSpace")
def depth_to_space(x: torch.Tensor, *, blocksize: int, mode: str = "DCR") -> torch.Tensor:
    if mode == "CRD":
        return functional.pixel_shuffle(x, blocksize)
    b, c, h, w = x.shape
    x = torch.reshape(x, (b, blocksize, blocksize, c // blocksize**2, h, w)).permute(0, 3, 4, 1, 5, 2)
    return torch.reshape(x, (b, c // blocksize**2, h * blocksize, w * blocksize))


@op("SpaceToDepth")
def space_to_depth(x: torch.Tensor, *, blocksize: int) -> torch.Tensor:
    b, c, h, w = x.shape
    x = torch.reshape(x, (b, c, h // blocksize, blocksize, w // blocksize, blocksize)).permute(0, 3, 5, 1, 2, 4)
    return torch.reshape(x, (b, c * blocksize**2, h // blocksize, w // blocksize))
