"""Example inputs of a workload from the description of a model file's inputs: real ones from a file, or random ones."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import nn

from trimtab._internal.text import no_file
from trimtab.core.capture import Call
from trimtab.core.dynamic_dims import BATCH, BATCHES, Dims, accepted_dim, resized
from trimtab.core.signature import Dim, dtype_name
from trimtab.core.workload import as_call
from trimtab.data.batch_independence import ROUNDING, Judge
from trimtab.data.batches import Batch, as_tensor
from trimtab.errors import UsageError
from trimtab.hardware.system import free_mb
from trimtab.safe_load.zip_records import ZIP_ERRORS
from trimtab.tensors.structure import Structure, flatten, unflatten
from trimtab.tensors.weights import tolerance

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
MAX_ROWS, MIN_CALLS = 512, 8
"""Most rows that are read from a file of inputs; and fewest calls, if a single call has many rows."""
CALIBRATION_ROWS = 32
"""Rows of a file per calibration call."""
DEFAULT_SIZE = 16
"""Size of a dynamic dimension (other than the batch) that neither the file nor the user states."""
DEFAULT_IMAGE_SIDE = 224
"""Side length of inputs that look like images (four axes, one to four channels), if neither states it."""

Shapes = Mapping[str, "str | Sequence[int]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The inputs that a model file declares.

    ``shapes`` has a number for each fixed size and a :class:`~trimtab.core.signature.Dim` for each dynamic size. ``structure``
    is the structure of the call, from :func:`trimtab.tensors.structure.flatten` of ``(args, kwargs)``.
    """

    source: str
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int | Dim, ...], ...]
    structure: Structure
    hints: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of the dynamic dimensions when the file was written, by name."""
    bounds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Table sizes for integer inputs that are indices; random values stay below them."""
    ones: frozenset[str] = frozenset()
    """Inputs that are filled with ones instead of random numbers, such as padding masks."""

    @property
    def dims(self) -> Dims:
        """The dynamic dimensions, in the form of ``Workload(dynamic=...)``."""
        found = {
            name: {axis: size for axis, size in enumerate(shape) if isinstance(size, Dim)}
            for name, shape in zip(self.names, self.shapes, strict=True)
        }
        return {name: axes for name, axes in found.items() if axes}

    def workload_inputs(self, leaves: Sequence[torch.Tensor]) -> Any:
        """``leaves`` in the form of ``Workload(inputs=...)``."""
        args, kwargs = unflatten(self.structure, leaves)
        return Call(args, kwargs) if args and kwargs else kwargs or args

    def describe(self) -> str:
        """The inputs as text: ``ids: int64[batch, 16], mask: float32[batch, 16]``."""
        parts = [
            f"{name}: {dtype_name(dtype)}[{', '.join(size.name if isinstance(size, Dim) else str(size) for size in shape)}]"
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Example inputs, calibration batches (if the inputs are real), and notes."""

    example: Any
    calibration: Any
    notes: tuple[str, ...]


def parse_shape(text: str | Sequence[int], name: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Parse ``"1x3x224x224"`` or ``"1x16:int64"`` into sizes and an optional dtype.

    Raises:
        UsageError: the text has another form, or the dtype is unknown.
    """
    if not isinstance(text, str):
        return tuple(int(size) for size in text), None
    found = re.fullmatch(r"((?:\d+(?:[x,]\d+)*)?)(?::(\w+))?", text)
    if found is None or (found[2] and found[2] not in DTYPES):
        raise UsageError(
            f"The shape of {name!r} is {text!r}; write sizes and perhaps a dtype, such as {name}=1x3x224x224 or "
            f"{name}=1x16:int64 (dtypes: {', '.join(DTYPES)})."
        )
    sizes = tuple(int(size) for size in re.split("[x,]", found[1]) if size)
    if 0 in sizes:
        raise UsageError(f"The shape of {name!r} is {text!r}; every size must be at least 1.")
    return sizes, getattr(torch, found[2]) if found[2] else None


def inputs_of(
    spec: InputSpec, inputs: str | pathlib.Path | None, shapes: Shapes, module: Callable[[], nn.Module] | None = None
) -> Inputs:
    """Real inputs from the file ``inputs``, or random ones with the sizes in ``shapes``. ``module`` makes the model, with which
    the batch axis of real inputs is verified; without it, their first axis counts as the batch.

    Raises:
        UsageError: the file or a shape does not fit the model; the message states the model's inputs.
    """
    if unknown := sorted(set(shapes) - set(spec.names)):
        raise UsageError(f"There is no input {unknown[0]!r} to give a shape to. {spec.source} takes {spec.describe()}.")
    stated = {name: parse_shape(shape, name)[0] for name, shape in shapes.items()}
    if inputs is not None:
        return _real(spec, read_tensors(inputs), pathlib.Path(inputs), stated, module)
    sizes, assumed = _sizes(spec, stated)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.ones(shape, dtype=dtype) if name in spec.ones else random_tensor(shape, dtype, generator, spec.bounds.get(name))
        for name, dtype, shape in zip(spec.names, spec.dtypes, sizes, strict=True)
    ]
    return Inputs(example=spec.workload_inputs(leaves), calibration=None, notes=_about_random(spec, assumed))


