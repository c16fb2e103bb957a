"""The candidate: a model with example inputs and settings. Passes rewrite it, backends compile it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from trimtab._internal.text import counted
from trimtab._internal.user_code import user_code
from trimtab.core.dynamic_dims import mark_dependent, mark_dynamic, probe_sizes, resized
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim, Signature, TensorSpec, input_names, parameter_names, require_plain, specs
from trimtab.core.training_examples import TrainingExamples
from trimtab.errors import CompileError, UsageError, WorkloadError
from trimtab.hardware.environment import IMPORT_ERRORS
from trimtab.tensors.deepcopy import copied
from trimtab.tensors.structure import Structure, classes, cloned, flatten, names, unflatten
from trimtab.tensors.weights import raw

MODEL_ERRORS: tuple[type[Exception], ...] = (*IMPORT_ERRORS, pickle.PickleError)
"""Errors of a model that is called in an unusual way, as by an exporter. The model's own exceptions are not included."""
OUTPUT = "trimtab.output"
"""Key in ``GraphModule.meta``: the name of the model's only output in the file that it comes from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model in evaluation mode with example inputs. Immutable.

    Candidates share the model. Code that changes the model must work on :meth:`own_model`; so must code that passes it to an
    exporter, because exporters patch the model.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    signature: Signature
    all_sizes: bool = False
    """Whether the workload states the dynamic dimensions. A form that keeps only some of them is then of no use, and backends
    do not build one."""
    settings: Settings = Settings()
    calibration: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...] = ()
    """Real inputs for quantizers, as ``(args, kwargs)``. They are never scored."""
    scratch: pathlib.Path | None = None
    """Folder for files that other trials of the study can reuse, such as an exported graph."""
    training: TrainingExamples | None = None
    """Examples for passes that train; ``None`` unless the study compresses."""
    teacher: nn.Module | None = None
    """The model as written, in evaluation mode. A pass that trains follows its outputs, and must not change it."""
    student: nn.Module | None = None
    """A smaller network of the user's own, in evaluation mode, which may take the model's place."""
    notes: tuple[str, ...] = ()
    """Sentences of passes for the trial, such as what was trained on."""
    trained: tuple[Mapping[str, Any], ...] = ()
    """Facts of each training that a pass made or loaded: updates, seconds, losses."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        dynamic: Mapping[str, Mapping[int, Dim]] | None = None,
        calibration: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
        scratch: pathlib.Path | None = None,
    ) -> Candidate:
        """Make a candidate for ``model``, in evaluation mode, called as ``model(*args, **kwargs)``.

        To find the signature, the model runs once on the example, and for each dynamic dimension at another size, and at half
        the size if the model accepts that. ``dynamic`` maps input names to ``{axis: Dim}``.

        Raises:
            UsageError: an input or output cannot be passed to other runtimes; or ``dynamic`` names an unknown input or axis, or
                does not allow the example's size.
            WorkloadError: the model fails at another size; or non-tensor values of its output change with the size; or the
                model needs the methods of an input's class.
            RuntimeError: and any other error of the model itself.
        """
        kwargs = dict(kwargs or {})
        leaves, structure = flatten((args, kwargs), "inputs")
        parameters = parameter_names(model.forward, len(args))
        leaf_names = input_names(parameters, structure)
        require_plain(leaves, leaf_names, "input")
        inputs = mark_dynamic(specs(leaves, leaf_names), dynamic or {})
        dims = tuple({dim.name: dim for axes in (dynamic or {}).values() for dim in axes.values()}.values())
        given = [leaf.clone() for leaf in leaves]
        outputs, output_structure = flatten(_first_call(model, args, kwargs, structure, given), "output")
        writes = tuple(name for name, before, after in zip(leaf_names, leaves, given, strict=True) if _written(before, after))
        found = _output_names(model, output_structure)
        require_plain(outputs, found, "output")
        output_specs = specs(outputs, found)
        for dim in dims:
            now, near, half = probe_sizes(dim, inputs, leaves)
            if near == now:
                continue
            at = functools.partial(_outputs_at, model, dim, inputs, leaves, (structure, output_structure), outputs)
            seen = {now: outputs, near: at(near)}
            if half not in seen:
                with contextlib.suppress(WorkloadError, UsageError):  # optional evidence; not every model accepts half the size
                    seen[half] = at(half)
            shapes = [{size: found[i].shape for size, found in seen.items()} for i in range(len(outputs))]
            output_specs = tuple(mark_dependent(spec, dim.name, each) for spec, each in zip(output_specs, shapes, strict=True))
        signature = Signature(inputs, output_specs, structure, output_structure, parameters, dims, writes=writes)
        return cls(model=model, args=args, kwargs=kwargs, signature=signature, calibration=tuple(calibration), scratch=scratch)

    def own_model(self) -> nn.Module:
        """A deep copy of the model, which the caller may change.

        Raises:
            CompileError: the model cannot be copied.
        """
        try:
            return copied(self.model)
        except MODEL_ERRORS as error:
            raise CompileError(f"The model cannot be copied: {error}. Make copy.deepcopy(model) work.") from error

    def own_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the example inputs, for a call that may modify its inputs."""
        return cloned(self.args), cloned(dict(self.kwargs))

    def keeping(self, dims: Sequence[str]) -> Candidate:
        """This candidate with the dynamic dimensions ``dims`` only; all others are frozen to the example's sizes."""
        if len(dims) == len(self.signature.dims):
            return self
        with torch.no_grad():
            outputs = self.flat(copied=False)(*self.own_leaves())
        return dataclasses.replace(self, signature=self.signature.without_dims(self.leaves, outputs, but=dims))

    def own_leaves(self) -> list[torch.Tensor]:
        """Copies of :attr:`leaves`, for a call that may modify its inputs."""
        return [leaf.clone() for leaf in self.leaves]

    def with_model(self, model: nn.Module, changes: Mapping[str, Any] | None = None) -> Candidate:
        """This candidate with another model and, if given, other settings: names, such as ``"threads"``, to values."""
        return dataclasses.replace(self, model=model, settings=self.settings.replaced(changes or {}))

    def with_settings(self, changes: Mapping[str, Any]) -> Candidate:
        """This candidate with other settings: names, such as ``"precision.autocast"``, to values."""
        return dataclasses.replace(self, settings=self.settings.replaced(changes))

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors of the example inputs, in the order of the signature."""
        return flatten((self.args, dict(self.kwargs)), "inputs")[0]

    def describe(self) -> str:
        """The example inputs with their sizes as text: ``images: float32[batch=2, 1, 8, 8]``."""
        return self.signature.describe(self.leaves)

    def flat(self, *, copied: bool = True) -> FlatModel:
        """The model with flat tensors as inputs and outputs, as exporters need it. ``copied=False`` wraps the model itself."""
        return FlatModel(self.own_model() if copied else self.model, self.signature, self.settings)

    def flat_calibration(self) -> list[list[torch.Tensor]]:
        """The calibration inputs as flat lists in the order of the signature."""
        return [list(self.signature.bind(args, kwargs)) for args, kwargs in self.calibration]

    def dynamic_leaves(self) -> list[torch.Tensor]:
        """Copies of the example tensors with all dynamic sizes at least 2, as far as the dimensions' bounds allow.

        Exporters specialize a dimension of size 1 to a constant, so a batch of 1 does not export to a dynamic batch.
        """
        leaves = self.own_leaves()
        most = {dim.name: 2 if dim.max is None else dim.max for dim in self.signature.dims}
        for name, now in self.signature.sizes(leaves).items():
            wanted, pairs = max(now, min(2, most[name])), zip(leaves, self.signature.inputs, strict=True)
            leaves = [resized(leaf, spec.shape, name, wanted) for leaf, spec in pairs]
        return leaves


def call_model(model: nn.Module, structure: Structure, leaves: Sequence[torch.Tensor]) -> Any:
    """The model's output for copies of the flat input tensors, computed without gradients."""
    return _called(model, structure, [leaf.clone() for leaf in leaves])


