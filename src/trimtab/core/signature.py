"""The signature of a model: names, dtypes and shapes of inputs and outputs, dynamic dimensions, and nested structure."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trimtab._internal.text import of_type
from trimtab.errors import InputError, UsageError
from trimtab.tensors.structure import Structure, described, first_difference, flatten, names, ordered_like

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch

MOST_PASSED = 256
"""Most combinations of shapes whose check is cached."""
_KIND = operator.attrgetter("dtype", "shape")

STORED = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)
"""Names of the dtypes that safetensors can store."""


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension whose size may differ between calls: a multiple of ``step`` from ``min`` to ``max``.

    Bounds that are not multiples of ``step`` are moved inwards. ``min=0`` allows empty tensors, such as a decoder's cache
    in its first step.
    """

    name: str
    min: int = 1
    max: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise UsageError(f"A dynamic dimension needs a name like 'batch'; got {self.name!r}.")
        for name, value in (("min", self.min), ("max", 1 if self.max is None else self.max), ("step", self.step)):
            if not isinstance(value, int):
                raise UsageError(f"Dimension {self.name!r} has the {name} {value!r}; it must be a whole number.")
        if self.step < 1:
            raise UsageError(f"Dimension {self.name!r} has the step {self.step}; its sizes are multiples of 1 or more.")
        if self.min < 0 or (self.max is not None and self.max < self.min):
            raise UsageError(f"Dimension {self.name!r} has the bounds {self.min}..{self.max}; use 0 <= min <= max.")
        least, most = -(-self.min // self.step) * self.step, None if self.max is None else self.max // self.step * self.step
        if most is not None and most < least:
            raise UsageError(f"Dimension {self.name!r} has no multiple of {self.step} in its bounds {self.min}..{self.max}.")
        object.__setattr__(self, "min", least)
        object.__setattr__(self, "max", most)

    def __contains__(self, size: int) -> bool:
        return size >= self.min and (self.max is None or size <= self.max) and size % self.step == 0

    @property
    def bounds(self) -> str:
        """The allowed sizes as text: ``1 to 512``, ``32 to any in multiples of 32``."""
        most, steps = "any" if self.max is None else self.max, f" in multiples of {self.step}" if self.step > 1 else ""
        return f"{self.min} to {most}{steps}"

    def holding(self, size: int) -> int:
        """The smallest multiple of ``step`` that is at least ``size`` and ``min``. The upper bound is ignored."""
        return max(-(-size // self.step) * self.step, self.min)

    def near(self, now: int, *steps: int) -> int:
        """The first allowed size among ``now + step * self.step`` for ``step`` in ``steps``; ``now`` if there is none."""
        return next((size for step in steps if (size := now + step * self.step) in self), now)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (such as ``"float32"``) and shape of one tensor.

    A size is a number, the name of a :class:`Dim`, or ``"?"`` for an output size that depends on the inputs in another way.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs that a caller and an executable agree on.

    ``inputs`` and ``outputs`` are the tensors in flat order. ``input_structure`` is a tuple of the structures of the positional
    arguments (a tuple) and of the keyword arguments (a dict). ``parameters`` are the names of the positional arguments, which
    may be passed by keyword too. ``batched`` is false if the first axis of the inputs is not the batch, but for example time.
    ``writes`` names the inputs that a call modifies in place, such as a cache.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_structure: Structure
    output_structure: Structure
    parameters: tuple[str, ...]
    dims: tuple[Dim, ...] = ()
    batched: bool = True
    writes: tuple[str, ...] = ()

    @cached_property
    def output_names(self) -> list[str]:
        """The names of the outputs in files and protocols: ``logits`` for the tensor ``output.logits`` of a dict."""
        full = [spec.name for spec in self.outputs]
        short = [name.removeprefix("output.") for name in full]
        return full if any(name.isdigit() for name in short) or len(set(short)) < len(short) else short

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Indices of the inputs that a call modifies."""
        return tuple(i for i, spec in enumerate(self.inputs) if spec.name in self.writes)

    @cached_property
    def _flat(self) -> bool:
        """Whether all arguments are positional tensors. This common case has a fast path."""
        args, kwargs = self.input_structure.items
        return not kwargs.items and all(item.kind == "tensor" for item in args.items)

    @cached_property
    def _expected(self) -> list[tuple[torch.dtype, torch.Size | None]]:
        return [
            (getattr(torch, spec.dtype), torch.Size(spec.shape) if all(isinstance(s, int) for s in spec.shape) else None)  # type: ignore[arg-type]
            for spec in self.inputs
        ]

    @property
    def batch(self) -> str | None:
        """The name of the batch dimension: the dynamic first axis of the first input. ``None`` if there is none."""
        if not self.batched:
            return None
        lead = self.inputs[0].shape[0] if self.inputs and self.inputs[0].shape else None
        return lead if isinstance(lead, str) else None

    def accept(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """The flat tensors of a call ``(*args, **kwargs)``, checked: :meth:`bind`, then :meth:`check`.

        Raises:
            InputError: the arguments do not fit in number, structure, dtype or shape.
        """
        last = self._last
        if last and not kwargs and len(args) == len(last):
            try:
                for tensor, (dtype, shape) in zip(args, last):  # noqa: B905 - a lookup in a set takes 2 microseconds longer
                    if tensor.dtype is not dtype or tensor.shape != shape:
                        break
                else:
                    return args
            except AttributeError:  # not a tensor; check() raises the error
                pass
        leaves = self.bind(args, kwargs)
        self.check(leaves)
        if leaves is args:
            object.__setattr__(self, "_last", tuple(map(_KIND, leaves)))  # one assignment: other threads see all of it or none
        return leaves

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """The flat tensors of a call ``(*args, **kwargs)``, not yet checked.

        Raises:
            InputError: arguments are missing or unknown, or their structure differs from the example's.
        """
        if self._flat and not kwargs and len(args) == len(self.inputs):
            return args
        args, kwargs = self._reorder(args, kwargs)
        call = tuple(args), dict(kwargs)
        leaves, structure = flatten(call, "inputs")
        if structure != self.input_structure:
            leaves, structure = flatten(ordered_like(call, self.input_structure), "inputs")
        if structure != self.input_structure:
            raise InputError(self._structure_difference(structure))
        return leaves

    @cached_property
    def _last(self) -> tuple[tuple[torch.dtype, torch.Size], ...]:
        """Dtype and shape of each tensor of the last accepted call, if all its arguments were positional tensors."""
        return ()

    @cached_property
    def _passed(self) -> set[Any]:
        """Combinations of dtypes and shapes that passed :meth:`check`. A small network can run faster than the check."""
        return set()

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise :class:`InputError` unless each tensor has the dtype and shape of its spec."""
        try:
            key = tuple(map(_KIND, leaves))
        except AttributeError:
            self._refuse(leaves)
        if key in self._passed:
            return
        for tensor, (dtype, shape) in zip(leaves, self._expected, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype or shape not in (None, tensor.shape):
                self._refuse(leaves)
        if self.dims:
            self.sizes(leaves)
        if len(self._passed) < MOST_PASSED:
            self._passed.add(key)

    def fits(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether ``leaves`` pass :meth:`check`."""
        try:
            self.check(leaves)
        except InputError:
            return False
        return True

    def sizes(self, leaves: Sequence[torch.Tensor]) -> dict[str, int]:
        """The size of each dynamic dimension in this call.

        Raises:
            InputError: two tensors have different sizes for one dimension, or a size is not allowed.
        """
        known: dict[str, int] = {}
        dims = {dim.name: dim for dim in self.dims}
        for spec, tensor in zip(self.inputs, leaves, strict=True):
            if len(spec.shape) != tensor.dim():
                self._refuse(leaves)
            for want, size in zip(spec.shape, tensor.shape, strict=True):
                if isinstance(want, int):
                    if want != size:
                        self._refuse(leaves)
                elif known.setdefault(want, size) != size:
                    raise InputError(
                        f"Dimension {want!r} is {known[want]} in one input and {size} in {spec.name!r}. Give one size in all."
                    )
                elif size not in dims[want]:
                    raise InputError(f"Dimension {want!r} of {spec.name!r} is {size}; this was built for {dims[want].bounds}.")
        return known

    def takes(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether inputs may have ``shapes``. Needs no tensors."""
        known: dict[str, int] = {}
        dims = {dim.name: dim for dim in self.dims}
        if [len(shape) for shape in shapes] != [len(spec.shape) for spec in self.inputs]:
            return False
        pairs = [pair for spec, shape in zip(self.inputs, shapes, strict=True) for pair in zip(spec.shape, shape, strict=True)]
        return all(
            want == size if isinstance(want, int) else known.setdefault(want, size) == size and size in dims[want]
            for want, size in pairs
        )

    def without_dims(
        self, example: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, but: Collection[str] = ()
    ) -> Signature:
        """This signature with dynamic sizes frozen to those of ``example`` and ``outputs``, except the dimensions in ``but``.
        With ``but``, output sizes marked ``"?"`` stay open, because they may depend on a kept dimension."""
        kept = {*but, "?"} if but else set()

        def fixed(spec: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
            pairs = zip(spec.shape, tensor.shape, strict=True)
            return dataclasses.replace(spec, shape=tuple(dim if dim in kept else size for dim, size in pairs))

        return dataclasses.replace(
            self,
            inputs=tuple(map(fixed, self.inputs, example)),
            outputs=tuple(map(fixed, self.outputs, outputs)),
            dims=tuple(dim for dim in self.dims if dim.name in kept),
        )

    def describe(self, leaves: Sequence[torch.Tensor] = ()) -> str:
        """The inputs as text: ``images: float32[batch, 1, 8, 8]``; with ``leaves``: ``images: float32[batch=2, 1, 8, 8]``."""
        sizes = self.sizes(leaves) if leaves else {}
        named = {name: f"{name}={size}" for name, size in sizes.items()}
        known = (
            dataclasses.replace(spec, shape=tuple(named.get(str(size), size) for size in spec.shape)) for spec in self.inputs
        )
        return ", ".join(map(str, known)) or "no tensors"

    def _reorder(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Move arguments between position and keyword as in the example, and put keyword arguments into the example's order."""
        positional, keyword = self.input_structure.items
        args, rest = list(args), dict(kwargs)
        for name, item in list(zip(self.parameters, positional.items, strict=False))[len(args) :]:
            if name not in rest:
                raise self._missing(name, item)
            args.append(rest.pop(name))
        for name in self.parameters[len(positional.items) : len(args)]:
            if name in keyword.keys and name not in rest:
                rest[name] = args.pop(len(positional.items))
        if unknown := sorted(set(rest) - set(keyword.keys)):
            raise InputError(f"There is no input {unknown[0]!r}. This was built for {self.describe()}.")
        for name, item in zip(keyword.keys, keyword.items, strict=True):
            if name not in rest:
                raise self._missing(name, item)
        return args, {name: rest[name] for name in keyword.keys}

    def _missing(self, name: str, structure: Structure) -> InputError:
        """The error for a missing input. Constants are not filled in, because the model's default may differ from the
        example's."""
        constant = f" with {name}={structure.value!r}" if structure.kind == "constant" else ""
        return InputError(f"The input {name!r} is missing. This was built for {self.describe()}{constant}.")

    def _structure_difference(self, structure: Structure) -> str:
        """How ``structure`` differs from the structure of the example's inputs, as text."""
        (args, kwargs), (own, named) = structure.items, self.input_structure.items
        if len(args.items) != len(own.items):
            return f"{len(args.items)} inputs were given by position; this was built for {len(own.items)}: {self.describe()}."
        rows = [
            *zip(self.parameters, args.items, own.items, strict=False),
            *zip(named.keys, kwargs.items, named.items, strict=True),
        ]
        found = next(filter(None, (first_difference(one, other, name) for name, one, other in rows)), None)
        if found is None:
            return f"The input structure is another than that of {self.describe()}."
        place, one, other = found
        return f"The input {place!r} is {described(one)}, but this was built for {described(other)}."

    def _refuse(self, leaves: Sequence[Any]) -> None:
        for spec, tensor in zip(self.inputs, leaves, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise InputError(f"Input {spec.name!r} is {of_type(tensor)}; this was built for a tensor, {spec}.")
            got = TensorSpec(spec.name, dtype_name(tensor.dtype), tuple(tensor.shape))
            same_rank = len(got.shape) == len(spec.shape)
            fits = same_rank and all(isinstance(w, str) or w == g for w, g in zip(spec.shape, got.shape, strict=True))
            if got.dtype != spec.dtype or not fits:
                raise InputError(f"Input {got} was given, but this was built for {spec}.")


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def specs(leaves: Sequence[torch.Tensor], leaf_names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The static specs of ``leaves``, with the names ``leaf_names``."""
    return tuple(TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in zip(leaf_names, leaves, strict=True))


def require_plain(leaves: Sequence[torch.Tensor], leaf_names: Sequence[str], what: str) -> None:
    """Refuse tensors that other runtimes or safetensors do not support.

    Raises:
        UsageError: a tensor is sparse, or has a dtype that safetensors cannot store.
    """
    for leaf, name in zip(leaves, leaf_names, strict=True):
        if leaf.layout is not torch.strided:
            kind = str(leaf.layout).removeprefix("torch.")
            raise UsageError(
                f"The {what} {name!r} is a sparse tensor ({kind}), which cannot cross to another runtime. Give it dense, with "
                ".to_dense(), or wrap the model so that it makes it sparse itself from indices and values."
            )
        if dtype_name(leaf.dtype) not in STORED:
            fix = "Use complex64, or torch.view_as_real" if leaf.is_complex() else "Convert it, with .dequantize() or .float()"
            raise UsageError(
                f"The {what} {name!r} has the dtype {dtype_name(leaf.dtype)}, which no file of tensors can hold. {fix}, in a "
                "module around the model."
            )


def parameter_names(forward: Any, count: int) -> tuple[str, ...]:
    """Names of the positional parameters of ``forward``, padded with ``input_0`` and so on to ``count`` names."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except ValueError:  # TorchScript methods have no signature
        parameters = {}.values()
    found = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(found) + tuple(f"input_{i}" for i in range(len(found), count))


def input_names(parameters: Sequence[str], structure: Structure) -> list[str]:
    """A unique name for each input tensor, from the parameter names of the model's ``forward``."""
    args, kwargs = structure.items
    found = [leaf for name, item in zip(parameters, args.items, strict=False) for leaf in names(item, name)]
    return found + names(kwargs, "")