def read_tensors(path: str | pathlib.Path) -> dict[str, torch.Tensor]:
    """The arrays of a ``.npz``, ``.npy`` or ``.safetensors`` file by name; the array of a ``.npy`` has the name ``""``. No
    pickles.

    Raises:
        UsageError: the file does not exist, is of another kind, is damaged, or holds Python objects.
    """
    path = pathlib.Path(path)
    if not os.path.isfile(path):  # False for a forbidden folder, where pathlib's is_file raises
        raise no_file(path, "Check the path of the inputs, or leave --inputs out for random ones.")
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        if path.suffix == ".npy":
            return {"": as_tensor(np.load(path, allow_pickle=False))}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: as_tensor(arrays[name]) for name in arrays.files}
    except (*ZIP_ERRORS, TypeError, OSError, MemoryError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"{path} cannot be read as inputs: {error}. Write it with numpy.savez or safetensors.torch.save_file."
        ) from error
    raise UsageError(f"{path} is no file of inputs; use .npz, .npy or .safetensors.")


def random_tensor(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, bound: int | None = None
) -> torch.Tensor:
    """A random tensor: normal floats, or integers below ``bound`` (default 2: 0 and 1, valid for masks and any table).

    Raises:
        UsageError: the tensor does not fit in free memory.
    """
    if (wanted := math.prod(shape) * max(dtype.itemsize, 4) / 1e6) > (free := free_mb()):
        raise UsageError(
            f"An input of the shape {list(shape)} takes {wanted:,.0f} MB, and {free:,.0f} MB are free here. State smaller "
            "sizes with --shape, where the model leaves them open."
        )
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, max(bound or 2, 1), tuple(shape), generator=generator).to(dtype)


def _sizes(spec: InputSpec, stated: Mapping[str, tuple[int, ...]]) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The shape of each input, and the assumed sizes. A dynamic size is the stated one, else the file's, else a default."""
    known: dict[str, int] = {}
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        if name in stated:
            _bind(spec, name, shape, stated[name], known)
    assumed: dict[str, int] = {}
    for shape in spec.shapes:
        for axis, size in enumerate(shape):
            if isinstance(size, Dim) and size.name not in known:
                known[size.name] = assumed[size.name] = _default(size, axis, shape, spec.hints.get(size.name))
    return [tuple(known[s.name] if isinstance(s, Dim) else s for s in shape) for shape in spec.shapes], assumed


def _default(dim: Dim, axis: int, shape: Sequence[int | Dim], hint: int | None) -> int:
    image = len(shape) == 4 and axis > 1 and shape[1] in (1, 2, 3, 4)
    wanted = 1 if axis == 0 else hint or (DEFAULT_IMAGE_SIDE if image else DEFAULT_SIZE)
    return int(min(max(wanted, dim.min), dim.max or math.inf))


def _bind(spec: InputSpec, name: str, shape: Sequence[int | Dim], given: Sequence[int], known: dict[str, int]) -> None:
    fits = len(shape) == len(given)
    for want, size in zip(shape, given, strict=False):
        fits = fits and (known.setdefault(want.name, size) == size and size in want if isinstance(want, Dim) else want == size)
    if not fits:
        limits = [
            f"{dim.name} is {dim.bounds}"
            for dim in dict.fromkeys(size for shape in spec.shapes for size in shape if isinstance(size, Dim))
        ]
        raise UsageError(
            f"The input {name!r} was given the shape {list(given)}, but {spec.source} takes {spec.describe()}"
            f"{' where ' + ', '.join(limits) if limits else ''}."
        )


