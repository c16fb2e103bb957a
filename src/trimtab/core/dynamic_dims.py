"""Dynamic dimensions: read what a workload states, infer them from examples, mark them in specs, and resize tensors to them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trimtab._internal.text import counted, of_type
from trimtab.core.signature import Dim, TensorSpec
from trimtab.errors import UsageError
from trimtab.tensors.comparison import is_sorted, resize_sorted

BATCH = "batch"
BATCHES = frozenset({BATCH, "batch_size", "batchsize", "bs", "b", "n", "examples"})
"""Usual names of the batch dimension, in lower case."""

MOST_STEPS = 8
"""Most step sizes that are tried; each costs a call of the model."""

Dims = dict[str, dict[int, Dim]]


def find_dims(calls: Sequence[Sequence[TensorSpec]], *, batched: bool = True) -> Dims:
    """The axes whose sizes differ between ``calls``, as ``{input name: {axis: Dim}}``.

    ``calls`` has the static specs of the input tensors of each call. Axes whose sizes are equal to each other in every call are
    one dimension. If ``batched``, the dimension that is the first axis of most tensors is called ``batch``; the others are
    named after their first tensor and axis. Sizes have no upper bound, because examples cannot show one.

    Raises:
        UsageError: a tensor differs from the first call in its dtype or number of axes.
    """
    sizes: dict[tuple[str, int], list[int]] = {}
    for specs in calls:
        for spec, first in zip(specs, calls[0], strict=True):
            _refuse_other_kind(spec, first)
            for axis, size in enumerate(spec.shape):
                sizes.setdefault((spec.name, axis), []).append(int(size))
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for place, seen in sizes.items():
        if len(set(seen)) > 1:
            groups.setdefault(tuple(seen), []).append(place)
    return _named(groups, batched)


def sizes_of(name: str, dims: Mapping[str, Mapping[int, Dim]], calls: Sequence[Sequence[TensorSpec]]) -> list[int]:
    """The distinct sizes of dimension ``name`` in ``calls``, in order of appearance."""
    place, axis = next((tensor, axis) for tensor, axes in dims.items() for axis, dim in axes.items() if dim.name == name)
    return list(dict.fromkeys(int(spec.shape[axis]) for specs in calls for spec in specs if spec.name == place))


def accepted_dim(name: str, sizes: Sequence[int], works: Callable[[int], bool]) -> Dim | None:
    """The dimension ``name`` with the step and bound that a model accepts; ``None`` if it accepts one size only.

    ``sizes`` are the known sizes; the first is known to work. ``works`` tries another size. The step is the smallest divisor of
    all sizes that works. If no size above the largest of ``sizes`` works, that one is the upper bound.
    """
    others = [size for size in sizes if size != sizes[0]]
    if others and not works(others[0]):
        return None
    top = max(sizes)
    whole = math.gcd(*sizes)
    steps = [step for step in range(1, whole + 1) if whole % step == 0]
    for step in steps[:MOST_STEPS] + [whole] * (len(steps) > MOST_STEPS):
        if works(top + step):
            return Dim(name, step=step)
    if not others:
        return None
    below = next((step for step in steps[:MOST_STEPS] if top - step > 0 and works(top - step)), whole)
    return Dim(name, max=top, step=below)


def probe_sizes(dim: Dim, inputs: Sequence[TensorSpec], leaves: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Three sizes of ``dim`` that show how outputs depend on it: the example's size, the next one, and about half of it.

    A size that is not allowed is replaced by the example's. Half the size is needed because outputs whose size is divided and
    rounded may not change from one size to the next.

    Raises:
        UsageError: the example's size is not allowed.
    """
    spec, leaf = next((s, t) for s, t in zip(inputs, leaves, strict=True) if dim.name in s.shape)
    now = int(leaf.shape[spec.shape.index(dim.name)])
    if now not in dim:
        raise UsageError(
            f"The example's {spec.name!r} has {dim.name}={now}, but dynamic states {dim.bounds} for it. Give an example within "
            "what is stated."
        )
    return now, dim.near(now, 1, -1), min(dim.holding(now // 2), now)


def mark_dependent(spec: TensorSpec, name: str, seen: Mapping[int, Sequence[int]]) -> TensorSpec:
    """``spec`` with the axes marked whose sizes change with dimension ``name``. ``seen`` maps each size of the dimension to the
    tensor's shape."""
    axes = zip(*seen.values(), strict=True)
    shape = tuple(
        size if len(set(found)) == 1 else name if isinstance(size, int) and list(found) == list(seen) else "?"
        for size, found in zip(spec.shape, axes, strict=True)
    )
    return dataclasses.replace(spec, shape=shape)


def check_stated(dynamic: Any) -> None:
    """Refuse a ``Workload(dynamic=)`` that is not ``{"input name": {axis: "dimension name" or Dim}}``, such as torch's forms.

    Raises:
        UsageError: it has another form.
    """
    form = 'Give {"name of the input": {0: "batch"}}, where a trimtab.Dim in place of the text states bounds.'
    if dynamic is None:
        return
    if not isinstance(dynamic, Mapping):
        raise UsageError(f"Workload dynamic is {of_type(dynamic)}. {form}")
    for name, axes in dynamic.items():
        if not isinstance(name, str) or not isinstance(axes, Mapping):
            raise UsageError(f"Workload dynamic has {axes!r} for {name!r}, which does not name its axes. {form}")
        for axis, dim in axes.items():
            if isinstance(axis, bool) or not isinstance(axis, int):
                raise UsageError(f"Workload dynamic has the axis {axis!r} of {name!r}; axes are numbers from 0. {form}")
            if not isinstance(dim, (str, Dim)):
                kind = type(dim)
                torchs = ", which is torch's," if kind.__module__.startswith("torch.") else ""
                raise UsageError(
                    f"Workload dynamic has a {kind.__module__}.{kind.__qualname__} for axis {axis} of {name!r}{torchs} and not "
                    f"a name. {form}"
                )


def mark_dynamic(inputs: tuple[TensorSpec, ...], dynamic: Mapping[str, Mapping[int, Dim]]) -> tuple[TensorSpec, ...]:
    """``inputs`` with the axes in ``dynamic`` replaced by the names of their dimensions.

    Raises:
        UsageError: an unknown input or axis.
    """
    known = {spec.name: spec for spec in inputs}
    for name, axes in dynamic.items():
        if name not in known:
            raise UsageError(f"dynamic names the input {name!r}, but the inputs are {', '.join(known) or 'none'}.")
        there = range(len(known[name].shape))
        if wrong := [axis for axis in axes if axis not in there]:
            fix = f"Axes count from 0: use {' or '.join(map(str, there))}." if there else "Leave it out."
            raise UsageError(f"dynamic names axis {wrong[0]} of {name!r}, which has {counted(len(there), 'axis')}. {fix}")
    return tuple(
        dataclasses.replace(
            spec,
            shape=tuple(dynamic[spec.name][i].name if i in dynamic.get(spec.name, {}) else s for i, s in enumerate(spec.shape)),
        )
        for spec in inputs
    )


def resized(leaf: torch.Tensor, shape: Sequence[int | str], name: str, size: int) -> torch.Tensor:
    """``leaf`` with each axis that ``shape`` names ``name`` repeated or cut to ``size``. Sorted values stay sorted; an empty
    axis is extended with zeros."""
    for axis, want in enumerate(shape):
        if want == name and leaf.shape[axis] != size:
            if is_sorted(leaf):
                return resize_sorted(leaf, size)
            if size and not leaf.shape[axis]:
                return leaf.new_zeros([*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]])
            copies = max(1, -(-size // max(leaf.shape[axis], 1)))
            leaf = torch.cat([leaf] * copies, dim=axis).narrow(axis, 0, size).contiguous()
    return leaf


def describe_dims(dims: Mapping[str, Mapping[int, Dim]]) -> str:
    """The dimensions as text: ``batch (axis 0 of images and mask), length (axis 1 of ids)``."""
    places: dict[str, dict[int, list[str]]] = {}
    for name, axes in dims.items():
        for axis, dim in axes.items():
            places.setdefault(dim.name, {}).setdefault(axis, []).append(name)
    return ", ".join(
        f"{name} ({', '.join(f'axis {axis} of {_and(inputs)}' for axis, inputs in axes.items())})"
        for name, axes in places.items()
    )


def replaced(dims: Mapping[str, Mapping[int, Dim]], by: Mapping[str, Dim]) -> Dims:
    """``dims`` with the dimensions named in ``by`` replaced."""
    return {name: {axis: by.get(dim.name, dim) for axis, dim in axes.items()} for name, axes in dims.items()}


def without(dims: Mapping[str, Mapping[int, Dim]], names: set[str]) -> Dims:
    """``dims`` without the dimensions in ``names``."""
    kept = {name: {axis: dim for axis, dim in axes.items() if dim.name not in names} for name, axes in dims.items()}
    return {name: axes for name, axes in kept.items() if axes}


def dim_names(dims: Mapping[str, Mapping[int, Dim]]) -> list[str]:
    """The distinct names of the dimensions, in the order of the inputs."""
    return list(dict.fromkeys(dim.name for axes in dims.values() for dim in axes.values()))


def _refuse_other_kind(spec: TensorSpec, first: TensorSpec) -> None:
    if len(spec.shape) != len(first.shape) or spec.dtype != first.dtype:
        got, want = (f"{found.dtype} with {counted(len(found.shape), 'axis')}" for found in (spec, first))
        single = spec.dtype == first.dtype and tuple(spec.shape) == tuple(first.shape[1:])
        fix = "Give single examples as a Dataset, or as one pair (inputs, targets): items of anything else are batches."
        raise UsageError(f"The data's {spec.name!r} is {got}, the example's is {want}. {fix if single else 'Make them alike.'}")


def name_groups(groups: Sequence[Sequence[tuple[str, int]]], *, batched: bool = True) -> list[str]:
    """A name for each group of ``(tensor, axis)``. If ``batched``, the group with most first axes is called ``batch``."""
    leads = [sum(axis == 0 for _, axis in places) for places in groups]
    batch = leads.index(max(leads)) if any(leads) and batched else None
    names: list[str] = []
    for number, places in enumerate(groups):
        names.append(BATCH if number == batch else _unused("{}_{}".format(*places[0]), {BATCH, *names}))
    return names


def _named(groups: Mapping[tuple[int, ...], Sequence[tuple[str, int]]], batched: bool) -> Dims:
    """A dimension for each of ``groups``, which maps sizes in all calls to axes. ``min`` is 0 if one of the sizes is."""
    dims: Dims = {}
    for name, (sizes, places) in zip(name_groups([*groups.values()], batched=batched), groups.items(), strict=True):
        for tensor, axis in places:
            dims.setdefault(tensor, {})[axis] = Dim(name, min=min(1, *sizes))
    return dims


def _unused(text: str, used: set[str]) -> str:
    name = re.sub(r"\W", "_", text)
    name = name if name.isidentifier() else f"dim_{name}"
    return name if name not in used else _unused(f"{name}_", used)


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
