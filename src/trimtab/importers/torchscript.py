"""Workloads from TorchScript files, which :func:`torch.jit.save` writes."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.dynamic_dims import BATCH
from trimtab.core.signature import Dim
from trimtab.data.batch_independence import FEW, ROUNDING, Judge
from trimtab.data.batches import Batch
from trimtab.errors import IntegrityError, UsageError
from trimtab.importers.input_spec import InputSpec, Shapes, parse_shape, random_tensor, read_tensors, structure_of
from trimtab.safe_load.archives import load_torchscript
from trimtab.safe_load.zip_records import ZIP_ERRORS
from trimtab.tensors.torchscript_modules import ScriptModuleWrapper
from trimtab.tensors.weights import tolerance


@dataclasses.dataclass(frozen=True)
class ScriptFile:
    """Factory of a module around a TorchScript module."""

    path: str

    def __call__(self) -> nn.Module:
        """The module, in evaluation mode."""
        script = load_torchscript(self.path)
        return scripted(script, tuple(a.name for a in _arguments(script)))

    def input_spec(self, inputs: str | pathlib.Path | None, shapes: Shapes) -> InputSpec:
        """Names of the inputs from the module's schema; sizes from ``inputs`` or ``shapes``, because the file does not store
        them.

        Raises:
            IntegrityError: the file is damaged, or contains something that models do not need.
            UsageError: the file is a pickled checkpoint, sizes are missing, or an argument is not a tensor.
        """
        _refuse_checkpoint(self.path)
        names = self._tensor_names(load_torchscript(self.path))
        source = pathlib.Path(self.path).name
        if inputs is None and not set(names) <= set(shapes):
            raise UsageError(
                f"{source} takes {', '.join(names)}, but TorchScript keeps no shapes. Give --inputs FILE.npz with real inputs, "
                f"or {' '.join(f'--shape {name}=1x3x224x224' for name in names)} for random ones (with :int64 for integers)."
            )
        stated = {name: parse_shape(shape, name) for name, shape in shapes.items()}
        found = {} if inputs is None else read_tensors(inputs)
        if len(found) == len(names) == 1:
            found = {names[0]: next(iter(found.values()))}
        if missing := [name for name in names if name not in stated and name not in found]:
            raise UsageError(
                f"{inputs} holds {', '.join(sorted(found))}, but {source} also takes {missing[0]}. Add it to the file, or give "
                f"--shape {missing[0]}=1x3x224x224."
            )
        rows = next((shape[0] for shape, _ in stated.values() if shape), 1)
        dtypes = tuple(stated.get(n, ((), None))[1] or (found[n].dtype if n in found else torch.float32) for n in names)
        whole = [tuple(found[name].shape) if name in found else stated[name][0] for name in names]
        single = [(rows, *shape[1:]) for shape in whole if shape]
        structure = structure_of([torch.empty(1, device="meta") for _ in names], {})
        spec = InputSpec(source=source, names=names, dtypes=dtypes, shapes=tuple(whole), structure=structure)
        if len(single) == len(whole) and _first_axis_is_batch(self(), single, dtypes):
            batch = Dim(BATCH)
            return dataclasses.replace(spec, shapes=tuple((batch, *shape[1:]) for shape in single))
        return spec

    def _tensor_names(self, script: torch.jit.ScriptModule) -> tuple[str, ...]:
        wanted = []
        for argument in _arguments(script):
            if str(argument.type) == "Tensor":
                wanted.append(argument.name)
            elif not argument.has_default_value():
                raise UsageError(
                    f"The argument {argument.name!r} of {self.path} is of the type {argument.type}; only tensors can be given "
                    "for a file. Write a workload file that loads it and passes the rest: trimtab init custom."
                )
        return tuple(wanted)


def scripted(script: torch.jit.ScriptModule, names: tuple[str, ...]) -> nn.Module:
    """``script`` as a module whose ``forward`` shows the parameters ``names`` in its signature."""
    kind = type("Scripted", (ScriptModuleWrapper,), {"forward": _forward(names)})
    module: nn.Module = kind(script).eval()
    return module


def _forward(names: tuple[str, ...]) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.script(*args, **kwargs)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _first_axis_is_batch(module: nn.Module, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the first axis is the batch: the outputs of rows do not depend on the other rows, at twice the number of rows."""
    generator = torch.Generator().manual_seed(0)
    rows = max(2 * shapes[0][0], FEW)
    leaves = tuple(random_tensor((rows, *shape[1:]), dtype, generator) for shape, dtype in zip(shapes, dtypes, strict=True))
    return Judge(module, tolerance(module, ROUNDING))(Batch(leaves, None, rows)).kind == "own"


def _arguments(script: torch.jit.ScriptModule) -> list[Any]:
    forward: Any = script.forward
    return list(forward.schema.arguments)[1:]


def _refuse_checkpoint(path: str) -> None:
    """Refuse a checkpoint of ``torch.save``, which is often called .pt too, with a helpful message."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile:
        names = set()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}.") from error
    except ZIP_ERRORS:
        return  # a damaged archive; the strict reader reports how
    if "constants.pkl" not in names:
        raise UsageError(
            f"{path} is no TorchScript file. If torch.save wrote it, it is a pickle of weights or objects, which is not "
            "read as a model: build the model in a workload file (trimtab init custom) and load its weights there, or export "
            "it with torch.export.save."
        )
