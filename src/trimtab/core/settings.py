"""How a model runs, apart from what the model is."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Literal, cast

from trimtab._internal.serialization import type_hints
from trimtab._internal.text import of_type
from trimtab._internal.validation import by_name, fits, options
from trimtab.errors import UsageError

MOST_THREADS = 1024
"""Largest accepted number of threads. More is a mistake, or an artifact made to exhaust the machine."""
_POSITIVE = (
    "threads",
    "target_ms",
    "data.batch",
    "data.micro_batch",
    "data.accumulate",
    "memory.activation_mb",
    "optimizer.clip_norm",
    "optimizer.clip_value",
    "distributed.bucket_mb",
)
"""Settings that must be above zero."""


class _Checked:
    """Settings whose values must fit the types of their fields."""

    def __post_init__(self) -> None:
        group = type(self).__name__.removesuffix("Settings").lower()
        for field, hint in type_hints(cast(Any, type(self))).items():
            name, value = f"{group}.{field}" if group else field, getattr(self, field)
            if dataclasses.is_dataclass(hint):
                if not isinstance(value, cast(type, hint)):
                    kind = cast(type, hint)
                    first = next(iter(value), None) if isinstance(value, Mapping) else None
                    known = [each.name for each in dataclasses.fields(kind)]
                    call = f"{name}={kind.__name__}({first if first in known else known[0]}=...)"
                    raise UsageError(f"Settings {name} is {of_type(value)}; write {call}.")
            elif not fits(hint, value):
                raise UsageError(f"Settings {name} is {value!r}; it can be {options(hint)}.")
            elif name in _POSITIVE and isinstance(value, (int, float)) and not value > 0:
                raise UsageError(f"Settings {name} is {value}; it must be above zero.")


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionSettings(_Checked):
    """Precision of arithmetic. ``Settings(precision=PrecisionSettings(autocast="bfloat16"))``."""

    autocast: Literal["bfloat16", "float16", "auto"] | None = None
    """Mixed precision through :class:`torch.autocast`."""
    tf32: bool | Literal["auto"] | None = None
    """Training: whether float32 products may be rounded to TensorFloat-32 on GPUs that have it. ``None`` leaves torch's choice,
    which rounds convolutions only."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(_Checked):
    """How many examples a call and an update have. ``Settings(data=DataSettings(accumulate=8))``."""

    batch: int | None = None
    """Inference: examples per call where the objective is throughput."""
    micro_batch: int | Literal["auto"] | None = None
    """Training: most examples per forward and backward pass; larger batches are divided, and the gradient stays that of the
    whole batch."""
    accumulate: int = 1
    """Training: batches of the loader per update of the parameters."""
    exact_batchnorm: bool = False
    """Training: whether BatchNorm sees all of an update's batches. They then run as one, and ``memory.activation_mb`` bounds
    the memory."""
    joined: bool = False
    """Training: whether an update's batches run as one wherever shapes and memory allow; BatchNorm then sees all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact_batchnorm and self.micro_batch is not None:
            raise UsageError(
                f"data.exact_batchnorm runs the batches of an update as one, which data.micro_batch={self.micro_batch!r} would "
                "take apart. Leave one out; memory.activation_mb bounds the memory."
            )


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySettings(_Checked):
    """Memory of the process and of the GPU. ``Settings(memory=MemorySettings(activation_mb=500))``."""

    keep_freed: bool = False
    """Whether the C library keeps freed memory for the next call, from then on and for the whole process."""
    cuda_allocator: str | None = None
    """Training: options of torch's allocator for GPUs, as ``PYTORCH_CUDA_ALLOC_CONF`` takes them, from then on and for the
    whole process. ``"expandable_segments:True"`` avoids fragmentation where the lengths of batches differ."""
    activation_mb: float | None = None
    """Training: most memory that a micro-batch may take above parameters, gradients and the optimizer's state, in MB (10**6
    bytes). Modules are chosen, by measurement on the first batch, whose activations are recomputed in the backward pass."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(_Checked):
    """The update of the parameters, in training. ``Settings(optimizer=OptimizerSettings(clip_norm=1.0))``."""

    implementation: Literal["loop", "foreach", "fused", "auto"] | None = None
    """Which of torch's implementations of the optimizer runs the update."""
    clip_norm: float | None = None
    """Largest norm of the gradient of all parameters, clipped once per update."""
    clip_value: float | None = None
    """Largest absolute value of each element of the gradient, clipped once per update, after ``clip_norm``."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Factor on the learning rate, which is chosen for updates from one batch of the loader: the batches per update, over
    ``data.accumulate`` and all processes, or the square root of their number."""
    nonfinite: Literal["raise", "skip", "stop", "ignore"] = "raise"
    """Action on a loss or gradient that is not finite: raise an error, skip the update, stop the run, or none.
    ``"ignore"`` does not check, which saves reading every gradient."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerSettings(_Checked):
    """How :func:`torch.compile` compiles, in training. ``Settings(compile=True, compiler=CompilerSettings(dynamic=True))``."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """What the compiler optimizes for; ``None`` is torch's default."""
    dynamic: bool | None = None
    """Whether code is made for all sizes at once, which avoids a compilation per size, or for each size. ``None`` makes it for
    the first size, and for all once a second one comes."""
    options: Mapping[str, bool | int | str] | None = None
    """Options of TorchInductor by name, as :func:`torch.compile` takes them, instead of ``mode``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is not None and self.options is not None:
            raise UsageError("compiler.mode and compiler.options both say what torch.compile optimizes for. Give one of them.")


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedSettings(_Checked):
    """Training on several processes. ``Settings(distributed=DistributedSettings(sharding="shard"))``."""

    communication: Literal["float16", "bfloat16", "powersgd"] | None = None
    """How gradients are compressed between processes."""
    bucket_mb: float | None = None
    """Most gradients that cross between processes at once, in MiB; ``None`` stands for 25."""
    sharding: Literal["replicate", "shard", "hybrid"] = "replicate"
    """Whether every process holds the whole model, a share of it (FSDP2), or a share within its host."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(_Checked):
    """How to run, apart from what the model is. ``None`` leaves the runtime's, or the user's, own choice.

    Fields of groups are named with a dot, such as ``precision.autocast``, in :meth:`value`, :meth:`replaced`, messages and the
    ``sets`` of passes. Where a field takes ``"auto"``, the Trainer measures the alternatives on the first batches and keeps
    what pays on this machine.
    """

    threads: int | None = None
    """Intra-operator threads."""
    device: str = "cpu"
    """Device that the model is trained on: ``"cuda"`` for a GPU. A model that is on a GPU already stays there."""
    memory_format: Literal["contiguous", "channels_last", "auto"] = "contiguous"
    """Layout of 4-D activations and weights."""
    compile: bool | Literal["auto"] = False
    """Training: whether the model runs through :func:`torch.compile`; ``auto`` weighs what compiling costs against the steps
    left."""
    attention: Literal["flash", "efficient", "cudnn", "math", "auto"] | None = None
    """Training: which implementation scaled dot-product attention uses, wherever that takes its inputs."""
    cudnn_benchmark: bool = False
    """Training: whether cuDNN times its algorithms for each new shape."""
    adjust: bool = False
    """Training: whether the workers of a ``Loader`` and the micro-batch are tuned while the run goes on, where its updates slow
    down."""
    target_ms: float | None = None
    """Training: with ``adjust``, the milliseconds per update that are aimed at; changes are tried while updates take longer."""
    precision: PrecisionSettings = dataclasses.field(default_factory=PrecisionSettings)
    """Precision of arithmetic."""
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    """How many examples a call and an update have."""
    memory: MemorySettings = dataclasses.field(default_factory=MemorySettings)
    """Memory of the process and of the GPU."""
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    """The update of the parameters."""
    compiler: CompilerSettings = dataclasses.field(default_factory=CompilerSettings)
    """Options of :func:`torch.compile`, in training."""
    distributed: DistributedSettings = dataclasses.field(default_factory=DistributedSettings)
    """Training on several processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads > MOST_THREADS:
            raise UsageError(f"Settings threads is {self.threads}; at most {MOST_THREADS} are started.")
        if self.target_ms is not None and not self.adjust:
            raise UsageError(f"Settings target_ms is {self.target_ms}, which adjust=True aims at. Give adjust=True too.")

    @classmethod
    def names(cls) -> list[str]:
        """Every field, those of groups as ``group.field``, such as ``precision.autocast``."""
        found: list[str] = []
        for name, hint in type_hints(cast(Any, cls)).items():
            group = [f"{name}.{field.name}" for field in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else []
            found += group or [name]
        return found

    def value(self, name: str) -> Any:
        """The field ``name``, such as ``"threads"`` or ``"precision.autocast"``."""
        return operator.attrgetter(name)(self)

    def replaced(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with ``changes``: names, such as ``"threads"`` or ``"precision.autocast"``, to values.

        Raises:
            UsageError: a name that is no field, or a value that its field does not take.
        """
        if unknown := sorted(changes.keys() - set(self.names())):
            raise UsageError(f"Settings has no field {unknown[0]!r}. It has: {', '.join(self.names())}.")
        groups: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            group, _, field = name.rpartition(".")
            groups.setdefault(group, {})[field] = value
        top = groups.pop("", {})
        return dataclasses.replace(
            self, **top, **{group: dataclasses.replace(self.value(group), **more) for group, more in groups.items()}
        )