def _real(
    spec: InputSpec,
    found: dict[str, torch.Tensor],
    path: pathlib.Path,
    stated: Mapping[str, tuple[int, ...]],
    module: Callable[[], nn.Module] | None,
) -> Inputs:
    """Split real inputs: the first rows, or the first call, become the example, the rest the calibration data."""
    if len(found) == len(spec.names) == 1:
        found = {spec.names[0]: next(iter(found.values()))}
    if set(found) != set(spec.names):
        raise UsageError(
            f"{path} holds {', '.join(sorted(found)) or 'nothing'}, but {spec.source} takes {spec.describe()}. Save them by "
            "these names."
        )
    arrays = [_cast(found[name], dtype, name, path) for name, dtype in zip(spec.names, spec.dtypes, strict=True)]
    batch = _batch_dim(spec, arrays, module)
    if batch is not None:
        rows = min(_length(next(array for array in arrays if array.dim())), MAX_ROWS)
        size = next((shape[0] for shape in stated.values() if shape), batch.min)
        example = [array[:size].clone() if array.dim() else array for array in arrays]
        starts = range(0, rows if rows > size else 0, CALIBRATION_ROWS)
        calls = [[a[at : min(at + CALIBRATION_ROWS, rows)] if a.dim() else a for a in arrays] for at in starts]
        what = f"{rows} examples"
    else:
        example, *calls = _calls(spec, arrays)
        what = f"{1 + len(calls)} call{'s' if calls else ''}"
    known: dict[str, int] = {}
    for name, shape, leaf in zip(spec.names, spec.shapes, example, strict=True):
        _bind(spec, name, shape, tuple(leaf.shape), known)
    more = "" if calls else " There are no others, so quantizers that must see data cannot be tried."
    calibration = [spec.workload_inputs(leaves) for leaves in calls] or None
    return Inputs(
        example=spec.workload_inputs(example),
        calibration=calibration,
        notes=(f"The inputs are {what} from {path.name}.{more}",),
    )


def _batch_dim(spec: InputSpec, arrays: Sequence[torch.Tensor], module: Callable[[], nn.Module] | None) -> Dim | None:
    """The batch dimension of ``arrays``; ``None`` if ``arrays`` are whole calls.

    The batch dimension is the first axis of all inputs with axes. The model is run to find out whether that axis counts
    examples or, for instance, audio samples. If it cannot run on few rows, the name of the dimension decides.
    """
    first_dims = {shape[0] for shape in spec.shapes if shape}
    lengths = {_length(array) for array, shape in zip(arrays, spec.shapes, strict=True) if shape}
    alike = all(array.dim() == len(shape) for array, shape in zip(arrays, spec.shapes, strict=True))
    batch = next(iter(first_dims), None)
    if len(first_dims) != 1 or len(lengths) != 1 or not alike or not isinstance(batch, Dim):
        return None
    rows = lengths.pop()
    if module is None or rows < 2:
        return batch
    model = module()

    def batched_model(*batched: torch.Tensor) -> Any:
        rest = iter(batched)
        args, kwargs = as_call(spec.workload_inputs([next(rest) if array.dim() else array for array in arrays]))
        return model(*args, **kwargs)

    batched = tuple(array[:MAX_ROWS] for array in arrays if array.dim())
    verdict = Judge(batched_model, tolerance(model, ROUNDING))(Batch(batched, None, len(batched[0])))
    return batch if verdict.kind == "own" or (verdict.kind == "fixed" and batch.name.lower() in BATCHES) else None


