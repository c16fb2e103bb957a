"""What must run and what counts as right, as its owner states it."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from trimtab._internal import units
from trimtab._internal.text import of_type
from trimtab._internal.user_code import BY_HAND, user_code
from trimtab._internal.validation import by_name
from trimtab.core.capture import Call, record
from trimtab.core.dynamic_dims import describe_dims
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import flatten
from trimtab.tensors.torchscript_modules import allow_modes

__all__ = ["BY_HAND", "PRESETS", "Evaluation", "Limits", "Training", "Workload", "as_call", "user_code"]

PRESETS = {"mlperf-99": 0.01, "mlperf-99.9": 0.001}
"""Accuracy limits by name: the share of the model's own score that may be lost, as MLPerf Inference's targets state it."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Labelled data and how to judge outputs on it. Give either ``score`` or ``metric``."""

    data: Any
    """A :class:`torch.utils.data.Dataset` of single examples, or an iterable of batches; each item is ``(inputs, target)``.
    ``inputs`` is a tensor, a tuple of positional arguments or a dict of keyword arguments. A ``(inputs, target)`` tuple of
    tensors that hold all examples works too. A batch is taken apart only where the model's answer for a row does not depend on
    the other rows; where it does, as in a sequence whose first axis is time, items stay whole."""
    score: Callable[[Any, Any], Any] | None = None
    """``score(output, target)`` -> n per-example scores (numbers or booleans, shape ``(n,)``) for a batch of n. Of an item
    whose rows are no examples the mean of its scores counts, as one, unless ``dynamic`` says which of its axes is the batch."""
    metric: Callable[[Any, Any], float] | None = None
    """``metric(outputs, targets)`` -> one number for the whole set, such as F1 or a correlation. Outputs and targets
    keep the structure that the model and the data give them; their tensors are joined over the batches along the axis of the
    examples, and what has none (a recurrent state, a constant) is a list with the value of every batch, or the value itself
    where it is the same in all. Intervals come from resampling the examples, or the items where their rows are none; so it is
    called many times, and must keep nothing from call to call."""
    run: Callable[[Callable[..., Any], Any], Any] | None = None
    """``run(model, inputs)`` -> output for one item, for a model that is called more than once for it (a recurrent model
    over frames, a Siamese pair). Items are then never taken apart."""
    test: Any = None
    """Data kept for what is confirmed alone; without it a part of ``data`` is set aside."""
    outputs: Sequence[str] | None = None
    """Names of the floating-point outputs that must not be lost, whatever the score says of them, such as ``("logits",)``: a
    recipe that may lose accuracy is refused where the error of one reaches what it varies by, in all of it or in a tenth of its
    slices. ``None``: all, if the model has several, but for those whose sizes follow from data, and for what ``run`` makes.
    ``()``: none, so that the score alone judges. Exact recipes are held to the model's own values in every output. A name
    is that of the signature, without ``output.``: a key, a field or a position such as ``"0"``; a single tensor is
    ``"output"``."""
    higher_is_better: bool = True
    """False for an error, of which less is better."""
    batch_size: int = 64
    """Examples per batch where ``data`` is a Dataset or a tuple of tensors."""
    max_examples: int = 4096
    """At most so many examples are read from ``data``; more would make every trial slow and seldom change a verdict."""

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
    """How a model is trained, as its script says it: what :class:`~trimtab.train.trainer.Trainer` is given."""

    data: Any
    """A loader of batches that can be gone through again and again, or a function without arguments that makes one."""
    optimizer: Callable[[Any], Any]
    """``optimizer(parameters)`` -> one of :mod:`torch.optim`."""
    loss: Callable[..., Any] | None = None
    """As the Trainer takes it; ``None`` for a model that computes its own."""
    schedule: Callable[[Any, int], Any] | None = None
    """``schedule(optimizer, updates)`` -> a scheduler, as the Trainer takes it."""
    settings: Settings = Settings()
    """As written: what anything else has to beat."""

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Settings):
            raise UsageError(
                f"Training settings is {of_type(self.settings)}; give trimtab.Settings, such as Settings(threads=2)."
            )
        for name in ("optimizer", "loss", "schedule"):
            value = getattr(self, name)
            if (value is not None or name == "optimizer") and not callable(value):
                raise UsageError(
                    f"Training {name} is {of_type(value)}, which cannot be called. Give a function, because every "
                    "trial makes its own."
                )
        if not callable(self.data) and not hasattr(self.data, "__iter__"):
            raise UsageError(f"Training data is {of_type(self.data)}; give a loader of batches, or a function that makes one.")


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a recipe must keep. ``None`` leaves a quantity free, but for the score, of which ``mlperf-99`` then is the limit."""

    max_drop: float | str | None = None
    """Largest drop of the score, in its own units (0.005 is half a point of accuracy), or ``"mlperf-99"`` or ``"mlperf-99.9"``;
    held against the *upper* bound of the drop. In training, how much higher the loss may end up."""
    max_error: float = 0.05
    """Largest root mean square error of the outputs, relative to what they vary by; used where there are no labels."""
    latency_ms: float | None = None
    """Largest median time of one call on the example, in milliseconds."""
    memory_mb: float | None = None
    """Largest peak memory, in MB (10**6 bytes), of a fresh process that loads the files and calls them, or that trains, above
    what it has with torch imported."""
    size_mb: float | None = None
    """Largest size of the runtime's files, in MB (10**6 bytes)."""

    def __post_init__(self) -> None:
        if isinstance(self.max_drop, str) and self.max_drop not in PRESETS:
            raise UsageError(f"max_drop is {self.max_drop!r}; use a number like 0.005 or one of {', '.join(PRESETS)}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            preset = field.name == "max_drop" and isinstance(value, str)
            if value is not None and not preset and not isinstance(value, numbers.Real):
                raise UsageError(f"{field.name} is {value!r}; a limit is a plain number, without a unit.")
            if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):  # such as one of numpy
                object.__setattr__(self, field.name, value := float(value))
            if isinstance(value, float) and not math.isfinite(value):
                way_out = "Give a large one, such as 1e9" if field.name.startswith("max_") else "Leave it out for none"
                raise UsageError(f"{field.name} is {value}; a limit is a finite number. {way_out}.")
            if isinstance(value, (int, float)) and not (value >= 0 if field.name == "max_drop" else value > 0):
                raise UsageError(f"{field.name} is {value}; a limit is a positive number.")

    @classmethod
    def parse(
        cls,
        *,
        max_drop: str | None = None,
        max_error: str | None = None,
        latency: str | None = None,
        memory: str | None = None,
        size: str | None = None,
    ) -> Limits:
        """Limits from text with units: ``0.5%``, ``4ms``, ``500MB``.

        Raises:
            UsageError: a number without its unit, a wrong unit, or not a number.
        """
        drop = max_drop if max_drop is None or max_drop in PRESETS else units.fraction(max_drop, "--max-drop")
        return cls(
            max_drop=drop,
            max_error=cls.max_error if max_error is None else _error(max_error),
            latency_ms=None if latency is None else 1e3 * units.seconds(latency, "--latency"),
            memory_mb=None if memory is None else units.megabytes(memory, "--memory"),
            size_mb=None if size is None else units.megabytes(size, "--size"),
        )

    def drop_limit(self, baseline_score: float) -> float:
        """The largest drop in score units; a preset is a share of the baseline's score; nothing stated means ``mlperf-99``."""
        if isinstance(self.max_drop, (int, float)):
            return float(self.max_drop)
        return PRESETS[self.max_drop or "mlperf-99"] * abs(baseline_score)