def _called(model: nn.Module, structure: Structure, leaves: Sequence[torch.Tensor]) -> Any:
    args, kwargs = unflatten(structure, leaves)
    with torch.no_grad():
        return model(*args, **kwargs)


def _written(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the call wrote to ``after``, a copy of ``before``, even if it wrote equal values.

    torch does not count writes through numpy, so values are compared as well. A tensor whose shape changed does not count,
    because no runtime can write to it in place.
    """
    if before.shape != after.shape:
        return False
    counted = not after.is_inference() and after._version > 0
    return counted or not torch.equal(raw(before), raw(after))


def _outputs_at(
    model: nn.Module,
    dim: Dim,
    inputs: Sequence[TensorSpec],
    leaves: Sequence[torch.Tensor],
    structures: tuple[Structure, Structure],
    outputs: Sequence[torch.Tensor],
    size: int,
) -> list[torch.Tensor]:
    """The outputs for the example with ``dim`` at ``size``; refused if their structure is not ``structures[1]``."""
    changed = [resized(leaf, spec.shape, dim.name, size) for leaf, spec in zip(leaves, inputs, strict=True)]
    fix = (
        f"If sizes must be multiples, state trimtab.Dim({dim.name!r}, step=...), or leave it out of dynamic; if there is a "
        "largest one, state max=..."
    )
    with user_code(f"At {dim.name}={size} the model fails", fix):
        other = call_model(model, structures[0], changed)
    found, structure = flatten(other, "output")
    if structure != structures[1]:
        raise WorkloadError(
            f"The output holds other numbers, or another count of tensors, at another size of {dim.name!r}; runtimes keep what "
            "they are built with. Return them as tensors, or leave that size fixed."
        )
    for name, now, then in zip(names(structure, "output"), outputs, found, strict=True):
        if now.dim() != then.dim():
            raise UsageError(
                f"The output {name!r} has {counted(now.dim(), 'axis')} for one size of {dim.name!r} and {then.dim()} for "
                f"another. Let the model keep them, or leave {dim.name!r} out of dynamic."
            )
    return found


def _output_names(model: nn.Module, structure: Structure) -> list[str]:
    known = model.meta.get(OUTPUT) if isinstance(model, fx.GraphModule) and structure.kind == "tensor" else None
    return names(structure, known or "output")


def _first_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], structure: Structure, leaves: Sequence[torch.Tensor]
) -> Any:
    """The model's output for inputs rebuilt from plain tensors, as runtimes call it: instances of custom classes are lost.

    ``leaves`` are copies of the example's tensors; the model may modify them.
    """
    try:
        return _called(model, structure, leaves)
    except MODEL_ERRORS:
        lost = sorted(classes(structure))
        if not lost or not _runs(model, args, kwargs):
            raise
        raise WorkloadError(
            f"The model uses methods of {' or '.join(f'`{name}`' for name in lost)}, which do not cross to a runtime: only the "
            "tensors inside do. Pass its tensors, in a module around the model that makes the object of them."
        ) from None


def _runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    args, kwargs = cloned((args, kwargs))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except MODEL_ERRORS:
        return False
    return True


class FlatModel(nn.Module):
    """``model`` as ``forward(*tensors) -> tuple of tensors``, under the candidate's settings."""

    def __init__(self, model: nn.Module, signature: Signature, settings: Settings) -> None:
        super().__init__()
        self.model = model
        self._signature = signature
        self._settings = settings
        self._dtypes = [getattr(torch, spec.dtype) for spec in signature.outputs]
        self.eval()

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on flat tensors. 4-D inputs are converted to the memory format of the settings."""
        given = leaves
        if self._settings.memory_format == "channels_last":
            leaves = tuple(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in leaves)
        args, kwargs = unflatten(self._signature.input_structure, leaves)
        with self._precision():
            outputs = flatten(self.model(*args, **kwargs), "output")[0]
        for i in self._signature.written:
            if leaves[i] is not given[i]:  # the model modified the converted tensor; copy the change back to the caller's
                given[i].copy_(leaves[i])
        if self._settings.precision.autocast is None:
            return tuple(outputs)
        return tuple(t.to(dtype) for t, dtype in zip(outputs, self._dtypes, strict=True))  # autocast must not change dtypes

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self._settings.precision.autocast is None:
            yield
            return
        with torch.autocast(self._settings.device, dtype=getattr(torch, self._settings.precision.autocast)):
            yield
