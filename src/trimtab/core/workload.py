"""The workload: what runs, and how its results are judged, as the user states it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trimtab._internal.notebook import facts
from trimtab._internal.tensor_text import described
from trimtab._internal.text import of_type
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import by_name, checked_call
from trimtab.core.capture import Call, record
from trimtab.core.dynamic_dims import check_stated, describe_dims
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import flatten
from trimtab.tensors.torchscript_modules import allow_modes


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Labelled data and a function that judges outputs. Takes either ``score`` or ``metric``.

    Example:

        >>> import torch, trimtab
        >>> images, labels = torch.randn(100, 64), torch.randint(10, (100,))
        >>> evaluation = trimtab.Evaluation(
        ...     data=(images, labels),
        ...     score=lambda output, target: output.argmax(-1) == target,  # 100 booleans: the accuracy
        ... )
    """

    data: Any
    """A :class:`torch.utils.data.Dataset` of single examples, an iterable of batches, or a tuple ``(inputs, targets)`` of
    tensors with all examples; or a function without arguments that reads one of these, which a study calls once. Each item is
    ``(inputs, target)``; ``inputs`` is a tensor, a tuple of positional arguments or a dict of keyword arguments. Batches are
    split into examples only if the model treats the rows independently; otherwise, as for a sequence whose first axis is time,
    items stay whole."""
    score: Callable[[Any, Any], Any] | None = None
    """``score(output, target)`` -> the scores of the n examples of a batch: numbers or booleans, shape ``(n,)``. If an item's
    rows are not examples, the mean of its scores counts as one score, unless ``dynamic`` names the batch axis."""
    metric: Callable[[Any, Any], float] | None = None
    """``metric(outputs, targets)`` -> one number for the whole set, such as F1 or a correlation. Outputs and targets have the
    structure of the model's and the data's; tensors are concatenated over the batches along the batch axis. A value without
    that axis (a recurrent state, a constant) becomes a list with one entry per batch, or stays as it is if equal in all
    batches. Confidence intervals come from resampling the examples (or items), so the function is called many times and must be
    free of state."""
    run: Callable[[Callable[..., Any], Any], Any] | None = None
    """``run(model, inputs)`` -> output for one item, for a model that is called several times per item (a recurrent model over
    frames, a Siamese pair). Items then stay whole."""
    test: Any = None
    """Held-out data for the final confirmation only. Without it, a part of ``data`` is held out."""
    outputs: Sequence[str] | None = None
    """Names of the floating-point outputs that a lossy recipe must preserve, whatever the score, such as ``("logits",)``. A
    recipe is refused if the error of one of them is as large as the output's variation, in total or in a slice of it.
    ``None``: all, if the model has several, except outputs with data-dependent sizes and the results of ``run``. ``()``: none,
    only the score counts. Exact recipes must reproduce every output. A name is that of the signature without ``output.``: a
    key, a field or a position such as ``"0"``; a single tensor is ``"output"``."""
    higher_is_better: bool = True
    """False for an error measure."""
    batch_size: int = 64
    """Examples per batch if ``data`` is a Dataset or a tuple of tensors."""
    max_examples: int = 4096
    """Most examples that are read from ``data``. More make each trial slower and seldom change the result."""

    def __post_init__(self) -> None:
        if (self.score is None) == (self.metric is None):
            given = "neither" if self.score is None else "both"
            raise UsageError(f"An Evaluation takes score=... (per example) or metric=... (whole set); {given} was given.")
        for name in ("score", "metric", "run"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise UsageError(f"Evaluation {name} is {value!r}, which cannot be called. Give a function.")
        if not isinstance(self.higher_is_better, bool):
            raise UsageError(f"Evaluation higher_is_better is {self.higher_is_better!r}; it can be True or False.")
        named = self.outputs is None or isinstance(self.outputs, (list, tuple))
        if not named or not all(isinstance(name, str) for name in self.outputs or ()):
            raise UsageError(f"Evaluation outputs is {self.outputs!r}; give a tuple of names, such as ('logits',).")
        for name in ("batch_size", "max_examples"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise UsageError(f"Evaluation {name} is {value!r}; give a whole number of 1 or more.")


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained: the arguments of :class:`~trimtab.train.trainer.Trainer`."""

    data: Any
    """A loader of batches that can be iterated repeatedly, or a function without arguments that makes one."""
    optimizer: Callable[[Any], Any] | None = None
    """``optimizer(parameters)`` -> a :class:`torch.optim.Optimizer`. Required for :func:`trimtab.tune`; compression has its
    own."""
    loss: Callable[..., Any] | None = None
    """The loss function, as the Trainer takes it; ``None`` if the model returns its loss."""
    schedule: Callable[[Any, int], Any] | None = None
    """``schedule(optimizer, updates)`` -> a scheduler, as the Trainer takes it."""
    settings: Settings = Settings()
    """The baseline's settings, which other settings are compared with."""

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Settings):
            raise UsageError(
                f"Training settings is {of_type(self.settings)}; give trimtab.Settings, such as Settings(threads=2)."
            )
        for name in ("optimizer", "loss", "schedule"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UsageError(
                    f"Training {name} is {of_type(value)}, which cannot be called. Give a function, because every "
                    "trial makes its own."
                )
        if not callable(self.data) and not hasattr(self.data, "__iter__"):
            raise UsageError(f"Training data is {of_type(self.data)}; give a loader of batches, or a function that makes one.")


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its example inputs, and how its results are judged. Immutable; the model is never modified."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it and loads its weights."""
    inputs: Any = None
    """Example inputs with the shape to optimize for: a tensor, a tuple of positional or a dict of keyword arguments, or a
    :class:`~trimtab.core.capture.Call` with both."""
    name: str = "workload"
    """Letters, digits, ``.``, ``_`` and ``-``. The run folder is ``runs/NAME``."""
    evaluation: Evaluation | None = None
    """How results are judged. Without it, outputs are compared with the model's own."""
    calibration: Any = None
    """Unlabelled batches of real inputs for quantizers, or a function that reads them. Without it, some of the evaluation's
    data is set aside for them."""
    dynamic: Mapping[str, Mapping[int, str | Dim]] | None = None
    """Sizes that may differ between calls: ``{"input_ids": {0: "batch", 1: "length"}}``. ``None``: inferred from ``examples``
    and the data. A :class:`~trimtab.core.signature.Dim` instead of a name states bounds or a step."""
    examples: Sequence[Any] = ()
    """Example inputs of other sizes. Axes that differ are dynamic; axes that are equal in all examples are one dimension."""
    mode: Literal["infer", "train"] = "infer"
    """What to optimize: calls of the model (:func:`trimtab.optimize`) or its training (:func:`trimtab.tune`)."""
    training: Training | None = None
    """How the model is trained, for :func:`trimtab.tune`. Required with ``mode="train"``, which needs no ``inputs``. With
    ``mode="infer"``, the data and the loss with which ``optimize(compress=...)`` trains smaller forms of the model."""
    student: nn.Module | Callable[[], nn.Module] | None = None
    """A smaller network of your own with the same inputs and outputs, or a function that builds it. ``optimize(compress=
    "distill")`` trains it to follow the model, if it is faster."""
    seed: int = 0
    """Seed for splitting the data; in training also for the parameters and the order of the data."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made for this workload, as sentences that are shown with the results."""
    reference: tuple[str, ...] = dataclasses.field(default=(), init=False)
    """Command-line words that reproduce this workload, set by :func:`trimtab.load_workload` for files that are not Python.
    ``dataclasses.replace`` clears it, because the words no longer apply."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UsageError(f"Workload name {self.name!r} names a folder; use letters, digits, '.', '_' and '-'.")
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise UsageError(f"Workload model is {of_type(self.model)}; give an nn.Module or a function that makes one.")
        if self.student is not None and not isinstance(self.student, nn.Module) and not callable(self.student):
            raise UsageError(f"Workload student is {of_type(self.student)}; give an nn.Module or a function that makes one.")
        if not isinstance(self.seed, int):
            raise UsageError(f"Workload seed is {self.seed!r}; give a whole number.")
        if self.mode not in ("infer", "train"):
            raise UsageError(f"Workload mode is {self.mode!r}; it can be 'infer' or 'train'.")
        if self.mode == "train" and self.training is None:
            raise UsageError(f"Workload {self.name!r} has mode='train' but no training=...; give a trimtab.Training.")
        if self.mode == "train" and self.training is not None and self.training.optimizer is None:
            raise UsageError(
                f"Workload {self.name!r} has mode='train', and its training no optimizer=...; give a function of the "
                "parameters, such as torch.optim.AdamW."
            )
        if self.mode == "infer" and self.inputs is None:
            raise UsageError(f"Workload {self.name!r} has no inputs=...; give what the model is called with.")
        for name, kind in (("evaluation", Evaluation), ("training", Training)):
            if not isinstance(value := getattr(self, name), (kind, type(None))):
                raise UsageError(f"Workload {name} is {of_type(value)}; give a trimtab.{kind.__name__}.")
        if self.mode == "infer":
            _check_inputs(self.inputs)
        check_stated(self.dynamic)

    def __repr__(self) -> str:
        model = type(self.model).__name__ if isinstance(self.model, nn.Module) else getattr(self.model, "__name__", "function")
        judged = ", with an evaluation" if self.evaluation is not None else ""
        return f"Workload({self.name!r}, {model}, mode={self.mode!r}{judged})"

    def _repr_html_(self) -> str:
        """The line of ``repr()`` and a table of what is stated, for notebooks."""
        args, kwargs = ((), {}) if self.inputs is None else as_call(self.inputs)
        given = {"input" if len(args) == 1 else f"inputs[{n}]": value for n, value in enumerate(args)}
        judge = None if self.evaluation is None else self.evaluation.score or self.evaluation.metric
        rows = {
            "inputs": described(given | kwargs),
            "dynamic sizes": describe_dims(self.stated_dims or {}),
            "judged by": getattr(judge, "__name__", judge and type(judge).__name__),
            "notes": " ".join(self.notes),
        }
        return facts(repr(self), rows)

    @classmethod
    @checked_call("Workload.capture")
    def capture(
        cls,
        module: nn.Module,
        run: Callable[[], Any],
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        name: str = "workload",
        evaluation: Evaluation | None = None,
        calibration: Any = None,
        dynamic: Mapping[str, Mapping[int, str | Dim]] | None = None,
        keep: Callable[[Call], bool] | None = None,
        most_calls: int = 64,
        most_mb: float = 512.0,
        seed: int = 0,
    ) -> Workload:
        """Record a workload from ``run()``, a program of yours that calls ``module``, for example one model of a pipeline.

        The first call gives the example inputs, the others the calibration data; all are copied to the CPU. Sizes that differ
        between calls are dynamic. Outputs are not recorded: without an ``evaluation``, lossy recipes are judged by the error of
        their outputs against the module's.

        Args:
            module: the object that the program calls, in evaluation mode.
            run: called once, without arguments; it may call the module any number of times. If it returns an iterator, such as
                a generator, the iterator is exhausted.
            model: what to optimize, if not ``module`` itself, such as a function that builds it. It is pickled for worker
                processes.
            name, evaluation, calibration, dynamic, seed: as in the constructor; they take precedence over what was recorded.
            keep: returns for a :class:`~trimtab.core.capture.Call` whether to record it; for modules whose calls differ in
                structure.
            most_calls: most calls that are kept, spread evenly over all calls.
            most_mb: most megabytes of inputs that are kept.

        Raises:
            UsageError: the module was never called or was in training mode, or its calls cannot be used.
            WorkloadError: ``run`` or ``keep`` raised an error, which is the cause.

        Example:

            >>> import torch, trimtab
            >>> encoder, head = torch.nn.Linear(64, 32).eval(), torch.nn.Linear(32, 10).eval()
            >>> def program():
            ...     for size in (1, 4, 16):
            ...         head(encoder(torch.randn(size, 64)))
            >>> workload = trimtab.Workload.capture(encoder, program, name="encoder")
            >>> workload.notes[1]
            'Dynamic dimensions, as the calls show them: batch (axis 0 of input).'
        """
        with user_code("The program to capture raised", "Let it run to its end by itself first."):
            found = record(module, run, keep=keep, most_calls=most_calls, most_mb=most_mb)
        kept = f", of which {len(found.calls)} are kept" if len(found.calls) < found.seen else ""
        notes = [f"The inputs are recorded from {found.seen} call{'s' if found.seen > 1 else ''} of the program{kept}."]
        if found.dims and dynamic is None:
            notes.append(f"Dynamic dimensions, as the calls show them: {describe_dims(found.dims)}.")
        return cls(
            model=module if model is None else model,
            inputs=found.calls[0],
            name=name,
            evaluation=evaluation,
            calibration=(list(found.calls[1:]) or None) if calibration is None else calibration,
            dynamic=(found.dims or None) if dynamic is None else dynamic,
            seed=seed,
            notes=tuple(notes),
        )

    def build_model(self) -> nn.Module:
        """The model; if :attr:`model` is a function, its result.

        Raises:
            WorkloadError: the function returned something else than a module.
        """
        return _built(self.model, "model")

    def build_student(self) -> nn.Module | None:
        """The student with the same weights in every process; ``None`` if there is none.

        Raises:
            WorkloadError: the function returned something else than a module.
        """
        if self.student is None:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return _built(self.student, "student")

    @property
    def stated_dims(self) -> dict[str, dict[int, Dim]] | None:
        """:attr:`dynamic` with names replaced by dimensions without bounds."""
        if self.dynamic is None:
            return None
        return {
            name: {axis: dim if isinstance(dim, Dim) else Dim(dim) for axis, dim in axes.items()}
            for name, axes in self.dynamic.items()
        }


def _check_inputs(inputs: Any) -> None:
    """Refuse inputs without a tensor, and values that no runtime can be called with, such as a loader or an image."""
    if isinstance(inputs, (DataLoader, Dataset, Iterator)):
        one = "dataset[0][0][None]" if isinstance(inputs, Dataset) else "next(loader)[0][:1]"
        one = "next(iter(loader))[0][:1]" if isinstance(inputs, DataLoader) else one
        raise UsageError(
            f"The workload's inputs are {of_type(inputs)}, which yields many examples; the model is called with one batch of "
            f"them. For a {'dataset' if isinstance(inputs, Dataset) else 'loader'} of (inputs, targets): inputs={one}."
        )
    if not flatten(as_call(inputs), "the example inputs")[0]:
        given = repr(inputs)
        raise UsageError(
            f"The workload's inputs hold no tensor: they are {given if len(given) < 80 else given[:76] + ' ...'}. Give what "
            "the model is called with, such as inputs=images[:1]."
        )


def _built(model: nn.Module | Callable[[], nn.Module], what: str) -> nn.Module:
    found = model if isinstance(model, nn.Module) else model()
    if not isinstance(found, nn.Module):
        raise WorkloadError(
            f"The workload's {what} function returned {of_type(found)}, not an nn.Module. Let it return the {what}."
        )
    allow_modes(found)
    return found


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs in any form that a workload accepts, as ``(args, kwargs)``."""
    if isinstance(inputs, Call):
        return inputs.args, dict(inputs.kwargs)
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list):
        return tuple(inputs), {}
    return (inputs,), {}