def _error(text: str) -> float:
    """A largest error from text; 100 and more, which no percent is that lost its sign, holds the outputs to nothing."""
    found = units.fraction(text, "--max-error")
    if "%" not in text and 1 <= found < 100:
        raise UsageError(
            f"--max-error is {text!r}, which allows outputs to be off by {found:.0%} of what they vary by. If {found:g}% was "
            f"meant, write --max-error {found:g}%."
        )
    return found


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, the inputs it is called with, and what counts as right. Immutable; its model is never modified."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it with its weights."""
    inputs: Any = None
    """Example inputs of the shape that must be fast: a tensor, a tuple of positional or a dict of keyword arguments, or a
    :class:`~trimtab.core.capture.Call` with both."""
    name: str = "workload"
    """Of letters, digits, ``.``, ``_`` and ``-``: it names the run folder, ``runs/NAME``."""
    evaluation: Evaluation | None = None
    """What counts as right; without it recipes are held to the model's own outputs."""
    calibration: Any = None
    """Unlabelled batches of real inputs that quantizers may look at; without it some of the evaluation's data is set aside."""
    dynamic: Mapping[str, Mapping[int, str | Dim]] | None = None
    """Sizes that may differ from call to call: ``{"input_ids": {0: "batch", 1: "length"}}``. ``None``: what ``examples``
    and the data show. A :class:`~trimtab.core.signature.Dim` in place of a name states bounds, or that sizes are multiples."""
    examples: Sequence[Any] = ()
    """More example inputs, of other sizes: the axes that differ are dynamic, those that differ alike are one dimension."""
    mode: Literal["infer", "train"] = "infer"
    """What is to be made fast: the model's calls (:func:`trimtab.optimize`), or its training (:func:`trimtab.tune`)."""
    training: Training | None = None
    """How the model is trained, for :func:`trimtab.tune`; ``mode="train"`` needs this and no inputs."""
    seed: int = 0
    """Of the split of the data; in training, of the parameters and of the order of the data."""
    notes: tuple[str, ...] = ()
    """Sentences about what was assumed when this was made; they are shown with the results."""
    reference: tuple[str, ...] = dataclasses.field(default=(), init=False)
    """The words of the command line that stand for this, as :func:`trimtab.load_workload` gave it for a file that is no Python;
    ``dataclasses.replace`` makes something else of it, which they do not stand for."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UsageError(f"Workload name {self.name!r} names a folder; use letters, digits, '.', '_' and '-'.")
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise UsageError(f"Workload model is {of_type(self.model)}; give an nn.Module or a function that makes one.")
        if not isinstance(self.seed, int):
            raise UsageError(f"Workload seed is {self.seed!r}; give a whole number.")
        if self.mode not in ("infer", "train"):
            raise UsageError(f"Workload mode is {self.mode!r}; it can be 'infer' or 'train'.")
        if self.mode == "train" and self.training is None:
            raise UsageError(f"Workload {self.name!r} has mode='train' but no training=...; give a trimtab.Training.")
        if self.mode == "infer" and self.inputs is None:
            raise UsageError(f"Workload {self.name!r} has no inputs=...; give what the model is called with.")
        for name, kind in (("evaluation", Evaluation), ("training", Training)):
            if not isinstance(value := getattr(self, name), (kind, type(None))):
                raise UsageError(f"Workload {name} is {of_type(value)}; give a trimtab.{kind.__name__}.")
        if self.mode == "infer":
            _check_inputs(self.inputs)
        _check_dynamic(self.dynamic)

    @classmethod
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
        """The workload of ``module`` as ``run()``, your own program, calls it: perhaps one model of several in a pipeline.

        The first call becomes the example inputs and the others the calibration data, copied to the CPU; at most ``most_calls``
        of them and ``most_mb`` megabytes, spread evenly over all. Sizes that differ between any two calls are dynamic. What
        the module answers is not kept: without an ``evaluation`` lossy recipes are judged by how far their outputs are from
        the module's own, and no label is made up.

        Args:
            module: the very object that the program calls, in evaluation mode.
            run: called once, without arguments; it may call the module as often as it likes. An iterator that it returns, such
                as a generator, is gone through.
            model: what is optimised, where that is not ``module`` itself, such as a function that builds it; worker processes
                get it pickled.
            name, evaluation, calibration, dynamic, seed: as in the constructor; they go before what was recorded.
            keep: says of each :class:`~trimtab.core.capture.Call` whether it counts, where the calls have different forms.
            most_calls: how many calls are kept.
            most_mb: how many megabytes of inputs are kept.

        Raises:
            UsageError: the module was never called, was in training mode, or its calls cannot be used; says why.
            WorkloadError: ``run`` or ``keep`` raised; its exception is the cause.
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
        """The model itself; calls the building function if there is one.

        Raises:
            WorkloadError: the function gave something that is no module.
        """
        model = self.model if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(model, nn.Module):
            raise WorkloadError(
                f"The workload's model function returned {of_type(model)}, not an nn.Module. Let it return the model."
            )
        allow_modes(model)
        return model

    @property
    def stated_dims(self) -> dict[str, dict[int, Dim]] | None:
        """:attr:`dynamic` with plain names turned into dimensions of any size."""
        if self.dynamic is None:
            return None
        return {
            name: {axis: dim if isinstance(dim, Dim) else Dim(dim) for axis, dim in axes.items()}
            for name, axes in self.dynamic.items()
        }


def _check_inputs(inputs: Any) -> None:
    """Refuse what a model cannot be called with in any runtime: something without a tensor, or with what is no value of one."""
    if not flatten(as_call(inputs), "the example inputs")[0]:
        given = repr(inputs)
        raise UsageError(
            f"The workload's inputs hold no tensor: they are {given if len(given) < 80 else given[:76] + ' ...'}. Give what "
            "the model is called with, such as inputs=images[:1]."
        )


def _check_dynamic(dynamic: Any) -> None:
    """Refuse what is no ``{"name of an input": {axis: "name of a dimension"}}``, such as torch's own forms of it."""
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


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of inputs in any of the forms that a workload takes."""
    if isinstance(inputs, Call):
        return inputs.args, dict(inputs.kwargs)
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list):
        return tuple(inputs), {}
    return (inputs,), {}