def keep_working_sizes(
    spec: InputSpec, leaves: Sequence[torch.Tensor], takes: Callable[[list[torch.Tensor]], bool]
) -> tuple[InputSpec, tuple[str, ...]]:
    """``spec`` with the dynamic sizes that the model ``takes``, and notes about changes. A size that must be a multiple gets a
    step; a size that works with the example's value only is fixed."""
    known: dict[str, int | Dim] = {}
    for name, dim in {size.name: size for shape in spec.shapes for size in shape if isinstance(size, Dim)}.items():

        def works(size: int, name: str = name, dim: Dim = dim) -> bool:
            return size in dim and takes(
                [_at_size(leaf, shape, name, size) for leaf, shape in zip(leaves, spec.shapes, strict=True)]
            )

        now = next(
            leaf.shape[axis]
            for leaf, shape in zip(leaves, spec.shapes, strict=True)
            for axis, size in enumerate(shape)
            if isinstance(size, Dim) and size.name == name
        )
        if (other := dim.near(now, 1, -1)) == now or works(other):
            continue
        found = accepted_dim(name, [now], works)
        known[name] = now if found is None else Dim(name, dim.min, dim.max, found.step)
    fixed = [name for name, size in known.items() if isinstance(size, int)]
    notes = [f"The file leaves {', '.join(fixed)} open, but only the example's size works; it is fixed."] if fixed else []
    notes += [
        f"The file leaves {name} open, but not every size works: it goes from {size.bounds}."
        for name, size in known.items()
        if isinstance(size, Dim)
    ]
    shapes = tuple(
        tuple(known.get(size.name, size) if isinstance(size, Dim) else size for size in shape) for shape in spec.shapes
    )
    return dataclasses.replace(spec, shapes=shapes), tuple(notes)


def _at_size(leaf: torch.Tensor, shape: Sequence[int | Dim], name: str, size: int) -> torch.Tensor:
    return resized(leaf, [want.name if isinstance(want, Dim) else want for want in shape], name, size)


def _calls(spec: InputSpec, arrays: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split ``arrays`` into calls: they have rows for several calls, or an extra first axis over calls, or are one call."""
    extra = {array.dim() - len(shape) for array, shape in zip(arrays, spec.shapes, strict=True)}
    lengths = {_length(array) for array in arrays}
    leads = {shape[0] if shape else 0 for shape in spec.shapes}
    if extra == {1} and len(lengths) == 1:
        return [[leaf.clone() for leaf in leaves] for leaves in zip(*(array[:MAX_ROWS] for array in arrays), strict=True)]
    rows = leads.pop() if len(leads) == 1 else 0
    if extra == {0} and isinstance(rows, int) and rows and len(lengths) == 1 and lengths.pop() % rows == 0:
        most = max(MAX_ROWS // rows, MIN_CALLS) * rows
        return [[leaf.clone() for leaf in part] for part in zip(*(torch.split(a[:most], rows) for a in arrays), strict=True)]
    return [list(arrays)]


def _length(array: torch.Tensor) -> int:
    return len(array) if array.dim() else 0


def _cast(array: torch.Tensor, dtype: torch.dtype, name: str, path: pathlib.Path) -> torch.Tensor:
    """Convert to ``dtype``. Widths may differ; floats for integers (or the reverse) are refused."""
    if array.dtype != dtype and array.dtype.is_floating_point != dtype.is_floating_point:
        raise UsageError(
            f"{path}: {name!r} is {dtype_name(array.dtype)}, but the model takes {dtype_name(dtype)}. Save it with that dtype."
        )
    return array.to(dtype)


def _about_random(spec: InputSpec, assumed: Mapping[str, int]) -> tuple[str, ...]:
    note = (
        f"The inputs are random numbers, because {spec.source} brings none: speed and agreement with the original are measured "
        "on them, but nothing is proven about real data, and quantizers that must see data are not tried. Give --inputs "
        "FILE.npz or FILE.safetensors with real ones."
    )
    integers = [name for name, dtype in zip(spec.names, spec.dtypes, strict=True) if not dtype.is_floating_point]
    if guessed := [name for name in integers if name not in spec.bounds and name not in spec.ones]:
        note += f" Integers are 0 and 1 ({', '.join(guessed)})."
    sizes = ", ".join(f"{name}={size}" for name, size in assumed.items() if (name, size) != (BATCH, 1))
    if not sizes:
        return (note,)
    return note, f"The file leaves sizes open, and these were taken: {sizes}. Say others with --shape {spec.names[0]}=..."


def structure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Structure:
    """The structure of a call ``(*args, **kwargs)``; sizes of tensors do not matter."""
    return flatten((tuple(args), dict(kwargs)), "inputs")[1]
